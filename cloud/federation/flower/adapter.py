"""Flower's strategies on our grid, and our algorithms as a Flower strategy (extra `[flower]`).

This is the only module of the cloud that imports flwr, and only the process of a strategy imports
it (`child.py`). A Flower `Strategy` calls a `StreamGrid`, which sends bytes through a given
function, so the same grid works over the session stream, in one process, or in a test. `TurnGrid`
passes on all messages of a turn at once. `Triplane` is a Flower strategy whose devices run a plan;
it works on our grid and under Flower's own SuperLink.

Flower keeps the run, the node and the task in process-wide variables, and its serialization is in a
private module. This module uses both; contract tests check them for flwr 1.41.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as WireMessage
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    FedAvg,
    Strategy,
)
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM, KEY_NORM_BIT
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from triplane.cloud.federation.flower.spec import check_shares
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core.learn import buffers
from triplane.unified_ir.federated.core.reduce import reduce
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime.plan import STATE

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms import Hyper

MAX_MESSAGE_BYTES: Final = 2**31 - 1
PLAN: Final = "plan"
PLAN_DIGEST: Final = "plan-digest"

ARRAYS: Final = "arrays"
METRICS: Final = "metrics"
Named = Mapping[str, np.ndarray[Any, Any]]
NORM_BIT: Final = KEY_NORM_BIT
"""Metric of a reply that adaptive clipping needs: whether the change was below the norm."""
Exchange = Callable[[Mapping[int, bytes], float | None], Mapping[int, bytes]]
"""(message by node, seconds to wait or None) -> reply by node, without nodes that do not answer."""


class StreamGrid(Grid):
    """A grid over any transport of bytes. nodes: returns the ids of the nodes that are present.

    Replies are in order of node ids, so a strategy that sums them in this order gives the same
    bits every time.
    """

    def __init__(self, nodes: Callable[[], Sequence[int]], exchange: Exchange, *, run: int) -> None:
        self._nodes, self._exchange = nodes, exchange
        self._run = Run.create_empty(run_id=run)
        self._replies: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1

    def set_run(self, run: Run) -> None:
        """See `Grid`."""
        self._run = run

    @property
    def run(self) -> Run:
        """See `Grid`."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See `Grid`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """See `Grid`."""
        return sorted(self._nodes())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages and wait for replies, which `pull_messages` then returns."""
        sent = list(messages)
        for reply in self.send_and_receive(sent):
            self._replies[reply.metadata.reply_to_message_id] = reply
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See `Grid`."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """See `Grid`. InvalidInput if two messages are for one node."""
        wanted: dict[int, bytes] = {}
        for message in messages:
            # Flower's own grids set this private field, too; replies refer to it.
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            node = message.metadata.dst_node_id
            if node in wanted:
                raise InvalidInput(f"a round sends one message to a node, node {node} has two")
            wanted[node] = message_to_proto(message).SerializeToString()
        replies = self._exchange(wanted, timeout) if wanted else {}
        return [message_of(replies[node]) for node in sorted(replies.keys() & wanted.keys())]


Turn = Callable[[Sequence[Message]], Sequence[Message]]
"""(messages of one turn, each for a different node) -> the replies that arrived."""


class TurnGrid(StreamGrid):
    """A grid that passes on the messages of a turn without serializing them. turn: see `Turn`."""

    def __init__(self, nodes: Callable[[], Sequence[int]], turn: Turn, *, run: int) -> None:
        super().__init__(nodes, lambda _wanted, _timeout: {}, run=run)
        self._turn = turn

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """See `Grid`; replies are in order of node ids."""
        del timeout  # the round's deadline is the run's
        replies = self._turn(list(messages))
        return sorted(replies, key=lambda reply: int(reply.metadata.src_node_id))


def constructor_of(name: str) -> Callable[..., Strategy]:
    """Return the constructor of the strategy that Flower ships under that name."""
    make: Callable[..., Strategy] = getattr(strategy, name)
    return make


def is_strategy(value: Any) -> bool:
    """Return whether the value is a Flower strategy."""
    return isinstance(value, Strategy)


def instruction(node: int, kind: str) -> Message:
    """Return an empty message, for which a reply can be made."""
    return Message(RecordDict({}), node, kind)


def reply_to(message: Message, arrays: Named | None, metrics: Mapping[str, Any]) -> Message:
    """Return the reply of a device without a `ClientApp`. arrays: None after an evaluation."""
    records: dict[str, Any] = {METRICS: MetricRecord(dict(metrics))}
    if arrays is not None:
        records[ARRAYS] = record_of(arrays)
    return Message(RecordDict(records), reply_to=message)


def arrays_in(message: Message) -> dict[str, ArrayRecord]:
    """Return the array records of a message by their keys."""
    return dict(message.content.array_records)


def sendable(message: Message, lease: str, shared: Named) -> bytes:
    """Return the bytes of a message for a device that has the shared state already.

    An empty record replaces arrays that are equal to that state. The message's id is the lease.
    """
    records = dict(message.content.items())
    for key, record in arrays_in(message).items():
        if same_arrays(named_arrays(record), shared):
            records[key] = ArrayRecord()
    about = message.metadata
    copy = Message(
        RecordDict(records), about.dst_node_id, about.message_type, ttl=about.ttl,
        group_id=about.group_id,
    )  # fmt: skip
    copy.metadata.__dict__["_message_id"] = lease
    return bytes(message_to_proto(copy).SerializeToString(deterministic=True))


def same_arrays(some: Named, others: Named) -> bool:
    """Return whether names and values are equal."""
    return some.keys() == others.keys() and all(
        np.array_equal(array, others[name]) for name, array in some.items()
    )


def reply_contents(data: bytes) -> tuple[dict[str, np.ndarray[Any, Any]] | None, dict[str, Any]]:
    """Return arrays and metrics of a device's reply; arrays is None if it has no such record.

    InvalidInput: the bytes are not a reply, the app failed, or there is more than one record of
    each.
    """
    message = message_of(data)
    if message.has_error():
        raise InvalidInput(f"the reply is an error: {message.error.reason}")
    arrays, metrics = arrays_in(message), message.content.metric_records
    if len(arrays) > 1 or len(metrics) != 1:
        raise InvalidInput(
            f"a reply holds one record of metrics and at most one of arrays, got {len(metrics)} "
            f"and {len(arrays)}"
        )
    try:
        arrays_of_records = [named_arrays(record) for record in arrays.values()]
    except Exception as error:  # numpy raises various errors for invalid bytes
        raise InvalidInput(f"the reply's arrays cannot be read: {error}") from error
    (metrics_record,) = metrics.values()
    return (arrays_of_records[0] if arrays_of_records else None), dict(metrics_record)


def no_settings() -> ConfigRecord:
    """Return the configuration with which `Strategy.start` begins a turn."""
    return ConfigRecord()


def settings_in(message: Message) -> dict[str, Any]:
    """Return the entries of all configuration records of a message, merged."""
    return {k: v for record in message.content.config_records.values() for k, v in record.items()}


@dataclass(frozen=True, slots=True)
class Clipping:
    """The clipping that a strategy requires: changes of `arrays` have at most the L2 norm `norm`.

    adaptive: the device's mod also reports whether the change was below the norm.
    """

    norm: float
    arrays: Named
    adaptive: bool


def clipping_of(message: Message, strategy: Strategy) -> Clipping | None:
    """Return the clipping that a message asks for, or None."""
    norm = settings_in(message).get(KEY_CLIPPING_NORM)
    if norm is None:
        return None
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for record in arrays_in(message).values():
        arrays |= named_arrays(record)
    adaptive = isinstance(strategy, DifferentialPrivacyClientSideAdaptiveClipping)
    return Clipping(float(norm), arrays, adaptive)


def message_of(data: bytes) -> Message:
    """Parse a Flower message. InvalidInput if the bytes are not one."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidInput(f"a Flower message has at most {MAX_MESSAGE_BYTES} bytes")
    try:
        return message_from_proto(WireMessage.FromString(data))
    except Exception as error:  # protobuf and flwr raise various errors
        raise InvalidInput(f"these bytes are not a Flower message: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sizes of a step's samples; see federation.proto."""

    steps: int = defaults.STEPS
    batch_size: int = defaults.BATCH_SIZE
    support: int = defaults.SUPPORT
    query: int = defaults.QUERY


class Triplane(FedAvg):
    """One of our algorithms as a Flower strategy; the devices run `triplane.device.flower`.

    plan: bytes of a plan file made by `algorithms.plan_of`. Messages carry the shared state by
    name, and replies carry its change. A node gets the plan with each message until it has
    answered once.
    """

    def __init__(
        self,
        name: str,
        plan: bytes,
        digest: str,
        *,
        hyper: Hyper | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        **flower: Any,
    ) -> None:
        # Imported here: a process that runs another strategy does not need the algorithms' graphs.
        from triplane.unified_ir.federated.algorithms import Hyper, algorithm

        check_shares(name)
        super().__init__(**flower)
        self._row, self._hyper = algorithm(name), hyper or Hyper()
        self._plan = record_of({PLAN: np.frombuffer(plan, np.uint8)})
        self._digest, self._buffers = digest, buffers(_roles_of(plan))
        self._work = {**asdict(sampling or Sampling()), "seed": seed}
        self._know: set[int] = set()
        self._state: dict[str, np.ndarray[Any, Any]] = {}
        self._slots: dict[str, np.ndarray[Any, Any]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See `Strategy`."""
        self._state = named_arrays(arrays)
        return self._with_work(super().configure_train(server_round, arrays, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See `Strategy`."""
        return self._with_work(super().configure_evaluate(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next shared state: our optimizer applied to the mean of the changes."""
        # Sums of floats depend on their order; by node id, the result does not depend on arrival.
        replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        valid, failed = self._check_and_log_replies(replies, is_train=True)
        self._remember(valid, failed)
        if not valid:
            return None, None
        updates = [_update(message, self.arrayrecord_key) for message in valid]
        state, self._slots = reduce(
            self._state,
            self._slots,
            updates,
            weighting=self._row.weighting,
            server=self._row.server,
            hyper=self._hyper,
            buffers=self._buffers,
        )
        metrics = self.train_metrics_aggr_fn([m.content for m in valid], self.weighted_by_key)
        return record_of(state), metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """See `Strategy`."""
        return super().aggregate_evaluate(server_round, list(replies))

    def _with_work(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages with the work added, and with the plan for nodes that lack it."""
        asked = []
        for message in messages:
            content = message.content
            config = ConfigRecord({**content[self.configrecord_key], **self._work})
            config[PLAN_DIGEST] = self._digest
            config["adapt-steps"] = self._hyper.inner_steps
            node = message.metadata.dst_node_id
            records = {
                self.arrayrecord_key: content[self.arrayrecord_key],
                self.configrecord_key: config,
            }
            if node not in self._know:
                records[PLAN] = self._plan
            asked.append(Message(RecordDict(records), node, message.metadata.message_type))
        return asked

    def _remember(self, valid: Sequence[Message], failed: Sequence[Message]) -> None:
        self._know |= {message.metadata.src_node_id for message in valid}
        # A node that failed may have lost its state, and the plan with it.
        self._know -= {message.metadata.src_node_id for message in failed}


def _roles_of(plan: bytes) -> dict[str, str]:
    file = Container(Path(PLAN), kind="plan", data=plan)
    return {tensor.name: tensor.role for tensor in file.manifest.tensors_of(STATE)}


def named_arrays(record: ArrayRecord) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a record by name."""
    return {name: array.numpy() for name, array in record.items()}


def record_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    """Return named arrays as a record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _update(message: Message, key: str) -> tuple[int, Callable[[], dict[str, Any]]]:
    examples = int(next(iter(message.content.metric_records.values()))["num-examples"])
    record = message.content[key]
    return examples, lambda: named_arrays(record)

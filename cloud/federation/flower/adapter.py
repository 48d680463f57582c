"""Flower's strategies on our grid, and our algorithms as a Flower strategy (extra `[flower]`).

The one module of the cloud that imports flwr, and only a strategy's own process imports this one
(`child.py`). `StreamGrid` is what a Flower `Strategy` calls; what carries its messages is given
to it, so the same grid runs over the session stream, in one process, or under a test; `TurnGrid`
hands over whole turns. `Triplane` is a Flower strategy whose devices run a plan: it works on our
grid and under Flower's own SuperLink alike.

Flower keeps the run, the node and the task in process-wide variables, and its wire form is in a
private module; both are used here and held by the contract tests, for flwr 1.41.
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
"""(message by node, seconds to wait or None) -> reply by node; who does not answer is left out."""


class StreamGrid(Grid):
    """A grid over any way to carry bytes. nodes: ids of those that are there, asked each time.

    Replies come in order of node ids, so a strategy that sums them as they come gives the same
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
        """Send and wait; `pull_messages` then gives the replies."""
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
        """See `Grid`. InvalidInput where two messages are for one node."""
        wanted: dict[int, bytes] = {}
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            node = message.metadata.dst_node_id
            if node in wanted:
                raise InvalidInput(f"a round sends one message to a node, node {node} has two")
            wanted[node] = message_to_proto(message).SerializeToString()
        replies = self._exchange(wanted, timeout) if wanted else {}
        return [message_of(replies[node]) for node in sorted(replies.keys() & wanted.keys())]


Turn = Callable[[Sequence[Message]], Sequence[Message]]
"""Messages of one turn, each for another node -> the replies there are."""


class TurnGrid(StreamGrid):
    """A grid that hands the messages of a turn over as they are. turn: see `Turn`."""

    def __init__(self, nodes: Callable[[], Sequence[int]], turn: Turn, *, run: int) -> None:
        super().__init__(nodes, lambda _wanted, _timeout: {}, run=run)
        self._turn = turn

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """See `Grid`; replies come in order of node ids."""
        del timeout  # the round's deadline is the run's
        replies = self._turn(list(messages))
        return sorted(replies, key=lambda reply: int(reply.metadata.src_node_id))


def constructor_of(name: str) -> Callable[..., Strategy]:
    """Return the constructor of the strategy that Flower ships under that name."""
    make: Callable[..., Strategy] = getattr(strategy, name)
    return make


def is_strategy(value: Any) -> bool:
    """Whether it is one of Flower's kind."""
    return isinstance(value, Strategy)


def instruction(node: int, kind: str) -> Message:
    """An empty message, to make a reply for."""
    return Message(RecordDict({}), node, kind)


def reply_to(message: Message, arrays: Named | None, metrics: Mapping[str, Any]) -> Message:
    """Return the reply of a device without a `ClientApp`. arrays: absent after evaluation."""
    records: dict[str, Any] = {METRICS: MetricRecord(dict(metrics))}
    if arrays is not None:
        records[ARRAYS] = record_of(arrays)
    return Message(RecordDict(records), reply_to=message)


def arrays_in(message: Message) -> dict[str, ArrayRecord]:
    """Records of arrays in a message, by their keys."""
    return dict(message.content.array_records)


def sendable(message: Message, lease: str, shared: Named) -> bytes:
    """A message's bytes for a device that has the shared state already.

    An empty record stands for arrays that are that state. The message's id is the lease.
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
    """Whether names and values are equal."""
    return some.keys() == others.keys() and all(
        np.array_equal(array, others[name]) for name, array in some.items()
    )


def reply_contents(data: bytes) -> tuple[dict[str, np.ndarray[Any, Any]] | None, dict[str, Any]]:
    """(arrays, metrics) of a device's reply: its one record of each, arrays None where it has none.

    InvalidInput: these are no bytes of a reply, it says that the app failed, or has more records.
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
    except Exception as error:  # whatever numpy stumbles over
        raise InvalidInput(f"the reply's arrays cannot be read: {error}") from error
    (metrics_record,) = metrics.values()
    return (arrays_of_records[0] if arrays_of_records else None), dict(metrics_record)


def no_settings() -> ConfigRecord:
    """The arguments with which `Strategy.start` begins a turn."""
    return ConfigRecord()


def settings_in(message: Message) -> dict[str, Any]:
    """Everything that the message's records of configuration say, together."""
    return {k: v for record in message.content.config_records.values() for k, v in record.items()}


@dataclass(frozen=True, slots=True)
class Clipping:
    """Clipping that a strategy asks of devices: their change of `arrays` to the L2 norm `norm`.

    adaptive: by the mod that also tells whether there was anything to clip.
    """

    norm: float
    arrays: Named
    adaptive: bool


def clipping_of(message: Message, strategy: Strategy) -> Clipping | None:
    """None where the message asks for no clipping."""
    norm = settings_in(message).get(KEY_CLIPPING_NORM)
    if norm is None:
        return None
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for record in arrays_in(message).values():
        arrays |= named_arrays(record)
    adaptive = isinstance(strategy, DifferentialPrivacyClientSideAdaptiveClipping)
    return Clipping(float(norm), arrays, adaptive)


def message_of(data: bytes) -> Message:
    """A Flower message of its bytes. InvalidInput where they are none."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidInput(f"a Flower message has at most {MAX_MESSAGE_BYTES} bytes")
    try:
        return message_from_proto(WireMessage.FromString(data))
    except Exception as error:  # whatever protobuf or flwr stumbles over
        raise InvalidInput(f"these bytes are no Flower message: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Samples of a step; see federation.proto."""

    steps: int = defaults.STEPS
    batch_size: int = defaults.BATCH_SIZE
    support: int = defaults.SUPPORT
    query: int = defaults.QUERY


class Triplane(FedAvg):
    """One of our algorithms as a Flower strategy; the devices run `triplane.device.flower`.

    plan: bytes of a plan file made by `algorithms.plan_of`. Arrays are the shared state by name,
    replies its change. A node gets the plan with each message until it has answered once.
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
        # Here, because a strategy's own process needs none of the graphs that come with it.
        from triplane.unified_ir.federated.algorithms import Hyper, algorithm

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
        """The next shared state: the mean of changes in order of node ids, then our optimizer."""
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
        """The messages with our work in them, and the plan for those that have not got it."""
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
        self._know -= {message.metadata.src_node_id for message in failed}


def _roles_of(plan: bytes) -> dict[str, str]:
    file = Container(Path(PLAN), kind="plan", data=plan)
    return {tensor.name: tensor.role for tensor in file.manifest.tensors_of(STATE)}


def named_arrays(record: ArrayRecord) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a record by name."""
    return {name: array.numpy() for name, array in record.items()}


def record_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    """Named arrays as a record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _update(message: Message, key: str) -> tuple[int, Callable[[], dict[str, Any]]]:
    examples = int(next(iter(message.content.metric_records.values()))["num-examples"])
    record = message.content[key]
    return examples, lambda: named_arrays(record)

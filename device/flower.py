"""Our device's work as a Flower `ClientApp`, and any `ClientApp` on our device (extra `[flower]`).

The one module of the device that imports flwr. `client_app` runs the plan that the strategy
`triplane.cloud.federation.flower.Triplane` sends, with the mathematics of `federated.core`, so
Flower's SuperNodes can take part in our algorithms. `answer` passes a Flower message to a
`ClientApp` and returns the reply's bytes, so our devices can take part in any Flower strategy;
`app_reply` does this for a task of the cloud. The app is code that the device's owner has chosen.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as WireMessage
from flwr.proto.recorddict_pb2 import RecordDict as WireRecords
from flwr.supercore.task_identity import TaskIdentity

from triplane.device.dataset_shard import shard_for
from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.federated.core.learn import Shard, Work, evaluate, learn
from triplane.unified_ir.runtime import Plan, SessionOptions

logger = logging.getLogger(__name__)

PLAN: Final = "plan"
PLAN_DIGEST: Final = "plan-digest"
ARRAYS: Final = "arrays"
CONFIG: Final = "config"
STORED_PLAN: Final = "triplane.plan"
"""Key in a node's state under which the plan is kept between rounds."""
FAILED: Final = 100
"""Error code of a reply that says why there is no result; Flower reserves lower codes."""


def client_app(shard: Callable[[Context], Shard]) -> ClientApp:
    """Return a `ClientApp` that learns on `shard(context)`.

    Messages: arrays (the shared state by name), config (the work), and the plan until the node has
    it. A training reply is the change, `num-examples` and `loss`; an evaluation reply
    `num-examples`, `before` and `after`.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        plan, work = _begin(message, context)
        learned = learn(plan, work, shard_for(plan, shard(context)))
        metrics = {"num-examples": learned.examples, "loss": learned.loss}
        return _reply(
            message, metrics, ArrayRecord({k: Array(v) for k, v in learned.change.items()})
        )

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        plan, work = _begin(message, context)
        steps = int(message.content[CONFIG]["adapt-steps"])
        score = evaluate(plan, work, shard_for(plan, shard(context)), steps=steps)
        metrics = {"num-examples": score.samples, "before": score.before, "after": score.after}
        return _reply(message, metrics)

    return app


def answer(app: ClientApp, data: bytes, context: Context) -> bytes:
    """Return the reply of `app` to a serialized message; an exception becomes an error reply."""
    message = _message(data, context)
    try:
        reply = app(message, context)
    except Exception as error:  # noqa: BLE001 - any error of the user's app is its reply
        logger.warning("app failed", extra={"reason": str(error)})
        reply = Message(Error(FAILED, f"{type(error).__name__}: {error}"), reply_to=message)
    return bytes(message_to_proto(reply).SerializeToString())


@dataclass(frozen=True, slots=True)
class AppReply:
    """A reply's bytes, the app's state until the next message, and metrics of the reply."""

    reply: bytes
    kept: bytes
    examples: int
    loss: float


def app_reply(
    app: ClientApp,
    message: bytes,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    kept: bytes,
    *,
    run: str,
    device: str,
) -> AppReply:
    """Return the app's answer to a message of the cloud, whose empty records stand for `arrays`.

    kept: its `context.state` after its newest reply in this run that counted. InvalidInput: it
    raised an error or replied with one.
    """
    context = Context(
        # 63 bits: parts of Flower convert ids to signed 64-bit integers.
        run_id=int(run, 16) >> 1,
        node_id=_number(device),
        node_config={"device": device},
        state=recorddict_from_proto(WireRecords.FromString(kept)) if kept else RecordDict(),
        run_config={},
    )
    asked = _message(message, context)
    for key, record in asked.content.array_records.items():
        # Empty records stand for the shared state, which the device has already as a verified blob.
        if not record:
            asked.content[key] = ArrayRecord({n: Array(np.array(x)) for n, x in arrays.items()})
    try:
        reply = app(asked, context)
    except Exception as error:
        raise InvalidInput(f"the ClientApp raised {type(error).__name__}: {error}") from error
    if reply.has_error():
        raise InvalidInput(f"the ClientApp replied with an error: {reply.error.reason}")
    metrics = {k: v for record in reply.content.metric_records.values() for k, v in record.items()}
    examples, loss = metrics.get("num-examples"), metrics.get("loss")
    return AppReply(
        bytes(message_to_proto(reply).SerializeToString()),
        bytes(recorddict_to_proto(context.state).SerializeToString()),
        examples if isinstance(examples, int) else 0,
        float(loss) if isinstance(loss, int | float) else math.nan,
    )


def load_app(name: str) -> ClientApp:
    """Load the `ClientApp` at "module:attribute" or "path/to/file.py:attribute".

    Modules in the current folder are found, too, as by `python -m`. NotFound, InvalidInput.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise InvalidInput(f"an app is named MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE, got {name!r}")
    app = getattr(_module(where), attribute, None)
    if not isinstance(app, ClientApp):
        raise InvalidInput(f"{attribute!r} of {where} is not a ClientApp but {type(app).__name__}")
    return app


def _module(where: str) -> Any:
    try:
        if not where.endswith(".py"):
            sys.path[:0] = [] if "" in sys.path else [""]
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, FileNotFoundError) as error:
        raise NotFound(f"no app at {where!r}: {error}") from error
    else:
        return module


def _number(device: str) -> int:
    """Return a number that is always the same for a device."""
    return int.from_bytes(hashlib.sha256(device.encode()).digest()[:8]) >> 1


def _message(data: bytes, context: Context) -> Message:
    """Parse a message, and enter the context in Flower's process-wide variables."""
    # flwr reads these when a message is made, such as the reply; only its SuperNode sets them.
    identity = TaskIdentity
    identity.run_id, identity.node_id, identity.task_id = context.run_id, context.node_id, 1
    try:
        return message_from_proto(WireMessage.FromString(data))
    except Exception as error:  # protobuf and flwr raise various errors
        raise InvalidInput(f"these bytes are not a Flower message: {error}") from error


def _begin(message: Message, context: Context) -> tuple[Plan, Work]:
    """Return the plan with the shared state, and the work to do."""
    config = message.content[CONFIG]
    plan = _plan(message, context, str(config[PLAN_DIGEST]))
    plan.assign({name: array.numpy() for name, array in message.content[ARRAYS].items()})
    work = Work(
        run=str(context.run_id),
        round=int(config["server-round"]),
        device=str(context.node_config.get("partition-id", context.node_id)),
        **{n: int(config[n]) for n in ("seed", "steps", "batch_size", "support", "query")},
    )
    return plan, work


def _plan(message: Message, context: Context, digest: str) -> Plan:
    if PLAN in message.content.array_records:
        # Kept in the node's state, so that the strategy sends the plan once for each node.
        context.state[STORED_PLAN] = message.content[PLAN]
    if STORED_PLAN not in context.state.array_records:
        raise InvalidInput("this node does not have the plan yet; the strategy sends it again")
    record: Any = context.state[STORED_PLAN]
    data = record[PLAN].numpy().astype(np.uint8, copy=False).tobytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.plan"
        path.write_bytes(data)
        return Plan.load(path, expected_digest=digest, options=SessionOptions(threads=1))


def _reply(message: Message, metrics: dict[str, Any], arrays: ArrayRecord | None = None) -> Message:
    records: dict[str, Any] = {"metrics": MetricRecord(metrics)}
    if arrays is not None:
        records[ARRAYS] = arrays
    return Message(RecordDict(records), reply_to=message)

"""Our device's work as a Flower `ClientApp`, and any `ClientApp` on our device (extra `[flower]`).

The one module of the device that imports flwr. `client_app` runs the plan that the strategy
`triplane.cloud.federation.flower.Triplane` sends, with the mathematics of `federated.core`, so a
fleet of Flower's SuperNodes takes part in our algorithms. `answer` runs a Flower message through a
`ClientApp` and gives the reply's bytes, so a fleet of ours takes part in any Flower strategy.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
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
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as WireMessage
from flwr.supercore.task_identity import TaskIdentity

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.learn import Shard, Work, evaluate, learn
from triplane.unified_ir.runtime import Plan, SessionOptions

logger = logging.getLogger(__name__)

PLAN: Final = "plan"
PLAN_DIGEST: Final = "plan-digest"
ARRAYS: Final = "arrays"
CONFIG: Final = "config"
KEPT: Final = "triplane.plan"
"""Where a node's own state keeps the plan between rounds."""
FAILED: Final = 100
"""Code of a reply that says why there is no result; Flower reserves those below."""


def client_app(shard: Callable[[Context], Shard]) -> ClientApp:
    """A `ClientApp` that learns on `shard(context)`.

    Messages: arrays (the shared state by name), config (the work), and the plan until the node has
    it. A training reply is the change, `num-examples` and `loss`; an evaluation reply
    `num-examples`, `before` and `after`.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        plan, work = _begin(message, context)
        found = learn(plan, work, shard(context))
        metrics = {"num-examples": found.examples, "loss": found.loss}
        return _reply(message, metrics, ArrayRecord({k: Array(v) for k, v in found.change.items()}))

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        plan, work = _begin(message, context)
        steps = int(message.content[CONFIG]["adapt-steps"])
        found = evaluate(plan, work, shard(context), steps=steps)
        metrics = {"num-examples": found.samples, "before": found.before, "after": found.after}
        return _reply(message, metrics)

    return app


def answer(app: ClientApp, data: bytes, context: Context) -> bytes:
    """The reply of `app` to a serialized Flower message; what it raises becomes an error reply."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = (
        context.run_id, context.node_id, 1,
    )  # fmt: skip
    try:
        message = message_from_proto(WireMessage.FromString(data))
    except Exception as error:  # whatever protobuf or flwr stumbles over
        raise InvalidInput(f"these bytes are no Flower message: {error}") from error
    try:
        reply = app(message, context)
    except Exception as error:  # noqa: BLE001 - the user's app; its fault is told, the device lives on
        logger.warning("app failed", extra={"reason": str(error)})
        reply = Message(Error(FAILED, f"{type(error).__name__}: {error}"), reply_to=message)
    return bytes(message_to_proto(reply).SerializeToString())


def _begin(message: Message, context: Context) -> tuple[Plan, Work]:
    """The plan at the shared state, and what to do with it."""
    config = message.content[CONFIG]
    plan = _plan(message, context, str(config[PLAN_DIGEST]))
    plan.assign({name: array.numpy() for name, array in message.content[ARRAYS].items()})
    work = Work(
        run=str(context.run_id),
        round=int(config["server-round"]),
        device=str(context.node_config.get("partition-id", context.node_id)),
        seed=int(config["seed"]),
        steps=int(config["steps"]),
        batch_size=int(config["batch_size"]),
        support=int(config["support"]),
        query=int(config["query"]),
    )
    return plan, work


def _plan(message: Message, context: Context, digest: str) -> Plan:
    if PLAN in message.content.array_records:
        context.state[KEPT] = message.content[PLAN]
    if KEPT not in context.state.array_records:
        raise InvalidInput("this node has not got the plan yet; the strategy sends it again")
    record: Any = context.state[KEPT]
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

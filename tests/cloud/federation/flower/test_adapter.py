"""Flower's strategies on our grid, and ours beside theirs; skipped where flwr is not installed."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra [flower]")

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

from triplane.cloud.federation.flower.adapter import (
    Sampling,
    StreamGrid,
    Triplane,
    named_arrays,
    record_of,
)
from triplane.device.flower import answer, client_app
from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data, nn, ops, optim, train
from triplane.unified_ir.federated.algorithms import Hyper, algorithm, plan_of
from triplane.unified_ir.federated.core.learn import Shard, Work, learn
from triplane.unified_ir.federated.core.reduce import SGD, reduce
from triplane.unified_ir.runtime import Plan, SessionOptions

NODES = (11, 12, 13, 14, 15)
START = {"w": np.zeros((2, 3), np.float32), "b": np.ones(2, np.float32)}
SAMPLES = {11: 10, 12: 20, 13: 30, 14: 40, 15: 50}

logging.getLogger("flwr").setLevel(logging.ERROR)


def context(node):
    return Context(
        run_id=1, node_id=node, node_config={"partition-id": node}, state=RecordDict(),
        run_config={},
    )  # fmt: skip


def grid(app, *, silent=(), nodes=NODES):
    """Nodes that answer in this process; those that are silent never do."""
    contexts = {node: context(node) for node in nodes}

    def exchange(wanted, timeout):
        return {
            node: answer(app, data, contexts[node])
            for node, data in wanted.items()
            if node not in silent
        }

    return StreamGrid(lambda: list(nodes), exchange, run=1)


def moving_app():
    """A client that moves every array by its node's number and says how much it learned from."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = {
            k: v.numpy() + np.asarray(context.node_id / 100, v.numpy().dtype)
            for k, v in message.content["arrays"].items()
        }
        return reply(message, context, arrays)

    @app.evaluate()
    def evaluate(message, context):
        return reply(message, context, None)

    @app.query()
    def query(message, context):
        return reply(message, context, None)

    def reply(message, context, arrays):
        metrics = MetricRecord(
            {"num-examples": SAMPLES[context.node_id], "loss": 0.5, "train_loss": 0.5,
             "norm_bit": 1}
        )  # fmt: skip
        records = {"metrics": metrics}
        if arrays is not None:
            records["arrays"] = record_of(arrays)
        return Message(RecordDict(records), reply_to=message)

    return app


def wrapped(name, **options):
    inner = flower.FedAvg(min_train_nodes=5, min_evaluate_nodes=5, min_available_nodes=5)
    return getattr(flower, name)(inner, num_sampled_clients=5, **options)


FIVE = {"min_train_nodes": 5, "min_evaluate_nodes": 5, "min_available_nodes": 5}
# Every strategy that flwr ships, and how it is made for five nodes.
MADE = {
    "Bulyan": lambda: flower.Bulyan(num_malicious_nodes=0, **FIVE),
    "DifferentialPrivacyClientSideAdaptiveClipping": lambda: wrapped(
        "DifferentialPrivacyClientSideAdaptiveClipping", noise_multiplier=0.1
    ),
    "DifferentialPrivacyClientSideFixedClipping": lambda: wrapped(
        "DifferentialPrivacyClientSideFixedClipping", noise_multiplier=0.1, clipping_norm=1.0
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": lambda: wrapped(
        "DifferentialPrivacyServerSideAdaptiveClipping", noise_multiplier=0.1
    ),
    "DifferentialPrivacyServerSideFixedClipping": lambda: wrapped(
        "DifferentialPrivacyServerSideFixedClipping", noise_multiplier=0.1, clipping_norm=1.0
    ),
    "FedAdagrad": lambda: flower.FedAdagrad(**FIVE),
    "FedAdam": lambda: flower.FedAdam(**FIVE),
    "FedAvg": lambda: flower.FedAvg(**FIVE),
    "FedAvgM": lambda: flower.FedAvgM(**FIVE),
    "FedMedian": lambda: flower.FedMedian(**FIVE),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1, **FIVE),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(**FIVE),
    "FedYogi": lambda: flower.FedYogi(**FIVE),
    "Krum": lambda: flower.Krum(num_malicious_nodes=1, **FIVE),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2, **FIVE),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1, **FIVE),
}
NEEDS = {
    "FedXgbBagging": "trees of xgboost in the arrays",
    "FedXgbCyclic": "trees of xgboost in the arrays",
}
NO_STRATEGIES = {"Result", "Strategy"}


def test_every_strategy_of_flower_is_listed():
    assert {*MADE, *NEEDS, *NO_STRATEGIES} == set(flower.__all__)


@pytest.mark.parametrize("name", MADE)
def test_strategy_runs_on_our_grid(name):
    arrays = record_of(START)
    result = MADE[name]().start(grid(moving_app()), arrays, num_rounds=2)
    found = named_arrays(result.arrays)
    assert found.keys() == START.keys()
    for key, value in found.items():
        assert value.shape == START[key].shape
        assert np.isfinite(value).all()
        assert not np.array_equal(value, START[key])


def test_their_mean_is_ours():
    arrays = record_of(START)
    theirs = named_arrays(flower.FedAvg(**FIVE).start(grid(moving_app()), arrays, 1).arrays)
    updates = [
        (SAMPLES[n], lambda n=n: {k: np.full_like(v, n / 100) for k, v in START.items()})
        for n in NODES
    ]
    ours, _ = reduce(START, {}, updates, weighting="examples", server=SGD, hyper=Hyper())
    for key in START:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-6)


def test_node_that_stays_silent_is_left_out():
    arrays = record_of(START)
    result = flower.FedAvg(**FIVE).start(grid(moving_app(), silent={15}), arrays, 1)
    rest = sum(n / 100 * SAMPLES[n] for n in NODES[:4]) / sum(SAMPLES[n] for n in NODES[:4])
    np.testing.assert_allclose(named_arrays(result.arrays)["w"], rest, rtol=1e-5)


def test_app_that_raises_is_an_error_reply_and_no_crash():
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise OSError("the camera is unplugged")

    asked = Message(RecordDict({}), 11, "train")
    (reply,) = grid(app, nodes=(11,)).send_and_receive([asked])
    assert reply.has_error()
    assert "the camera is unplugged" in reply.error.reason


def test_messages_pushed_are_pulled_by_their_ids():
    ours = grid(moving_app())
    content = RecordDict({"arrays": record_of({"w": START["w"]}),
                          "config": ConfigRecord({})})  # fmt: skip
    ids = list(ours.push_messages([Message(content, n, "train") for n in NODES[:2]]))
    assert len(ids) == 2
    assert [m.metadata.src_node_id for m in ours.pull_messages(ids)] == [*NODES[:2]]
    assert list(ours.pull_messages(ids)) == []


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(InvalidInput, match="not a Flower message"):
        answer(ClientApp(), b"\xff" * 40, context(11))


def test_two_messages_for_one_node_are_refused():
    ours = grid(moving_app())
    two = [Message(RecordDict({}), 11, "train") for _ in range(2)]
    with pytest.raises(InvalidInput, match="node 11 has two"):
        ours.send_and_receive(two)


class Digits(nn.Cell):
    def __init__(self):
        super().__init__()
        self.head = nn.Dense(64, 10)

    def construct(self, x):
        return self.head(ops.flatten(x))


@pytest.fixture(scope="module")
def module():
    nn.seed(0)
    trainer = train.Trainer(Digits(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    digits = data.digits()
    trainer.prepare(digits.x, digits.y)
    return trainer.export(entries=("loss", "evaluate", "predict"))


def shard(node):
    digits = data.digits().select(np.arange(30) + 30 * (node - 11))
    return Shard({"x": digits.x[:20], "y": digits.y[:20]}, {"x": digits.x[20:], "y": digits.y[20:]})


def test_an_algorithm_whose_changes_count_by_share_is_no_strategy():
    with pytest.raises(InvalidInput, match="scaffold does not run with a strategy"):
        Triplane("scaffold", b"", "")


@pytest.mark.parametrize("name", ["fedavg", "maml"])
def test_our_algorithm_as_a_flower_strategy_gives_the_bits_of_our_own_round(name, module, tmp_path):
    hyper, sampling = Hyper(inner_steps=1), Sampling(steps=2, batch_size=4, support=4, query=4)
    made = plan_of(module, name, hyper, tmp_path / "run.plan")
    ours = dict(made.state)
    slots: dict[str, Any] = {}
    for number in (1, 2):
        updates = []
        for node in NODES[:3]:
            plan = Plan.load(tmp_path / "run.plan", options=SessionOptions(threads=1))
            plan.assign(ours)
            work = Work(
                run="1", round=number, device=str(node), seed=5, steps=2, batch_size=4,
                support=4, query=4,
            )  # fmt: skip
            found = learn(plan, work, shard(node))
            updates.append((found.examples, lambda change=found.change: change))
        row = algorithm(name)
        ours, slots = reduce(
            ours, slots, updates, weighting=row.weighting, server=row.server, hyper=hyper
        )
    strategy = Triplane(
        name, (tmp_path / "run.plan").read_bytes(), made.digest, hyper=hyper, sampling=sampling,
        seed=5, min_train_nodes=3, min_evaluate_nodes=3, min_available_nodes=3,
    )  # fmt: skip
    app = client_app(lambda context: shard(int(context.node_config["partition-id"])))
    arrays = record_of(made.state)
    result = strategy.start(grid(app, nodes=NODES[:3]), arrays, num_rounds=2)
    for key, value in named_arrays(result.arrays).items():
        np.testing.assert_array_equal(value, ours[key], err_msg=key)
    scores = result.evaluate_metrics_clientapp[2]
    assert 0 <= scores["before"] <= 1
    assert 0 <= scores["after"] <= 1
    json.dumps({k: float(v) for k, v in scores.items()})

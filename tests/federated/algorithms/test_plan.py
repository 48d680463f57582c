"""Plans of runs and modules of their results: roles, what stays at home, refusals."""

import json
from functools import cache

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.federated.algorithms import (
    ALGORITHMS,
    MAX_INNER_STEPS,
    Hyper,
    defaults,
    module_of,
    plan_of,
)
from triplane.unified_ir.federated.algorithms.table import _ROWS, _table
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.reduce import WEIGHTINGS
from triplane.unified_ir.ir import Module, Role, StateTensor
from triplane.unified_ir.ir.module import read
from triplane.unified_ir.runtime import Plan

from .given import HYPER, call, exported

NAMES = sorted(ALGORITHMS)
META = sorted(name for name, row in ALGORITHMS.items() if row.episodes)
STEPS = [pytest.param(name, marks=pytest.mark.slow) if name in META else name for name in NAMES]
"""Three inner steps with dropout are long graphs."""


class Mixed(nn.Cell):
    """Trained, frozen and personal parameters, a random key."""

    def __init__(self):
        super().__init__()
        self.body = nn.Dense(4, 6)
        self.fixed = nn.Parameter(np.full(6, 0.5, np.float32), trainable=False)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Dense(6, 3)
        self.own = nn.Personal(np.full(3, 0.25, np.float32))

    def construct(self, x):
        return self.head(self.drop(ops.relu(self.body(x)) * self.fixed)) + self.own


class Normed(nn.Cell):
    """Statistics of batches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Dense(4, 3)

    def construct(self, x):
        return self.head(self.norm(x))


@cache
def mixed():
    nn.seed(2)
    return exported(Mixed(), (4,))


def batch(n=8, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((n, 4)).astype(np.float32), "y": rng.integers(0, 3, n)}


def fed(plan, entry="local_update"):
    parts = {"": batch(8), "support.": batch(6), "query.": batch(5, 1)}
    every = {f"{prefix}{k}": v for prefix, found in parts.items() for k, v in found.items()}
    return {tensor.name: every[tensor.name] for tensor in plan.inputs(entry)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Plans of the mixed model, each made once: unrolled dropout makes long graphs."""
    folder = tmp_path_factory.mktemp("plans")

    @cache
    def make(name):
        return plan_of(mixed(), name, HYPER, folder / f"{name}.plan"), folder / f"{name}.plan"

    def load(name):
        made, path = make(name)
        return made, Plan.load(path, expected_digest=made.digest)

    return load


def planned(tmp_path, name, module=None, hyper=HYPER):
    made = plan_of(module or mixed(), name, hyper, tmp_path / "a.plan", digest="ab" * 32)
    return made, Plan.load(tmp_path / "a.plan", expected_digest=made.digest)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_moves_what_is_trained_and_nothing_else(kept, name):
    _, plan = kept(name)
    before = plan.state()
    plan.run("local_update", fed(plan))
    after = plan.state()
    moved = {k for k in before if not np.array_equal(before[k], after[k])}
    moved -= {k for k in moved if k.startswith(("scaffold.", "control", "own_control."))}
    rates = {k for k in before if k.startswith("rate.")}
    trained = {"body.weight", "body.bias", "head.weight", "head.bias", "own"}
    assert moved - rates == trained | {"drop.key"}
    assert rates == ({f"rate.{k}" for k in trained} if name == "meta-sgd" else set())
    assert moved >= rates


@pytest.mark.parametrize("name", NAMES)
def test_adaptation_moves_the_same_and_leaves_rates(kept, name):
    _, plan = kept(name)
    before = plan.state()
    losses = plan.adapt([batch()])
    after = plan.state()
    moved = {k for k in before if not np.array_equal(before[k], after[k])}
    assert len(losses) == HYPER.inner_steps
    assert moved == {"body.weight", "body.bias", "head.weight", "head.bias", "own", "drop.key"}


def test_a_score_weighs_batches_by_the_labels_that_count(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 4)).astype(np.float32), rng.integers(0, 3, 12)
    y[:5] = 1
    nn.seed(3)
    loss = nn.SoftmaxCrossEntropy(ignore_index=1)
    trainer = train.Trainer(nn.Dense(4, 3), loss=loss, optimizer=optim.SGD(0.1))
    trainer.prepare(x, y)
    path = tmp_path / "a.plan"
    plan_of(trainer.export(("predict", "evaluate", "loss")), "fedavg", HYPER, path)
    kept = y != 1
    hits = trainer.predict(x).argmax(1) == y
    for rows in (12, 4, 1):
        monkeypatch.setattr(learn, "EVALUATE_ROWS", rows)
        shard = learn.Shard({"x": x, "y": y}, {"x": x, "y": y})
        assert learn.score(Plan.load(path), shard) == pytest.approx(hits[kept].mean())
    none = learn.Shard({"x": x, "y": y}, {"x": x[:5], "y": y[:5]})
    with pytest.raises(InvalidInput, match="no held-out label counts in the accuracy"):
        learn.score(Plan.load(path), none)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shared_leaves_out_the_personal_and_the_keys(kept, name):
    made, plan = kept(name)
    assert plan.roles == made.roles
    assert {plan.roles[k] for k in made.state} <= {"parameter", "buffer"}
    assert not any(k.startswith(("hyper.", "anchor.")) for k in made.state)
    assert "own" not in made.state
    assert "fixed" in made.state
    assert plan.state("personal")["own"].tolist() == [0.25, 0.25, 0.25]


def test_what_was_learned_of_a_personal_tensor_is_in_no_plan_and_no_model_file(tmp_path):
    cell = Mixed()
    cell.own.array = np.array([1.5, 2.5, 3.5], np.float32)  # as training leaves it
    made = exported(cell, (4,))
    plan_of(made, "fedavg", HYPER, tmp_path / "a.plan")
    made.save(tmp_path / "a.tpm")
    for file in (tmp_path / "a.plan", tmp_path / "a.tpm"):
        assert cell.own.array.tobytes() not in file.read_bytes()
    plan, back = Plan.load(tmp_path / "a.plan"), read(tmp_path / "a.tpm")
    for own in (plan.state("personal")["own"], back.state["own"].array):
        assert own.tolist() == [0.25, 0.25, 0.25]


def test_the_same_arguments_give_the_same_plan(tmp_path):
    digests = {planned(tmp_path, "fedprox")[0].digest for _ in range(2)}
    assert len(digests) == 1
    assert planned(tmp_path, "fedprox", hyper=Hyper(lr=0.1))[0].digest not in digests


@pytest.mark.slow
def test_support_and_query_have_sizes_of_their_own(kept):
    _, plan = kept("maml")
    shapes = {t.name: str(t.shape[0]) for t in plan.inputs("local_update")}
    assert shapes["support.x"] == shapes["support.y"] != shapes["query.x"] == shapes["query.y"]


def test_personal_and_frozen_tensors_are_not_pulled_to_the_rounds_start(kept):
    anchors = {k for k in kept("fedprox")[1].roles if k.startswith("anchor.")}
    paths = ("body.weight", "body.bias", "head.weight", "head.bias")
    assert anchors == {f"anchor.{k}" for k in paths}


def test_rates_are_state_that_one_plan_takes_any_of(tmp_path):
    _, plan = planned(tmp_path, "fedavg")
    given = {**batch()}
    start = plan.state()
    moves = []
    for rate in (0.1, 0.2):
        plan.assign({**start, "hyper.lr": np.asarray(rate, np.float32)})
        plan.run("adapt", given)
        moves.append(plan.state()["head.bias"] - start["head.bias"])
    np.testing.assert_allclose(moves[1], 2 * moves[0], rtol=1e-5)


@pytest.mark.slow
def test_each_inner_step_and_the_query_draw_anew(kept):
    """The key moves on once for each time the loss is computed."""
    _, plan = kept("maml")
    given = {k: t.array for k, t in mixed().state.items()}
    plan.assign({"drop.key": given["drop.key"]})
    plan.run("local_update", fed(plan))
    for _ in range(HYPER.inner_steps + 1):
        given |= call(mixed().entry("loss"), {**given, **batch()}, on="onnx")
    assert np.array_equal(plan.state()["drop.key"], given["drop.key"])


@pytest.mark.parametrize("name", META)
def test_a_meta_step_refuses_statistics_of_batches_by_name(tmp_path, name):
    with pytest.raises(InvalidInput, match=r"'norm.running_mean', 'norm.running_var'"):
        plan_of(exported(Normed(), (4,)), name, HYPER, tmp_path / "a.plan")
    assert list(tmp_path.iterdir()) == []


def test_statistics_of_batches_are_learned_by_batches_and_shared(tmp_path):
    made, plan = planned(tmp_path, "fedavg", exported(Normed(), (4,)))
    before = plan.state()
    plan.run("local_update", fed(plan))
    assert "norm.running_mean" in made.state
    assert not np.array_equal(plan.state()["norm.running_mean"], before["norm.running_mean"])


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_a_module_that_adapts_as_the_plan_does(tmp_path, kept, name):
    made, plan = kept(name)
    state = {k: v + np.float32(0.125) for k, v in made.state.items()}
    result = module_of(mixed(), name, HYPER, state)
    path = tmp_path / "result.tpm"
    result.save(path)
    again = read(path)
    assert again.meta["adapt_steps"] == "3"
    assert again.meta["adapt_algorithm"] == name
    assert not any(k.startswith(("anchor.", "hyper.meta_lr")) for k in again.state)
    for k, x in state.items():
        if k in again.state:
            assert np.array_equal(again.state[k].array, x)
    plan.assign(state)
    plan.run("adapt", batch())
    arrays = {k: t.array for k, t in again.state.items()}
    adapted = call(again.entry("adapt"), {**arrays, **batch()}, on="onnx")
    for k in ("body.weight", "head.bias"):
        np.testing.assert_allclose(adapted[k], plan.state()[k], rtol=1e-5, atol=1e-6)


def test_a_result_begins_the_next_run(tmp_path):
    made, _ = planned(tmp_path, "meta-sgd")
    state = {k: v + np.float32(0.125) for k, v in made.state.items()}
    result = module_of(mixed(), "meta-sgd", HYPER, state)
    same, _ = planned(tmp_path, "meta-sgd", result)
    assert all(np.array_equal(same.state[k], x) for k, x in state.items())
    other, _ = planned(tmp_path, "fedavg", result)
    assert sorted(other.state) == ["body.bias", "body.weight", "fixed", "head.bias", "head.weight"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"own": np.zeros(3, np.float32)}, "'own' is not shared state"),
        ({"tail": np.zeros(3, np.float32)}, "'tail' is not shared state"),
        ({"head.bias": np.zeros(4, np.float32)}, r"float32\[3\], got float32\[4\]"),
    ],
)
def test_a_result_of_another_model_is_refused(state, said):
    with pytest.raises(InvalidInput, match=said):
        module_of(mixed(), "fedavg", HYPER, state)


def test_a_module_needs_its_entries_and_something_to_train(tmp_path):
    bare = exported(nn.Dense(4, 3), (4,), entries=("predict", "evaluate"))
    with pytest.raises(InvalidInput, match="export it with loss"):
        plan_of(bare, "fedavg", HYPER, tmp_path / "a.plan")
    whole = exported(nn.Dense(4, 3), (4,))
    frozen = {**whole.meta, "frozen": json.dumps(["weight", "bias"])}
    with pytest.raises(InvalidInput, match="no parameter that may be trained"):
        plan_of(
            Module(whole.functions, whole.entries, whole.state, frozen), "fedavg", HYPER,
            tmp_path / "a.plan",
        )  # fmt: skip


@pytest.mark.parametrize("text", ["{", '"weight"', "[1]"])
def test_a_damaged_list_of_frozen_parameters_is_refused(tmp_path, text):
    whole = exported(nn.Dense(4, 3), (4,))
    odd = Module(whole.functions, whole.entries, whole.state, {**whole.meta, "frozen": text})
    with pytest.raises(InvalidInput, match="frozen parameters"):
        plan_of(odd, "fedavg", HYPER, tmp_path / "a.plan")


def test_names_of_a_run_are_not_a_models(tmp_path):
    class Odd(nn.Cell):
        def __init__(self):
            super().__init__()
            self.rate = nn.Dense(4, 3)

        def construct(self, x):
            return self.rate(x)

    with pytest.raises(InvalidInput, match=r"state named 'rate.bias'.*rename"):
        plan_of(exported(Odd(), (4,)), "fedavg", HYPER, tmp_path / "a.plan")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inner_steps": 0}, "whole number from 1 to 10"),
        ({"inner_steps": MAX_INNER_STEPS + 1}, "got 11"),
        ({"lr": -0.1}, "lr must be finite and not negative"),
        ({"lr": float("nan")}, "got nan"),
        ({"beta2": 1.0}, "below 1"),
        ({"server_lr": 0.0}, "above 0"),
        ({"lr": 1e300}, "lr is a float32"),
        ({"floor": 1e-300}, "floor is a float32"),
    ],
)
def test_odd_numbers_are_refused(options, said):
    with pytest.raises(InvalidInput, match=said):
        Hyper(**options)


def test_rows_name_what_the_cloud_has():
    for row in ALGORITHMS.values():
        assert row.weighting in WEIGHTINGS
        assert "arXiv" in row.source
        assert {h.name: defaults(row.name)[h.name] for h in row.hyper} == {
            h.name: h.default for h in row.hyper
        }
    with pytest.raises(AssertionError, match="one name"):
        _table((_ROWS[0], _ROWS[0]))
    with pytest.raises(InvalidInput, match=r"no algorithm 'sgd'; choose from fedavg, "):
        defaults("sgd")


def test_a_state_tensor_of_the_module_is_never_the_runs_own():
    whole = mixed()
    extra = {**whole.state, "hyper.lr": StateTensor(Role.BUFFER, np.float32(9) * np.ones(()))}
    again = Module(whole.functions, whole.entries, extra, whole.meta)
    assert module_of(again, "fedavg", HYPER, {}).state["hyper.lr"].array == np.float32(HYPER.lr)

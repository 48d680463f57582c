"""An algorithm with state of its own, shared and personal, is a row like any other: SCAFFOLD.

Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1 with option II. Its control variate after K
steps, c_i - c + (x - y_K) / (K a), is the mean of the gradients along the way: so each step can
write down the mean so far, and the graph of a step is all that there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops
from triplane.unified_ir.autodiff import GRAD
from triplane.unified_ir.federated.algorithms import Hyper, module_of, plan_of, steps, table
from triplane.unified_ir.federated.algorithms.hyper import ANCHOR, LR
from triplane.unified_ir.federated.algorithms.steps import shared_trained
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.ir import Role, StateTensor
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes import clean

from .given import exported

CONTROL, OWN, TAKEN = "control.", "own.", "taken"
RATE, STEPS, ROUNDS = 0.5, 3, 6
HYPER = Hyper(lr=RATE, inner_steps=2)


def controlled_gradient(of, _):
    """D L(batch, w) - c_i + c, and the new c_i and c as they are after this step."""
    with Build(TABLE, "controlled_gradient") as build:
        state = {v.name: build.param(v.name, v.type) for v in of.reads}
        batch = {v.name: build.param(v.name, v.type) for v in of.batch}
        found, grads = of.differentiate(batch, state)
        scalar = steps.scalar_of(of)
        taken, before = build.param(TAKEN, scalar), build.param(ANCHOR + TAKEN, scalar)
        results: dict[str, Any] = {TAKEN: taken + 1.0}
        is_first = ops.cast(ops.equal(taken, before), "float32")
        is_first = ops.cast(ops.equal(taken, before), "float32")
        for path in shared_trained(of):
            g, type_ = grads[path], state[path].type
            own, first = build.param(OWN + path, type_), build.param(ANCHOR + OWN + path, type_)
            c = build.param(ANCHOR + CONTROL + path, type_)
            mean = own * (1.0 - is_first)
            mean = mean + (g - mean) / (taken - before + 1.0)
            results |= {OWN + path: mean, CONTROL + path: c + mean - first}
            grads[path] = g - first + c
    named = {GRAD + path: g for path, g in grads.items()}
    return clean(build.finish({**found, **results, **named}))


def controls(of, hyper):
    zeros = {p: np.zeros_like(of.state[p].array) for p in shared_trained(of)}
    none = np.zeros((), np.float32)
    found = {
        LR: StateTensor(Role.BUFFER, np.asarray(hyper.lr, np.float32)),
        TAKEN: StateTensor(Role.PERSONAL, none),
        ANCHOR + TAKEN: StateTensor(Role.BUFFER, none),
    }
    for path, zero in zeros.items():
        found[CONTROL + path] = StateTensor(Role.BUFFER, zero)
        found[OWN + path] = StateTensor(Role.PERSONAL, zero)
        for name in (CONTROL + path, OWN + path):
            found[ANCHOR + name] = StateTensor(Role.BUFFER, zero)
    return found


ROW = replace(
    table.ALGORITHMS["fedavg"], name="scaffold", source="Karimireddy et al. 2020, arXiv 1910.06378",
    weighting="equal", gradient=controlled_gradient, extra_state=controls,
)  # fmt: skip


@pytest.fixture(autouse=True)
def scaffold(monkeypatch):
    monkeypatch.setitem(table.ALGORITHMS, "scaffold", ROW)


def shards():
    """Devices whose classes and inputs differ, so that their gradients disagree."""
    found = {}
    for k in range(3):
        rng = np.random.default_rng(k)
        x = rng.normal(k, 1.0, (10 + 5 * k, 4)).astype(np.float32)
        y = rng.choice(3, len(x), p=np.roll([0.8, 0.1, 0.1], k)).astype(np.int64)
        found[f"device-{k}"] = Shard({"x": x, "y": y}, {"x": x[:4], "y": y[:4]})
    return found


def module():
    cell = nn.Dense(4, 3)
    rng = np.random.default_rng(9)
    for p in cell.parameters().values():
        p.array = np.asarray(rng.normal(0, 0.3, p.array.shape), np.float32)
    return exported(cell, (4,))


def study():
    return Study(algorithm="scaffold", hyper=HYPER, rounds=ROUNDS, steps=STEPS, batch_size=1000)


def gradient(w, b, x, y):
    """Of the mean cross-entropy of softmax(w x + b), by hand."""
    z = x @ w.T + b
    p: Any = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y), p.mean(0)


def reference(w, b, *, corrected=True):
    """Algorithm 1 in float64: every device takes part, all its samples in each step."""
    data = [(s.train["x"].astype(np.float64), s.train["y"]) for s in shards().values()]
    x, c = [w, b], [np.zeros_like(w), np.zeros_like(b)]
    own = [[np.zeros_like(w), np.zeros_like(b)] for _ in data]
    for _ in range(ROUNDS):
        moved, learned = [], []
        for ci, (inputs, labels) in zip(own, data, strict=True):
            y = list(x)
            for _ in range(STEPS):
                g = gradient(y[0], y[1], inputs, labels)
                y = [
                    v - RATE * (d - (i - s) * corrected)
                    for v, d, i, s in zip(y, g, ci, c, strict=True)
                ]
            new = [i - s + (a - z) / (STEPS * RATE) for i, s, a, z in zip(ci, c, x, y, strict=True)]
            moved.append([z - a for z, a in zip(y, x, strict=True)])
            learned.append(new)
        change = [
            [n - i for n, i in zip(new, ci, strict=True)]
            for new, ci in zip(learned, own, strict=True)
        ]
        x = [v + np.mean([m[k] for m in moved], 0) for k, v in enumerate(x)]
        c = [v + np.mean([d[k] for d in change], 0) for k, v in enumerate(c)]
        own = learned
    return x, c


def start(of):
    w, b = sorted(of.state, key=lambda n: -of.state[n].array.ndim)[:2]
    return (w, b), [of.state[n].array.astype(np.float64) for n in (w, b)]


def test_scaffold_as_a_row_computes_what_the_paper_says():
    of = module()
    (w, b), begun = start(of)
    shared = simulate(of, shards(), study()).state
    x, c = reference(*begun)
    for name, value, control in zip((w, b), x, c, strict=True):
        np.testing.assert_allclose(shared[name], value, rtol=0, atol=2e-6)
        np.testing.assert_allclose(shared[CONTROL + name], control, rtol=0, atol=2e-6)
    plain, _ = reference(*begun, corrected=False)
    assert np.abs(plain[0] - x[0]).max() > 1e-3, "the correction makes a difference"


def test_result_of_a_run_with_shared_state_of_its_own_is_a_module(tmp_path):
    of = module()
    shared = simulate(of, shards(), study()).state
    made = module_of(of, "scaffold", HYPER, shared)
    (w, _), _ = start(of)
    np.testing.assert_array_equal(made.state[w].array, shared[w])
    assert not any(name.startswith((CONTROL, OWN, ANCHOR)) for name in made.state)
    made.save(tmp_path / "made.tpm")
    assert set(load(tmp_path / "made.tpm").entries) == {"adapt", *of.entries}


def test_state_of_another_algorithm_is_refused():
    of = module()
    shared = simulate(of, shards(), study()).state
    with pytest.raises(InvalidInput, match="not shared state"):
        module_of(of, "fedavg", HYPER, shared)


def test_personal_state_of_an_algorithm_stays_on_its_device(tmp_path):
    made = plan_of(module(), "scaffold", HYPER, tmp_path / "p.plan")
    assert {name for name in made.state if not name.startswith(CONTROL)} == {"weight", "bias"}
    assert not any(name.startswith((OWN, TAKEN, ANCHOR)) for name in made.state)


def test_name_of_an_algorithms_own_state_is_not_the_models(tmp_path):
    class Taken(nn.Cell):
        def __init__(self):
            super().__init__()
            self.head = nn.Dense(4, 3)
            self.taken = nn.Parameter(np.zeros(3, np.float32))

        def construct(self, x):
            return self.head(x) + self.taken

    with pytest.raises(InvalidInput, match=r"'taken'.*scaffold"):
        plan_of(exported(Taken(), (4,)), "scaffold", HYPER, tmp_path / "p.plan")


class Anchored:
    """A plan's state with an anchor of nothing."""

    entries = ("local_update",)

    def __init__(self):
        self.roles = {"w": "parameter", "anchor.v": "buffer"}

    def view(self, *_):
        return {"w": np.zeros(2, np.float32), "anchor.v": np.zeros(2, np.float32)}


def test_anchor_of_no_state_is_refused_by_name():
    work = learn.Work(
        run="r", round=1, device="d", seed=0, steps=1, batch_size=1, support=1, query=1
    )
    plan: Any = Anchored()
    with pytest.raises(InvalidInput, match=r"'anchor\.v'"):
        learn.learn(plan, work, shards()["device-0"])


def test_anchor_of_state_that_no_graph_reads_is_in_the_plan_with_it(tmp_path, monkeypatch):
    def beside(of, hyper):
        zero = np.zeros((), np.float32)
        more = {name: StateTensor(Role.BUFFER, zero) for name in ("aside", ANCHOR + "aside")}
        return {LR: StateTensor(Role.BUFFER, np.asarray(hyper.lr, np.float32)), **more}

    def drawn_back(of, _):
        with Build(TABLE, "drawn_back") as build:
            state = {v.name: build.param(v.name, v.type) for v in of.reads}
            batch = {v.name: build.param(v.name, v.type) for v in of.batch}
            found, grads = of.differentiate(batch, state)
            aside = build.param(ANCHOR + "aside", steps.scalar_of(of))
            named = {GRAD + path: g + aside for path, g in grads.items()}
        return clean(build.finish({**found, **named}))

    row = replace(ROW, name="aside", gradient=drawn_back, extra_state=beside)
    monkeypatch.setitem(table.ALGORITHMS, "aside", row)
    assert "aside" in plan_of(module(), "aside", HYPER, tmp_path / "p.plan").roles
    simulate(module(), shards(), replace(study(), algorithm="aside"))

"""SCAFFOLD against its paper in numpy, and against closed forms on a quadratic.

Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1 with option II.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.federated.study.given import least_squares
from tests.support.liars import LyingServer, scaled

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.autodiff import GRAD
from triplane.unified_ir.federated.algorithms import Hyper, module_of, plan_of, steps, table
from triplane.unified_ir.federated.algorithms.aggregators import UNLIMITED, Robustness
from triplane.unified_ir.federated.algorithms.hyper import ANCHOR, LR
from triplane.unified_ir.federated.algorithms.scaffold import CONTROL, OWN, TAKEN
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.federated.study.server import MeanServer
from triplane.unified_ir.ir import Role, StateTensor
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes import clean

from .given import exported

RATE, STEPS, ROUNDS = 0.5, 3, 6
HYPER = Hyper(lr=RATE, inner_steps=2)
ROW = table.ALGORITHMS["scaffold"]


def replaced(rounds, **methods):
    """The server of a trial with some methods replaced."""
    return SimpleNamespace(**{"choose": rounds.choose, "judge": rounds.judge, **methods})


class Recording(MeanServer):
    """The usual server, which notes who took part in each round."""

    def __init__(self):
        self.asked = []

    @contextlib.contextmanager
    def serving(self, study):
        with super().serving(study) as rounds:
            reduce = rounds.reduce

            def noting(at, contributions):
                self.asked.append([c.device for c in contributions])
                return reduce(at, contributions)

            yield replaced(rounds, reduce=noting)


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
    return Study(
        algorithm="scaffold", hyper=HYPER, rounds=ROUNDS, steps=STEPS, batch_size=1000,
        robustness=UNLIMITED,  # these devices differ more than the norm bound allows
    )  # fmt: skip


def gradient(w, b, x, y):
    """Of the mean cross-entropy of softmax(w x + b), by hand."""
    z = x @ w.T + b
    p: Any = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y), p.mean(0)


def reference(begun, asked, *, corrected=True):
    """Algorithm 1 in float64 with these devices in each round, all their samples in each step."""
    data = {n: (s.train["x"].astype(np.float64), s.train["y"]) for n, s in shards().items()}
    x, c = begun, [np.zeros_like(v) for v in begun]
    own = {name: [np.zeros_like(v) for v in begun] for name in data}
    for names in asked:
        moved, learned = [], {}
        for name in names:
            ci, (inputs, labels) = own[name], data[name]
            y = list(x)
            for _ in range(STEPS):
                g = gradient(y[0], y[1], inputs, labels)
                y = [
                    v - RATE * (d - (i - s) * corrected)
                    for v, d, i, s in zip(y, g, ci, c, strict=True)
                ]
            learned[name] = [
                i - s + (a - z) / (STEPS * RATE) for i, s, a, z in zip(ci, c, x, y, strict=True)
            ]
            moved.append([z - a for z, a in zip(y, x, strict=True)])
        change = [[n - i for n, i in zip(learned[k], own[k], strict=True)] for k in names]
        x = [v + np.mean([m[k] for m in moved], 0) for k, v in enumerate(x)]
        share = len(names) / len(data)
        c = [v + share * np.mean([d[k] for d in change], 0) for k, v in enumerate(c)]
        own |= learned
    return x, c


def start(of):
    w, b = sorted(of.state, key=lambda n: -of.state[n].array.ndim)[:2]
    return (w, b), [of.state[n].array.astype(np.float64) for n in (w, b)]


@pytest.mark.parametrize("devices", [0, 1, 2])
def test_scaffold_computes_what_the_paper_says_also_with_some_of_the_devices(devices):
    of, server = module(), Recording()
    (w, b), begun = start(of)
    shared = simulate(of, shards(), replace(study(), devices=devices), server=server).state
    x, c = reference(begun, server.asked)
    assert {len(names) for names in server.asked} == {devices or 3}
    assert len(server.asked) == ROUNDS
    for name, value, control in zip((w, b), x, c, strict=True):
        np.testing.assert_allclose(shared[name], value, rtol=0, atol=4e-6)
        np.testing.assert_allclose(shared[CONTROL + name], control, rtol=0, atol=4e-6)
    plain, _ = reference(begun, server.asked, corrected=False)
    assert np.abs(plain[0] - x[0]).max() > 1e-3, "the correction makes a difference"


def test_a_population_that_is_stated_replaces_the_devices_of_the_study():
    of, twice = module(), Hyper(**{**HYPER, "population_size": 6})
    one = replace(study(), rounds=1)
    plain, stated = (
        simulate(of, shards(), made).state for made in (one, replace(one, hyper=twice))
    )
    (w, _), _ = start(of)
    np.testing.assert_allclose(stated[CONTROL + w], plain[CONTROL + w] / 2, rtol=1e-6)
    np.testing.assert_array_equal(stated[w], plain[w])


LENGTH, SHORT = 6, 0.05


def quadratic():
    """Devices with least-squares problems of their own, (X_i, y_i), and a linear model."""
    devices = {}
    for k in range(4):
        rng = np.random.default_rng(k)
        x = rng.normal(0, 1 + 0.3 * k, (40, 3)).astype(np.float32)
        y = (x @ rng.normal(0, 1, (3, 1)) + k).astype(np.float32)
        devices[f"device-{k}"] = Shard({"x": x, "y": y}, {"x": x[:4], "y": y[:4]})
    cell = nn.Dense(3, 1, bias=False)
    trainer = train.Trainer(cell, loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32))
    return trainer.export(), devices


def learned(algorithm, rounds, **options):
    """The weights at the end, the first ones, the devices asked, and each (A_i, w_i)."""
    of, devices = quadratic()
    server = Recording()
    made = Study(
        algorithm=algorithm, hyper=Hyper(lr=SHORT), rounds=rounds, steps=LENGTH, batch_size=1000,
        robustness=UNLIMITED, **options,
    )  # fmt: skip
    (name,) = (n for n in of.state if of.state[n].role is Role.PARAMETER)
    end = simulate(of, devices, made, server=server).state[name].reshape(-1)
    problems = {}
    for device, shard in devices.items():
        x, y = (shard.train[k].astype(np.float64) for k in ("x", "y"))
        # The gradient of mean((x w - y)^2) is A (w - w*).
        problems[device] = 2 / len(x) * x.T @ x, np.linalg.lstsq(x, y, rcond=None)[0].reshape(-1)
    return end, of.state[name].array.reshape(-1).astype(np.float64), server.asked, problems


def shrunk(a):
    """(I - rate A)^K, what K steps leave of a distance to where they lead."""
    return np.linalg.matrix_power(np.eye(len(a)) - SHORT * a, LENGTH)


@pytest.mark.parametrize("devices", [0, 2])
def test_rounds_on_a_quadratic_are_those_of_the_closed_form(devices):
    """y_K = m + (I - a A)^K (x - m) with m = w* + A^-1 (c_i - c), where the steps lead."""
    end, x, asked, problems = learned("scaffold", 5, devices=devices)
    c, own = np.zeros(3), {name: np.zeros(3) for name in problems}
    for names in asked:
        moved, changed, before = [], [], dict(own)
        for name in names:
            a, best = problems[name]
            goal = best + np.linalg.solve(a, before[name] - c)
            y = goal + shrunk(a) @ (x - goal)
            own[name] = before[name] - c + (x - y) / (LENGTH * SHORT)
            moved.append(y - x)
            changed.append(own[name] - before[name])
        x = x + np.mean(moved, 0)
        c = c + len(names) / len(problems) * np.mean(changed, 0)
    np.testing.assert_allclose(end, x, rtol=0, atol=1e-5)


@pytest.mark.long
def test_scaffold_reaches_the_optimum_of_a_quadratic_and_fedavg_its_biased_fixed_point():
    end, _, _, problems = learned("scaffold", 400)
    every = list(problems.values())
    optimum = np.linalg.solve(sum(a for a, _ in every), sum(a @ best for a, best in every))
    np.testing.assert_allclose(end, optimum, rtol=0, atol=1e-4)
    drifted, _, _, _ = learned("fedavg", 400)
    gains = [np.eye(3) - shrunk(a) for a, _ in every]
    biased = np.linalg.solve(
        sum(gains), sum(g @ best for g, (_, best) in zip(gains, every, strict=True))
    )
    np.testing.assert_allclose(drifted, biased, rtol=0, atol=1e-4)
    assert np.abs(biased - optimum).max() > 0.01


@pytest.mark.long
@pytest.mark.parametrize("devices", [3, 6, 12])
def test_limits_leave_honest_devices_alone_and_the_optimum_where_it_is(devices):
    """A device that was not asked for a while changes up to 64 medians of its round."""
    of, every = least_squares(24)
    made = Study(
        algorithm="scaffold", hyper=Hyper(lr=SHORT), rounds=150, steps=LENGTH, batch_size=1000,
        devices=devices,
    )  # fmt: skip
    trial = simulate(of, every, made)
    assert not any(r.scaled for r in trial.rounds)
    np.testing.assert_allclose(trial.state[weight_of(of)], optimum(every), rtol=0, atol=1e-4)


@pytest.mark.long
def test_scaffold_reaches_the_optimum_also_after_a_return():
    """Control variates of the spoilt state would stay wrong for good, so they begin again."""
    of, every = least_squares(8)
    made = Study(
        algorithm="scaffold", hyper=Hyper(lr=SHORT), rounds=150, steps=LENGTH, batch_size=1000,
        devices=4, robustness=Robustness(norm_bound="off"),
    )  # fmt: skip
    server = LyingServer({"device-00", "device-01"}, scaled(1e4), range(20, 24))
    trial = simulate(of, every, made, server=server)
    assert [r.number for r in trial.rounds if r.returned] == [24]
    np.testing.assert_allclose(trial.state[weight_of(of)], optimum(every), rtol=0, atol=1e-4)


def weight_of(of):
    (name,) = (n for n in of.state if of.state[n].role is Role.PARAMETER)
    return name


def optimum(devices):
    """Of the mean of their least-squares problems."""
    data = [[s.train[k].astype(np.float64) for k in ("x", "y")] for s in devices.values()]
    best = np.linalg.solve(sum(x.T @ x for x, _ in data), sum(x.T @ y for x, y in data))
    return best.T


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
            self.control_steps = nn.Parameter(np.zeros(3, np.float32))

        def construct(self, x):
            return self.head(x) + self.control_steps

    with pytest.raises(InvalidInput, match=r"'control_steps'.*scaffold"):
        plan_of(exported(Taken(), (4,)), "scaffold", HYPER, tmp_path / "p.plan")


def test_no_model_has_tensors_with_the_names_of_control_variates(tmp_path):
    """A signed policy lets tensors of these names leave a device."""

    class Named(nn.Cell):
        def __init__(self):
            super().__init__()
            self.scaffold = nn.Dense(4, 3)

        def construct(self, x):
            return self.scaffold(x)

    with pytest.raises(InvalidInput, match=r"'scaffold\.[a-z]+'; names that begin with"):
        plan_of(exported(Named(), (4,)), "fedavg", HYPER, tmp_path / "p.plan")


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

"""A new algorithm is one row: options, wire, cloud and device take its numbers from there."""

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from tests.federated.study.given import module, shards, study

from triplane.cloud.cli import federate
from triplane.cloud.federation.spec import hyper_of, with_defaults
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.hyperparameters import set_values, values_of
from triplane.unified_ir.autodiff import GRAD
from triplane.unified_ir.cli.simulate import simulate as verb
from triplane.unified_ir.federated.algorithms import steps, table
from triplane.unified_ir.federated.algorithms.hyper import DECAY, NOT_NEGATIVE, Hyperparameter
from triplane.unified_ir.federated.algorithms.table import Algorithm, Hyper
from triplane.unified_ir.federated.core.reduce import ServerOptimizer
from triplane.unified_ir.federated.study import simulate
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes import clean


def with_momentum(x, d, slots, hyper):
    """v' = b v + d;  x' = x + lr v'."""
    v = hyper["inertia"] * slots[0].astype(np.float64) + d
    return x + hyper["server_lr"] * v, (v,)


HEAVY = Algorithm(
    name="heavy", source="Hsu et al. 2019, arXiv 1909.06335", summary="with server momentum",
    episodes=False, weighting="examples", gradient=steps.batch_gradient,
    server=ServerOptimizer("momentum", ("v",), with_momentum),
    hyper=(
        *table.ALGORITHMS["fedavg"].hyper,
        Hyperparameter("inertia", 0.9, DECAY, "Inertia of the mean, on the cloud."),
    ),
)  # fmt: skip


def decayed_gradient(of, _):
    """D L(batch, w) + decay w."""
    with Build(TABLE, "decayed_gradient") as build:
        state = {v.name: build.param(v.name, v.type) for v in of.reads}
        batch = {v.name: build.param(v.name, v.type) for v in of.batch}
        results, grads = of.differentiate(batch, state)
        decay = build.param("hyper.decay", steps.scalar_of(of))
        named = {GRAD + path: g + decay * state[path] for path, g in grads.items()}
    return clean(build.finish({**results, **named}))


DECAYED = replace(
    table.ALGORITHMS["fedavg"], name="decayed", gradient=decayed_gradient,
    hyper=(
        *table.ALGORITHMS["fedavg"].hyper,
        Hyperparameter("decay", 0.5, NOT_NEGATIVE, "Decay of weights on devices."),
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    for row in (HEAVY, DECAYED):
        monkeypatch.setitem(table.ALGORITHMS, row.name, row)


@pytest.mark.parametrize("command", [federate.command.commands["run"], verb])
def test_its_name_and_numbers_are_in_the_help_with_their_defaults(command):
    text = " ".join(CliRunner().invoke(command, ["--help"]).stdout.split())
    assert "--inertia NUMBER Inertia of the mean, on the cloud. [default: 0.9]" in text
    assert "--decay NUMBER Decay of weights on devices. [default: 0.5]" in text
    assert "reptile, heavy, decayed" in text or "heavy with server momentum" in text


def test_its_numbers_are_validated():
    assert Hyper().inertia == 0.9
    with pytest.raises(InvalidInput, match="inertia must be at least 0 and below 1, got 1"):
        Hyper(inertia=1.0)
    with pytest.raises(InvalidInput, match="no algorithm has a hyperparameter 'inertja'"):
        Hyper(inertja=0.5)


def test_its_numbers_are_on_the_wire_and_in_its_runs_only():
    spec = with_defaults(pb.Spec(model="tiny", algorithm="heavy"))
    assert dict(spec.hyperparameters.other) == {"inertia": 0.9}
    assert not with_defaults(pb.Spec(model="tiny")).hyperparameters.other
    asked = pb.Spec(model="tiny", algorithm="heavy")
    set_values(asked.hyperparameters, {"inertia": 0.25, "lr": 0.5})
    assert values_of(asked.hyperparameters) == {"inertia": 0.25, "lr": 0.5}
    assert hyper_of(with_defaults(asked)) == Hyper(inertia=0.25, lr=0.5)
    set_values(asked.hyperparameters, {"inertia": 2.0})
    with pytest.raises(InvalidInput, match="inertia must be at least 0"):
        with_defaults(asked)


def test_a_number_of_the_cloud_reaches_the_cloud_s_step():
    one, two = (run("fedavg", rounds=n) for n in (1, 2))
    start = {name: module().initial(name) for name in one}
    after = run("heavy", rounds=2, inertia=0.25)
    for name, x in after.items():
        expected = two[name] + 0.25 * (one[name].astype(np.float64) - start[name])
        np.testing.assert_allclose(x, expected, atol=1e-6)


def test_a_number_of_devices_reaches_a_device_s_step():
    plain, none, some = (
        run("fedavg"), run("decayed", decay=0.0), run("decayed", decay=0.5),
    )  # fmt: skip
    assert all(np.allclose(plain[name], none[name], atol=1e-6) for name in plain)
    assert any(not np.allclose(plain[name], some[name], atol=1e-3) for name in plain)


def run(algorithm, rounds=1, **numbers):
    """The shared state at the end of a study."""
    hyper = Hyper(lr=0.1, **numbers)
    return simulate(module(), shards(), study(algorithm, rounds=rounds, hyper=hyper)).state

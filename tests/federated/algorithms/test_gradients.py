"""Each algorithm's gradient: PyTorch's, central differences, and a plan's on onnxruntime."""

from typing import Any

import numpy as np
import pytest
from tests.support.golden_files import check_generator, needs_peers

from triplane.unified_ir.federated.algorithms import ALGORITHMS, MAX_INNER_STEPS, plan_of
from triplane.unified_ir.federated.algorithms.objective import objective_of
from triplane.unified_ir.runtime import Plan

from .given import GOLDEN, HYPER, MAKE, call, golden, module, part

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
SINGLE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-6}
EPSILON = 1e-6
SAME_STEP = {
    name: next(other for other in ALGORITHMS if ALGORITHMS[other].gradient is row.gradient)
    for name, row in ALGORITHMS.items()
} | {"scaffold": "fedavg"}  # its correction is 0 where control variates are
"""The first algorithm with the same step; those that follow it differ in the cloud only."""

MODELS = sorted(MAKE)
NAMES = sorted(ALGORITHMS)


def state(name, dtype="float64"):
    """Everything that any gradient reads beside a batch."""
    numbers = {"hyper.lr": HYPER.lr, "hyper.meta_lr": HYPER.meta_lr}
    scalars = {k: np.asarray(v, dtype) for k, v in numbers.items()}
    scalars["hyper.proximal"] = np.asarray(HYPER.proximal, dtype)
    anchors = {f"anchor.{k}": v for k, v in part(name, "anchor/", dtype).items()}
    rates = {f"rate.{k}": v for k, v in part(name, "rate/", dtype).items()}
    variates = ALGORITHMS["scaffold"].extra_state(objective_of(module(name, dtype)), HYPER)
    zeros = {k: v.array for k, v in variates.items()}
    return {**zeros, **part(name, "start/", dtype), **scalars, **anchors, **rates}


def batch(name, algorithm, dtype="float64"):
    support, query = part(name, "support/", dtype), part(name, "query/", dtype)
    if not ALGORITHMS[algorithm].episodes:
        return support
    named = {f"support.{k}": v for k, v in support.items()}
    return {**named, **{f"query.{k}": v for k, v in query.items()}}


def expected(name, algorithm):
    prefix = f"{SAME_STEP[algorithm]}/grad."
    return part(name, prefix), golden(name)[f"{SAME_STEP[algorithm]}/loss"]


def gradient(name, algorithm, steps=3):
    return ALGORITHMS[algorithm].gradient(objective_of(module(name)), steps)


def found(name, algorithm):
    given = {**state(name), **batch(name, algorithm)}
    results = call(gradient(name, algorithm), given)
    return {k.removeprefix("grad."): v for k, v in results.items() if "grad." in k}, results["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_equals_pytorchs_through_three_inner_steps(name, algorithm):
    (grads, loss), (wanted, at) = found(name, algorithm), expected(name, algorithm)
    assert grads.keys() == wanted.keys()
    np.testing.assert_allclose(loss, at, **EXACT)
    for path, g in grads.items():
        np.testing.assert_allclose(g, wanted[path], err_msg=f"{algorithm} {path}", **EXACT)


def loss_of(name, w, samples):
    """The loss alone, by the module's own entry."""
    return float(call(module(name).entry("loss"), {**w, **samples})["loss"])


def adapted(name, algorithm, w):
    """Weights after three calls of the entry `adapt` on the support, one after another."""
    function = ALGORITHMS[algorithm].adapt(objective_of(module(name)))
    given = {**state(name), **w}
    for _ in range(HYPER.inner_steps):
        given |= call(function, {**given, **part(name, "support/")})
    return {k: given[k] for k in part(name, "start/")}


def objective(name, algorithm, w):
    """What the algorithm makes small, without any graph of its gradient."""
    if ALGORITHMS[algorithm].episodes:
        return loss_of(name, adapted(name, algorithm, w), part(name, "query/"))
    total = loss_of(name, w, part(name, "support/"))
    if algorithm == "fedprox":
        anchor = part(name, "anchor/")
        total += HYPER.proximal / 2 * sum(((w[k] - anchor[k]) ** 2).sum() for k in anchor)
    return total


def slope(f, w, direction):
    """Central difference of f along a direction."""
    ahead = f({k: w[k] + EPSILON * direction[k] for k in direction})
    behind = f({k: w[k] - EPSILON * direction[k] for k in direction})
    return (ahead - behind) / (2 * EPSILON)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_is_the_slope_of_what_it_descends(name, algorithm):
    grads, _ = found(name, algorithm)
    rng = np.random.default_rng(3)
    direction = {k: rng.standard_normal(g.shape) for k, g in grads.items()}
    wanted = sum(float((direction[k] * g).sum()) for k, g in grads.items())
    start = {k: state(name)[k] for k in grads}
    if algorithm == "fomaml":  # the slope where the inner steps end
        end = adapted(name, algorithm, start)
        at = slope(lambda w: loss_of(name, w, part(name, "query/")), end, direction)
    else:
        at = slope(lambda w: objective(name, algorithm, w), start, direction)
    assert at == pytest.approx(wanted, rel=2e-6)


def test_first_order_differs_from_exact():
    exact, first = found("mlp", "maml")[0], found("mlp", "fomaml")[0]
    assert any(not np.allclose(exact[k], first[k], rtol=0.05) for k in exact)


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("name", [pytest.param("cnn", marks=pytest.mark.slow), "mlp"])
def test_a_plan_takes_that_step_on_onnxruntime(name, algorithm, tmp_path):
    path = tmp_path / "a.plan"
    plan_of(module(name, "float32"), algorithm, HYPER, path)
    plan = Plan.load(path)
    given = {k: v for k, v in state(name, "float32").items() if k in plan.roles}
    plan.assign(given)
    results = plan.run("local_update", batch(name, algorithm, "float32"))
    wanted, loss = expected(name, algorithm)
    rate = HYPER.meta_lr if ALGORITHMS[algorithm].episodes else HYPER.lr
    np.testing.assert_allclose(results["loss"], loss, **SINGLE)
    after = plan.state()
    for path, g in wanted.items():
        moved = (given[path] - after[path]) / rate
        np.testing.assert_allclose(moved, g, rtol=2e-3, atol=5e-6, err_msg=f"{algorithm} {path}")
    variates = {k for k in plan.roles if k.startswith(("scaffold.", "control", "own_control."))}
    untouched = plan.roles.keys() - wanted.keys() - variates
    assert all(np.array_equal(after[k], given[k]) for k in untouched)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, MAX_INNER_STEPS])
def test_inner_steps_are_as_many_as_asked(steps):
    """Gradients of Meta-SGD by a rate of zero: w_K is w, so steps add up exactly."""
    given = {**state("mlp"), **batch("mlp", "meta-sgd")}
    given |= {k: np.zeros_like(v) for k, v in given.items() if k.startswith("rate.")}
    one = call(gradient("mlp", "meta-sgd", 1), given)
    many = call(gradient("mlp", "meta-sgd", steps), given)
    for key in (k for k in one if k.startswith("grad.rate.")):
        np.testing.assert_allclose(many[key], steps * one[key], **EXACT)


@pytest.mark.deep
@needs_peers
def test_the_generator_reproduces_the_golden_files(tmp_path):
    check_generator("federated", GOLDEN, tmp_path)

"""A hundred updates against PyTorch's, from gradients that span four orders of magnitude."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import mode, optim
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import TensorSpec, as_dtype, type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

GOLDEN = Path(__file__).parents[1] / "golden" / "optim"
STEPS = 100
KEPT = [*range(10), *range(19, STEPS, 10)]

# fmt: off
CASES = {
    "sgd":           optim.SGD(0.1),
    "sgd_decay":     optim.SGD(0.1, weight_decay=0.05),
    "momentum":      optim.SGD(0.1, momentum=0.9),
    "dampening":     optim.SGD(0.1, momentum=0.9, dampening=0.5),
    "nesterov":      optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "groups":        optim.SGD(0.1, momentum=0.9, weight_decay=0.05,
                               groups=(optim.Group("b*", lr=0.02, weight_decay=0.0),)),
    "adam":          optim.Adam(0.01),
    "adam_betas":    optim.Adam(0.01, beta1=0.0, beta2=0.9, epsilon=1e-3),
    "adam_decay":    optim.Adam(0.01, weight_decay=0.05),
    "amsgrad":       optim.Adam(0.01, amsgrad=True),
    "adamw":         optim.AdamW(0.01, weight_decay=0.05),
    "adamw_amsgrad": optim.AdamW(0.01, weight_decay=0.05, amsgrad=True),
    "rmsprop":       optim.RMSProp(),
    "rmsprop_all":   optim.RMSProp(0.01, alpha=0.9, momentum=0.8, centered=True, weight_decay=0.05),
    "adagrad":       optim.Adagrad(),
    "adagrad_all":   optim.Adagrad(0.1, lr_decay=0.01, weight_decay=0.05, start=0.2),
    "adadelta":      optim.Adadelta(),
    "adadelta_all":  optim.Adadelta(0.5, rho=0.8, epsilon=1e-4, weight_decay=0.05),
    "adafactor":     optim.Adafactor(),
    "adafactor_all": optim.Adafactor(0.1, fade=0.6, floor=1e-2, limit=2.0, weight_decay=0.05),
    "lamb":          optim.LAMB(0.01),
    "lamb_decay":    optim.LAMB(0.01, weight_decay=0.05),
    "lion":          optim.Lion(0.01),
    "lion_decay":    optim.Lion(0.01, weight_decay=0.05),
    "clipped":       optim.SGD(0.1),
    "clipped_each":  optim.SGD(0.1),
    "clipped_value": optim.SGD(0.1),
}
CLIPS = {
    "clipped":       lambda g: optim.clip_by_global_norm(g, 2.0),
    "clipped_each":  lambda g: optim.clip_by_norm(g, 2.0),
    "clipped_value": lambda g: optim.clip_by_value(g, 0.1),
}
SCHEDULES = {
    "constant":         optim.Constant(0.1),
    "cosine":           optim.Cosine(0.1, STEPS, low=0.01),
    "exponential":      optim.Exponential(0.1, 0.95),
    "step_decay":       optim.StepDecay(0.1, 0.5, 6),
    "multi_step":       optim.MultiStep(0.1, 0.3, (7, 30, 31, 80)),
    "polynomial":       optim.Polynomial(0.1, 60),
    "polynomial_2":     optim.Polynomial(0.1, 60, power=2.5),
    "restarts":         optim.CosineRestarts(0.1, 13, low=0.01),
    "restarts_growing": optim.CosineRestarts(0.1, 9, growth=2, low=0.01),
    "one_cycle":        optim.OneCycle(0.1, STEPS),
    "one_cycle_line":   optim.OneCycle(0.1, STEPS, rise=0.4, first=10, last=100, shape="line"),
    "warmup":           optim.Warmup(8, 0.1),
    "chained":          optim.Chained((optim.Polynomial(0.01, 9, low=0.1),
                                       optim.Exponential(0.1, 0.9),
                                       optim.StepDecay(0.1, 0.5, 10)), (10, 50)),
    "product":          optim.StepDecay(0.1, 0.5, 20) * optim.Exponential(1.0, 0.97),
}
# fmt: on


def held(name):
    with np.load(GOLDEN / name) as file:
        return {k: file[k] for k in file.files}


@pytest.fixture(scope="module")
def golden():
    return held("updates.npz")


def update_function(optimizer, params, *, clip=None):
    """Parameters, gradients `g.NAME` and state -> next parameters and state."""
    with (build := Build(TABLE, "update")):
        p = {k: build.param(k, type_of(a)) for k, a in params.items()}
        g = {k: build.param(f"g.{k}", type_of(a)) for k, a in params.items()}
        types = optimizer.state_types({k: type_of(a) for k, a in params.items()})
        state = {k: build.param(k, t) for k, t in types.items()}
        if clip:
            g = clip(g)
        moved, after = optimizer.update(p, g, state)
    return build.finish({**moved, **after})


def run(optimizer, params, grads, engine_name, *, clip=None, steps=STEPS):
    function = update_function(optimizer, params, clip=clip)
    state = {**params, **optimizer.init(params)}
    loop = engine(engine_name).compile(function, donate=tuple(state)).loop(state)
    found = []
    for t in range(steps):
        loop.step(**{f"g.{k}": g[t] for k, g in grads.items()})
        found.append(loop.state())
    return found


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_updates_follow_pytorch(name, engine_name, golden):
    params = {k: golden[f"start/{k}"] for k in ("w", "b")}
    grads = {k: golden[f"grad/{k}"] for k in params}
    states = run(CASES[name], params, grads, engine_name, clip=CLIPS.get(name))
    for k in params:
        ours = np.stack([states[t][k] for t in KEPT])
        np.testing.assert_allclose(ours, golden[f"{name}/{k}"], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_updates_in_float64_follow_pytorch_in_float64(name, engine_name, golden):
    params = {k: golden[f"start/{k}"].astype(np.float64) for k in ("w", "b")}
    grads = {k: golden[f"grad/{k}"].astype(np.float64) for k in params}
    states = run(CASES[name], params, grads, engine_name, clip=CLIPS.get(name))
    doubles = held("doubles.npz")
    for k in params:
        ours = np.stack([states[t][k] for t in (0, 9, 99)])
        np.testing.assert_allclose(ours, doubles[f"{name}/{k}"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_parameters_are_updated_in_float32(name, dtype, golden):
    """What a float32 update gives, rounded after each step; the state is not rounded."""
    # `reference`, because bfloat16 arrays pass through numpy to no other engine.
    with mode("graph", "reference"):
        check_half(CASES[name], dtype, golden)


def check_half(optimizer, dtype, golden):
    half = as_dtype(dtype).numpy
    params = {k: golden[f"start/{k}"].astype(half) for k in ("w", "b")}
    grads = {k: golden[f"grad/{k}"].astype(half) for k in params}
    wide = {k: p.astype(np.float32) for k, p in params.items()}
    state, expected = optimizer.init(params), optimizer.init(wide)
    for t in range(5):
        given = {k: g[t] for k, g in grads.items()}
        params, state = optimizer.update(params, given, state)
        wide, expected = optimizer.update(
            wide, {k: g.astype(np.float32) for k, g in given.items()}, expected
        )
        wide = {k: p.astype(half).astype(np.float32) for k, p in wide.items()}
    for k, p in params.items():
        assert p.dtype == half
        np.testing.assert_array_equal(p.astype(np.float32), wide[k])
    assert state.keys() == expected.keys()
    for k, array in state.items():
        np.testing.assert_array_equal(array, expected[k])


def test_every_golden_has_its_case(golden):
    assert {n.split("/")[0] for n in golden} - {"start", "grad", "torch", "averaged"} == {*CASES}
    assert {n.split("/")[0] for n in held("doubles.npz")} - {"torch"} == {*CASES}
    assert held("schedules.npz").keys() - {"torch"} == SCHEDULES.keys()


def test_schedules_follow_pytorch_over_a_hundred_updates():
    """In float32, so an angle near pi leaves a few parts in 10^7 of the highest rate."""
    golden = held("schedules.npz")
    for name, schedule in SCHEDULES.items():
        ours = scheduled(schedule, range(STEPS))
        np.testing.assert_allclose(ours, golden[name], rtol=2e-6, atol=3e-8, err_msg=name)


PLATEAUS: dict[str, dict[str, Any]] = {
    "default": {"patience": 3},
    "absolute": {"patience": 2, "min_change": 0.02, "change": "absolute", "factor": 0.5},
    "cooldown": {"patience": 1, "cooldown": 4, "factor": 0.7, "low": 0.02},
    "larger": {"better": "larger", "patience": 2, "factor": 0.3},
    "eager": {"patience": 0, "min_change": 0.0, "factor": 0.9},
}


def test_rates_fall_on_the_plateaus_on_which_those_of_pytorch_fall():
    golden = held("plateau.npz")
    assert golden.keys() - {"torch", "values"} == PLATEAUS.keys()
    for name, options in PLATEAUS.items():
        schedule = optim.ReduceOnPlateau(0.1, **options)
        values = 3.0 - golden["values"] if name == "larger" else golden["values"]
        ours = [schedule.rate_after(values[: t + 1]) for t in range(STEPS)]
        assert ours == golden[name].tolist(), name
        assert len(set(ours)) > 2


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
def test_rates_of_float64_parameters_follow_pytorch_in_float64(engine_name):
    """Parameters of -sum of the rates, so each update shows its rate."""
    golden = held("schedules.npz")
    params, ones = {"w": np.zeros(1)}, {"w": np.ones((STEPS, 1))}
    for name, schedule in SCHEDULES.items():
        states = run(optim.SGD(schedule), params, ones, engine_name)
        ours = [-float(state["w"][0]) for state in states]
        np.testing.assert_allclose(ours, np.cumsum(golden[name]), rtol=1e-12, err_msg=name)


def test_a_rate_that_follows_a_measure_moves_float64_and_half_precision():
    schedule = optim.Warmup(2, optim.ReduceOnPlateau(0.5))
    for dtype in ("float64", "float16"):
        params = {"w": np.zeros(1, dtype)}
        states = run(optim.SGD(schedule), params, {"w": np.ones((3, 1), dtype)}, "onnx", steps=3)
        assert [float(state["w"][0]) for state in states] == [-0.25, -0.75, -1.25]
        assert states[0]["optimizer.plateau"].dtype == np.float32


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_asked_for_is_the_graphs(name):
    asked = [SCHEDULES[name].at(t) for t in (0, 9, 61, 10_000)]
    np.testing.assert_allclose(asked, scheduled(SCHEDULES[name], (0, 9, 61, 10_000)), rtol=1e-6)
    assert optim.SGD(SCHEDULES[name]).rate_at(9) == asked[1]


def test_schedules_hold_their_last_rate():
    for name, low in (("cosine", 0.01), ("polynomial", 0.0), ("one_cycle", 0.1 / 25e4)):
        np.testing.assert_allclose(scheduled(SCHEDULES[name], [2**40]), [low], atol=1e-9)
    np.testing.assert_allclose(
        scheduled(optim.Piecewise((2, 5), (1.0, 0.5, 0.1)), [0, 1, 2, 4, 5, 2**40]),
        [1, 1, 0.5, 0.5, 0.1, 0.1],
    )


def test_restarts_are_exact_far_out():
    """The place within a round is counted in whole numbers; float32 would lose it."""
    growing = optim.CosineRestarts(1.0, 10, growth=3)
    begin = 10 * (3**20 - 1) // 2
    found = scheduled(growing, [begin - 1, begin, begin + 10 * 3**20 // 2])
    np.testing.assert_allclose(found, [0, 1, 0.5], atol=1e-6)
    assert scheduled(optim.CosineRestarts(1.0, 7), [7 * 2**50]) == [1.0]


def decayed(**options):
    params = {"w": np.full(2, 2.0, np.float32)}
    grads = {"w": np.full((1, 2), 0.5, np.float32)}
    (state,) = run(optim.SGD(0.1, weight_decay=0.2, **options), params, grads, "onnx", steps=1)
    return state["w"][0]


def test_decay_enters_the_gradient_or_the_parameter():
    """With momentum and steps they part; in one step of SGD they agree."""
    assert decayed() == pytest.approx(2.0 - 0.1 * (0.5 + 0.4))
    assert decayed(decay="decoupled") == pytest.approx(2.0 * (1 - 0.02) - 0.05)
    params = {"w": np.full(2, 2.0, np.float32)}
    grads = {"w": np.full((2, 2), 0.5, np.float32)}
    for decay, expected in (("coupled", 1.7768), ("decoupled", 1.7968)):
        made = optim.SGD(0.1, momentum=0.5, weight_decay=0.2, decay=decay)  # type: ignore[arg-type]
        states = run(made, params, grads, "onnx", steps=2)
        assert states[1]["w"][0] == pytest.approx(expected, rel=1e-4), decay


FROZEN = optim.Adam(
    optim.Cosine(0.1, 9), groups=(optim.Group("a.*", frozen=True), optim.Group("*.bias", lr=0.5))
)


def test_a_group_takes_its_own_rate_and_a_frozen_one_stays():
    params = {k: np.ones(2, np.float32) for k in ("a.bias", "b.bias", "b.weight")}
    grads = {k: np.full((1, 2), 3.0, np.float32) for k in params}
    assert {n for n in FROZEN.init(params) if "a.bias" in n} == set()
    assert FROZEN.frozen(params) == {"a.bias"}
    (state,) = run(FROZEN, params, grads, "onnx", steps=1)
    assert state["a.bias"].tolist() == [1, 1]
    np.testing.assert_allclose(state["b.bias"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(state["b.weight"], 0.9, rtol=1e-6)


def test_groups_may_keep_other_slots():
    params = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    made = optim.SGD(0.1, momentum=0.9, groups=(optim.Group("b", momentum=0.0),))
    assert set(made.init(params)) == {"optimizer.momentum.w"}
    by_count = optim.SGD(0.1, groups=(optim.Group("b", lr=optim.Cosine(0.1, 5)),))
    assert set(by_count.init(params)) == {"optimizer.step"}


def test_factored_slots_are_a_row_and_a_column():
    params = {"w": np.zeros((5, 3, 4), np.float32), "b": np.zeros(4, np.float32)}
    kept = {k: a.shape for k, a in optim.Adafactor().init(params).items() if a.ndim}
    assert kept == {
        "optimizer.row.w": (5, 3, 1), "optimizer.column.w": (5, 1, 4), "optimizer.squares.b": (4,),
    }  # fmt: skip


def test_a_group_that_matches_nothing_is_named():
    made = optim.SGD(0.1, groups=(optim.Group("*.gamma", weight_decay=0.0),))
    with pytest.raises(InvalidInput, match=r"'\*\.gamma' matches no trained .* there are w"):
        made.init({"w": np.zeros(2, np.float32)})


def test_state_is_named_after_slot_and_parameter():
    params = {"a.weight": np.zeros((2, 3), np.float32)}
    assert set(optim.Adam().init(params)) == {
        "optimizer.step", "optimizer.m.a.weight", "optimizer.v.a.weight",
    }  # fmt: skip
    assert set(optim.SGD(0.1, momentum=0.5).init(params)) == {"optimizer.momentum.a.weight"}
    assert optim.SGD(0.1).init(params) == {}
    assert set(optim.SGD(optim.Cosine(0.1, 9)).init(params)) == {"optimizer.step"}


def test_the_step_counts_updates_as_int64():
    params = {"w": np.ones(2, np.float32)}
    last = run(optim.Adam(0.1), params, {"w": np.ones((3, 2), np.float32)}, "onnx", steps=3)[-1]
    assert last["optimizer.step"].dtype == np.int64
    assert last["optimizer.step"] == 3


def test_adam_corrects_its_bias_to_float32_precision():
    """The first step is lr g / (|g| + epsilon), whatever the betas."""
    params = {"w": np.zeros(3, np.float32)}
    grads = {"w": np.array([[1e-4, -2.0, 300.0]], np.float32)}
    for beta2 in (0.9, 0.999, 0.999999):
        (state,) = run(optim.Adam(0.5, beta2=beta2), params, grads, "onnx", steps=1)
        np.testing.assert_allclose(state["w"], [-0.49995, 0.5, -0.5], rtol=2e-6)


def test_a_small_norm_is_left_alone():
    params = {"w": np.zeros(2, np.float32)}
    grads = {"w": np.array([[0.3, 0.4]], np.float32)}
    (state,) = run(
        optim.SGD(1.0),
        params,
        grads,
        "onnx",
        clip=lambda g: optim.clip_by_global_norm(g, 1.0),
        steps=1,
    )
    assert np.array_equal(state["w"], -grads["w"][0])


def scheduled(schedule, steps):
    with (build := Build(TABLE, "rate")):
        lr = schedule(build.param("t", TensorSpec((), "int64")))
    program = engine("onnx").compile(build.finish({"lr": lr}))
    return [float(program(np.array(t, np.int64))[0]) for t in steps]


def test_schedules_have_the_values_of_their_formulas():
    assert scheduled(optim.Constant(0.25), [0, 7]) == [0.25, 0.25]
    np.testing.assert_allclose(
        scheduled(optim.Cosine(1.0, 4), [0, 2, 4, 9]), [1, 0.5, 0, 0], 0, 1e-7
    )
    np.testing.assert_allclose(scheduled(optim.StepDecay(1, 0.1, 3), [2, 3, 6]), [1, 0.1, 0.01])
    np.testing.assert_allclose(scheduled(optim.Exponential(1, 0.5, 4), [4, 8]), [0.5, 0.25])
    rising = optim.Warmup(4, optim.StepDecay(1.0, 0.5, 6))
    np.testing.assert_allclose(scheduled(rising, [0, 1, 3, 5, 6]), [0.25, 0.5, 1, 1, 0.5])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: optim.SGD(-1.0), ">= 0, got -1.0"),
        (lambda: optim.SGD(0.1, momentum=1.0), r"momentum in \[0, 1\), got 1.0"),
        (lambda: optim.SGD(0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: optim.SGD(0.1, weight_decay=-1), "weight_decay >= 0"),
        (lambda: optim.Adam(0.1, beta2=1.5), r"beta2 in \[0, 1\), got 1.5"),
        (lambda: optim.AdamW(0.1, epsilon=0.0), "AdamW needs epsilon > 0"),
        (
            lambda: optim.SGD(0.1, decay="both"),  # type: ignore[arg-type]
            "'coupled', 'decoupled', got 'both'",
        ),
        (lambda: optim.SGD(0.1, dampening=0.1), "dampening only with a momentum"),
        (lambda: optim.RMSProp(alpha=1.0), r"alpha in \[0, 1\), got 1.0"),
        (lambda: optim.RMSProp(epsilon=0.0), "epsilon > 0, got 0.0"),
        (lambda: optim.Adagrad(start=-1.0), "Adagrad needs start in"),
        (lambda: optim.Adadelta(rho=-0.1), "Adadelta needs rho in"),
        (lambda: optim.Adafactor(fade=1.0), "Adafactor needs fade in"),
        (lambda: optim.LAMB(beta1=1.0), "LAMB needs beta1 in"),
        (lambda: optim.Lion(beta2=2.0), "Lion needs beta2 in"),
        (lambda: optim.Group(""), "a group needs a pattern"),
        (lambda: optim.Group("a", frozen=True, lr=0.1), "'a' is frozen and ignores lr"),
        (lambda: optim.Group("a", groups=()), "cannot hold groups"),
        (
            lambda: optim.SGD(0.1, groups=(optim.Group("a", beta1=0.1),)),
            "which is no option of SGD; it has dampening, decay, lr, momentum",
        ),
        (lambda: optim.SGD(0.1, groups=(optim.Group("a", lr=-1),)), ">= 0, got -1"),
        (lambda: optim.Piecewise((3,), (0.1,)), "got 1 rates and 1 bounds"),
        (lambda: optim.MultiStep(0.1, 0.5, (3, 3)), r"increasing bounds >= 1, got \[3, 3\]"),
        (lambda: optim.Chained((0.1,), (1,)), "got 1 and 1"),
        (lambda: optim.Polynomial(0.1, 5, power=0), "power > 0, got 0"),
        (lambda: optim.CosineRestarts(0.1, 5, growth=0), "growth >= 1, got 0"),
        (lambda: optim.OneCycle(0.1, 10, rise=1.0), "either side of its top"),
        (
            lambda: optim.OneCycle(0.1, 10, shape="sine"),  # type: ignore[arg-type]
            "'cosine', 'line', got 'sine'",
        ),
        (lambda: optim.clip_by_value({}, -1.0), "element is clipped to a limit > 0"),
        (lambda: optim.clip_by_norm({}, float("nan")), "norm is clipped to a limit > 0"),
        (lambda: optim.Cosine(0.1, 0), "Cosine needs steps >= 1"),
        (lambda: optim.Warmup(0, 0.1), "Warmup needs steps >= 1"),
        (lambda: optim.Exponential(0.1, -1.0), "factor > 0"),
        (lambda: optim.StepDecay(0.1, 0.0, 3), "factor > 0"),
        (lambda: optim.clip_by_global_norm({}, 0.0), "limit > 0"),
    ],
)
def test_senseless_numbers_are_refused(make, said):
    with pytest.raises(InvalidInput, match=said):
        make()


def test_epsilon_of_adagrad_is_added_to_the_root():
    p, g = {"w": np.zeros(1, np.float32)}, {"w": np.full((1, 1), 0.5, np.float32)}
    (after,) = run(optim.Adagrad(1.0, epsilon=0.5), p, g, "reference", steps=1)
    np.testing.assert_allclose(after["w"], [-0.5 / (0.5 + 0.5)], rtol=1e-6)  # g / (sqrt(g^2) + e)

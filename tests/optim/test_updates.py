"""Twenty updates against PyTorch's, from gradients that span four orders of magnitude."""

from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import optim
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import TensorSpec, type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

GOLDEN = Path(__file__).parents[1] / "golden" / "optim" / "updates.npz"
STEPS = 20
CLIP_NORM = 2.0

# fmt: off
CASES = {
    "sgd":         optim.SGD(0.1),
    "sgd_decay":   optim.SGD(0.1, weight_decay=0.05),
    "momentum":    optim.SGD(0.1, momentum=0.9),
    "nesterov":    optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam":        optim.Adam(0.01),
    "adam_betas":  optim.Adam(0.01, beta1=0.0, beta2=0.9, epsilon=1e-3),
    "adam_decay":  optim.Adam(0.01, weight_decay=0.05),
    "adamw":       optim.AdamW(0.01, weight_decay=0.05),
    "cosine":      optim.SGD(optim.Cosine(0.1, 15, low=0.01)),
    "exponential": optim.SGD(optim.Exponential(0.1, 0.8)),
    "step_decay":  optim.SGD(optim.StepDecay(0.1, 0.5, 6)),
    "warmup":      optim.SGD(optim.Warmup(8, 0.1)),
    "clipped":     optim.SGD(0.1),
}
# fmt: on


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as held:
        return {name: held[name] for name in held.files}


def update_function(optimizer, params, *, clip=None):
    """Parameters, gradients `g.NAME` and state -> next parameters and state."""
    with (build := Build(TABLE, "update")):
        p = {k: build.param(k, type_of(a)) for k, a in params.items()}
        g = {k: build.param(f"g.{k}", type_of(a)) for k, a in params.items()}
        types = optimizer.state_types({k: type_of(a) for k, a in params.items()})
        state = {k: build.param(k, t) for k, t in types.items()}
        if clip:
            g = optim.clip_by_global_norm(g, clip)
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
def test_twenty_updates_follow_pytorch(name, engine_name, golden):
    params = {k: golden[f"start/{k}"] for k in ("w", "b")}
    grads = {k: golden[f"grad/{k}"] for k in params}
    clip = CLIP_NORM if name == "clipped" else None
    states = run(CASES[name], params, grads, engine_name, clip=clip)
    for k in params:
        ours = np.stack([s[k] for s in states])
        np.testing.assert_allclose(ours, golden[f"{name}/{k}"], rtol=2e-6, atol=2e-6)


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
    (state,) = run(optim.SGD(1.0), params, grads, "onnx", clip=1.0, steps=1)
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

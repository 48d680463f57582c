import numpy as np
import pytest

from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.fuse import LARGE_SIDE, fuse

SPECS = {
    "w": TensorSpec((6, 5)), "v": TensorSpec((6, 5)), "a": TensorSpec(("N", 6)),
    "b": TensorSpec(("N", 5)), "lr": TensorSpec(()),
}  # fmt: skip


def function(specs, body):
    build = Build(TABLE, "f")
    with build:
        made = body(**{k: build.param(k, spec) for k, spec in specs.items()})
    return build.finish(made if isinstance(made, dict) else {"y": made})


def names(f):
    return [n.op.name for n in f.nodes if n.op.name != "Constant"]


def equal_before_and_after(f, args, *, close=1e-5):
    """The fused function on reference, and the whole path through onnxruntime."""
    wanted = run_function(TABLE, f, args)
    for found in (run_function(TABLE, fuse(f), args), engine("onnx").compile(f)(*args)):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=close, atol=close)


def arrays(f, n=3):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(p.type.concrete({"N": n})).astype(np.float32) for p in f.params]


def product(a, b, **attrs):
    return ops.gemm(a, b, transA=1, **attrs)


def updated(w, g, lr, name):
    return {"w": w - (g * lr if lr != 1.0 else g), name: g}


# fmt: off
FUSED = {
    "update": lambda w, a, b, **_: w - product(a, b) * 0.1,
    "update, rate first": lambda w, a, b, **_: w - 0.1 * product(a, b),
    "update by a scaled product": lambda w, a, b, **_: w - product(a, b, alpha=0.5) * 0.1,
    "momentum": lambda v, a, b, **_: v * 0.9 + product(a, b),
    "momentum, product first": lambda v, a, b, **_: product(a, b, alpha=2.0) + 0.9 * v,
}
APART = {
    "rate that is no constant": lambda w, a, b, lr, **_: w - product(a, b) * lr,
    "gradient that is read again": lambda w, a, b, **_: updated(w, product(a, b), 0.1, "g"),
    "scaled gradient that is read again": lambda w, a, b, **_: updated(
        w, product(a, b) * 0.1, 1.0, "g"),
    "weight that is broadcast": lambda w, a, b, **_: w[0] - product(a, b) * 0.1,
    "product with a bias": lambda w, v, a, b, **_: w - ops.gemm(a, b, v, transA=1) * 0.1,
    "gradient minus weight": lambda w, a, b, **_: product(a, b) * 0.1 - w,
}
# fmt: on


@pytest.mark.parametrize("name", FUSED)
def test_an_update_becomes_one_product(name):
    f = function(SPECS, FUSED[name])
    assert names(fuse(f)) == ["Gemm"]
    equal_before_and_after(f, arrays(f))


@pytest.mark.parametrize("name", APART)
def test_what_would_change_a_result_is_left_apart(name):
    f = function(SPECS, APART[name])
    assert names(fuse(f)) == names(f)
    equal_before_and_after(f, arrays(f))


def test_momentum_and_its_update_both_read_the_product_once():
    def body(w, v, a, b, **_):
        moved = v * 0.9 + product(a, b)
        return {"v": moved, "w": w - moved * 0.1}

    f = function(SPECS, body)
    assert names(fuse(f)) == ["Gemm", "Mul", "Sub"]
    equal_before_and_after(f, arrays(f))


def test_the_momentum_of_a_1_x_1_kernel_is_part_of_its_gradients_product():
    def body(v, a, b, **_):
        return v * 0.9 + product(a, b).reshape((6, 5, 1, 1))

    f = function({**SPECS, "v": TensorSpec((6, 5, 1, 1))}, body)
    assert names(fuse(f)) == ["Reshape", "Gemm", "Reshape"]
    equal_before_and_after(f, arrays(f))


@pytest.mark.parametrize(
    ("velocity", "shape"), [((4, 6, 5), (1, 6, 5)), ((4, 30), (30,)), ((2, 6, 5), (6, 5))]
)
def test_a_reshaped_product_that_is_broadcast_is_left_apart(velocity, shape):
    f = function(
        {**SPECS, "v": TensorSpec(velocity)},
        lambda v, a, b, **_: v * 0.9 + product(a, b).reshape(shape),
    )
    assert names(fuse(f)) == names(f)
    equal_before_and_after(f, arrays(f))


def test_a_reshaped_product_of_an_open_batch_is_left_apart():
    specs = {"x": TensorSpec(("N", 6)), "w": TensorSpec((6, 5))}
    f = function(
        specs,
        lambda x, w: x[:, :5].reshape((-1, 1, 5)) * 0.5 + ops.gemm(x, w).reshape((-1, 1, 5)),
    )
    equal_before_and_after(f, arrays(f, 3))


N = LARGE_SIDE
LARGE = {"x": TensorSpec(("N", N)), "w": TensorSpec((N, N)), "b": TensorSpec((N,))}


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_large_weight_goes_to_the_left(transposed, batch):
    f = function(LARGE, lambda x, w, b: ops.gemm(x, w, b, transB=transposed))
    assert "MatMul" in names(fuse(f))
    assert "Gemm" not in names(fuse(f))
    equal_before_and_after(f, arrays(f, batch), close=1e-3)
    plain = function(LARGE, lambda x, w, b: ops.gemm(x, w, transB=transposed) + b)
    equal_before_and_after(plain, arrays(plain, batch), close=1e-3)


def test_small_and_computed_weights_stay_right():
    f = function({**LARGE, "w": TensorSpec((N - 1, N))}, lambda x, w, **_: ops.linear(x, w))
    assert names(fuse(f)) == ["Gemm"]
    f = function(LARGE, lambda x, w, b: ops.linear(x, w * 2.0, b))
    assert names(fuse(f)) == ["Mul", "Gemm"]

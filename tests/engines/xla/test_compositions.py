"""Transforms, alignments, lengths, own kernels and recomputing: what others compose, on XLA."""

import jax
import numpy as np
import pytest
from tests.support.xla import agrees

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.xla.lower import Requirements, Trace
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.ctc import ctc
from triplane.unified_ir.ops.rows.arithmetic.signal import dft
from triplane.unified_ir.ops.rows.control.control import numbered
from triplane.unified_ir.ops.rows.control.custom_gradients import checkpointed
from triplane.unified_ir.ops.rows.control.custom_ops import KERNELS
from triplane.unified_ir.ops.rows.recurrence.recurrent import lstm
from triplane.unified_ir.ops.table import TABLE

pytestmark = pytest.mark.long  # compiling takes long


@pytest.fixture(autouse=True)
def no_kernels_stay():
    before = dict(KERNELS)
    yield
    KERNELS.clear()
    KERNELS.update(before)


def function_of(f, **specs):
    """The function of parameters of these (shape, element type), summed up if not yet a scalar."""
    build = Build(TABLE, "f")
    with build:
        y = f(*(build.param(name, TensorSpec(*spec)) for name, spec in specs.items()))
        return build.finish({"loss": y.sum() if y.rank else y})


@pytest.mark.parametrize(("dtype", "close"), [("float16", 1e-2), ("float64", 1e-12)])
def test_transforms_of_any_length_and_type_equal_those_of_reference(dtype, close):
    """Odd and even, cut and padded, along a middle axis; what an inverse ignores is not 0."""
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec((2, 7, 3, 2), dtype))
        along = np.array(1)
        ys = [
            dft(x[..., :1], np.array(10), along, onesided=1),
            dft(x[..., :1], np.array(5), along),
            dft(x, None, np.array(-2), inverse=1),
            dft(x, None, along, inverse=1, onesided=1),
            dft(x, np.array(9), along, inverse=1, onesided=1),
        ]
        function = build.finish(numbered(ys))
    signal = np.random.default_rng(0).standard_normal((2, 7, 3, 2)).astype(dtype)
    agrees(function, [signal], rtol=close, atol=close)


def alignment(x, labels, counts, steps):
    return ctc(ops.log_softmax(x, axis=2), labels, counts, input_lengths=steps)


ALIGNED = {
    "x": ((2, 6, 4),), "labels": ((2, 3), "int64"), "counts": ((2,), "int64"),
    "steps": ((2,), "int64"),
}  # fmt: skip


@pytest.mark.parametrize("order", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_loss_of_an_alignment_and_its_gradient_equal_those_of_reference(order):
    function = function_of(alignment, **ALIGNED)
    x = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
    labels = np.array([[1, 2, 2], [3, 0, 0]])
    args = [x, labels, np.array([3, 1]), np.array([6, 4])]
    agrees(value_and_grad(function, ["x"]) if order else function, args)
    if not order:
        with pytest.raises(InvalidInput, match="GatherElements"):
            engine("xla").compile(function)(x, np.where(labels == 3, 0, labels), *args[2:])


def test_a_length_outside_the_steps_is_refused():
    shapes = {"x": (4, 3, 2), "w": (1, 8, 2), "r": (1, 8, 2)}
    specs = {name: (shape,) for name, shape in shapes.items()}
    function = function_of(
        lambda x, w, r, lengths: lstm(x, w, r, None, lengths, hidden_size=2),
        **specs, lengths=((3,), "int32"),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes.values()]
    program = engine("xla").compile(function)
    assert np.isfinite(program(*args, np.array([0, 2, 4], np.int32))[0])
    for wrong in (-1, 5):
        with pytest.raises(InvalidInput, match="the graph failed on these values"):
            program(*args, np.array([0, wrong, 4], np.int32))


def test_an_own_operator_runs_its_kernel_for_xla_or_its_body():
    calls = []

    def kernel(x):
        calls.append("kernel")
        return x + x

    double = ops.custom("DoubleOnXla", domain="org.example", kernels={"xla": kernel})(
        lambda x: x * 2.0
    )
    triple = ops.custom("TripleOnXla", domain="org.example", kernels={"onnx": kernel})(
        lambda x: x * 3.0
    )
    function = function_of(lambda x: double(x) + triple(x), x=((2,),))
    assert engine("xla").compile(function)(np.array([1, 2], np.float32))[0] == 15
    assert calls == ["kernel"]


def test_an_own_kernel_that_differs_is_refused():
    wrong = ops.custom("WrongOnXla", domain="org.example", kernels={"xla": lambda x: x + 1.0})(
        lambda x: x * 2.0
    )
    function = function_of(wrong, x=((2,),))
    with pytest.raises(InvalidInput, match=r"xla kernel of org\.example\.WrongOnXla"):
        engine("xla").compile(function)


def chain(*, recompute):
    """Six blocks of three layers, with the gradient of each layer's weight."""

    def block(xs):
        h, w = xs
        for _ in range(3):
            h = ops.tanh(ops.sin(h @ w) * h)
        return h

    def layers(x, *weights):
        for w in weights:
            if recompute:
                build = Build(TABLE, "block")
                with build:
                    params = [build.param(n, v.type) for n, v in (("h", x), ("w", w))]
                    body = build.finish(numbered([block(params)]))
                (x,) = checkpointed(body, [x, w])
            else:
                x = block([x, w])
        return x * x

    weights = {f"w{i}": ((16, 16),) for i in range(6)}
    return value_and_grad(function_of(layers, x=((512, 16),), **weights), list(weights))


@pytest.mark.slow
def test_a_checkpoint_is_not_undone():
    def temporary_bytes(function):
        specs = [jax.ShapeDtypeStruct(p.type.concrete({}), np.float32) for p in function.params]
        run = jax.jit(lambda *args: Trace(Requirements(), {}).run(function, args))
        analysis = run.lower(*specs).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    kept, recomputed = (temporary_bytes(chain(recompute=flag)) for flag in (False, True))
    assert recomputed < 0.5 * kept

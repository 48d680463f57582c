"""Control flow: values, first and second order gradients, on reference and onnxruntime."""

import numpy as np
import pytest
from tests.conformance.checks import FIRST, SECOND, agree, central_difference
from tests.conformance.uses import naming, slope
from tests.support.control_cases import CASES, recorded, squares

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE

SINGLE = {"rtol": 1e-3, "atol": 1e-4}


def slopes_hold(scalar, args, tolerance):
    gradients = value_and_grad(scalar)
    _, *found = run_function(TABLE, gradients, list(args.values()))
    rng = np.random.default_rng(1)
    for (name, x), g in zip(args.items(), found, strict=True):
        direction = rng.standard_normal(x.shape)
        assert g.shape == x.shape
        want = central_difference(TABLE, scalar, args, name, direction)
        assert abs((g * direction).sum() - want) <= tolerance * max(1.0, abs(want)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_both_orders_equal_central_differences(name):
    function, args = recorded(name, np.float64)
    with naming(name):
        slopes_hold(function, args, FIRST)
        slopes_hold(squares(function), args, SECOND)


ON_ONNX = [name for name in CASES if name != "scan without trips"]  # refused, see below


@pytest.mark.slow
@pytest.mark.parametrize("opset", [17, 21, 26])
@pytest.mark.parametrize("name", ON_ONNX)
def test_onnx_agrees_with_reference_up_to_second_order(name, opset):
    function, args = recorded(name, np.float32)
    with naming(name):
        for derived in (function, value_and_grad(function), value_and_grad(squares(function))):
            wanted = engine("reference").compile(derived)(*args.values())
            program = OnnxEngine(target=OnnxTarget(opset)).compile(derived)
            agree(program(*args.values()), wanted, name, close=SINGLE)


@pytest.mark.parametrize("name", ON_ONNX)
def test_ascend_runs_every_case_near_reference(name):
    function, args = recorded(name, np.float32)
    wanted = engine("reference").compile(function)(*args.values())
    found = engine("ascend").compile(function)(*args.values())
    agree(found, wanted, name, close={"rtol": 0.02, "atol": 0.02})


@pytest.mark.parametrize("engine_name", ["reference", "onnx"])
@pytest.mark.parametrize("name", ["scan forward", "scan backward", "for inside scan"])
def test_one_program_runs_at_any_length(name, engine_name):
    function, args = recorded(name, np.float32)
    program = engine(engine_name).compile(value_and_grad(function))
    rng = np.random.default_rng(2)
    for length in (1, 2, 7) if engine_name == "onnx" else (0, 1, 2, 7):
        xs = rng.standard_normal((length, 3)).astype(np.float32)
        loss, d_h, d_xs, d_w = program(args["h"], xs, args["w"])
        assert d_xs.shape == (length, 3)
        assert (d_h.shape, d_w.shape) == ((3,), (3, 3))
        assert np.isfinite(loss)


def test_onnx_refuses_to_scan_nothing():
    function, args = recorded("scan without trips", np.float32)
    with pytest.raises(InvalidInput, match=r"triplane\.Scan"):
        engine("onnx").compile(function)(*args.values())


@pytest.mark.parametrize("engine_name", ["reference", "onnx"])
@pytest.mark.parametrize("name", ["scan forward", "while", "for", "if inside for"])
def test_a_function_with_loops_inlines_twice(name, engine_name):
    function, args = recorded(name, np.float32, symbolic=False)
    gradients = value_and_grad(function)
    build = Build(TABLE, "twice")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        once = inline(gradients, params)
        again = inline(gradients, [p * 0.5 for p in params])
    twice = build.finish({f"y{i}": y for i, y in enumerate([*once, *again])})
    halves = [a * np.float32(0.5) for a in args.values()]
    run = engine(engine_name).compile(gradients)
    wanted = [*run(*args.values()), *run(*halves)]
    agree(engine(engine_name).compile(twice)(*args.values()), wanted, name)


@pytest.mark.slow
def test_slope_of_a_slope_through_a_loop_is_a_loop_again():
    function, args = recorded("for", np.float64)
    ones = {k: np.ones_like(a) for k, a in args.items()}
    second = slope(slope(function, list(args), ones), list(args), ones)
    third = value_and_grad(second)
    assert any(n.op.name == "Loop" for n in third.nodes)
    slopes_hold(second, args, SECOND)


def test_loops_that_change_their_state_are_refused():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec((2, 3)))
        with pytest.raises(InvalidInput, match="keep shapes and element types the same"):
            ops.fori_loop(2, lambda _, c: ops.concat([c, c]), x)
        with pytest.raises(InvalidInput, match="keep the types of its carry"):
            ops.scan(lambda h, _: (h.cast("float64"), h), x[0], x)
        with pytest.raises(InvalidInput, match="both branches"):
            ops.cond(x.sum() > 0.0, lambda: x, lambda: x[0])
        with pytest.raises(InvalidInput, match="condition is a bool scalar"):
            ops.cond(x.sum(), lambda: x, lambda: x)


def test_own_gradients_take_everything_as_argument():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec((3,)))
        with pytest.raises(InvalidInput, match="must take everything it uses as an argument"):
            ops.custom_gradient(lambda y: y * x, lambda *args: args[-1], x * 2.0)


def test_a_weights_gradient_is_one_product_after_the_walk_and_not_a_sum_in_it():
    """For a weight used as it is and for one turned; factors computed, scanned, read twice."""
    build = Build(TABLE, "walk")
    with build:
        xs, w, v, h = (
            build.param(n, TensorSpec(s, "float64"))
            for n, s in (("xs", (4, 3, 2)), ("w", (5, 2)), ("v", (5, 5)), ("h", (3, 5)))
        )

        def step(state, x):
            after = ops.tanh(ops.gemm(x, w, transB=1) + state @ v)
            return after, (after * after).sum()

        last, ys = ops.scan(step, h, xs)
        function = build.finish({"loss": ys.sum() + (last * last).sum()})
    gradients = value_and_grad(function, ["w", "v", "h"])
    (back,) = [n for n in gradients.nodes if n.op.name == "Scan" and n.attrs.get("reverse")]
    assert back.attrs["num_carry"] == 1, "of w and v nothing is carried"
    rng = np.random.default_rng(4)
    args = {p.name: rng.standard_normal(p.type.concrete({})) for p in function.params}
    found = dict(
        zip(
            gradients.result_names, run_function(TABLE, gradients, list(args.values())), strict=True
        )
    )
    for name in ("w", "v", "h"):
        direction = rng.standard_normal(args[name].shape)
        want = central_difference(TABLE, function, args, name, direction)
        assert float((found[f"grad.{name}"] * direction).sum()) == pytest.approx(want, rel=1e-6)

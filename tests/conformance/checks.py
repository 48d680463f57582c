"""What must hold for one use of one row: each check raises AssertionError naming the row."""

from dataclasses import replace

import numpy as np
import pytest
from tests.conformance.rows import MISSING
from tests.conformance.uses import naming, recorded, slope, weighted_sum

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.autodiff.vectorize import vectorize
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.ascend import AscendEngine, round_cube_operands
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir.dims import evaluate, is_symbol
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.batching import with_axis
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
"""float32 on different kernels; sums have at most some hundred terms of order one."""

ROUGH = {"rtol": 2e-4, "atol": 2e-4}
"""The same for gradients, which are longer."""

FIRST, SECOND = 1e-6, 1e-5
"""Error of a central difference relative to max(1, |slope|), float64 throughout."""

STEP, COARSE_STEP = 1e-5, 1e-2
"""Finite difference steps; the coarse one where a use passes through float32."""


def agree(found, wanted, what, *, close=None):
    """Equal element types, shapes and values."""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        label = f"{what}, result {i}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (
            f"{label}: {a.dtype}{a.shape} against {b.dtype}{b.shape}"
        )
        if a.dtype.kind in "iubO":
            np.testing.assert_array_equal(a, b, err_msg=label)
        else:
            np.testing.assert_allclose(a, b, err_msg=label, **(close or CLOSE))


def reference_runs_as_inferred(use):
    """The reference kernel gives what inference promised, in float32 and float64."""
    for dtype in (np.float32, np.float64):
        with naming(f"{use} in {np.dtype(dtype)} on reference"):
            function, args = recorded(use, dtype)
            results = ReferenceEngine().compile(function)(*args.values())
            has_types(function, results, {})


def has_types(function, results, sizes):
    """Results are as inferred; a size that only the data decide is what it is, once."""
    sizes = dict(sizes)
    for result, array in zip(function.results, results, strict=True):
        made = f"inferred {result.type}, produced {array.dtype}{array.shape}"
        assert array.dtype == result.type.dtype.numpy, made
        assert array.ndim == result.type.rank, made
        for dim, size in zip(result.type.shape, array.shape, strict=True):
            if is_symbol(dim):
                sizes.setdefault(str(dim), size)
            assert evaluate(dim, sizes) == size, made


def body_means_the_same(use):
    """The body, which opsets without the operator get, computes what the kernel computes."""
    with naming(f"body of {use}"):
        function, args = recorded(use, np.float64)
        wanted = run_function(use.table, function, list(args.values()))
        bodied = {**use.table, (use.row.domain, use.row.name): replace(use.row, reference=None)}
        agree(run_function(bodied, function, list(args.values())), wanted, str(use))


def onnx_agrees(use, opset):
    """The emitted graph, on onnxruntime, computes what the reference kernel computes."""
    with naming(f"{use} at opset {opset}"):
        function, args = recorded(use, np.float32)
        wanted = ReferenceEngine().compile(function)(*args.values())
        program = OnnxEngine(target=OnnxTarget(opset)).compile(function)
        agree(program(*args.values()), wanted, str(use))


def onnx_refuses_by_name(use, opset):
    """A row the opset cannot express is refused, naming row and opset."""
    function, _ = recorded(use, np.float32)
    with naming(f"{use} at opset {opset}"):
        try:
            OnnxEngine(target=OnnxTarget(opset)).compile(function)
        except InvalidInput as error:
            assert f"opset {opset}" in str(error), error
            assert "does not exist in" in str(error), error
        else:
            raise AssertionError(f"opset {opset} was expected to lack a row that {use} needs")


def ascend_agrees(use):
    """The ascend engine equals the reference on the function with rounded cube operands."""
    with naming(f"{use} on ascend"):
        function, args = recorded(use, np.float32)
        wanted = ReferenceEngine().compile(round_cube_operands(function))(*args.values())
        agree(AscendEngine().compile(function)(*args.values()), wanted, str(use))


def symbolic_form(use):
    """(function, arguments, numbers of operands) with a symbolic first axis, where allowed.

    Tried in turn: the first operand alone, then all operands whose first axes are equally long.
    """
    leads = {
        i: a.shape[0]
        for i, a in enumerate(use.arrays(np.float32))
        if a is not None and a.ndim and not use.is_constant(i, a)
    }
    together = [tuple(i for i in leads if leads[i] == n) for n in dict.fromkeys(leads.values())]
    for operands in [(0,), *together] if 0 in leads else together:
        try:
            return (*recorded(use, np.float32, symbolic=operands), operands)
        except InvalidInput:
            continue
    return None


def symbolic_axis_keeps_types(use, opset=21):
    """With N for the first axis, one program runs at two sizes, as inferred, on both engines."""
    form = symbolic_form(use)
    assert form is not None, f"{use} refuses a symbolic first axis"
    function, args, operands = form
    with naming(f"{use} with a symbolic first axis"):
        program = OnnxEngine(target=OnnxTarget(opset)).compile(function)
        for times in (1, 2):
            given = [
                np.concatenate([a] * times) if int(name[1:]) in operands else a
                for name, a in args.items()
            ]
            sizes = {"N": times * len(args[f"x{operands[0]}"])}
            wanted = ReferenceEngine().compile(function)(*given)
            has_types(function, wanted, sizes)
            agree(program(*given), wanted, f"{use} at N={sizes['N']}")
        if use.sample.outputs == 1:
            static = ReferenceEngine().compile(recorded(use, np.float32)[0])
            once = ReferenceEngine().compile(function)(*args.values())
            agree(once, static(*args.values()), f"{use}, static against symbolic")


def gradients_hold(use):
    """First and second order: slopes along random directions equal central differences."""
    function, args = recorded(use, np.float64)
    scalar = weighted_sum(function, np.float64, table=use.table)
    names = use.smooth(args)
    if scalar is None or not names:
        return
    rng = np.random.default_rng(1)
    directions = {n: rng.standard_normal(args[n].shape) for n in names}
    coarse = any(r.type.dtype.name == "float32" for r in function.results)
    with naming(f"gradient of {use}"):
        _slopes_hold(use, scalar, args, directions, FIRST, coarse=coarse)
    with naming(f"second-order gradient of {use}"):
        first = slope(scalar, names, directions, table=use.table)
        _slopes_hold(use, first, args, directions, SECOND, coarse=coarse)


def _slopes_hold(use, scalar, args, directions, tolerance, *, coarse):
    gradients = value_and_grad(scalar, list(directions))
    results = run_function(use.table, gradients, list(args.values()))
    found = dict(zip(gradients.result_names, results, strict=True))
    for name, direction in directions.items():
        g = found[f"grad.{name}"]
        assert g.shape == direction.shape, f"gradient {g.shape} of {name} {direction.shape}"
        got = float((g * direction).sum())
        want = central_difference(use.table, scalar, args, name, direction, coarse=coarse)
        bound = (1e-4 if coarse else tolerance) * max(1.0, abs(want))
        assert abs(got - want) <= bound, f"along {name}: {got} by rule, {want} by differences"


def central_difference(table, scalar, args, name, direction, *, coarse=False):
    """(f(x + h v) - f(x - h v)) / 2h on the reference kernels."""
    step = COARSE_STEP if coarse else STEP
    ends = []
    for sign in (1, -1):
        moved = {**args, name: args[name] + sign * step * direction}
        ends.append(float(run_function(table, scalar, list(moved.values()))[0]))
    return (ends[0] - ends[1]) / (2 * step)


def gradient_is_zero(use):
    """Where the rule says the slope is zero, every gradient is exactly zero."""
    function, args = recorded(use, np.float64)
    scalar = weighted_sum(function, np.float64, table=use.table)
    if scalar is None:
        return
    with naming(f"gradient of {use}"):
        gradients = value_and_grad(scalar)
        _, *found = ReferenceEngine().compile(gradients)(*args.values())
        assert found
        assert not any(g.any() for g in found), "a flat row has gradient zero"


def double_gradients_agree(use):
    """Where onnxruntime computes a row in float64, it also computes the gradients of both orders.

    The tolerance is that of its DFT kernel, whose inverse multiplies by a float32 number.
    """
    function, args = recorded(use, np.float64)
    scalar, names = weighted_sum(function, np.float64, table=use.table), use.smooth(args)
    if scalar is None or not names or not _runs(function, args):
        return
    second = slope(scalar, names, {n: np.ones_like(args[n]) for n in names}, table=use.table)
    for order, total in ((1, scalar), (2, second)):
        with naming(f"gradient of order {order} of {use} in float64"):
            gradients = value_and_grad(total, names)
            wanted = ReferenceEngine().compile(gradients)(*args.values())
            found = OnnxEngine().compile(gradients)(*args.values())
            agree(found, wanted, str(use), close={"rtol": 1e-6, "atol": 1e-6})


def _runs(function, args):
    try:
        OnnxEngine().compile(function)(*args.values())
    except InvalidInput:
        return False
    return True


def gradient_graph_agrees(use):
    """The gradient as a graph: onnxruntime and ascend give what reference gives, in float32."""
    function, args = recorded(use, np.float32)
    scalar = weighted_sum(function, np.float32, table=use.table)
    names = use.smooth(args)
    if scalar is None or not names:
        return
    with naming(f"gradient graph of {use}"):
        gradients = value_and_grad(scalar, names)
        wanted = ReferenceEngine().compile(gradients)(*args.values())
        found = OnnxEngine().compile(gradients)(*args.values())
        agree(found, wanted, str(use), close={"rtol": 1e-4, "atol": 1e-4})
        wanted = ReferenceEngine().compile(round_cube_operands(gradients))(*args.values())
        found = AscendEngine().compile(gradients)(*args.values())
        agree(found, wanted, f"{use} on ascend", close={"rtol": 1e-3, "atol": 1e-3})


SIZE = 2
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def batched(function, flags, table=TABLE):
    """The function with a batch of each marked parameter, all results batched."""
    build = Build(table, function.name)
    with build:
        params = [
            build.param(p.name, p.type.with_shape((SIZE, *p.type.shape)) if b else p.type)
            for p, b in zip(function.params, flags, strict=True)
        ]
        results, found = vectorize(function, params, flags, SIZE)
        made = [y if b else with_axis(y, SIZE) for y, b in zip(results, found, strict=True)]
    return build.finish({f"y{i}": y for i, y in enumerate(made)})


def slices(use, names):
    """Operands by parameter for each slice: other seeds, other numbers of the same kind."""
    made = []
    for seed in range(SIZE):
        arrays = use.sample.arrays(seed)
        made.append({n: np.asarray(arrays[int(n[1:])]) for n in names})
    return made


def check(function, given, flags, engines, close, table=TABLE):
    names = function.param_names
    one = ReferenceEngine().compile(function)
    at = [[g if b else given[0] for b in flags] for g in given]
    wanted = [one(*(row[k][n] for k, n in enumerate(names))) for row in at]
    feeds = [
        np.stack([g[n] for g in given]) if b else given[0][n]
        for n, b in zip(names, flags, strict=True)
    ]
    made = batched(function, flags, table)
    for made_by in engines:
        found = made_by.compile(made)(*feeds)
        for k, y in enumerate(found):
            stacked = np.stack([w[k] for w in wanted])
            if stacked.dtype.kind in "OSUiub":
                np.testing.assert_array_equal(y, stacked)
            else:
                np.testing.assert_allclose(y, stacked, **close)


def batches_agree(use):
    """A batch of all operands, and one of the first alone, give what single slices give."""
    function, args = recorded(use, np.float32)
    if not args:
        return
    given = [{n: a.astype(args[n].dtype) for n, a in g.items()} for g in slices(use, list(args))]
    target = OnnxTarget(26 if str(use.row) in MISSING[21] else 21)
    engines = [ReferenceEngine(), OnnxEngine(target=target)]
    masks = {tuple([True] * len(args)), tuple(k == 0 for k in range(len(args)))}
    for flags in sorted(masks):
        with naming(f"{use} under vmap"):
            check(function, given, flags, engines, CLOSE, use.table)


def xla_agrees(use):
    """XLA computes what the reference kernel computes."""
    _agrees_on(use, engine("xla"))


def cuda_agrees(use):
    """onnxruntime's CUDA kernels compute what the reference kernel computes."""
    _agrees_on(use, engine("onnx", device="cuda"))


def forms_for_cuda_agree(use, opset):
    """The graph that is written for CUDA means the same, on a CPU."""
    _agrees_on(use, OnnxEngine(target=OnnxTarget(opset, device="cuda")))


def _agrees_on(use, tried):
    with naming(f"{use} on {tried.name}"):
        function, args = recorded(use, np.float32)
        wanted = ReferenceEngine().compile(function)(*args.values())
        agree(tried.compile(function)(*args.values()), wanted, str(use))


def xla_refuses_by_name(use):
    """What XLA cannot do is refused before anything is compiled, with the way out."""
    function, _ = recorded(use, np.float32)
    with pytest.raises(InvalidInput, match="use the engine 'onnx'"):
        engine("xla").compile(function)


def xla_gradients_agree(use):
    """The gradients of both orders on XLA, in float32, are those of the reference engine."""
    _gradients_agree_on(use, engine("xla"))


def cuda_gradients_agree(use):
    """The same on onnxruntime's CUDA kernels."""
    _gradients_agree_on(use, engine("onnx", device="cuda"))


def _gradients_agree_on(use, tried):
    function, args = recorded(use, np.float32)
    scalar = weighted_sum(function, np.float32, table=use.table)
    names = use.smooth(args)
    if scalar is None or not names:
        return
    rng = np.random.default_rng(1)
    directions = {n: rng.standard_normal(args[n].shape).astype(np.float32) for n in names}
    second = slope(scalar, names, directions, table=use.table)
    for order, total in ((1, scalar), (2, second)):
        with naming(f"gradient of order {order} of {use} on {tried.name}"):
            gradients = value_and_grad(total, names)
            wanted = ReferenceEngine().compile(gradients)(*args.values())
            agree(
                tried.compile(gradients)(*args.values()),
                wanted,
                str(use),
                close={"rtol": 2e-4, "atol": 2e-4},
            )

"""Every row under vmap: a batch gives what a Python loop over its slices gives."""

import numpy as np
import pytest
from tests.conformance.test_rows import FLAT, MISSING, ids
from tests.conformance.uses import first_shallow, naming, recorded, uses_of, weighted_sum

from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.autodiff.vectorize import vectorize
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.batching import Ragged, with_axis
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import introduced
from triplane.unified_ir.ops.table import TABLE

SIZE = 2
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
COARSE = {"rtol": 1e-4, "atol": 1e-4}
SCANNED_IS_ENOUGH = 0.25
"""Share of the rows with samples that may run under a scan, for want of a rule or a body."""


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


def plain(use):
    return all(a is None or isinstance(a, np.ndarray) for a in use.sample.arrays())


def opens(function):
    """Whether some size depends on data."""
    return any(introduced(node) for node in function.nodes)


USES = [use for use in uses_of() if plain(use)]


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
    for engine in engines:
        found = engine.compile(made)(*feeds)
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


@pytest.mark.parametrize("use", USES, ids=ids(USES))
def test_a_batch_gives_what_a_loop_over_its_slices_gives(use):
    function, args = recorded(use, np.float32)
    if opens(function):
        with pytest.raises(Ragged, match="size depends on values"):
            batched(function, (True,) * len(args))
    else:
        batches_agree(use)


SMOOTH = [use for use in USES if use.row.differentiable and str(use.row) not in FLAT]


@pytest.mark.slow
@pytest.mark.parametrize("use", first_shallow(SMOOTH), ids=ids(SMOOTH))
def test_the_gradient_of_each_slice_is_its_own(use):
    function, args = recorded(use, np.float32)
    scalar = weighted_sum(function, np.float32)
    names = use.smooth(args)
    if scalar is None or not names or opens(function):
        return
    given = [{n: a.astype(args[n].dtype) for n, a in g.items()} for g in slices(use, list(args))]
    check(value_and_grad(scalar, names), given, (True,) * len(args), [ReferenceEngine()], COARSE)


def test_most_rows_are_batched_without_a_scan():
    scanned = set()
    for use in USES:
        function, args = recorded(use, np.float32)
        if args and not opens(function):
            made = batched(function, (True,) + (False,) * (len(args) - 1))
            if any(n.op.name == "Scan" for n in made.nodes):
                scanned.add(str(use.row))
    rows = {str(use.row) for use in USES}
    assert len(scanned) <= SCANNED_IS_ENOUGH * len(rows), sorted(scanned)
    assert not scanned & {
        "Add",
        "MatMul",
        "Gemm",
        "Conv",
        "Softmax",
        "ReduceSum",
        "LayerNormalization",
    }

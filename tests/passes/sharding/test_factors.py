"""Factors: each slice of the operands, computed on its own, gives its slice of the results."""

from typing import Any

import numpy as np
import pytest
from tests.conformance.uses import recorded, uses_of

from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.factors import (
    ADDED,
    BY_KIND,
    BY_NAME,
    MEANS,
    NOT_SUMS,
    ShapedNode,
    constant,
    factors_of,
)
from triplane.unified_ir.ops.row import OpKind
from triplane.unified_ir.ops.table import TABLE

MOVED = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Tile", "Concat", "Split", "Expand",
         "Transpose", "Pad", "CenterCropPad"}  # fmt: skip
"""Each element of the result is one of the operand, so indices show where it comes from."""
COMBINED: dict[str, Any] = {
    "ReduceMean": lambda parts: sum(parts) / len(parts),
    "ReduceMax": np.maximum.reduce,
    "ReduceMin": np.minimum.reduce,
    "ReduceProd": np.multiply.reduce,
    "ReduceL2": np.hypot.reduce,
    "ReduceLogSum": np.logaddexp.reduce,
    "ReduceLogSumExp": np.logaddexp.reduce,
}
"""How partial results become the whole one, where it is not a sum."""
APART = {
    "Gather": "rows that a device has not are masked",
    "BatchNormalization": "statistics are added before they are used",
    "ScatterND": "the array is added once",
    "SoftmaxCrossEntropyLoss": "weighted means are not means of means",
    "NegativeLogLikelihoodLoss": "weighted means are not means of means",
}
"""Rows whose partial results a compiler adds in its own way; the other factors are checked."""


def test_the_rows_whose_parts_are_not_sums_are_named():
    # The array of a ScatterND is a whole operand, which is treated apart for every row.
    assert (COMBINED.keys() | APART.keys()) - {"ScatterND"} == MEANS | NOT_SUMS | ADDED


def planned_uses():
    return [
        use
        for use in uses_of()
        if not use.row.nondeterministic
        and not use.row.data_dependent_dims
        and (use.row.name in BY_NAME or use.row.kind in BY_KIND)
    ]


def call_of(use):
    function, args = recorded(use, np.float64)
    node = next(n for n in function.nodes if n.op == use.row.id)
    constants = {n.outputs[0]: constant(n) for n in function.nodes if n.op.name == "Constant"}
    known = tuple(None if v is None else constants.get(v) for v in node.inputs)
    inputs = tuple(() if v is None else v.type.shape for v in node.inputs)
    outputs = tuple(v.type.shape for v in node.outputs)
    return ShapedNode(node, use.row, inputs, outputs, known), function, args


def sliced(array, axes, factor, n):
    """The n slices of an array along a factor, or the array n times."""
    if array is None or factor not in axes:
        return [array] * n
    return np.split(array, n, axes.index(factor))


def marked(array, axes, factor, n):
    """The number of the slice that an element is in."""
    marks = np.zeros_like(array)
    if factor in axes:
        for number, part in enumerate(sliced(marks, axes, factor, n)):
            part[:] = number
    return marks


def computed(use, arrays):
    build = Build(TABLE, "slice")
    with build:
        made = build.apply(use.row, arrays, use.sample.attrs, outputs=use.sample.outputs)
    return ReferenceEngine().compile(build.finish({f"y{i}": y for i, y in enumerate(made)}))()


def checked_factors(call):
    factors = factors_of(call)
    names = dict.fromkeys(f for axes in (*factors.operands, *factors.outputs) for f in axes if f)
    pairs = [*zip(call.inputs, factors.operands, strict=True),
             *zip(call.outputs, factors.outputs, strict=True)]  # fmt: skip
    for factor in names:
        sizes = [shape[axes.index(factor)] for shape, axes in pairs if factor in axes]
        for n in (2, 3):
            if all(size % n == 0 and size > 0 for size in sizes):
                yield factor, factors, n


def test_every_factor_names_each_axis():
    for use in planned_uses():
        call, _, _ = call_of(use)
        factors = factors_of(call)
        assert [len(a) for a in factors.operands] == [len(s) for s in call.inputs], str(use)
        assert [len(a) for a in factors.outputs] == [len(s) for s in call.outputs], str(use)


def test_slices_of_moved_elements_come_from_the_same_slices():
    checked = 0
    for use in planned_uses():
        if use.row.name not in MOVED:
            continue
        call, function, args = call_of(use)
        for factor, factors, n in checked_factors(call):
            fed = {
                name: marked(args[name], factors.operands[int(name[1:])], factor, n)
                for name in args
            }
            if factor not in factors.operands[0] or "x0" not in args:
                continue
            for y, axes in zip(
                ReferenceEngine().compile(function)(*fed.values()), factors.outputs, strict=True
            ):
                if factor not in axes:
                    continue
                for number, part in enumerate(sliced(y, axes, factor, n)):
                    assert (part == number).all(), (str(use), factor)
                checked += 1
    assert checked > 10


def test_slices_of_operands_give_slices_or_parts_of_results():
    checked = set()
    for use in planned_uses():
        if use.row.name in MOVED or use.row.kind is OpKind.RANDOM:
            continue
        call, function, args = call_of(use)
        whole = ReferenceEngine().compile(function)(*args.values())
        for factor, factors, n in checked_factors(call):
            partial = [factor not in axes for axes in factors.outputs]
            if (use.row.name in APART and any(partial)) or factor == "g":
                continue
            if not any(factor in axes for axes in factors.operands):
                continue
            arrays = use.arrays(np.float64)[: len(factors.operands)]  # without absent last ones
            # An operand without the factor that is added to a product is added once, not twice.
            slices = [sliced(a, axes, factor, n)
                      for a, axes in zip(arrays, factors.operands, strict=True)]  # fmt: skip
            if use.row.kind is OpKind.CONTRACTION and any(partial) and len(slices) > 2:
                slices[2:] = [(s[0], *[None] * (n - 1)) for s in slices[2:]]
            parts = [computed(use, operands) for operands in zip(*slices, strict=True)]
            for k, (y, axes) in enumerate(zip(whole, factors.outputs, strict=True)):
                results = [part[k] for part in parts]
                if factor in axes:
                    result = np.concatenate(results, axes.index(factor))
                else:
                    result = COMBINED.get(use.row.name, sum)(results)
                message = f"{use}: factor {factor} of {factors.rule}"
                np.testing.assert_allclose(result, y, rtol=1e-6, atol=1e-6, err_msg=message)
            checked.add(use.row.name)
    assert len(checked) > 80, sorted(checked)


def test_a_depthwise_convolution_is_cut_by_channels():
    use = next(u for u in planned_uses() if u.row.name == "Conv")
    call, _, _ = call_of(use)
    x, w, y = (2, 4, 5, 5), (4, 1, 3, 3), (2, 4, 3, 3)
    node = ShapedNode(call.node, call.row, (x, w), (y,), (None, None))
    attrs = {**call.node.attrs, "group": 4}
    depthwise = ShapedNode(
        type(call.node)(call.node.op, call.node.inputs, call.node.outputs, attrs),
        call.row, (x, w), (y,), (None, None),
    )  # fmt: skip
    assert factors_of(depthwise).operands[:2] == (("n", "g", "", ""), ("g", "", "", ""))
    assert factors_of(depthwise).outputs == (("n", "g", "", ""),)
    assert factors_of(node).operands[1] == ("o", "i", "", "")


def test_what_has_no_rule_stays_whole():
    use = next(u for u in uses_of() if u.row.name == "Det")
    call, _, _ = call_of(use)
    factors = factors_of(call)
    assert not any(f for axes in (*factors.operands, *factors.outputs) for f in axes)
    assert "no rule" in factors.rule


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        ((4, 6, 8), (24, 8), [(0, 0), (2, 1)]),
        ((24, 8), (4, 6, 8), [(0, 0), (1, 2)]),
        ((4, 1, 6), (4, 6), [(0, 0), (2, 1)]),
        ((4, 6), (6, 4), [(0, 0)]),
        ((), (1,), []),
        ((0, 3), (0, 3), [(0, 0), (1, 1)]),
    ],
)
def test_reshape_pairs_the_first_axes_of_groups(source, target, pairs):
    from triplane.unified_ir.ops.factors import _major_axes

    assert _major_axes(source, target) == pairs

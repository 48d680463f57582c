# ruff: noqa: ARG005 - a broken column takes what the column says
"""Break a row and the suite goes red, naming it."""

from dataclasses import replace

import pytest
from tests.conformance.mutations import BREAK, first_complaint, mutants

from triplane.unified_ir import ops
from triplane.unified_ir.ops.table import TABLE


def row(name, domain=""):
    return TABLE[domain, name]


# fmt: off
BROKEN = {  # plausible slips, one each
    "relu passes everything": replace(row("Relu"), vjp=lambda g, y, x: (g,)),
    "tanh right in first order only": replace(
        row("Tanh"), vjp=lambda g, y, x: (g * (1.0 - ops.stop_gradient(y) * y),)),
    "matmul forgets a transpose": replace(
        row("MatMul"), vjp=lambda g, y, a, b: (g @ b, a @ g)),
    "sum forgets broadcasting": replace(row("Add"), vjp=lambda g, y, a, b: (g, g)),
    "shape of the first operand": replace(row("Mul"), infer=lambda call: (call.type(0),)),
    "mean without its count": replace(
        row("ReduceMean"), vjp=lambda g, y, x, axes=None, **_: (
            ops.expand(g.reshape([1] * x.rank), x.shape) if g.dtype.is_float else None, None)),
    "clip passes beyond its bounds": replace(
        row("Clip"), vjp=lambda g, y, x, low=None, high=None: (g, None, None)),
    "floor rounds": replace(row("Floor"), reference=lambda x: (x + 0.5).astype(int) * 1.0),
    "gelu with a wrong constant": replace(
        row("Gelu"), body=lambda x, *, approximate: x * ops.sigmoid(1.702 * x)),
    "softmax along the wrong axis": replace(
        row("Softmax"), vjp=lambda g, y, x, *, axis: (
            y * (g - (g * y).sum([0], keepdims=True)),)),
    "reduction unknown to old opsets": replace(row("ReduceMax"), lower_below={}),
    "select forgets windows": replace(
        row("MaxUnpoolFirst", "triplane"),
        body=lambda g, x, y, **_: x * 0.0 + g.sum()),
}
# fmt: on


@pytest.mark.parametrize("slip", BROKEN)
def test_a_broken_row_is_named(slip):
    broken = BROKEN[slip]
    complaint = first_complaint(broken)
    assert complaint is not None, f"the suite stays green although {slip}"
    assert str(broken) in complaint


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({str(broken) for broken in BROKEN.values()}))
def test_the_intact_row_raises_no_complaint(name):
    intact = next(r for r in TABLE.values() if str(r) == name)
    assert first_complaint(intact) is None


@pytest.mark.slow
@pytest.mark.parametrize(("row", "column"), mutants(), ids=str)
def test_no_column_of_any_row_can_break_unseen(row, column):
    complaint = first_complaint(BREAK[column](row))
    assert complaint is not None, f"{column} of {row} is watched by nothing"
    assert str(row) in complaint

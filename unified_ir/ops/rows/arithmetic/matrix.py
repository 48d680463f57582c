"""Matrix products and the softmax family."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.infer import broadcast
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import IntegerForm, Op, OpCall, OpKind, Types
from triplane.unified_ir.ops.rows.arithmetic.elementwise import exp
from triplane.unified_ir.ops.rows.movement.structure import axes_of, same, sum_to
from triplane.unified_ir.ops.samples import normal, sample
from triplane.unified_ir.ops.tensor import Tensor


def _matmul(call: OpCall) -> Types:
    a, b = call.type(0), call.type(1)
    if not a.rank or not b.rank:
        raise ShapeError(f"MatMul needs at least one axis on each side, got {a} @ {b}")
    left = a.shape if a.rank > 1 else (1, *a.shape)
    right = b.shape if b.rank > 1 else (*b.shape, 1)
    if left[-1] != right[-2]:
        raise ShapeError(f"MatMul needs a.shape[-1] == b.shape[-2], got {a} @ {b}; transpose one?")
    batch = broadcast(call.row, left[:-2], right[:-2])
    rows = left[-2:-1] if a.rank > 1 else ()
    columns = right[-1:] if b.rank > 1 else ()
    return (a.with_shape((*batch, *rows, *columns)),)


def swap_last(x: Tensor) -> Tensor:
    """x: (..., m, n) -> (..., n, m)."""
    return x.transpose(*range(x.rank - 2), x.rank - 1, x.rank - 2)


def _matmul_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """dA = G B^T, dB = A^T G; the gradient of a weight matrix is one product over all batches."""
    left = a if a.rank > 1 else a.reshape((1, *a.shape))
    right = b if b.rank > 1 else b.reshape((*b.shape, 1))
    # A vector has no row (or column) in the result; with the missing axis of size 1 both rules are
    # those of matrices.
    batch = g.shape[: g.rank - (a.rank > 1) - (b.rank > 1)]
    wide = g.reshape((*batch, left.shape[-2], right.shape[-1]))
    d_left = sum_to(wide @ swap_last(right), left)
    # All batches as rows of one tall matrix: sum_n A_n^T G_n = A^T G, without a stack of (K, N)
    # products.
    if right.rank == 2 and left.rank > 2:
        flat = left.reshape((-1, left.shape[-1]))
        d_right = swap_last(flat) @ wide.reshape((-1, right.shape[-1]))
    else:
        d_right = sum_to(swap_last(left) @ wide, right)
    return d_left.reshape(a.shape), d_right.reshape(b.shape)


def _emit_matmul(context: EmissionContext, node: Node) -> None:
    """Turn a vector operand into a matrix: onnxruntime 1.31 fuses Transpose(x) @ v wrongly."""
    a, b = (v.type.rank if v is not None else 0 for v in node.inputs)
    if min(a, b) > 1:
        context.plain(node)
        return
    names = context.inputs(node)
    axes = []
    for i, rank in enumerate((a, b)):
        if rank == 1:
            names[i] = context.emit("Unsqueeze", names[i], context.constant(np.array([i])))
            axes.append(i - 2)
    squeezed = [context.emit("MatMul", *names), context.constant(np.array(axes))]
    context.add("Squeeze", squeezed, context.output_names(node))


matmul = Op(
    name="MatMul",
    kind=OpKind.CONTRACTION,
    weights=(0, 1),
    integer_form=IntegerForm.PRODUCT,
    emit=_emit_matmul,
    batch=batching.multiplied,
    infer=_matmul,
    reference=np.matmul,
    vjp=_matmul_vjp,
    samples=(
        sample(normal(3, 4), normal(4, 2)),
        sample(normal(2, 3, 4), normal(4, 5)),
        sample(normal(2, 1, 3, 4), normal(5, 4, 2)),
        sample(normal(4), normal(4, 2)),
    ),
)


def _gemm(call: OpCall) -> Types:
    a, b, attrs = call.type(0), call.type(1), call.attrs
    if a.rank != 2 or b.rank != 2:
        raise ShapeError(f"Gemm takes matrices, got {a} and {b}; flatten first?")
    m, k = reversed(a.shape) if attrs["transA"] else a.shape
    inner, n = reversed(b.shape) if attrs["transB"] else b.shape
    if k != inner:
        raise ShapeError(
            f"Gemm needs equal inner sizes, got {k} of {a} (transA={attrs['transA']}) "
            f"and {inner} of {b} (transB={attrs['transB']})"
        )
    if call.has(2):
        broadcast(call.row, (m, n), call.type(2).shape)
    return (a.with_shape((m, n)),)


def _gemm_reference(
    a: Any, b: Any, c: Any = None, *, alpha: float, beta: float, transA: int, transB: int
) -> Any:
    product = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return product if c is None else product + beta * c


def _gemm_xla(
    k: XlaContext, a: Any, b: Any, c: Any = None, *,
    alpha: float, beta: float, transA: int, transB: int,
) -> Any:  # fmt: skip
    y = k.np.matmul(a.T if transA else a, b.T if transB else b)
    y = y if alpha == 1.0 else alpha * y
    return y if c is None else y + (c if beta == 1.0 else beta * c)


def _gemm_vjp(
    g: Tensor, y: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, *,
    alpha: float, beta: float, transA: int, transB: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Differentiate Y = alpha op(A) op(B) + beta C; each gradient is again one Gemm."""
    # With G the cotangent of Y: d op(A) = alpha G op(B)^T and d op(B) = alpha op(A)^T G. If an
    # operand is transposed, so is its gradient, which exchanges the two factors.
    if transA:
        d_a = gemm(b, g, alpha=alpha, transA=transB, transB=1)
    else:
        d_a = gemm(g, b, alpha=alpha, transB=1 - transB)
    if transB:
        d_b = gemm(g, a, alpha=alpha, transA=1, transB=transA)
    else:
        d_b = gemm(a, g, alpha=alpha, transA=1 - transA)
    if c is None:
        return d_a, d_b
    d_c = sum_to(g, c)
    return d_a, d_b, d_c if beta == 1.0 else d_c * beta


def _gemm_batch(call: batching.BatchedCall) -> list[Tensor]:
    """Compute alpha op(A) op(B) + beta C by matrix products that share their batch axis."""
    attrs = call.row.full_attrs(call.attrs)
    a, b, *c = call.inputs
    assert a is not None
    assert b is not None
    left = swap_last(a) if attrs["transA"] else a
    right = swap_last(b) if attrs["transB"] else b
    y = left @ right if attrs["alpha"] == 1.0 else (left @ right) * attrs["alpha"]
    if not c or c[0] is None:
        return [y]
    added = c[0]
    if call.batched[2]:
        # C aligns with (m, n) from the right; the batch axis has to stay in front of both.
        added = added.reshape((added.shape[0], *(1,) * (3 - added.rank), *added.shape[1:]))
    return [y + (added if attrs["beta"] == 1.0 else added * attrs["beta"])]


gemm = Op(
    name="Gemm",
    kind=OpKind.CONTRACTION,
    weights=(0, 1, 2),
    integer_form=IntegerForm.PRODUCT,
    batch=_gemm_batch,
    infer=_gemm,
    reference=_gemm_reference,
    xla=_gemm_xla,
    vjp=_gemm_vjp,
    samples=(
        sample(normal(3, 4), normal(4, 2), normal(2)),
        sample(normal(4, 3), normal(2, 4), normal(3, 1), transA=1, transB=1, alpha=0.5, beta=2.0),
        sample(normal(3, 4), normal(2, 4), transB=1),
        sample(normal(4, 3), normal(4, 2), transA=1),
    ),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: (..., I), weight: (O, I), bias: (O,) -> (..., O): x weight^T + bias."""
    if x.rank == 2:
        return gemm(x, weight, bias, transB=1)
    y = x @ swap_last(weight)
    return y if bias is None else y + bias


def same_along_axis(call: OpCall) -> Types:
    """Infer one output, typed like the operand, which must have the axis `axis`."""
    axes_of(call.type(0).rank, [call.attrs["axis"]])
    return same(call)


def _softmax_reference(x: Any, *, axis: int) -> Any:
    # Without `initial`, the maximum of an empty axis is an error.
    e = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis, keepdims=True)


def _softmax_xla(k: XlaContext, x: Any, *, axis: int) -> Any:
    e = k.np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis, keepdims=True)


softmax = Op(
    name="Softmax",
    kind=OpKind.NORMALIZATION,
    batch=batching.axis_shifted,
    infer=same_along_axis,
    reference=_softmax_reference,
    xla=_softmax_xla,
    # dx = y (g - sum(g y)): the Jacobian diag(y) - y y^T applied to g.
    vjp=lambda g, y, x, *, axis: (y * (g - (g * y).sum([axis], keepdims=True)),),
    samples=(sample(normal(2, 5)), sample(normal(2, 3, 4), axis=1)),
)


def _log_softmax_reference(x: Any, *, axis: int) -> Any:
    shifted = x - x.max(axis, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def _log_softmax_xla(k: XlaContext, x: Any, *, axis: int) -> Any:
    shifted = x - x.max(axis, keepdims=True, initial=-np.inf)
    return shifted - k.np.log(k.np.exp(shifted).sum(axis, keepdims=True))


log_softmax = Op(
    name="LogSoftmax",
    kind=OpKind.NORMALIZATION,
    batch=batching.axis_shifted,
    infer=same_along_axis,
    reference=_log_softmax_reference,
    xla=_log_softmax_xla,
    # dx = g - softmax(x) sum(g), with softmax(x) = exp(y).
    vjp=lambda g, y, x, *, axis: (g - exp(y) * g.sum([axis], keepdims=True),),
    samples=(sample(normal(2, 5)), sample(normal(2, 3, 4), axis=1)),
)

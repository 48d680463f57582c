"""Einstein summation, and determinants.

An equation names the axes of each operand. Axes with the same name share an index, and those
missing from the result are summed. The gradient for an operand is again an equation: the operand's
term and the result change places. Cofactors are determinants, so a determinant has a gradient where
it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_letters
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather
from triplane.unified_ir.ops.rows.movement.structure import broadcast_to, squeeze, where
from triplane.unified_ir.ops.samples import normal, sample
from triplane.unified_ir.ops.tensor import Tensor, emit

ELLIPSIS: Final = "..."
MAX_MINORS: Final = 32
"""Most rows of a matrix whose determinant is differentiated: its minors have rows^4 elements."""


@dataclass(frozen=True, slots=True)
class Equation:
    """Axes of each operand and of the result, a letter each; `broadcast`: those of an ellipsis."""

    operands: tuple[str, ...]
    result: str
    broadcast: str

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}"


@lru_cache(maxsize=1024)
def read(text: str, ranks: tuple[int, ...]) -> Equation:
    """Parse an equation and expand its ellipses; InvalidInput names what is wrong."""
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise InvalidInput(f"Einsum {text!r} names {len(terms)} operands, got {len(ranks)}")
    named = [term.replace(ELLIPSIS, "", 1) for term in (*terms, right)]
    if not all(c in ascii_letters for c in "".join(named)):
        raise InvalidInput(f"Einsum {text!r}: axes are letters, one ellipsis for each operand")
    dots = [
        rank - len(name) if ELLIPSIS in term else 0
        for term, name, rank in zip(terms, named, ranks, strict=False)
    ]
    free = [c for c in ascii_letters if c not in "".join(named)]
    if max(dots) > len(free):
        raise InvalidInput(f"Einsum {text!r} needs more than {len(ascii_letters)} axes")
    broadcast = "".join(free[: max(dots)])
    operands = tuple(
        # An ellipsis with fewer axes stands for the last of the broadcast axes, as shapes align
        # from the right.
        term.replace(ELLIPSIS, broadcast[len(broadcast) - n :])
        for term, n in zip(terms, dots, strict=True)
    )
    for term, rank in zip(operands, ranks, strict=True):
        if len(term) != rank:
            raise ShapeError(f"Einsum {text!r} names {len(term)} axes of a tensor of {rank}")
    result = right.replace(ELLIPSIS, broadcast) if arrow else _implied(named[:-1], broadcast)
    unknown = [c for c in result if c not in "".join(operands)]
    if unknown or len(set(result)) < len(result):
        raise InvalidInput(f"Einsum {text!r}: the result names axes of operands, each at most once")
    return Equation(operands, result, broadcast)


def _implied(named: Sequence[str], broadcast: str) -> str:
    """Return the result without an arrow: the ellipsis, then letters that occur once, sorted."""
    letters = "".join(named)
    return broadcast + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))


def _sizes(equation: Equation, shapes: Sequence[tuple[Dim, ...]]) -> dict[str, Dim]:
    """Return the size of each named axis; only axes of an ellipsis broadcast."""
    sizes: dict[str, Dim] = {}
    for term, shape in zip(equation.operands, shapes, strict=True):
        for name, dim in zip(term, shape, strict=True):
            known = sizes.setdefault(name, dim)
            if name in equation.broadcast and known == 1:
                sizes[name] = dim
            elif known != dim and not (name in equation.broadcast and dim == 1):
                raise ShapeError(f"Einsum {equation}: the axis {name!r} is both {known} and {dim}")
    return sizes


def _einsum_types(call: OpCall) -> tuple[TensorType, ...]:
    shapes = [call.type(i).shape for i in range(len(call.types))]
    equation = read(call.attrs["equation"], tuple(map(len, shapes)))
    sizes = _sizes(equation, shapes)
    return (call.type(0).with_shape(sizes[c] for c in equation.result),)


def without_repeats(text: str, shapes: Sequence[tuple[Dim, ...]]) -> tuple[Equation, list[Any]]:
    """Drop axes of size 1 that an ellipsis broadcasts; return the equation, and them by operand."""
    equation = read(text, tuple(map(len, shapes)))
    sizes = _sizes(equation, shapes)
    dropped = [
        [i for i, (c, d) in enumerate(zip(term, shape, strict=True)) if d != sizes[c]]
        for term, shape in zip(equation.operands, shapes, strict=True)
    ]
    terms = tuple(
        "".join(c for i, c in enumerate(term) if i not in axes)
        for term, axes in zip(equation.operands, dropped, strict=True)
    )
    return Equation(terms, equation.result, ""), dropped


def _einsum_vjp(g: Tensor, y: Tensor, *xs: Tensor, equation: str) -> list[Tensor]:
    shapes = [x.shape for x in xs]
    plain, dropped = without_repeats(equation, shapes)
    kept = [squeeze(x, *axes) if axes else x for x, axes in zip(xs, dropped, strict=True)]
    return [_slope(g, kept, k, plain).reshape(shapes[k]) for k in range(len(xs))]


def _slope(g: Tensor, xs: Sequence[Tensor], k: int, equation: Equation) -> Tensor:
    """Contract the cotangent and the other operands to the axes of operand `k`."""
    term, x = equation.operands[k], xs[k]
    others = [i for i in range(len(xs)) if i != k]
    terms = [equation.result, *(equation.operands[i] for i in others)]
    size = dict(zip(term, x.shape, strict=True))
    names = "".join(size)
    # An axis that no other operand and not the result has was summed, so the slope is the same
    # along it: it is broadcast instead of contracted.
    kept = "".join(c for c in names if c in "".join(terms))
    part = einsum_row(g, *(xs[i] for i in others), equation=f"{','.join(terms)}->{kept}")
    wide = part.reshape([size[c] if c in kept else 1 for c in names])
    whole = broadcast_to(wide, list(size.values()))
    # A term such as "ii" reads a diagonal; elsewhere the slope is 0.
    return whole if names == term else _on_diagonal(whole, names, term, x.shape)


def _on_diagonal(t: Tensor, names: str, term: str, shape: Sequence[Dim]) -> Tensor:
    """Place values where axes of one name have the same position; 0 elsewhere."""
    first = [term.index(c) for c in names]
    order = np.argsort(first)
    placed = t.transpose(*map(int, order)).reshape(
        [shape[i] if i in first else 1 for i in range(len(term))]
    )
    for i, c in enumerate(term):
        if i not in first:
            positions = [
                arange(shape[j]).reshape([shape[j] if k == j else 1 for k in range(len(term))])
                for j in (term.index(c), i)
            ]
            placed = where(positions[0] == positions[1], placed, 0.0)
    return placed


def _einsum_xla(k: XlaContext, *xs: Any, equation: str) -> Any:
    plain, dropped = without_repeats(equation, [x.shape for x in xs])
    kept = [k.np.squeeze(x, tuple(axes)) for x, axes in zip(xs, dropped, strict=True)]
    return k.np.einsum(str(plain), *kept)


def _emit_einsum(context: EmissionContext, node: Node) -> None:
    """Drop axes that an ellipsis broadcasts and name all others: onnxruntime repeats none."""
    shapes = [v.type.shape for v in node.inputs if v is not None]
    text = str(node.attrs["equation"])
    equation, dropped = without_repeats(text, shapes)
    terms = zip(text.replace(" ", "").split("->")[0].split(","), shapes, strict=True)
    # More than one length of ellipsis: its axes have to broadcast, which onnxruntime does not do.
    hidden = {len(shape) - len(term) for term, shape in terms if "." in term}
    if not any(dropped) and len(hidden) < 2:
        context.plain(node)
        return
    names = [
        context.emit("Squeeze", name, context.constant(np.array(axes))) if axes else name
        for name, axes in zip(context.inputs(node), dropped, strict=True)
    ]
    context.add("Einsum", names, context.output_names(node), equation=str(equation))


einsum_row: Op = Op(
    name="Einsum",
    kind=OpKind.CONTRACTION,
    weights=(0, 1),
    emit=_emit_einsum,
    infer=_einsum_types,
    reference=lambda *xs, equation: np.einsum(str(read(equation, tuple(map(np.ndim, xs)))), *xs),
    xla=_einsum_xla,
    vjp=_einsum_vjp,
    samples=(
        sample(normal(2, 3), normal(3, 4), equation="ij,jk->ik"),
        sample(normal(2, 3), normal(3, 4), equation="ij, jk"),
        sample(normal(2, 3, 3), equation="bii->bi"),
        sample(normal(2, 3, 3), equation="...ii->..."),
        sample(normal(2, 3, 3), normal(2), equation="bii,b"),
        sample(normal(2, 1, 3, 4), normal(5, 4, 2), equation="...ij,...jk->...ik"),
        sample(normal(2, 3, 4), normal(3, 4), equation="...i,...i->..."),
        sample(normal(2, 3), normal(4), equation="ij,k->i"),
        sample(normal(2, 3), normal(2, 4), normal(2, 5), equation="bi,bj,bk->bijk"),
        sample(normal(2, 3), equation="ij->ji"),
    ),
)


def einsum(equation: str, *xs: Tensor) -> Tensor:
    """Einstein summation as in numpy, `einsum("bij,bjk->bik", a, b)`; ellipses are supported."""
    return einsum_row(*xs, equation=equation)


def _det_types(call: OpCall) -> tuple[TensorType, ...]:
    x = call.type(0)
    if x.rank < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"Det takes square matrices (..., M, M), got {x}")
    return (x.with_shape(x.shape[:-2]),)


def _cofactors(x: Tensor) -> Tensor:
    """x: (..., M, M) -> (..., M, M): the signed determinant without row i and column j."""
    n = x.shape[-1]
    if not isinstance(n, int) or n > MAX_MINORS:
        raise InvalidInput(f"a determinant is differentiable up to {MAX_MINORS} rows, got {x.type}")
    if n == 1:
        return x * 0.0 + 1.0
    # Row i lists the other indices, so places[i, j] are the flat positions of the minor without row
    # i and column j.
    rest = np.array([[j for j in range(n) if j != i] for i in range(n)])
    flat = x.reshape((*x.shape[:-2], n * n))
    places = rest[:, None, :, None] * n + rest[None, :, None, :]
    signs = (-1.0) ** np.add.outer(np.arange(n), np.arange(n))
    minors = gather(flat, places, axis=flat.rank - 1)
    return emit("Det", minors) * signs.astype(x.dtype.numpy)


det = Op(
    name="Det",
    kind=OpKind.REDUCTION,
    batch=batching.first_elementwise,
    infer=_det_types,
    reference=lambda x: np.linalg.det(x) if math.prod(x.shape) else np.ones(x.shape[:-2]),
    xla=lambda k, x: k.np.linalg.det(x) if math.prod(x.shape) else k.np.ones(x.shape[:-2]),
    # Jacobi's formula: d det(X)/dX is the matrix of cofactors. It needs no inverse, so it holds for
    # singular X too.
    vjp=lambda g, y, x: (g.reshape((*g.shape, 1, 1)) * _cofactors(x),),
    samples=(sample(normal(2, 3, 3)), sample(normal(2, 2, 2)), sample(normal(3, 1, 1))),
)
"""The determinant of (..., M, M)."""

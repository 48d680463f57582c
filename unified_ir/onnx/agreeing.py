"""Claims that sizes are equal, made where an operator needs it and nothing proves it.

ONNX lets any two sizes meet in an operator and compares them at run time; the IR has to know that
they are equal. If an operator refuses sizes of which one is symbolic, that one is claimed to equal
the other. The claim is checked at run time: if it is wrong (also if ONNX would have repeated an
axis of size one), the run fails and names both sizes instead of returning something else. Two
different numbers are never claimed to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from triplane.unified_ir.ir.dims import Dim, Expr, floor_div, product, symbols
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import is_plain
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.ops.row import Op
from triplane.unified_ir.ops.rows.arithmetic.elementwise import BROADCASTING
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.tensor import Tensor

Named = frozenset[str]
"""Sizes that a caller of the model decides: replaced by others only as a last resort."""
Lookup = Callable[[Tensor], Array | None]
"""Returns the known contents of a vector of sizes."""
Wanted = Sequence[Dim]


class _Refused(Exception):
    """Two numbers differ, or there is nothing to claim."""


@dataclass(frozen=True, slots=True)
class _Case:
    """An operator applied to sizes that it refuses."""

    app: Application
    named: Named
    contents: Lookup

    def met(self, sizes: Sequence[Dim]) -> Dim:
        """Return the size that others are claimed to equal: a number, else the simplest named."""
        numbers = {d for d in sizes if isinstance(d, int)}
        if len(numbers) > 1 or not sizes:
            raise _Refused
        return numbers.pop() if numbers else min(sizes, key=self._rank)

    def _rank(self, dim: Dim) -> tuple[bool, int, int, str]:
        text = str(dim)
        return not symbols(dim) <= self.named, text.count("//"), len(text), text

    def across(self, shapes: Sequence[Sequence[Dim]]) -> list[Dim]:
        """Return the shape that shapes broadcast to if sizes other than one are equal."""
        wanted: list[Dim] = []
        # Shapes align from the right, so axes are counted from the end.
        for axis in range(-max((len(s) for s in shapes), default=0), 0):
            wide = [s[axis] for s in shapes if len(s) >= -axis and s[axis] != 1]
            wanted.append(self.met(wide) if wide else 1)
        return wanted


def agreeing(app: Application, row: Op, named: Named, contents: Lookup) -> Application | None:
    """Return the application with operands whose sizes are claimed to fit; None if none can."""
    rule = _broadcast if row.infer in BROADCASTING else _RULES.get(app.op)
    if rule is None or not all(x is None or is_plain(x.type) for x in app.inputs):
        return None
    try:
        operands = rule(_Case(app, named, contents))
    except _Refused:
        return None
    changed = [a is not b for a, b in zip(operands, app.inputs, strict=True)]
    return replace(app, inputs=tuple(operands)) if any(changed) else None


def _fitted(x: Tensor, wanted: Wanted) -> Tensor:
    """Claim that the last axes of `x` are those of `wanted`, except axes of size one."""
    last = wanted[len(wanted) - x.rank :]
    return assume_shape(x, [d if d == 1 else w for d, w in zip(x.shape, last, strict=True)])


def _claimed(x: Tensor, sizes: Mapping[int, Dim]) -> Tensor:
    """Claim sizes of `x` by axis."""
    return assume_shape(x, [sizes.get(i, d) for i, d in enumerate(x.shape)])


def _broadcast(case: _Case) -> Sequence[Tensor | None]:
    wanted = case.across([x.shape for x in case.app.inputs if x is not None])
    return [None if x is None else _fitted(x, wanted) for x in case.app.inputs]


def _matmul(case: _Case) -> Sequence[Tensor | None]:
    a, b = case.app.operand(0), case.app.operand(1)
    if min(a.rank, b.rank) < 2:
        raise _Refused
    batch = case.across([a.shape[:-2], b.shape[:-2]])
    inner = case.met([a.shape[-1], b.shape[-2]])
    return [
        _fitted(a, [*batch, a.shape[-2], inner]),
        _fitted(b, [*batch, inner, b.shape[-1]]),
    ]


def _gemm(case: _Case) -> Sequence[Tensor | None]:
    """Claim that the inner sizes of matrices are equal, e.g. of a flattened plane of any size."""
    a, b = case.app.operand(0), case.app.operand(1)
    if a.rank != 2 or b.rank != 2:
        raise _Refused
    at_a, at_b = (0 if case.app.attr("transA", 0) else 1), (1 if case.app.attr("transB", 0) else 0)
    inner = case.met([a.shape[at_a], b.shape[at_b]])
    return [_claimed(a, {at_a: inner}), _claimed(b, {at_b: inner}), *case.app.inputs[2:]]


def _but_axis(case: _Case) -> Sequence[Tensor | None]:
    """Claim that operands of one rank agree on every axis but one."""
    present = [x for x in case.app.inputs if x is not None]
    if len({x.rank for x in present}) != 1 or not present[0].rank:
        raise _Refused
    apart = case.app.attr("axis", 0) % present[0].rank
    columns = enumerate(zip(*(x.shape for x in present), strict=True))
    wanted = {i: case.met(column) for i, column in columns if i != apart}
    return [None if x is None else _claimed(x, wanted) for x in case.app.inputs]


def _expand(case: _Case) -> Sequence[Tensor | None]:
    x, shape = case.app.operand(0), case.contents(case.app.operand(1))
    if shape is None:
        raise _Refused
    return [_fitted(x, case.across([x.shape, shape.tolist()])), *case.app.inputs[1:]]


def _reshape(case: _Case) -> Sequence[Tensor | None]:
    """Claim the size of a vector of all elements, after sizes on both sides cancel."""
    x, shape = case.app.operand(0), case.contents(case.app.operand(1))
    if shape is None or not isinstance(x.type.size, Expr):
        raise _Refused
    keeps = not case.app.attr("allowzero", 0)
    if keeps and any(d == 0 and i >= x.rank for i, d in enumerate(shape.tolist())):
        raise _Refused
    sizes = [x.shape[i] if d == 0 and keeps else d for i, d in enumerate(shape.tolist())]
    rest = [d for d in sizes if d != -1]
    wanted = [_quotient(x.shape, rest) if d == -1 else d for d in sizes]
    # Only the numbers of elements must agree, so the claim is made on the flat vector.
    vector = assume_shape(x.reshape(x.type.size), [product(wanted)])
    return [vector, vector.build.dims(wanted)]


def _quotient(sizes: Wanted, divisors: Wanted) -> Dim:
    """Return the size that -1 stands for in a Reshape; sizes on both sides cancel."""
    left, right = list(sizes), list(divisors)
    for d in divisors:
        if d in left:
            left.remove(d)
            right.remove(d)
    total, by = product(left), product(right)
    if by == 0:
        raise _Refused
    return floor_div(total, by)


_RULES: Final[Mapping[str, Callable[..., Sequence[Any]]]] = {
    "Concat": _but_axis,
    "Expand": _expand,
    "GatherElements": _but_axis,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Reshape": _reshape,
    "Where": _broadcast,
}
"""Claims by operator, in addition to elementwise operators, which broadcast."""

"""Symbolic sizes as ONNX integer arithmetic on Shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triplane.unified_ir.ir.dims import Dim, FloorDiv
from triplane.unified_ir.ops.emission import EmissionContext


def emit_dims(context: EmissionContext, dims: Sequence[Dim]) -> str:
    """An int64 vector with one element per dimension."""
    if all(isinstance(d, int) for d in dims):
        return context.constant(np.array(dims, np.int64).reshape(len(dims)))
    parts = [_one(context, d) for d in dims]
    return parts[0] if len(parts) == 1 else context.emit("Concat", *parts, axis=0)


def _one(context: EmissionContext, dim: Dim) -> str:
    """An int64[1] holding one dimension."""
    if isinstance(dim, int):
        return context.constant(np.array([dim], np.int64))
    terms = [_term(context, monomial, c) for monomial, c in dim.terms]
    total = terms[0]
    for term in terms[1:]:
        total = context.emit("Add", total, term)
    return total


def _term(
    context: EmissionContext, monomial: tuple[tuple[str | FloorDiv, int], ...], c: int
) -> str:
    factors = [_atom(context, atom) for atom, power in monomial for _ in range(power)]
    if c != 1 or not factors:
        factors.append(context.constant(np.array([c], np.int64)))
    product = factors[0]
    for factor in factors[1:]:
        product = context.emit("Mul", product, factor)
    return product


def _atom(context: EmissionContext, atom: str | FloorDiv) -> str:
    """ONNX integer division truncates; floor(a / b) = (a - mod(a, b)) / b with mod >= 0."""
    if isinstance(atom, str):
        return context.size(atom)
    a, b = _one(context, atom.numerator), _one(context, atom.denominator)
    return context.emit("Div", context.emit("Sub", a, context.emit("Mod", a, b)), b)

"""Symbolic sizes as ONNX integer arithmetic on Shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import numpy as np

from triplane.unified_ir.ir.dims import Dim, FloorDiv, Monomial
from triplane.unified_ir.ops.emission import EmissionContext


def emit_dims(context: EmissionContext, dims: Sequence[Dim]) -> str:
    """Emit an int64 vector with one element per dimension; return its name."""
    if all(isinstance(d, int) for d in dims):
        return context.constant(np.array(dims, np.int64).reshape(len(dims)))
    parts = [_one(context, d) for d in dims]
    return parts[0] if len(parts) == 1 else context.emit("Concat", *parts, axis=0)


def _one(context: EmissionContext, dim: Dim) -> str:
    """Emit an int64[1] that holds one dimension."""
    if isinstance(dim, int):
        return context.constant(np.array([dim], np.int64))
    terms = [_term(context, monomial, c) for monomial, c in dim.terms]
    return reduce(partial(context.emit, "Add"), terms)


def _term(context: EmissionContext, monomial: Monomial, c: int) -> str:
    factors = [_atom(context, atom) for atom, power in monomial for _ in range(power)]
    if c != 1 or not factors:
        factors.append(context.constant(np.array([c], np.int64)))
    return reduce(partial(context.emit, "Mul"), factors)


def _atom(context: EmissionContext, atom: str | FloorDiv) -> str:
    """Emit a floor division: (a - mod(a, b)) / b with mod >= 0, as ONNX's own truncates."""
    if isinstance(atom, str):
        return context.size(atom)
    a, b = _one(context, atom.numerator), _one(context, atom.denominator)
    return context.emit("Div", context.emit("Sub", a, context.emit("Mod", a, b)), b)

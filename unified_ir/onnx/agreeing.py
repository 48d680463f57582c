"""Sizes that ONNX leaves to the run, taken for the sizes they meet there.

ONNX lets any two sizes meet in an operator and looks when it runs; the IR wants to know that they
are equal. Where one of them is decided by data inside the model, the other is claimed for it, and
the claim is checked when the model runs: where it is wrong (also where ONNX would have repeated an
axis of size one), the run fails by name instead of giving something else.
"""

from __future__ import annotations

from collections.abc import Sequence

from triplane.unified_ir.ir.dims import Dim, is_symbol
from triplane.unified_ir.ir.types import is_plain
from triplane.unified_ir.ops.claims import assume_shape
from triplane.unified_ir.ops.tensor import Tensor


def agreed(operands: Sequence[Tensor | None], named: frozenset[str]) -> list[Tensor | None] | None:
    """Operands that broadcast against each other; None where nothing can be claimed.

    named: sizes that a caller of the model decides, which are claimed for none.
    """
    present = [x for x in operands if x is not None]
    if not all(is_plain(x.type) for x in present):
        return None
    rank = max((x.rank for x in present), default=0)
    wanted: list[Dim] = []
    for axis in range(-rank, 0):
        sizes = [x.shape[axis] for x in present if x.rank >= -axis]
        wide = [d for d in dict.fromkeys(sizes) if d != 1]
        fixed = [d for d in wide if not _open(d, named)]
        if len(fixed) > 1:
            return None
        wanted.append((fixed or wide or [1])[0])
    return [None if x is None else _claimed(x, wanted, named) for x in operands]


def agreed_but(
    operands: Sequence[Tensor | None], axis: int, named: frozenset[str]
) -> list[Tensor | None] | None:
    """Operands of one rank that agree on every axis but one, as those of Concat do."""
    present = [x for x in operands if x is not None]
    ranks = {x.rank for x in present}
    if len(ranks) != 1 or 0 in ranks or not all(is_plain(x.type) for x in present):
        return None
    apart = axis % present[0].rank
    shapes = list(zip(*(x.shape for x in present), strict=True))
    wanted = [next((d for d in s if not _open(d, named)), s[0]) for s in shapes]
    return [
        assume_shape(
            x,
            [
                w if i != apart and _open(d, named) else d
                for i, (d, w) in enumerate(zip(x.shape, wanted, strict=True))
            ],
        )
        for x in present
    ]


def _open(dim: Dim, named: frozenset[str]) -> bool:
    return is_symbol(dim) and str(dim) not in named


def _claimed(x: Tensor, wanted: Sequence[Dim], named: frozenset[str]) -> Tensor:
    last = wanted[len(wanted) - x.rank :]
    pairs = zip(x.shape, last, strict=True)
    return assume_shape(x, [w if _open(d, named) else d for d, w in pairs])

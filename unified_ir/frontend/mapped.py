"""`vmap`: turn a function of one sample into a function of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff.vectorize import vectorize
from triplane.unified_ir.frontend.programs import derived_once
from triplane.unified_ir.frontend.run import graph
from triplane.unified_ir.frontend.traced_call import (
    TracedCall,
    at_users_line,
    name_of_callable,
    record_call,
    with_tensors,
)
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.arrays import moveaxis
from triplane.unified_ir.ops.batching import with_axis
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.ops.trees import leaves, rebuild, structure

Axes = Any
"""An int or None for all leaves of a tree, or a tree of ints and None like it."""


@derived_once
def vmap(f: Any, in_axes: Axes = 0, out_axes: Axes = 0) -> Any:
    """Return `f`, a function of one sample, as a function of a batch of samples.

    `in_axes`: the axis of the batch in every argument, or a tuple with one entry per argument: an
    int, None for an argument that all samples share, or a tree of these like the argument.
    `out_axes`: the axis of the batch in each result, in the same form; None for a result that does
    not depend on the sample. Keyword arguments are shared.

    It nests, and combines with `grad`, `jvp` and the others in any order. Branches and loops that
    take the same course for every sample stay batched; others run sample by sample.

    >>> import numpy as np
    >>> vmap(lambda row, v: (row * v).sum(), in_axes=(0, None))(
    ...     np.eye(3), np.array([1.0, 2.0, 3.0])
    ... )
    array([1., 2., 3.], dtype=float32)
    """
    name = name_of_callable(f)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        trees = [with_tensors(a) for a in args]
        axes = _axes_of_arguments(in_axes, trees, name)
        size = _size(trees, axes, name)
        # `vectorize` expects the axis of the batch first.
        fronted = [
            rebuild(t, list(map(_to_front, leaves(t), ax)))
            for t, ax in zip(trees, axes, strict=True)
        ]
        tensors = [_tensors(t, ax) for t, ax in zip(fronted, axes, strict=True)]
        types = {
            i: [x.type if a is None else x.type.with_shape(x.shape[1:]) for x, a in pairs]
            for i, pairs in enumerate(tensors)
        }
        recorded = record_call(f, fronted, kwargs, types=types)
        batched = [a is not None for pairs in tensors for _, a in pairs]
        # Operands beyond the arguments are tensors that `f` captured; all samples share them.
        batched += [False] * (len(recorded.operands) - len(batched))
        results, flags = vectorize(recorded.function, recorded.operands, batched, size)
        _check_buffers(recorded, flags, name)
        count = len(results) - len(recorded.assigned)
        wanted = leaves_of_axes(out_axes, recorded.value, name)
        placed = [
            _placed(y, b, a, size, name)
            for y, b, a in zip(results[:count], flags, wanted, strict=False)
        ]
        return recorded.finish([*placed, *results[count:]])

    mapped.__name__ = name
    return graph(mapped)


def _axes_of_arguments(in_axes: Axes, trees: Sequence[Any], name: str) -> list[list[int | None]]:
    """Return one axis per leaf of each argument."""
    per_argument = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(trees)
    if len(per_argument) != len(trees):
        raise InvalidInput(
            f"in_axes of vmap({name}) has {len(per_argument)} entries, and the call "
            f"{len(trees)} arguments{at_users_line()}"
        )
    return [leaves_of_axes(a, t, name) for a, t in zip(per_argument, trees, strict=True)]


def leaves_of_axes(axes: Axes, tree: Any, name: str) -> list[int | None]:
    """Return one entry per leaf of `tree`: `axes` itself, or the entries of a tree like it."""
    if axes is None or isinstance(axes, int):
        return [axes] * len(leaves(tree))
    sequences = isinstance(axes, (tuple, list)) and isinstance(tree, (tuple, list))
    if sequences and len(axes) == len(tree):
        pairs = zip(axes, tree, strict=True)
        return [x for a, t in pairs for x in leaves_of_axes(a, t, name)]
    if isinstance(axes, dict) and isinstance(tree, dict) and axes.keys() == tree.keys():
        return [x for k in sorted(tree) for x in leaves_of_axes(axes[k], tree[k], name)]
    raise InvalidInput(
        f"axes of vmap({name}) are ints and None in the structure of what they belong to, "
        f"{structure(tree)}, got {axes!r}{at_users_line()}"
    )


def _tensors(tree: Any, axes: Sequence[int | None]) -> list[tuple[Tensor, int | None]]:
    return [(x, a) for x, a in zip(leaves(tree), axes, strict=True) if isinstance(x, Tensor)]


def _size(trees: Sequence[Any], axes: Sequence[Sequence[int | None]], name: str) -> Dim:
    """Return the size of the batch, which all mapped tensors share."""
    sizes: list[tuple[Dim, str]] = []
    for i, (tree, per_leaf) in enumerate(zip(trees, axes, strict=True)):
        for x, a in _tensors(tree, per_leaf):
            if a is None:
                continue
            if not -x.rank <= a < x.rank:
                raise ShapeError(
                    f"argument {i} of vmap({name}) is {x.type} and has no axis {a}{at_users_line()}"
                )
            sizes.append((x.shape[a], f"axis {a} of argument {i}, {x.type}"))
    if not sizes:
        raise InvalidInput(
            f"vmap({name}) has no tensor to map over; pass at least one array with an axis"
            f"{at_users_line()}"
        )
    odd = next((s for s in sizes if s[0] != sizes[0][0]), None)
    if odd is not None:
        raise ShapeError(
            f"vmap({name}) maps over axes of one size, got {sizes[0][0]} ({sizes[0][1]}) and "
            f"{odd[0]} ({odd[1]}){at_users_line()}"
        )
    return sizes[0][0]


def _to_front(x: Any, axis: int | None) -> Any:
    """Return a tensor with the batch's axis first; other leaves and shared tensors unchanged."""
    moves = isinstance(x, Tensor) and axis is not None and axis % x.rank
    return moveaxis(x, axis, 0) if moves and axis is not None else x


def _placed(y: Tensor, batched: bool, axis: int | None, size: Dim, name: str) -> Tensor:  # noqa: FBT001 - one of two flags per result
    """Return a result with the batch's axis moved to the requested position."""
    if axis is None:
        if batched:
            raise InvalidInput(
                f"out_axes of vmap({name}) is None for {y.type}, which differs from sample to "
                f"sample; give the axis of the batch{at_users_line()}"
            )
        return y
    if not batched:
        y = with_axis(y, size)
    if not -y.rank <= axis < y.rank:
        raise ShapeError(
            f"out_axes of vmap({name}) puts the batch on axis {axis} of {y.type}{at_users_line()}"
        )
    return moveaxis(y, 0, axis) if axis % y.rank else y


def _check_buffers(recorded: TracedCall, flags: Sequence[bool], name: str) -> None:
    extra = flags[len(flags) - len(recorded.assigned) :] if recorded.assigned else []
    for parameter, batched in zip(recorded.assigned, extra, strict=True):
        if batched:
            raise InvalidInput(
                f"{name} assigns the buffer {parameter!r} a value that depends on the sample; under"
                " vmap it would need one value per sample, and a buffer has one. Return the value,"
                f" or call .eval(){at_users_line()}"
            )

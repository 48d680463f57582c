"""`x[...]` as in numpy: ints, slices, None, Ellipsis, and arrays of ints or booleans (masks).

Ints among index arrays count as arrays. The axes of several arrays come first, or replace the axes
they index if these are adjacent. A mask that is only known in a run leaves a size open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr
from triplane.unified_ir.ir.types import as_dtype, bool_, int64
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.source import user_location

if TYPE_CHECKING:
    from triplane.unified_ir.ops.tensor import Tensor

END: Final = 2**62
"""A bound beyond every axis."""


def subscript(x: Tensor, index: Any) -> Tensor:
    """Return `x[index]`; what cannot be an index is refused by name."""
    items = _expanded(x, [_item(i) for i in (index if isinstance(index, tuple) else (index,))])
    new = [i for i, item in enumerate(items) if item is None]
    if new:
        x = _emit("Unsqueeze", x, np.array(new))
    items = [slice(None) if item is None else item for item in items]
    arrays = [i for i, item in enumerate(items) if _is_array(item)]
    if not arrays:
        return _basic(x, items)
    if len(items) > x.rank:
        raise _refused(f"{x.type} has {x.rank} axes, the index names {len(items)}")
    # Ints next to arrays are arrays for numpy, so they are not cut off as slices first.
    at = [i for i, item in enumerate(items) if _is_array(item) or _is_int(item)]
    x = _basic(x, [slice(None) if i in at else item for i, item in enumerate(items)])
    if len(at) == 1:
        return _chosen(x, at[0], items[at[0]])
    return _together(x, at, [items[i] for i in at])


def _refused(text: str) -> InvalidInput:
    """Return an error that names the user's line."""
    place = user_location()
    return InvalidInput(text if place is None else f"{text} (at {place})")


def _emit(name: str, *inputs: Any, **attrs: Any) -> Tensor:
    target = recorder()
    return target.apply(target.table["", name], inputs, attrs)[0]


def _item(item: Any) -> Any:
    """Turn a list into an array; refuse a single boolean."""
    if hasattr(item, "__tensor__"):
        item = item.__tensor__()
    if isinstance(item, (list, range)):
        item = np.array(item)
        item = item.astype(np.int64) if item.size == 0 else item
    if isinstance(item, (bool, np.bool_)):
        raise _refused(f"an index cannot be a single boolean, got {item}; use ops.where")
    return item


def _is_int(item: Any) -> bool:
    return isinstance(item, (int, np.integer))


def _is_array(item: Any) -> bool:
    return hasattr(item, "dtype") and not isinstance(item, np.generic)


def _is_mask(item: Any) -> bool:
    return _is_array(item) and as_dtype(item.dtype) == bool_


def _expanded(x: Tensor, items: list[Any]) -> list[Any]:
    """Return one item for each axis of x and each None; a mask of r axes becomes r arrays."""
    used = sum(
        0 if i is None or i is Ellipsis else len(i.shape) if _is_mask(i) else 1 for i in items
    )
    if used > x.rank:
        raise _refused(f"{x.type} has {x.rank} axes, the index names {used}")
    expanded: list[Any] = []
    if sum(i is Ellipsis for i in items) > 1:
        raise _refused("an index has one Ellipsis at most")
    for item in items if any(i is Ellipsis for i in items) else [*items, Ellipsis]:
        if item is Ellipsis:
            expanded += [slice(None)] * (x.rank - used)
        elif _is_mask(item):
            expanded += _positions(item)
        else:
            expanded.append(item)
    return expanded


def _positions(mask: Any) -> list[Any]:
    """Return the positions of a mask's true elements, by axis."""
    if isinstance(mask, np.ndarray):
        return list(np.nonzero(mask))
    # NonZero gives (axes, count): one row of positions per axis.
    places = _emit("NonZero", mask)
    return [_emit("Gather", places, i, axis=0) for i in range(mask.rank)]


def _basic(x: Tensor, items: Sequence[Any]) -> Tensor:
    bounds: list[tuple[Any, Any, int, int]] = []
    drop: list[int] = []
    for axis, item in enumerate(items):
        start, end, step = _bounds(x, axis, item)
        known = isinstance(start, int) and isinstance(end, int)
        if known and (start, end, step) == (0, END, 1):
            continue
        bounds.append((start, end, axis, step))
        if _is_int(item):
            drop.append(axis)
    if bounds:
        x = _emit("Slice", x, *(_vector(v) for v in zip(*bounds, strict=True)))
    return _emit("Squeeze", x, np.array(drop)) if drop else x


def _vector(values: Sequence[Any]) -> Tensor:
    """Return bounds as one int64 vector; some may be scalars of the graph."""
    target = recorder()
    if all(isinstance(v, (int, Expr)) for v in values):
        return target.dims(values)
    parts = [
        target.dims([v]) if isinstance(v, (int, Expr)) else v.cast(int64).reshape((1,))
        for v in values
    ]
    return parts[0] if len(parts) == 1 else _emit("Concat", *parts, axis=0)


def _bounds(x: Tensor, axis: int, item: Any) -> tuple[Any, Any, int]:
    if _is_int(item):
        size = x.shape[axis]
        if isinstance(size, int) and not -size <= item < size:
            raise _refused(f"index {item} is outside axis {axis} of {x.type}")
        # x[-1] is the slice -1: up to the end, since -1 + 1 = 0 would be an empty slice.
        return int(item), int(item) + 1 if item != -1 else END, 1
    if isinstance(item, slice):
        if item.step is not None and not _is_int(item.step):
            raise _refused(f"a slice's step is an int, got {item.step!r}")
        step = 1 if item.step is None else int(item.step)
        # A negative step runs from the last element to the first, both included by bounds beyond
        # them.
        start = (0 if step > 0 else END) if item.start is None else _bound(item.start)
        end = (END if step > 0 else -END) if item.stop is None else _bound(item.stop)
        return start, end, step
    raise _not_an_index(type(item).__name__)


def _not_an_index(kind: str) -> InvalidInput:
    return _refused(
        "an index is made of ints, slices, None, Ellipsis and arrays of ints or bools, got a "
        f"{kind}; use ops.gather, ops.where or ops.scatter_nd"
    )


def _bound(value: Any) -> Dim | Tensor:
    if isinstance(value, Expr):
        return value
    if _is_int(value):
        return int(value)
    scalar = _is_array(value) and not isinstance(value, np.ndarray) and value.rank == 0
    if scalar and value.dtype.kind in {"int", "uint"}:
        return value  # type: ignore[no-any-return]
    raise _refused(
        f"a slice's bound is an int, a size such as x.shape[0] or an int scalar, got {value!r}; "
        "use ops.gather with ops.arange"
    )


def _index(x: Tensor, axis: int, item: Any) -> Any:
    """Return an index array, its values checked if they are known."""
    if as_dtype(item.dtype).kind not in {"int", "uint"}:
        raise _not_an_index(f"{as_dtype(item.dtype)} tensor")
    size = x.shape[axis]
    if isinstance(item, np.ndarray):
        item = item.astype(np.int64)
        if isinstance(size, int) and item.size and not (-size <= item.min() <= item.max() < size):
            raise _refused(
                f"indices {item.min()}..{item.max()} are outside axis {axis} of {x.type}"
            )
    return item


def _chosen(x: Tensor, axis: int, item: Any) -> Tensor:
    """Index by one array, whose axes replace the axis."""
    index = _index(x, axis, item)
    if not isinstance(index, np.ndarray) and as_dtype(index.dtype).kind == "uint":
        index = index.cast(int64)
    return _emit("Gather", x, index, axis=axis)


def _together(x: Tensor, axes: Sequence[int], items: Sequence[Any]) -> Tensor:
    """Index by several arrays, which broadcast to common positions."""
    target = recorder()
    wanted = [
        target.as_operand(_index(x, a, np.asarray(i) if _is_int(i) else i)).cast(int64)
        for a, i in zip(axes, items, strict=True)
    ]
    # Adding zeros broadcasts the indices against each other without naming their sizes, which may
    # be symbolic.
    common = wanted[0]
    for w in wanted[1:]:
        common = common + w * 0
    spread = [_emit("Unsqueeze", w + common * 0, np.array([-1])) for w in wanted]
    rest = [i for i in range(x.rank) if i not in axes]
    # GatherND reads positions along the last axis, over the first axes of its operand.
    picked = _emit("GatherND", x.transpose(*axes, *rest), _emit("Concat", *spread, axis=-1))
    side_by_side = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    n, first = common.rank, axes[0]
    if not side_by_side or not first or not n:
        return picked
    order = [*range(n, n + first), *range(n), *range(n + first, picked.rank)]
    return picked.transpose(*order)

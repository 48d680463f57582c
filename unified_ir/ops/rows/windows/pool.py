"""Maximum pooling. The gradient goes to the first maximum of each window, as in PyTorch.

Equality with the maximum alone would give the gradient to every tie, and ties are common in images
with a constant background; a key per position of a window therefore makes the winner unique.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, product
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType, float64, int64
from triplane.unified_ir.ops.batching import merged, merged_all
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.infer import onnx_attrs
from triplane.unified_ir.ops.lowering import Rule, XlaContext, positions, written
from triplane.unified_ir.ops.row import (
    DOMAIN,
    AttrSpec,
    IntegerForm,
    MakeArray,
    Op,
    OpCall,
    OpKind,
    Sample,
)
from triplane.unified_ir.ops.rows.arithmetic.reductions import argmax_row
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather, scatter_elements
from triplane.unified_ir.ops.rows.movement.resizing import resize_row
from triplane.unified_ir.ops.rows.movement.slicing import slice_row
from triplane.unified_ir.ops.rows.movement.structure import broadcast_to, pad_row, zeros
from triplane.unified_ir.ops.rows.windows import xla_pools
from triplane.unified_ir.ops.rows.windows.conv_gradients import crop
from triplane.unified_ir.ops.rows.windows.mean_pool import average_pool_row
from triplane.unified_ir.ops.rows.windows.window import (
    Padded,
    Sizes,
    Window,
    emit_pool,
    is_static,
    pool_attrs,
    pooled_type,
    refuse_padding_alone,
    static,
)
from triplane.unified_ir.ops.samples import apart, computed, fixed, normal, sample
from triplane.unified_ir.ops.settings import settled
from triplane.unified_ir.ops.tensor import Tensor

Types = tuple[TensorType, ...]


def _pool(call: OpCall) -> Types:
    y = pooled_type(call.type(0), call.attrs)
    refuse_padding_alone(call.type(0), call.attrs)
    return (y, y.with_dtype(int64))[: call.outputs]


def _max_pool_kernel(
    x: Any, *, kernel_shape: Any, ceil_mode: int, storage_order: int = 0, **attrs: Any
) -> Any:
    """Return the maximum and its first flat position over (N, C, *S), window by window."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    low = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    values = padded.pad(x, low)
    positions = padded.pad(_flat_positions(x.shape, storage_order), -1)
    best = np.full((*x.shape[:2], *padded.out), low, x.dtype)
    where = np.full(best.shape, -1)
    for value, here in zip(padded.views(values), padded.views(positions), strict=True):
        # A position of padding (-1) never wins, and the first element of a window does even if it
        # equals `low`, as a plane of -inf does.
        better = (value > best) | ((where < 0) & (here >= 0))
        best, where = np.where(better, value, best), np.where(better, here, where)
    return best, where


def _flat_positions(shape: Sequence[int], storage_order: int) -> Any:
    """Return where each element lies; storage order 1 counts spatial axes in reverse order."""
    size = int(np.prod(shape[2:]))
    plane = np.arange(size).reshape(shape[2:])
    if storage_order:
        plane = np.arange(size).reshape(shape[:1:-1]).T
    return np.arange(shape[0] * shape[1]).reshape(*shape[:2], *[1] * plane.ndim) * size + plane


def _max_pool_vjp(g: Any, y: Any, x: Tensor, **attrs: Any) -> tuple[Tensor | None]:
    if isinstance(g, tuple):
        g, y = g[0], y[0]
    if g is None:
        return (None,)
    return (max_unpool(g, x, y, **_window_attrs(attrs)),)


def _window_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: attrs[k] for k in _WINDOW if attrs.get(k) not in (None, "NOTSET", "")}


_WINDOW: Final[Mapping[str, AttrSpec]] = {
    "kernel_shape": AttrSpec("INTS", required=True),
    "strides": AttrSpec("INTS"),
    "pads": AttrSpec("INTS"),
    "dilations": AttrSpec("INTS"),
    "ceil_mode": AttrSpec("INT", 0),
    "auto_pad": AttrSpec("STRING", "NOTSET"),
    "form": AttrSpec("STRING", ""),
}

max_pool_row = Op(
    name="MaxPool", kind=OpKind.WINDOW, integer_form=IntegerForm.COPY, emit=emit_pool,
    batch=merged,
    infer=_pool,
    reference=_max_pool_kernel,
    xla=xla_pools.max_pool,
    vjp=_max_pool_vjp,
    samples=(
        sample(apart(2, 3, 4, 6), kernel_shape=(2, 2), strides=(2, 2)),
        sample(apart(2, 3, 5, 5), kernel_shape=(2, 2), strides=(2, 2)),
        sample(apart(1, 2, 6, 6), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        sample(apart(1, 2, 5, 5), kernel_shape=(2, 2)),
        sample(
            lambda rng: np.round(rng.standard_normal((2, 2, 4, 4))), outputs=2, smooth=(),
            kernel_shape=(2, 2), strides=(2, 2),
        ),
        sample(apart(2, 2, 7), kernel_shape=(3,), strides=(3,)),
        sample(apart(1, 2, 4, 4, 5), kernel_shape=(2, 2, 2), strides=(2, 2, 2)),
        sample(apart(1, 2, 3, 4, 4), kernel_shape=(2, 3, 2), strides=(1, 2, 1),
               pads=(1, 0, 1, 0, 1, 0)),
        sample(apart(1, 2, 7, 8), kernel_shape=(3, 2), dilations=(2, 3), strides=(1, 2)),
        sample(apart(1, 2, 6, 5), kernel_shape=(3, 2), strides=(2, 2), ceil_mode=1,
               pads=(1, 0, 0, 1)),
        sample(apart(1, 2, 5, 6), kernel_shape=(3, 2), strides=(2, 2), auto_pad="SAME_UPPER"),
        sample(apart(1, 2, 5, 6), kernel_shape=(2, 2), strides=(3, 1), auto_pad="SAME_LOWER"),
        sample(apart(1, 2, 4, 5), kernel_shape=(3, 2), outputs=2, storage_order=1),
    ),
)  # fmt: skip


def _plain_tiles(x: TensorType, attrs: Mapping[str, Any]) -> bool:
    """Return whether windows tile a static plane without overlap, so keys find the first maximum.

    Not in float64: onnxruntime 1.31 has no kernels of Resize and AveragePool for it.
    """
    kernel = tuple(attrs["kernel_shape"])
    if not is_static(x.shape[2:]) or attrs.get("ceil_mode") or x.dtype == float64:
        return False
    window = Window.over(x.shape[2:], kernel, attrs)
    return kernel == window.strides and not any(window.pads) and set(window.dilations) == {1}


def _upsample(m: Tensor, kernel: Sequence[int]) -> Tensor:
    """Repeat each element; m: (N, C, *t) -> (N, C, *(t * k))."""
    scales = np.array([1, 1, *kernel], np.float32)
    return resize_row(
        m, None, scales, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )


def _cropped(x: Tensor, sizes: Sequence[int]) -> Tensor:
    if x.shape[2:] == tuple(sizes):
        return x
    zero = [0] * len(sizes)
    return slice_row(x, np.array(zero), np.array(sizes), np.arange(2, x.rank))


def _keys(tiles: Sequence[Dim], kernel: Sequence[int], x: Tensor) -> Tensor:
    """Return keys falling from the first to the last position of each window, over the plane.

    A small constant repeated by the graph: runtimes fold it when they load the model.
    """
    n = len(kernel)
    order = np.arange(int(np.prod(kernel)), 0, -1, dtype=x.dtype.numpy)
    window = order.reshape([k for size in kernel for k in (1, size)])
    whole = [d for pair in zip(tiles, kernel, strict=True) for d in pair]
    plane = [whole[2 * i] * whole[2 * i + 1] for i in range(n)]
    return broadcast_to(x.build.as_operand(window), whole).reshape(plane)


def _winner(x: Tensor, y: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return 1 at the first maximum of each window, else 0; x is cropped to whole windows."""
    # Among the positions equal to the maximum, the one with the largest key is the first.
    keyed = (x == _upsample(y, kernel)).cast(x.dtype) * _keys(y.shape[2:], kernel, x)
    best = max_pool_row(keyed, kernel_shape=kernel, strides=kernel)
    return (keyed == _upsample(best, kernel)).cast(x.dtype)


def _covered(y: Tensor, kernel: Sequence[int]) -> list[int]:
    return [int(d) * k for d, k in zip(y.shape[2:], kernel, strict=True)]  # type: ignore[arg-type]


def _unpool_by_keys(g: Tensor, x: Tensor, y: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    kernel = attrs["kernel_shape"]
    sizes = _covered(y, kernel)
    placed = _upsample(g, kernel) * _winner(_cropped(x, sizes), y, kernel)
    missing = [int(d) - k for d, k in zip(x.shape[2:], sizes, strict=True)]  # type: ignore[arg-type]
    return pad_row(placed, np.array([0] * (x.rank + 2) + missing)) if any(missing) else placed


def _select_by_keys(t: Tensor, x: Tensor, y: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    kernel = attrs["kernel_shape"]
    sizes = _covered(y, kernel)
    chosen = _cropped(t, sizes) * _winner(_cropped(x, sizes), y, kernel)
    # One element of each window is not 0, so the mean times the window's size is that element.
    mean = average_pool_row(chosen, kernel_shape=kernel, strides=kernel)
    return mean * float(np.prod(kernel))


def _unpool_by_positions(g: Tensor, x: Tensor, y: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    index = _positions(x, attrs).reshape((-1,))
    flat = zeros([x.type.size], g.dtype)
    return scatter_elements(flat, index, g.reshape((-1,)), reduction="add").reshape(x.shape)


def _select_by_positions(t: Tensor, x: Tensor, y: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    return gather(t.reshape((-1,)), _positions(x, attrs), axis=0)


def _positions(x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    return max_pool_row.all_outputs(x, outputs=2, **_window_attrs({**attrs, "form": ""}))[1]


FollowWinners = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]
"""(operand, x, its pool, attributes) -> the operand placed at the winners, or read there."""


@dataclass(frozen=True, slots=True)
class WinnerForm:
    """One way to place at, or select, the first maximum of each window; which cases it serves."""

    serves: Callable[[TensorType, Mapping[str, Any]], bool]
    unpool: FollowWinners
    select: FollowWinners


# fmt: off
WINNER_FORMS: Final[Mapping[str, WinnerForm]] = {
    "keys":      WinnerForm(_plain_tiles, _unpool_by_keys, _select_by_keys),
    "positions": WinnerForm(lambda x, attrs: True, _unpool_by_positions, _select_by_positions),
}
"""The ways to reach the first maxima, fastest first; the attribute `form` may name another."""
# fmt: on


def winner_forms(x: TensorType, attrs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the forms that serve a pool of x with these attributes, the default first."""
    return tuple(name for name, form in WINNER_FORMS.items() if form.serves(x, attrs))


def _winner_form(x: TensorType, attrs: Mapping[str, Any]) -> WinnerForm:
    serving, wanted = winner_forms(x, attrs), attrs["form"]
    if wanted and wanted not in serving:
        raise InvalidInput(f"this pool has the forms {', '.join(serving)}, got {wanted!r}")
    return WINNER_FORMS[wanted or serving[0]]


def _winner_row(
    name: str,
    apply: Callable[[WinnerForm], FollowWinners],
    types: Callable[[TensorType, TensorType], Types],
    adjoint: Callable[..., Tensor],
    xla: Rule,
    computes: str,
    *samples: Sample,
) -> Op:
    """Build a row (t, x, y) -> u over the winners of x and its pool y.

    types: (type of x, type of y) -> (type of t, type of u); adjoint: the row (u, x, y) -> t.
    """

    def infer(call: OpCall) -> Types:
        x, form = call.type(1), call.attrs["form"]
        pooled = pooled_type(x, call.attrs)
        taken, result = types(x, pooled)
        if call.type(0).shape != taken.shape or call.type(2) != pooled:
            got = [str(call.type(i)) for i in range(3)]
            raise ShapeError(f"{call.row} takes x as {x} and its pool as {pooled}, got {got}")
        if form and form not in WINNER_FORMS:
            raise InvalidInput(f"form must be one of {', '.join(WINNER_FORMS)}, got {form!r}")
        return (result,)

    return Op(
        name=name,
        computes=computes,
        kind=OpKind.WINDOW,
        batch=merged_all,
        domain=DOMAIN,
        operands=("T", "T", "T"),
        attrs=_WINDOW,
        infer=infer,
        vjp=lambda g, u, t, x, y, **a: (adjoint(g, x, y, **_window_attrs(a)), None, None),
        body=lambda t, x, y, **a: apply(_winner_form(x.type, a))(t, x, y, a),
        xla=xla,
        samples=samples,
    )


def _use(t: MakeArray, x: MakeArray, window: Mapping[str, Any], **attrs: Any) -> Sample:
    """Make a sample whose x is one array for every seed, so that its pool y belongs to it."""
    fixed = x(np.random.default_rng(7))
    pooled = _max_pool_kernel(fixed, ceil_mode=0, **window)[0]
    return sample(t, computed(fixed), computed(pooled), smooth=(0,), **window, **attrs)


_TILED: Final[Mapping[str, Any]] = {"kernel_shape": (2, 2), "strides": (2, 2)}
_OVERLAPPING: Final[Mapping[str, Any]] = {
    "kernel_shape": (3, 3),
    "strides": (2, 2),
    "pads": (1, 1, 1, 1),
}

max_unpool = _winner_row(
    "MaxUnpoolFirst",
    lambda form: form.unpool,
    lambda x, y: (y, x),
    lambda *operands, **attrs: max_select(*operands, **attrs),
    xla_pools.max_unpool_first,
    "each element of g at the first maximum of its window of x, and 0 elsewhere; y is x's MaxPool",
    _use(normal(2, 3, 2, 3), apart(2, 3, 4, 6), _TILED),
    _use(normal(2, 3, 2, 2), apart(2, 3, 5, 5), _TILED),
    _use(normal(2, 3, 2, 3), apart(2, 3, 4, 6), _TILED, form="positions"),
    _use(normal(1, 2, 3, 3), apart(1, 2, 6, 6), _OVERLAPPING),
)

max_select: Op = _winner_row(
    "MaxSelectFirst",
    lambda form: form.select,
    lambda x, y: (x, y),
    max_unpool,
    xla_pools.max_select_first,
    "t at the first maximum of each window of x; y is x's MaxPool",
    _use(normal(2, 3, 4, 6), apart(2, 3, 4, 6), _TILED),
    _use(normal(2, 3, 4, 6), apart(2, 3, 4, 6), _TILED, form="positions"),
    _use(normal(1, 2, 6, 6), apart(1, 2, 6, 6), _OVERLAPPING),
)


def _counted_sizes(shape: Sequence[Dim], attrs: Mapping[str, Any]) -> list[Dim]:
    """Return the sizes (N, C, *S) that the indices of an unpool count in."""
    window = Window(attrs["kernel_shape"], attrs)
    n = len(window.kernel)
    if len(shape) != n + 2:
        raise ShapeError(f"MaxUnpool over {n} axes takes x: (N, C, ...), got sizes {tuple(shape)}")
    spatial = [
        window.reach(i, d) - window.pads[i] - window.pads[n + i] for i, d in enumerate(shape[2:])
    ]
    return [*shape[:2], *spatial]


def _unpooled(call: OpCall) -> Types:
    x = call.type(0)
    inner = _counted_sizes(x.shape, call.attrs)
    if call.type(1).shape != x.shape:
        raise ShapeError(f"MaxUnpool takes one index per element of {x}, got {call.type(1)}")
    outer = list(call.dims(2)) if call.has(2) else inner
    if len(outer) != x.rank or outer[:2] != inner[:2]:
        raise ShapeError(f"MaxUnpool of {x} to {outer} changes more than the plane")
    if any(isinstance(o - i, int) and o - i < 0 for o, i in zip(outer, inner, strict=True)):  # type: ignore[operator]
        raise ShapeError(f"MaxUnpool of {x} fills {inner}, more than output_shape {outer}")
    return (x.with_shape(outer),)


def _max_unpool_kernel(x: Any, index: Any, output_shape: Any = None, **attrs: Any) -> Any:
    y = np.zeros(static(_counted_sizes(x.shape, attrs), "a plane"), x.dtype)
    y.flat[index.ravel()] = x.ravel()
    outer = y.shape if output_shape is None else output_shape
    return np.pad(y, [(0, int(o) - i) for o, i in zip(outer, y.shape, strict=True)])


def _max_unpool_xla(
    k: XlaContext, x: Any, index: Any, output_shape: Any = None, **attrs: Any
) -> Any:
    shape = static(_counted_sizes(x.shape, attrs), "a plane")
    size = int(np.prod(shape))
    at = positions(k, index, size).ravel()
    y = written(k, k.np.zeros(size, x.dtype), (at,), x.ravel(), "none").reshape(shape)
    outer = shape if output_shape is None else k.known(output_shape, "its output shape")
    return k.np.pad(y, [(0, int(o) - i) for o, i in zip(outer, shape, strict=True)])


def _max_unpool_onnx_vjp(
    g: Tensor, y: Tensor, x: Tensor, index: Tensor, *rest: Tensor, **attrs: Any
) -> Any:
    g = crop(g, _counted_sizes(x.shape, attrs))
    return (gather(g.reshape((-1,)), index, axis=0), None, *(None for _ in rest))


def _unpooled_open(call: OpCall) -> tuple[Dim | None, ...]:
    n, c, *spatial = call.type(0).shape
    return (n, c, *(None for _ in spatial))


_INDEX: Final = computed([[[[0, 3], [10, 9]]], [[[16, 19], [24, 31]]]])


def _emit_max_unpool(context: EmissionContext, node: Node) -> None:
    """Pad a larger output afterwards: onnxruntime counts indices in `output_shape`."""
    names = context.inputs(node)
    if len(names) < 3:
        context.plain(node)
        return
    y = context.emit("MaxUnpool", *names[:2], **onnx_attrs(node.attrs))
    after = context.emit("Sub", names[2], context.emit("Shape", y))
    before = context.constant(np.zeros(node.outputs[0].type.rank, np.int64))
    amounts = context.emit("Concat", before, after, axis=0)
    context.add("Pad", [y, amounts], context.output_names(node))


max_unpool_row = Op(
    name="MaxUnpool", kind=OpKind.WINDOW, emit=_emit_max_unpool,
    **settled(_unpooled, _unpooled_open, 2),
    reference=_max_unpool_kernel,
    xla=_max_unpool_xla,
    vjp=_max_unpool_onnx_vjp,
    samples=(
        sample(normal(2, 1, 2, 2), _INDEX, kernel_shape=(2, 2), strides=(2, 2)),
        sample(normal(2, 1, 2, 2), _INDEX, fixed([2, 1, 5, 6]), kernel_shape=(2, 2),
               strides=(2, 2)),
        sample(normal(1, 1, 3), computed([[[0, 2, 3]]]), kernel_shape=(2,), pads=(0, 0)),
    ),
)  # fmt: skip
"""x at `index`, flat positions in the output before output_shape enlarges it."""


def _global_max_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    size = product(list(x.shape[2:]))
    # argmax takes the first maximum, so ties are resolved as in MaxPool.
    first = argmax_row(x.reshape((*x.shape[:2], size)), axis=2)
    hit = (first == arange(size)).cast(g.dtype)
    return ((hit * g.reshape((*g.shape[:2], 1))).reshape(x.shape),)


global_max_pool = Op(
    name="GlobalMaxPool",
    kind=OpKind.WINDOW,
    batch=merged,
    reference=lambda x: x.max(axis=tuple(range(2, x.ndim)), keepdims=True),
    xla=lambda k, x: x.max(axis=tuple(range(2, x.ndim)), keepdims=True),
    vjp=_global_max_vjp,
    samples=(sample(apart(2, 3, 4, 5)), sample(apart(2, 3, 4))),
)


def max_pool(
    x: Tensor,
    kernel: Sizes,
    *,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """x: (N, C, *S) -> (N, C, *T): maximum of each window; the stride defaults to the window.

    With `ceil_mode` a last window may reach beyond the padded input, but starts inside.
    """
    attrs = pool_attrs(x, kernel, stride, padding, dilation)
    return max_pool_row(x, ceil_mode=int(ceil_mode), **attrs)

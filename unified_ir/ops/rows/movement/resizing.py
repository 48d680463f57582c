"""Resizing by interpolation: along each axis one small matrix, so the gradient is its transpose.

y = M x along an axis, M[o, i] the weight of input position i at output position o. The matrix is a
constant where sizes are static and small, otherwise a few nodes of the graph; the same code
computes both, with numpy or with tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.ir.dims import Dim, Expr, floor_div, product
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import DType, ShapeError, TensorType, float32
from triplane.unified_ir.ops.lowering import XlaContext, taken
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import OPEN, Known, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import ceil, floor, maximum, minimum
from triplane.unified_ir.ops.rows.arithmetic.matrix import swap_last
from triplane.unified_ir.ops.rows.movement.indexing import arange
from triplane.unified_ir.ops.rows.movement.structure import axes_of, unsqueeze, where
from triplane.unified_ir.ops.samples import LiteralArray, ints, literal, normal, sample
from triplane.unified_ir.ops.settings import settled
from triplane.unified_ir.ops.tensor import Tensor, dims_of

MAX_CONSTANT_WEIGHTS: Final = 2**16
"""A larger matrix is computed by the graph rather than stored in it."""
MAX_SCALE_DENOMINATOR: Final = 1024
"""A symbolic size is scaled by p / q with q up to this."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """One resized axis; `scale` is None where it is out / size of sizes known at run time."""

    axis: int
    size: Dim
    out: Dim
    scale: float | None
    crop: tuple[float, float] = (0.0, 1.0)


def _scaled(size: Dim, scale: float) -> Dim:
    """Return floor(size * scale), in float32 as onnxruntime multiplies."""
    if isinstance(size, int):
        return int(np.floor(np.float32(size) * np.float32(scale)))
    # A float is a binary fraction; sizes stay polynomials only if the scale is a ratio of integers.
    ratio = Fraction(scale)
    if ratio.denominator > MAX_SCALE_DENOMINATOR:
        raise ShapeError(
            f"Resize scales the symbolic size {size} by p / q with q <= {MAX_SCALE_DENOMINATOR}, "
            f"got {scale}; give sizes instead"
        )
    return floor_div(size * ratio.numerator, ratio.denominator)


def _resized(
    shape: Sequence[Dim],
    roi: Known | None,
    scales: Known | None,
    sizes: Known | None,
    attrs: Mapping[str, Any],
) -> list[_Axis]:
    """Return the axes that Resize changes, each with its sizes and scale."""
    axes = [range(len(shape))[a] for a in attrs["axes"] or ()] or list(range(len(shape)))
    axes_of(len(shape), axes)
    wanted = sizes if sizes is not None and len(sizes) else scales
    if wanted is None or len(wanted) != len(axes):
        raise ShapeError(f"Resize of {len(axes)} axes needs as many scales or sizes, got {wanted}")
    crop = attrs["coordinate_transformation_mode"] == "tf_crop_and_resize"
    if crop and (roi is None or len(roi) != 2 * len(axes)):
        raise ShapeError(f"Resize with tf_crop_and_resize needs a roi of {2 * len(axes)} numbers")
    policy = attrs["keep_aspect_ratio_policy"]
    if wanted is scales:
        factors = [float(s) for s in wanted]  # type: ignore[arg-type]
        if not all(0 < s < math.inf for s in factors):
            raise ShapeError(f"Resize needs positive finite scales, got {factors}")
        pairs = zip(axes, factors, strict=True)
        resized = [_Axis(a, shape[a], _scaled(shape[a], s), s) for a, s in pairs]
    elif policy == "stretch":
        resized = [_stretched(a, shape[a], d) for a, d in zip(axes, wanted, strict=True)]
    else:
        resized = _same_aspect(axes, shape, wanted, policy)
    if crop:
        assert roi is not None
        ends = [float(r) for r in roi]  # type: ignore[arg-type]
        crops = zip(ends[: len(axes)], ends[len(axes) :], strict=True)
        resized = [replace(a, crop=c) for a, c in zip(resized, crops, strict=True)]
    # Axes that keep size, scale and region would get an identity matrix.
    return [a for a in resized if (a.size, 1.0, (0.0, 1.0)) != (a.out, a.scale, a.crop)]


def _stretched(axis: int, size: Dim, out: Any) -> _Axis:
    out = out if isinstance(out, Expr) else int(out)
    if isinstance(size, Expr) or isinstance(out, Expr):
        return _Axis(axis, size, out, 1.0 if out == size else None)
    if size < 1 or out < 1:
        raise ShapeError(f"Resize takes sizes of at least 1, got {size} to {out}")
    return _Axis(axis, size, out, out / size)


def _same_aspect(
    axes: Sequence[int], shape: Sequence[Dim], sizes: Known, policy: str
) -> list[_Axis]:
    """Use one scale for all axes: the least that the sizes ask for, or the largest."""
    have: list[Any] = [shape[a] for a in axes]
    if any(isinstance(d, Expr) for d in (*have, *sizes)):
        raise ShapeError(
            f"Resize with keep_aspect_ratio_policy={policy} needs static sizes, got {have} to "
            f"{list(sizes)}; use 'stretch' with sizes of the wanted ratio"
        )
    ratios = [int(d) / size for d, size in zip(sizes, have, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    resized = zip(axes, have, strict=True)
    # ONNX: round_int(scale * size), half rounded up.
    return [_Axis(a, size, int(np.floor(scale * size + 0.5)), scale) for a, size in resized]


def _host(_: DType) -> Any:
    return SimpleNamespace(
        arange=lambda n: np.arange(n, dtype=np.float64), number=float, column=lambda v: v[:, None],
        # Coordinates in float32, as onnxruntime computes them: the rounding decides ties of
        # "nearest".
        single=lambda v: v.astype(np.float32).astype(np.float64), floor=np.floor, ceil=np.ceil,
        where=np.where, maximum=np.maximum, minimum=np.minimum,
    )  # fmt: skip


def _graph(dtype: DType) -> Any:
    def number(n: Dim) -> Any:
        return float(n) if isinstance(n, int) else dims_of([n]).reshape(()).cast(dtype)

    return SimpleNamespace(
        arange=lambda n: arange(n).cast(dtype), number=number, column=lambda v: unsqueeze(v, 1),
        single=lambda v: v, floor=floor, ceil=ceil,
        where=where, maximum=maximum, minimum=minimum,
    )  # fmt: skip


def _symmetric(xp: Any, o: Any, n: Any, m: Any, s: Any, _: Any) -> Any:
    """Place half pixels around the middle; m, the whole output size, may be less than s n."""
    return 0.5 * n * (1.0 - m / (s * n)) + (o + 0.5) / s - 0.5


def _cropped(xp: Any, o: Any, n: Any, m: Any, s: Any, crop: tuple[float, float]) -> Any:
    start, end = crop
    middle = 0.5 * (start + end) * (n - 1.0)
    spread = start * (n - 1.0) + o * ((end - start) * (n - 1.0) / xp.maximum(m - 1.0, 1.0))
    return xp.where(m > 1.0, spread, middle)


# fmt: off
_COORDINATES: Final[Mapping[str, Callable[..., Any]]] = {
    "half_pixel":           lambda xp, o, n, m, s, _: (o + 0.5) / s - 0.5,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel":   lambda xp, o, n, m, s, _: xp.where(m > 1.0, (o + 0.5) / s - 0.5, 0.0),
    "align_corners":        lambda xp, o, n, m, s, _: o * ((n - 1.0) / xp.maximum(m - 1.0, 1.0)),
    "asymmetric":           lambda xp, o, n, m, s, _: o / s,
    "tf_crop_and_resize":   _cropped,
}
"""Where output position o lies on the input: n, m sizes before and after, s the scale."""
_NEAREST: Final[Mapping[str, Callable[..., Any]]] = {
    "round_prefer_floor": lambda xp, x: xp.ceil(x - 0.5),
    "round_prefer_ceil":  lambda xp, x: xp.floor(x + 0.5),
    "floor":              lambda xp, x: xp.floor(x),
    "ceil":               lambda xp, x: xp.ceil(x),
}
_REACH: Final[Mapping[str, int]] = {"linear": 1, "cubic": 2}
"""The distance beyond which the kernel of a mode is zero."""
# fmt: on


def _kernel(xp: Any, t: Any, attrs: Mapping[str, Any]) -> Any:
    """Return the weight of a sample at distance t; cubic: Keys 1981 with coefficient a."""
    t = xp.maximum(t, 0.0 - t)
    if attrs["mode"] == "linear":
        return xp.maximum(1.0 - t, 0.0)
    a = attrs["cubic_coeff_a"]
    # (a + 2) t^3 - (a + 3) t^2 + 1 up to 1, and a t^3 - 5 a t^2 + 8 a t - 4 a between 1 and 2.
    near = ((a + 2.0) * t - (a + 3.0)) * t * t + 1.0
    far = ((t - 5.0) * t + 8.0) * t * a - 4.0 * a
    return xp.where(t <= 1.0, near, xp.where(t < 2.0, far, t * 0.0))


def _taps(xp: Any, x: Any, n: Any, a: _Axis, attrs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return (input position, weight) pairs whose sum is the value at coordinate x."""
    mode = attrs["mode"]
    if mode == "nearest":
        return [(_NEAREST[attrs["nearest_mode"]](xp, xp.single(x)), x * 0.0 + 1.0)]
    shrink = 1.0
    if attrs["antialias"]:
        if a.scale is None:
            raise ShapeError(
                f"Resize with antialias=1 needs a scale known before the run, got {a.size} to "
                f"{a.out}; give scales or static sizes"
            )
        shrink = min(a.scale, 1.0)
    # Shrinking with antialias stretches the kernel by 1 / scale, so more input positions count.
    start = int(np.floor(-_REACH[mode] / shrink)) + 1
    base = xp.floor(x)
    taps = [(base + k, _kernel(xp, (base + (k - x)) * shrink, attrs)) for k in
            map(float, range(start, 2 - start))]  # fmt: skip
    if attrs["exclude_outside"]:
        taps = [(i, xp.where(i < 0.0, w * 0.0, xp.where(i > n - 1.0, w * 0.0, w))) for i, w in taps]
    # Weights that were cut off or stretched no longer add up to 1.
    if attrs["exclude_outside"] or shrink < 1.0:
        total = sum((w for _, w in taps[1:]), taps[0][1])
        taps = [(i, w / total) for i, w in taps]
    return taps


def _weights(xp: Any, a: _Axis, attrs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the (out, size) matrix of one axis, and 1 if the coordinate is inside, else 0."""
    n, m = xp.number(a.size), xp.number(a.out)
    mode = attrs["coordinate_transformation_mode"]
    scale = m / n if a.scale is None else a.scale
    x = _COORDINATES[mode](xp, xp.arange(a.out), n, m, scale, a.crop)
    columns = xp.arange(a.size)
    matrix = None
    for position, weight in _taps(xp, x, n, a, attrs):
        # Positions beyond an edge read the element at the edge, as ONNX defines without
        # exclude_outside.
        held = xp.minimum(xp.maximum(position, 0.0), n - 1.0)
        term = xp.where(xp.column(held) == columns, xp.column(weight), 0.0)
        matrix = term if matrix is None else matrix + term
    if mode != "tf_crop_and_resize":
        return matrix, None
    inside = xp.where(x < 0.0, x * 0.0, xp.where(x > n - 1.0, x * 0.0, x * 0.0 + 1.0))
    return matrix * xp.column(inside), inside


def _tensors(a: _Axis, attrs: Mapping[str, Any], dtype: DType) -> tuple[Tensor, Tensor | None]:
    """Return the matrix and mask of `_weights`: constants if they are small, else computed."""
    entries = a.size * a.out
    if isinstance(entries, Expr) or entries > MAX_CONSTANT_WEIGHTS:
        return _weights(_graph(dtype), a, attrs)
    matrix, inside = (
        None if v is None else recorder().as_operand(v.astype(dtype.numpy))
        for v in _weights(_host(dtype), a, attrs)
    )
    assert matrix is not None
    return matrix, inside


def along(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Multiply along one axis; x: (..., n, ...), matrix: (m, n) -> (..., m, ...)."""
    out = (*x.shape[:axis], matrix.shape[0], *x.shape[axis + 1 :])
    # The last axis needs no transposition: one product of all rows with the matrix.
    if axis == x.rank - 1:
        return (x.reshape((-1, x.shape[axis])) @ swap_last(matrix)).reshape(out)
    rest = product(list(x.shape[axis + 1 :]))
    wide = x.reshape((product(list(x.shape[:axis])), x.shape[axis], rest))
    return (matrix @ wide).reshape(out)


def _operands(
    x: Tensor, operands: Sequence[Tensor | None], attrs: Mapping[str, Any], y: Tensor | None = None
) -> list[_Axis]:
    """Return the resized axes; sizes computed in the run are those of the output `y`."""
    known = [None if o is None else recorder().known(o) for o in operands]
    roi, scales, sizes = [*known, None, None, None][:3]
    for operand, contents in zip(operands, known, strict=True):
        if operand is not None and contents is None and operand.shape != (0,):
            if operand is not operands[-1] or len(operands) < 3 or y is None:
                raise InvalidInput(
                    "the gradient of Resize needs its roi and scales when the graph is built; "
                    "give constants, or sizes"
                )
            sizes = tuple(y.shape[a] for a in attrs["axes"] or range(x.rank))
    return _resized(x.shape, roi, scales, sizes, attrs)


def _resize_body(x: Tensor, *operands: Tensor | None, **attrs: Any) -> Tensor:
    axes = _operands(x, operands, attrs)
    dtype = x.dtype if x.dtype.is_float else float32
    y, inside = x.cast(dtype), None
    for a in axes:
        matrix, mask = _tensors(a, attrs, dtype)
        y = along(y, matrix, a.axis)
        if mask is not None:
            mask = mask.reshape([a.out if i == a.axis else 1 for i in range(x.rank)])
            inside = mask if inside is None else inside * mask
    if inside is not None and attrs["extrapolation_value"]:
        y = y + (1.0 - inside) * attrs["extrapolation_value"]
    return y.cast(x.dtype)


def _resize_vjp(g: Tensor, y: Tensor, x: Tensor, *operands: Tensor | None, **attrs: Any) -> Any:
    for a in reversed(_operands(x, operands, attrs, y)):
        matrix, _ = _tensors(a, attrs, g.dtype)
        # y = M x along the axis, so dx = M^T g.
        g = along(g, swap_last(matrix), a.axis)
    return (g, *(None for _ in operands))


_CHOICES: Final[Mapping[str, Sequence[str]]] = {
    "mode": ("nearest", *_REACH),
    "coordinate_transformation_mode": tuple(_COORDINATES),
    "nearest_mode": tuple(_NEAREST),
    "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
}


def _check_names(call: OpCall) -> None:
    for attr, names in _CHOICES.items():
        if call.attrs[attr] not in names:
            raise InvalidInput(
                f"{attr} of Resize must be one of {', '.join(names)}, got {call.attrs[attr]!r}"
            )


def _resize_types(call: OpCall) -> tuple[TensorType]:
    x = call.type(0)
    _check_names(call)
    roi, scales, sizes = [*call.known[1:4], None, None, None][:3]
    shape = list(x.shape)
    for a in _resized(x.shape, roi, scales, sizes, call.attrs):
        shape[a.axis] = a.out
    return (x.with_shape(shape),)


def _resize_open(call: OpCall) -> tuple[Dim | None, ...]:
    """Leave every size open that scales or sizes computed in the run may change."""
    _check_names(call)
    x = call.type(0)
    changed = {range(x.rank)[a] for a in call.attrs["axes"] or range(x.rank)}
    return tuple(None if i in changed else d for i, d in enumerate(x.shape))


def _resize_kernel(
    x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, **attrs: Any
) -> Any:
    y, inside = x.astype(np.float64), None
    for a in _resized(x.shape, roi, scales, sizes, attrs):
        matrix, mask = _weights(_host(float32), a, attrs)
        if attrs["mode"] == "nearest":  # a copy, also of infinity
            y = np.take(y, matrix.argmax(1), a.axis)
        else:
            y = np.moveaxis(np.tensordot(matrix, y, (1, a.axis)), 0, a.axis)
        if mask is not None:
            mask = mask.reshape([-1 if i == a.axis else 1 for i in range(x.ndim)])
            inside = mask if inside is None else inside * mask
    if inside is not None:
        y = np.where(inside, y, attrs["extrapolation_value"])
    return y.astype(x.dtype)


def _resize_xla(
    k: XlaContext, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, **attrs: Any
) -> Any:
    known = [None if o is None else k.known(o, "its sizes") for o in (roi, scales, sizes)]
    copies = attrs["mode"] == "nearest"
    is_float = k.np.issubdtype(x.dtype, np.floating)
    y, inside = (x if copies or is_float else x.astype(np.float32)), None
    for a in _resized(x.shape, known[0], known[1], known[2], attrs):
        matrix, mask = _weights(_host(float32), a, attrs)
        y = (_copied if copies else _combined)(k, y, matrix, a.axis)
        if mask is not None:
            mask = mask.reshape([-1 if i == a.axis else 1 for i in range(x.ndim)])
            inside = mask if inside is None else inside * mask
    return y if inside is None else k.np.where(inside != 0, y, attrs["extrapolation_value"])


def _copied(k: XlaContext, x: Any, matrix: Any, axis: int) -> Any:
    """Return slices along an axis; repeat each if all come equally often and in order."""
    at = matrix.argmax(1)
    times, rest = divmod(len(at), x.shape[axis])
    if rest or not np.array_equal(at, np.arange(len(at)) // times):
        return taken(k, x, (*[slice(None)] * axis, at))
    before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
    wide = k.np.broadcast_to(k.np.expand_dims(x, axis + 1), (*before, times, *after))
    return wide.reshape((*before[:-1], len(at), *after))


MAX_TAPS: Final = 8
"""Slices that XLA reads and weighs one by one; more become a product with the matrix."""


def _combined(k: XlaContext, x: Any, matrix: Any, axis: int) -> Any:
    """Apply a matrix along an axis: up to `MAX_TAPS` weights of a row each read one slice.

    Three to four times as fast as products on a CPU, for twice the size of images of 64 x 64.
    """
    matrix = matrix.astype(x.dtype)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    taps = max(1, int(np.count_nonzero(matrix, 1).max()))
    if taps > MAX_TAPS:
        wide = x.reshape((math.prod(before), x.shape[axis], math.prod(after)))
        return k.np.matmul(matrix, wide).reshape((*before, len(matrix), *after))
    order = np.argsort(matrix == 0, 1, kind="stable")[:, :taps]  # the nonzero weights first
    weights = np.take_along_axis(matrix, order, 1).reshape(-1, taps, *[1] * len(after))
    parts = [taken(k, x, (*[slice(None)] * axis, order[:, t])) * weights[:, t] for t in range(taps)]
    return sum(parts[1:], parts[0])


def _resize_native(node: Node, opset: int) -> bool:
    """Return whether onnxruntime's kernel supports the node: see the checks of its `Upsample`."""
    attrs = resize_row.full_attrs(node.attrs)
    newer = (
        attrs["antialias"]
        or attrs["axes"]
        or attrs["keep_aspect_ratio_policy"] != "stretch"
        or attrs["coordinate_transformation_mode"] == "half_pixel_symmetric"
    )
    if newer and opset < 19:
        return False
    if attrs["mode"] == "nearest" or node.attrs.get(OPEN):
        return True
    x = node.inputs[0]
    assert x is not None
    # The interpolating kernels take images (N, C, H, W) or volumes, and resize only their planes.
    planes = {"linear": {4: 2, 5: 3}, "cubic": {4: 2}}[attrs["mode"]].get(x.type.rank)
    if planes is None:
        return False
    lead = x.type.rank - planes
    return x.type.shape[:lead] == node.outputs[0].type.shape[:lead]


_SHARP: Final[Mapping[str, Any]] = {
    "nearest_mode": "floor",
    "coordinate_transformation_mode": "asymmetric",
}
_PLANE: Final = normal(2, 2, 4, 5)


def _scales(*scales: float) -> LiteralArray:
    return literal(scales, "float32")


def _sizes(*sizes: int) -> LiteralArray:
    return literal(sizes)


def _mapped(how: str, *operands: Any, **attrs: Any) -> Any:
    return sample(_PLANE, *operands, coordinate_transformation_mode=how, **attrs)


resize_row = Op(
    name="Resize", kind=OpKind.MOVEMENT, settings=(1, 2),
    **settled(_resize_types, _resize_open, 1, 2, 3),
    reference=_resize_kernel,
    xla=_resize_xla,
    vjp=_resize_vjp,
    body=_resize_body,
    native=_resize_native,
    native_on_cuda=lambda node: (  # onnxruntime 1.31 gives other numbers there
        node.attrs.get("coordinate_transformation_mode") != "tf_crop_and_resize"
    ),
    samples=(
        sample(_PLANE, None, _scales(1, 1, 2, 3), **_SHARP),
        sample(_PLANE, None, _scales(1, 1, 0.6, 1.6)),
        sample(_PLANE, None, _scales(0.7, 2.5), axes=(2, -1), nearest_mode="round_prefer_ceil"),
        sample(_PLANE, None, _scales(1, 1, 1.3, 0.5), nearest_mode="ceil"),
        sample(_PLANE, None, None, _sizes(7, 3), axes=(2, 3), mode="linear"),
        sample(_PLANE, None, _scales(1, 1, 2, 0.6), mode="cubic"),
        sample(_PLANE, None, _scales(1, 1, 0.8, 1.5), mode="cubic", exclude_outside=1,
               cubic_coeff_a=-0.5),
        sample(_PLANE, None, _scales(1, 1, 0.5, 0.4), mode="linear", antialias=1),
        sample(_PLANE, None, _scales(1, 1, 0.5, 0.4), mode="cubic", antialias=1,
               exclude_outside=1),
        _mapped("align_corners", None, _scales(1, 1, 2, 1.2), mode="linear"),
        _mapped("pytorch_half_pixel", None, None, _sizes(1, 8), axes=(2, 3), mode="linear"),
        _mapped("half_pixel_symmetric", None, _scales(1, 1, 1.3, 2.3), mode="linear"),
        _mapped("tf_crop_and_resize", _scales(0, 0, 0.4, -0.2, 1, 1, 0.7, 1.1),
                _scales(1, 1, 1.5, 1.2), mode="linear", extrapolation_value=10.0),
        sample(_PLANE, None, None, _sizes(7, 8), axes=(3, 2), mode="linear",
               keep_aspect_ratio_policy="not_larger"),
        sample(_PLANE, None, None, _sizes(6, 6), axes=(2, 3),
               keep_aspect_ratio_policy="not_smaller"),
        sample(normal(2, 2, 6), None, _scales(1, 1, 1.5), mode="cubic"),
        sample(normal(1, 2, 3, 3, 4), None, _scales(1, 1, 2, 1, 0.5), mode="linear"),
        sample(ints(0, 100, 2, 1, 3, 3, dtype="uint8"), None, _scales(1, 1, 2, 2), smooth=()),
    ),
)  # fmt: skip


def resize(
    x: Tensor,
    size: Sequence[Dim] | None = None,
    *,
    scale: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    antialias: bool = False,
) -> Tensor:
    """x: (N, C, *S) -> (N, C, *size), or sizes times `scale`, as PyTorch's `interpolate`.

    `mode`: "nearest" (the pixel at floor(o / scale)), "nearest-exact" (the nearest centre),
    "linear" (also "bilinear", "trilinear") or "cubic" (a = -0.75, -0.5 with `antialias`);
    `align_corners` maps corner centres onto each other, otherwise half pixels correspond.
    """
    n = x.rank - 2
    if (size is None) == (scale is None):
        raise InvalidInput(f"resize takes either size or scale, got {size=} and {scale=}")
    attrs = _mode_attrs(mode, align_corners=align_corners, antialias=antialias)
    axes = tuple(range(2, x.rank))
    if size is not None:
        if len(size) != n:
            raise ShapeError(f"resize of {x.type} takes {n} sizes, got {tuple(size)}")
        return resize_row(x, None, None, dims_of(list(size)), axes=axes, **attrs)
    scales = [float(scale)] * n if isinstance(scale, (int, float)) else list(scale or ())
    return resize_row(x, None, np.array([1, 1, *scales], np.float32), **attrs)


# fmt: off
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "nearest":       {"mode": "nearest", **_SHARP},
    "nearest-exact": {"mode": "nearest", "nearest_mode": "round_prefer_ceil"},
    "linear":        {"mode": "linear"},
    "bilinear":      {"mode": "linear"},
    "trilinear":     {"mode": "linear"},
    "cubic":         {"mode": "cubic"},
    "bicubic":       {"mode": "cubic"},
}
# fmt: on


def _mode_attrs(mode: str, *, align_corners: bool, antialias: bool) -> dict[str, Any]:
    check_choice("resize's mode", mode, MODES)
    attrs = dict(MODES[mode])
    if attrs["mode"] == "nearest" and (align_corners or antialias):
        raise InvalidInput(f"resize with mode {mode!r} has no align_corners and no antialias")
    if align_corners:
        attrs["coordinate_transformation_mode"] = "align_corners"
    if antialias:
        attrs |= {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
    return attrs

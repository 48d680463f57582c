"""Convolutions over tiny planes as one convolution over all images of a batch, stacked vertically.

A runtime that multiplies one matrix per image (as onnxruntime's CPU kernels do) has only a few
columns in each product if the plane is 2 x 2, and spends its time reading the weights once per
image. Stacked images are one plane of a single image, with rows of zeros between them where a
window or its transpose would reach into a neighbour; those rows are cut from the result.

If each channel has a kernel of its own, there is no matrix to multiply: the result is a sum of one
product per position in the kernel, of slices that have images and channels innermost.

This applies only to weights that the function itself replaces, those of a training step: a network
that is served has its weights in the model, for which the runtime has better layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.movement.structure import pad_row, slice_axis
from triplane.unified_ir.ops.rows.windows.conv_gradients import inner_planes, sliced
from triplane.unified_ir.ops.rows.windows.convolution import conv_row, conv_transpose_row
from triplane.unified_ir.ops.rows.windows.window import Window, is_static, static, tap_slices
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.rewrite import View, apply_rule

CONV_POSITIONS: Final = 8
TRANSPOSE_POSITIONS: Final = 16
ROWS_POSITIONS: Final = 16
"""The largest output plane (of the cotangent, for the transpose) that is merged, in positions."""
LEAST_WEIGHTS: Final = 1 << 14
"""A smaller weight is read again from the nearest cache, which costs less than moving images."""
LEAST_GROUPS: Final = 64
"""From this many groups on the transpose gains too, by fewer and larger products."""


def merge_planes(function: Function) -> Function:
    """Merge every convolution that the module describes, and its gradient in the image."""
    replaced = set(function.result_names)
    weights = {p for p in function.params if p.name in replaced}

    def rule(_: View, node: Node) -> list[Node] | None:
        merged = _RULES.get(node.op.name)
        fits = merged is not None and len(node.inputs) > 1 and node.inputs[1] in weights
        return merged(node) if fits and merged is not None else None

    return apply_rule(function, rule)


@dataclass(frozen=True, slots=True)
class _Planes:
    """A convolution over static planes; the positions are those of its output."""

    window: Window
    size: int
    positions: int
    weight: tuple[int, ...]
    group: int
    output_padding: tuple[int, ...]

    @property
    def before(self) -> int:
        """Pads above."""
        return int(self.window.pads[0])

    @property
    def stride(self) -> int:
        """The stride along the height."""
        return int(self.window.strides[0])

    @property
    def pitch(self) -> int:
        """Output rows from one image to the next, such that neither reads the other's rows."""
        # Image i begins at row i p s of the stacked plane (p: pitch, s: stride), and row r of its
        # result reads rows (i p + r) s - before up to (i p + r) s - before + span - 1. The last
        # window ends before the next image if p s >= (positions - 1) s + span - before, and the
        # first window of the next image begins after this one if p s >= size + before.
        reach = (self.positions - 1) * self.stride + self.window.span(0) - self.before
        return -(-max(self.size + self.before, reach) // self.stride)

    @property
    def beyond(self) -> int:
        """Pads below that give every image `pitch` output rows; negative: rows left over."""
        # N p outputs need N p s + before + beyond - span = (N p - 1) s.
        return self.window.span(0) - self.stride - self.before

    @property
    def is_large(self) -> bool:
        """Whether the weight is too large to be read once per image."""
        return math.prod(self.weight) >= LEAST_WEIGHTS

    @property
    def is_depthwise(self) -> bool:
        """Whether each of many channels has a kernel of its own."""
        return self.group >= LEAST_GROUPS and self.weight[:2] == (self.group, 1)


def _planes(node: Node, image: Value | None, output: Value, most: int) -> _Planes | None:
    """Describe a convolution if it is eligible; image, output: those of the convolution."""
    weight = node.inputs[1]
    assert weight is not None
    if image is None or image.type.rank != 4 or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return None
    shapes = (*image.type.shape[2:], *output.type.shape[2:], *weight.type.shape)
    if not is_static(shapes) or node.attrs.get("output_shape"):
        return None
    sizes = static(shapes, "planes and weights")
    if sizes[2] * sizes[3] > most or image.type.shape[0] == 1:
        return None
    attrs: Any = node.attrs
    planes = _Planes(
        Window(sizes[6:], attrs),
        sizes[0],
        sizes[2],
        sizes[4:],
        int(attrs.get("group", 1)),
        tuple(attrs.get("output_padding") or (0, 0)),
    )
    return planes if planes.before < planes.window.span(0) else None


def _conv(node: Node) -> list[Node] | None:
    planes = _planes(node, node.inputs[0], node.outputs[0], ROWS_POSITIONS)
    if planes is not None and planes.is_depthwise:
        window = planes.window
        return _in_place(node, lambda x, *w: _sum_of_rows(x, window, node.outputs[0], *w))
    planes = _planes(node, node.inputs[0], node.outputs[0], CONV_POSITIONS)
    if planes is None or planes.group != 1 or planes.beyond < 0 or not planes.is_large:
        return None
    pads = (*planes.window.pads[:2], planes.beyond, planes.window.pads[3])
    attrs = {**planes.window.attrs(), "pads": pads}

    def body(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        # The other pads stay those of the window: along the width nothing is stacked.
        y = conv_row(_below(x, planes.pitch * planes.stride), w, b, **attrs)
        return _apart(y, x, planes.pitch, planes.positions)

    return _in_place(node, body)


def _conv_transpose(node: Node) -> list[Node] | None:
    planes = _planes(node, node.outputs[0], node.inputs[0] or node.outputs[0], TRANSPOSE_POSITIONS)
    if planes is None or not (
        planes.group >= LEAST_GROUPS or (planes.group == 1 and planes.is_large)
    ):
        return None
    window = planes.window
    if planes.is_depthwise and (mirrored := _mirrored(window, node)) is not None:
        return _in_place(
            node, lambda g, *w: _sum_of_rows(g, mirrored, node.outputs[0], *w, flip=True)
        )
    # The transpose has (N p - 1) s + span - before - pads_end + output_padding rows. They are N p s
    # if pads_end - output_padding is `beyond`, and neither may be negative.
    attrs = {
        **window.attrs(),
        "pads": (*window.pads[:2], max(planes.beyond, 0), window.pads[3]),
        "output_padding": (max(-planes.beyond, 0), planes.output_padding[1]),
    }

    def body(g: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        x = conv_transpose_row(_below(g, planes.pitch), w, b, group=planes.group, **attrs)
        return _apart(x, g, planes.pitch * planes.stride, planes.size)

    return _in_place(node, body)


def _mirrored(window: Window, node: Node) -> Window | None:
    """Return the window through which the transpose of a stride-1 convolution reads its operand."""
    g, x = node.inputs[0], node.outputs[0]
    assert g is not None
    if set(window.strides) != {1}:
        return None
    # x[i] = sum_k w[k] g[i + pad - k d]: the same sum as a convolution with the kernel reversed and
    # span - 1 - pad rows of zeros before.
    before = [window.span(i) - 1 - window.pads[i] for i in range(2)]
    rows, taken = (static(v.type.shape[2:], "a plane") for v in (x, g))
    after = [rows[i] + window.pads[i] - taken[i] for i in range(2)]
    if min(before + after) < 0:
        return None
    return Window(window.kernel, {"dilations": window.dilations, "pads": (*before, *after)})


def _sum_of_rows(
    x: Tensor,
    window: Window,
    output: Value,
    w: Tensor,
    b: Tensor | None = None,
    *,
    flip: bool = False,
) -> Tensor:
    """Convolve channel by channel.

    x: (N, C, H, W), w: (C, 1, *K); flip: the kernel is read from its end.
    """
    out = static(output.type.shape[2:], "a plane")
    channels = static(output.type.shape[1:2], "a size")[0]
    wide = inner_planes(x)
    if any(window.pads):
        wide = pad_row(wide, np.array([*window.pads[:2], 0, *window.pads[2:], 0]))
    taps = [tap_slices(window, tap, out) for tap in np.ndindex(*window.kernel)]
    kernel = w.reshape((channels, len(taps))).transpose(1, 0)
    total: Tensor | None = None
    for i, tap in enumerate(reversed(taps) if flip else taps):
        rows = sliced(wide, tap).reshape((-1, channels)) * slice_axis(kernel, 0, i, i + 1)
        total = rows if total is None else total + rows
    assert total is not None
    total = total if b is None else total + b
    # (H W N, C) -> (H W, N C) -> (N C, H W) -> (N, C, H, W): one transposition of a matrix.
    flat = total.reshape((out[0] * out[1], -1)).transpose(1, 0)
    return flat.reshape((-1, channels, *out))


_RULES: Final[dict[str, Callable[[Node], list[Node] | None]]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
}


def _below(x: Tensor, pitch: int) -> Tensor:
    """Stack images: (N, C, H, W) -> (1, C, N pitch, W), zeros below each image."""
    # `pitch` counts the rows of this operand: input rows for a convolution, which is why the caller
    # multiplies by the stride, and rows of the cotangent for its transpose.
    gap = pitch - static(x.shape[2:3], "a size")[0]
    wide = pad_row(x, np.array([0, 0, 0, 0, 0, 0, gap, 0])) if gap else x
    rows = x.shape[0] * pitch
    return wide.transpose(1, 0, 2, 3).reshape((1, x.shape[1], rows, x.shape[3]))


def _apart(y: Tensor, x: Tensor, pitch: int, height: int) -> Tensor:
    """Separate stacked images: (1, C, N pitch, W) -> (N, C, height, W); x: has the N images."""
    images = y.reshape((y.shape[1], x.shape[0], pitch, y.shape[3]))
    cut = slice_axis(images, 2, 0, height) if pitch != height else images
    return cut.transpose(1, 0, 2, 3)


def _in_place(node: Node, body: Callable[..., Tensor]) -> list[Node]:
    """Return the nodes of `body` on the node's operands, with the node's outputs."""
    operands = [v for v in node.inputs if v is not None]
    with (build := Build(TABLE, "merged")), build.at(node.meta):
        params = [build.param(f"v{i}", v.type) for i, v in enumerate(operands)]
        merged = clean(build.finish({"y": body(*params)}))
    values = dict(zip((*merged.params, *merged.results), (*operands, *node.outputs), strict=True))

    def renamed(old: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(values.get(v, v) for v in old)

    return [replace(n, inputs=renamed(n.inputs), outputs=renamed(n.outputs)) for n in merged.nodes]

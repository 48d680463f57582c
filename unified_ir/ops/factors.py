"""Which axes of a node's operands and outputs are cut together: its factors.

A factor is a letter for axes that range over the same index, as in an einsum: cutting it cuts every
axis that has it. An output that lacks a factor of the operands is then a partial sum on each device
and must be added up. An axis with the factor "" stays whole. The rules are for one mesh axis; more
axes cut more factors, or one factor further. What has no rule is computed whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.graph import Array, Node
from triplane.unified_ir.ops.row import Op, OpKind

Axes = tuple[str, ...]
Shape = tuple[int, ...]
WHOLE: Final = ""


@dataclass(frozen=True, slots=True)
class Factors:
    """The factor of each axis; `rule` says which rule assigned them.

    flops: arithmetic of the whole node where the factors tell; 0 where the row's cost decides.
    """

    operands: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    rule: str
    flops: int = 0


@dataclass(frozen=True, slots=True)
class ShapedNode:
    """A node whose shapes are numbers; an absent operand has the shape ()."""

    node: Node
    row: Op
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    known: tuple[Array | None, ...]
    """Contents of the operands that are constants."""

    def attr(self, name: str) -> Any:
        """Return an attribute, or its default."""
        return self.row.full_attrs(self.node.attrs)[name]

    def whole(self, rule: str = "no rule: whole on every device") -> Factors:
        """Return factors that leave every axis whole."""
        none = tuple((WHOLE,) * len(s) for s in self.inputs)
        return Factors(none, tuple((WHOLE,) * len(s) for s in self.outputs), rule)


Rule = Callable[[ShapedNode], Factors]


def factors_of(call: ShapedNode) -> Factors:
    """Return the factors of a node: by its operator's rule, else by the rule of its kind."""
    name = call.node.op.name
    rule = BY_NAME.get(name) or BY_KIND.get(call.row.kind)
    if rule is None or call.node.regions:
        return call.whole()
    return rule(call)


def _names(count: int, letter: str = "d") -> Axes:
    return tuple(f"{letter}{i}" for i in range(count))


def _right_aligned(shape: Shape, out: Shape, names: Axes) -> Axes:
    """Return the factors of an operand that broadcasts to `out`: axes of size 1 stay whole."""
    skipped = len(out) - len(shape)
    return tuple(
        names[skipped + i] if skipped + i >= 0 and size == out[skipped + i] else WHOLE
        for i, size in enumerate(shape)
    )


def _broadcast(call: ShapedNode) -> Factors:
    out = call.outputs[0]
    names = _names(len(out))
    outputs = tuple(_right_aligned(s, out, names) for s in call.outputs)
    operands = tuple(_right_aligned(s, out, names) for s in call.inputs)
    return Factors(operands, outputs, "elementwise: axes that broadcast together")


def _expand(call: ShapedNode) -> Factors:
    out, names = call.outputs[0], _names(len(call.outputs[0]))
    operand = _right_aligned(call.inputs[0], out, names)
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[1:])
    return Factors((operand, *rest), (names,), "broadcast: axes of the result")


def _first_only(call: ShapedNode) -> Factors:
    """Elementwise in the first operand; the others are sizes or scales, whole."""
    names = _names(len(call.outputs[0]))
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[1:])
    return Factors((names, *rest), (names,), "elementwise: axes of the operand")


def _transpose(call: ShapedNode) -> Factors:
    rank = len(call.inputs[0])
    names, perm = _names(rank), call.attr("perm") or tuple(reversed(range(rank)))
    return Factors((names,), (tuple(names[p] for p in perm),), "transpose: axes move")


def _reshape(call: ShapedNode) -> Factors:
    source, target = call.inputs[0], call.outputs[0]
    a, b = [WHOLE] * len(source), [WHOLE] * len(target)
    for number, (i, j) in enumerate(_major_axes(source, target)):
        a[i] = b[j] = f"d{number}"
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[1:])
    return Factors((tuple(a), *rest), (tuple(b),), "reshape: the first axis of each group")


def _major_axes(source: Shape, target: Shape) -> list[tuple[int, int]]:
    """Return pairs of axes that begin groups of equal element counts: (N, T, D) and (N T, D)."""
    pairs, i, j = [], 0, 0
    a = [k for k, size in enumerate(source) if size != 1]
    b = [k for k, size in enumerate(target) if size != 1]
    while i < len(a) and j < len(b):
        pairs.append((a[i], b[j]))
        left, right = source[a[i]], target[b[j]]
        while left != right:
            if left < right:
                i += 1
                left *= source[a[i]] if i < len(a) else right
            else:
                j += 1
                right *= target[b[j]] if j < len(b) else left
            if i >= len(a) or j >= len(b):
                break
        i, j = i + 1, j + 1
    return pairs


def _same_axes(call: ShapedNode) -> Factors:
    """Axes whose size stays; those that are cut, padded or joined stay whole."""
    rank = len(call.outputs[0])
    joined = call.node.op.name == "Concat"
    data = call.inputs if joined else call.inputs[:1]
    shapes = (*data, *call.outputs)
    names = tuple(
        n if len({s[axis] for s in shapes}) == 1 else WHOLE for axis, n in enumerate(_names(rank))
    )
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[len(data) :])
    operands = (*(names for _ in data), *rest)
    outputs = tuple(names for _ in call.outputs)
    return Factors(operands, outputs, "movement: axes whose size stays")


def _slice(call: ShapedNode) -> Factors:
    # Steps that are not known to be positive may reverse an axis whose size stays.
    steps = call.known[4] if len(call.inputs) > 4 and call.node.inputs[4] is not None else ()
    return call.whole() if steps is None or np.any(np.less(steps, 1)) else _same_axes(call)


def _pad(call: ShapedNode) -> Factors:
    """Axes without pads; a pad and a crop of one size would move elements between the slices."""
    pads, rank = call.known[1], len(call.inputs[0])
    if pads is None or pads.size != 2 * rank:
        return call.whole()
    return _without(call, {i for i in range(rank) if pads[i] or pads[rank + i]})


def _resize(call: ShapedNode) -> Factors:
    crops = call.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
    return call.whole() if crops else _same_axes(call)


def _triangle(call: ShapedNode) -> Factors:
    rank = len(call.inputs[0])
    return _without(call, {rank - 2, rank - 1})


def _along(axis_attr: str) -> Rule:
    """Return the rule of operators that work along one axis: that axis stays whole."""

    def rule(call: ShapedNode) -> Factors:
        rank = len(call.inputs[0])
        axis = int(call.attr(axis_attr)) % max(rank, 1)
        return _without(call, {axis})

    return rule


def _without(call: ShapedNode, axes: set[int]) -> Factors:
    names = tuple(WHOLE if i in axes else n for i, n in enumerate(_names(len(call.inputs[0]))))
    kept = tuple(n for i, n in enumerate(names) if i not in axes)

    def placed(shape: Shape) -> Axes:
        if len(shape) == len(names):
            return tuple(
                n if s == t else WHOLE for n, s, t in zip(names, shape, call.inputs[0], strict=True)
            )
        return kept if len(shape) == len(kept) else (WHOLE,) * len(shape)

    rest = tuple((WHOLE,) * len(s) for s in call.inputs[1:])
    outputs = tuple(map(placed, call.outputs))
    return Factors((names, *rest), outputs, "along one axis: the other axes")


def _cumulative(call: ShapedNode) -> Factors:
    axis = call.known[1] if len(call.known) > 1 else None
    if axis is None:
        return call.whole()
    return _without(call, {int(axis.item()) % max(len(call.inputs[0]), 1)})


def _reduction(call: ShapedNode) -> Factors:
    rank = len(call.inputs[0])
    names = _names(rank)
    axes = _reduced_axes(call)
    if axes is None:
        return call.whole()
    kept = tuple(WHOLE if i in axes else n for i, n in enumerate(names))
    if not call.attr("keepdims"):
        kept = tuple(n for i, n in enumerate(kept) if i not in axes)
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[1:])
    return Factors((names, *rest), (kept,), "reduction: cut reduced axes give partial results")


def _reduced_axes(call: ShapedNode) -> set[int] | None:
    rank = len(call.inputs[0])
    axes: Any = call.node.attrs.get("axes")
    if len(call.node.inputs) > 1 and call.node.inputs[1] is not None:
        known = call.known[1]
        if known is None:
            return None
        axes = known.reshape(-1).tolist()
    if axes is None or len(axes) == 0:
        return set() if call.attr("noop_with_empty_axes") else set(range(rank))
    return {int(a) % rank for a in axes}


def _matmul(call: ShapedNode) -> Factors:
    a, b = call.inputs[:2]
    left = ("m", "k") if len(a) > 1 else ("k",)
    right = ("k", "n") if len(b) > 1 else ("k",)
    out = call.outputs[0]
    tail = tuple(f for f in (*left, *right) if f != "k")
    batch = out[: len(out) - len(tail)]
    names = _names(len(batch), "b")
    operands = (
        (*_right_aligned(a[: -len(left)], batch, names), *left),
        (*_right_aligned(b[: -len(right)], batch, names), *right),
    )
    flops = 2 * math.prod(out) * a[-1]
    return Factors(operands, ((*names, *tail),), "product: rows m, sums k, columns n", flops)


def _gemm(call: ShapedNode) -> Factors:
    a = ("k", "m") if call.attr("transA") else ("m", "k")
    b = ("n", "k") if call.attr("transB") else ("k", "n")
    out = call.outputs[0]
    bias = tuple(_right_aligned(s, out, ("m", "n")) for s in call.inputs[2:])
    k = call.inputs[0][a.index("k")]
    flops = 2 * math.prod(out) * k
    return Factors((a, b, *bias), (("m", "n"),), "product: rows m, sums k, columns n", flops)


def _einsum(call: ShapedNode) -> Factors:
    equation = call.attr("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    # Without an arrow the result has the letters that occur once, in alphabetical order.
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if "." in equation or any(len(set(t)) < len(t) for t in terms):
        return call.whole()
    sizes = {c: s for t, shape in zip(terms, call.inputs, strict=True)
             for c, s in zip(t, shape, strict=True)}  # fmt: skip
    flops = len(terms) * math.prod(sizes.values())
    return Factors(tuple(map(tuple, terms)), (tuple(right),), "einsum: its letters", flops)


def _conv(call: ShapedNode) -> Factors:
    x, w = call.inputs[:2]
    y, group = call.outputs[0], int(call.attr("group"))
    plane, kernel = (WHOLE,) * (len(x) - 2), (WHOLE,) * (len(w) - 2)
    i, c, o = _channels(group, x[1])
    bias = tuple((o,) for _ in call.inputs[2:])
    flops = 2 * math.prod(y) * math.prod(w[1:])
    operands = (("n", i, *plane), (o, c, *kernel), *bias)
    return Factors(operands, (("n", o, *plane),), "convolution: batch n, channels", flops)


def _channels(group: int, channels: int) -> Axes:
    """Return the factors of the channels of x, of w along them, and of the result."""
    if group == 1:
        return "i", "i", "o"
    # In a depthwise convolution each channel is a group; groups between would need aligned cuts.
    return ("g", WHOLE, "g") if group == channels else (WHOLE, WHOLE, WHOLE)


def _conv_transpose(call: ShapedNode) -> Factors:
    x, w = call.inputs[:2]
    group = int(call.attr("group"))
    plane, kernel = (WHOLE,) * (len(x) - 2), (WHOLE,) * (len(w) - 2)
    i, _, o = _channels(group, x[1])
    bias = tuple((o,) for _ in call.inputs[2:])
    # The weight of a depthwise one is (channels, 1, ...), its first axis that of the groups.
    weight = (i, o if group == 1 else WHOLE, *kernel)
    flops = 2 * math.prod(x) * math.prod(w[1:])
    operands = (("n", i, *plane), weight, *bias)
    return Factors(operands, (("n", o, *plane),), "convolution: batch n, channels", flops)


def _conv_grad_weight(call: ShapedNode) -> Factors:
    x, g = call.inputs[:2]
    plane, w = (WHOLE,) * (len(x) - 2), call.outputs[0]
    i, c, o = _channels(int(call.attr("group")), x[1])
    weight = (o, c, *(WHOLE,) * (len(w) - 2))
    flops = 2 * math.prod(g) * math.prod(w[1:])
    operands = (("n", i, *plane), ("n", o, *plane))
    return Factors(operands, (weight,), "convolution: batch n, channels", flops)


def _planes(call: ShapedNode) -> Factors:
    """Windows: batch and channels of every operand and output that has them."""
    first = call.inputs[0]
    # The indices of MaxPool count elements of the whole tensor.
    if call.node.op.name == "MaxPool" and len(call.outputs) > 1:
        return call.whole()

    def axes(shape: Shape) -> Axes:
        if len(shape) < 3 or shape[:2] != first[:2]:
            return (WHOLE,) * len(shape)
        return ("n", "c", *(WHOLE,) * (len(shape) - 2))

    shapes = (*map(axes, call.inputs),), (*map(axes, call.outputs),)
    return Factors(*shapes, "windows: batch n and channels c")


def _gather(call: ShapedNode) -> Factors:
    data, indices = call.inputs
    axis = int(call.attr("axis")) % len(data)
    names, places = _names(len(data)), _names(len(indices), "i")
    # Rows may be cut as well: each device gathers those that it has, and the results are added.
    out = (*names[:axis], *places, *names[axis + 1 :])
    return Factors((names, places), (out,), "gather: rows, places and the other axes")


def _elements(call: ShapedNode) -> Factors:
    """GatherElements and ScatterElements: every axis but the one that is indexed."""
    data = call.inputs[0]
    axis = int(call.attr("axis")) % len(data)
    names = tuple(
        n if i != axis and len({s[i] for s in call.inputs}) == 1 else WHOLE
        for i, n in enumerate(_names(len(data)))
    )
    return Factors(tuple(names for _ in call.inputs), (names,), "elements: axes not indexed")


def _scatter_nd(call: ShapedNode) -> Factors:
    data, indices, updates = call.inputs
    depth, places = indices[-1], len(indices) - 1
    names = (*(WHOLE,) * depth, *_names(len(data))[depth:])
    # Only additions may be made by several devices for one place.
    added = call.attr("reduction") == "add" and len(updates) == places + len(data) - depth
    rows = _names(places, "i") if added else (WHOLE,) * places
    operands = (names, (*rows, WHOLE), (*rows, *names[depth:]))
    return Factors(operands, (names,), "scatter: slices; places where updates are added")


def _batch_norm(call: ShapedNode) -> Factors:
    plane = (WHOLE,) * (len(call.inputs[0]) - 2)
    x = ("n", "c", *plane)
    vectors = tuple(("c",) for _ in call.inputs[1:])
    outputs = (x, *(("c",) for _ in call.outputs[1:]))
    return Factors((x, *vectors), outputs, "normalization: batch n and channels c")


def _samples_and_channels(call: ShapedNode) -> Factors:
    x = ("n", "c", *(WHOLE,) * (len(call.inputs[0]) - 2))
    vectors = tuple(("c",) for _ in call.inputs[1:])
    return Factors((x, *vectors), (x,), "normalization: samples n and channels c")


def _samples(call: ShapedNode) -> Factors:
    first = call.inputs[0]
    axes = ("n", *(WHOLE,) * (len(first) - 1))
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[1:])
    return Factors((axes, *rest), (axes,), "normalization: samples n")


def _trailing_norm(call: ShapedNode) -> Factors:
    rank = len(call.inputs[0])
    axis = int(call.attr("axis")) % rank
    names = (*_names(rank)[:axis], *(WHOLE,) * (rank - axis))
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[1:])
    outputs = tuple(names for _ in call.outputs)
    return Factors((names, *rest), outputs, "normalization: axes before the normalized ones")


def _attention(call: ShapedNode) -> Factors:
    q, k, v = call.inputs[:3]
    if len(q) != 4 or len(call.outputs) != 1 or q[1] != k[1] or len(call.inputs) > 4:
        return call.whole()
    heads = ("b", "h", WHOLE, WHOLE)
    mask = tuple(_right_aligned(s, (*q[:3], k[2]), heads) for s in call.inputs[3:])
    flops = 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])
    return Factors((heads, heads, heads, *mask), (heads,), "attention: batch b and heads h", flops)


def _attention_gradient(call: ShapedNode) -> Factors:
    _, q, k, v = call.inputs
    heads = ("b", "h", WHOLE, WHOLE)
    flops = 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])
    return Factors((heads,) * 4, (heads,) * 3, "attention: batch b and heads h", flops)


_SWEEP_WEIGHTS: Final[Mapping[str, int]] = {
    "LSTMSweep": 1,
    "GRUSweep": 2,
    "TanhSweep": 1,
    "ReluSweep": 1,
}
"""Number of weights of each recurrence, after its gates."""


def _sweep(call: ShapedNode) -> Factors:
    """Recurrences: gates and masks (T, N, .) and states (N, .) by samples, weights whole."""
    weights = range(1, 1 + _SWEEP_WEIGHTS[call.node.op.name])

    def axes(shape: Shape) -> Axes:
        return (WHOLE, "n", WHOLE) if len(shape) == 3 else ("n", WHOLE)[: len(shape)]

    operands = tuple(
        (WHOLE,) * len(s) if k in weights else axes(s) for k, s in enumerate(call.inputs)
    )
    return Factors(operands, tuple(map(axes, call.outputs)), "recurrence: samples n")


def _rotary(call: ShapedNode) -> Factors:
    """Rotary positions: samples, and heads where they are an axis; tables of angles stay whole."""
    rank = len(call.inputs[0])
    axes = ("n", "h", WHOLE, WHOLE) if rank == 4 else ("n", *(WHOLE,) * (rank - 1))
    # Without position ids the angles are those of each sample: (N, T, .).
    own = [3 if len(s) == 3 else 0 for s in call.inputs[1:3]] + [2 for _ in call.inputs[3:]]
    rest = tuple(
        ("n", *(WHOLE,) * (len(s) - 1)) if s and n else (WHOLE,) * len(s)
        for n, s in zip(own, call.inputs[1:], strict=True)
    )
    return Factors((axes, *rest), (axes,), "rotary positions: samples n and heads h")


def _one_scale(call: ShapedNode) -> Factors:
    """Quantization with one scale of the whole tensor."""
    return call.whole() if any(s for s in call.inputs[1:]) else _first_only(call)


def _recurrent(call: ShapedNode) -> Factors:
    """ONNX's LSTM, GRU and RNN: X (T, N, .), lengths (N), states (D, N, .); weights whole."""
    if call.attr("layout"):
        return call.whole()

    def axes(k: int, shape: Shape) -> Axes:
        if k == _LENGTHS:
            return ("n",)[: len(shape)]
        return (WHOLE, "n", WHOLE) if k in _SAMPLED and shape else (WHOLE,) * len(shape)

    operands = tuple(axes(k, s) for k, s in enumerate(call.inputs))
    outputs = tuple((*(WHOLE,) * (len(s) - 2), "n", WHOLE) if s else () for s in call.outputs)
    return Factors(operands, outputs, "recurrence: samples n")


_LENGTHS: Final = 4
_SAMPLED: Final = (0, 5, 6)
"""Operands of ONNX's recurrent operators: lengths; X and the initial states."""


def _loss(call: ShapedNode) -> Factors:
    rest = tuple((WHOLE,) * len(s) for s in call.inputs[2:])
    scores, targets = call.inputs[:2]
    batch = tuple(("n", *(WHOLE,) * (len(s) - 1)) for s in (scores, targets))
    outputs = tuple(("n", *(WHOLE,) * (len(s) - 1)) if s else () for s in call.outputs)
    return Factors((*batch, *rest), outputs, "loss: samples n; the mean is a partial sum")


def _drawn(call: ShapedNode) -> Factors:
    whole = tuple((WHOLE,) * len(s) for s in call.inputs)
    return Factors(whole, tuple(_names(len(s)) for s in call.outputs), "draws: any axis")


def _threefry(call: ShapedNode) -> Factors:
    """Counters are hashed one by one; the key is whole."""
    counters = _broadcast(call)
    key = (WHOLE,) * len(call.inputs[0])
    return Factors((key, *counters.operands[1:]), counters.outputs, "draws: axes of the counters")


BY_KIND: Final[Mapping[OpKind, Rule]] = {
    OpKind.ELEMENTWISE: _broadcast,
    OpKind.COMPARISON: _broadcast,
}

_REDUCTIONS: Final[Sequence[str]] = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp",
)  # fmt: skip
_POOLS: Final[Sequence[str]] = (
    "AveragePool", "GlobalAveragePool", "LpPool", "GlobalLpPool", "MaxPool", "GlobalMaxPool",
    "MaxUnpoolFirst", "MaxSelectFirst",
)  # fmt: skip

# fmt: off
BY_NAME: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_POOLS, _planes),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(("Tile", "Concat", "Split", "CenterCropPad"), _same_axes),
    **dict.fromkeys(("Softmax", "LogSoftmax", "ArgMax", "ArgMin", "Hardmax", "LpNormalization",
                     "TopK"),
                    _along("axis")),
    **dict.fromkeys(("CumSum", "CumProd"), _cumulative),
    **dict.fromkeys(("Cast", "CastLike", "Identity", "Sized", "Barrier"), _first_only),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _one_scale),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _samples),
    "RotaryEmbedding": _rotary,
    **dict.fromkeys(("GatherElements", "ScatterElements"), _elements),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _trailing_norm),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), _loss),
    "Expand": _expand,
    "Slice": _slice,
    "Pad": _pad,
    "Resize": _resize,
    "Trilu": _triangle,
    "Transpose": _transpose,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "ConvGradWeight": _conv_grad_weight,
    "Gather": _gather,
    "ScatterND": _scatter_nd,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _samples_and_channels,
    "GroupNormalization": _samples,
    "LRN": _samples,
    **dict.fromkeys(("Attention", "PlainAttention"), _attention),
    "PlainAttentionGradient": _attention_gradient,
    **dict.fromkeys(_SWEEP_WEIGHTS, _sweep),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    "Threefry2x32": _threefry,
    **dict.fromkeys(("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"),
                    _drawn),
}
# fmt: on


def constant(node: Node) -> Array | None:
    """Return the contents of a constant."""
    value = node.attrs.get("value") if node.op.name == "Constant" else None
    return value if isinstance(value, np.ndarray) else None

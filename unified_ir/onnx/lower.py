"""Rules that turn one IR node into ONNX nodes where a copy would not do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper, numpy_helper

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, symbols
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ir.types import (
    DTYPES,
    OptionalType,
    bool_,
    float16,
    float32,
    float64,
    int32,
    int64,
    uint8,
)
from triplane.unified_ir.onnx.target import DYNAMIC_LSTM, OnnxTarget
from triplane.unified_ir.ops.convolution import transposed_window
from triplane.unified_ir.ops.equations import without_repeats
from triplane.unified_ir.ops.infer import onnx_attrs, type_proto
from triplane.unified_ir.ops.recurrent import numbers_of
from triplane.unified_ir.ops.row import DOMAIN, OPEN
from triplane.unified_ir.ops.window import Window, static, with_explicit_pads


class Context(Protocol):
    """The ONNX graph being emitted, as a rule sees it."""

    target: OnnxTarget
    nodes: list[Any]
    tensors: list[TensorProto]
    names: dict[Value, str]

    def plain(self, node: Node, **changes: Any) -> None:
        """The ONNX operator of the same name."""
        ...

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        """Appends an ONNX node."""
        ...

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Appends a node with one new output; its name."""
        ...

    def constant(self, array: Array) -> str:
        """An initializer."""
        ...

    def fresh(self, stem: str = "v") -> str:
        """A name no other value has."""
        ...

    def inputs(self, node: Node) -> list[str]:
        """Names of the operands, empty where absent."""
        ...

    def output_names(self, node: Node) -> list[str]:
        """New names for the outputs."""
        ...

    def dims(self, dims: Sequence[Dim]) -> str:
        """An int64 vector of sizes."""
        ...

    def size(self, symbol: str) -> str:
        """An int64[1] holding a symbol's size."""
        ...

    def region(self, function: Function, names: Sequence[str], label: str) -> GraphProto:
        """A region as a subgraph without inputs."""
        ...

    def local_function(self, name: str, domain: str, body: Function) -> str:
        """The name under which the model holds a body as a local function."""
        ...

    def child(self, function: Function) -> Any:
        """An emitter for a subgraph."""
        ...


Rule = Callable[[Context, Node], None]


def _barrier(context: Context, node: Node) -> None:
    """Reshape to the shape it has, plus nothing, said by a number that needs `after`.

    The memory stays where it is. No rewrite of a runtime sees through: that 0 times any number is
    nothing does not hold for NaN, which a cast to an integer ends.
    """
    x, after = context.inputs(node)
    number = _first_number(context, after)
    nothing = context.emit(
        "Mul", context.emit("Cast", number, to=int64.onnx), context.constant(np.array(0))
    )
    shape = context.emit("Add", context.emit("Shape", x), nothing)
    context.add("Reshape", [x, shape], context.output_names(node))


def _first_number(context: Context, name: str) -> str:
    """The first element of a float tensor as a scalar; 0 where it has none."""
    flat = context.emit("Reshape", name, context.constant(np.array([-1])))
    ends = [context.constant(np.array([n])) for n in (0, 1)]
    first = context.emit("Slice", flat, *ends)
    return context.emit("ReduceSum", first, keepdims=0)


def _constant(context: Context, node: Node) -> None:
    value = node.attrs["value"]
    assert isinstance(value, np.ndarray)
    context.names[node.outputs[0]] = context.constant(value)


def _clip(context: Context, node: Node) -> None:
    """An absent bound is infinity: onnxruntime takes the largest finite number for it."""
    dtype, names = node.outputs[0].type.dtype, [*context.inputs(node), "", ""][:3]
    if not dtype.is_float or not any(names[1:]):
        context.plain(node)
        return
    ends = [np.array(end, dtype.numpy) for end in (-np.inf, np.inf)]
    bounds = [n or context.constant(end) for n, end in zip(names[1:], ends, strict=True)]
    context.add("Clip", [names[0], *bounds], context.output_names(node))


def _dims(context: Context, node: Node) -> None:
    context.names[node.outputs[0]] = context.dims(node.attrs["dims"])  # type: ignore[arg-type]


def _expand(context: Context, node: Node) -> None:
    """No elements are a constant: onnxruntime 1.31 takes an Expand of one to none for nothing."""
    made = node.outputs[0].type
    if 0 in made.shape and not made.symbols and node.inputs[0] is not None:
        empty = np.zeros(made.concrete({}), made.dtype.numpy)
        context.names[node.outputs[0]] = context.constant(empty)
    else:
        context.plain(node)


def _reshape(context: Context, node: Node) -> None:
    """One symbolic size becomes -1: no Shape arithmetic at run time."""
    shape = node.outputs[0].type.shape
    symbolic = [i for i, d in enumerate(shape) if isinstance(d, Expr)]
    if len(symbolic) > 1 or 0 in shape:
        context.plain(node)
        return
    wanted = np.array([-1 if isinstance(d, Expr) else d for d in shape], np.int64)
    data = context.inputs(node)[0]
    context.add("Reshape", [data, context.constant(wanted)], context.output_names(node))


def _slice(context: Context, node: Node) -> None:
    """A number of rows that the axis does not imply is held to: Slice itself would give fewer."""
    x, y = node.inputs[0], node.outputs[0].type
    assert x is not None
    opened = node.attrs.get(OPEN, ())
    if all(
        isinstance(a, int) or (isinstance(b, Expr) and _implied(a, b, opened))
        for a, b in zip(x.type.shape, y.shape, strict=True)
    ):
        context.plain(node)
        return
    taken = context.emit("Slice", *context.inputs(node))
    context.add("Reshape", [taken, context.dims(y.shape)], context.output_names(node), allowzero=1)


def _implied(axis: Expr, taken: Expr, opened: Any) -> bool:
    """Whether the size of a slice follows from the axis alone, or is what it turns out to be."""
    return symbols(taken) <= symbols(axis) | set(opened)


def _matmul(context: Context, node: Node) -> None:
    """A vector operand becomes a matrix: onnxruntime 1.31 fuses Transpose(x) @ v wrongly."""
    a, b = (v.type.rank if v is not None else 0 for v in node.inputs)
    if min(a, b) > 1:
        context.plain(node)
        return
    left, right = context.inputs(node)
    axes = []
    if a == 1:
        left = context.emit("Unsqueeze", left, context.constant(np.array([0])))
        axes.append(-2)
    if b == 1:
        right = context.emit("Unsqueeze", right, context.constant(np.array([1])))
        axes.append(-1)
    product = context.emit("MatMul", left, right)
    squeezed = [product, context.constant(np.array(axes))]
    context.add("Squeeze", squeezed, context.output_names(node))


def _pool(context: Context, node: Node) -> None:
    """Windows that `ceil_mode` adds over a static plane are written as padding at the end.

    A window that would start beyond the data is no window, but below opset 22 onnxruntime counts
    it while it infers shapes, though not while it runs. The pads of SAME are written out where a
    stride goes beyond the window: it takes them for negative.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    sizes = x.type.shape[2:]
    counts_pads = bool(node.attrs.get("count_include_pad"))
    if any(isinstance(size, Expr) for size in sizes):
        context.plain(node)
        return
    kernel: Any = node.attrs["kernel_shape"]
    window = Window(kernel, with_explicit_pads(node.attrs, kernel, sizes))
    if not node.attrs.get("ceil_mode"):
        jumps = any(s > window.span(i) for i, s in enumerate(window.strides))
        same = {"auto_pad": None, "pads": window.pads if any(window.pads) else None}
        context.plain(node, **(same if jumps else {}))
        return
    n = len(window.kernel)
    missing = [
        (int(out) - 1) * window.strides[i] + window.span(i) - window.pads[i] - int(size)  # type: ignore[arg-type]
        for i, (out, size) in enumerate(zip(y.type.shape[2:], sizes, strict=True))
    ]
    ends = tuple(max(a, b) for a, b in zip(window.pads[n:], missing, strict=True))
    if ends != window.pads[n:] and (
        counts_pads or any(end >= k for end, k in zip(ends, window.kernel, strict=True))
    ):  # pads that count, or that a kernel refuses: both only where a window was added
        context.plain(node)
        return
    context.plain(node, ceil_mode=0, auto_pad="NOTSET", pads=window.pads[:n] + ends)


def _max_unpool(context: Context, node: Node) -> None:
    """A larger output is padded afterwards: onnxruntime counts indices in `output_shape`."""
    names = context.inputs(node)
    attrs = {k: v for k, v in node.attrs.items() if k != "open"}
    if len(names) < 3:
        context.plain(node)
        return
    y = context.emit("MaxUnpool", *names[:2], **attrs)
    after = context.emit("Sub", names[2], context.emit("Shape", y))
    before = context.constant(np.zeros(node.outputs[0].type.rank, np.int64))
    amounts = context.emit("Concat", before, after, axis=0)
    context.add("Pad", [y, amounts], context.output_names(node))


def _pad(context: Context, node: Node) -> None:
    """Amounts for all axes: onnxruntime moves transposes across a Pad as if it named none."""
    names = context.inputs(node)
    axes = _held(context, names[3]) if len(names) > 3 and names[3] else None
    if axes is None or node.inputs[0] is None:
        context.plain(node)
        return
    rank, count = node.inputs[0].type.rank, len(axes)
    places = np.full(2 * rank, 2 * count)  # of the 0 behind the amounts
    for k, axis in enumerate(int(a) % rank for a in axes):
        places[[axis, axis + rank]] = k, k + count
    given = _held(context, names[1])
    if given is None:
        zero = context.constant(np.zeros(1, np.int64))
        with_zero = context.emit("Concat", names[1], zero, axis=0)
        amounts = context.emit("Gather", with_zero, context.constant(places))
    else:
        amounts = context.constant(np.append(given, 0)[places].astype(np.int64))
    inputs = [names[0], amounts, *names[2:3]]
    attrs = onnx_attrs(node.attrs)
    context.add("Pad", inputs if inputs[-1] else inputs[:2], context.output_names(node), **attrs)


def _held(context: Context, name: str) -> Array | None:
    """The array of that name, where it is one of the model's."""
    return next((numpy_helper.to_array(t) for t in context.tensors if t.name == name), None)


def _conv_transpose(context: Context, node: Node) -> None:
    """With explicit pads: runtimes share out the padding of SAME and output_shape differently."""
    x, w = node.inputs[0], node.inputs[1]
    assert x is not None
    assert w is not None
    if node.attrs.get("auto_pad", "NOTSET") == "NOTSET" and not node.attrs.get("output_shape"):
        context.plain(node)
        return
    kernel = static(w.type.shape[2:], "a kernel's size")
    window, extra = transposed_window(node.attrs, kernel, x.type.shape[2:])
    context.plain(node, auto_pad=None, output_shape=None, output_padding=extra, pads=window.pads)


def _div(context: Context, node: Node) -> None:
    """Integers: a / -1 is written as -a.

    The least integer has no opposite; where a processor traps at that (x86-64), onnxruntime 1.31
    dies with the whole process, so one caller's numbers would end a server.
    """
    a, b = context.inputs(node)
    if not _may_trap(context, node, b):
        context.plain(node)
        return
    opposite, safe = _minus_one_apart(context, node, b)
    quotient = context.emit("Div", a, safe)
    context.add("Where", [opposite, context.emit("Neg", a), quotient], context.output_names(node))


def _mod(context: Context, node: Node) -> None:
    """Integers: a mod -1 is a mod 1, which is 0 too and does not trap (see `_div`)."""
    a, b = context.inputs(node)
    if node.outputs[0].type.dtype.is_float and not node.attrs.get("fmod", 0):
        _float_mod(context, node, a, b)
        return
    if node.attrs.get("fmod", 0) or not _may_trap(context, node, b):
        context.plain(node)
        return
    _, safe = _minus_one_apart(context, node, b)
    context.add("Mod", [a, safe], context.output_names(node))


def _float_mod(context: Context, node: Node, a: str, b: str) -> None:
    """onnxruntime has the remainder with the dividend's sign; b is added where b has the other."""
    zero = context.constant(np.array(0, node.outputs[0].type.dtype.numpy))
    rest = context.emit("Mod", a, b, fmod=1)
    crossed = context.emit("Less", context.emit("Mul", rest, b), zero)
    moved = context.emit("Add", rest, b)
    context.add("Where", [crossed, moved, rest], context.output_names(node))


_POWERS: Final = frozenset({int32, int64, float32, float64})


def _pow(context: Context, node: Node) -> None:
    """An exponent of a type that onnxruntime has no kernel for is counted as int64."""
    exponent = node.inputs[1]
    assert exponent is not None
    if exponent.type.dtype in _POWERS or exponent.type.dtype.is_float:
        context.plain(node)
        return
    x, p = context.inputs(node)
    cast = context.emit("Cast", p, to=int64.onnx)
    context.add("Pow", [x, cast], context.output_names(node))


def _may_trap(context: Context, node: Node, divisor: str) -> bool:
    """Whether a signed 32- or 64-bit divisor can be -1; narrower ones are widened by the kernel."""
    dtype = node.outputs[0].type.dtype.numpy
    if dtype not in {np.dtype(np.int32), np.dtype(np.int64)}:
        return False
    known = next((t for t in context.tensors if t.name == divisor), None)
    return known is None or bool((numpy_helper.to_array(known) == -1).any())


def _minus_one_apart(context: Context, node: Node, divisor: str) -> tuple[str, str]:
    """Names of (where the divisor is -1, the divisor with 1 there)."""
    dtype = node.outputs[0].type.dtype.numpy
    found = context.emit("Equal", divisor, context.constant(np.array(-1, dtype)))
    one = context.constant(np.array(1, dtype))
    return found, context.emit("Where", found, one, divisor)


_SHORT: Final = frozenset({"int8", "int16", "uint8", "uint16"})


def _extreme(context: Context, node: Node) -> None:
    """onnxruntime compares no integers below 32 bits: as int32, which holds them."""
    dtype = node.outputs[0].type.dtype
    if dtype.name not in _SHORT:
        context.plain(node)
        return
    wide = [context.emit("Cast", name, to=int32.onnx) for name in context.inputs(node)]
    found = context.emit(node.op.name, *wide)
    context.add("Cast", [found], context.output_names(node), to=dtype.onnx)


_NARROW: Final = frozenset({float16, DTYPES["bfloat16"]})


def _scatter(context: Context, node: Node) -> None:
    """onnxruntime 1.31 accumulates in no 16-bit type: through float32."""
    dtype = node.outputs[0].type.dtype
    if dtype not in _NARROW or node.attrs.get("reduction", "none") == "none":
        context.plain(node)
        return
    x, index, updates = context.inputs(node)
    wide = [context.emit("Cast", v, to=float32.onnx) for v in (x, updates)]
    made = context.emit(node.op.name, wide[0], index, wide[1], **node.attrs)
    context.add("Cast", [made], context.output_names(node), to=dtype.onnx)


_MARKED: Final = frozenset({int64, float32})


def _one_hot(context: Context, node: Node) -> None:
    """Positions and values of other types than onnxruntime has kernels for are cast around it."""
    index, depth, values = context.inputs(node)
    dtype = node.outputs[0].type.dtype
    if node.inputs[0].type.dtype != int64:  # type: ignore[union-attr]
        index = context.emit("Cast", index, to=int64.onnx)
    if node.inputs[1].type.dtype != int64:  # type: ignore[union-attr]
        depth = context.emit("Cast", depth, to=int64.onnx)
    if dtype in _MARKED:
        names = context.output_names(node)
        context.add("OneHot", [index, depth, values], names, **onnx_attrs(node.attrs))
        return
    wide = float32 if dtype.is_float else int64
    cast = context.emit("Cast", values, to=wide.onnx)
    made = context.emit("OneHot", index, depth, cast, **onnx_attrs(node.attrs))
    context.add("Cast", [made], context.output_names(node), to=dtype.onnx)


def _einsum(context: Context, node: Node) -> None:
    """onnxruntime repeats no axis under an ellipsis: one of size 1 is left out, all get names."""
    shapes = [v.type.shape for v in node.inputs if v is not None]
    text = str(node.attrs["equation"])
    equation, dropped = without_repeats(text, shapes)
    terms = zip(text.replace(" ", "").split("->")[0].split(","), shapes, strict=True)
    hidden = {len(shape) - len(term) for term, shape in terms if "." in term}
    if not any(dropped) and len(hidden) < 2:
        context.plain(node)
        return
    names = [
        context.emit("Squeeze", name, context.constant(np.array(axes))) if axes else name
        for name, axes in zip(context.inputs(node), dropped, strict=True)
    ]
    context.add("Einsum", names, context.output_names(node), equation=str(equation))


def _split(context: Context, node: Node) -> None:
    """Sizes of parts are written out: how many there are is no attribute before opset 18."""
    names = context.inputs(node)
    if len(names) == 1:
        x, axis = node.inputs[0], int(node.attrs.get("axis", 0))  # type: ignore[arg-type]
        assert x is not None
        names.append(context.dims([y.type.shape[axis % x.type.rank] for y in node.outputs]))
    context.add("Split", names, context.output_names(node), axis=node.attrs.get("axis", 0))


def _batch_norm(context: Context, node: Node) -> None:
    """Training mode gets a private mean and variance each: onnxruntime writes into both inputs.

    Every scratch vector is scale times another constant, so that neither sharing of constants nor
    elimination of common subexpressions makes two nodes write to one buffer. The blend with the
    running statistics is written out.
    """
    if not node.attrs.get("training_mode"):
        context.plain(node)
        return
    x, scale, bias, mean, var = context.inputs(node)
    dtype = node.inputs[1].type.dtype.numpy  # type: ignore[union-attr]
    scratch = [
        context.emit("Mul", scale, context.constant(_distinct(context, dtype, k))) for k in (0, 1)
    ]
    y, batch_mean, batch_var = (context.fresh() for _ in range(3))
    attrs = {"training_mode": 1, "momentum": 0.0}
    attrs["epsilon"] = node.attrs.get("epsilon", 1e-5)  # type: ignore[assignment]
    context.add(
        "BatchNormalization", [x, scale, bias, *scratch], [y, batch_mean, batch_var], **attrs
    )
    momentum = node.attrs.get("momentum", 0.9)
    names = [y, batch_mean, batch_var]
    if momentum != 0.0:
        names[1:] = [
            _blend(context, old, new, momentum, dtype)
            for old, new in ((mean, batch_mean), (var, batch_var))
        ]
    for value, name in zip(node.outputs, names, strict=False):
        context.names[value] = name


def _distinct(context: Context, dtype: Any, k: int) -> Array:
    return np.array(2 * len(context.nodes) + k + 1, dtype)


def _blend(context: Context, old: str, new: str, momentum: Any, dtype: Any) -> str:
    kept = context.emit("Mul", old, context.constant(np.array(momentum, dtype)))
    added = context.emit("Mul", new, context.constant(np.array(1 - momentum, dtype)))
    return context.emit("Add", kept, added)


def _cond(context: Context, node: Node) -> None:
    predicate, *operands = context.inputs(node)
    if any(n.op == node.op for region in node.regions for n in region.walk()):
        predicate = _open_question(context, node, predicate)
    context.add(
        "If",
        [predicate],
        context.output_names(node),
        then_branch=context.region(node.regions[0], operands, "then"),
        else_branch=context.region(node.regions[1], operands, "else"),
    )


def _open_question(context: Context, node: Node, predicate: str) -> str:
    """The predicate, joined with an operand in a way that changes nothing.

    Where onnxruntime 1.31 finds the predicates of two nested Ifs constant it puts the inner branch
    in place of its If, then the outer one, and fails: Graph::InlineIfSubgraph takes the nodes in
    the order of their making. A predicate that depends on an operand is no constant.
    """
    fixed = {tensor.name for tensor in context.tensors}
    for value, name in zip(node.inputs, context.inputs(node), strict=True):
        if value is not None and value.type.dtype.is_float and name not in fixed:
            number = _first_number(context, name)
            zero = context.constant(np.zeros((), value.type.dtype.numpy))
            positive = context.emit("Greater", number, zero)
            never = context.emit("And", positive, context.emit("Not", positive))
            return context.emit("Or", predicate, never)
    return predicate


def _custom(context: Context, node: Node) -> None:
    """A call of a local function that holds the body."""
    name, domain = str(node.attrs["name"]), str(node.attrs["domain"])
    called = context.local_function(name, domain, node.regions[0])
    context.add(called, context.inputs(node), context.output_names(node), domain=domain)


def _declared(name: str, value: Value) -> ValueInfoProto:
    info = ValueInfoProto(name=name)
    info.type.CopyFrom(type_proto(value.type))
    return info


def _subgraph(context: Context, region: Function, own: int, captures: Sequence[str]) -> GraphProto:
    """A region whose first `own` parameters are declared inputs and whose rest are outer names."""
    inner = context.child(region)
    inputs = []
    for i, param in enumerate(region.params):
        name = context.fresh() if i < own else captures[i - own]
        inner.names[param] = name
        inner.note_sizes(param, name)
        if i < own:
            inputs.append(_declared(name, param))
    inner.body(inner.function)
    infos = inner.result_infos()
    return helper.make_graph(inner.nodes, region.name, inputs, infos, inner.tensors)


def _scan(context: Context, node: Node) -> None:
    n, m = int(node.attrs["num_carry"]), int(node.attrs["num_scanned"])  # type: ignore[arg-type]
    names = context.inputs(node)
    backwards = int(bool(node.attrs.get("reverse", 0)))
    stacked = len(node.outputs) - n
    attrs: dict[str, Any] = {"num_scan_inputs": m}
    if backwards:
        attrs["scan_input_directions"] = [1] * m
        if stacked:
            attrs["scan_output_directions"] = [1] * stacked
    body = _subgraph(context, node.regions[0], n + m, names[n + m :])
    context.add("Scan", names[: n + m], context.output_names(node), body=body, **attrs)


def _loop(context: Context, node: Node) -> None:
    n = int(node.attrs["num_carry"])  # type: ignore[arg-type]
    names = context.inputs(node)
    body = _subgraph(context, node.regions[0], 2 + n, names[2 + n :])
    context.add("Loop", names[: 2 + n], context.output_names(node), body=body)


def _recurrent(context: Context, node: Node) -> None:
    """Batch-first operands are turned around it: onnxruntime 1.31 refuses layout 1.

    It gives zeros as the last state of a sequence of no steps, whose state stays as it began, and
    has other usual numbers of activations than ONNX: all are written.
    """
    written = {**node.attrs, **numbers_of(node.op.name, node.attrs)}
    plain: dict[str, Any] = {k: v for k, v in written.items() if v != ()}
    turned = bool(plain.pop("layout", 0))
    names = [*context.inputs(node), *[""] * 7]
    if not turned and (not names[4] or not any(names[5:7])):
        _recurrent_kernel(context, node, names, context.output_names(node), plain)
        return
    if turned:
        for i in (0, 5, 6):
            if names[i]:
                names[i] = context.emit("Transpose", names[i], perm=[1, 0, 2])
    made = [context.fresh() for _ in node.outputs]
    _recurrent_kernel(context, node, names, made, plain)
    finals = [made[0], *_kept_states(context, names, made[1:])]
    perms = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
    for name, final, perm in zip(finals, context.output_names(node), perms, strict=False):
        if turned:
            context.add("Transpose", [name], [final], perm=perm)
        else:
            context.add("Identity", [name], [final])


def _recurrent_kernel(
    context: Context, node: Node, names: list[str], made: list[str], attrs: Mapping[str, Any]
) -> None:
    """The operator, or an LSTM on int8 weights where it has such and the target that operator."""
    domain, _, integer = DYNAMIC_LSTM.rpartition(".")
    if node.op.name == "LSTM" and DYNAMIC_LSTM in context.target.operators:
        w, r = (_gates_in_int8(context, name) for name in names[1:3])
        if w is not None and r is not None:
            inputs = [names[0], w[0], r[0], *names[3:8], *w[1:], *r[1:]]
            context.add(integer, inputs, made, domain=domain, **attrs)
            return
    context.add(node.op.name, names[: len(node.inputs)], made, **attrs)


def _gates_in_int8(context: Context, name: str) -> tuple[str, str, str] | None:
    """Integers, scales and zero points of weights that are made as `quantize.insert` does."""
    turned = _made_by(context, name, "Transpose")
    read = turned and _made_by(context, turned.input[0], "DequantizeLinear")
    if not turned or not read or len(read.input) != 3 or _attrs(turned) != {"perm": [0, 2, 1]}:
        return None
    scale, zero = (_held(context, part) for part in read.input[1:])
    if scale is None or zero is None or zero.dtype != np.int8 or zero.any() or scale.ndim != 3:
        return None
    if _attrs(read).get("axis", 1) != 1 or scale.shape[1] != 1:
        return None
    # one scale for each direction, where all of its rows have the same, takes a faster path
    rows = slice(None) if np.ptp(scale, axis=2).any() else 0
    kernel = (scale[:, 0, rows], zero[:, 0, rows])
    return (read.input[0], *(context.constant(part) for part in kernel))


def _made_by(context: Context, name: str, op: str) -> Any:
    """The node `op` that makes a value, or None."""
    return next((n for n in context.nodes if n.op_type == op and name in n.output), None)


def _attrs(node: Any) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _kept_states(context: Context, names: Sequence[str], states: Sequence[str]) -> list[str]:
    """The last states; of a sequence of no steps the first one."""
    lens, starts = names[4], names[5:7]
    if not lens:
        return list(states)
    zero = context.constant(np.array(0, np.int32))
    walked = context.emit("Greater", lens, zero)
    walked = context.emit("Unsqueeze", walked, context.constant(np.array([0, 2])))
    pairs = zip(states, starts, strict=False)
    return [context.emit("Where", walked, s, first) if first else s for s, first in pairs]


def _sized(context: Context, node: Node) -> None:
    """A Reshape per claimed axis: it fails where the number of elements is not the claimed one."""
    (name,) = context.inputs(node)
    (x,), (y,) = node.inputs, node.outputs
    assert x is not None
    shape = list(x.type.shape)
    for axis, size in enumerate(y.type.shape):
        if shape[axis] != size:
            shape[axis] = size
            name = context.emit("Reshape", name, context.dims(shape), allowzero=1)
    context.names[y] = name


def _sequence_map(context: Context, node: Node) -> None:
    """The body declares every operand: a tensor, the same for all elements, is one too."""
    names = context.inputs(node)
    body = _subgraph(context, node.regions[0], len(names), ())
    context.add("SequenceMap", names, context.output_names(node), body=body)


def _bernoulli(context: Context, node: Node) -> None:
    """A uniform number below the probability: onnxruntime 1.31 draws 1 with probability 1 - p."""
    (x,) = context.inputs(node)
    seed = {k: v for k, v in node.attrs.items() if k == "seed"}
    below = context.emit("Less", context.emit("RandomUniformLike", x, **seed), x)
    to = node.outputs[0].type.dtype.onnx
    context.add("Cast", [below], context.output_names(node), to=to)


_CODES_SINCE: Final = {
    "int2": 25, "uint2": 25, "float4e2m1": 23, "float8e8m0": 23, "int4": 21, "uint4": 21,
    "int16": 21, "uint16": 21, "float8e4m3fn": 19, "float8e4m3fnuz": 19, "float8e5m2": 19,
    "float8e5m2fnuz": 19, "float16": 19, "bfloat16": 19,
}  # fmt: skip
"""From which opset on QuantizeLinear and DequantizeLinear take an element type."""
_CODING_SINCE: Final = {
    ("QuantizeLinear", "saturate"): 19, ("QuantizeLinear", "block_size"): 21,
    ("QuantizeLinear", "output_dtype"): 21, ("QuantizeLinear", "precision"): 23,
    ("DequantizeLinear", "block_size"): 21, ("DequantizeLinear", "output_dtype"): 23,
}  # fmt: skip


def _coding(context: Context, node: Node) -> None:
    """As it is, or refused where the opset is too old for a type or an attribute of the node."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    needs = [(_CODES_SINCE.get(v.type.dtype.name, 0), str(v.type.dtype)) for v in values]
    needs += [(_CODING_SINCE.get((node.op.name, k), 0), k) for k in node.attrs]
    since, what = max(needs)
    if since > context.target.opset:
        raise InvalidInput(
            f"{node.op} takes {what} from opset {since} on, the target is opset "
            f"{context.target.opset} (at {node.meta.location}); choose a newer one"
        )
    context.plain(node)


RULES: Final[Mapping[tuple[str, str], Rule]] = {
    ("", "Clip"): _clip,
    ("", "Constant"): _constant,
    ("", "Reshape"): _reshape,
    ("", "Slice"): _slice,
    ("", "MatMul"): _matmul,
    ("", "MaxPool"): _pool,
    ("", "AveragePool"): _pool,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "MaxUnpool"): _max_unpool,
    ("", "Pad"): _pad,
    ("", "Div"): _div,
    ("", "Max"): _extreme,
    ("", "Min"): _extreme,
    ("", "Mod"): _mod,
    ("", "Einsum"): _einsum,
    ("", "OneHot"): _one_hot,
    ("", "Pow"): _pow,
    ("", "ScatterElements"): _scatter,
    ("", "ScatterND"): _scatter,
    ("", "Split"): _split,
    ("", "BatchNormalization"): _batch_norm,
    ("", "Bernoulli"): _bernoulli,
    ("", "QuantizeLinear"): _coding,
    ("", "DequantizeLinear"): _coding,
    ("", "RNN"): _recurrent,
    ("", "GRU"): _recurrent,
    ("", "LSTM"): _recurrent,
    ("", "Expand"): _expand,
    (DOMAIN, "Barrier"): _barrier,
    (DOMAIN, "Dims"): _dims,
    (DOMAIN, "Cond"): _cond,
    (DOMAIN, "Custom"): _custom,
    (DOMAIN, "Scan"): _scan,
    (DOMAIN, "Loop"): _loop,
    (DOMAIN, "SequenceMap"): _sequence_map,
    (DOMAIN, "Sized"): _sized,
}
"""Operators whose emission is never a copy."""


def _axes_as_attribute(context: Context, node: Node) -> None:
    """Before opset 18 reductions other than the sum take their axes as an attribute."""
    names = context.inputs(node)
    axes = [int(a) for a in _initializer(context, names[1])] if len(names) > 1 else []
    if not axes and node.attrs.get("noop_with_empty_axes"):
        context.add("Identity", names[:1], context.output_names(node))
        return
    attrs: dict[str, Any] = {"keepdims": node.attrs.get("keepdims", 1)}
    _on_bytes(context, node, names[:1], attrs | ({"axes": axes} if axes else {}))


def _bools_as_bytes(context: Context, node: Node) -> None:
    """No reduction takes bools before opset 20, and onnxruntime none of no elements."""
    _on_bytes(context, node, context.inputs(node), onnx_attrs(node.attrs))


def _on_bytes(context: Context, node: Node, names: list[str], attrs: Mapping[str, Any]) -> None:
    """The operator itself, or on uint8 in place of bool."""
    if node.outputs[0].type.dtype != bool_:
        context.add(node.op.name, names, context.output_names(node), **attrs)
        return
    counted = context.emit("Cast", names[0], to=uint8.onnx)
    found = context.emit(node.op.name, counted, *names[1:], **attrs)
    context.add("Cast", [found], context.output_names(node), to=bool_.onnx)


def _initializer(context: Context, name: str) -> Array:

    return next(numpy_helper.to_array(t) for t in context.tensors if t.name == name)


def _held_value(context: Context, node: Node) -> None:
    """Before opset 18 only an optional is opened; anything else is what it holds."""
    if isinstance(node.inputs[0].type, OptionalType):  # type: ignore[union-attr]
        context.plain(node)
    else:
        context.add("Identity", context.inputs(node), context.output_names(node))


def _holds_value(context: Context, node: Node) -> None:
    """Before opset 18 only an optional is asked."""
    x = node.inputs[0] if node.inputs else None
    if x is not None and isinstance(x.type, OptionalType):
        context.plain(node)
    else:
        context.names[node.outputs[0]] = context.constant(np.array(x is not None))


def _grid_sample_names(context: Context, node: Node) -> None:
    """Before opset 20 the modes of GridSample are named for planes."""
    names = {"linear": "bilinear", "cubic": "bicubic"}
    mode = str(node.attrs.get("mode", "linear"))
    context.plain(node, mode=names.get(mode, mode))


LOWER: Final[Mapping[str, Rule]] = {
    "grid_sample_names": _grid_sample_names,
    "axes_as_attribute": _axes_as_attribute,
    "bools_as_bytes": _bools_as_bytes,
    "held_value": _held_value,
    "holds_value": _holds_value,
}
"""Rules by name, for rows whose form changed between opsets (`Op.lower_below`)."""

"""Rows over sequences and optionals: several tensors, or perhaps none, as one value.

The type of a sequence holds what is known about its elements (`ir.types.SequenceType`). A size that
differs between elements (an own size) becomes a symbol of the node that takes an element out. The
cotangent of a sequence is a sequence of cotangents; optionals and maps have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, is_symbol, symbol, symbols
from triplane.unified_ir.ir.graph import Function, Node
from triplane.unified_ir.ir.types import (
    OWN,
    DType,
    OptionalType,
    SequenceType,
    ShapeError,
    TensorType,
    TypeMismatch,
    as_dtype,
    bool_,
    int64,
    is_plain,
    joined_elements,
)
from triplane.unified_ir.ops.build import region
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, Op, OpCall, OpKind, dtype_attr
from triplane.unified_ir.ops.rows.control import control
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.rows.movement.structure import axes_of, stop_gradient, where, zeros
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, as_tensor, dims_of
from triplane.unified_ir.ops.trees import leaves

Types = tuple[TensorType, ...]


def _sequence(call: OpCall, i: int = 0) -> SequenceType:
    type_ = call.type(i)
    if not isinstance(type_, SequenceType):
        raise TypeMismatch(f"{call.row} takes a sequence as operand {i}, got {type_}")
    return type_


def _shaped(call: OpCall, held: SequenceType) -> TensorType:
    """Return the elements' type; refuse elements whose number of axes is not known."""
    if isinstance(held.element, DType):
        raise ShapeError(
            f"{call.row} needs to know the axes of the elements, got {held}; declare them where "
            "the sequence is a parameter, or insert a tensor first"
        )
    return held.element


def _opened(call: OpCall, shape: Sequence[Dim], first: int = 0) -> list[Dim]:
    """Return the shape with a symbol of this node for each own size of an element."""
    numbers = count(first)
    return [call.opened(next(numbers)) if d == OWN else d for d in shape]


def _position(call: OpCall, i: int) -> None:
    if call.has(i) and call.type(i).size != 1:
        raise ShapeError(f"{call.row} takes one position, got {call.type(i)}")


sequence_construct = Op(
    name="SequenceConstruct",
    kind=OpKind.SEQUENCE,
    infer=lambda call: (SequenceType(reduce(joined_elements, call.types)),),  # type: ignore[arg-type]
    reference=lambda *xs, **_: list(xs),
    vjp=lambda g, y, *xs: [assume_shape(sequence_at(g, i), x.shape) for i, x in enumerate(xs)],
)

sequence_empty_row = Op(
    name="SequenceEmpty",
    kind=OpKind.SEQUENCE,
    infer=lambda call: (SequenceType(dtype_attr(call.attrs["dtype"] or 1), empty=True),),
    reference=lambda **_: [],
)


def _inserted(call: OpCall) -> Types:
    held, x = _sequence(call), call.type(1)
    _position(call, 2)
    if held.element_dtype != x.dtype:
        raise TypeMismatch(f"{call.row} cannot put {x} into {held}; cast it")
    return (SequenceType(x if held.empty else joined_elements(held.element, x)),)


def _one(position: Any) -> int:
    """Read a position given as a scalar or as a vector of one."""
    return int(position.reshape(()))


def _insert(held: Any, x: Any, position: Any = None) -> Any:
    at = len(held) if position is None else _one(position)
    if not -len(held) <= at <= len(held):
        raise IndexError(f"position {at} is outside a sequence of length {len(held)}")
    at += len(held) if at < 0 else 0
    return [*held[:at], x, *held[at:]]


def _place(position: Tensor | None, held: Tensor, last: int) -> Tensor:
    """Return a position counted from the front; without one, the length plus `last`."""
    n = sequence_length(held)
    if position is None:
        return n + last
    at = position.reshape(()).cast(int64)
    return where(at < 0, at + n, at)


def _insert_vjp(
    g: Tensor, y: Tensor, held: Tensor, x: Tensor, position: Tensor | None = None
) -> Any:
    at = _place(position, held, 0)
    return sequence_erase(g, at), assume_shape(sequence_at(g, at), x.shape), None


sequence_insert = Op(
    name="SequenceInsert", kind=OpKind.SEQUENCE, infer=_inserted, reference=_insert, vjp=_insert_vjp
)


def _taken(call: OpCall) -> Types:
    element = _shaped(call, _sequence(call))
    _position(call, 1)
    return (element.with_shape(_opened(call, element.shape)),)


def _own_sizes(call: OpCall) -> int:
    held = call.type(0)
    element = held.element if isinstance(held, SequenceType) else None
    return element.shape.count(OWN) if isinstance(element, TensorType) else 0


def _at_vjp(g: Tensor, y: Tensor, held: Tensor, position: Tensor) -> Any:
    """Return a sequence of zeros with g at that position."""
    at = _place(position, held, 0)
    # Zeros need the shapes of the other elements, which only the sequence itself has.
    flat = sequence_map(lambda x: zeros(x.shape, x.dtype), stop_gradient(held))
    return sequence_insert(sequence_erase(flat, at), g, at), None


sequence_at: Op = Op(
    name="SequenceAt",
    kind=OpKind.SEQUENCE,
    vjp=_at_vjp,
    data_dependent_dims=_own_sizes,
    infer=_taken,
    reference=lambda held, position: held[_one(position)],
)


def _erased(call: OpCall) -> Types:
    _position(call, 1)
    return (_sequence(call),)


def _erase(held: Any, position: Any = None) -> Any:
    # Indexing a range gives a position from the front, or IndexError, as a list would.
    at = range(len(held))[-1 if position is None else _one(position)]
    return [*held[:at], *held[at + 1 :]]


def _erase_vjp(g: Tensor, y: Tensor, held: Tensor, position: Tensor | None = None) -> Any:
    at = _place(position, held, -1)
    erased = sequence_at(stop_gradient(held), at)
    return sequence_insert(g, zeros(erased.shape, erased.dtype), at), None


sequence_erase = Op(
    name="SequenceErase", kind=OpKind.SEQUENCE, infer=_erased, reference=_erase, vjp=_erase_vjp
)


def _length(call: OpCall) -> Types:
    _sequence(call)
    return (TensorType(int64, ()),)


sequence_length = Op(
    name="SequenceLength",
    kind=OpKind.SEQUENCE,
    infer=_length,
    reference=lambda held: np.array(len(held), np.int64),
)


def _split_types(call: OpCall) -> Types:
    x = call.type(0)
    (axis,) = axes_of(x.rank, [call.attrs["axis"]])
    if not call.has(1):
        part: tuple[Dim, ...] = (1,) if call.attrs["keepdims"] else ()
    elif call.type(1).rank > 1:
        raise ShapeError(f"{call.row} takes a length or a vector of lengths, got {call.type(1)}")
    else:
        part = (_part(call, x.shape[axis]),)
    return (SequenceType(x.with_shape((*x.shape[:axis], *part, *x.shape[axis + 1 :]))),)


def _part(call: OpCall, whole: Dim) -> Dim:
    """Return the size of every part; an own size if they differ or are not known."""
    known = call.known[1]
    if not isinstance(known, np.ndarray) or not known.size:
        return OWN
    sizes = [int(n) for n in known.reshape(-1)]
    # A vector may contain 0; a length for all parts may not, as empty parts add up to nothing.
    if min(sizes) < 0 or (known.ndim == 0 and not sizes[0]):
        raise ShapeError(f"{call.row} needs sizes above 0, got {sizes}")
    if known.ndim and isinstance(whole, int) and sum(sizes) != whole:
        raise ShapeError(
            f"{call.row} of {call.type(0)} needs sizes that add up to {whole}, got {sizes}, which "
            f"add up to {sum(sizes)}"
        )
    # With one length for all, the last part is shorter unless the length divides the axis.
    alike = len(set(sizes)) == 1 if known.ndim else isinstance(whole, int) and not whole % sizes[0]
    return sizes[0] if alike else OWN


def _split(x: Any, split: Any = None, *, axis: int, keepdims: int) -> Any:
    size = x.shape[axis]
    if split is None:
        parts = np.split(x, size, axis) if size else []
        return parts if keepdims else [np.squeeze(part, axis) for part in parts]
    if split.size and int(split.min()) < (split.ndim == 0):
        raise ValueError(f"lengths of parts must be above 0, got {split.tolist()}")
    ends = np.arange(split, size, split) if split.ndim == 0 else np.cumsum(split)[:-1]
    if split.ndim and int(split.sum()) != size:
        raise ValueError(f"parts of {split.tolist()} do not add up to {size}")
    return np.split(x, ends, axis)


def _split_vjp(
    g: Tensor, y: Tensor, x: Tensor, split: Tensor | None = None, *, axis: int, keepdims: int
) -> Any:
    stacked = split is None and not keepdims
    whole = concat_from_sequence_row(g, axis=axis, new_axis=int(stacked))
    return assume_shape(whole, x.shape), None


split_to_sequence_row = Op(
    name="SplitToSequence",
    kind=OpKind.SEQUENCE,
    infer=_split_types,
    reference=_split,
    vjp=_split_vjp,
)


def _concat_types(call: OpCall) -> Types:
    element = _shaped(call, _sequence(call))
    new = call.attrs["new_axis"]
    (axis,) = axes_of(element.rank + bool(new), [call.attrs["axis"]])
    rest = [d for i, d in enumerate(element.shape) if new or i != axis]
    type_ = _opened(call, rest, first=1)
    return (element.with_shape((*type_[:axis], call.opened(0), *type_[axis:])),)


def _concat_vjp(g: Tensor, y: Tensor, held: Tensor, *, axis: int, new_axis: int) -> Any:
    """Split into parts as long as the elements are."""
    if new_axis:
        return (split_to_sequence_row(g, axis=axis, keepdims=0),)
    at = axis % g.rank
    lengths = sequence_map(lambda x: dims_of([x.shape[at]]), stop_gradient(held))
    return (split_to_sequence_row(g, concat_from_sequence_row(lengths, axis=0), axis=axis),)


concat_from_sequence_row = Op(
    name="ConcatFromSequence",
    kind=OpKind.SEQUENCE,
    data_dependent_dims=lambda call: 1 + _own_sizes(call),  # the sum along the axis, own sizes
    infer=_concat_types,
    reference=lambda held, axis, new_axis: (np.stack if new_axis else np.concatenate)(held, axis),
    vjp=_concat_vjp,
)


def _optional_types(call: OpCall) -> Types:
    wanted = call.attrs["type"]
    if call.has(0):
        if wanted is not None and wanted != call.type(0):
            raise TypeMismatch(f"{call.row} of {call.type(0)} cannot have the type {wanted}")
        return (OptionalType(call.type(0)),)
    if not isinstance(wanted, TensorType):
        raise InvalidInput(f"an empty {call.row} needs the type of the value that it might hold")
    return (OptionalType(wanted),)


optional_row = Op(
    name="Optional",
    kind=OpKind.SEQUENCE,
    infer=_optional_types,
    reference=lambda held=None, **_: held,
)


def _get(held: Any) -> Any:
    if held is None:
        raise ValueError("the optional holds nothing")
    return held


def _element(call: OpCall) -> Types:
    held = call.type(0)
    return (held.element if isinstance(held, OptionalType) else held,)


def _emit_sequence_map(context: EmissionContext, node: Node) -> None:
    """Emit a body that has every operand as a parameter, tensors too."""
    names = context.inputs(node)
    body = context.subgraph(node.regions[0], len(names), ())
    context.add("SequenceMap", names, context.output_names(node), body=body)


def _emit_held_value(context: EmissionContext, node: Node) -> None:
    """Emit Identity for values other than optionals, which the operator takes since opset 18."""
    if isinstance(node.inputs[0].type, OptionalType):  # type: ignore[union-attr]
        context.plain(node)
    else:
        context.add("Identity", context.inputs(node), context.output_names(node))


def _emit_holds_value(context: EmissionContext, node: Node) -> None:
    """Emit a constant for values other than optionals, which the operator takes since opset 18."""
    x = node.inputs[0] if node.inputs else None
    if x is not None and isinstance(x.type, OptionalType):
        context.plain(node)
    else:
        context.names[node.outputs[0]] = context.constant(np.array(x is not None))


optional_get_element = Op(
    name="OptionalGetElement",
    kind=OpKind.SEQUENCE,
    infer=_element,
    reference=_get,
    lower_below={18: _emit_held_value},
)

optional_has_element = Op(
    name="OptionalHasElement",
    kind=OpKind.SEQUENCE,
    infer=lambda call: (TensorType(bool_, ()),),
    reference=lambda held=None: np.array(held is not None),
    lower_below={18: _emit_holds_value},
)


def _map_types(call: OpCall) -> Types:
    control.check_regions(call, 1)
    (body,) = call.regions
    _sequence(call)
    if len(body.params) != len(call.types):
        raise InvalidInput(
            f"{call.row} passes {len(call.types)} values to a region that takes {len(body.params)}"
        )
    for i, param in enumerate(body.params):
        type_ = call.type(i)
        wanted = _shaped(call, type_) if isinstance(type_, SequenceType) else type_
        if not _stands_for(param.type, wanted):
            raise TypeMismatch(f"{call.row} passes {wanted} to a region that takes {param.type}")
    outside = frozenset().union(*(t.symbols for t in control.all_types(call)))
    return tuple(SequenceType(_seen_outside(r.type, body, outside)) for r in body.results)


def _stands_for(param: TensorType, element: TensorType) -> bool:
    """Return whether a region's parameter can be an element, whose own sizes are symbols there."""
    if not is_plain(param) or param.dtype != element.dtype or param.rank != element.rank:
        return False
    pairs = zip(param.shape, element.shape, strict=True)
    return all(is_symbol(p) if e == OWN else p == e for p, e in pairs)


def _seen_outside(type_: TensorType, body: Function, outside: frozenset[str]) -> TensorType:
    """Return a result's type outside its region, where the region's own symbols do not exist."""
    if not is_plain(type_):
        raise TypeMismatch(f"a region over elements must return tensors, got {type_}")
    inner = {s for p in body.params for s in p.type.symbols} - outside
    inner |= control.inner_sizes(body)
    return type_.with_shape(OWN if symbols(d) & inner else d for d in type_.shape)


def _map(held: Any, *more: Any, regions: Any) -> Any:
    rows = []
    for i, x in enumerate(held):
        rest = [other[i] if isinstance(other, list) else other for other in more]
        rows.append(regions[0](x, *rest))
    if any(isinstance(other, list) and len(other) != len(held) for other in more):
        raise ValueError(f"sequences of {[len(s) for s in (held, *more) if isinstance(s, list)]}")
    return tuple(map(list, zip(*rows, strict=True)))


sequence_map_row = Op(
    name="SequenceMap",
    computes=(
        "sequences of the results of its region for the elements at each place; tensors are "
        "the same for all"
    ),
    kind=OpKind.CONTROL,
    emit=_emit_sequence_map,
    domain=DOMAIN,
    operands=("S", "*"),
    infer=_map_types,
    reference=_map,
)
"""Operands: a sequence, then sequences of its length (walked along) and tensors (the same for all).

One region: an element of each sequence and the tensors -> an element of each output.
"""


def sequence(*xs: TensorLike) -> Tensor:
    """Return the tensors as one sequence; they share an element type, not a shape."""
    return sequence_construct(*xs)


def empty_sequence(dtype: Any = "float32") -> Tensor:
    """Return a sequence that holds nothing yet."""
    return sequence_empty_row(dtype=as_dtype(dtype).onnx)


def split_to_sequence(
    x: Tensor,
    split: TensorLike | Sequence[int] | None = None,
    *,
    axis: int = 0,
    keepdims: bool = True,
) -> Tensor:
    """Return parts of `x` along `axis`: of length `split`, of those lengths, or of one each.

    keepdims: parts of one keep the axis.
    """
    lengths = split if isinstance(split, (Tensor, type(None))) else np.asarray(split, np.int64)
    return split_to_sequence_row(x, lengths, axis=axis, keepdims=int(keepdims))


def concat_from_sequence(held: Tensor, *, axis: int = 0) -> Tensor:
    """Join the elements along `axis`."""
    return concat_from_sequence_row(held, axis=axis)


def stack_from_sequence(held: Tensor, *, axis: int = 0) -> Tensor:
    """Stack the elements, which have one shape, along a new axis."""
    return concat_from_sequence_row(held, axis=axis, new_axis=1)


def sequence_map(f: Callable[..., Any], held: Tensor, *more: Tensor, alike: bool = False) -> Any:
    """Apply `f` to each element; further sequences are walked along, tensors are the same for all.

    Return a sequence, or a tuple of them if `f` returns a tuple. alike: elements at one position
    have one shape, which their types need not show.
    """
    build, value = region("map", element_types((held, *more), alike=alike), lambda xs: f(*xs))
    body = build.finish(control.numbered(leaves(value)))
    operands = (held, *more, *build.captured)
    outputs = recorder().apply(
        sequence_map_row, operands, {}, regions=(body,), outputs=len(body.results)
    )
    return outputs if isinstance(value, (tuple, list)) else outputs[0]


def element_types(operands: Sequence[Tensor], *, alike: bool = False) -> list[TensorType]:
    """Return types of the parameters of a region over elements, with a symbol for each own size.

    alike: own sizes of one axis, counted from the last, are one size; its symbol is the size that a
    tensor among the operands has there, if any.
    """
    place = "_".join(map(str, recorder().position()))
    shared: dict[int, Dim] = {}
    for x in operands:
        if alike and is_plain(x.type):
            shared.update({k: d for k, d in enumerate(reversed(x.shape)) if is_symbol(d)})

    def size(i: int, k: int, rank: int) -> Dim:
        if not alike:
            return symbol(f"own_{place}_{i}_{k}")
        last = rank - 1 - k
        return shared.setdefault(last, symbol(f"own_{place}_{last}"))

    types: list[TensorType] = []
    for i, x in enumerate(operands):
        held = x.type
        if isinstance(held, SequenceType):
            if isinstance(held.element, TensorType):
                sizes = enumerate(held.element.shape)
                rank = held.element.rank
                own = (size(i, k, rank) if d == OWN else d for k, d in sizes)
                held = held.element.with_shape(own)
            elif not alike:
                raise ShapeError(f"the axes of the elements of {held} are not known")
        types.append(held)
    return types


def added(a: Tensor, b: Tensor) -> Tensor:
    """Add two cotangents of one value, of sequences element by element."""
    if is_plain(a.type):
        return a + b
    total: Tensor = sequence_map(lambda x, y: x + y, a, b, alike=True)
    return total


def optional(x: TensorLike | TensorType) -> Tensor:
    """Return an optional that holds `x`; for a type, an empty optional of that type."""
    return optional_row(type=x) if isinstance(x, TensorType) else optional_row(as_tensor(x))

"""Messages to modules, every index and length checked: the bytes are untrusted until they pass.

A decoded module is closed, in order, and within limits; its names are printable and unique, its
sizes in normal form, its constants of their declared types. Whether the operators exist and the
types are right is checked by `ops.check`, which knows them. Corrupt says where decoding failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final, TypeVar

import numpy as np

from triplane.proto import ir_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.ir import limits
from triplane.unified_ir.ir.arrays import (
    CONSTANT_PREFIX,
    constant_name,
    from_raw,
    from_stored,
    static_shape,
)
from triplane.unified_ir.ir.dims import MAX_DIM, Dim, parse
from triplane.unified_ir.ir.encode import FIRST_VERSION, NEGATIVE_VERSION, NEWER, STRATEGY_VERSION
from triplane.unified_ir.ir.graph import (
    NO_META,
    Array,
    AttrValue,
    Function,
    Location,
    Meta,
    ModuleContents,
    Node,
    OpId,
    Role,
    Split,
    StateTensor,
    Value,
)
from triplane.unified_ir.ir.split import checked_split
from triplane.unified_ir.ir.types import (
    BY_ONNX,
    MAX_RANK,
    DType,
    OptionalType,
    SequenceType,
    TensorType,
    is_plain,
    string,
)

MISREAD: Final = (
    "programs before format version 3 wrote negative numbers among symbolic sizes so that they "
    "read as something else: import or train the model again"
)
"""The cause, and the way out, if the sizes in an older file contradict its types."""
_NEGATIVE: Final = re.compile(r"-[1-9][0-9]{0,18}")

_T = TypeVar("_T")


class Decoder:
    """Reads one message; `tensors` are those of the weights, `used` the names that it read."""

    def __init__(self, message: pb.Module, tensors: Mapping[str, StoredTensor]) -> None:
        self.message = message
        self.tensors = tensors
        self.used: set[str] = set()
        self.nodes = 0
        _at_most(limits.MAX_STRINGS, message.strings, "strings")
        _at_most(limits.MAX_STRINGS, message.places, "places")
        for table in (message.ops, message.types, message.entries, message.state):
            _at_most(limits.MAX_TYPES, table, "types, operators, entries or state tensors")
        self.strings = [_string(s) for s in message.strings]
        # In the order in which tables refer to each other: types need sizes, and operators need
        # strings.
        self.dims = _dims(message.dims, negative=message.format_version >= NEGATIVE_VERSION)
        self.ops = [self._op(op) for op in message.ops]
        self.types: list[TensorType] = []
        for item in message.types:  # an item may hold a type before it
            self.types.append(self._type(item))
        self.places = [self._place(p) for p in message.places]

    def contents(self) -> ModuleContents:
        """Return the whole module."""
        message = self.message
        _at_most(limits.MAX_FUNCTIONS, message.functions, "functions")
        names = [self.name(f.name) for f in message.functions]
        functions = _unique(
            (name, self.function(f.function, f"function {name!r}"))
            for name, f in zip(names, message.functions, strict=True)
        )
        entries = _unique(
            (self.name(e.name), _pick(names, e.function, "function")) for e in message.entries
        )
        state = _unique(map(self._state, message.state))
        _at_most(limits.MAX_PROPERTIES, message.meta, "properties")
        meta = {_name(p.key): _string(p.value) for p in message.meta}
        if [p.key for p in message.meta] != sorted(meta):
            raise Corrupt("properties must be sorted by key, with each key once")
        return ModuleContents(functions, entries, state, meta)

    def function(self, message: pb.Function, label: str, depth: int = 0) -> Function:
        """Return a function or region; every error begins with `label`."""
        try:
            if depth > limits.MAX_REGION_DEPTH:
                raise Corrupt(f"regions nest deeper than {limits.MAX_REGION_DEPTH}")
            # Counted over the whole module: many functions and regions, each small, must not add up
            # either.
            self.nodes += len(message.nodes)
            if self.nodes > limits.MAX_NODES:
                raise Corrupt(f"the module has more than {limits.MAX_NODES} nodes")
            params = self._params(message)
            # Only earlier values are in the list, so a function that decodes is closed and in
            # order.
            values = list(params)
            nodes = self._nodes(message, values, depth)
            names = self._names(message.result_names)
            results = tuple(_pick(values, i, "value") for i in message.results)
            return Function(self.name(message.name), params, results, names, nodes)
        except (Corrupt, InvalidInput) as error:
            raise Corrupt(f"{label}: {error}") from error

    def _params(self, message: pb.Function) -> tuple[Value, ...]:
        names = self._names(message.param_names)
        _at_most(limits.MAX_OPERANDS, message.param_types, "parameters")
        types = [_pick(self.types, t, "type") for t in message.param_types]
        if len(names) != len(types):
            raise Corrupt(f"{len(names)} parameter names for {len(types)} parameters")
        return tuple(Value(t, n) for n, t in zip(names, types, strict=True))

    def _names(self, indices: Sequence[int]) -> tuple[str, ...]:
        _at_most(limits.MAX_OPERANDS, indices, "names")
        return tuple(self.name(i) for i in indices)

    def _nodes(self, message: pb.Function, values: list[Value], depth: int) -> tuple[Node, ...]:
        nodes = []
        for i, item in enumerate(message.nodes):
            try:
                node = self._node(item, values, depth)
            except (Corrupt, InvalidInput) as error:
                op = f" ({self.ops[item.op]})" if item.op < len(self.ops) else ""
                raise Corrupt(f"node {i}{op}: {error}") from error
            values.extend(node.outputs)
            nodes.append(node)
        return tuple(nodes)

    def _node(self, message: pb.Node, values: Sequence[Value], depth: int) -> Node:
        op = _pick(self.ops, message.op, "operator")
        _at_most(limits.MAX_OPERANDS, message.inputs, "operands")
        _at_most(limits.MAX_OPERANDS, message.outputs, "outputs")
        types, n = self.types, len(values)
        inputs = []
        for i in message.inputs:
            # Operand i is value i - 1, and n values precede the node.
            if i > n:
                raise Corrupt(f"operand is value {i - 1}, which is not computed before it")
            inputs.append(values[i - 1] if i else None)
        outputs = tuple([Value(_pick(types, t, "type")) for t in message.outputs])
        attrs = self._attributes(message) if message.attributes else {}
        regions = tuple(
            self.function(r, f"region {k}", depth + 1) for k, r in enumerate(message.regions)
        )
        meta = _pick(self.places, message.place - 1, "place") if message.place else NO_META
        strategy = self._strategy(message, inputs) if message.strategy else ()
        return Node(op, tuple(inputs), outputs, attrs, regions, meta, strategy)

    def _strategy(self, message: pb.Node, inputs: Sequence[Value | None]) -> Split:
        if self.message.format_version < STRATEGY_VERSION:
            raise Corrupt(f"strategies came with format version {STRATEGY_VERSION}")
        _at_most(limits.MAX_OPERANDS, message.strategy, "operands in a strategy")
        return checked_split([tuple(s.axes) for s in message.strategy], inputs)

    def _attributes(self, message: pb.Node) -> dict[str, AttrValue]:
        attrs: dict[str, AttrValue] = {}
        before = ""
        for item in message.attributes:
            name = self.name(item.name)
            # Strictly ascending names: no duplicates, and only one encoding of the same attributes.
            if name <= before:
                raise Corrupt(f"attribute {name!r} is out of order or occurs twice")
            before = name
            kind = item.WhichOneof("value")
            if kind is None:
                raise Corrupt(f"attribute {name!r} has no value")
            try:
                attrs[name] = _READ[kind](self, item)
            except (Corrupt, InvalidInput) as error:
                raise Corrupt(f"attribute {name!r}: {error}") from error
        return attrs

    def name(self, i: int) -> str:
        """Return a name from the strings."""
        return _name(self.string(i))

    def string(self, i: int) -> str:
        """Return a text from the strings."""
        return _pick(self.strings, i, "string")

    def dim(self, n: int) -> Dim:
        """Return a size written as in `TensorType.shape` and `Attribute.dims`."""
        return n if n >= 0 else _pick(self.dims, -1 - n, "symbolic size")

    def sizes(self, values: Sequence[int]) -> tuple[Dim, ...]:
        """Return the sizes of an attribute; see `MISREAD` for files before version 3."""
        least = min(values, default=0)
        if self.message.format_version < NEGATIVE_VERSION and least < -len(self.dims):
            raise Corrupt(f"symbolic size {-1 - least} of {len(self.dims)}; {MISREAD}")
        return tuple(map(self.dim, values))

    def tensor_ref(self, message: pb.TensorRef) -> Array:
        """Return a constant that is stored in the weights."""
        name = self.string(message.name)
        type_ = _pick(self.types, message.type, "type")
        if not name.startswith(CONSTANT_PREFIX):
            raise Corrupt(f"a constant is named {CONSTANT_PREFIX}..., not {name[:80]!r}")
        array = self._weight(name, type_)
        # The name is a digest of the contents. Without this check a changed weight could pass as
        # the constant that a reviewed graph names.
        if constant_name(array) != name:
            raise Corrupt(f"{name!r} does not hold the constant of that digest")
        return array

    def _weight(self, name: str, type_: TensorType) -> Array:
        if name not in self.tensors:
            raise Corrupt(f"the weights have no tensor {name[:80]!r}")
        self.used.add(name)
        return from_stored(self.tensors[name], type_)

    def _op(self, message: pb.Op) -> OpId:
        domain = self.string(message.domain)
        return OpId(domain and _name(domain), self.name(message.name), message.since)

    def _type(self, message: pb.TensorType) -> TensorType:
        """Return a type; a type that it holds comes before it in the table."""
        first = self.message.format_version == FIRST_VERSION
        if first and (message.form or message.element or message.dtype in NEWER):
            raise Corrupt(f"format version {FIRST_VERSION} has no such type: {message}")
        if message.form not in _FORMS:
            raise Corrupt(f"unknown form of type: {message.form}")
        try:
            return _FORMS[message.form](self, message)
        except InvalidInput as error:
            raise Corrupt(f"a type: {error}") from error

    def sequence_type(self, message: pb.TensorType) -> TensorType:
        """Return the type of a sequence; its elements' type or only their dtype may be known."""
        empty = message.form == pb.FORM_EMPTY
        if message.element and not message.dtype and not empty:
            return SequenceType(self.held(message))
        if message.element or message.shape:
            raise Corrupt("a sequence has either a type of its elements or only an element type")
        return SequenceType(_dtype(message.dtype), empty=empty)

    def held(self, message: pb.TensorType) -> TensorType:
        """Return the type that another type holds."""
        if not message.element or message.shape or message.dtype:
            raise Corrupt("a type that holds another refers to it, and has no shape of its own")
        return _pick(self.types, message.element - 1, "type")

    def tensor_type(self, message: pb.TensorType) -> TensorType:
        """Return the type of a tensor."""
        if message.element:
            raise Corrupt("a tensor has an element type, and holds no other type")
        _at_most(MAX_RANK, message.shape, "axes")
        shape = tuple(map(self.dim, message.shape))
        if any(isinstance(d, int) and not 0 <= d <= MAX_DIM for d in shape):
            raise Corrupt(f"a size of a type is at least 0 and at most {MAX_DIM}, got {shape}")
        return TensorType(_dtype(message.dtype), shape)

    def _place(self, message: pb.Place) -> Meta:
        scope, file = self.string(message.scope), self.string(message.file)
        # Places are printed in error messages; control characters could forge a line of a log or
        # move the cursor of a terminal.
        if not (scope + file).isprintable():
            raise Corrupt(f"a place must be printable text, got {file[:80]!r} {scope[:80]!r}")
        if not message.line and not file:
            return Meta(None, scope)
        path = PurePosixPath(file)
        # An absolute path would also reveal the machine on which the model was traced.
        if path.is_absolute() or ".." in path.parts or PureWindowsPath(file).drive:
            raise Corrupt(f"a source file is relative to its import root, got {file[:80]!r}")
        return Meta(Location(file, message.line), scope)

    def _state(self, message: pb.State) -> tuple[str, StateTensor]:
        name = self.name(message.name)
        type_ = _pick(self.types, message.type, "type")
        if not is_plain(type_) or type_.dtype == string:
            raise Corrupt(f"state {name!r} is a tensor of numbers, not {type_}")
        if message.role not in _ROLES:
            raise Corrupt(f"state {name!r} has the unknown role {message.role}")
        role = _ROLES[message.role]
        try:
            # Contents of personal tensors are in no file. Zeros stand in for them until
            # `Module.initial` gives the start value.
            if role is Role.PERSONAL:
                return name, StateTensor(role, _zeros(type_))
            return name, StateTensor(role, self._weight(name, type_))
        except (Corrupt, InvalidInput) as error:
            raise Corrupt(f"state {name!r}: {error}") from error


# fmt: off
_READ: Final[Mapping[str, Callable[[Decoder, pb.Attribute], AttrValue]]] = {
    "int":        lambda _, a: a.int,
    "float":      lambda _, a: a.float,
    "string":     lambda d, a: d.string(a.string),
    "ints":       lambda _, a: tuple(a.ints.values),
    "floats":     lambda _, a: tuple(a.floats.values),
    "strings":    lambda d, a: tuple(d.string(i) for i in a.strings.values),
    "tensor":     lambda d, a: from_raw(a.tensor.data, _pick(d.types, a.tensor.type, "type")),
    "tensor_ref": lambda d, a: d.tensor_ref(a.tensor_ref),
    "dims":       lambda d, a: d.sizes(a.dims.values),
    "dtype":      lambda _, a: _dtype(a.dtype),
    "type":       lambda d, a: _pick(d.types, a.type, "type"),
}
# fmt: on
_ROLES: Final[Mapping[int, Role]] = {pb.Role.Value(f"ROLE_{r.name}"): r for r in Role}


_FORMS: Final[Mapping[int, Callable[[Decoder, pb.TensorType], TensorType]]] = {
    pb.FORM_TENSOR: Decoder.tensor_type,
    pb.FORM_SEQUENCE: Decoder.sequence_type,
    pb.FORM_EMPTY: Decoder.sequence_type,
    pb.FORM_OPTIONAL: lambda decoder, message: OptionalType(decoder.held(message)),
}


def _dtype(number: int) -> DType:
    if number not in BY_ONNX:
        raise Corrupt(f"unknown element type {number}")
    return BY_ONNX[number]


def _dims(texts: Sequence[str], *, negative: bool) -> list[Dim]:
    """Return the table of sizes: expressions, and with `negative` also numbers below zero."""
    total = 0
    dims: list[Dim] = []
    for text in texts:
        total += len(text)
        if total > limits.MAX_DIMS_CHARS:
            raise Corrupt(f"symbolic sizes take more than {limits.MAX_DIMS_CHARS} characters")
        # Only attributes may use a negative number; `tensor_type` refuses it in a shape.
        if negative and _NEGATIVE.fullmatch(text) and int(text) >= -(2**63):
            dims.append(int(text))
            continue
        try:
            dim = parse(text)
        except InvalidInput as error:
            raise Corrupt(f"a symbolic size: {error}") from error
        # Equal sizes are compared by normal form, so another spelling of the same size is refused.
        if isinstance(dim, int) or str(dim) != text:
            raise Corrupt(f"the size {text[:80]!r} is not in normal form, which is {dim}")
        dims.append(dim)
    return dims


def _zeros(type_: TensorType) -> Array:
    """Return zeros that take no memory, however large the type."""
    shape = static_shape(type_)
    # `size or 1`: an empty axis must not hide axes so long that numpy overflows on their product.
    if type_.dtype.bits * math.prod(size or 1 for size in shape) > 8 * limits.MAX_TENSOR_BYTES:
        raise Corrupt(f"a tensor has at most {limits.MAX_TENSOR_BYTES} bytes, not {type_}")
    return np.broadcast_to(np.zeros((), type_.dtype.numpy), shape)


def _pick(table: Sequence[_T], i: int, what: str) -> _T:
    # Indices are unsigned on the wire or computed to be >= 0; a negative one would read from the
    # end.
    if i >= len(table):
        raise Corrupt(f"{what} {i} does not exist, the module has {len(table)}")
    return table[i]


def _at_most(limit: int, items: Sequence[Any], what: str) -> None:
    if len(items) > limit:
        raise Corrupt(f"{len(items)} {what}, at most {limit} are read")


def _name(text: str) -> str:
    if not text or not text.isprintable() or len(text.encode()) > limits.MAX_NAME_BYTES:
        raise Corrupt(f"a name has 1 to {limits.MAX_NAME_BYTES} printable bytes, got {text[:80]!r}")
    return text


def _string(text: str) -> str:
    if len(text.encode()) > limits.MAX_STRING_BYTES:
        raise Corrupt(f"a string has at most {limits.MAX_STRING_BYTES} bytes")
    return text


def _unique(pairs: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    items: dict[str, _T] = {}
    for name, item in pairs:
        if name in items:
            raise Corrupt(f"two functions, entries or state tensors are named {name!r}")
        items[name] = item
    return items

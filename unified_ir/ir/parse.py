"""Read the text form back: `parse_function(function_text(f))` has the same text and bytes.

A constant shown only by its digest is looked up among the arrays passed in. Text is untrusted:
size, nodes and nesting are limited as in `module.pb`, and every error names the line. As with a
file, types are not verified until `ops.check` has inferred them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.ir import dims, limits
from triplane.unified_ir.ir.arrays import static_shape
from triplane.unified_ir.ir.graph import (
    NO_META,
    Array,
    AttrValue,
    Function,
    Meta,
    Node,
    OpId,
    Split,
    Value,
)
from triplane.unified_ir.ir.split import checked_split
from triplane.unified_ir.ir.text import DIGEST_DIGITS, MAX_SHOWN_ELEMENTS, digest_of, place_of
from triplane.unified_ir.ir.types import (
    DTYPES,
    MAX_RANK,
    DType,
    OptionalType,
    SequenceType,
    TensorType,
    string,
    type_of,
)

MAX_TEXT_CHARS: Final = 16 << 20

_T = TypeVar("_T")
# The alternatives are disjoint, so a match takes time linear in untrusted text.
_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_WORD: Final = r"[A-Za-z_][A-Za-z0-9_./*-]*"
_NAME: Final = re.compile(rf"{_STRING}|{_WORD}")
_VALUE: Final = re.compile(rf"%(?:(\d+)|({_STRING}|{_WORD}))")
_TYPE: Final = re.compile(r"([a-z0-9]+)\[([^\][]*)\]")
_WRAPPED: Final = re.compile(r"(seq|optional)\(")
_WORD_ONLY: Final = re.compile(r"[a-z0-9]+")
_INT: Final = re.compile(r"-?\d+", re.ASCII)
_FLOAT: Final = re.compile(r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf)|nan", re.ASCII)
_ELEMENT: Final = re.compile(rf"{_STRING}|[^,}}\"]+")
_OP: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*)")
_PLACE: Final = re.compile(r"  # (.*)$")


def parse_function(text: str, constants: Iterable[Array] = ()) -> Function:
    """Return the function in `text`; `constants` holds the arrays that it shows by digest only.

    Raise InvalidInput, with the line, for anything that `function_text` would not write.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidInput(f"a text has at most {MAX_TEXT_CHARS} characters, got {len(text)}")
    # The key has the form in which `text` shows a constant that is too long to print.
    known = {f"{type_of(a)} {digest_of(a)}": a for a in constants}
    reader = _Reader(text.replace("\r\n", "\n").rstrip("\n").split("\n"), known)
    try:
        reader.ops()
        function = reader.function("function")
        if reader.more():
            raise InvalidInput("unexpected text after the last '}'")
    except (InvalidInput, Corrupt) as error:
        raise InvalidInput(f"line {reader.at}: {error}") from error
    return function


class _Line:
    """Reads one line from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def skip(self, literal: str) -> bool:
        """Read `literal` if it comes next; return whether it did."""
        is_next = self.text.startswith(literal, self.at)
        self.at += len(literal) * is_next
        return is_next

    def need(self, literal: str) -> None:
        """Read `literal`, which must come next."""
        if not self.skip(literal):
            raise InvalidInput(f"expected {literal!r} at {self.rest!r}")

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Read text that matches the pattern."""
        match = pattern.match(self.text, self.at)
        if match is None:
            raise InvalidInput(f"expected {what} at {self.rest!r}")
        self.at = match.end()
        return match

    def list(self, end: str, read: Callable[[_Line], _T]) -> list[_T]:
        """Read items separated by a comma and a space up to `end`."""
        items: list[_T] = []
        while not self.skip(end):
            if items:
                self.need(", ")
            items.append(read(self))
            if len(items) > limits.MAX_OPERANDS:
                raise InvalidInput(f"a list has at most {limits.MAX_OPERANDS} items")
        return items

    @property
    def rest(self) -> str:
        """The beginning of the unread text."""
        return self.text[self.at : self.at + 40]


class _Reader:
    """Reads the lines of one text; `at` counts those already read."""

    def __init__(self, lines: list[str], constants: Mapping[str, Array]) -> None:
        self.lines = lines
        self.constants = constants
        self.at = 0
        self.nodes = 0
        self.since: dict[str, int] = {}

    def more(self) -> bool:
        """Return whether a line is left."""
        return self.at < len(self.lines)

    def line(self) -> _Line:
        """Return the next line without its indent."""
        if not self.more():
            raise InvalidInput("the text ends inside a function")
        self.at += 1
        return _Line(self.lines[self.at - 1].lstrip(" "))

    def ops(self) -> None:
        """Read the first line: each operator's version."""
        if not (self.more() and self.lines[0].startswith("ops ")):
            return
        for item in self.line().text.split(" ")[1:]:
            op, _, since = item.partition("@")
            if not _OP.fullmatch(op) or not _INT.fullmatch(since) or op in self.since:
                raise InvalidInput(f"expected OPERATOR@VERSION, each operator once, got {item!r}")
            self.since[op] = _bounded(since, 2**32)

    def function(self, kind: str, depth: int = 0) -> Function:
        """Read a function from its head to its closing brace."""
        if depth > limits.MAX_REGION_DEPTH:
            raise InvalidInput(f"regions nest deeper than {limits.MAX_REGION_DEPTH}")
        head = self.line()
        head.need(f"{kind} ")
        name = _name(head)
        head.need("(")
        params: list[Value] = []
        if not head.skip(") -> ("):
            params, head = self.params(), self.line()
            head.need(") -> (")
        results = head.list(") {", _typed_name)
        values = {_key(p.name): p for p in params}
        nodes, returned = self.body(values, len(params), depth)
        if len(returned) != len(results):
            raise InvalidInput(f"{len(returned)} values returned for {len(results)} results")
        for (result, type_), value in zip(results, returned, strict=True):
            if value.type != type_:
                raise InvalidInput(f"result {result!r} is {type_}, {value.type} is returned")
        names = tuple(n for n, _ in results)
        return Function(name, tuple(params), tuple(returned), names, tuple(nodes))

    def params(self) -> list[Value]:
        """Read one parameter per line, up to the one without a comma."""
        params: list[Value] = []
        while len(params) <= limits.MAX_OPERANDS:
            line = self.line()
            line.need("%")
            name, type_ = _typed_name(line)
            params.append(Value(type_, name))
            if not line.skip(","):
                return params
        raise InvalidInput(f"a function has at most {limits.MAX_OPERANDS} parameters")

    def body(
        self, values: dict[str, Value], count: int, depth: int
    ) -> tuple[list[Node], list[Value]]:
        """Read nodes up to the line of results; their outputs are added to `values`."""
        nodes: list[Node] = []
        while True:
            line = self.line()
            if line.skip("return"):
                returned = _returned(line, values)
                self.line().need("}")
                return nodes, returned
            outputs = line.list(" = ", _output)
            nodes.append(self.node(line, tuple(v for _, v in outputs), values, depth))
            for written, value in outputs:
                # Numbers are redundant; checking them catches a line that was deleted or moved by
                # hand.
                if written != str(count):
                    raise InvalidInput(f"value %{written} is number {count}")
                values[written] = value
                count += 1

    def node(
        self, line: _Line, outputs: tuple[Value, ...], values: Mapping[str, Value], depth: int
    ) -> Node:
        """Read a node after its outputs."""
        self.nodes += 1
        if self.nodes > limits.MAX_NODES:
            raise InvalidInput(f"a text has at most {limits.MAX_NODES} nodes")
        op = self.op(line.match(_OP, "an operator")[1])
        line.need("(")
        inputs = line.list(")", lambda at: None if at.skip("none") else _value(at, values))
        attrs: dict[str, AttrValue] = {}
        opened = line.skip(" {")
        # " {" opens attributes or, at the end of the line or before a place, the regions.
        if opened and line.rest and not line.rest.startswith("  # "):
            attrs = dict(line.list("}", self.attribute))
            opened = line.skip(" {")
        strategy: Split = ()
        if not opened and line.skip(" shard("):
            strategy = checked_split(line.list(")", _slices), inputs)
            opened = line.skip(" {")
        meta = _place(line)
        regions = self.regions(depth) if opened else ()
        return Node(op, tuple(inputs), outputs, attrs, regions, meta, strategy)

    def op(self, text: str) -> OpId:
        """Return an operator with its version from the first line."""
        if text not in self.since:
            raise InvalidInput(f"the first line has no version of {text!r}")
        domain, _, name = text.rpartition(".")
        return OpId(domain, name, self.since[text])

    def regions(self, depth: int) -> tuple[Function, ...]:
        """Read regions up to the closing brace of their node."""
        regions: list[Function] = []
        while self.more() and self.lines[self.at].lstrip(" ") != "}":
            regions.append(self.function("region", depth + 1))
        self.line().need("}")
        return tuple(regions)

    def attribute(self, line: _Line) -> tuple[str, AttrValue]:
        """Read `name=value`."""
        name = _name(line)
        line.need("=")
        return name, self.value(line)

    def value(self, line: _Line) -> AttrValue:
        """Read an attribute's value."""
        if line.skip("("):
            return _tuple(line)
        # A quoted text comes first: it may contain what the patterns below look for.
        if line.text.startswith('"', line.at):
            return _name(line)
        if _WRAPPED.match(line.text, line.at):
            return _type(line)
        typed = _TYPE.match(line.text, line.at)
        if typed is not None:
            constant = line.text.startswith(" ", typed.end())
            return self.array(line) if constant else _type(line)
        word = line.match(re.compile(r"[^,}]+"), "a value")[0]
        return DTYPES[word] if word in DTYPES else _number(word)

    def array(self, line: _Line) -> Array:
        """Read a constant: type and elements, or type and digest."""
        type_ = _type(line)
        shape = static_shape(type_)
        line.need(" ")
        if line.skip("#"):
            digest = line.match(re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}"), "a digest")[0]
            held = self.constants.get(f"{type_} {digest}")
            if held is None:
                raise InvalidInput(f"no constant {type_} with the digest {digest} was passed in")
            return held
        line.need("{")
        items = line.list("}", lambda at: at.match(_ELEMENT, "an element")[0])
        n = dims.product(list(shape))
        if len(items) != n or len(items) > MAX_SHOWN_ELEMENTS:
            raise InvalidInput(f"{type_} has {n} elements, the text has {len(items)}")
        # Sized by the items, of which there are at most MAX_SHOWN_ELEMENTS, not by the declared
        # shape.
        array = np.empty(len(items), type_.dtype.numpy)
        array[:] = [_element(i, type_.dtype) for i in items]
        array = array.reshape(shape)
        array.flags.writeable = False
        return array


def _element(text: str, dtype: DType) -> int | float | bool | str:
    if dtype == string:
        if not text.startswith('"'):
            raise InvalidInput(f"a string is written in quotes, got {text[:40]!r}")
        return _unquoted(text)
    if dtype.name == "bool":
        if text not in {"true", "false"}:
            raise InvalidInput(f"a bool is true or false, got {text!r}")
        return text == "true"
    if dtype.is_float:
        if not _FLOAT.fullmatch(text):
            raise InvalidInput(f"expected a number, got {text!r}")
        return float(text)
    low = 0 if dtype.kind == "uint" else -(2 ** (dtype.bits - 1))
    number = _bounded(text, 2**64)
    if not low <= number < low + 2**dtype.bits:
        raise InvalidInput(f"{number} is out of range for {dtype}")
    return number


def _tuple(line: _Line) -> AttrValue:
    """Read items of one kind up to the closing parenthesis; sizes may contain parentheses too."""
    items: list[str] = []
    while not line.skip(")"):
        if line.skip(",)"):
            break
        if items:
            line.need(", ")
        items.append(_item(line))
    if items and all(i.startswith('"') for i in items):
        return tuple(_unquoted(i) for i in items)
    # Floats are written with a point, an exponent or as a word, which tells them from sizes.
    if items and all(_FLOAT.fullmatch(i) and not _INT.fullmatch(i) for i in items):
        return tuple(float(i) for i in items)
    return tuple(_bounded(i, 2**64) if _INT.fullmatch(i) else dims.parse(i) for i in items)


def _item(line: _Line) -> str:
    """Return the text up to the comma or parenthesis that ends an item of a tuple."""
    if line.text.startswith('"', line.at):
        return line.match(_NAME, "a text")[0]
    # A size such as (N+1)//2 has parentheses of its own, so only a comma or parenthesis outside
    # them ends the item.
    start, open_ = line.at, 0
    for at in range(start, len(line.text)):
        c = line.text[at]
        if c in ",)" and not open_:
            line.at = at
            return line.text[start:at]
        open_ += (c == "(") - (c == ")")
    raise InvalidInput(f"expected ')' after {line.rest!r}")


def _number(text: str) -> int | float:
    if _INT.fullmatch(text):
        return _bounded(text, 2**64)
    if _FLOAT.fullmatch(text):
        return float(text)
    raise InvalidInput(f"expected a number, a text, a tuple or a tensor, got {text[:40]!r}")


def _bounded(text: str, limit: int) -> int:
    # 21 characters hold any 64-bit number with its sign. int() takes quadratic time in the digits
    # and raises ValueError above 4300 of them.
    if not _INT.fullmatch(text) or len(text) > 21 or not -limit < int(text) < limit:
        raise InvalidInput(f"expected a whole number below {limit}, got {text[:40]!r}")
    return int(text)


def _typed_name(line: _Line) -> tuple[str, TensorType]:
    name = _name(line)
    line.need(": ")
    return name, _type(line)


def _output(line: _Line) -> tuple[str, Value]:
    written = line.match(_VALUE, "a value")[1]
    line.need(": ")
    return written or "", Value(_type(line))


def _type(line: _Line) -> TensorType:
    """Read the type of a value; a sequence may have only an element type."""
    wrapped = _WRAPPED.match(line.text, line.at)
    if wrapped is None:
        return _tensor_type(line)
    line.at = wrapped.end()
    type_: TensorType
    if wrapped[1] == "optional":
        type_ = OptionalType(_type(line))
    elif _TYPE.match(line.text, line.at):
        type_ = SequenceType(_tensor_type(line))
    else:
        dtype = _dtype(line.match(_WORD_ONLY, "a type")[0])
        type_ = SequenceType(dtype, empty=line.skip(" none"))
    line.need(")")
    return type_


def _dtype(name: str) -> DType:
    if name not in DTYPES:
        raise InvalidInput(f"no element type {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _tensor_type(line: _Line) -> TensorType:
    match = line.match(_TYPE, "a type")
    dtype = _dtype(match[1])
    sizes = match[2].split(",") if match[2] else []
    if len(sizes) > MAX_RANK:
        raise InvalidInput(f"a tensor has at most {MAX_RANK} axes, got {len(sizes)}")
    return TensorType(dtype, tuple(_size(s) for s in sizes))


# A text has thousands of types but only a few different sizes.
@lru_cache(maxsize=4096)
def _size(text: str) -> dims.Dim:
    return dims.as_dim(dims.parse(text))


def _slices(line: _Line) -> tuple[int, ...]:
    """Return the slices of one operand."""
    line.need("(")
    return tuple(line.list(")", lambda at: _bounded(at.match(_INT, "a number")[0], 2**32)))


def _key(name: str) -> str:
    """Return the key of a parameter in `values`; the keys of other values are numbers."""
    return f"%{name}"


def _returned(line: _Line, values: Mapping[str, Value]) -> list[Value]:
    results: list[Value] = []
    while line.rest:
        line.need(", " if results else " ")
        results.append(_value(line, values))
    return results


def _value(line: _Line, values: Mapping[str, Value]) -> Value:
    match = line.match(_VALUE, "a value")
    key = match[1] or _key(_plain(match[2]))
    if key not in values:
        raise InvalidInput(f"value {match[0]} is not computed before it is used")
    return values[key]


def _name(line: _Line) -> str:
    return _plain(line.match(_NAME, "a name")[0])


def _plain(text: str) -> str:
    return _unquoted(text) if text.startswith('"') else text


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise InvalidInput(f"expected a quoted text, got {text[:40]!r}") from None


def _place(line: _Line) -> Meta:
    if not line.rest:
        return NO_META
    try:
        meta = place_of(line.match(_PLACE, "a place after '  # '")[1])
    except ValueError as error:  # a bad quotation, or a line number of thousands of digits
        raise InvalidInput(f"expected a place, got {line.text[-40:]!r}") from error
    if meta.location is not None:
        _bounded(str(meta.location.line), 2**32)
    return meta

"""`Build`: a function under construction.

Invariant: a node is added to the innermost `Build` entered with `with`. An operand that belongs to
an enclosing build becomes an explicit operand of the region (a capture); an operand of any other
build is refused. In eager mode each value also has its array, computed while recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Self

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import OPEN_PREFIX, Dim, Expr
from triplane.unified_ir.ir.graph import (
    Array,
    AttrValue,
    Function,
    Location,
    Meta,
    Node,
    Split,
    Value,
)
from triplane.unified_ir.ir.types import DType, TensorType, TypeMismatch, as_dtype, float32
from triplane.unified_ir.ops import signatures
from triplane.unified_ir.ops.infer import check_groups, in_type_group, infer
from triplane.unified_ir.ops.recorder import stack
from triplane.unified_ir.ops.row import DOMAIN, OPEN, Known, Op, OpCall, Table
from triplane.unified_ir.ops.sharding import checked_strategy, sharded_call
from triplane.unified_ir.ops.source import user_location
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.ops.values import bind

MAX_SHARED_CONSTANT_BYTES: Final = 64
"""Constants up to this size are stored once per graph."""

MAX_SIZES: Final = 64
"""A longer constant never holds sizes: a shape has at most 16 axes, bounds two per axis."""

RunNode = Callable[
    [Table, Node, Sequence[Array | None], Mapping[str, int], Sequence[Known | None]],
    tuple[Array, ...],
]


class Build:
    """A function under construction."""

    def __init__(
        self,
        table: Table,
        name: str = "main",
        *,
        run: RunNode | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.table = table
        self.name = name
        self.arrays: dict[Value, Array] | None = None if run is None else {}
        self.run = run
        self.sizes: dict[str, int] = dict(sizes or {})
        self.params: list[Value] = []
        self.nodes: list[Node] = []
        self.captures: dict[Value, Tensor] = {}
        self.captured: list[Tensor] = []
        self.effects: dict[str, Tensor] = {}
        self.scope = ""
        self.meta: Meta | None = None
        self._known: dict[Value, Known] = {}
        self._constants: dict[Any, Tensor] = {}

    def __enter__(self) -> Self:
        # A context variable with an immutable tuple: threads and tasks that record at the same time
        # do not see each other's builds.
        stack.set((*stack.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        stack.set(stack.get()[:-1])

    def param(self, name: str, type_: TensorType, array: Array | None = None) -> Tensor:
        """Add a parameter; `array` is its value in eager mode."""
        value = Value(type_, name)
        self.params.append(value)
        if self.arrays is not None and array is not None:
            self.arrays[value] = array
            bind(self.sizes, type_, array)
        return Tensor(self, value)

    def constant(self, array: Any, dtype: DType | None = None) -> Tensor:
        """Return `array` as a constant; small equal ones are stored once."""
        host = _host_array(array, dtype)
        small = host.nbytes <= MAX_SHARED_CONSTANT_BYTES
        # By bytes: 0.0 and -0.0 are equal as numbers but not the same constant.
        key = (host.dtype, host.shape, host.tobytes() if small else b"")
        if small and key in self._constants:
            return self._constants[key]
        tensor = self.apply(self.table["", "Constant"], (), {"value": host})[0]
        self._known[tensor.value] = host
        if small:
            self._constants[key] = tensor
        return tensor

    def dims(self, dims: Sequence[Dim]) -> Tensor:
        """Return sizes as an int64 vector, which is a constant if none is symbolic."""
        if all(isinstance(d, int) for d in dims):
            return self.constant(np.array(dims, np.int64).reshape(len(dims)))
        vector = self.apply(self.table[DOMAIN, "Dims"], (), {"dims": tuple(dims)})[0]
        self._known[vector.value] = tuple(dims)
        return vector

    def known(self, tensor: Tensor) -> Known | None:
        """Return the contents of a constant or size vector, or None if they are not known yet."""
        if tensor.build is not self:
            return tensor.build.known(tensor)
        return self._known.get(tensor.value)

    def know(self, tensor: Tensor, contents: Known) -> None:
        """Record the contents of a value of this graph; the caller guarantees them."""
        self._known[tensor.value] = contents

    def as_operand(self, x: Any, dtype: DType | None = None) -> Tensor:
        """Return `x` as a tensor of this build: itself, a captured operand, or a constant."""
        if not isinstance(x, Tensor):
            # Anything may stand for a tensor through this method, such as a parameter of a Cell.
            if hasattr(x, "__tensor__"):
                return self.as_operand(x.__tensor__())
            if isinstance(x, Expr):
                return self.dims([x]).reshape(()).cast(dtype or as_dtype("int64"))
            return self.constant(x, dtype)
        if x.build is self:
            return x
        if x.value in self.captures:
            return self.captures[x.value]
        known = x.build.known(x)
        # Constants and sizes of an enclosing graph are repeated here instead of captured, so that
        # inference in the region knows their contents (a Reshape needs its sizes).
        if isinstance(known, np.ndarray):
            return self.constant(known)
        if isinstance(known, tuple):
            with self:
                return self.dims(known).reshape(x.shape)
        if not any(x.build is b for b in stack.get()):
            raise InvalidInput(
                f"{x!r} belongs to the graph {x.build.name!r}, which is not being recorded here; "
                "pass it as an argument instead of keeping it across calls"
            )
        array = None if x.build.arrays is None else x.build.arrays[x.value]
        inner = self.param(f"capture{len(self.captured)}", x.type, array)
        self.captures[x.value] = inner
        self.captured.append(x)
        return inner

    def position(self) -> tuple[int, ...]:
        """Return node counts from the outermost graph inwards, which differ at each place."""
        return tuple(len(b.nodes) for b in stack.get())

    def effect(self, name: str, x: Tensor) -> None:
        """Add a named result, such as a summary, to those that the function returns."""
        if len(stack.get()) > 1:
            raise InvalidInput(
                f"{name!r} is recorded inside a branch, a loop or a differentiated function, "
                "where it would have no single value; return the tensor and record it outside"
            )
        if name in self.effects:
            raise InvalidInput(f"{name!r} is recorded twice; give each summary its own name")
        self.effects[name] = x

    def apply(
        self,
        row: Op,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
        *,
        regions: tuple[Function, ...] = (),
        outputs: int = 1,
        strategy: Split = (),
    ) -> tuple[Tensor, ...]:
        """Add one node of `row`: convert operands, check attributes, infer types."""
        meta = self.meta or Meta(user_location(), self.scope)
        try:
            operands = self._operands(row, inputs)
            types = tuple(None if x is None else x.type for x in operands)
            known = tuple(None if x is None else self.known(x) for x in operands)
            normal = self._opened(row, types, known, row.normal_attrs(attrs), regions, outputs)
            inferred = infer_types(
                self.table, row, types, known, normal, regions=regions, outputs=outputs
            )
        except InvalidInput as error:
            raise _located(error, meta.location, meta.scope) from None
        values = tuple(None if x is None else x.value for x in operands)
        node = Node(row.id, values, tuple(map(Value, inferred)), normal, regions, meta, strategy)
        tensors = self.append(node)
        note_contents(row, node, self._known)
        return tensors

    def sharded(
        self,
        function: Callable[..., Any],
        name: str,
        strategy: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call an operator whose node gets a strategy; see `ops.sharding`."""
        try:
            split = checked_strategy(strategy, name)
            return sharded_call(self, function, name, split, args, kwargs)
        except InvalidInput as error:
            raise _located(error, user_location(), self.scope) from None

    def _opened(
        self,
        row: Op,
        types: tuple[TensorType | None, ...],
        known: tuple[Known | None, ...],
        attrs: dict[str, AttrValue],
        regions: tuple[Function, ...],
        outputs: int,
    ) -> dict[str, AttrValue]:
        """Add a name for each size that only the data decide to the attributes."""
        if not row.data_dependent_dims or OPEN in attrs:
            return attrs
        check_groups(row, types)
        call = OpCall(row, types, known, row.full_attrs(attrs), regions, outputs)
        names = self.open_names(row.open_count(call))
        return dict(sorted({**attrs, OPEN: names}.items())) if names else attrs

    def open_names(self, count: int) -> tuple[str, ...]:
        """Return names for sizes that the data of the next node decide."""
        place = "_".join(map(str, self.position()))
        return tuple(f"{OPEN_PREFIX}{place}_{k}" for k in range(count))

    def _operands(self, row: Op, inputs: Sequence[Any]) -> list[Tensor | None]:
        """Return operands as tensors; a Python number takes the element type of its type group.

        So does a float64 array (numpy's default) next to tensors that are all float32.
        """
        fewest, most = row.arity
        # One call has one form, whether or not it names trailing operands that are absent.
        while inputs and inputs[-1] is None and len(inputs) > fewest:
            inputs = inputs[:-1]
        if not fewest <= len(inputs) <= most:
            raise InvalidInput(
                f"{row} takes {signatures.counted(row)}, got {len(inputs)}: "
                f"{row}{signatures.signature(row)}"
            )
        groups: dict[str, DType] = {}
        inputs = [_narrowed(row, i, inputs) for i in range(len(inputs))]
        for i, x in enumerate(inputs):
            # Tensors and arrays decide the element type of their group; Python numbers adapt to it.
            if isinstance(x, (Tensor, np.ndarray, np.generic)):
                groups.setdefault(row.letter(i), as_dtype(x.dtype))
        return [
            None
            if x is None
            else self.as_operand(x, _scalar_dtype(row, x, groups.get(row.letter(i))))
            for i, x in enumerate(inputs)
        ]

    def append(self, node: Node) -> tuple[Tensor, ...]:
        """Add a finished node, and evaluate it in eager mode."""
        self.nodes.append(node)
        if self.arrays is not None and self.run is not None:
            operands = [None if v is None else self.arrays[v] for v in node.inputs]
            known = [None if v is None else self._known.get(v) for v in node.inputs]
            results = self.run(self.table, node, operands, self.sizes, known)
            for value, array in zip(node.outputs, results, strict=True):
                self.arrays[value] = array
                bind(self.sizes, value.type, array)
        return tuple(Tensor(self, v) for v in node.outputs)

    def finish(self, results: Mapping[str, Tensor | Any]) -> Function:
        """Return the immutable function with these named results."""
        # Results may be captures or constants, which are added to this build as parameters or
        # nodes.
        with self:
            values = [self.as_operand(r).value for r in results.values()]
        return Function(
            self.name, tuple(self.params), tuple(values), tuple(results), tuple(self.nodes)
        )

    @contextmanager
    def at(self, meta: Meta) -> Iterator[None]:
        """Within the block, nodes carry `meta`, the place of the forward node they derive from."""
        before, self.meta = self.meta, meta
        try:
            yield
        finally:
            self.meta = before


def _located(error: InvalidInput, location: Location | None, scope: str) -> InvalidInput:
    # Bodies apply further rows; without the mark, each level would add the place once more.
    if location is None or getattr(error, "located", False):
        return error
    located = type(error)(f"{error} (at {location}{f', in {scope}' if scope else ''})")
    located.located = True  # type: ignore[attr-defined]
    return located.with_traceback(error.__traceback__)


def _host_array(x: Any, dtype: DType | None) -> Array:
    try:
        # numpy would take float64, and so would every operator that meets the constant.
        if dtype is None and type(x) is float:
            dtype = as_dtype("float32")
        array = np.asarray(x, dtype=dtype.numpy if dtype else None)
        return array.astype(np.object_) if array.dtype.kind == "U" else array
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(f"{x!r} does not fit {dtype or 'an array'}: {error}") from None


def _narrowed(row: Op, i: int, inputs: Sequence[Any]) -> Any:
    """Return operand `i`; a float64 array becomes float32 if all tensors of its group are that."""
    x = inputs[i]
    if not isinstance(x, (np.ndarray, np.generic)) or x.dtype != np.float64:
        return x
    if not in_type_group(row, i):
        return x
    letter = row.letter(i)
    others = {
        y.dtype for k, y in enumerate(inputs) if isinstance(y, Tensor) and row.letter(k) == letter
    }
    return x.astype(np.float32) if others == {float32} else x


def _scalar_dtype(row: Op, x: Any, group: DType | None) -> DType | None:
    if isinstance(x, (Tensor, np.ndarray, np.generic)):
        return None
    if isinstance(x, Expr):
        return group
    kind = np.asarray(x).dtype.kind
    if kind == "f":
        if group is not None and not group.is_float:
            raise TypeMismatch(f"{row} mixes {group} with the float {x}; cast the tensor first")
        return group or as_dtype("float32")
    return group or as_dtype("bool" if kind == "b" else "int64")


def infer_types(
    table: Table,
    row: Op,
    types: tuple[TensorType | None, ...],
    known: Sequence[Known | None],
    attrs: Mapping[str, AttrValue],
    *,
    regions: tuple[Function, ...],
    outputs: int,
) -> tuple[TensorType, ...]:
    """Infer the types of a node's outputs: by its row's rule, its body, or ONNX."""
    # A rule is preferred to the body because it costs less and gives a clearer message.
    if row.infer is not None or row.body is None:
        return infer(row, types, known, attrs, regions, outputs)
    check_groups(row, types)
    body = body_function(table, row, types, attrs, outputs, known)
    return tuple(v.type for v in body.results)


def body_function(
    table: Table,
    row: Op,
    types: tuple[TensorType | None, ...],
    attrs: Mapping[str, AttrValue],
    outputs: int,
    known: Sequence[Known | None],
) -> Function:
    """Return a row's body as a function of its present operands, for the given types.

    `known`: what is known of the operands' contents, sizes and axes among them. A body may need
    them, so no caller can leave them out.
    """
    contents = tuple(
        None if k is None or (isinstance(k, np.ndarray) and k.size > MAX_SIZES) else _by_content(k)
        for k in known
    )
    frozen = tuple((name, _by_content(attrs[name])) for name in sorted(attrs))
    # Tables are not hashable. Their id is safe as a key because the entry keeps the table alive.
    return _body_function(_Keyed(id(table), table), row, types, frozen, outputs, contents)


@dataclass(frozen=True, slots=True)
class _Keyed:
    """A value that is compared and hashed by its key."""

    key: Any
    value: Any = field(compare=False)


def _by_content(value: AttrValue | Known) -> _Keyed:
    if isinstance(value, np.ndarray):
        return _Keyed((value.dtype.str, value.shape, value.tobytes()), value)
    return _Keyed(value, value)


# Inference, gradient, batching and emission of one call all need the same body.
@lru_cache(maxsize=2048)
def _body_function(
    table: _Keyed,
    row: Op,
    types: tuple[TensorType | None, ...],
    attrs: tuple[tuple[str, _Keyed], ...],
    outputs: int,
    known: tuple[_Keyed | None, ...],
) -> Function:
    assert row.body is not None
    build = Build(table.value, str(row))
    with build:
        operands = [None if t is None else build.param(f"x{i}", t) for i, t in enumerate(types)]
        for x, contents in zip(operands, known, strict=False):
            if x is not None and contents is not None:
                build.know(x, contents.value)
        returned = row.body(*operands, **row.full_attrs({k: v.value for k, v in attrs}))
        results: Sequence[Tensor] = (returned,) if isinstance(returned, Tensor) else returned
        named = {f"y{i}": r for i, r in zip(range(outputs), results, strict=False)}
    # A size that only the data of an inner node decide must not leave the body: callers of the
    # cached function would share its name.
    opened = {n for node in build.nodes for n in node.attrs.get(OPEN, ())}  # type: ignore[union-attr]
    if any(opened & r.type.symbols for r in named.values()):
        raise InvalidInput(
            f"the body of {row} has results whose sizes only the data decide: its row needs "
            "`data_dependent_dims` and a rule in `infer`"
        )
    return build.finish(named)


def expansion(table: Table, node: Node, contents: Mapping[Value, Known]) -> Function | None:
    """Return what a node means in other nodes, as a function of its present operands.

    None for a primitive. `contents`: what `note_contents` recorded for the nodes before it; see
    `all_contents`.
    """
    row = table[node.op.domain, node.op.name]
    if row.inline_region:
        return node.regions[0]
    if row.body is None:
        return None
    types = tuple(None if v is None else v.type for v in node.inputs)
    known = [None if v is None else contents.get(v) for v in node.inputs]
    return body_function(table, row, types, node.attrs, len(node.outputs), known)


def note_contents(row: Op, node: Node, contents: dict[Value, Known]) -> None:
    """Record the contents that a node makes known: constants, sizes, and rearranged sizes."""
    value = node.attrs.get("value")
    if row.name == "Constant" and isinstance(value, np.ndarray):
        # Only scalars and short vectors can be axes, sizes or bounds.
        if value.ndim <= 1 and value.size <= MAX_SIZES:
            contents[node.outputs[0]] = value
    elif (row.domain, row.name) == (DOMAIN, "Dims"):
        contents[node.outputs[0]] = node.attrs["dims"]  # type: ignore[assignment]
    elif row.preserves_elements and node.inputs[0] is not None:
        elements = contents.get(node.inputs[0])
        if isinstance(elements, tuple):
            contents[node.outputs[0]] = elements


def all_contents(table: Table, function: Function) -> dict[Value, Known]:
    """Return the known contents of a function's values, as inference saw them."""
    contents: dict[Value, Known] = {}
    for node in function.nodes:
        note_contents(table[node.op.domain, node.op.name], node, contents)
    return contents


def region(
    name: str, types: Sequence[TensorType], f: Callable[[list[Tensor]], Any]
) -> tuple[Build, Any]:
    """Record `f` on parameters of these types as an unfinished graph inside the current one."""
    outer = stack.get()[-1]
    build = Build(outer.table, name)
    build.scope = outer.scope
    build.meta = outer.meta
    with build:
        results = f([build.param(f"x{i}", t) for i, t in enumerate(types)])
    return build, results

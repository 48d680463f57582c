"""`Op`, the row of one operator. Everything that iterates operators iterates a table of rows.

A row is a *primitive* (its gradient is a rule written in operators) or a *body* (written in other
rows, from which gradient, kernel and lowering are derived). A row in domain "" means the ONNX
operator of that name in its newest definition up to ai.onnx 26; operands, attributes, defaults and
shape inference then come from ONNX's own schema unless the row says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from onnx import TensorProto, defs, helper

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, symbol
from triplane.unified_ir.ir.graph import Array, AttrValue, Function, Node, OpId, Value
from triplane.unified_ir.ir.types import (
    BY_ONNX,
    DType,
    OptionalType,
    SequenceType,
    TensorType,
    float32,
    float64,
)
from triplane.unified_ir.ops import signatures
from triplane.unified_ir.ops.emission import Emit
from triplane.unified_ir.ops.lowering import Rule
from triplane.unified_ir.ops.recorder import recorder, with_shard

if TYPE_CHECKING:
    from triplane.unified_ir.ops.tensor import Tensor

MEANING_OPSET: Final = 26
"""Newest ai.onnx version whose definitions the IR adopts."""

DOMAIN: Final = "triplane"
"""Domain of operators that ONNX lacks; each lowers to ONNX operators."""

OPEN: Final = "open"
"""Attribute in which a node names the sizes that depend on data (`Op.data_dependent_dims`)."""


class OpKind(Enum):
    """How a row treats the elements of its operands; passes ask for this, not for names."""

    ELEMENTWISE = auto()
    """Each element on its own, operands broadcast."""
    COMPARISON = auto()
    """Like `ELEMENTWISE`, with a boolean result: no gradient flows."""
    REDUCTION = auto()
    """Elements along axes combined into one, or into running results."""
    MOVEMENT = auto()
    """The elements of the data operand, arranged, repeated, padded, resized or converted."""
    INDEXING = auto()
    """Elements read or written at positions that an operand gives."""
    CONTRACTION = auto()
    """Sums of products over shared axes: matrix products and convolutions."""
    WINDOW = auto()
    """Windows over a plane, and samples between its points."""
    NORMALIZATION = auto()
    ATTENTION = auto()
    RECURRENT = auto()
    LOSS = auto()
    RANDOM = auto()
    SOURCE = auto()
    """Constants, ranges and shapes, which depend on sizes and attributes only."""
    SIGNAL = auto()
    QUANTIZATION = auto()
    CONTROL = auto()
    """Rows over regions."""
    SEQUENCE = auto()
    """Sequences and optionals."""
    DATA = auto()
    """Strings and image files."""


class IntegerForm(Enum):
    """How a row runs on int8 tensors; a row without an integer form runs in float."""

    PRODUCT = auto()
    RECURRENT = auto()
    """Integer weights, where the runtime has such an operator; the other tensors are floats."""
    COPY = auto()
    """Elements keep their values, so they keep the scale."""
    PART = auto()
    """Some elements keep their values; useful only before an integer tensor."""
    MIX = auto()
    """onnxruntime has an integer kernel; useful only between integer tensors."""
    CLAMP = auto()
    IN_PARTS = auto()
    """It has no kernel, but its parts (sums and products by a constant) do.

    A network of inverted residuals with HardSwish took 1.80 times as long as in float with the
    operator in float, and 1.30 times with its parts in integers.
    """


@dataclass(frozen=True, slots=True)
class Cost:
    """Arithmetic and memory traffic of a node."""

    flops: int
    bytes: int


Size = Callable[[Value], int]
"""Bytes of a value."""
DENSE_FLOPS: Final = 30
"""Arithmetic per byte of products over shared axes and of regions; a rule of thumb. Others: 1."""
_DENSE: Final = frozenset({OpKind.CONTRACTION, OpKind.RECURRENT, OpKind.CONTROL})


Known = Array | tuple[Dim, ...]
"""Known contents of an operand: a constant, or an int64 vector of dimensions."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call as inference sees it: operand types (None: absent), known contents, attributes."""

    row: Op
    types: tuple[TensorType | None, ...]
    known: tuple[Known | None, ...]
    attrs: Mapping[str, Any]
    regions: tuple[Function, ...]
    outputs: int
    open: tuple[str, ...] = ()
    """Names for sizes that depend on data."""

    def opened(self, i: int = 0) -> Dim:
        """Return the symbol of the `i`-th size of this node that only its data decide."""
        if i >= len(self.open):
            raise InvalidInput(
                f"{self.row} needs the contents of an operand when the graph is built, or a name "
                f"for each size they decide: {len(self.open)} are named"
            )
        return symbol(self.open[i])

    def type(self, i: int) -> TensorType:
        """Return the type of operand `i`, which must be present."""
        type_ = self.types[i] if i < len(self.types) else None
        if type_ is None:
            raise InvalidInput(f"{self.row} needs operand {i}; {len(self.types)} were given")
        return type_

    def has(self, i: int) -> bool:
        """Return whether operand `i` is present."""
        return i < len(self.types) and self.types[i] is not None

    def dims(self, i: int) -> tuple[Dim, ...]:
        """Return operand `i` as a vector of dimensions; refuse it if its contents are unknown."""
        known = self.known[i] if i < len(self.known) else None
        if isinstance(known, tuple):
            return known
        if known is None and self.type(i).shape == (0,):
            return ()
        if known is None:
            raise InvalidInput(
                f"{self.row} needs the contents of operand {i} when the graph is built; "
                "give a constant or sizes taken from a tensor's shape"
            )
        return tuple(int(d) for d in np.atleast_1d(known))

    def ints(self, i: int) -> tuple[int, ...]:
        """Return operand `i` as static ints; refuse it if a size is symbolic."""
        dims = self.dims(i)
        if any(isinstance(d, Expr) for d in dims):
            raise InvalidInput(f"{self.row} needs static values in operand {i}, got {dims}")
        return tuple(d for d in dims if isinstance(d, int))


Types = tuple[TensorType, ...]
Infer = Callable[[OpCall], Types]
Kernel = Callable[..., Any]
Vjp = Callable[..., Sequence["Tensor | None"]]
Body = Callable[..., "Tensor | Sequence[Tensor]"]
Pullback = Callable[..., Sequence["Tensor | None"]]
VjpWithResiduals = Callable[..., tuple[Sequence["Tensor"], Pullback]]
Batch = Callable[[Any], Sequence["Tensor"]]
"""(a `batching.BatchedCall`) -> outputs, the new axis first."""
Native = Callable[[Node, int], bool]
MakeArray = Callable[[np.random.Generator], Array]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One tested use of a row: operand makers (None: absent), attributes, how many outputs.

    `smooth` names the operands with respect to which finite differences hold; by default all
    floating-point operands of a differentiable row.
    """

    inputs: tuple[MakeArray | None, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    outputs: int = 1
    smooth: tuple[int, ...] | None = None

    def arrays(self, seed: int = 0) -> list[Array | None]:
        """Return the operands, equal for equal seeds."""
        rng = np.random.default_rng(seed)
        return [make(rng) if make else None for make in self.inputs]


@dataclass(frozen=True, slots=True)
class AttrSpec:
    """Kind and default; kinds: INT, FLOAT, STRING, INTS, FLOATS, STRINGS, TENSOR, DIMS."""

    kind: str
    default: AttrValue | None = None
    required: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Op:
    """A row of the operator table. Call it to add a node: `relu(x)`, `concat(a, b, axis=1)`.

    `vjp(g, y, *x, **attrs)` returns one cotangent per operand, None where there is none; with
    several outputs `g` and `y` are tuples. `vjp_with_residuals` replaces it where the gradient
    needs more than inputs and outputs. `body(*x, **attrs)` states the row in other rows. A row
    with none of the three is not differentiable.
    """

    name: str
    kind: OpKind
    domain: str = ""
    computes: str = ""
    """Own rows: what it returns, as a formula or in one line; ONNX's rows have ONNX's text."""
    operands: tuple[str, ...] = ()
    """Own rows: a type letter per operand, `?` optional, `*` variadic; one letter, one dtype."""
    attrs: Mapping[str, AttrSpec] = field(default_factory=dict)
    infer: Infer | None = None
    reference: Kernel | None = None
    vjp: Vjp | None = None
    body: Body | None = None
    vjp_with_residuals: VjpWithResiduals | None = None
    batch: Batch | None = None
    """How vmap applies the row to a batch (`ops/batching.py`); by default its body or a scan."""
    data_dependent_dims: int | Callable[[OpCall], int] = 0
    """How many output sizes only the data decide; each node names them (`OpCall.opened`)."""
    fixed_sizes: str = ""
    """What a call passes so that no size in the body is one that only the data decide."""
    nondeterministic: bool = False
    """Each node is its own draw: it is never merged with an equal node or folded to a constant."""
    preserves_elements: bool = False
    """The output lists the same elements as operand 0, so known sizes stay known."""
    inline_region: bool = False
    """The node means its first region applied to its operands."""
    weights: tuple[int, ...] = ()
    """Operands that training learns. If operand 0 is among them, which operand is the weight
    depends on the graph around the node."""
    buffers: tuple[int, ...] = ()
    """Operands that are state without a gradient: running statistics, initial states."""
    settings: tuple[int, ...] = ()
    """Floating-point operands that configure the operator; they are never learned."""
    total: bool = False
    """It never fails, so it may run where the program would not have run it."""
    integer_form: IntegerForm | None = None
    cost: Callable[[Node, Size], Cost] | None = None
    """By default every byte is read or written once, with the usual arithmetic of the kind."""
    half_form: Callable[[Node], tuple[Op, dict[str, AttrValue]] | None] | None = None
    """The row and attributes that compute the same where products are of 16 bits, as one node;
    None where there is no such row. By default a product is that, and a body is opened."""
    native: Native | None = None
    """Whether an opset's operator, and onnxruntime's kernel of it, can do what a node asks; if not,
    the body is emitted. Without this rule they always can."""
    native_on_cuda: Callable[[Node], bool] | None = None
    """The same of onnxruntime's CUDA kernel, on a target with that device."""
    emit: Emit | None = None
    """Writes a node as ONNX where copying it is not enough (`ops/emission.py`)."""
    lower_below: Mapping[int, Emit] = field(default_factory=dict)
    """Opset -> the rule that writes the node for targets below it."""
    xla: Rule | None = None
    """Computes the outputs with `jax.numpy` (`ops/lowering.py`). By default it is the function of
    `jax.numpy` with the name of numpy's in `reference`, else the body."""
    samples: tuple[Sample, ...] = ()
    export: str = ""
    """Name in `triplane.unified_ir.ops`, for a row that is not imported there."""

    def __str__(self) -> str:
        return f"{self.domain}.{self.name}" if self.domain else self.name

    def __repr__(self) -> str:
        return f"<operator {self}{signatures.signature(self)}>"

    @cached_property
    def schema(self) -> defs.OpSchema | None:
        """ONNX's schema; None for rows of this package."""
        return None if self.domain else defs.get_schema(self.name, MEANING_OPSET, "")

    @cached_property
    def id(self) -> OpId:
        """The identity that files carry."""
        return OpId(self.domain, self.name, self.schema.since_version if self.schema else 1)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient exists."""
        return bool(self.vjp or self.vjp_with_residuals or self.body)

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """Type letter per declared operand, markers stripped."""
        if self.schema:
            return tuple(i.type_str for i in self.schema.inputs)
        return tuple(o.rstrip("?*") for o in self.operands)

    @cached_property
    def arity(self) -> tuple[int, int]:
        """Fewest and most operands."""
        if self.schema:
            return self.schema.min_input, self.schema.max_input
        optional = sum(o.endswith("?") for o in self.operands)
        variadic = any(o.endswith("*") for o in self.operands)
        n = len(self.operands)
        # 2^31 - 1 is also what ONNX's schemas have for "any number"; the exact bound does not
        # matter.
        return n - optional - variadic, 2**31 if variadic else n

    def cost_of(self, node: Node, size: Size) -> Cost:
        """Return arithmetic and memory traffic of a node of this row; size: bytes of a value."""
        if self.cost is not None:
            return self.cost(node, size)
        moved = sum(size(v) for v in (*node.inputs, *node.outputs) if v is not None)
        return Cost(moved * (DENSE_FLOPS if self.kind in _DENSE else 1), moved)

    @property
    def is_product(self) -> bool:
        """Whether it is one product of its first two operands, with at most a bias."""
        return self.kind is OpKind.CONTRACTION and self.arity[1] <= 3

    def letter(self, i: int) -> str:
        """Return the type letter of operand `i`; a variadic last operand repeats."""
        return self.letters[min(i, len(self.letters) - 1)] if self.letters else ""

    def admits(self, i: int, type_: TensorType) -> bool:
        """Return whether operand `i` may have this element type; float64 may replace float32."""
        return not self._declared[min(i, len(self._declared) - 1)].isdisjoint(_texts_of(type_))

    @cached_property
    def _declared(self) -> tuple[frozenset[str], ...]:
        """The types of each operand as ONNX's schema writes them."""
        return tuple(frozenset(i.types) for i in self.schema.inputs) if self.schema else ()

    @cached_property
    def attr_specs(self) -> Mapping[str, AttrSpec]:
        """Every attribute the row takes."""
        own = self.attrs
        if self.schema is not None:
            own = {name: _spec(a) for name, a in self.schema.attributes.items()}
        return {**own, OPEN: AttrSpec("STRINGS", ())} if self.data_dependent_dims else own

    def open_count(self, call: OpCall) -> int:
        """Return how many sizes only the data of this call decide."""
        count = self.data_dependent_dims
        return count(call) if callable(count) else count

    def full_attrs(self, attrs: Mapping[str, AttrValue]) -> dict[str, Any]:
        """Return `attrs` with defaults (None where there is none), without the names of sizes."""
        full = {k: s.default for k, s in self.attr_specs.items()} | dict(attrs)
        # Kernels and bodies do not take the names of sizes; these are a matter of types.
        if self.data_dependent_dims:
            del full[OPEN]
        return full

    def normal_attrs(self, attrs: Mapping[str, Any]) -> dict[str, AttrValue]:
        """Check and normalize attributes: sorted, without those that are None or the default."""
        normal: dict[str, AttrValue] = {}
        for name in sorted(attrs):
            spec = self.attr_specs.get(name)
            if spec is None:
                known = ", ".join(self.attr_specs) or "none"
                raise InvalidInput(f"{self} has no attribute {name!r}; it has {known}")
            if attrs[name] is None:
                continue
            value = _normal_attr(f"{self}.{name}", spec.kind, attrs[name])
            # Defaults are left out, so that one call has one form, in files as in comparisons of
            # nodes.
            if not _same_attr(value, spec.default):
                normal[name] = value
        for name, spec in self.attr_specs.items():
            if spec.required and name not in normal:
                raise InvalidInput(f"{self} needs the attribute {name!r}")
        return normal

    def __call__(self, *inputs: Any, **attrs: Any) -> Tensor:
        """Add a node to the graph under construction and return its first output."""
        return recorder().apply(self, *signatures.arguments(self, inputs, attrs))[0]

    def shard(self, *strategy: Sequence[int]) -> Callable[..., Tensor]:
        """Return the operator with a strategy: for each tensor of the call, slices of each axis."""
        return with_shard(self, str(self))(*strategy)

    def all_outputs(self, *inputs: Any, outputs: int, **attrs: Any) -> tuple[Tensor, ...]:
        """Add a node and return its first `outputs` outputs."""
        return recorder().apply(self, inputs, attrs, outputs=outputs)


# What `inspect.signature` and `help` ask; class attributes, because most rows are never asked.
Op.__signature__ = signatures.Described(signatures.signature)  # type: ignore[attr-defined]
Op.__doc__ = signatures.Described(signatures.documentation, Op.__doc__)  # type: ignore[assignment]


@cache
def _text_of(dtype: DType) -> str:
    """Return an element type as ONNX's schemas write it."""
    return f"tensor({TensorProto.DataType.Name(dtype.onnx).lower()})"


def _texts_of(type_: TensorType) -> list[str]:
    """Return a type as ONNX's schemas write it, and with float32 in place of float64.

    `reference` computes float64 wherever there is a float32.
    """
    if isinstance(type_, OptionalType):
        return [f"optional({inner})" for inner in _texts_of(type_.element)]
    if isinstance(type_, SequenceType):
        return [f"seq({text})" for text in _texts_of(TensorType(type_.element_dtype, ()))]
    return [_text_of(type_.dtype), _text_of(float32 if type_.dtype == float64 else type_.dtype)]


Table = Mapping[tuple[str, str], Op]
"""Rows by (domain, name)."""

_KINDS: Final[Mapping[str, Callable[[Any], AttrValue]]] = {
    "INT": lambda v: v.onnx if isinstance(v, DType) else _int(v),
    "FLOAT": float,
    "STRING": lambda v: _text(v),
    "INTS": lambda v: tuple(_int(i) for i in v),
    "FLOATS": lambda v: tuple(float(i) for i in v),
    "STRINGS": lambda v: tuple(_text(i) for i in v),
    "TENSOR": lambda v: _frozen(v),
    "DIMS": lambda v: tuple(d if isinstance(d, Expr) else _int(d) for d in v),
    "TYPE_PROTO": lambda v: _of_type(v, TensorType),
}


def _int(v: Any) -> int:
    # 2.0 is a whole number here, 2.5 is not; TypeError becomes the message of `_normal_attr`.
    if isinstance(v, (bool, np.bool_)) or not isinstance(v, float) or v == int(v):
        return int(v)
    raise TypeError


def _of_type(v: Any, kind: type) -> Any:
    if not isinstance(v, kind):
        raise TypeError
    return v


def _text(v: Any) -> str:
    return str(_of_type(v.decode() if isinstance(v, bytes) else v, str))


def _frozen(v: Any) -> Array:
    # ascontiguousarray turns a scalar into a vector, hence the reshape. A view is copied: whoever
    # owns its memory could still change the attribute.
    array = np.ascontiguousarray(v).reshape(np.shape(v))
    if array.base is not None or array.flags.writeable:
        array = array.copy()
    array.flags.writeable = False
    return array


def _normal_attr(where: str, kind: str, value: Any) -> AttrValue:
    try:
        return _KINDS[kind](value)
    except (TypeError, ValueError, AttributeError):
        raise InvalidInput(f"{where} must be of kind {kind}, got {value!r}") from None


def _same_attr(a: AttrValue, b: AttrValue | None) -> bool:
    # By type as well: 1 == True == 1.0 in Python, but they are different attributes.
    return not isinstance(a, np.ndarray) and type(a) is type(b) and a == b


def _spec(attribute: Any) -> AttrSpec:
    """Return the specification of an attribute of an ONNX schema."""
    kind = str(attribute.type.name)
    proto = attribute.default_value
    default = _KINDS[kind](helper.get_attribute_value(proto)) if proto.name else None
    return AttrSpec(kind, default, bool(attribute.required))


def dtype_attr(number: int) -> DType:
    """Return the element type for ONNX's number in an attribute such as `to`."""
    if number not in BY_ONNX:
        raise InvalidInput(f"element type {number} is not supported; known: {dict(BY_ONNX)}")
    return BY_ONNX[number]

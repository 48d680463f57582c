"""Hypothesis strategies of functions that no program wrote: every kind of value, edges first.

The operators do not exist; only the form matters, which text, bytes and file must all carry.
"""

import numpy as np
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import dims
from triplane.unified_ir.ir.dims import MAX_DIM, MAX_EXPRESSION_CHARS, Expr
from triplane.unified_ir.ir.graph import NO_META, Function, Location, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import (
    DTYPES,
    OptionalType,
    SequenceType,
    TensorSpec,
)

SYMBOLS = ("N", "M", "H", "none", "inf", "nan", "e5", "bool")
INT64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.one_of(st.integers(-4, 4), st.sampled_from([-(2**63), -MAX_DIM, -1, 0, 2**63 - 1]))
TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6
) | st.sampled_from(["\u2028", "\x85", "a:3", "inf", "1", "-1", "true", "none", 'a"b', "  # x", ""])
NAMES = (
    st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=5)
    | st.sampled_from(["a:3", "none", "a b", "3", "%1", "x.y:12 z", "#", "}", "{", "é", '"', "\\"])
).filter(str.isprintable)
FLOATS = st.floats() | st.sampled_from([-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 3.0])


@st.composite
def _expression(draw):
    """A dimension by random arithmetic; the symbol alone where a limit is met."""
    found = dims.symbol(draw(st.sampled_from(SYMBOLS)))
    for _ in range(draw(st.integers(0, 4))):
        other = draw(
            st.one_of(st.integers(-9, 9), st.sampled_from([dims.symbol(s) for s in SYMBOLS]))
        )
        step = draw(st.sampled_from(["+", "-", "r-", "*", "//"]))
        try:
            made = {
                "+": lambda a, b: a + b,
                "-": lambda a, b: a - b,
                "r-": lambda a, b: b - a,
                "*": lambda a, b: a * b,
                "//": lambda a, b: a // b,
            }[step](found, other)
        except InvalidInput:
            continue
        if isinstance(made, Expr) and len(str(made)) < MAX_EXPRESSION_CHARS:
            found = made
    return found


EXPRESSIONS = _expression()
DIMS = st.lists(EXPRESSIONS | SMALL, max_size=5).map(tuple)
"""Sizes as an attribute holds them: numbers of any sign and symbols in any order."""
TENSOR_TYPES = st.builds(
    lambda dtype, shape: TensorSpec(tuple(shape), dtype),
    st.sampled_from(list(DTYPES.values())),
    st.lists(EXPRESSIONS | st.integers(0, 3) | st.just(MAX_DIM), max_size=3),
)
_SEQUENCES = st.one_of(
    st.builds(SequenceType, TENSOR_TYPES),
    st.builds(SequenceType, st.sampled_from(list(DTYPES.values()))),
    st.builds(lambda d: SequenceType(d, empty=True), st.sampled_from(list(DTYPES.values()))),
)
TYPES = st.one_of(TENSOR_TYPES, _SEQUENCES, st.builds(OptionalType, TENSOR_TYPES | _SEQUENCES))


@st.composite
def arrays(draw, dtypes=None):
    """A constant of any element type; its bits are random, so NaNs have payloads and signs."""
    dtype = draw(st.sampled_from(dtypes or list(DTYPES.values())))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    n = int(np.prod(shape, dtype=np.int64))
    if dtype.name == "string":
        made = np.empty(n, np.object_)
        made[:] = [draw(TEXT) for _ in range(n)]
        return made.reshape(shape)
    if dtype.name == "bool":
        bits = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        return np.array(bits, np.bool_).reshape(shape)
    size = dtype.numpy.itemsize
    data = np.frombuffer(draw(st.binary(min_size=n * size, max_size=n * size)), np.uint8)
    if dtype.bits < 8:
        data = data & (2**dtype.bits - 1)
        if dtype.kind == "int":
            half = 2 ** (dtype.bits - 1)
            data = ((data.astype(np.int8) ^ half) - half).astype(np.int8)
            return data.astype(dtype.numpy).reshape(shape)
    return data.astype(np.uint8).view(dtype.numpy).reshape(shape)


ATTRIBUTES = st.one_of(
    INT64 | st.sampled_from([0, -1]),
    FLOATS,
    TEXT,
    st.lists(INT64 | st.integers(-2, 2), max_size=3).map(tuple),
    st.lists(FLOATS, min_size=1, max_size=3).map(tuple),
    st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    DIMS,
    arrays(),
    st.sampled_from(list(DTYPES.values())),
    TYPES,
)
SCOPES = st.just("") | NAMES | st.sampled_from(["a b", " a", "a ", "x:1 y", ":1", "a:3"])
PLACES = st.one_of(
    st.just(NO_META),
    st.builds(lambda s: Meta(None, s), SCOPES),
    st.builds(
        lambda f, n, s: Meta(Location(f, n), s),
        st.sampled_from(["a.py", "pkg/a b.py", "xx:3", "cc:4 d.py", " a.py", "é.py"]),
        st.integers(0, 2**32 - 1),
        SCOPES,
    ),
)


@st.composite
def functions(draw, depth=1):
    """A closed function of operators that do not exist."""
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    params = tuple(Value(draw(TYPES), name) for name in names)
    values, nodes = list(params), []
    for _ in range(draw(st.integers(0, 3))):
        inputs = tuple(
            draw(st.sampled_from([None, *values])) for _ in range(draw(st.integers(0, 3)))
        )
        outputs = tuple(Value(draw(TYPES)) for _ in range(draw(st.integers(1, 2))))
        attrs = draw(st.dictionaries(NAMES, ATTRIBUTES, max_size=3))
        regions: tuple[Function, ...] = ()
        if depth and draw(st.booleans()):
            regions = (draw(functions(depth=depth - 1)),)
        op = OpId(draw(st.sampled_from(["", "x", "a.b"])), draw(st.sampled_from("AB")), 3)
        nodes.append(Node(op, inputs, outputs, attrs, regions, draw(PLACES)))
        values += outputs
    results = tuple(draw(st.lists(st.sampled_from(values), max_size=3))) if values else ()
    result_names = tuple(
        draw(st.lists(NAMES, min_size=len(results), max_size=len(results), unique=True))
    )
    return Function(draw(NAMES), params, results, result_names, tuple(nodes))


def state_arrays():
    """What a state tensor may hold: numbers of any element type."""
    return arrays(tuple(d for d in DTYPES.values() if d.name != "string"))


def same_value(a, b):
    """Whether two attributes are one: type, numbers to the bit, NaN being itself."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return same_array(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)
    return type(a) is type(b) and a == b


def same_array(a, b):
    """Whether two arrays have one element type, one shape and the same bytes."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return False
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.tolist() == b.tolist() if a.dtype.kind == "O" else a.tobytes() == b.tobytes()


def assert_same(a, b):
    """Two functions are one, names, places and attributes included."""
    assert (a.name, a.param_names, a.result_names) == (b.name, b.param_names, b.result_names)
    assert [p.type for p in a.params] == [p.type for p in b.params]
    numbers = [{v: i for i, v in enumerate(_values(f))} for f in (a, b)]
    assert len(a.nodes) == len(b.nodes)
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert (x.op, x.meta) == (y.op, y.meta)
        assert [numbers[0].get(v) for v in x.inputs] == [numbers[1].get(v) for v in y.inputs]
        assert [v.type for v in x.outputs] == [v.type for v in y.outputs]
        assert x.attrs.keys() == y.attrs.keys()
        for name, value in x.attrs.items():
            assert same_value(value, y.attrs[name]), (name, value, y.attrs[name])
        assert len(x.regions) == len(y.regions)
        for f, g in zip(x.regions, y.regions, strict=True):
            assert_same(f, g)
    assert [numbers[0][r] for r in a.results] == [numbers[1][r] for r in b.results]


def _values(function):
    return [*function.params, *(v for n in function.nodes for v in n.outputs)]


def inner_arrays(function):
    """Constants of a function and its regions."""
    return [v for n in function.walk() for v in n.attrs.values() if isinstance(v, np.ndarray)]

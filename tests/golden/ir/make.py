"""Writes model files of format versions 1 to 4; `python -m tests.golden.ir.make` renews them.

The graphs are written out by hand, so that the bytes depend on the codec alone. A change of the
format is a new folder with a new version: v1 stays readable for ever.
"""

from pathlib import Path

import numpy as np

from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.ir.graph import AttrValue, Function, Location, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import DTYPES, OptionalType, SequenceType, string

V1 = Path(__file__).parent / "v1"
V2 = Path(__file__).parent / "v2"
V3 = Path(__file__).parent / "v3"
V4 = Path(__file__).parent / "v4"
PARENT = "2e" * 32
W = np.array([[1, -2], [3, 4], [-5, 6]], np.float32)
X = np.array([[1, 0, 0], [0, 1, 1]], np.float32)
Y = np.array([[1.5, 0.0], [0.0, 10.5]], np.float32)


def every_field() -> Module:
    """Every kind of attribute, type, role, place and nesting; its operators do not exist."""
    x, other = Value(TensorSpec(("N", 3, "(H+1)//2")), "x"), Value(TensorSpec((), "bool"), "größe")
    inner_x = Value(TensorSpec((2,), "int4"), "x0")
    inner_y = Value(TensorSpec((2,), "int4"))
    inner = Node(OpId("golden", "Inner", 3), (inner_x,), (inner_y,), {"n": 1})
    region = Function("body", (inner_x,), (inner_y,), ("y0",), (inner,))
    y, z = Value(TensorSpec(("2*N-1", 0), "bfloat16")), Value(TensorSpec((1,), "float8e5m2"))
    attrs: dict[str, AttrValue] = {
        "dims": TensorSpec(("N", 3)).shape,
        "dtype": DTYPES["uint4"],
        "float": -0.1,
        "floats": (1e300, float("-inf")),
        "int": -(2**63),
        "ints": (0, 2**63 - 1),
        "none": (),
        "string": "tab\tand ü",
        "strings": ("", "a"),
        "tensor": np.array([[-8, 7, 1]]).astype(DTYPES["int4"].numpy),
        "tensor_big": np.arange(1025, dtype=np.int8),
    }
    place = Meta(Location("pkg/model.py", 12), "head.dense")
    outer = Node(OpId("golden", "Outer", 7), (x, None, other), (y, z), attrs, (region,), place)
    again = Node(OpId("", "Relu", 14), (z,), (Value(z.type),), meta=Meta(None, "grad.head"))
    last = again.outputs[0]
    function = Function("main", (x, other), (y, last, x), ("y", "loss/total", "x2"), (outer, again))
    state = {
        "p": StateTensor(Role.PARAMETER, np.array([1.5], np.float64)),
        "b": StateTensor(Role.BUFFER, np.array([[1, 2]], DTYPES["bfloat16"].numpy)),
        "o": StateTensor(Role.OPTIMIZER, np.zeros((0, 2), np.float16)),
        "k": StateTensor(Role.KEY, np.array([1, 2], np.uint32)),
        "q": StateTensor(Role.BUFFER, np.array([1, -1, 7]).astype(DTYPES["int4"].numpy)),
        "mine": StateTensor(Role.PERSONAL, np.array([9, 9], np.float32)),
    }
    return Module({"f": function}, {"go": "f", "also": "f"}, state, {"b": "2\n", "a": ""})


def relu_layer() -> Module:
    """y = relu(x w + 0.5), with operators that exist."""
    x, w = Value(TensorSpec(("N", 3)), "x"), Value(TensorSpec((3, 2)), "w")
    half, product, total, y = (
        Value(TensorSpec(shape)) for shape in ((), ("N", 2), ("N", 2), ("N", 2))
    )
    nodes = (
        Node(OpId("", "Constant", 25), (), (half,), {"value": np.array(0.5, np.float32)}),
        Node(OpId("", "MatMul", 13), (x, w), (product,)),
        Node(OpId("", "Add", 14), (product, half), (total,)),
        Node(OpId("", "Relu", 14), (total,), (y,), meta=Meta(Location("layer.py", 3), "layer")),
    )
    function = Function("layer", (x, w), (y,), ("y",), nodes)
    state = {"w": StateTensor(Role.PARAMETER, W)}
    return Module({"predict": function}, {"predict": "predict"}, state)


def newer_values() -> Module:
    """What version 2 added: sequences, optionals, strings, narrow types, a type as attribute."""
    rows = SequenceType(TensorSpec(("_", "N", 3)))
    values = {
        "x": TensorSpec(("N",)), "rows": rows, "any": SequenceType(DTYPES["int64"]),
        "texts": SequenceType(string, empty=True), "maybe": OptionalType(rows),
        "one": OptionalType(TensorSpec(("N",), "float4e2m1")),
    }  # fmt: skip
    params = tuple(Value(t, n) for n, t in values.items())
    narrow = ("float4e2m1", "float8e4m3fnuz", "float8e5m2fnuz", "float8e8m0", "int2", "uint2")
    attrs: dict[str, AttrValue] = {
        "dtype": DTYPES["float8e8m0"],
        "type": OptionalType(SequenceType(TensorSpec((2,), "string"))),
        "words": np.array([["", "a"], ["größe", "\0"]], np.object_),
    }
    attrs |= {n: np.array([1, 1, 1, 1, 1]).astype(DTYPES[n].numpy) for n in narrow}
    made = Value(rows)
    node = Node(OpId("golden", "Newer", 1), params, (made,), attrs)
    function = Function("newer", params, (made, params[4]), ("y", "z"), (node,))
    state = {"q": StateTensor(Role.BUFFER, np.array([1, -2, 0]).astype(DTYPES["int2"].numpy))}
    return Module({"newer": function}, {"go": "newer"}, state)


def negative_sizes() -> Module:
    """What version 3 added: negative numbers among sizes; the operator `Dims` exists."""
    n, m = TensorSpec(("N",)).shape[0], TensorSpec(("M",)).shape[0]
    x = Value(TensorSpec(("N", "M")), "x")
    sizes = {"flat": (n, -1), "all": (-7, -m, -1, 3, -(2**63), 2 * n - 1)}
    dims = OpId("triplane", "Dims", 1)
    nodes = tuple(
        Node(dims, (), (Value(TensorSpec((len(v),), "int64")),), {"dims": v})
        for v in sizes.values()
    )
    results = tuple(node.outputs[0] for node in nodes)
    function = Function("sizes", (x,), results, tuple(sizes), nodes)
    return Module({"sizes": function}, {"predict": "sizes"}, {})


def strategies() -> Module:
    """A product whose rows are cut, and an operand that is absent; version 4."""
    x, w = Value(TensorSpec(("N", 4)), "x"), Value(TensorSpec((4, 2)), "w")
    y = Value(TensorSpec(("N", 2)))
    product = Node(OpId("", "MatMul", 13), (x, w), (y,), strategy=((4, 1), (1, 1)))
    z = Value(y.type)
    clip = Node(OpId("", "Clip", 13), (y, None, None), (z,), strategy=((2, 2), (), ()))
    function = Function("predict", (x, w), (z,), ("y",), (product, clip))
    return Module({"predict": function}, {"predict": "predict"}, {})


def make(folder: Path) -> dict[str, str]:
    """Write every file into `folder`; root digests by name."""
    return {
        "every_field.tpm": every_field().save(folder / "every_field.tpm", parent=PARENT),
        "relu_layer.tpm": relu_layer().save(folder / "relu_layer.tpm"),
    }


def make_newer(folder: Path) -> dict[str, str]:
    """As `make`, for version 2."""
    return {"newer_values.tpm": newer_values().save(folder / "newer_values.tpm")}


def make_negative(folder: Path) -> dict[str, str]:
    """As `make`, for version 3."""
    return {"negative_sizes.tpm": negative_sizes().save(folder / "negative_sizes.tpm")}


def make_strategies(folder: Path) -> dict[str, str]:
    """As `make`, for version 4."""
    return {"strategies.tpm": strategies().save(folder / "strategies.tpm")}


if __name__ == "__main__":
    make(V1)
    make_newer(V2)
    make_negative(V3)
    make_strategies(V4)

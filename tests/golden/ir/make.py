"""Writes model files of format version 1; `python -m tests.golden.ir.make` renews v1.

The graphs are written out by hand, so that the bytes depend on the codec alone. A change of the
format is a new folder with a new version: v1 stays readable for ever.
"""

from pathlib import Path

import numpy as np

from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.ir.graph import AttrValue, Function, Location, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import DTYPES

V1 = Path(__file__).parent / "v1"
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


def make(folder: Path) -> dict[str, str]:
    """Write every file into `folder`; root digests by name."""
    return {
        "every_field.tpm": every_field().save(folder / "every_field.tpm", parent=PARENT),
        "relu_layer.tpm": relu_layer().save(folder / "relu_layer.tpm"),
    }


if __name__ == "__main__":
    make(V1)

"""A loaded function is what it claims: operators, versions, operands, attributes, types."""

import numpy as np
import pytest
from tests.ir import graphs

from triplane.proto.errors import Corrupt
from triplane.unified_ir.ir.dims import symbol
from triplane.unified_ir.ir.graph import Function, Node, OpId, Value
from triplane.unified_ir.ir.types import TensorSpec, TensorType, float32
from triplane.unified_ir.ops.check import check_function, check_module
from triplane.unified_ir.ops.table import TABLE

X = TensorSpec(("N", 4))


def one(name, *, domain="", since=None, inputs=(X,), output=X, regions=(), **attrs):
    """A function of one node; an input of None is absent."""
    values = [None if t is None else Value(t, f"x{i}") for i, t in enumerate(inputs)]
    y = Value(output)
    op = TABLE[domain, name].id if since is None else OpId(domain, name, since)
    node = Node(op, tuple(values), (y,), attrs, regions)
    return Function("f", tuple(v for v in values if v), (y,), ("y",), (node,))


def identity(*types):
    values = tuple(Value(t, f"x{i}") for i, t in enumerate(types))
    return Function("r", values, values, tuple(f"y{i}" for i in range(len(values))), ())


LOOP = (TensorSpec((), "int64"), TensorSpec((), "bool"), X)
# fmt: off
WRONG = {
    "unknown operator": (lambda: one("Frobnicate", since=1), "no such operator"),
    "unknown domain": (lambda: one("Relu", domain="evil", since=1), "no such operator"),
    "older version": (lambda: one("Relu", since=13), "not 13;"),
    "newer version": (lambda: one("Relu", since=99), "not 99;"),
    "too few operands": (lambda: one("Add"), "takes 2 operands, not 1"),
    "too many operands": (lambda: one("Relu", inputs=(X, X)), "takes 1 operand, not 2"),
    "absent operand": (lambda: one("Add", inputs=(X, None)), "operand 1 is absent"),
    "unknown attribute": (lambda: one("Relu", alpha=1.0), "no attribute 'alpha'"),
    "kind of attribute": (lambda: one("Softmax", axis=1.0), "'axis' is INT, not float"),
    "kind of tuple": (lambda: one("Transpose", perm=(1.0, 0.0)), "'perm' is INTS, not tuple"),
    "absent attribute": (lambda: one("MaxPool", inputs=(TensorSpec((1, 1, 4, 4)),)),
                         "'kernel_shape' is absent"),
    "shape": (lambda: one("Relu", output=TensorSpec(("N", 5))), r"claims the types float32\[N,5\]"),
    "symbol": (lambda: one("Relu", output=TensorSpec(("M", 4))), r"gives float32\[N,4\]"),
    "dtype": (lambda: one("Relu", output=X.with_dtype(TensorSpec((), "float64").dtype)), "claims"),
    "mixed dtypes": (lambda: one("Add", inputs=(X, TensorSpec(("N", 4), "int64"))),
                     "one element type"),
    "bad axis": (lambda: one("Transpose", perm=(0, 7)), "each axis once"),
    "shape not known": (lambda: one("Reshape", inputs=(X, TensorSpec((2,), "int64"))), "contents"),
    "regions": (lambda: one("Relu", regions=(identity(X),)), "takes no regions"),
    "too few regions": (lambda: one("Scan", domain="triplane", inputs=(X, X), num_carry=1,
                                    num_scanned=1), "1 regions, got 0"),
    "types of a region": (lambda: one("CustomGradient", domain="triplane",
                                      regions=(identity(X.with_shape((3,))),) * 2), "to a region"),
    "size of another": (lambda: one("Loop", domain="triplane", inputs=LOOP, num_carry=1, trips="N",
                                    regions=(identity(*LOOP[::-1]),)), "exists already"),
    "crash of a rule": (lambda: one("Concat", axis=0, inputs=()), "at least 1 operand, not 0"),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_is_not_is_named(name):
    make, match = WRONG[name]
    function = make()
    with pytest.raises(Corrupt, match=rf"function 'f': node 0 \({function.nodes[0].op}\): ") as e:
        check_function(function)
    assert e.match(match)


def test_errors_in_regions_name_the_path():
    bad = one("Relu", output=TensorSpec((9,)))
    outer = one("CustomGradient", domain="triplane", regions=(bad, bad))
    path = r"node 0 \(triplane.CustomGradient\): region 0: node 0 \(Relu\): claims"
    with pytest.raises(Corrupt, match=path):
        check_function(outer)


def test_values_are_computed_before_they_are_used():
    x, y, z = Value(X, "x"), Value(X), Value(X)
    relu = OpId("", "Relu", 14)
    nodes = (Node(relu, (y,), (z,)), Node(relu, (x,), (y,)))
    with pytest.raises(Corrupt, match=r"node 0 \(Relu\): an operand is not computed"):
        check_function(Function("f", (x,), (z,), ("z",), nodes))
    with pytest.raises(Corrupt, match="a result is not computed"):
        check_function(Function("f", (x,), (z,), ("z",), ()))


def test_what_the_program_builds_is_sound():
    check_module(graphs.module())
    for name in graphs.WITH_REGIONS:
        for function in graphs.with_gradients(name):
            check_function(function)


def test_work_on_symbolic_sizes_is_bounded():
    """Sixty terms in each of sixteen axes, different in every node."""
    names = [symbol(f"s{i}") for i in range(60)]
    wide = sum(names[1:], names[0])
    params = [Value(TensorType(float32, (wide + i,) * 16), f"x{i}") for i in range(100)]
    outs = [Value(p.type) for p in params]
    relu = TABLE["", "Relu"].id
    nodes = tuple(Node(relu, (p,), (y,)) for p, y in zip(params, outs, strict=True))
    with pytest.raises(Corrupt, match="more symbolic sizes than"):
        check_function(Function("f", tuple(params), (outs[-1],), ("y",), nodes))


def test_a_long_constant_is_no_shape():
    x = Value(X, "x")
    shape = Value(TensorSpec((100_000,), "int64"))
    y = Value(X)
    nodes = (
        Node(OpId("", "Constant", 25), (), (shape,), {"value": np.ones(100_000, np.int64)}),
        Node(TABLE["", "Reshape"].id, (x, shape), (y,)),
    )
    with pytest.raises(Corrupt, match="contents of an operand"):
        check_function(Function("f", (x,), (y,), ("y",), nodes))

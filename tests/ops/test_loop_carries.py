from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, ops, trace
from triplane.unified_ir.engines import engine

A, XS = TensorSpec((3,)), TensorSpec(("T", 3))
BODIES = {
    "renamed keys": lambda c, x: ({"z": c["a"], "a": c["b"]}, x),
    "fewer leaves": lambda c, x: ({"a": c["a"]}, x),
    "more leaves": lambda c, x: ({**c, "c": x}, x),
    "another nesting": lambda c, x: ((c["a"], c["b"]), x),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_carry_keeps_its_structure(body):
    with pytest.raises(InvalidInput, match="structure"):
        trace(lambda a, b, xs: ops.scan(body, {"a": a, "b": b}, xs)[0], A, A, XS)

    def trip(carry):
        return body(carry, carry["a"])[0]

    for loop in (
        lambda c: ops.while_loop(lambda c: c["a"].sum() < 3.0, trip, c),
        lambda c: ops.fori_loop(2, lambda _, c: trip(c), c),
    ):
        with pytest.raises(InvalidInput, match="structure"):
            trace(lambda a, b, loop=loop: loop({"a": a, "b": b}), A, A)


@pytest.mark.parametrize("made", [lambda c, _: c, lambda *_: None], ids=["carry", "nothing"])
def test_a_scan_body_gives_a_pair(made):
    with pytest.raises(InvalidInput, match="pair"):
        trace(lambda a, xs: ops.scan(made, a, xs)[0], A, XS)


NUMBERS = {
    "branch": lambda x: ops.cond(x.sum() > 0.0, lambda: x.sum(), lambda: 0.0),  # noqa: PLW0108
    "scan": lambda x: ops.scan(lambda c, row: (c + row.sum(), c), 0.0, x)[0],
    "while": lambda x: ops.while_loop(lambda c: c < 3.0, lambda c: c + x.sum(), 0.0),
    "constant": lambda x: ops.constant([2.0])[0] * x.sum(),
    "result": lambda _: 2.0,
}


@pytest.mark.parametrize("body", NUMBERS.values(), ids=NUMBERS)
def test_a_python_float_is_a_float32(body):
    function = trace(body, XS)
    assert str(function.results[0].type) == "float32[]"
    engine("onnx").compile(function)(*[np.ones((2, 3), np.float32)] * len(function.params))


def test_an_array_constant_keeps_its_type():
    function = trace(lambda x: x * ops.constant(np.array(2.0)), TensorSpec((1,), "float64"))
    assert str(function.results[0].type) == "float64[1]"


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_a_slice_gives_the_rows_its_type_names_or_fails(name):
    function = trace(lambda x: x[:5].sum(), XS)
    program = engine(name).compile(function)
    assert program(np.ones((5, 3), np.float32))[0] == 15
    with pytest.raises(InvalidInput, match="5"):
        program(np.ones((3, 3), np.float32))


def test_state_given_as_lists_is_refused_by_name():
    function = trace(lambda w: {"w": w + 1.0}, A)
    state: dict[str, Any] = {"w": [0, 0, 0]}
    for name in ("onnx", "reference"):
        with pytest.raises(InvalidInput, match="w"):
            engine(name).compile(function, donate=("w",)).loop(state)

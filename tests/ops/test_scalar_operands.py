import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, ops, trace
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import TypeMismatch

NUMBERS = {
    "2**63 beside int64": ("int64", 2**63),
    "2**70 beside int64": ("int64", 2**70),
    "-1 beside uint32": ("uint32", -1),
    "300 beside int8": ("int8", 300),
    "text": ("float32", "a"),
    "a complex number": ("float32", 1j),
}


@pytest.mark.parametrize(("dtype", "number"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_does_not_fit_is_refused_with_its_line(dtype, number):
    with pytest.raises(InvalidInput, match=r"does not fit .*test_scalar_operands\.py"):
        trace(lambda x: x + number, TensorSpec((2,), dtype))


WRONG_TYPES = {
    "exp of ints": (lambda x: -ops.exp(x), "int64"),
    "a sum of bools": (lambda x: x.sum(), "bool"),
    "bools added": (lambda x: x + x, "bool"),
    "a float index": (lambda x: ops.gather(x, x), "float32"),
    "gelu of ints": (lambda x: -ops.gelu(x), "int32"),
}


@pytest.mark.parametrize(("body", "dtype"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_an_element_type_the_operator_lacks_is_refused_with_its_line(body, dtype):
    with pytest.raises(TypeMismatch, match=r"does not take .*test_scalar_operands\.py"):
        trace(body, TensorSpec((2,), dtype))


def test_integer_division_is_exact_beyond_2_to_53():
    x = np.array([2**60 + 1, -(2**60) - 1, -7, 7], np.int64)
    function = trace(lambda x: ops.div(x, 3), TensorSpec(x.shape, "int64"))
    expected = [384307168202282325, -384307168202282325, -2, 2]
    for name in ("onnx", "reference"):
        assert engine(name).compile(function)(x)[0].tolist() == expected


def test_small_labels_do_not_wrap_in_a_deep_one_hot():
    labels = np.array([44], np.uint8)
    function = trace(lambda x: ops.one_hot(x, 300), TensorSpec((1,), "uint8"))
    for name in ("onnx", "reference"):
        assert np.flatnonzero(engine(name).compile(function)(labels)[0]).tolist() == [44]


def test_a_fractional_trip_count_is_refused():
    with pytest.raises(TypeMismatch, match="whole"):
        trace(lambda x: ops.fori_loop(2.5, lambda _, c: c + 1.0, x), TensorSpec((1,)))


def test_a_python_bool_is_a_condition():
    function = trace(lambda x: ops.cond(True, lambda: x, lambda: x * 2.0), TensorSpec((1,)))
    assert engine("onnx").compile(function)(np.ones(1, np.float32))[0] == 1


def test_the_sigmoid_of_a_large_number_warns_of_nothing():
    x = np.array([-1000, 0, 1000], np.float32)
    y = engine("reference").compile(trace(ops.sigmoid, TensorSpec((3,))))(x)[0]
    np.testing.assert_array_equal(y, [0, 0.5, 1])


def test_the_sigmoid_of_a_negative_number_keeps_its_digits():
    x = np.array([-30.0])
    y = engine("reference").compile(trace(ops.sigmoid, TensorSpec((1,), "float64")))(x)[0]
    np.testing.assert_allclose(y, np.exp(-30.0) / (1 + np.exp(-30.0)), rtol=1e-13)

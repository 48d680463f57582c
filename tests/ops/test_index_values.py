import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, trace
from triplane.unified_ir.engines import engine

X = np.arange(10, dtype=np.float32).reshape(5, 2)


def test_a_truth_value_is_not_an_index():
    with pytest.raises(InvalidInput, match="an index cannot be a single boolean, got True"):
        trace(lambda x: x[True], TensorSpec((5, 2)))


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_a_mask_takes_the_rows_it_marks(name):
    mask = np.array([True, False, True, True, False])
    function = trace(lambda x: x[mask], TensorSpec((5, 2)))
    np.testing.assert_array_equal(engine(name).compile(function)(X)[0], X[mask])


@pytest.mark.parametrize("name", ["onnx", "reference"])
@pytest.mark.parametrize("n", [-9, -2, 0, 3, 9])
def test_a_scalar_of_the_graph_is_a_bound_as_numpy_has_it(name, n):
    function = trace(lambda x, n: x[:n], TensorSpec((5, 2)), TensorSpec((), "int64"))
    np.testing.assert_array_equal(engine(name).compile(function)(X, np.int64(n))[0], X[:n])


def test_a_bound_that_is_no_int_is_refused_by_name():
    with pytest.raises(InvalidInput, match="a slice's bound is an int"):
        trace(lambda x, n: x[:n], TensorSpec((5, 2)), TensorSpec((), "float32"))


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_a_symbolic_size_is_a_bound(name):
    function = trace(lambda x: x[x.shape[0] // 2 :], TensorSpec(("N", 2)))
    assert str(function.results[0].type) == "float32[N-N//2,2]"
    np.testing.assert_array_equal(engine(name).compile(function)(X)[0], X[2:])

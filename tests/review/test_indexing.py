import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, trace
from triplane.unified_ir.engines import engine

X = np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.mark.parametrize("mask", [True, np.array([True, False, True, True, False])])
def test_a_mask_is_not_an_index(mask):
    with pytest.raises(InvalidInput, match="bool"):
        trace(lambda x: x[mask], TensorSpec((5, 2)))


def test_a_bound_computed_in_the_graph_is_refused_by_name():
    with pytest.raises(InvalidInput, match="bound"):
        trace(lambda x, n: x[:n], TensorSpec((5, 2)), TensorSpec((), "int64"))


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_a_symbolic_size_is_a_bound(name):
    function = trace(lambda x: x[x.shape[0] // 2 :], TensorSpec(("N", 2)))
    assert str(function.results[0].type) == "float32[N-N//2,2]"
    np.testing.assert_array_equal(engine(name).compile(function)(X)[0], X[2:])

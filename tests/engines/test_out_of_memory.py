import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, ops, trace
from triplane.unified_ir.engines import engine


@pytest.mark.parametrize("name", ["onnx", "reference"])
@pytest.mark.parametrize("shape", [(2**40,), (2**62, 2**62)], ids=["4 TiB", "2**126 bytes"])
def test_more_memory_than_there_is_fails_clearly_on_every_engine(name, shape):
    function = trace(lambda x: ops.zeros(shape).sum() + x, TensorSpec(()))
    with pytest.raises(InvalidInput, match="the graph failed on these values"):
        engine(name).compile(function)(np.zeros((), np.float32))

import numpy as np

from triplane.unified_ir import TensorSpec, ops, trace
from triplane.unified_ir.convert.describe import running_bytes

F32 = np.float32


def test_the_memory_of_a_run_is_that_of_the_tensors_alive_at_once():
    function = trace(lambda x: ops.tanh(ops.exp(x)).sum(), TensorSpec(("N", 100)))
    feeds = {function.params[0].name: np.zeros((8, 100), F32)}
    assert running_bytes(function, feeds) == 2 * 8 * 100 * 4  # of exp, and of tanh


def test_memory_of_sizes_that_a_run_decides_is_not_foretold():
    function = trace(ops.nonzero, TensorSpec((8,)))
    assert running_bytes(function, {function.params[0].name: np.zeros(8, F32)}) == 0

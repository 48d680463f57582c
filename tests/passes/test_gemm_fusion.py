import numpy as np
import pytest

from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

RNG = np.random.default_rng(3)
A, B = RNG.standard_normal((1, 5)), RNG.standard_normal((5, 3))
W = RNG.standard_normal((4, 3))
RULES = {
    "update": lambda w, a, b: w - ops.gemm(a, b) * 0.1,
    "momentum": lambda w, a, b: w * 0.9 + ops.gemm(a, b),
}


def computed(rule, dtype, a):
    arrays = [x.astype(dtype) for x in (W, a, B)]
    build = Build(TABLE, "step")
    with build:
        params = [build.param(f"x{i}", TensorSpec(x.shape, dtype)) for i, x in enumerate(arrays)]
        y = rule(*params)
    function = build.finish({"y": y})
    return [engine(e).compile(function)(*arrays)[0] for e in ("onnx", "reference")]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_product_that_broadcasts_over_the_weight_is_not_fused(rule):
    fused, plain = computed(rule, np.float32, A)
    np.testing.assert_allclose(fused, plain, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_float64_update_keeps_its_constants_beyond_float32(rule):
    fused, plain = computed(rule, np.float64, RNG.standard_normal((4, 5)))
    np.testing.assert_allclose(fused, plain, rtol=1e-13)

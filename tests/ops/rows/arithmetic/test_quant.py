"""Codes of every element type, blocks and their scales: there and back, on both engines."""

from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir.types import DTYPES, TensorSpec, as_dtype
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.arithmetic.quant import dequantize_linear, quantize_linear
from triplane.unified_ir.ops.table import TABLE

X = (np.arange(24, dtype=np.float32).reshape(4, 6) - 11.3) * 0.61
BLOCKS = np.linspace(0.4, 2.0, 8, dtype=np.float32).reshape(4, 2)


def there_and_back(scale, zero=None, x=X, **attrs):
    """x -> codes -> x', and the codes as whole numbers or floats."""
    both = {k: v for k, v in attrs.items() if k in {"axis", "block_size"}}
    build = Build(TABLE, "f")
    with build:
        codes = quantize_linear(build.param("x", TensorSpec((4, 6))), scale, zero, **attrs)
        back = dequantize_linear(codes, scale, zero, **both)
    return build.finish({"y": back})


# fmt: off
CASES: dict[str, Any] = {  # (scale, zero point's type and value, attributes)
    "int8": (np.float32(0.06), "int8", 3, {}),
    "uint16": (np.float32(0.0003), "uint16", 30000, {}),
    "int16": (np.float32(0.0003), "int16", -5, {}),
    "int4": (np.float32(0.9), "int4", 1, {}),
    "uint4": (np.float32(0.9), "uint4", 8, {}),
    "int4 in blocks": (BLOCKS, "int4", 0, {"axis": 1, "block_size": 3}),
    "uint8 in blocks": (BLOCKS, "uint8", 100, {"axis": -1, "block_size": 3}),
    "int16 by output_dtype": (np.float32(0.0003), None, 0, {"output_dtype": 5}),
    "float8e4m3fn": (np.float32(0.02), "float8e4m3fn", 0, {}),
    "float8e5m2": (np.float32(0.0001), "float8e5m2", 0, {}),
}
# fmt: on
REFERENCE_ONLY = {"int2": 2, "uint2": 2, "float4e2m1": 4, "float8e4m3fnuz": 8, "float8e5m2fnuz": 8}


def _zero(dtype, value, scale):
    return None if dtype is None else np.full(np.shape(scale), value).astype(as_dtype(dtype).numpy)


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_gives_the_same_codes(name):
    scale, dtype, value, attrs = CASES[name]
    function = there_and_back(scale, _zero(dtype, value, scale), **attrs)
    wanted = ReferenceEngine().compile(function)(X)[0]
    np.testing.assert_allclose(OnnxEngine().compile(function)(X)[0], wanted, rtol=1e-6, atol=1e-6)
    if "float" not in name and "int4" not in name:
        step = np.repeat(scale, 3, 1) if np.ndim(scale) else scale
        assert (abs(wanted - X) <= np.broadcast_to(step, X.shape) * 0.501).all(), (
            "within half a step"
        )


@pytest.mark.parametrize("name", REFERENCE_ONLY)
def test_narrow_codes_are_the_nearest(name):
    dtype = DTYPES[name]
    function = there_and_back(np.float32(1.0), np.zeros((), dtype.numpy))
    found = ReferenceEngine().compile(function)(X)[0]
    codes = np.arange(2**dtype.bits, dtype=np.uint8)
    if dtype.is_float:
        held = codes.view(dtype.numpy).astype(np.float32)
    else:
        low = -(2 ** (dtype.bits - 1)) if dtype.kind == "int" else 0
        held = (codes.astype(np.int64) + low).astype(np.float32)
    held = held[np.isfinite(held)]
    assert np.isin(found, held).all()
    least = abs(X.reshape(-1, 1) - held).min(1).reshape(X.shape)
    np.testing.assert_allclose(abs(found - X), least, atol=1e-6)


def test_codes_newer_than_the_opset_are_refused_by_name():
    scale, dtype, value, attrs = CASES["int4 in blocks"]
    function = there_and_back(scale, _zero(dtype, value, scale), **attrs)
    with pytest.raises(InvalidInput, match=r"takes .* since opset 21, and the target is opset 17"):
        OnnxEngine(target=OnnxTarget(17)).compile(function)


@pytest.mark.parametrize(
    ("scale", "zero", "attrs", "match"),
    [
        (BLOCKS, None, {"axis": 1, "block_size": 2}, "one per slice or block of axis 1"),
        (BLOCKS, None, {}, "one per slice or block"),
        (np.float32(1), np.zeros(2, np.int8), {}, "zero points alike"),
        (np.float32(1), np.zeros((), np.int8), {"output_dtype": 2}, "its zero point is int8"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scale, zero, attrs, match):
    with pytest.raises(InvalidInput, match=match):
        there_and_back(scale, zero, **attrs)


def test_each_row_of_an_integer_product_may_have_a_zero_point_of_its_own():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 255, (3, 4), dtype=np.uint8)
    b = rng.integers(0, 255, (4, 5), dtype=np.uint8)
    zeros = np.array([1, 100, 250], np.uint8)
    reference = TABLE["", "MatMulInteger"].reference
    assert reference is not None
    product = reference(a, b, zeros)
    shifted = a.astype(np.int64) - zeros[:, None]
    np.testing.assert_array_equal(product, shifted @ b.astype(np.int64))

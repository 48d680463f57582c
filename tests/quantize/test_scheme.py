"""The arithmetic of quantization."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.ir.types import int8
from triplane.unified_ir.quantize.scheme import (
    INT32_MAX,
    NARROW,
    SCHEMES,
    Range,
    Scheme,
    activation_quantizer,
    quantize_weight,
    scheme,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from onnxruntime.quantization.quant_utils import compute_scale_zp

finite = st.floats(-1e6, 1e6, width=32)
ends = st.tuples(finite, finite).map(sorted)
rows = st.sampled_from(list(SCHEMES.values()))


def rounded(x, quantizer, row):
    low, high = row.grid
    q = np.clip(np.rint(x / quantizer.scale) + quantizer.zero.astype(np.float64), low, high)
    return (q - quantizer.zero.astype(np.float64)) * np.float64(quantizer.scale)


@given(ends, rows, st.floats(0, 1))
def test_rounding_errs_by_half_a_step_at_most(range_, row, share):
    quantizer = activation_quantizer(Range(*range_), row)
    step, zero = np.float64(quantizer.scale), float(quantizer.zero)
    low, high = (step * (end - zero) for end in row.grid)
    x = low + share * (high - low)
    assert abs(rounded(x, quantizer, row) - x) <= step / 2 * (1 + 1e-6)


@given(ends, rows)
def test_every_range_holds_zero_exactly_and_its_own_ends_within_a_step(range_, row):
    quantizer = activation_quantizer(Range(*range_), row)
    assert rounded(0.0, quantizer, row) == 0.0
    for end in range_:
        assert abs(rounded(end, quantizer, row) - end) <= float(quantizer.scale) * (1 + 1e-5)


@given(ends, rows)
def test_values_outside_saturate(range_, row):
    quantizer = activation_quantizer(Range(*range_), row)
    low, high = (float(quantizer.scale) * (q - float(quantizer.zero)) for q in row.grid)
    far = 1e3 * max(abs(low), abs(high))
    assert rounded(far, quantizer, row) == pytest.approx(high)
    assert rounded(-far, quantizer, row) == pytest.approx(low)


@given(ends, rows)
def test_scale_and_zero_point_are_those_of_onnxruntime(range_, row):
    low, high = (np.array(end, np.float32) for end in range_)
    q_min, q_max = (np.array(q, row.activation.numpy) for q in row.grid)
    zero, scale = compute_scale_zp(low, high, q_min, q_max)
    ours = activation_quantizer(Range(float(low), float(high)), row)
    assert ours.scale == scale
    if float(high) != float(low) or float(low) != 0.0:
        assert ours.zero == zero or float(scale) == 1.0


weights = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=4, max_side=5),
    elements=st.floats(-8, 8, width=32),
)  # fmt: skip


@given(weights, rows, st.booleans())
def test_a_weight_errs_by_half_its_channel_step(w, row, last):
    axis = w.ndim - 1 if last else 0
    made = quantize_weight(w, axis, row, x_scale=np.array(0.1, np.float32))
    along = made.scale.reshape([-1 if i == axis else 1 for i in range(w.ndim)])
    assert np.abs(made.q).max() <= row.weight_limit
    assert (np.abs(made.q * along - w) <= along / 2 * (1 + 1e-5)).all()
    assert made.bias is None


@pytest.mark.slow
@given(weights)
def test_a_negated_weight_has_the_negated_integers(w):
    row = scheme("u8s8")
    x_scale = np.array(0.1, np.float32)
    assert (
        quantize_weight(-w, 0, row, x_scale=x_scale).q
        == -quantize_weight(w, 0, row, x_scale=x_scale).q
    ).all()


@given(hnp.arrays(np.float32, 3, elements=st.floats(-1e4, 1e4, width=32)))
def test_the_bias_fits_32_bits_beside_nearly_zero_weights(bias):
    w = np.full((3, 2), 1e-12, np.float32)
    made = quantize_weight(w, 0, scheme("u8s8"), x_scale=np.array(0.01, np.float32), bias=bias)
    assert made.bias is not None
    assert (np.abs(made.bias.astype(np.int64)) <= INT32_MAX).all()
    step = made.bias_scale.astype(np.float64)
    assert (np.abs(made.bias * step - bias) <= 0.501 * step + 1e-6 * np.abs(bias)).all()


def test_a_channel_of_zeros_has_scale_one():
    made = quantize_weight(
        np.zeros((2, 3), np.float32), 0, scheme("u8s8"), x_scale=np.array(1.0, np.float32)
    )
    assert made.scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(bad):
    w = np.array([[1.0, bad]], np.float32)
    with pytest.raises(InvalidInput, match="finite"):
        quantize_weight(w, 0, scheme("u8s8"), x_scale=np.array(1.0, np.float32))
    with pytest.raises(InvalidInput, match="finite ends"):
        Range(0.0, bad)


def test_the_limit_of_a_weight_says_its_bits():
    bits = {name: scheme(name).weight_bits for name in ("u8s8", "u8s7", "s8s8")}
    assert bits == {"u8s8": 8, "u8s7": 7, "s8s8": 8}
    assert Scheme("s8s7", int8, int8, NARROW).weight_bits == 7


def test_an_unknown_scheme_names_those_that_exist():
    with pytest.raises(NotFound, match=", ".join(SCHEMES)):
        scheme("int4")

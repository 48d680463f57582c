"""Norms against numpy, bounds by hand, and rounds in which nothing is above them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import limits
from triplane.unified_ir.federated.core.limits import (
    EXAMPLES_FACTOR,
    NORM_FACTOR,
    RoundUpdate,
    check_norm_bound,
    limited,
    lower_median,
    norms_of,
)


def update(size, *, examples=1, buffer=1.0):
    """An update whose parameters have that norm, and its buffers another."""
    w = np.zeros(4, np.float32)
    w[1] = size
    return RoundUpdate(examples, lambda: {"w": w, "s": np.array([buffer], np.float32)})


def bounded(updates, norm_bound="adaptive", max_examples=0):
    return limited(updates, norm_bound=norm_bound, max_examples=max_examples, buffers={"s"})


def sizes(updates, name="w"):
    return [float(np.abs(u.open()[name]).max()) for u in updates]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_norms_are_numpy_s_with_parameters_and_buffers_apart(dtype):
    rng = np.random.default_rng(0)
    a, b, s = (rng.normal(size=shape).astype(dtype) for shape in ((3, 7), (), (5,)))
    both = np.concatenate([x.reshape(-1).astype(np.float64) for x in (a, b)])
    wanted = np.linalg.norm(both), np.linalg.norm(s.astype(np.float64))
    np.testing.assert_allclose(norms_of({"b": b, "a": a, "s": s}, {"s"}), wanted, rtol=1e-14)


def test_the_size_of_chunks_changes_a_norm_by_rounding_only(monkeypatch):
    change = {"w": np.random.default_rng(1).normal(size=999).astype(np.float32)}
    whole = norms_of(change, ())
    monkeypatch.setattr(limits, "CHUNK", 10)
    np.testing.assert_allclose(norms_of(change, ()), whole, rtol=1e-14)


def test_norms_whose_squares_float64_does_not_hold_are_exact():
    four = {"w": np.full(4, 3e38, np.float32)}
    assert norms_of(four, ())[0] == 2 * float(np.float32(3e38))
    assert norms_of({"w": np.full(4, 2.0**900)}, ())[0] == 2.0**901
    assert norms_of({"w": np.array([-(2.0**900)])}, ())[0] == 2.0**900
    assert norms_of({"w": np.full(4, 1.7e308)}, ())[0] == math.inf
    assert norms_of({"w": np.array([1.0, math.nan], np.float32)}, ())[0] == math.inf
    assert norms_of({"w": np.array([math.nan, 1.0])}, ())[0] == math.inf
    assert norms_of({"w": np.zeros((0, 3)), "v": np.zeros(2)}, ()) == (0.0, 0.0)


def test_a_change_above_the_bound_is_scaled_to_the_median_and_no_other_is():
    updates = [update(1.0), update(2.0), update(2.5), update(1e6), update(3e38)]
    kept, scaled = bounded(updates)
    assert scaled == 2
    np.testing.assert_allclose(sizes(kept), [1, 2, 2.5, 2.5, 2.5], rtol=1e-6)
    for before, after in zip(updates[:3], kept, strict=False):
        assert after.open is before.open, "what is within the bound is not even copied"


def test_a_change_of_as_many_medians_as_are_allowed_is_not_scaled():
    most = float(np.float32(NORM_FACTOR))
    assert bounded([update(1.0), update(1.0), update(most)])[1] == 0
    assert bounded([update(1.0), update(1.0), update(np.nextafter(np.float32(most), 9))])[1] == 1


def test_of_two_updates_the_smaller_one_sets_the_bound():
    kept, scaled = bounded([update(1e6), update(1.0)])
    assert scaled == 1
    np.testing.assert_allclose(sizes(kept), [1.0, 1.0], rtol=1e-6)
    assert bounded([update(1e6)])[1] == 0, "one device alone is its own median"


def test_buffers_have_a_bound_of_their_own():
    kept, scaled = bounded([update(1.0), update(1.0), update(1.0, buffer=1e9)])
    assert scaled == 1
    assert sizes(kept) == [1.0, 1.0, 1.0]
    np.testing.assert_allclose(sizes(kept, "s"), [1, 1, 1], rtol=1e-6)


def test_a_number_bounds_parameters_and_off_bounds_nothing():
    updates = [update(1.0), update(5.0), update(9.0, buffer=1e9)]
    kept, scaled = bounded(updates, "2")
    assert scaled == 2
    np.testing.assert_allclose(sizes(kept), [1, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(sizes(kept, "s"), [1, 1, 1], rtol=1e-6)
    assert sizes(bounded(updates, "off")[0]) == sizes(updates)


def test_norms_that_are_known_are_not_computed_again():
    def never():
        raise AssertionError("opened")

    kept, scaled = limited(
        [RoundUpdate(1, never, (1.0, 0.0)), RoundUpdate(1, never, (2.0, 0.0))],
        norm_bound="adaptive", max_examples=0, buffers=(),
    )  # fmt: skip
    assert (len(kept), scaled) == (2, 0)


def test_a_small_float16_change_is_not_scaled_to_zero():
    large = RoundUpdate(1, lambda: {"w": np.array([6e4, 1.0], np.float16)})
    small = RoundUpdate(1, lambda: {"w": np.array([1e-3, 0.0], np.float16)})
    kept, _ = bounded([large, small])
    np.testing.assert_allclose(kept[0].open()["w"][1], 1e-3 / 6e4, rtol=2e-2)


def test_a_number_of_examples_counts_up_to_the_cap():
    updates = [update(1.0, examples=n) for n in (20, 30, 2**32 - 1)]
    assert [u.examples for u in bounded(updates)[0]] == [20, 30, 30 * EXAMPLES_FACTOR]
    assert [u.examples for u in bounded(updates, max_examples=25)[0]] == [20, 25, 25]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_the_lower_median_is_one_of_the_values_and_at_most_numpy_s(values):
    median = lower_median(values)
    assert median in values
    assert median <= np.median(values)
    assert sum(x <= median for x in values) >= len(values) / 2


@pytest.mark.parametrize(
    "text", ["", "on", "0", "-1", "nan", "inf", "1e999", "x" * 99, "adaptive:", "adaptive:-1"]
)
def test_a_bound_that_is_none_is_refused(text):
    with pytest.raises(InvalidInput, match="'adaptive', 'off' or a number above 0, got"):
        check_norm_bound(text)

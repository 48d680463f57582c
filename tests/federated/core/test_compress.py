"""Compression: what each row promises, error feedback, and bytes that no `pack` wrote."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.compress import COMPRESSIONS, LEVELS, Compressor
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.runtime.plan import COMPRESSIONS as OFFERED_BY_PLANS

floats = st.floats(-1e6, 1e6, width=32)
tensors = arrays(np.float32, array_shapes(min_dims=0, max_dims=3, max_side=9), elements=floats)


def draws(lease="a"):
    return Draws(1, 2, lease, "test")


def sent(name, x, keep=0.3, lease="a"):
    compressor = Compressor(name, keep=keep)
    packed, lost = compressor.pack({"w": x.copy()}, {}, draws(lease))
    return compressor.unpack(packed)["w"], lost


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.slow
@given(x=tensors)
def test_what_is_sent_and_what_is_lost_make_the_change(name, x):
    found, lost = sent(name, x)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    np.testing.assert_allclose(found + lost.get("w", 0), x, rtol=1e-6, atol=1e-30)


@pytest.mark.slow
@given(x=tensors)
def test_int8_is_off_by_less_than_one_level(x):
    found, _ = sent("int8", x)
    level = np.max(np.abs(x), initial=0) / LEVELS
    assert np.all(np.abs(found - x) <= level * (1 + 1e-5))


@pytest.mark.slow
def test_int8_is_right_on_average():
    x = np.array([0.2, -0.7, 1.0, 1e-3], np.float32)
    mean = np.mean([sent("int8", x, lease=str(k))[0] for k in range(4000)], axis=0)
    deviation = 1 / LEVELS / 2 / np.sqrt(4000)
    assert np.all(np.abs(mean - x) < 5 * deviation)


def test_int8_keeps_the_largest_and_zero_exactly():
    x = np.array([-3.0, 0.0, 3.0], np.float32)
    assert sent("int8", x)[0].tolist() == [-3, 0, 3]
    assert sent("int8", np.zeros((2, 2), np.float32))[0].tolist() == [[0, 0], [0, 0]]


@pytest.mark.slow
@given(x=tensors, keep=st.floats(0.01, 1))
def test_top_k_sends_the_largest_entries_as_they_are(x, keep):
    found, _ = sent("top-k", x, keep)
    kept = np.argsort(-np.abs(x.reshape(-1)), kind="stable")[: int(np.ceil(keep * x.size))]
    expected = np.zeros(x.size, np.float32)
    expected[kept] = x.reshape(-1)[kept]
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["int8", "top-k"])
def test_over_many_rounds_nothing_is_lost_but_the_last_remainder(name):
    compressor, rng = Compressor(name, keep=0.1), np.random.default_rng(0)
    changes = [{"w": rng.normal(size=(7, 11)).astype(np.float32)} for _ in range(40)]
    remainder: dict = {}
    total = np.zeros((7, 11))
    for k, change in enumerate(changes):
        packed, remainder = compressor.pack({"w": change["w"].copy()}, remainder, draws(str(k)))
        total += compressor.unpack(packed)["w"]
    expected = np.sum([c["w"] for c in changes], axis=0, dtype=np.float64)
    np.testing.assert_allclose(total + remainder["w"], expected, atol=2e-4)
    assert np.abs(remainder["w"]).max() > 1e-3


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_equal_draws_give_equal_bytes(name):
    x = np.linspace(-1, 1, 50, dtype=np.float32)
    one, two = (Compressor(name, keep=0.5).pack({"w": x.copy()}, {}, draws())[0] for _ in range(2))
    assert {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in two.items()}


def test_compressed_updates_are_small():
    x = {"w": np.random.default_rng(0).normal(size=10_000).astype(np.float32)}
    sizes = {
        name: sum(a.nbytes for a in Compressor(name, keep=0.01).pack(x, {}, draws())[0].values())
        for name in COMPRESSIONS
    }
    assert sizes == {"": 40_000, "int8": 10_004, "top-k": 808}


def test_plans_may_demand_every_compression_there_is():
    assert set(OFFERED_BY_PLANS) == set(COMPRESSIONS) - {""}


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(keep):
    with pytest.raises(InvalidInput, match=r"in \(0, 1\]"):
        Compressor("top-k", keep=keep)


def test_an_unknown_row_is_refused_with_those_there_are():
    with pytest.raises(InvalidInput, match="one of '', 'int8', 'top-k', got 'zip'"):
        Compressor("zip")


def u32(*values):
    return np.array(values, np.uint32)


def i64(*values):
    return np.array(values, np.int64)


VALUE = np.ones(2, np.float32)
SCALE = np.ones((), np.float32)


@pytest.mark.parametrize(
    ("name", "arrays_", "says"),
    [
        ("top-k", {"w:index": u32(1, 1), "w:value": VALUE, "w:shape": i64(3)}, "rise strictly"),
        ("top-k", {"w:index": u32(2, 1), "w:value": VALUE, "w:shape": i64(3)}, "rise strictly"),
        ("top-k", {"w:index": u32(1, 3), "w:value": VALUE, "w:shape": i64(3)}, "below 3"),
        ("top-k", {"w:index": u32(1), "w:value": VALUE, "w:shape": i64(3)}, "as many"),
        ("top-k", {"w:index": i64(0, 1), "w:value": VALUE, "w:shape": i64(3)}, "as many"),
        ("top-k", {"w:index": u32(0, 1), "w:value": VALUE, "w:shape": i64(-3)}, "int64 sizes"),
        ("top-k", {"w:index": u32(0, 1), "w:value": VALUE, "w:shape": u32(3)}, "int64 sizes"),
        ("top-k", {"w:index": u32(0, 1), "w:value": VALUE}, "writes"),
        ("top-k", {"w": VALUE}, "writes"),
        ("int8", {"w:q": u32(1), "w:scale": SCALE}, "int8 writes"),
        ("int8", {"w:q": np.ones(1, np.int8), "w:scale": VALUE}, "int8 writes"),
        ("int8", {"w:q": np.ones(1, np.int8), "w:scale": np.ones((), np.int64)}, "int8 writes"),
        ("", {"w:q": VALUE}, "writes"),
    ],
)
def test_arrays_that_no_pack_wrote_are_refused(name, arrays_, says):
    with pytest.raises(InvalidInput, match=says):
        Compressor(name).unpack(arrays_)


@pytest.mark.parametrize("name", sorted(COMPRESSIONS))
def test_plain_tensors_travel_as_they_are_and_lose_nothing(name):
    x = {"w": np.linspace(-1, 1, 9, dtype=np.float32), "norm.var": np.full(3, 1e-6, np.float32)}
    compressor = Compressor(name, keep=0.2, plain={"norm.var"})
    sent, lost = compressor.pack({k: v.copy() for k, v in x.items()}, {}, draws())
    assert sent["norm.var"].tobytes() == x["norm.var"].tobytes()
    assert "norm.var" not in lost
    assert compressor.unpack(sent)["norm.var"].tobytes() == x["norm.var"].tobytes()

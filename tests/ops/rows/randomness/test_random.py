from statistics import NormalDist

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.engines import ENGINES, engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

THREEFRY = TABLE["triplane", "Threefry2x32"]
ALL = 0xFFFFFFFF

# Known answers of Random123 1.14, tests/kat_vectors: threefry2x32, 20 rounds.
# fmt: off
KNOWN = (  # counter, key, result
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ALL, ALL), (ALL, ALL), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
)
# fmt: on

KEY = np.array([7, 11], np.uint32)
engines = pytest.mark.parametrize("name", list(ENGINES))


def words(*values):
    return np.array(values, np.uint32)


def drawn(name, body, *sizes):
    """`body(key, x)` on an engine; x: zeros of a symbolic length N, one call per size."""
    build = Build(TABLE, "draw")
    with build:
        key = build.param("key", TensorSpec((2,), "uint32"))
        x = build.param("x", TensorSpec(("N",)))
        y = body(key, x)
    program = engine(name).compile(build.finish({"y": y}))
    return [program(KEY, np.zeros(n, np.float32))[0] for n in sizes]


@engines
@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_blocks_equal_the_published_answers(name, counter, key, result):
    build = Build(TABLE, "block")
    with build:
        operands = [
            build.param(n, TensorSpec((s,), "uint32")) for n, s in (("key", 2), ("a", 1), ("b", 1))
        ]
        y, z = THREEFRY.all_outputs(*operands, outputs=2)
    program = engine(name).compile(build.finish({"y": y, "z": z}))
    found = program(words(*key), words(counter[0]), words(counter[1]))
    assert tuple(int(w[0]) for w in found) == result


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_bits_are_equal_on_every_engine(size):
    found = [drawn(name, lambda key, x: ops.random_bits(key, x.shape), size)[0] for name in ENGINES]
    assert found[0].dtype == np.uint32
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_uniform_numbers_are_equal_on_every_engine_and_lie_in_the_unit_interval():
    found = [
        drawn(name, lambda key, x: ops.random_uniform(key, x.shape), 4096)[0] for name in ENGINES
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    u = found[0]
    assert u.min() >= 0
    assert u.max() < 1
    np.testing.assert_array_equal(u * 2.0**24 % 1, 0)
    counts, _ = np.histogram(u, bins=16, range=(0, 1))
    assert ((counts - 256) ** 2 / 256).sum() < 37.7  # chi-squared, 15 degrees: p = 0.001


def test_a_shape_may_have_any_number_of_axes_and_symbols():
    (y,) = drawn("onnx", lambda key, x: ops.random_bits(key, (*x.shape, 3, 5)), 4)
    assert y.shape == (4, 3, 5)
    assert len(np.unique(y)) == y.size


def test_a_chain_of_keys_repeats_from_any_of_its_links():
    def chain(key, x):
        keys = [key]
        for _ in range(3):
            keys.append(ops.next_key(keys[-1]))
        return ops.stack(keys)

    found = [drawn(name, chain, 1)[0] for name in ENGINES]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    assert len({tuple(k) for k in found[0]}) == 4


def test_the_next_key_is_no_block_that_a_draw_gives():
    (bits,) = drawn("reference", lambda key, x: ops.random_bits(key, x.shape), 2000)
    (key,) = drawn("reference", lambda key, _: ops.next_key(key), 1)
    assert not set(map(int, key)) & set(map(int, bits))


@engines
def test_dropout_keeps_the_mean_and_drops_the_stated_share(name):
    (y,) = drawn(name, lambda key, x: ops.dropout(x + 1.0, key, 0.25), 8192)
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.015


def test_dropout_of_nothing_is_the_operand_and_of_everything_is_refused():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec((3,)))
        key = build.param("key", TensorSpec((2,), "uint32"))
        assert ops.dropout(x, key, 0.0) is x
        with pytest.raises(InvalidInput, match="p_drop must be in"):
            ops.dropout(x, key, 1.0)
        with pytest.raises(InvalidInput, match="a random key must be uint32"):
            ops.random_bits(x, (3,))


@pytest.mark.parametrize("size", [0, 1, 7, 4096])
def test_normal_numbers_agree_on_every_engine(size):
    rows = [
        drawn(name, lambda key, x: ops.random_normal(key, x.shape), size)[0] for name in ENGINES
    ]
    for other in rows:
        assert other.shape == (size,)
        assert other.dtype == np.float32
        np.testing.assert_allclose(rows[0], other, rtol=1e-5, atol=1e-6)


def test_normal_numbers_are_independent_and_standard_normal():
    n = 1 << 16
    (z,) = drawn("reference", lambda key, x: ops.random_normal(key, x.shape), n)
    edges = [-np.inf, *(NormalDist().inv_cdf(k / 16) for k in range(1, 16)), np.inf]
    counts, _ = np.histogram(z, bins=edges)
    assert ((counts - n / 16) ** 2 / (n / 16)).sum() < 37.7  # chi-squared, 15 degrees: p = 0.001
    assert np.isfinite(z).all()
    # The two numbers of one block, and neighbours.
    for a, b in ((z[: n // 2], z[n // 2 :]), (z[:-1], z[1:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))
        assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 4 / np.sqrt(len(a))


def test_keys_derived_from_a_key_differ():
    def derived(key, x):
        keys = [key, ops.next_key(key), *(ops.fold_in(key, k) for k in (0, 1, 2**32 - 1))]
        return ops.stack([*keys, ops.fold_in(keys[2], 0)])

    (keys,) = drawn("onnx", derived, 1)
    assert len({tuple(k) for k in keys.tolist()}) == 6
    (same,) = drawn("reference", derived, 1)
    np.testing.assert_array_equal(keys, same)
    for number in (-1, 2**32):
        with pytest.raises(InvalidInput, match=r"takes a whole number in 0\.\.2"):
            drawn("reference", lambda key, _, number=number: ops.fold_in(key, number), 1)

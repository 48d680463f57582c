"""Random numbers on XLA: the bits of the reference engine, at any size; no draws without a key."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.randomness import random
from triplane.unified_ir.ops.table import TABLE

KEY = np.array([0x9E3779B9, 7], np.uint32)
SIZES = [(0,), (1,), (7,), (2, 4), (3, 0, 2), (301, 257)]


def drawn(draw):
    """Every shape of one draw in one function, since compiling takes most of the time."""
    build = Build(TABLE, "draw")
    with build:
        key = build.param("key", TensorSpec((2,), "uint32"))
        return build.finish({f"y{i}": draw(key, shape) for i, shape in enumerate(SIZES)})


def on_both(function, *args):
    return [engine(name).compile(function)(*args) for name in ("xla", "reference")]


@pytest.mark.parametrize("draw", [random.random_bits, random.random_uniform])
def test_bits_are_those_of_reference(draw):
    for found, wanted in zip(*on_both(drawn(draw), KEY), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_bits_of_any_key_and_counter_are_those_of_reference():
    rng = np.random.default_rng(0)
    build = Build(TABLE, "words")
    with build:
        key = build.param("key", TensorSpec((2,), "uint32"))
        x = build.param("x", TensorSpec((5, 3), "uint32"))
        a, b = random.threefry.all_outputs(key, x, x * np.uint32(3), outputs=2)
        function = build.finish({"a": a, "b": b, "next": random.next_key(key)})
    for words in ([0, 0], [2**32 - 1, 2**32 - 1], rng.integers(0, 2**32, 2)):
        args = np.array(words, np.uint32), rng.integers(0, 2**32, (5, 3), dtype=np.uint32)
        for found, wanted in zip(*on_both(function, *args), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_normal_numbers_are_those_of_reference_up_to_rounding():
    for found, wanted in zip(*on_both(drawn(random.random_normal), KEY), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * 5.8)


def test_a_known_key_draws_the_same():
    build = Build(TABLE, "draw")
    with build:
        x = build.param("x", TensorSpec((40000,)))
        y = x + random.random_uniform(ops.constant(KEY), x.shape)
        function = build.finish({"y": y})
    (found,), (wanted,) = on_both(function, np.zeros(40000, np.float32))
    np.testing.assert_array_equal(found, wanted)


def dropped(training):
    build = Build(TABLE, "drop")
    with build:
        x = build.param("x", TensorSpec((3,)))
        trains = build.param("t", TensorSpec((), "bool")) if training is None else training
        (y,) = build.apply(TABLE["", "Dropout"], [x, np.float32(0.5), trains], {}, outputs=1)
        return build.finish({"y": y})


def test_dropout_without_a_key_runs_only_where_it_drops_nothing():
    x = np.arange(3, dtype=np.float32)
    (y,) = engine("xla").compile(dropped(np.array(False)))(x)
    np.testing.assert_array_equal(y, x)
    with pytest.raises(InvalidInput, match=r"xla cannot run Dropout .*no key"):
        engine("xla").compile(dropped(np.array(True)))(x)
    with pytest.raises(InvalidInput, match=r"xla cannot run Dropout .*whether it trains"):
        engine("xla").compile(dropped(None))(x, np.array(False))


def test_draws_without_a_key_are_refused_by_name():
    build = Build(TABLE, "draw")
    with build:
        (y,) = build.apply(TABLE["", "RandomNormal"], [], {"shape": (2,)}, outputs=1)
        function = build.finish({"y": y})
    with pytest.raises(InvalidInput, match="xla cannot run RandomNormal"):
        engine("xla").compile(function)

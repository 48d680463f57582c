"""ONNX's own random operators: distributed as said, another draw each time."""

from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes import clean

ENGINES = [ReferenceEngine(), OnnxEngine()]
N = 4000
P = np.full((N,), 0.25, np.float32)
ODDS = np.tile(np.log([[0.1, 0.2, 0.7]]), (2, 1)).astype(np.float32)


def drawn(name, *, seed, **attrs):
    """A function of two nodes alike."""
    x = {"Multinomial": ODDS, "Bernoulli": P}.get(name, P if name.endswith("Like") else None)
    build = Build(TABLE, "f")
    with build:
        inputs = [] if x is None else [build.param("x", TensorSpec(x.shape))]
        pair = [TABLE["", name](*inputs, seed=seed, **attrs) for _ in range(2)]
    return build.finish({"a": pair[0], "b": pair[1]}), [] if x is None else [x]


# fmt: off
CASES: dict[str, Any] = {  # attributes, mean, standard deviation, element type
    "RandomNormal": ({"shape": (N,), "mean": 3.0, "scale": 2.0}, 3, 2, "float32"),
    "RandomNormalLike": ({"dtype": 11, "mean": -1.0}, -1, 1, "float64"),
    "RandomUniform": ({"shape": (N,), "low": -1.0, "high": 3.0}, 1, 4 / 12**0.5, "float32"),
    "RandomUniformLike": ({}, 0.5, 1 / 12**0.5, "float32"),
    "Bernoulli": ({"dtype": 6}, 0.25, 0.75**0.5 / 2, "int32"),
    "Multinomial": ({"sample_size": N, "dtype": 7}, 1.6, 0.44**0.5, "int64"),
}
# fmt: on


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("name", CASES)
def test_draws_are_distributed_as_said(engine, name):
    """Six standard errors of the mean; the seeds are fixed, so this passes or fails for good."""
    attrs, mean, deviation, dtype = CASES[name]
    function, args = drawn(name, seed=5.0, **attrs)
    found = engine.compile(function)(*args)[0]
    assert str(found.dtype) == dtype == str(function.results[0].type.dtype)
    assert found.shape == tuple(function.results[0].type.shape)
    assert abs(found.mean() - mean) < 6 * deviation / N**0.5
    assert abs(found.std() - deviation) < 0.1 * deviation


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("name", CASES)
def test_two_nodes_alike_are_two_draws(engine, name):
    function, args = drawn(name, seed=None, **CASES[name][0])
    assert len(clean(function).nodes) == 2
    a, b = engine.compile(function)(*args)
    assert (a != b).any()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("name", CASES)
def test_a_seed_repeats_the_first_draw(engine, name):
    first, again = (
        engine.compile(function)(*args)[0]
        for function, args in (drawn(name, seed=5.0, **CASES[name][0]) for _ in range(2))
    )
    np.testing.assert_array_equal(first, again)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InvalidInput, match="sizes of 0 or more"):
        drawn("RandomNormal", seed=None, shape=(-1,))
    with pytest.raises(InvalidInput, match="1 or more samples"):
        drawn("Multinomial", seed=None, sample_size=0)

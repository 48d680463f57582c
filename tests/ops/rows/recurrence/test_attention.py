"""Rows that may see no key, and calls that no attention can mean."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

RNG = np.random.default_rng(3)
Q, K = (RNG.standard_normal((1, 2, 3, 4)).astype(np.float32) for _ in range(2))
NONE = np.zeros((3, 3), bool)
NONE[1] = [True, False, True]
MASKS = {"bool": NONE, "added": np.where(NONE, np.float32(0), np.float32(-np.inf))}


def recorded(mask):
    build = Build(TABLE, "f")
    with build:
        q, k, m = (build.param(n, type_of(a)) for n, a in (("q", Q), ("k", K), ("m", mask)))
        y = TABLE["", "Attention"](q, k, k, m)
        return build.finish({"loss": (y * y).sum()}), build.finish({"y": y})


@pytest.mark.parametrize("opset", [17, 21, 23, 26])
@pytest.mark.parametrize("kind", MASKS)
def test_a_query_that_may_see_no_key_gives_zero_and_no_nan_comes_back(kind, opset):
    loss, forward = recorded(MASKS[kind])
    args = (Q, K, MASKS[kind])
    for program in (OnnxEngine(target=OnnxTarget(opset)), engine("reference")):
        (y,) = program.compile(forward)(*args)
        assert not y[:, :, [0, 2]].any()
        assert y[:, :, 1].all()
        _, g_q, g_k = program.compile(value_and_grad(loss, ["q", "k"]))(*args)
        assert np.isfinite(g_q).all()
        assert not g_q[:, :, [0, 2]].any()
        assert np.isfinite(g_k).all()
        assert not g_k[:, :, 1].any(), "a key that no query sees has no gradient"


@pytest.mark.parametrize(
    ("heads", "attrs", "said"),
    [
        ((3, 2, 2), {}, "of queries a multiple"),
        ((2, 2, 1), {}, "as many heads of values as of keys"),
        ((2, 2, 2), {"qk_matmul_output_mode": 4}, "must be 0 to 3, got 4"),
    ],
)
def test_heads_that_do_not_fit_are_refused(heads, attrs, said):
    q, k, v = (np.zeros((1, n, 3, 4), np.float32) for n in heads)
    build = Build(TABLE, "f")
    with build, pytest.raises(InvalidInput, match=said):
        TABLE["", "Attention"](q, k, v, **attrs)


def test_a_mask_longer_than_the_keys_is_refused():
    build = Build(TABLE, "f")
    with build, pytest.raises(InvalidInput, match="longer than 3 keys"):
        TABLE["", "Attention"](Q, K, K, np.ones((3, 4), bool))

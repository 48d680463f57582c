"""Attention in one kernel: when it is asked for, and that it means what the row's body does.

A GPU is not at hand: JAX's own implementation stands for cuDNN's.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triplane.unified_ir.engines.xla import fused

pytestmark = pytest.mark.long  # compiling takes long
SHAPES = ((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))


@pytest.fixture
def asked(monkeypatch):
    """The calls of a kernel, on a machine that says it has a GPU."""
    calls, own = [], jax.nn.dot_product_attention

    def attention(*args, implementation, **options):
        calls.append(implementation)
        return own(*args, implementation="xla", **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return calls


def operands(shapes, dtype="float16"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def weighted(q, k, v, *, causal, scale):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = scale * jnp.einsum("nhsd,nhtd->nhst", q, k)
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[2:]) > 0, scores, -jnp.inf)
    return jnp.einsum("nhst,nhtd->nhsd", jax.nn.softmax(scores, -1), v)


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_and_its_gradients_are_those_of_softmax_and_products(asked, causal):
    how = {"causal": causal, "scale": 0.3}
    q, k, v = operands(SHAPES)
    (g,) = operands([SHAPES[0]])
    y, pull = jax.vjp(partial(weighted, **how), q, k, v)
    close = partial(np.testing.assert_allclose, rtol=2e-2, atol=5e-3)
    close(fused.attention(q, k, v, **how), y)
    for one, other in zip(
        fused.attention_gradient(g, q, k, v, **how), pull(g.astype(jnp.float32)), strict=True
    ):
        close(one, other)
    assert set(asked) == {"cudnn"}


@pytest.mark.parametrize(
    ("shapes", "causal", "dtype"),
    [
        pytest.param(SHAPES, False, "float32", id="32 bits"),
        pytest.param((SHAPES[0], *[(2, 2, 5, 8)] * 2), True, "float16", id="causal, other lengths"),
        pytest.param((*SHAPES[:2], (2, 2, 6, 5)), False, "float16", id="values of another size"),
        pytest.param(((2, 2, 6, 8), *[(2, 2, 0, 8)] * 2), False, "float16", id="no keys"),
        pytest.param(((1, 2, 6, 8), *SHAPES[1:]), False, "bfloat16", id="other samples"),
    ],
)
def test_what_no_kernel_computes_is_left_to_the_body(asked, shapes, causal, dtype):
    q, k, v = operands(shapes, dtype)
    assert fused.attention(q, k, v, causal=causal, scale=1.0) is NotImplemented

"""Kernels of a GPU that compute several products at once: cuDNN's attention, in 16 bits."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from triplane.unified_ir.engines.xla.door import jax, jnp

_HALF: Final = frozenset({"float16", "bfloat16"})


def attention(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """See `XlaContext`; q: (N, heads, S, D), k, v: (N, heads, T, D)."""
    if not _is_there(q, k, v, causal=causal):
        return NotImplemented
    # As if for a gradient: then XLA finds this call and that of `attention_gradient` equal.
    return jax.vjp(partial(_attention, causal=causal, scale=scale), q, k, v)[0]


def attention_gradient(g: Any, q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """See `XlaContext`; g: the cotangent of the result."""
    if not _is_there(q, k, v, causal=causal):
        return NotImplemented
    _, pull = jax.vjp(partial(_attention, causal=causal, scale=scale), q, k, v)
    return pull(g)


def _attention(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    by_place = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    y = jax.nn.dot_product_attention(
        *by_place, scale=scale, is_causal=causal, implementation="cudnn"
    )
    return jnp.swapaxes(y, 1, 2)


def _is_there(q: Any, k: Any, v: Any, *, causal: bool) -> bool:
    """Return whether cuDNN has a kernel for these. Causal ones count queries from the last key."""
    if jax.default_backend() != "gpu" or not {str(x.dtype) for x in (q, k, v)} <= _HALF:
        return False
    if causal and q.shape[2] != k.shape[2]:
        return False
    # What JAX does not check, and cuDNN refuses only when the program is compiled.
    if not (q.size and k.size) or q.shape[3] != v.shape[3]:
        return False
    try:
        jax.eval_shape(partial(_attention, causal=causal, scale=1.0), q, k, v)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):  # each names what it lacks
        return False
    return True

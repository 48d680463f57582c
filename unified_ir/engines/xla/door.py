"""The one place that imports JAX, which the extra `xla` installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triplane.proto.errors import MissingExtra

try:
    import jax as _jax
except ImportError as error:  # pragma: no cover - the tests' environment has it
    raise MissingExtra(
        f"JAX is not installed ({error}); it comes with: pip install 'triplane[xla]', for a GPU: "
        "pip install 'jax[cuda13]'"
    ) from error


# Many of JAX's functions have no types.
jax: Any = _jax
jnp: Any = _jax.numpy
lax: Any = _jax.lax


@contextmanager
def exact() -> Iterator[None]:
    """Trace and run with 64-bit types and float32 products in float32, only within the block.

    Without it JAX makes int64 of 32 bits, and a GPU rounds the operands of products (TF32). The
    caller's own use of JAX keeps its settings.
    """
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


__all__ = ["exact", "jax", "jnp", "lax"]

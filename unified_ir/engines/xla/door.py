"""The one place that imports JAX, which the extra `xla` installs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from triplane.proto.errors import InvalidInput, MissingExtra, Unavailable

_OWN: Final = "jax" not in sys.modules
"""Whether the process uses JAX through this engine only, as far as is known here."""
LEAST_COMPILE_S: Final = 0.2
"""Programs that compile faster are not kept: reading one takes some milliseconds."""
_GUARDS: Final = (
    "jax_transfer_guard",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_device",
    "jax_transfer_guard_device_to_host",
)

try:
    import jax as _jax
except ImportError as error:  # pragma: no cover - the tests' environment has it
    raise MissingExtra(
        f"JAX is not installed ({error}); it comes with: pip install 'triplane[xla]', for a GPU "
        "with: pip install 'jax[cuda13]'"
    ) from error
except ValueError as error:
    raise InvalidInput(
        f"JAX does not start with the variables JAX_* of the environment: {error}"
    ) from error

# Many of JAX's functions have no types.
jax: Any = _jax
jnp: Any = _jax.numpy
lax: Any = _jax.lax


@contextmanager
def exact() -> Iterator[None]:
    """Trace and run with 64-bit types and float32 products in float32, only within the block.

    Without it JAX makes int64 of 32 bits, and a GPU rounds the operands of products (TF32). The
    caller's own use of JAX keeps its settings. Their guard against transfers does not hold within,
    where batches and results are moved.
    """
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), transferring():
        yield


def transferring() -> AbstractContextManager[None]:
    """Allow transfers within the block, where the caller's JAX has a guard against them."""
    # Without a guard that would take 9 us, a tenth of the step of a small network.
    guarded = any(getattr(jax.config, name) is not None for name in _GUARDS)
    return jax.transfer_guard("allow") if guarded else nullcontext()


@contextmanager
def tracing() -> Iterator[None]:
    """Trace by NumPy's rules of types and shapes, which a caller may have made strict for JAX."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def jax_devices() -> list[Any]:
    """Return the devices that JAX finds; Unavailable: none, or not those the environment wants."""
    try:
        return list(jax.devices())
    # Where JAX knows a platform but has no plugin for it, it only asserts.
    except (RuntimeError, AssertionError) as error:
        names = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
        asked = " ".join(f"{n}={os.environ[n]}" for n in names if n in os.environ)
        raise Unavailable(
            f"JAX finds no device{f' with {asked} in the environment' if asked else ''}: "
            f"{str(error) or 'a plugin for the platform is not installed'}; unset the variable, or "
            "for an NVIDIA GPU: pip install 'jax[cuda13]'"
        ) from error


def coordination() -> Any:
    """Return the client of the coordination service, which JAX has in no public place."""
    from jax._src.distributed import global_state

    return global_state.client


def stop_is_due(count: int) -> bool:
    """Return whether processes that received SIGTERM agreed to end at this number of calls."""
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    return bool(reached_preemption_sync_point(count))


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise InvalidInput for an error of XLA within the block, such as no memory left."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        way = (
            "; use smaller batches, fewer steps per launch, or more devices"
            if "RESOURCE_EXHAUSTED" in str(error)
            else ""
        )
        raise InvalidInput(f"XLA could not run {what}: {error}{way}") from error


def keep_programs() -> None:
    """Keep compiled programs on disk, in JAX's own cache, unless the process has chosen otherwise.

    What takes longer to compile than to read is found there by the next process.
    """
    if _OWN and jax.config.jax_compilation_cache_dir is None:
        # A container's user may have no home directory: "~" stays as it is, and nothing is kept.
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
        if base.startswith("~"):
            return
        jax.config.update("jax_compilation_cache_dir", str(Path(base, "triplane", "xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_S)


keep_programs()

__all__ = [
    "coordination",
    "exact",
    "explained",
    "jax",
    "jax_devices",
    "jnp",
    "lax",
    "stop_is_due",
    "tracing",
    "transferring",
]

"""Measuring the rates of this machine's devices for the planner: alpha and beta of each cost.

Collectives are timed at several sizes, many in one launch, so that starting a program is not
counted. The least of several repeats counts, because other work only ever adds time. Latency and
bandwidth are the least-squares fit of the relative error, over all-reduces and all-gathers.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.door import exact, jax, jax_devices, jnp, lax
from triplane.unified_ir.passes.sharding.topology import LinkCost, Measurement, Topology

REPEATS: Final = 5
IN_ONE_LAUNCH: Final = 8
"""Collectives, or copies, in one program, each on the result of the last."""
LINK_BYTES: Final = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
"""About how many bytes each device has: before an all-reduce, after an all-gather."""
ENOUGH_S: Final = 0.5
"""After so many seconds nothing is repeated any more."""
PRODUCT_SIDES: Final = (512, 1024)
GPU_PRODUCT_SIDES: Final = (2048, 8192)
"""Sides of square matrices; a GPU needs larger ones to be busy."""
COPIED_BYTES: Final = 1 << 25
_MEASURED: Final = ("devices_per_host", "flops_per_s", "memory_bytes_per_s", "inside")


def measured_topology() -> tuple[Topology, list[str]]:
    """Return the topology of this machine, and the names of the fields that were measured.

    Links between hosts and racks keep their defaults, and so does `inside` with one device.
    """
    jax_devices()
    devices = jax.local_devices()
    kind = devices[0].platform.upper()
    named = kind if kind == "CPU" else devices[0].device_kind
    about = Measurement(
        _printable(platform.node()),
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        f"{len(devices)} x {_printable(named)}",
        f"jax {jax.__version__}",
    )
    with exact():
        rates: dict[str, Any] = {
            "devices_per_host": len(devices),
            "flops_per_s": _flops_per_s(devices, kind),
            "memory_bytes_per_s": _memory_bytes_per_s(devices),
        }
        if len(devices) > 1:
            rates["inside"] = link_cost(len(devices), _collectives(devices))
    return Topology(**rates, measured=about), [name for name in _MEASURED if name in rates]


def record(topology: Topology, names: Sequence[str]) -> dict[str, Any]:
    """Return what a topology file holds: what was measured, and where, and nothing assumed."""
    full = topology.json()
    return {name: full[name] for name in (*names, "measured")}


def link_cost(devices: int, samples: Sequence[tuple[str, int, float]]) -> LinkCost:
    """Return the latency and bandwidth that fit samples best: (collective, bytes, seconds).

    bytes: of one device's array before the collective, "all-reduce" or "all-gather". With n devices
    an all-reduce takes 2 ceil(log2 n) latencies and sends 2 (n - 1) / n of the bytes; an all-gather
    takes half the latencies and sends n - 1 times its bytes.
    """
    rounds, rows = math.ceil(math.log2(devices)), []
    for what, size, seconds in samples:
        is_sum = what == "all-reduce"
        sent = size * (2 * (devices - 1) / devices if is_sum else devices - 1)
        # Divided by the time, so that small and large arrays count alike.
        rows.append((rounds * (2 if is_sum else 1) / seconds, sent / seconds))
    matrix = np.array(rows)
    latency, s_per_byte = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)[0].tolist()
    if latency <= 0 or s_per_byte <= 0:
        raise InvalidInput(
            f"the times of {len(rows)} collectives fit no latency and bandwidth above 0 "
            f"(latency {latency:.3g} s, {s_per_byte:.3g} s a byte); measure again on an idle "
            "machine"
        )
    return LinkCost(latency, 1 / s_per_byte)


def _collectives(devices: Sequence[Any]) -> list[tuple[str, int, float]]:
    """Return (collective, bytes of one device, seconds) for each size."""
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    n = len(devices)

    def added(_: Any, x: Any) -> Any:
        return lax.psum(x, "x") / n

    def gathered(i: Any, x: Any) -> Any:
        # A part of another device, which XLA cannot foresee, so the whole must be gathered.
        whole = lax.all_gather(x, "x", tiled=True)
        start = (lax.axis_index("x") + i + 1) % n * x.size
        return lax.dynamic_slice_in_dim(whole, start, x.size)

    samples = []
    for size in LINK_BYTES:
        part = size // 4 // n
        for what, one, count in (("all-reduce", added, n * part), ("all-gather", gathered, part)):
            x = np.ones(n * count, np.float32)
            placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
            run = jax.shard_map(
                lambda x, one=one: lax.fori_loop(0, IN_ONE_LAUNCH, one, x), mesh=mesh,
                in_specs=spec, out_specs=spec, check_vma=False,
            )  # fmt: skip
            samples.append((what, 4 * count, _least_s(jax.jit(run), placed) / IN_ONE_LAUNCH))
    return samples


def _flops_per_s(devices: Sequence[Any], kind: str) -> float:
    """Return one device's rate of float32 products, as the engine computes them, at its best."""
    rates = []
    for side in PRODUCT_SIDES if kind == "CPU" else GPU_PRODUCT_SIDES:
        seconds = _all_busy(devices, lambda x: jnp.matmul(x[0], x[0])[None], (side, side))
        rates.append(2 * side**3 / seconds)
    return max(rates)


def _memory_bytes_per_s(devices: Sequence[Any]) -> float:
    """Return the rate at which one device reads an array and writes another one."""

    def copied(x: Any) -> Any:
        return lax.fori_loop(0, IN_ONE_LAUNCH, lambda _, y: y + 1, x)

    seconds = _all_busy(devices, copied, (COPIED_BYTES // 4,)) / IN_ONE_LAUNCH
    return 2 * COPIED_BYTES / seconds


def _all_busy(devices: Sequence[Any], one: Callable[[Any], Any], shape: tuple[int, ...]) -> float:
    """Return the time in which all devices do this at once: those of a CPU share its cores."""
    mesh, spec = jax.sharding.Mesh(np.array(devices), ("x",)), jax.sharding.PartitionSpec("x")
    x = jax.device_put(
        np.full((len(devices), *shape), 1e-3, np.float32), jax.sharding.NamedSharding(mesh, spec)
    )
    run = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)
    return _least_s(jax.jit(run), x)


def _least_s(function: Callable[..., Any], *args: Any) -> float:
    """Return the least time of several runs, after one that compiles."""
    jax.block_until_ready(function(*args))
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < ENOUGH_S:
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def _printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable())[:64] or "unknown"

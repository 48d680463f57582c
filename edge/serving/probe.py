"""The probe at load time: warm a model up, and find out whether to merge its requests.

Merging must be safe: every row of a merged run equals the same row run alone. A model that
normalizes over the batch, or quantizes activations by the range of the whole batch, is never
merged. Merging must pay: the best measured size handles rows at least `MIN_GAIN` times as fast as
single rows, and saves more per row than it costs to pass a request to another thread. Both are
measured on generated values, within `PROBE_S`. A graph may never end for some shape, so each load
has a time limit, and other models can still be loaded.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from triplane.edge.serving.batching import Merged
from triplane.edge.serving.running import Direct, Runner
from triplane.edge.serving.servable import Array, Contract, Servable, TensorContract
from triplane.edge.serving.statistics import Statistics
from triplane.proto.errors import Corrupt, InvalidInput, Unavailable
from triplane.unified_ir.runtime.session import CancellationToken

logger = logging.getLogger(__name__)

WARM_S: Final = 60.0
"""Limit for one generated row; a model that takes longer is not served."""
TRIES_S: Final = 20.0
"""Limit for all runs of several rows; a model that takes longer is served but never merged."""
PROBE_S: Final = 0.5
SIZES: Final = (4, 8, 16)  # numbers of rows of a merged run to try
REPEATS: Final = 7
MIN_GAIN: Final = 1.3
HANDOFF_S: Final = 100e-6  # cost of waking a waiting thread and splitting the results
PAUSE_SHARE: Final = 0.5  # of a single run: longest pause for callers to come back
PAUSE_AT_MOST_S: Final = 2e-3
FREE_SIZE: Final = 16  # size for every symbol except the rows
TOLERANCE: Final = 1e-3  # a kernel for many rows may sum in another order than one for few


def plan(servable: Servable, contract: Contract, statistics: Statistics) -> Runner:
    """Choose the runner of one version; this is the `Plan` of a serving process's repository."""
    rows, single_s = merged_rows(servable, contract)
    logger.info(
        "model probed",
        extra={"model": servable.name, "version": servable.version, "merged_rows": rows},
    )
    if not rows:
        return Direct(servable, statistics)
    # Half of the cores run models, the other half does the work of the network.
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux: the cores that this process may use
        cores = len(os.sched_getaffinity(0))
    runs, pause_s = max(1, cores // 2), min(PAUSE_AT_MOST_S, PAUSE_SHARE * single_s)
    return Merged(servable, statistics, rows, runs=runs, pause_s=pause_s)


def merged_rows(servable: Servable, contract: Contract) -> tuple[int, float]:
    """Warm the model; return up to how many rows to merge, 0 for none, and seconds of one row."""
    try:
        _warm(servable, contract)
        if not contract.mergeable:
            return 0, 0.0
        with _ending(TRIES_S) as stop:
            return _tried(servable, contract, stop)
    except (InvalidInput, Unavailable) as error:
        # Generated values may be invalid for a model, whose real requests are then run alone.
        logger.info("model not probed", extra={"model": servable.name, "reason": str(error)})
        return 0, 0.0


def _warm(servable: Servable, contract: Contract) -> None:
    try:
        with _ending(WARM_S) as stop:
            servable.run(sample(contract, 1), stop=stop)
    except Unavailable as error:
        raise Corrupt(
            f"model {servable.name!r}: a run of one generated row did not end within {WARM_S:g} s"
        ) from error


def _tried(servable: Servable, contract: Contract, stop: CancellationToken) -> tuple[int, float]:
    feeds = sample(contract, SIZES[-1])
    if not _rows_are_independent(servable, feeds, stop):
        return 0, 0.0
    seconds = _measure(servable, feeds, stop, time.perf_counter() + PROBE_S)
    return best_size(seconds), seconds[1]


@contextlib.contextmanager
def _ending(seconds: float) -> Iterator[CancellationToken]:
    """Give a token that is set after these seconds."""
    stop = CancellationToken()
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield stop
    finally:
        timer.cancel()
        timer.join()


def best_size(seconds: Mapping[int, float]) -> int:
    """Return the smallest size within 5 % of the best rate; 0 if none pays.

    seconds: duration of a run by rows, including the single row.
    """
    single = seconds[1]
    pays = {
        size: size * single / took
        for size, took in seconds.items()
        if size > 1 and size * single / took >= MIN_GAIN and single - took / size >= HANDOFF_S
    }
    best = max(pays.values(), default=0.0)
    return next((size for size, gain in sorted(pays.items()) if gain >= 0.95 * best), 0)


def sample(contract: Contract, rows: int) -> dict[str, Array]:
    """Generate feeds of `rows` rows with different scales, so that a leak between rows shows."""
    rng = np.random.default_rng(0)
    return {name: _values(rng, spec, contract, rows) for name, spec in contract.inputs.items()}


def _values(rng: np.random.Generator, spec: TensorContract, contract: Contract, rows: int) -> Array:
    shape = tuple(
        size if isinstance(size, int) else rows if size == contract.rows else FREE_SIZE
        for size in spec.shape
    )
    if spec.datatype.dtype.kind != "f":
        return rng.integers(0, 2, shape).astype(spec.datatype.dtype)
    values = rng.standard_normal(shape)
    if contract.rows is not None:
        scale = 2.0 ** (np.arange(rows) % 4 - 2)
        values *= scale.reshape(-1, *[1] * (len(shape) - 1))
    return values.astype(spec.datatype.dtype)


def _rows_are_independent(
    servable: Servable, feeds: Mapping[str, Array], stop: CancellationToken | None = None
) -> bool:
    rows = SIZES[0]
    together = servable.run({name: values[:rows] for name, values in feeds.items()}, stop=stop)
    for row in range(rows):
        one = {name: values[row : row + 1] for name, values in feeds.items()}
        alone = servable.run(one, stop=stop)
        for name, values in together.items():
            if values.shape[:1] != (rows,) or not _close(values[row : row + 1], alone[name]):
                return False
    return True


def _close(a: Array, b: Array) -> bool:
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    size = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
    return np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * size, equal_nan=True)


def _measure(
    servable: Servable, feeds: Mapping[str, Array], stop: CancellationToken, until_s: float
) -> dict[int, float]:
    """Return the shortest duration of a run by rows; sizes beyond the time are left out."""
    seconds: dict[int, float] = {}
    for _ in range(REPEATS):
        for size in (1, *SIZES):
            if time.perf_counter() > until_s and len(seconds) > 1:
                return seconds
            part = {name: values[:size] for name, values in feeds.items()}
            started = time.perf_counter()
            servable.run(part, stop=stop)
            took = time.perf_counter() - started
            seconds[size] = min(took, seconds.get(size, took))
    return seconds

"""Partition a dataset over devices; each choice depends only on the seed and on names.

Every partition gives each device a name and its samples in two disjoint parts, to learn from and to
score on. Names sort in the order of devices. The part of a sample, and its device by group or by
Dirichlet shares, depend on the sample's own bytes (`core/parts.py`): they do not change when other
samples are added. `evenly` and `by_label_shards` count samples, so there all samples may move.

Windows over one series may share rows with the windows before them (`overlap`, their number). A
device is then scored on its last windows, and those just before, which share rows with them, are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.core.parts import held_out as apart
from triplane.unified_ir.federated.core.parts import places

MAX_DEVICES: Final = 100_000
MAX_NAME_CHARS: Final = 200
LEAST_SAMPLES: Final = 2
"""Least number of samples of a device: one to learn from, one to score on."""

Samples = Mapping[str, Array]
"""Arrays by batch name ("x", "y"); the first axis counts samples."""
Shards = dict[str, Shard]


def evenly(
    samples: Samples, devices: int, *, held_out: float = 0.2, seed: int = 0, overlap: int = 0
) -> Shards:
    """Shuffle the samples and split them into parts whose sizes differ by at most one.

    With `overlap`, each device has consecutive samples, and none that share rows with another's.
    """
    n = _count(samples)
    _check_devices(devices, n)
    if overlap:
        parts = np.array_split(np.arange(n), devices)
        order = [rows[overlap:] if k else rows for k, rows in enumerate(parts)]
    else:
        order = np.array_split(Draws(seed, 0, "partition", "evenly").permutation(n), devices)
    return _shards(samples, dict(enumerate(order)), held_out, seed, overlap)


def by_group(
    samples: Samples, groups: Array, *, held_out: float = 0.2, seed: int = 0, least: int = 2,
    overlap: int = 0,
) -> Shards:  # fmt: skip
    """Make a device of each value of `groups`, such as the writer of each sample.

    Groups of fewer than `least` samples are left out. Whole numbers name devices as device-N; texts
    are the names themselves.
    """
    n = _count(samples)
    if groups.dtype.kind in "OU":
        check_names(groups, n)
    else:
        check_whole(groups, n, "groups are")
    order = np.argsort(groups, kind="stable")
    values, starts = np.unique(groups[order], return_index=True)
    parts = dict(zip(values.tolist(), np.split(order, starts[1:]), strict=True))
    large = {k: rows for k, rows in parts.items() if len(rows) >= max(least, LEAST_SAMPLES)}
    if not large:
        largest = max(map(len, parts.values()))
        raise InvalidInput(f"no group has {least} samples; the largest has {largest}")
    return _shards(samples, large, held_out, seed, overlap)


def by_dirichlet(
    samples: Samples, devices: int, *, alpha: float, held_out: float = 0.2, seed: int = 0,
    labels: str = "y",
) -> Shards:  # fmt: skip
    """Draw the shares of each class over devices from Dirichlet(alpha, ..., alpha).

    With a small alpha devices have few classes, with a large one all are alike (Hsu et al. 2019,
    arXiv 1909.06335). Devices with fewer than two distinct samples get some of the largest device.
    """
    y = _labels(samples, labels)
    _check_devices(devices, len(y))
    if not 0 < alpha < math.inf:
        raise InvalidInput(f"Dirichlet's alpha must be finite and above 0, got {alpha}")
    u = places(_content(samples), f"{seed} dirichlet")
    if (distinct := len(np.unique(u))) < LEAST_SAMPLES * devices:
        raise InvalidInput(
            f"{devices} devices need {LEAST_SAMPLES} distinct samples each, there are {distinct}"
        )
    parts: list[list[Array]] = [[] for _ in range(devices)]
    for label in np.unique(y):
        draws = Draws(seed, 0, "partition", f"dirichlet {label}")
        rows = np.flatnonzero(y == label)
        shares = _gamma(draws, alpha, devices)
        edges = np.cumsum(shares / shares.sum())[:-1]
        # By the sample's own u, not by counting: adding samples moves no other sample.
        device_of = np.searchsorted(edges, u[rows], side="right")
        for device, part in enumerate(parts):
            part.append(rows[device_of == device])
    return _shards(samples, dict(enumerate(_with_enough_samples(parts, u))), held_out, seed)


def by_label_shards(
    samples: Samples, devices: int, *, shards: int = 2, held_out: float = 0.2, seed: int = 0,
    labels: str = "y",
) -> Shards:  # fmt: skip
    """Sort samples by class, cut them into equal pieces, and give each device `shards` at random.

    A device then has about `shards` classes (McMahan et al. 2017, section 3).
    """
    y = _labels(samples, labels)
    _check_devices(devices, len(y))
    most = len(y) // devices
    if not 1 <= shards <= most:
        raise InvalidInput(
            f"{len(y)} samples give each of {devices} devices 1 to {most} pieces, got {shards}"
        )
    draws = Draws(seed, 0, "partition", "label shards")
    # The order within a class is random; without this it would be that of the file.
    shuffled = draws.permutation(len(y))
    pieces = np.array_split(shuffled[np.argsort(y[shuffled], kind="stable")], devices * shards)
    dealt = draws.permutation(len(pieces)).reshape(devices, shards)
    parts = {i: np.concatenate([pieces[k] for k in row]) for i, row in enumerate(dealt)}
    return _shards(samples, parts, held_out, seed)


def _shards(
    samples: Samples, parts: Mapping[Any, Array], held_out: float, seed: int, overlap: int = 0
) -> Shards:
    if not 0 < held_out < 1:
        raise InvalidInput(f"the held-out share must be between 0 and 1, got {held_out}")
    if len(parts) > MAX_DEVICES:
        raise InvalidInput(f"a study has at most {MAX_DEVICES} devices, got {len(parts)}")
    named = dict(parts)
    if not any(isinstance(k, str) for k in parts):
        # With leading zeros, so that names sort like numbers.
        width = len(str(max(parts)))
        named = {f"device-{k:0{width}}": rows for k, rows in parts.items()}
    if overlap:
        return {name: _last(samples, rows, held_out, overlap, name) for name, rows in named.items()}
    return {name: _split(samples, rows, held_out, seed, name) for name, rows in named.items()}


def _last(samples: Samples, rows: Array, share: float, overlap: int, name: str) -> Shard:
    """Hold out the last windows; those that share rows with the first of them are in no part."""
    score = max(1, math.ceil(round(share * len(rows), 9)))
    learn = len(rows) - score - overlap
    if learn < 1:
        raise InvalidInput(
            f"{name} has {len(rows)} windows, each of which shares rows with the {overlap} before "
            f"it, so {score} to score on and {overlap} beside them leave none to learn from; use "
            "shorter windows, fewer devices, or leave out small groups"
        )
    parts = (rows[:learn], rows[-score:])
    return Shard(*({k: np.asarray(v)[part] for k, v in samples.items()} for part in parts))


def _split(samples: Samples, rows: Array, held_out: float, seed: int, name: str) -> Shard:
    if len(rows) < LEAST_SAMPLES:
        raise InvalidInput(f"{name} gets {len(rows)} samples; a device needs {LEAST_SAMPLES}")
    out = apart(_content(samples)[rows], held_out, f"{seed} split")
    if out is None:
        raise InvalidInput(
            f"the {len(rows)} samples of {name} are equal; a device needs one to learn from and "
            "another to be scored on"
        )
    train, score = (
        {k: np.asarray(v)[part] for k, v in samples.items()} for part in (rows[~out], rows[out])
    )
    return Shard(train, score)


def _content(samples: Samples) -> Array:
    """Return the array by which samples are compared: the first one; labels follow it."""
    return np.asarray(next(iter(samples.values())))


def _with_enough_samples(parts: list[list[Array]], u: Array) -> list[Array]:
    """Return the parts, each with enough distinct samples; equal ones move together."""
    rows = [np.concatenate(part) for part in parts]
    kinds = [len(np.unique(u[part])) for part in rows]
    for i in range(len(rows)):
        while kinds[i] < LEAST_SAMPLES:
            largest = max(range(len(rows)), key=lambda k: (kinds[k], len(rows[k])))
            # All copies of one sample: equal samples must be on one device, or it could score what
            # another learned from.
            moving = u[rows[largest]] == u[rows[largest]].min()
            rows[i] = np.concatenate([rows[i], rows[largest][moving]])
            rows[largest] = rows[largest][~moving]
            kinds[i] = len(np.unique(u[rows[i]]))
            kinds[largest] -= 1
    return rows


def _gamma(draws: Draws, alpha: float, n: int) -> Array:
    """Draw n numbers of Gamma(alpha, 1) from uniform numbers: Marsaglia and Tsang 2000.

    Below alpha 1 it is Gamma(alpha + 1) U^(1/alpha). Each is at least the smallest positive number.
    """
    shape = alpha + 1 if alpha < 1 else alpha
    d = shape - 1 / 3
    drawn: list[float] = []
    while len(drawn) < n:
        u, v, w = draws.uniform(3)
        # A normal number (Box and Muller), then the test of Marsaglia and Tsang.
        z = math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v)
        t = (1 + z / math.sqrt(9 * d)) ** 3
        if t > 0 and math.log(1 - w) < z * z / 2 + d - d * t + d * math.log(t):
            drawn.append(d * t)
    values = np.asarray(drawn)
    if alpha < 1:
        values *= (1 - draws.uniform(n)) ** (1 / alpha)
    # U^(1/alpha) underflows for a small alpha, and shares of 0 / 0 would be NaN.
    return np.asarray(np.maximum(values, np.finfo(np.float64).tiny))


def _count(samples: Samples) -> int:
    sizes = {name: np.shape(x)[0] if np.ndim(x) else 0 for name, x in samples.items()}
    if len(set(sizes.values())) != 1 or not min(sizes.values()):
        raise InvalidInput(f"all arrays must have the same number of samples, >= 1; got {sizes}")
    return int(next(iter(sizes.values())))


def _labels(samples: Samples, name: str) -> Array:
    n = _count(samples)
    if name not in samples:
        raise InvalidInput(f"there is no array {name!r} of labels; there are {sorted(samples)}")
    y = np.asarray(samples[name])
    check_whole(y, n, "labels are")
    return y


def check_whole(numbers: Array, n: int, what: str) -> None:
    """Raise InvalidInput unless `numbers` has a whole number for each of n samples."""
    if numbers.shape != (n,) or numbers.dtype.kind not in "iu":
        seen = f"{numbers.dtype}{list(numbers.shape)}"
        raise InvalidInput(f"{what} {n} whole numbers, one for each sample; got {seen}")


def check_names(groups: Array, n: int) -> None:
    """Raise InvalidInput unless `groups` has a text for each of n samples, usable as a name."""
    if groups.shape != (n,) or not all(isinstance(name, str) for name in groups):
        raise InvalidInput(f"groups are {n} texts or whole numbers, one for each sample")
    for name in np.unique(groups):
        if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
            raise InvalidInput(
                f"a group that names a device has 1 to {MAX_NAME_CHARS} printable characters, got "
                f"{str(name)[:40]!r}"
            )


def _check_devices(devices: int, samples: int) -> None:
    most = min(MAX_DEVICES, samples // LEAST_SAMPLES)
    if not 1 <= devices <= most:
        raise InvalidInput(
            f"{samples} samples give 1 to {most} devices of at least {LEAST_SAMPLES} each, got "
            f"{devices}"
        )

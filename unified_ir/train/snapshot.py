"""A snapshot: everything a run needs to continue as if it had never stopped, and its file.

The file is a container of kind "checkpoint" with `state.safetensors` (every tensor with its role)
and `progress.json`; it is written atomically. Reading copies the arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.ir.graph import Array, Role
from triplane.unified_ir.train.history import History, Place, Row

STATE: Final = "state.safetensors"
PROGRESS: Final = "progress.json"
CALLBACKS: Final = "callbacks.safetensors"
MAX_PROGRESS_BYTES: Final = 64 << 20
FORMAT: Final = 1


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state and position of a run.

    samples: rows of its data per epoch, 0 if unknown; the order of batches depends on it, on
    `seed` and on `batch_size`.
    """

    state: Mapping[str, Array]
    roles: Mapping[str, Role]
    place: Place
    history: History
    seed: int
    batch_size: int
    samples: int
    identity: Mapping[str, str] = field(default_factory=dict)
    """The identity of the run, see `identity`; empty in files of older versions."""
    callbacks: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    """The state of each callback that has any, by its name."""

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        place = asdict(replace(self.place, counts={}))
        place["counts"] = {k: a.tolist() for k, a in self.place.counts.items()}
        # Older versions do not know the field; a run that does not need it writes the same bytes as
        # they.
        if not self.place.counted:
            del place["counted"]
        progress = {
            "format": FORMAT,
            "place": place,
            "history": self.history.rows,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": self.samples,
            "identity": dict(self.identity),
        }
        parts = [
            container.part(PROGRESS, json.dumps(progress, sort_keys=True).encode()),
            container.tensor_part(STATE, self.state, {k: str(r) for k, r in self.roles.items()}),
        ]
        kept = {f"{name}/{k}": a for name, s in self.callbacks.items() for k, a in s.items()}
        if kept:  # a run without such callbacks writes the same bytes as older versions
            parts.append(container.tensor_part(CALLBACKS, kept, {}))
        # The temporary file is read back before it takes its name: a checkpoint that cannot be
        # loaded must not replace one that can.
        container.write(path, "checkpoint", parts, check=_opened)


def _opened(path: Path) -> tuple[Container, dict[str, Any]]:
    """Return the file, with every byte verified, and its progress."""
    file = Container(path, kind="checkpoint")
    file.verify()
    return file, _progress(file)


def read(path: Path) -> Snapshot:
    """Read a snapshot; Corrupt names the damaged part, NotFound means that there is no file."""
    file, progress = _opened(path)
    # Copies, so that the file need not stay mapped.
    state = {name: tensor.data.copy() for name, tensor in file.tensors(STATE).items()}
    try:
        roles = {t.name: Role(t.role) for t in file.manifest.tensors_of(STATE)}
        return Snapshot(
            state=state,
            roles=roles,
            place=_place(progress["place"]),
            history=History([_row(row) for row in progress["history"]]),
            seed=_count(progress["seed"]),
            batch_size=_count(progress["batch_size"]),
            samples=_count(progress["samples"]),
            identity=_texts(progress.get("identity", {})),
            callbacks=_callbacks(file),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{path.name}: part {PROGRESS!r} is not a run's progress: {error}") from error


def _callbacks(file: Container) -> dict[str, dict[str, Array]]:
    kept: dict[str, dict[str, Array]] = {}
    if any(part.name == CALLBACKS for part in file.manifest.parts):
        for name, tensor in file.tensors(CALLBACKS).items():
            owner, _, key = name.partition("/")
            kept.setdefault(owner, {})[key] = tensor.data.copy()
    return kept


def _progress(file: Container) -> dict[str, Any]:
    where = f"{file.path.name}: part {PROGRESS!r}"
    data = file.part(PROGRESS)
    # Parsed JSON takes many times the memory of its text.
    if len(data) > MAX_PROGRESS_BYTES:
        raise Corrupt(f"{where}: {len(data)} bytes, at most {MAX_PROGRESS_BYTES} are read")
    try:
        record = json.loads(bytes(data))
    # RecursionError: a file of nothing but opening brackets.
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise Corrupt(f"{where} is not of format {FORMAT}")
    return record


def _place(record: Any) -> Place:
    counts = {k: _count(record[k]) for k in ("epoch", "position", "step", "rows")}
    tallies = record.get("counts", {})
    if not isinstance(tallies, dict):
        raise TypeError("counts map names to arrays")
    arrays = {str(k): _numbers(v) for k, v in tallies.items()}
    counted = _row(record.get("counted", {}))
    return Place(**counts, sums=_row(record["sums"]), counts=arrays, counted=counted)


def _numbers(value: Any) -> Array:
    array = np.array(value)
    if array.dtype.kind not in "if":
        raise TypeError(f"{str(value)[:40]} is not an array of numbers")
    return array.astype(np.float64)


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise TypeError("an identity maps names to texts")
    return value


def _row(value: Any) -> Row:
    if not isinstance(value, dict):
        raise TypeError("a row maps names to numbers")
    return {str(k): _number(v) for k, v in value.items()}


def _number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{x!r} is not a number")
    return x


def _count(x: Any) -> int:
    if _number(x) < 0 or not math.isfinite(x) or x != int(x):
        raise ValueError(f"{x!r} is not a count")
    return int(x)

"""The noise of private runs, one file for each round, in a folder that only the cloud reads.

Noise is drawn once for a round. Its file, which also names the charge, is synced before the state
that depends on it is computed, so that a cloud that was killed uses the same noise again: two draws
for one sum would let whoever sees both states average the noise away. Once the round is published
its file is renamed; that noise must not meet another sum, as it would after a restored database
brought the round back. It stays while later rounds take it back, and is removed afterwards.

The file also names the updates that the noise was drawn for. A kill may come between the commit and
the rename; if the database is restored then, the round repeats with other updates and draws again.
The difference of two sums with one noise would have none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto.disk import OS_DISK, Disk, refusal, write_atomic
from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.privacy.budget import RunBudget
from triplane.unified_ir.federated.privacy.release import RoundNoise
from triplane.unified_ir.federated.privacy.secret import Integers
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container

KIND: Final = "checkpoint"
TENSORS: Final = "noise.safetensors"
CHARGE: Final = "charge.json"
UPDATES: Final = "updates.txt"
STEPS: Final = "steps"
BITS: Final = "bits"
DRAWN: Final = ".drawn"
PUBLISHED: Final = ".published"

Draw = Callable[[Sequence[Integers]], RoundNoise]
"""Draws the noise of a round; takes that of the rounds before, the newest first."""


class NoiseStore:
    """The noise of the runs of one cloud. folder: it gets one for each run. For any thread."""

    def __init__(self, folder: Path, disk: Disk = OS_DISK) -> None:
        self._folder, self._disk = folder, disk
        # A round is noted as published in a thread of its own, maybe while the next one is reduced.
        self._lock = threading.Lock()

    def noise_of(
        self, run: str, budget: RunBudget, bands: int, draw: Draw, *, updates: str
    ) -> RoundNoise:
        """Return the noise of a round, drawn now unless it was before for the same updates.

        budget: with the round charged, whose number is that of the charged rounds. bands: see
        `CentralNoise`. updates: a digest of what the round sums. Conflict: the round was published
        already, or earlier noise is missing. Unavailable: the disk failed.
        """
        folder, number = self._folder / run, budget.rounds
        with self._lock, _refusals(folder):
            self._make(folder)
            # A kill between the commit and the note of it leaves that to do.
            self._note_published(run, number - 1, bands)
            if (newest := max(self._numbers(run), default=0)) >= number:
                raise Conflict(
                    f"round {number} of run {run} was published before, as the noise of round "
                    f"{newest} shows: the database was restored without the noise beside it. A "
                    "repeated round would not be charged to the budget; begin a new run"
                )
            path = self._path(run, number, DRAWN)
            if not path.exists() or _updates_of(path) != updates:
                first = max(1, number - bands + 1)
                past = [self._published(run, n) for n in range(number - 1, first - 1, -1)]
                self._write(path, draw(past), budget, updates)
            return _read(path, budget)

    def note_published(self, run: str, number: int, bands: int) -> None:
        """Record that a round's state is out; remove noise that no later round takes back."""
        with self._lock, _refusals(self._folder / run):
            self._note_published(run, number, bands)

    def _note_published(self, run: str, number: int, bands: int) -> None:
        drawn = self._path(run, number, DRAWN)
        if drawn.exists():
            if bands == 1:
                write_atomic(self._path(run, number, PUBLISHED), b"", self._disk)
                self._disk.remove(drawn)
            else:
                self._disk.replace(drawn, self._path(run, number, PUBLISHED))
                self._disk.sync_folder(drawn.parent)
        for earlier in self._numbers(run):
            # The newest stays as a mark, also where no later round needs it.
            if earlier < number - max(0, bands - 2):
                self._disk.remove(self._path(run, earlier, PUBLISHED))

    def forget(self, run: str) -> None:
        """Remove all noise of a run that is over."""
        folder = self._folder / run
        with self._lock, _refusals(folder):
            for path in folder.glob("*"):
                self._disk.remove(path)
            if folder.exists():
                folder.rmdir()

    def keep_only(self, runs: Collection[str]) -> None:
        """Remove the noise of other runs, which a kill may have left when they ended."""
        left = self._folder.iterdir() if self._folder.exists() else ()
        for run in {path.name for path in left} - set(runs):
            self.forget(run)

    def _make(self, folder: Path) -> None:
        """Make the folder of a run durable, or a power cut takes it away with all its files."""
        self._disk.make_folder(self._folder)
        if not folder.exists():
            folder.mkdir(mode=0o700)
            self._disk.sync_folder(self._folder)

    def _numbers(self, run: str) -> list[int]:
        """Return the numbers of the published rounds whose files are there."""
        paths = (self._folder / run).glob(f"*{PUBLISHED}")
        return [int(path.name.partition(".")[0]) for path in paths]

    def _published(self, run: str, number: int) -> Integers:
        path = self._path(run, number, PUBLISHED)
        if not path.exists():
            raise Conflict(
                f"the noise of round {number} of run {run} is missing, which later rounds take "
                "back in part; restore it together with the database, or begin a new run"
            )
        return _read(path).steps

    def _path(self, run: str, number: int, suffix: str) -> Path:
        return self._folder / run / f"{number}{suffix}"

    def _write(self, path: Path, noise: RoundNoise, budget: RunBudget, updates: str) -> None:
        tensors = {STEPS: noise.steps, BITS: np.array([noise.bits])}
        parts = [
            container.part(CHARGE, json.dumps(budget.to_json()).encode()),
            container.part(UPDATES, updates.encode()),
            container.tensor_part(TENSORS, tensors, dict.fromkeys(tensors, "buffer")),
        ]
        container.write(path, KIND, parts, check=container.verified(KIND), disk=self._disk)


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(error, f"could not keep the noise of a run in {folder}: {error}") from error


def _updates_of(path: Path) -> str:
    """Return the digest of the updates that the noise in a file was drawn for."""
    file = Container(path, kind=KIND)
    file.verify()
    return bytes(file.part(UPDATES)).decode()


def _read(path: Path, budget: RunBudget | None = None) -> RoundNoise:
    """Return the noise in a file; Corrupt unless it is whole and of that charge."""
    file = Container(path, kind=KIND)
    file.verify()
    tensors = file.tensors(TENSORS)
    if tensors.keys() != {STEPS, BITS}:
        raise Corrupt(f"{path} does not hold the noise of a round; begin a new run")
    charge = RunBudget.from_json(json.loads(bytes(file.part(CHARGE))))
    if budget is not None and charge != budget:
        raise Corrupt(f"{path} is the noise of another charge ({charge}); begin a new run")
    return RoundNoise(tensors[STEPS].data.copy(), float(tensors[BITS].data[0]))

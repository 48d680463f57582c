"""The noise of private runs, one file for each round, in a folder that only the cloud reads.

Noise is drawn once for a round. Its file, which also names the charge, is synced before the state
that depends on it is computed, so that a cloud that was killed uses the same noise again: two draws
for one sum would let whoever sees both states average the noise away. Once the round is published
its file is renamed; that noise must not meet another sum, as it would after a restored database
brought the round back. It stays while later rounds take it back, and is removed afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto.disk import OS_DISK, write_atomic
from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.privacy.budget import RunBudget
from triplane.unified_ir.federated.privacy.release import RoundNoise
from triplane.unified_ir.federated.privacy.secret import Integers
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container

KIND: Final = "checkpoint"
TENSORS: Final = "noise.safetensors"
CHARGE: Final = "charge.json"
STEPS: Final = "steps"
BITS: Final = "bits"
DRAWN: Final = ".drawn"
PUBLISHED: Final = ".published"

Draw = Callable[[Sequence[Integers]], RoundNoise]
"""Draws the noise of a round; takes that of the rounds before, the newest first."""


class NoiseStore:
    """The noise of the runs of one cloud. folder: it gets one for each run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def noise_of(self, run: str, budget: RunBudget, bands: int, draw: Draw) -> RoundNoise:
        """Return the noise of a round, drawn now unless it was before.

        budget: with the round charged, whose number is that of the charged rounds. bands: see
        `CentralNoise`. Conflict: the round was published already, or earlier noise is missing.
        """
        folder, number = self._folder / run, budget.rounds
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        # A kill between the commit and the note of it leaves that to do.
        self.note_published(run, number - 1, bands)
        if (newest := max(self._numbers(run), default=0)) >= number:
            raise Conflict(
                f"round {number} of run {run} was published before, as the noise of round {newest} "
                "shows: the database was restored without the noise beside it. A repeated round "
                "would not be charged to the budget; begin a new run"
            )
        path = self._path(run, number, DRAWN)
        if not path.exists():
            first = max(1, number - bands + 1)
            past = [self._published(run, n) for n in range(number - 1, first - 1, -1)]
            self._write(path, draw(past), budget)
        return _read(path, budget)

    def note_published(self, run: str, number: int, bands: int) -> None:
        """Record that a round's state is out; remove noise that no later round takes back."""
        drawn = self._path(run, number, DRAWN)
        if drawn.exists():
            if bands == 1:
                write_atomic(self._path(run, number, PUBLISHED), b"")
                OS_DISK.remove(drawn)
            else:
                OS_DISK.replace(drawn, self._path(run, number, PUBLISHED))
                OS_DISK.sync_folder(drawn.parent)
        for earlier in self._numbers(run):
            # The newest stays as a mark, also where no later round needs it.
            if earlier < number - max(0, bands - 2):
                OS_DISK.remove(self._path(run, earlier, PUBLISHED))

    def forget(self, run: str) -> None:
        """Remove all noise of a run that is over."""
        folder = self._folder / run
        for path in folder.glob("*"):
            OS_DISK.remove(path)
        if folder.exists():
            folder.rmdir()

    def keep_only(self, runs: Collection[str]) -> None:
        """Remove the noise of other runs, which a kill may have left when they ended."""
        left = self._folder.iterdir() if self._folder.exists() else ()
        for run in {path.name for path in left} - set(runs):
            self.forget(run)

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

    def _write(self, path: Path, noise: RoundNoise, budget: RunBudget) -> None:
        tensors = {STEPS: noise.steps, BITS: np.array([noise.bits])}
        parts = [
            container.part(CHARGE, json.dumps(budget.to_json()).encode()),
            container.tensor_part(TENSORS, tensors, dict.fromkeys(tensors, "buffer")),
        ]
        container.write(path, KIND, parts, check=container.verified(KIND))


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

"""Checkpoints: the newest complete snapshots of a run, in a folder of their own.

A process that is killed at any moment leaves only complete files. A damaged file is skipped with a
warning and the one before it is used; the steps since then are trained again, to the same bits.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path
from typing import Final

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.engines import ProcessGroup
from triplane.unified_ir.train.callbacks import Callback
from triplane.unified_ir.train.run import Run
from triplane.unified_ir.train.snapshot import Snapshot, read

NAME: Final = re.compile(r"step-(\d{12})\.tpc")
LEFTOVER: Final = ".step-*.tmp"
"""Temporary files that a process leaves when it is killed while writing."""


class Checkpoint(Callback):
    """Saves a run in `folder` every `every_epochs` epochs and, if given, every `every_steps` steps.

    Keeps the newest `keep` files. Only one run at a time may use a folder. In a run of several
    processes the first one writes, and the others wait until it has.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_epochs: int = 1,
        keep: int = 2,
    ) -> None:
        if min(every_epochs, keep, every_steps or 1) < 1:
            raise InvalidInput(
                "Checkpoint needs every_epochs, every_steps and keep >= 1, got "
                f"{every_epochs}, {every_steps}, {keep}"
            )
        self.folder = Path(folder)
        self.every_steps, self.every_epochs, self.keep = every_steps, every_epochs, keep
        self._saved: tuple[int, int] | None = None
        self.processes: ProcessGroup | None = None

    def files(self) -> list[Path]:
        """Return the checkpoints in the folder, oldest first."""
        paths = self.folder.glob("step-*.tpc") if self.folder.is_dir() else ()
        return sorted(path for path in paths if NAME.fullmatch(path.name))

    def newest(self) -> Snapshot | None:
        """Return the newest undamaged snapshot; None in an empty folder.

        Corrupt if there are files and all are damaged: starting again would hide the loss.
        """
        damaged = []
        for path in reversed(self.files()):
            try:
                return read(path)
            except Corrupt as error:
                damaged.append(path)
                warnings.warn(
                    f"checkpoint {path.name} is damaged and skipped: {error}", stacklevel=4
                )
        if damaged:
            raise Corrupt(
                f"all {len(damaged)} checkpoints in {self.folder} are damaged; move them to "
                "another folder to start again"
            )
        return None

    def save(self, snapshot: Snapshot) -> Path:
        """Write one more checkpoint, then delete the oldest beyond `keep`."""
        path = self.folder / f"step-{snapshot.place.step:012d}.tpc"
        if self._writes:
            snapshot.write(path)
            # Only after the new file is complete, so that at every moment a complete one exists.
            for old in self.files()[: -self.keep]:
                old.unlink(missing_ok=True)
        if self.processes is not None:
            self.processes.wait("checkpoint")
        return path

    @property
    def _writes(self) -> bool:
        return self.processes is None or self.processes.is_first

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        self._saved = None
        if not self._writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # Only one run may use the folder, so these belong to a process that was killed.
        for left in self.folder.glob(LEFTOVER):
            with contextlib.suppress(OSError):
                left.unlink()

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        if self.every_steps is not None and run.step % self.every_steps == 0:
            self._save(run)

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        if run.epoch % self.every_epochs == 0:
            self._save(run)

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        self._save(run)

    def _save(self, run: Run) -> None:
        here = (run.step, run.epoch)
        # The end of a step, of an epoch and of the run may coincide; one file is enough.
        if here != self._saved:
            self.save(run.snapshot())
            self._saved = here

"""Progress of a transfer on standard error: a bar on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

from triplane.cloud.cli.text import size
from triplane.unified_ir.cli.shell import CommandOutput

Progress = Callable[[int, int], None]
TENTHS: Final = 10


@contextlib.contextmanager
def reported(output: CommandOutput, what: str) -> Iterator[Progress]:
    """Give a function of (bytes done, total bytes) that shows the progress of `what`."""
    if output.as_json or not sys.stderr.isatty():
        yield lines(output.note, what)
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def lines(note: Callable[[str], None], what: str) -> Progress:
    """Print a line whenever another tenth is done; a small file gives one line."""
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        tenth = TENTHS if done >= total else done * TENTHS // total
        if tenth > shown:
            shown = tenth
            note(f"{what}: {tenth * 10}% of {size(total)}")

    return progress

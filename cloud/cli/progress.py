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
NUMBERS: Final = 44
"""Characters of size, speed and remaining time."""


@contextlib.contextmanager
def reported(output: CommandOutput, what: str) -> Iterator[Progress]:
    """Give a function of (bytes done, total bytes) that shows the progress of `what`."""
    if output.as_json or not sys.stderr.isatty():
        yield lines(output.note, what)
        return
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    console = Console(stderr=True)
    # A long name of a file would leave no room for the numbers.
    name = Column(no_wrap=True, overflow="ellipsis", max_width=max(12, console.width - NUMBERS))
    columns = (
        progress.TextColumn("{task.description}", markup=False, table_column=name),
        progress.BarColumn(),
        progress.DownloadColumn(table_column=Column(no_wrap=True)),
        progress.TransferSpeedColumn(table_column=Column(no_wrap=True)),
        progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    with progress.Progress(*columns, console=console) as bar:
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

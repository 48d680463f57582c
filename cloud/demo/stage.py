"""The folder and data of the demo, and its measurements so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triplane.unified_ir.cli.shell import CommandOutput
from triplane.unified_ir.data.dataset import Dataset


@dataclass(slots=True)
class DemoSummary:
    """Measurements of each step, in the order of the demo."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, step: str, what: str, figure: str, **facts: Any) -> None:
        """Add a line of the table, and the same facts for `--json`."""
        self.rows.append((step, what, figure))
        self.facts.update(facts)

    def table(self) -> str:
        """Return the table for people."""
        widths = [max(len(row[i]) for row in self.rows) for i in (0, 1)]
        lines = [f"  {s:<{widths[0]}}  {w:<{widths[1]}}  {f}" for s, w, f in self.rows]
        return "\n".join(["", "Summary", *lines])


@dataclass(frozen=True, slots=True)
class DemoStage:
    """The folder, output and data of the demo. rounds: number for each federated algorithm."""

    folder: Path
    output: CommandOutput
    data: str
    train: Dataset
    held_out: Dataset
    summary: DemoSummary
    rounds: int

    def file(self, name: str) -> Path:
        """Return the path of a file of the demo."""
        return self.folder / name

    def say(self, text: str = "") -> None:
        """Print a line for the reader."""
        self.output.note(text)


def first(data: Dataset, most: int) -> Dataset:
    """Return at most `most` samples."""
    return data.take(min(most, len(data)))

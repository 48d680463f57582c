"""One attack as a row: what is tried, where it is stopped, what is said; rows as a table."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GAP = "..."
"""In a message: whatever stands there depends on keys, digests or sizes."""


@dataclass(frozen=True, slots=True)
class Case:
    """attack: as the list of attacks names it. by: the module that stops it. do: makes the attack.

    message: as it is said, with `GAP` for what differs from run to run. kind: of the incident, or
    the family of the error, that tells of it.
    """

    attack: str
    tried: str
    by: str
    message: str
    do: Callable[..., Any]
    kind: str

    @property
    def id(self) -> str:
        """As pytest shows it."""
        return f"{self.attack}: {self.tried}"

    def says(self, text: str) -> bool:
        """Whether a refusal says what the row says."""
        pattern = ".*".join(map(re.escape, self.message.split(GAP)))
        return re.search(pattern, text, re.DOTALL) is not None

    def check(self, text: str) -> None:
        """AssertionError where it does not."""
        assert self.says(text), f"{self.id}\n  row:  {self.message}\n  said: {text}"


def table(cases: list[Case]) -> str:
    """Rows of a page, in the order of the cases."""
    lines = ["| attack | what is tried | stopped by | message |", "|---|---|---|---|"]
    lines += [
        f"| {case.attack} | {case.tried} | `{case.by}` | {_cell(case.message)} |" for case in cases
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")

"""Kinds of machines, and the names of the targets that run on them (rows: `convert.targets`)."""

import platform
from typing import Final

ALIASES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""Other names that `platform.machine()` gives."""
TARGETS: Final = {"x86_64": ("ort-x64",), "aarch64": ("ort-arm64",)}
"""Names of targets by machine, best first."""


def this_machine() -> str:
    """Return the kind of this machine, whatever its system calls it."""
    name = platform.machine().lower()
    return ALIASES.get(name, name)


def targets_here() -> tuple[str, ...]:
    """Return the names of the targets that this machine runs, best first."""
    return TARGETS.get(this_machine(), ())

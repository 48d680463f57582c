"""How batches are read ahead: by how many threads or processes, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput

MAX_WORKERS: Final = 256
MAX_PREFETCH: Final = 1024


@dataclass(frozen=True)
class Loading:
    """How batches are read ahead.

    workers: threads or processes that read; 0 reads each batch when it is asked for. prefetch:
    batches that each worker may be ahead. processes: workers are child processes, each with a
    pipeline of its own; the pipeline must have a JSON form, and its Python functions must be
    importable by their names.
    """

    workers: int = 0
    prefetch: int = 2
    processes: bool = False

    def __post_init__(self) -> None:
        for what, value, low, high in (
            ("workers", self.workers, 0, MAX_WORKERS),
            ("prefetch", self.prefetch, 1, MAX_PREFETCH),
        ):
            if type(value) is not int or not low <= value <= high:
                raise InvalidInput(f"{what} must be a whole number in {low}..{high}, got {value!r}")
        if self.processes and not self.workers:
            raise InvalidInput("processes=True needs workers=N, the number of processes")

"""The cloud of `rounds.py`: `triplane.cloud` with clocks around what a round waits for.

    python benchmarks/rounds_cloud.py OPTIONS FIGURES

OPTIONS are those of `python -m triplane.cloud`. At each SIGUSR1 it writes to the file FIGURES the
seconds spent so far in each part, over all threads: fsync, hash, reduce, check (of an update), and
commit (with its own fsync); and how often each was entered.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from triplane.cloud import __main__ as cloud
from triplane.cloud.federation import results
from triplane.cloud.store import writing
from triplane.proto import disk
from triplane.unified_ir.federated.algorithms import aggregators
from triplane.unified_ir.files import digests

SPENT: defaultdict[str, float] = defaultdict(float)
CALLS: defaultdict[str, int] = defaultdict(int)
LOCK = threading.Lock()


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, its time added to that of the part."""

    @wraps(call)
    def timing(*args: Any, **named: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            with LOCK:
                SPENT[part] += time.perf_counter() - started_s
                CALLS[part] += 1

    return timing


def put_clocks() -> None:
    """Around the parts."""
    for owner, name, part in (
        (disk.OsDisk, "sync", "fsync"),
        (disk.OsDisk, "sync_folder", "fsync"),
        (results, "digest_of", "hash"),
        (digests, "sha256_of", "hash"),
        (aggregators, "reduce_round", "reduce"),
        (writing.Writer, "_do", "commit"),
    ):
        setattr(owner, name, timed(part, getattr(owner, name)))


def main() -> None:
    """Serve until told."""
    options, figures = json.loads(sys.argv[1]), Path(sys.argv[2]).resolve()

    def tell(_number: int, _frame: object) -> None:
        found = SPENT | {f"{part} calls": count for part, count in CALLS.items()}
        made = figures.with_suffix(".new")
        made.write_text(json.dumps(found))
        made.replace(figures)

    signal.signal(signal.SIGUSR1, tell)
    put_clocks()
    cloud.main(cloud.parse([json.dumps(options)]))


if __name__ == "__main__":
    main()

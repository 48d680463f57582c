"""`python -m triplane.device HOME`: the device process. One line of JSON says that it is ready."""

import argparse
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from triplane.proto import signals
from triplane.proto.errors import NotFound, TriplaneError
from triplane.proto.logs import configure_logging, say_ready

ARENA_MAX: Final = -8
"""glibc's M_ARENA_MAX."""
MMAP_THRESHOLD: Final = -3
"""glibc's M_MMAP_THRESHOLD."""
DONTNEED: Final = 4
"""Linux's MADV_DONTNEED."""
LARGE_BYTES: Final = 1 << 20
STOP_S: Final = 30.0
"""Longest time from a signal to the end, even if a graph still runs; a kill loses nothing."""


def main(
    home: Path | str,
    data: Path | str | None = None,
    *,
    population: str | None = None,
    held_out: float | None = None,
    x: Sequence[str] = (),
    y: Sequence[str] = (),
    form: Mapping[str, Any] | None = None,
    app: str | None = None,
    log_level: str = "INFO",
    line: Callable[[dict[str, object]], str] = json.dumps,
) -> None:
    """Take part in runs until SIGTERM or SIGINT.

    data: a file or folder of samples; x, y: its columns; form: see `FederatedClient`. app: the name
    of the owner's `ClientApp`, as for `device.flower.load_app`. line: formats the facts of the
    ready line.
    """
    signals.restore_defaults()
    # Before the imports below, which allocate most of what the process holds.
    hold_little_memory()
    # Imported after `restore_defaults`, so that a signal during slow imports ends the process.
    from triplane.device.client import FederatedClient, Graphs
    from triplane.device.home import DeviceHome

    configure_logging(log_level)
    give_back_code()
    if data is None:
        # Samples may be missing for the reason that nobody enrolled this device.
        DeviceHome(Path(home)).require_enrolled()
    client = FederatedClient(
        home, data, population=population, held_out=held_out, x=x, y=y, form=form, app=app,
        graphs=Graphs.CHILD,
    )  # fmt: skip
    termination = signals.Termination(client.stop, limit_s=STOP_S)

    def ready() -> None:
        record = {
            "device": client.name,
            "population": client.settings.population,
            "examples": client.examples,
            "held_out": client.held_out_samples,
            "pid": os.getpid(),
        }
        say_ready(line(record))

    try:
        client.run(ready)
    except TriplaneError:  # it never began: the caller reports why, without a time limit
        termination.close()
        raise
    finally:
        # `run` has returned; from now on a thread that hangs cannot keep the process longer than
        # STOP_S.
        termination.request()


def load_app(name: str) -> Any:
    """Return the owner's app. NotFound if flwr is not installed."""
    try:
        from triplane.device.flower import load_app as load
    except ModuleNotFoundError as error:
        raise NotFound(
            f"a ClientApp needs Flower on the device ({error}); pip install 'triplane[flower]'"
        ) from error
    return load(name)


def text(record: dict[str, object]) -> str:
    """Return the ready line for people."""
    return (
        f"{record['device']}: takes part in runs of {record['population']} with "
        f"{record['examples']} samples, {record['held_out']} held out"
    )


def hold_little_memory() -> None:
    """Use one heap for all threads, and return large arrays to the system when they are freed."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        library = ctypes.CDLL(None)
        # By default glibc makes up to eight heaps per core, each of which keeps its own free
        # memory.
        library.mallopt(ARENA_MAX, 1)
        # Setting the threshold also stops glibc from raising it after the first large free.
        library.mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def give_back_code() -> None:
    """Drop the pages of machine code that ran while libraries were loaded.

    The kernel reads them again where they are needed. This saves 5 MB in a device at work. It
    concerns only executable mappings, which are never written: relocated data lies elsewhere.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for line in Path("/proc/self/maps").read_text().splitlines():
            where, rights, *_, name = line.split(maxsplit=5)
            if rights == "r-xp" and ".so" in name:
                begin, end = (int(side, 16) for side in where.split("-"))
                library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), DONTNEED)


def _command() -> None:
    parser = argparse.ArgumentParser(prog="python -m triplane.device")
    parser.add_argument("home")
    parser.add_argument("--held-out", type=float)
    for option in ("--data", "--population", "--app"):
        parser.add_argument(option)
    for option in ("--x", "--y"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("--log-level", default="INFO")
    try:
        main(**vars(parser.parse_args()))
    except (TriplaneError, OSError) as error:
        sys.exit(f"device: {error}")


if __name__ == "__main__":
    _command()

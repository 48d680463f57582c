"""`python -m triplane.device HOME`: the device process. One line of JSON says that it is ready."""

import argparse
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable
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
"""From a signal to the end, whatever a graph still computes; a killed device has lost nothing."""


def main(
    home: Path | str,
    samples: Path | str | None = None,
    *,
    population: str | None = None,
    held_out: float | None = None,
    app: str | None = None,
    log_level: str = "INFO",
    line: Callable[[dict[str, object]], str] = json.dumps,
) -> None:
    """Take part in runs until SIGTERM or SIGINT; `line` makes the ready line of its record.

    app: names the owner's `ClientApp`, as `device.flower.load_app` takes it.
    """
    signals.restore_defaults()
    hold_little_memory()
    from triplane.device.client import FederatedClient, Graphs

    configure_logging(log_level)
    give_back_code()
    client = FederatedClient(
        home, samples, population=population, held_out=held_out, app=app, graphs=Graphs.CHILD
    )
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
    except TriplaneError:  # it never began: the caller says why, in its own time
        termination.close()
        raise
    finally:
        termination.request()


def load_app(name: str) -> Any:
    """The owner's app. NotFound: flwr is not installed."""
    try:
        from triplane.device.flower import load_app as load
    except ModuleNotFoundError as error:
        raise NotFound(
            f"a ClientApp needs Flower on the device ({error}); pip install 'triplane[flower]'"
        ) from error
    return load(name)


def text(record: dict[str, object]) -> str:
    """The ready line for people."""
    return (
        f"{record['device']}: takes part in runs of {record['population']} with "
        f"{record['examples']} samples, {record['held_out']} held out"
    )


def hold_little_memory() -> None:
    """One heap for all threads, and large arrays given back as soon as they are freed."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has other ways
        library = ctypes.CDLL(None)
        library.mallopt(ARENA_MAX, 1)
        library.mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def give_back_code() -> None:
    """Let go of machine code that ran while libraries were loaded; what is needed comes back.

    A device at work is 5 MB smaller for it. Only executable mappings: they are never written, and
    what the loader relocated lies elsewhere.
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
    parser.add_argument("home", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--population")
    parser.add_argument("--held-out", type=float)
    parser.add_argument("--app")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    try:
        main(
            arguments.home,
            arguments.data,
            population=arguments.population,
            held_out=arguments.held_out,
            app=arguments.app,
            log_level=arguments.log_level,
        )
    except (TriplaneError, OSError) as error:
        sys.exit(f"device: {error}")


if __name__ == "__main__":
    _command()

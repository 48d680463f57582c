"""The loaded versions: load one beside the others, switch in one assignment, drain, drop.

A call takes one immutable snapshot and never waits for a load. If a version is retired between the
lookup and the begin of the call, it is looked up again, so no call uses a dropped session. A load
that fails changes only the index.
"""

import contextlib
import ctypes
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from triplane.edge.serving.running import CallContext, Direct, Ran, Runner
from triplane.edge.serving.servable import Array, Contract, Servable, contract_of
from triplane.edge.serving.statistics import Statistics
from triplane.proto.errors import Conflict, InvalidInput, NotFound, TriplaneError, Unavailable

logger = logging.getLogger(__name__)

MAX_NAME_CHARS: Final = 256  # of a model, and of a version
DRAIN_S: Final = 60.0  # how long a switch waits for the calls of the old version

Plan = Callable[[Servable, Contract, Statistics], Runner]


class Gone:
    """The runner of a dropped version, which keeps nothing in memory."""

    merged_rows = 0

    def run(self, feeds: Mapping[str, Array], rows: int, call: CallContext) -> Ran:
        """Raise Unavailable."""
        raise Unavailable("this version was unloaded while the call waited; call again")


class LoadedVersion:
    """One loaded version and the calls that use it."""

    def __init__(self, servable: Servable, plan: Plan) -> None:
        started = time.perf_counter()
        self.name, self.version = servable.name, servable.version
        self.contract = contract_of(servable)
        self.labels = servable.labels
        self.statistics = Statistics()
        self.runner: Runner = plan(servable, self.contract, self.statistics)
        self.load_s = time.perf_counter() - started
        self._lock = threading.Lock()
        self._calls = 0
        self._retired = False
        self._idle = threading.Event()

    @property
    def calls(self) -> int:
        """Number of calls in progress."""
        return self._calls

    def enter(self) -> bool:
        """Begin a call; False if the version is retired and must be looked up again."""
        with self._lock:
            if self._retired:
                return False
            self._calls += 1
            return True

    def leave(self) -> None:
        """End a call."""
        with self._lock:
            self._calls -= 1
            if self._retired and not self._calls:
                self._idle.set()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those in progress; False if some remain."""
        with self._lock:
            self._retired = True
            if not self._calls:
                self._idle.set()
        drained = self._idle.wait(timeout_s)
        self.runner = Gone()  # frees the session now, or with the last call that runs it
        return drained


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One entry of the index."""

    name: str
    version: str
    state: str
    reason: str = ""


class Repository:
    """The models that this process serves, by name and version."""

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan or (lambda servable, _, statistics: Direct(servable, statistics))
        self._ready: Mapping[str, Mapping[str, LoadedVersion]] = {}  # replaced whole, never changed
        self._others: dict[tuple[str, str], IndexEntry] = {}  # loading, unloading or failed
        self._changing = threading.Lock()  # one load, switch or unload at a time

    def add(self, servable: Servable) -> LoadedVersion:
        """Serve a further version beside the others. Conflict if it is there already."""
        with self._changing:
            if servable.version in self._ready.get(servable.name, {}):
                raise Conflict(
                    f"model {servable.name!r} version {servable.version!r} is already loaded; "
                    "convert it with another --model-version, or remove the other one"
                )
            version = self._load(servable)
            self._publish(version, {**self._ready.get(version.name, {}), version.version: version})
        return version

    def switch(self, servable: Servable) -> LoadedVersion:
        """Serve this version in place of all others of its model, without a failed call.

        New calls use the new version from one assignment on. The old ones are drained and dropped
        before this returns. If the load fails, its error is raised and nothing has changed.
        """
        with self._changing:
            version = self._load(servable)
            old = self._ready.get(version.name, {})
            self._publish(version, {version.version: version})
            self._drop(old.values())
        return version

    def unload(self, name: str, version: str = "") -> None:
        """Drain and drop one version, or all of a model. NotFound."""
        with self._changing:
            held = self._ready.get(name, {})
            gone = [v for v in held.values() if version in {"", v.version}]
            if not gone:
                raise NotFound(self._unknown(name, version))
            kept = {key: v for key, v in held.items() if v not in gone}
            others = {key: v for key, v in self._ready.items() if key != name}
            self._ready = {**others, name: kept} if kept else others
            self._drop(gone)

    def close(self) -> None:
        """Unload everything."""
        for name in [*self._ready]:
            self.unload(name)

    @contextlib.contextmanager
    def using(self, name: str, version: str = "") -> Iterator[LoadedVersion]:
        """Hold one version during a call. NotFound."""
        while not (held := self.find(name, version)).enter():
            pass  # it was retired meanwhile, and the snapshot has its successor already
        try:
            yield held
        finally:
            held.leave()

    def find(self, name: str, version: str = "") -> LoadedVersion:
        """Return the version, the newest for an empty string. NotFound."""
        held = self._ready.get(name, {})
        loaded = held.get(version) if version else next(reversed([*held.values()]), None)
        if loaded is None:
            raise NotFound(self._unknown(name, version))
        return loaded

    def versions(self, name: str = "") -> list[LoadedVersion]:
        """Return the ready versions of one model, or of all, oldest first."""
        models = [self._ready.get(name, {})] if name else self._ready.values()
        return [version for held in models for version in held.values()]

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return every version and its state, by name and age."""
        entries = {
            (v.name, v.version): IndexEntry(v.name, v.version, "READY") for v in self.versions()
        }
        if not ready_only:
            entries = {**self._others.copy(), **entries}
        return [entries[key] for key in sorted(entries, key=lambda key: (key[0], _age(key[1])))]

    def _load(self, servable: Servable) -> LoadedVersion:
        key = servable.name, servable.version
        for what, text in zip(("name", "version"), key, strict=True):
            if not 1 <= len(text) <= MAX_NAME_CHARS or not text.isprintable():
                raise InvalidInput(
                    f"a model's {what} has 1 to {MAX_NAME_CHARS} printable characters, "
                    f"got {len(text)}: {text[:64]!r}"
                )
        self._others[key] = IndexEntry(*key, "LOADING")
        try:
            version = LoadedVersion(servable, self._plan)
        except Exception as error:
            # One failure per model is kept, so the index cannot grow with failing loads.
            self._forget_failures(servable.name)
            reason = str(error) if isinstance(error, TriplaneError) else type(error).__name__
            self._others[key] = IndexEntry(*key, "UNAVAILABLE", reason)
            facts = {"model": key[0], "version": key[1], "reason": reason}
            logger.warning("model load failed", extra=facts)
            raise
        self._others.pop(key)
        return version

    def _publish(self, version: LoadedVersion, held: Mapping[str, LoadedVersion]) -> None:
        self._forget_failures(version.name)
        by_age = {key: held[key] for key in sorted(held, key=_age)}
        self._ready = {**self._ready, version.name: by_age}
        facts = {"model": version.name, "version": version.version}
        logger.info("model ready", extra={**facts, "seconds": round(version.load_s, 6)})

    def _drop(self, versions: Iterable[LoadedVersion]) -> None:
        for version in [*versions]:
            key = version.name, version.version
            replaced = key[1] in self._ready.get(key[0], {})
            if not replaced:
                self._others[key] = IndexEntry(*key, "UNLOADING")
            drained = version.drain(DRAIN_S)
            if not replaced:
                self._others.pop(key)
            facts = {"model": key[0], "version": key[1], "drained": drained}
            logger.info("model dropped", extra=facts)
        trim_memory()

    def _forget_failures(self, name: str) -> None:
        self._others = {key: entry for key, entry in self._others.items() if key[0] != name}

    def _unknown(self, name: str, version: str) -> str:
        if held := self._ready.get(name, {}):
            return f"model {name!r} has no version {version[:64]!r}; it has {[*held]}"
        return f"no model {name[:64]!r}; this server has {[*self._ready]}"


def _age(version: str) -> list[tuple[int, str]]:
    """Return a sort key for versions: numbers count by value, so `10` is newer than `9`."""
    parts = re.split(r"(\d+)", version)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def trim_memory() -> None:
    """Return freed pages to the system; glibc would keep those of a dropped session."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

"""A disk that can say what a power cut at this instant might have left.

Contents that were not synced are there in part; names that were not synced (a folder's own sync is
what makes them durable) are there up to some change. Which part is drawn from a seed, so that one
run over a program gives as many outcomes as one likes.
"""

import random
from pathlib import Path
from typing import BinaryIO

from triplane.proto.disk import OsDisk


class PowerCut(BaseException):
    """No program catches it, and no program runs on after it."""


class CrashDisk(OsDisk):
    """Real files below `root`; stops with PowerCut at operation number `fail_at`.

    unsynced: names of methods to treat as if they did nothing, to show that a test can fail.
    """

    def __init__(self, root: Path, *, fail_at: int = 1 << 30, unsynced: tuple[str, ...] = ()):
        self.root, self.fail_at, self.unsynced = root, fail_at, unsynced
        self.count = 0
        self._open: list[BinaryIO] = []
        self._synced: dict[int, bytes] = {}
        self._ids: dict[Path, int] = {}
        self._names: dict[Path, dict[str, int]] = {}  # durable names by folder
        self._changes: dict[Path, list[tuple[str, int | None]]] = {}
        for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]:
            self._names[folder] = {}
            for path in folder.iterdir():
                if path.is_file():
                    self._ids[path] = len(self._synced)
                    self._names[folder][path.name] = self._ids[path]
                    self._synced[self._ids[path]] = path.read_bytes()

    def close(self) -> None:
        """Close what the program that was cut off had open."""
        for file in self._open:
            file.close()

    def outcome(self, into: Path, rng: random.Random) -> None:
        """Write to `into` what a power cut now might leave."""
        live = {number: path for path, number in self._ids.items()}
        for folder, names in self._names.items():
            target = into / folder.relative_to(self.root)
            target.mkdir(parents=True, exist_ok=True)
            left = dict(names)
            changes = self._changes.get(folder, [])
            for name, number in changes[: rng.randint(0, len(changes))]:
                if number is None:
                    left.pop(name, None)
                else:
                    left[name] = number
            for name, number in left.items():
                (target / name).write_bytes(self._left_of(number, live.get(number), rng))

    def _left_of(self, number: int, path: Path | None, rng: random.Random) -> bytes:
        synced = self._synced.get(number, b"")
        if path is None or not path.exists():
            return synced
        now = path.read_bytes()
        if not now.startswith(synced):
            return rng.choice([synced, now])
        return now[: rng.randint(len(synced), len(now))]

    def _step(self) -> None:
        self.count += 1
        if self.count >= self.fail_at:
            raise PowerCut

    def _note(self, path: Path, number: int | None) -> None:
        self._changes.setdefault(path.parent, []).append((path.name, number))

    def _begin(self, path: Path) -> None:
        self._ids[path] = max(self._synced, default=-1) + 1
        self._synced[self._ids[path]] = b""
        self._note(path, self._ids[path])

    def create(self, path):
        self._step()
        self._open.append(path.open("xb", buffering=0))
        self._begin(path)
        return self._open[-1]

    def append(self, path):
        self._step()
        if path not in self._ids:
            self._begin(path)
        self._open.append(path.open("ab", buffering=0))
        return self._open[-1]

    def sync(self, file):
        self._step()
        file.flush()
        if "sync" not in self.unsynced:
            path = Path(file.name)
            self._synced[self._ids[path]] = path.read_bytes()

    def replace(self, source, target):
        self._step()
        source.replace(target)
        self._ids[target] = self._ids.pop(source)
        self._note(source, None)
        self._note(target, self._ids[target])

    def remove(self, path):
        self._step()
        path.unlink()
        self._ids.pop(path, None)
        self._note(path, None)

    def make_folder(self, path):
        if not path.is_dir():
            self._step()
            path.mkdir(parents=True)
        self._names.setdefault(path, {})

    def sync_folder(self, folder):
        self._step()
        if "sync_folder" in self.unsynced:
            return
        for name, number in self._changes.pop(folder, []):
            if number is None:
                self._names[folder].pop(name, None)
            else:
                self._names[folder][name] = number

"""A disk whose power fails at its n-th operation and which then has only what was synced."""

import os
from pathlib import Path

from triplane.proto.disk import OsDisk


class PowerCut(BaseException):
    """No program catches it, and no program runs on after it."""


class FailingDisk(OsDisk):
    """Real files under `folder`; `restore` brings back what a power cut leaves.

    forgets: drop contents and names that were not synced, as a power cut does; otherwise keep what
    reached the system, as kill -9 does.
    """

    def __init__(self, folder: Path, fail_at: int, *, forgets: bool) -> None:
        self.folder, self.fail_at, self.forgets = folder, fail_at, forgets
        self.count = 0
        self._content: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}
        for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
            for file in (p for p in path.iterdir() if p.is_file() and not p.is_symlink()):
                self._content[file.stat().st_ino] = file.read_bytes()
            self._remember(path)

    @property
    def failed(self) -> bool:
        return self.count >= self.fail_at

    def restore(self) -> None:
        """The folder as it is when the power is back."""
        if not self.forgets:
            return
        for path, names in self._names.items():
            for file in (p for p in path.iterdir() if p.is_file() or p.is_symlink()):
                file.unlink()
            for name, inode in names.items():
                (path / name).write_bytes(self._content[inode])

    def _step(self) -> None:
        self.count += 1
        if self.failed:
            raise PowerCut

    def _remember(self, path: Path) -> None:
        files = [p for p in path.iterdir() if p.is_file() and not p.is_symlink()]
        self._names[path] = {p.name: p.stat().st_ino for p in files}

    def create(self, path):
        self._step()
        file = super().create(path)
        self._content[os.fstat(file.fileno()).st_ino] = b""
        return file

    def sync(self, file):
        self._step()
        super().sync(file)
        self._content[os.fstat(file.fileno()).st_ino] = Path(file.name).read_bytes()

    def replace(self, source, target):
        self._step()
        super().replace(source, target)

    def remove(self, path):
        self._step()
        super().remove(path)

    def make_folder(self, path):
        if not path.is_dir():
            self._step()
            super().make_folder(path)
            self._names.setdefault(path, {})

    def sync_folder(self, folder):
        self._step()
        super().sync_folder(folder)
        self._remember(folder)

"""Cutting a program's power at each of its disk operations, and killing it before that.

A kill loses nothing that the system holds, but the program forgets what it had not synced yet: the
power cut that comes later finds out whether the next process made it durable.
"""

import random
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.faults.crash_disk import CrashDisk, PowerCut

from triplane.proto.disk import OS_DISK

METHODS = ("create", "append", "sync", "replace", "remove", "make_folder", "sync_folder")


class Forgetful(CrashDisk):
    """Leaves out one kind of sync. forgets: (method, folder below the root), "" for any folder.

    on_cut: told once the power goes, from the thread that met it.
    """

    def __init__(self, root, *, forgets=("", ""), **options):
        super().__init__(root, **options)
        self._forgets, self._lock = forgets, threading.Lock()
        self.on_cut = lambda: None

    @property
    def is_cut(self):
        return self.count >= self.fail_at

    def _step(self):
        with self._lock:
            try:
                super()._step()
            except PowerCut:
                self.on_cut()
                raise

    def _is_forgotten(self, method, folder):
        method_, folder_ = self._forgets
        return method == method_ and folder_ in {"", str(folder.relative_to(self.root))}

    def sync(self, file):
        if self._is_forgotten("sync", Path(file.name).parent):
            self._step()
            file.flush()
        else:
            super().sync(file)

    def sync_folder(self, folder):
        if self._is_forgotten("sync_folder", folder):
            self._step()
        else:
            super().sync_folder(folder)


@contextmanager
def on(disk):
    """Every durable byte of this process goes to `disk`, through the one door that there is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in METHODS:
            patch.setattr(OS_DISK, name, getattr(disk, name), raising=False)
        try:
            yield disk
        finally:
            disk.close()


def plugged():
    """The disk of the innermost `on`."""
    method: Any = OS_DISK.sync
    return method.__self__


def is_whole(played, root):
    """Whether a life ends; not where the power, or the process, went before."""
    try:
        played.live(root)
    except PowerCut:
        return False
    return True


def cuts(folder, play, *, points, seed, outcomes=3, forgets=("", "")):
    """Cut the power at so many points; returns (operations of an undisturbed life, cuts, kills).

    outcomes: of each cut that are drawn and checked; the program goes on from the first.

    play: `play(home)` makes an object whose `live(home)` runs the program to its end, again after a
    crash; `check(home)` is what must hold of what a crash left before it does.
    """
    rng = random.Random(seed)
    root = made(folder / "whole")
    played = play(root)
    with on(Forgetful(root)) as disk:
        played.live(root)
    operations, kills = disk.count, 0
    order = rng.sample(range(1, operations + 1), operations)
    for cut in range(points):
        root = made(folder / str(cut))
        played = play(root)
        fail_at = order[cut % operations]
        with on(Forgetful(root, fail_at=fail_at, forgets=forgets)) as disk:
            assert not is_whole(played, root)
            if cut % 2:
                kills += 1
                disk.fail_at = disk.count + rng.randint(1, operations)
                is_whole(played, root)
        for number in range(outcomes):
            after = folder / f"{cut}-{number}"
            disk.outcome(after, rng)
            with on(Forgetful(after)):
                played.check(after)
                if not number:
                    played.copy().live(after)
            shutil.rmtree(after)
        shutil.rmtree(root)
    return operations, points * outcomes, kills


def made(folder):
    folder.mkdir()
    return folder

import errno
import os
from pathlib import Path

import pytest

from triplane.proto.disk import AppendFile, OsDisk, atomic_file, write_atomic, write_secret
from triplane.proto.errors import Unavailable


def test_file_appears_with_all_its_bytes(tmp_path):
    write_atomic(tmp_path / "f", b"one")
    write_atomic(tmp_path / "f", memoryview(b"another"))
    assert (tmp_path / "f").read_bytes() == b"another"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_secret_is_its_owner_s_alone_also_where_others_read_the_old_file(tmp_path):
    path = tmp_path / "key"
    write_atomic(path, b"old")
    path.chmod(0o644)
    write_secret(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def write_half(path, error) -> None:
    with atomic_file(path) as file:
        file.write(b"half of the ne")
        raise error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_error_inside_the_block_keeps_the_old_file_and_passes_through(tmp_path, error):
    write_atomic(tmp_path / "f", b"old")
    with pytest.raises(type(error)):
        write_half(tmp_path / "f", error)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_absent_folder_is_unavailable_by_name(tmp_path):
    with pytest.raises(Unavailable, match=r"could not write .*absent/f: .*No such file"):
        write_atomic(tmp_path / "absent" / "f", b"")


class Disk:
    """Counts the calls that reach the disk and makes the n-th one fail as a full disk does."""

    def __init__(self, monkeypatch, fail_at: int) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at
        self.patch(monkeypatch, os, "fsync")
        self.patch(monkeypatch, Path, "replace")
        self.patch(monkeypatch, Path, "open", wrap=self.file)

    def patch(self, monkeypatch, owner, name, wrap=lambda x: x):
        real = getattr(owner, name)

        def counted(*args, **options):
            self.count(name)
            return wrap(real(*args, **options))

        monkeypatch.setattr(owner, name, counted)

    def count(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def file(self, file):
        return CountedFile(file, self)


class CountedFile:
    """A real file whose writes pass through the counter."""

    def __init__(self, file, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data):
        self._disk.count("write")
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def write_twice(path) -> None:
    with atomic_file(path) as file:
        file.write(b"new ")
        file.write(b"bytes")


def test_failure_of_any_call_leaves_one_whole_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "f"
    with monkeypatch.context() as patch:
        disk = Disk(patch, fail_at=0)
        write_twice(path)
    assert disk.calls == ["open", "write", "write", "fsync", "replace", "fsync"]
    for fail_at in range(1, len(disk.calls) + 1):
        path.write_bytes(b"old")
        with monkeypatch.context() as patch:
            Disk(patch, fail_at)
            with pytest.raises(Unavailable, match="No space left on device"):
                write_twice(path)
        renamed = fail_at > disk.calls.index("replace") + 1
        assert path.read_bytes() == (b"new bytes" if renamed else b"old")
        assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_rename_comes_after_the_flush_of_the_bytes_and_before_that_of_the_name(
    tmp_path, monkeypatch
):
    disk = Disk(monkeypatch, fail_at=0)
    write_atomic(tmp_path / "f", b"x")
    assert disk.calls == ["open", "write", "fsync", "replace", "fsync"]


def test_appended_bytes_stay_and_grow(tmp_path):
    first = AppendFile(tmp_path / "f")
    first.write(b"one")
    first.sync()
    first.close()
    second = AppendFile(tmp_path / "f")
    second.write(b"two")
    assert second.size == 6
    second.close()
    assert (tmp_path / "f").read_bytes() == b"onetwo"


def test_full_disk_is_unavailable_by_name_also_when_appending(tmp_path, monkeypatch):
    file = AppendFile(tmp_path / "f")
    Disk(monkeypatch, fail_at=1)
    with pytest.raises(Unavailable, match=r"could not write .*f: .*No space left"):
        file.sync()
    file.close()


def test_made_folders_are_there_again(tmp_path):
    for _ in range(2):
        OsDisk().make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()

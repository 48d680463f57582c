import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import Corrupt, Unavailable
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container, PartData

MIB = 1 << 20


def chunks(count: int) -> Iterator[bytes]:
    for i in range(count):
        yield bytes([i]) * MIB


@pytest.mark.slow
def test_parts_are_streamed_and_read_in_bounded_memory(tmp_path):
    tracemalloc.start()
    try:
        container.write(tmp_path / "m", "model", [PartData("big", 64 * MIB, chunks(64))])
        file = Container(tmp_path / "m", kind="model")
        file.verify()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB
    assert file.part("big")[63 * MIB] == 63


def test_tensors_are_written_from_where_they_are(tmp_path):
    x = np.ones((16 * MIB,), np.uint8)
    tracemalloc.start()
    try:
        container.write(tmp_path / "m", "model", [container.tensor_part("x.safetensors", {"x": x})])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let this process write at most `size` bytes into any file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 100, 5_000, 2 * MIB])
def test_full_disk_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path, room):
    path = tmp_path / "m"
    digest = container.write(path, "model", [container.part("a", b"old")])
    new = [container.part("a", b"new"), PartData("big", 3 * MIB, chunks(3))]
    with disk_of(room), pytest.raises(Unavailable, match="could not write"):
        container.write(path, "model", new)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    Container(path, kind="model", expected_digest=digest).verify()
    container.write(
        path, "model", [container.part("a", b"new"), PartData("big", 3 * MIB, chunks(3))]
    )
    assert bytes(Container(path, kind="model").part("a")) == b"new"


def test_error_while_a_part_is_made_keeps_the_old_file(tmp_path):
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    path = tmp_path / "m"
    digest = container.write(path, "model", [container.part("a", b"old")])
    with pytest.raises(KeyboardInterrupt):
        container.write(path, "model", [PartData("a", 8, broken())])
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    Container(path, kind="model", expected_digest=digest).verify()


def test_a_file_that_its_reader_refuses_is_not_kept(tmp_path):
    path = tmp_path / "m.tpm"
    digest = container.write(path, "model", [container.part("a", b"old")])

    def refuse(written: Path) -> None:
        file = container.Container(written, kind="model")
        assert bytes(file.part("a")) == b"new"
        raise Corrupt(f"{written.name}: part 'a' says nothing")

    with pytest.raises(Corrupt, match=r"^m\.tpm .*cannot be read.*not kept: m\.tpm: part 'a'"):
        container.write(path, "model", [container.part("a", b"new")], check=refuse)
    assert container.Container(path, kind="model").digest == digest
    assert [p.name for p in tmp_path.iterdir()] == ["m.tpm"]

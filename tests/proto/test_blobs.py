"""Space for a blob that is to come: the whole file and a reserve beside it."""

from types import SimpleNamespace

import pytest

from triplane.proto.blobs import BlobFolder
from triplane.proto.disk import NoRoom

MIB = 1 << 20


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes the file system says are free."""

    def set_free(size):
        space = SimpleNamespace(f_bavail=size, f_frsize=1)
        monkeypatch.setattr("os.statvfs", lambda _: space)

    return set_free


# A reserve is four times the file, but at least 1 MiB and at most 64 MiB.
@pytest.mark.parametrize(
    ("size", "reserve"),
    [(1, MIB), (MIB // 4, MIB), (MIB, 4 * MIB), (16 * MIB, 64 * MIB), (1 << 30, 64 * MIB)],
)
def test_a_blob_is_received_exactly_where_it_and_its_reserve_fit(tmp_path, free, size, reserve):
    blobs = BlobFolder(tmp_path, max_bytes=1 << 31)
    free(size + reserve)
    with blobs.receive(bytes(32), size):
        pass
    free(size + reserve - 1)
    with (
        pytest.raises(NoRoom, match=f"{size} more bytes are needed besides {reserve} that"),
        blobs.receive(bytes(32), size),
    ):
        pass


def test_what_arrived_already_needs_no_space_again(tmp_path, free):
    blobs, size = BlobFolder(tmp_path), 1000
    free(1 << 40)
    with blobs.receive(bytes(32), size) as receiving:
        receiving.write(b"x" * 600)
        receiving.sync()
    free(400 + MIB)
    with blobs.receive(bytes(32), size):
        pass
    free(400 + MIB - 1)
    with pytest.raises(NoRoom, match="400 more bytes are needed"), blobs.receive(bytes(32), size):
        pass

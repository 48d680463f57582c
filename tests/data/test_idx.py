import gzip
import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir import data
from triplane.unified_ir.data.sources.idx import read_idx

X = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
Y = np.array([1, 0, 2, 1], np.uint8)


def encoded(array, kind=0x08):
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


def written(folder, images=None, labels=None, prefix="train", end=""):
    pack = gzip.compress if end else bytes
    path = folder / f"{prefix}-images-idx3-ubyte{end}"
    path.write_bytes(pack(encoded(X) if images is None else images))
    labels_path = folder / f"{prefix}-labels-idx1-ubyte{end}"
    labels_path.write_bytes(pack(encoded(Y) if labels is None else labels))
    return path


@pytest.mark.parametrize("end", ["", ".gz"])
def test_images_come_with_the_labels_beside_them(tmp_path, end):
    dataset = data.load(written(tmp_path, end=end))
    assert (np.rint(dataset.x[:, 0] * 255) == X).all()
    assert dataset.y.tolist() == Y.tolist()


def test_a_folder_of_mnist_files_brings_its_own_held_out_part(tmp_path):
    written(tmp_path, end=".gz")
    written(tmp_path, encoded(X[:1]), encoded(Y[:1]), prefix="t10k")
    train, held_out = data.load_split(tmp_path)
    assert (len(train), len(held_out)) == (4, 1)
    assert len(data.load(tmp_path)) == 4


def test_missing_labels_are_named(tmp_path):
    written(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(NotFound, match="train-labels-idx1-ubyte"):
        data.load(tmp_path / "train-images-idx3-ubyte")


HUGE = struct.pack(">HBBIII", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
ATTACKS = {
    "empty": (b"", Corrupt),
    "no header": (b"\0\0\x08", Corrupt),
    "not idx": (b"\x89PNG\r\n", Corrupt),
    "sizes cut": (b"\0\0\x08\x03\0\0", Corrupt),
    "values cut": (encoded(X)[:-1], Corrupt),
    "values added": (encoded(X) + b"\0", Corrupt),
    "sizes beyond memory": (HUGE, InvalidInput),
    "size zero": (encoded(X[:0]), InvalidInput),
    "floats": (encoded(X, kind=0x0D), Corrupt),
    "unknown type": (encoded(X, kind=0x77), Corrupt),
    "rank of labels": (encoded(Y), InvalidInput),
    "rank 255": (b"\0\0\x08\xff" + bytes(1020), InvalidInput),
    "fewer images than labels": (encoded(X[:3]), InvalidInput),
}


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize(("images", "family"), ATTACKS.values(), ids=ATTACKS)
def test_hostile_images_are_refused(tmp_path, images, family, end):
    with pytest.raises(family):
        data.load(written(tmp_path, images, end=end))


def test_more_labels_than_the_limit_are_refused_by_their_header(tmp_path):
    labels = struct.pack(">HBBI", 0, 8, 1, 2**32 - 1)
    with pytest.raises(TriplaneError, match=r"labels-idx1-ubyte announces 4294967295"):
        data.load(written(tmp_path, labels=labels))


@pytest.mark.slow
def test_a_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path):
    bomb = encoded(X) + bytes(64 * 2**20)
    path = written(tmp_path, bomb, end=".gz")
    with pytest.raises(Corrupt, match="more bytes than announced"):
        read_idx(path)


def test_a_cut_gzip_file_is_corrupt(tmp_path):
    path = written(tmp_path, end=".gz")
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(Corrupt, match="gzip"):
        data.load(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    written(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    os.mkfifo(tmp_path / "train-labels-idx1-ubyte")
    with pytest.raises(InvalidInput, match="not a regular file"):
        data.load(tmp_path / "train-images-idx3-ubyte")


@given(at=st.integers(0, len(encoded(X)) - 1), bit=st.integers(0, 7), packed=st.booleans())
def test_a_flipped_bit_gives_a_dataset_or_a_named_error(tmp_path_factory, at, bit, packed):
    folder = tmp_path_factory.mktemp("idx", numbered=True)
    path = written(folder, end=".gz" if packed else "")
    damaged = bytearray(path.read_bytes())
    damaged[at % len(damaged)] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        assert data.load(path).x.ndim == 4
    except TriplaneError as error:
        assert path.name in str(error)

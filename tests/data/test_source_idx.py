"""IDX files as sources; numpy's big-endian bytes are the oracle."""

import gzip
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import everything, opened

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.data.sources import idx
from triplane.unified_ir.data.sources.idx import IdxSource


def idx_bytes(array):
    kind = {np.dtype(name).newbyteorder("="): k for k, name in idx.TYPES.items()}[array.dtype]
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return (
        bytes([0, 0, kind, array.ndim])
        + sizes
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


IMAGES = np.arange(5 * 3 * 4, dtype=np.uint8).reshape(5, 3, 4)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("shape", [(4,), (4, 2), (2, 1, 3, 2), (0, 3)])
@pytest.mark.parametrize("name", ["a.idx", "a.gz"])
def test_arrays_of_any_type_and_rank_are_read(tmp_path, dtype, shape, name):
    array = np.random.default_rng(0).integers(-99, 99, shape).astype(dtype)
    data = idx_bytes(array)
    (tmp_path / name).write_bytes(gzip.compress(data) if name == "a.gz" else data)
    x = everything(IdxSource(str(tmp_path / name)))["x"]
    assert x.dtype == np.dtype(dtype)
    assert x.shape == shape
    assert (x == array).all()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_pair_of_mnist_is_images_and_classes(tmp_path, suffix):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(idx_bytes(IMAGES))
    labels = idx_bytes(LABELS)
    beside = tmp_path / f"train-labels-idx1-ubyte{suffix}"
    beside.write_bytes(gzip.compress(labels) if suffix else labels)
    table = opened(IdxSource(str(path)))
    assert table.pixels == {"x": 255}
    assert {k: str(f) for k, f in table.schema.items()} == {"x": "uint8[1, 3, 4]", "y": "int64"}
    block = table.take(np.array([4, 0]))
    assert (block["x"][:, 0] == IMAGES[[4, 0]]).all()
    assert block["y"].tolist() == [5, 3]


def test_a_pair_that_does_not_fit_together_is_refused(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(idx_bytes(IMAGES))
    with pytest.raises(NotFound, match="train-labels-idx1-ubyte"):
        IdxSource(str(path)).open()
    beside = tmp_path / "train-labels-idx1-ubyte"
    beside.write_bytes(idx_bytes(LABELS[:4]))
    with pytest.raises(InvalidInput, match=r"has 5 images, .* has 4 labels"):
        IdxSource(str(path)).open()
    beside.write_bytes(idx_bytes(LABELS.astype(np.float32)))
    with pytest.raises(InvalidInput, match="whole numbers"):
        IdxSource(str(path)).open()


@pytest.mark.parametrize(
    ("content", "family", "message"),
    [
        (b"", Corrupt, "header"),
        (b"\0\1\x08\1\0\0\0\0", Corrupt, "not an IDX file"),
        (b"\0\0\x0a\1\0\0\0\0", Corrupt, "type 0x0a"),
        (b"\0\0\x08\0", InvalidInput, "rank 0"),
        (b"\0\0\x08\xff" + bytes(1020), InvalidInput, "rank 255"),
        (b"\0\0\x08\2\0\0\0\1", Corrupt, "sizes"),
        (b"\0\0\x0e\2" + b"\xff" * 8, InvalidInput, "announces"),
        (b"\0\0\x08\x09" + b"\xff" * 32 + b"\0\0\0\0", Corrupt, "sizes"),
        (b"\0\0\x08\1\0\0\0\3ab", Corrupt, "values"),
        (b"\0\0\x08\1\x7f\0\0\0", Corrupt, "more than it holds"),
        (b"\0\0\x08\1\0\0\0\1ab", Corrupt, "more bytes"),
    ],
)
def test_hostile_files_are_refused(tmp_path, content, family, message):
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(family, match=r"a\.idx.*" + message):
        IdxSource(str(tmp_path / "a.idx")).open()


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_damaged_files_give_an_array_or_a_named_error(tmp_path_factory, data):
    content = bytearray(idx_bytes(IMAGES))
    for at in data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.idx"
    path.write_bytes(bytes(content))
    try:
        IdxSource(str(path)).open()
    except TriplaneError as error:
        assert "damaged.idx" in str(error)

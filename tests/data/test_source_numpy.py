"""npz and npy files as sources; numpy is the oracle, and also writes the files."""

import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import opened

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.data.sources import npy
from triplane.unified_ir.data.sources.npy import NpySource
from triplane.unified_ir.data.sources.npz import NpzSource

TYPES = ["?", "u1", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", ">i4", ">f8"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 1, 3, 4), (0, 2), (5, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_type_and_rank_are_columns(tmp_path, dtype, shape, order):
    x = np.random.default_rng(0).integers(0, 99, shape).astype(dtype, order=order)
    np.savez(tmp_path / "a.npz", x=x)
    np.save(tmp_path / "a.npy", x)
    rows = np.arange(len(x))[::-2]
    for source in (NpzSource(str(tmp_path / "a.npz")), NpySource(str(tmp_path / "a.npy"))):
        table = opened(source)
        block = table.take(rows)["x"]
        assert len(table) == len(x)
        assert block.dtype == x.dtype.newbyteorder("=")
        assert block.dtype.isnative
        assert (block == x[rows]).all()
        assert str(table.schema["x"].dtype) == str(block.dtype)
        assert table.schema["x"].shape == x.shape[1:]


def test_columns_are_chosen_by_name(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.arange(3), other=np.zeros(7))
    table = opened(NpzSource(str(tmp_path / "a.npz"), columns=("y", "x")))
    assert list(table.schema) == ["y", "x"]
    with pytest.raises(NotFound, match=r"no column 'z'; it holds other, x, y"):
        NpzSource(str(tmp_path / "a.npz"), columns=("z",)).open()
    with pytest.raises(InvalidInput, match="'x' is named twice"):
        NpzSource(str(tmp_path / "a.npz"), columns=("x", "x")).open()


def test_arrays_that_do_not_fit_together_are_named_with_the_file(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), other=np.zeros(7))
    with pytest.raises(InvalidInput, match=r"a\.npz: .*differ.*name the columns"):
        NpzSource(str(tmp_path / "a.npz")).open()
    np.savez(tmp_path / "b.npz", x=np.zeros(3), scalar=np.array(7))
    with pytest.raises(InvalidInput, match=r"b\.npz: .*name the columns"):
        NpzSource(str(tmp_path / "b.npz")).open()
    np.savez(tmp_path / "c.npz")
    with pytest.raises(TriplaneError, match=r"c\.npz"):
        NpzSource(str(tmp_path / "c.npz")).open()


def test_objects_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    x = np.array([Bomb()], object)
    np.save(tmp_path / "a.npy", x, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=x)
    for source in (NpySource(str(tmp_path / "a.npy")), NpzSource(str(tmp_path / "a.npz"))):
        with pytest.raises(InvalidInput, match="not a plain array of numbers"):
            source.open()


def test_a_npy_file_is_mapped(tmp_path):
    x = np.zeros((1000, 100))
    np.save(tmp_path / "a.npy", x)
    table = opened(NpySource(str(tmp_path / "a.npy"), name="features"))
    column = table.columns["features"]
    assert not column.flags.writeable
    assert not column.flags.owndata
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    with pytest.raises(Corrupt, match="799999 are present"):
        NpySource(str(tmp_path / "a.npy")).open()


def test_the_other_byte_order_is_converted_up_to_a_limit(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.arange(9, dtype=">i8"))
    monkeypatch.setattr(npy, "MAX_MEMORY_BYTES", 71)
    with pytest.raises(InvalidInput, match="other byte order"):
        NpySource(str(tmp_path / "a.npy")).open()


def test_other_files_are_refused(tmp_path):
    with pytest.raises(NotFound, match=r"nothing\.npy"):
        NpySource(str(tmp_path / "nothing.npy")).open()
    with pytest.raises(InvalidInput, match="not a regular file"):
        NpySource(str(tmp_path)).open()
    with pytest.raises(InvalidInput, match="not a file name"):
        NpySource("a\0b").open()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    np.save(folder / "a.npy", np.arange(12, dtype=np.float32).reshape(3, 4))
    np.savez_compressed(folder / "a.npz", x=np.arange(12).reshape(3, 4))
    return folder


@settings(deadline=None, max_examples=150)
@given(data=st.data(), kind=st.sampled_from(["npy", "npz"]))
def test_a_damaged_file_gives_an_array_or_a_named_error(stored, data, kind):
    content = bytearray((stored / f"a.{kind}").read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    content = (
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    path = stored / f"damaged.{kind}"
    path.write_bytes(bytes(content))
    source = NpySource(str(path)) if kind == "npy" else NpzSource(str(path))
    try:
        table = opened(source)
        table.take(np.arange(len(table)))
    except TriplaneError as error:
        assert "damaged" in str(error)


def test_a_shape_that_no_array_can_have_is_refused(tmp_path):
    for shape in [(0, 10**19), (1,) * 70, (10**18, 10**18)]:
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        npy_bytes = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
        (tmp_path / "a.npy").write_bytes(npy_bytes + b"\0" * (0 not in shape))
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("x.npy", npy_bytes + b"\0" * (0 not in shape))
        for source in (NpySource(str(tmp_path / "a.npy")), NpzSource(str(tmp_path / "a.npz"))):
            with pytest.raises(TriplaneError, match=r"a\.np"):
                source.open()

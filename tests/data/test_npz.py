import io
import pickle
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir import data
from triplane.unified_ir.files.npz import END, LOCATOR_BYTES

X = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
Y = np.array([1, 0, 2, 1])


def npy(array, header=None, version=(1, 0)):
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=version)
    if header is None:
        return out.getvalue()
    line = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + array.tobytes()


def packed(path, *, method=zipfile.ZIP_DEFLATED, comment=b"", **members):
    members.setdefault("x", npy(X))
    members.setdefault("y", npy(Y))
    with zipfile.ZipFile(path, "w", method) as archive:
        for key, content in members.items():
            archive.writestr(f"{key}.npy", content)
        archive.comment = comment
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["u1", "<f2", "<f4", "<f8", ">f4"])
def test_numpys_own_archives_load(tmp_path, save, order, kind):
    x = np.asarray(X.astype(kind), order=order)
    save(tmp_path / "a.npz", x=x, y=Y, other=np.array(["ignored"]))
    dataset = data.load(tmp_path / "a.npz")
    # Bytes in two axes are pixels of one channel; numbers stay as they are.
    assert np.allclose(dataset.x[:, 0] * 255 if kind == "u1" else dataset.x, X)
    assert bool(dataset.notes) == (kind == "u1")
    assert dataset.y.tolist() == Y.tolist()
    assert dataset.x.flags.c_contiguous


def test_missing_keys_are_named_beside_those_there(tmp_path):
    np.savez(tmp_path / "a.npz", images=X, y=Y)
    with pytest.raises(NotFound, match="images, y"):
        data.load(tmp_path / "a.npz")


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def shape(text):
    return f"{{'descr': '|u1', 'fortran_order': False, 'shape': {text}, }}"


PICKLED = b"\x93NUMPY\x01\x00" + struct.pack("<H", 60)
PICKLED += b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1), }".ljust(60)[:60]
ATTACKS = {
    "pickled objects": (PICKLED + pickle.dumps(Bomb()), InvalidInput),
    "header that runs code": (npy(X, "__import__('os').abort()"), InvalidInput),
    "header nested deeply": (npy(X, "(" * 60000), InvalidInput),
    "header cut": (npy(X)[:40], Corrupt),
    "format 2, whose header may be 4 GiB": (npy(X, version=(2, 0)), InvalidInput),
    "no npy": (b"hello", Corrupt),
    "sizes beyond memory": (npy(X, shape("(9999999999, 9999999999, 9999999999)")), InvalidInput),
    "size zero": (npy(X, shape("(0, 3, 2)")), Corrupt),
    "negative size": (npy(X, shape("(-4, 3, 2)")), InvalidInput),
    "rank 30": (npy(X[:1, :1, :1], shape("(" + "1, " * 30 + ")")), InvalidInput),
    "values cut": (npy(X)[:-1], Corrupt),
    "values added": (npy(X) + b"\0", Corrupt),
    "text": (npy(np.array(["a"])), InvalidInput),
    "floats of 16 bytes": (npy(X, shape("(4, 3, 2)").replace("|u1", "<f16")), InvalidInput),
    "no such float": (npy(X, shape("(4, 3, 2)").replace("|u1", "<f3")), Corrupt),
}


@pytest.mark.parametrize(("member", "family"), ATTACKS.values(), ids=ATTACKS)
def test_hostile_arrays_are_refused(tmp_path, member, family):
    with pytest.raises(family, match="x"):
        data.load(packed(tmp_path / "a.npz", x=member))


@pytest.mark.slow
def test_a_zip_bomb_is_inflated_no_further_than_its_header_says(tmp_path):
    path = packed(tmp_path / "a.npz", x=npy(X) + bytes(64 * 2**20))
    assert path.stat().st_size < 2**20
    with pytest.raises(Corrupt, match="more bytes than announced"):
        data.load(path)


def test_a_long_list_of_members_is_refused_before_it_is_read(tmp_path):
    path = packed(tmp_path / "a.npz", **{f"k{i}": b"" for i in range(2000)})
    with pytest.raises(InvalidInput, match="lists its members"):
        data.load(path)


def test_a_list_of_members_hidden_behind_a_comment_is_refused(tmp_path):
    with pytest.raises(Corrupt, match="end record"):
        data.load(packed(tmp_path / "a.npz", comment=b"hello"))


def test_zip64_records_are_refused(tmp_path):
    path = packed(tmp_path / "a.npz")
    whole = path.read_bytes()
    locator = b"PK\6\7" + bytes(LOCATOR_BYTES - 4)
    path.write_bytes(whole[: -END.size] + locator + whole[-END.size :])
    with pytest.raises(InvalidInput, match="zip64"):
        data.load(path)


def test_unusual_compression_and_encryption_are_corrupt_not_crashes(tmp_path):
    path = packed(tmp_path / "a.npz")
    whole = bytearray(path.read_bytes())
    for offset, value in ((8, 99), (6, 1)):  # the compression method, the flags
        damaged = bytearray(whole)
        at = 0
        for signature, shift in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
            at = damaged.index(signature) + offset + shift
            damaged[at] = value
        path.write_bytes(damaged)
        with pytest.raises(TriplaneError):
            data.load(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\5\6" + bytes(18), b"nonsense" * 100])
def test_nonsense_is_refused(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(TriplaneError):
        data.load(tmp_path / "a.npz")


SMALL = packed(io.BytesIO()).getvalue()


@given(at=st.integers(0, len(SMALL) - 1), value=st.integers(1, 255))
def test_a_changed_byte_gives_the_same_pixels_or_a_named_error(tmp_path_factory, at, value):
    path = tmp_path_factory.mktemp("npz", numbered=True) / "a.npz"
    damaged = bytearray(SMALL)
    damaged[at] ^= value
    path.write_bytes(damaged)
    try:
        dataset = data.load(path)
    except TriplaneError:
        return
    assert (np.rint(dataset.x[:, 0] * 255) == X).all()


@given(cut=st.integers(0, len(SMALL) - 1))
def test_a_cut_archive_is_refused(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("npz", numbered=True) / "a.npz"
    path.write_bytes(SMALL[:cut])
    with pytest.raises(TriplaneError):
        data.load(path)


def test_further_columns_are_read_as_they_are_stored(tmp_path):
    path = packed(tmp_path / "a.npz", writer=npy(np.array([7, 7, 8, 9], np.int32)))
    dataset = data.load(path, keep=["writer"])
    assert list(dataset.schema) == ["x", "y", "writer"]
    assert dataset.schema["writer"].dtype == "int32"
    with pytest.raises(NotFound, match=r"no column is called 'author'; there are writer, x, y"):
        data.load(path, keep=["author"])

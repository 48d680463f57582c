import hashlib
import os
import tempfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir import data

CONTENT = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_shipped_digits_are_those_of_the_repository():
    digits = data.digits()
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.labels == tuple("0123456789")
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(digits.y).tolist() == counts
    pixels = (digits.x * 16).astype(np.uint8)
    content = hashlib.sha256(pixels.tobytes() + digits.y.astype(np.uint8).tobytes())
    assert content.hexdigest() == CONTENT
    assert pixels.sum() == 561718
    assert digits.x.max() == 1


def test_the_digits_ship_with_their_attribution():
    text = (files("triplane.unified_ir.data") / "digits.txt").read_text()
    for owed in ("Alpaydin", "Kaynak", "10.24432/C50P49", "CC BY 4.0", "Changes"):
        assert owed in text


def test_the_customary_split_holds_360_digits_out_evenly():
    train, held_out = data.digits().split()
    assert (len(train), len(held_out)) == (1437, 360)
    assert np.bincount(held_out.y).min() >= 34


def test_names_and_paths_load(tmp_path):
    assert len(data.load("digits")) == 1797
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 3, 2), np.uint8), y=np.arange(4))
    assert data.load(str(tmp_path / "mine.npz")).x.shape == (4, 1, 3, 2)


def test_a_source_with_two_parts_is_not_split_again(tmp_path):
    np.savez(
        tmp_path / "two.npz",
        x_train=np.zeros((4, 2, 2), np.uint8),
        y_train=np.arange(4),
        x_test=np.ones((2, 2, 2), np.uint8),
        y_test=np.arange(2),
    )
    train, held_out = data.load_split(tmp_path / "two.npz")
    assert (len(train), len(held_out)) == (4, 2)
    assert len(data.load(tmp_path / "two.npz")) == 4


def test_a_source_with_one_part_is_split():
    train, held_out = data.load_split("digits", fraction=0.5, seed=3)
    assert (len(train), len(held_out)) == (898, 899)


def test_an_absent_or_unknown_source_names_what_is_read(tmp_path):
    with pytest.raises(NotFound, match="the name digits"):
        data.load(tmp_path / "nothing")
    (tmp_path / "table.xls").write_text("1,2")
    with pytest.raises(InvalidInput, match="the name digits"):
        data.load(tmp_path / "table.xls")


def test_a_file_that_may_not_be_read_is_unavailable():
    with tempfile.TemporaryDirectory() as name:
        folder, caller = Path(name), os.geteuid()
        folder.chmod(0o755)
        (folder / "a.npz").write_bytes(b"PK")
        (folder / "a.npz").chmod(0)
        if caller == 0:
            os.seteuid(65534)  # root may read everything
        try:
            with pytest.raises(Unavailable, match="could not be opened: Permission denied"):
                data.load(folder / "a.npz")
        finally:
            os.seteuid(caller)


def test_a_value_that_is_no_number_is_named_by_its_place(tmp_path):
    x = np.zeros((5, 2), np.float32)
    x[3, 1] = np.inf
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(5))
    with pytest.raises(InvalidInput, match=r"x of a\.npz .*first in sample 3: .*\[3, 1\] is inf"):
        data.load(tmp_path / "a.npz")
    np.save(tmp_path / "mapped.npy", x)  # not read as a whole; training finds it
    assert len(data.load(tmp_path / "mapped.npy")) == 5

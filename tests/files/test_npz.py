"""Arrays of an npz file and its limits; tests/data/test_npz.py has the hostile files."""

import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triplane.device import samples as device_samples
from triplane.edge.agent import adapting
from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir.convert import samples as convert_samples
from triplane.unified_ir.files import bounded, golden_set
from triplane.unified_ir.files.npy import MAX_ITEM_BYTES
from triplane.unified_ir.files.npz import (
    MAX_DIRECTORY_BYTES,
    MAX_TOTAL_BYTES,
    opened_npz,
    write_npz,
)


def test_arrays_come_as_they_were_stored(tmp_path):
    stored: dict[str, Any] = {
        "a": np.arange(6.0).reshape(2, 3),
        "b.c": np.asfortranarray(np.ones((2, 3), "i2")),
    }
    stored["scalar"] = np.array(True)
    np.savez_compressed(tmp_path / "a.npz", **stored)
    with opened_npz(tmp_path / "a.npz") as npz:
        assert npz.names == ("a", "b.c", "scalar")
        for name, array in stored.items():
            read = npz.array(name)
            assert (read.dtype, read.tolist()) == (array.dtype, array.tolist())
        with pytest.raises(NotFound, match=r"no array 'd'; it holds a, b\.c, scalar"):
            npz.array("d")


def test_any_name_and_shape_is_written_and_read_back(tmp_path):
    arrays: dict[str, Any] = {
        "file": np.arange(6).reshape(2, 3).T,
        "args": np.float32(2.5),
        "a/b": np.zeros(0),
    }
    path = tmp_path / "a.npz"
    for _ in range(2):
        with path.open("wb") as file:
            write_npz(file, arrays)
    with opened_npz(path) as npz, np.load(path) as peer:
        assert npz.names == ("a/b", "args", "file")
        for name, x in arrays.items():
            np.testing.assert_array_equal(npz.array(name), x, strict=True)
            np.testing.assert_array_equal(peer[name], x, strict=True)


def test_bytes_of_all_arrays_together_are_limited(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(10), b=np.zeros(10))
    with opened_npz(tmp_path / "a.npz", total_bytes=100) as npz:
        npz.array("a")
        with pytest.raises(InvalidInput, match=r"b announces 80 bytes .* at most 20 bytes"):
            npz.array("b")


def test_bytes_of_the_file_are_limited(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros(10))
    with (
        pytest.raises(InvalidInput, match="at most 100 are read"),
        opened_npz(tmp_path / "a.npz", file_bytes=100),
    ):
        pass


@pytest.mark.parametrize("shape", [(0, 10**19), (0, 10**18, 10**18), (1,) * 70])
def test_a_shape_that_no_array_can_have_is_damage(tmp_path, shape):
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    npy = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + b"\0" * (0 not in shape)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy)
    with opened_npz(tmp_path / "a.npz") as npz, pytest.raises(Corrupt, match=r"a\.npz: x: "):
        npz.array("x")


@pytest.mark.parametrize("kind", ["compressed", "stored"])
def test_reading_takes_hardly_more_memory_than_the_array(tmp_path, kind):
    save = np.savez_compressed if kind == "compressed" else np.savez
    save(tmp_path / "a.npz", x=np.zeros(32 << 20, np.uint8))
    tracemalloc.start()
    try:
        with opened_npz(tmp_path / "a.npz") as npz:
            x = npz.array("x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert x.nbytes < peak < x.nbytes + (8 << 20)
    assert x.flags.writeable


def test_the_page_states_the_limits():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert f"elements of more than {MAX_ITEM_BYTES} bytes" in page
    assert f"takes more than {MAX_DIRECTORY_BYTES >> 10} KiB" in page
    sizes = {
        "commands with `--x` or `--y`": (bounded.MAX_FILE_BYTES, MAX_TOTAL_BYTES),
        "`registry push`": (bounded.MAX_FILE_BYTES, convert_samples.MAX_SAMPLES_BYTES),
        "samples of a device": (device_samples.MAX_SHARD_BYTES, device_samples.MAX_SHARD_BYTES),
        "golden samples of a policy": (golden_set.MAX_NPZ_BYTES, MAX_TOTAL_BYTES),
    }
    assert golden_set.MAX_NPZ_BYTES == adapting.MAX_SAMPLES_BYTES
    for row, (file_bytes, total_bytes) in sizes.items():
        assert f"{row} | {readable(file_bytes)} | {readable(total_bytes)} |" in page


def readable(n_bytes):
    return f"{n_bytes >> 30} GiB" if n_bytes >= 1 << 30 else f"{n_bytes >> 20} MiB"

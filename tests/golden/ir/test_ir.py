"""Model files of every format version stay readable, and today's bytes are theirs."""

import numpy as np
import pytest
from tests.golden.ir.make import (
    PARENT,
    V1,
    V2,
    V3,
    V4,
    W,
    X,
    Y,
    every_field,
    make,
    make_negative,
    make_newer,
    make_strategies,
    negative_sizes,
    newer_values,
    strategies,
)

from triplane.proto import ir_pb2 as pb
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.ir import Role
from triplane.unified_ir.ir.module import read
from triplane.unified_ir.ir.text import module_text
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE

DIGESTS = {
    "every_field.tpm": "b56bb3d0716445129c7bbb4bf5c358c1ffcac1ee349fa71ed20ac97d72e21b3e",
    "relu_layer.tpm": "f2b5aca4f4c1e039a8f4037f71b4caa541a2ce8fe059d9f60b763305f8191e3e",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_generator_reproduces_every_byte(tmp_path, name):
    assert make(tmp_path) == DIGESTS
    assert (tmp_path / name).read_bytes() == (V1 / name).read_bytes()


def test_every_field_of_version_1_is_read():
    found = read(V1 / "every_field.tpm", DIGESTS["every_field.tpm"])
    assert module_text(found) + "\n" == (V1 / "every_field.txt").read_text("utf-8")
    wanted = every_field()
    attrs, given = (m.functions["f"].nodes[0].attrs for m in (found, wanted))
    assert attrs.keys() == given.keys()
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            held = np.asarray(attrs[name])
            assert held.dtype == value.dtype
            assert held.tolist() == value.tolist()
        else:
            assert attrs[name] == value
    for name, tensor in wanted.state.items():
        zero = tensor.role is Role.PERSONAL
        assert found.state[name].role is tensor.role
        assert found.state[name].array.tolist() == (tensor.array * (not zero)).tolist()
    file = Container(V1 / "every_field.tpm", kind="model")
    assert file.manifest.parent == PARENT


def test_a_model_of_version_1_computes():
    module = load(V1 / "relu_layer.tpm", DIGESTS["relu_layer.tpm"])
    w = module.state["w"].array
    assert w.tolist() == W.tolist()
    (y,) = run_function(TABLE, module.entry("predict"), [X, w])
    assert y.tolist() == Y.tolist()


NEWER = "04d4da82bf1af24a43555057609e27785abf76374d6c43ea4827d7e0f56c7d4f"


def test_version_2_is_written_and_read_to_the_byte(tmp_path):
    assert make_newer(tmp_path) == {"newer_values.tpm": NEWER}
    assert (tmp_path / "newer_values.tpm").read_bytes() == (V2 / "newer_values.tpm").read_bytes()
    found = read(V2 / "newer_values.tpm", NEWER)
    assert module_text(found) + "\n" == (V2 / "newer_values.txt").read_text("utf-8")
    attrs, given = (m.functions["newer"].nodes[0].attrs for m in (found, newer_values()))
    assert attrs["type"] == given["type"]
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            held = np.asarray(attrs[name])
            assert held.dtype == value.dtype
            assert held.tolist() == value.tolist()


NEGATIVE = "722d0c7651b61d2491857731367d2c26873adb163301bbc59442200cb03da667"


def test_version_3_is_written_and_read_to_the_byte(tmp_path):
    assert make_negative(tmp_path) == {"negative_sizes.tpm": NEGATIVE}
    name = "negative_sizes.tpm"
    assert (tmp_path / name).read_bytes() == (V3 / name).read_bytes()
    found, wanted = load(V3 / name, NEGATIVE), negative_sizes()
    assert module_text(found) + "\n" == (V3 / "negative_sizes.txt").read_text("utf-8")
    pairs = zip(found.entry("predict").nodes, wanted.entry("predict").nodes, strict=True)
    assert all(a.attrs == b.attrs for a, b in pairs)
    flat, every = run_function(TABLE, found.entry("predict"), [np.zeros((3, 4), np.float32)])
    assert flat.tolist() == [3, -1]
    assert every.tolist() == [-7, -4, -1, 3, -(2**63), 5]


STRATEGIES = "17ad8d254aa1c3090678d32abb12d3b8d1a7e75d4ca17943557b229ec984c04c"


def test_version_4_is_written_and_read_to_the_byte(tmp_path):
    name = "strategies.tpm"
    assert make_strategies(tmp_path) == {name: STRATEGIES}
    assert (tmp_path / name).read_bytes() == (V4 / name).read_bytes()
    loaded, wanted = load(V4 / name, STRATEGIES), strategies()
    assert module_text(loaded) + "\n" == (V4 / "strategies.txt").read_text("utf-8")
    pairs = zip(loaded.entry("predict").nodes, wanted.entry("predict").nodes, strict=True)
    assert all(a.strategy == b.strategy for a, b in pairs)


@pytest.mark.parametrize(("folder", "version"), [(V1, 1), (V2, 2), (V3, 3), (V4, 4)])
def test_a_file_says_the_oldest_version_that_holds_it(folder, version):
    for path in folder.glob("*.tpm"):
        message = Container(path, kind="model").part("module.pb")
        assert pb.Module.FromString(bytes(message)).format_version == version

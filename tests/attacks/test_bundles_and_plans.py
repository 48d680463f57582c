"""Damaged bundles and plans: no byte escapes, and the error names what was hit."""

import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from tests.attacks import forge
from tests.runtime.samples import make_bundle, make_plan

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime import Bundle, Plan, Session

FILES: dict[str, tuple[Callable, Callable]] = {
    "bundle": (make_bundle, Bundle.load),
    "plan": (make_plan, Plan.load),
}


def parts_at(path) -> list[tuple[int, int, str]]:
    """Return (begin, end, name) of every member's data, `manifest.pb` included."""
    found, whole = [], path.read_bytes()
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            name_size, extra_size = struct.unpack_from("<HH", whole, info.header_offset + 26)
            start = info.header_offset + 30 + name_size + extra_size
            found.append((start, start + info.file_size, info.filename))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_every_flipped_byte_is_refused_and_the_part_named(tmp_path, kind):
    make, load = FILES[kind]
    make(tmp_path / "f")
    good = (tmp_path / "f").read_bytes()
    parts = parts_at(tmp_path / "f")
    directory = good.index(b"PK\1\2", parts[-1][1])
    for at in forge.flips(tmp_path / "f"):
        with pytest.raises(Corrupt) as caught:
            load(tmp_path / "f")
        name = next((name for a, b, name in parts if a <= at < b), "header of part")
        if at < parts[0][1]:
            name = "manifest"
        if at >= directory:
            name = "container directory"
        assert name in str(caught.value), at
    load(tmp_path / "f")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_every_truncation_is_refused(tmp_path, kind):
    make, load = FILES[kind]
    make(tmp_path / "f")
    for _ in forge.truncations(tmp_path / "f"):
        with pytest.raises(Corrupt):
            load(tmp_path / "f")


@pytest.mark.parametrize("kind", FILES)
def test_another_file_in_its_place_is_refused_by_its_digest(tmp_path, kind):
    make, load = FILES[kind]
    digest = make(tmp_path / "f")
    load(tmp_path / "f", expected_digest=digest)
    with pytest.raises(Corrupt, match="root digest"):
        load(tmp_path / "f", expected_digest="00" * 32)


def test_a_plan_is_no_bundle_and_a_bundle_no_plan(tmp_path):
    make_bundle(tmp_path / "b")
    make_plan(tmp_path / "p")
    with pytest.raises(InvalidInput, match="is a plan file, not a bundle"):
        Bundle.load(tmp_path / "p")
    with pytest.raises(InvalidInput, match="is a bundle file, not a plan"):
        Plan.load(tmp_path / "b")


def test_graph_in_a_bundle_cannot_read_files_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.zeros(64, np.float32).tofile(tmp_path / "weights.safetensors")
    make_bundle(tmp_path / "b", weights={})
    with pytest.raises(InvalidInput, match="does not exist"):
        Bundle.load(tmp_path / "b").session()


def test_graph_that_is_nonsense_is_corrupt(tmp_path):
    make_bundle(tmp_path / "b", model=b"nonsense", weights={})
    with pytest.raises(Corrupt, match="refused the model"):
        Bundle.load(tmp_path / "b").session()


@pytest.mark.parametrize("seed", range(40))
def test_damaged_graph_bytes_never_crash_the_runtime(tmp_path, seed):
    make_plan(tmp_path / "p")
    rng = np.random.default_rng(seed)
    graph = bytearray(Container(tmp_path / "p", kind="plan").part("evaluate.onnx"))
    for at in rng.integers(0, len(graph), 3):
        graph[at] = rng.integers(0, 256)
    try:
        Session(bytes(graph))
    except (Corrupt, InvalidInput):
        return

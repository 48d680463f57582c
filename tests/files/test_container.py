import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks import forge

from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir.files import container, digests
from triplane.unified_ir.files.container import Container, PartData, part, tensor_part
from triplane.unified_ir.files.manifest import PART_NAME


def small(path: Path, kind: str = "model") -> str:
    weights: dict[str, np.ndarray] = {
        "conv.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "conv.bias": np.array([0.5, -0.5, 0.25], np.float32),
        "steps": np.array(7, np.int64),
    }
    return container.write(
        path,
        kind,
        [
            part("module.pb", b"any message"),
            tensor_part("weights.safetensors", weights, {"conv.weight": "parameter"}),
            part("empty.txt", b""),
        ],
        properties={"b": "2", "a": "1"},
        parent="ab" * 32,
    )


def read(path: Path, **options) -> Container:
    opened = Container(path, kind="model", **options)
    opened.verify()
    return opened


def test_what_was_written_is_read_back(tmp_path):
    digest = small(tmp_path / "m.tpm")
    opened = read(tmp_path / "m.tpm", expected_digest=digest)
    assert opened.digest == digest
    assert bytes(opened.part("module.pb")) == b"any message"
    assert opened.manifest.properties == (("a", "1"), ("b", "2"))
    assert opened.manifest.parent == "ab" * 32
    tensors = opened.tensors("weights.safetensors")
    assert tensors["conv.weight"].data.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert {t.name: t.role for t in opened.manifest.tensors} == {
        "steps": "",
        "conv.weight": "parameter",
        "conv.bias": "",
    }


def test_same_content_gives_same_bytes(tmp_path):
    assert small(tmp_path / "a") == small(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_root_digest_is_that_of_the_stored_manifest(tmp_path):
    digest = small(tmp_path / "m.tpm")
    with zipfile.ZipFile(tmp_path / "m.tpm") as file:
        assert digests.sha256(file.read("manifest.pb")).hex() == digest


def test_any_unzip_opens_it(tmp_path):
    small(tmp_path / "m.tpm")
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-e", tmp_path / "m.tpm", tmp_path / "out"], check=True
    )
    assert (tmp_path / "out" / "module.pb").read_bytes() == b"any message"
    with zipfile.ZipFile(tmp_path / "m.tpm") as file:
        assert file.testzip() is None
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}


@pytest.mark.skipif(not shutil.which("unzip"), reason="no unzip program here")
def test_the_unzip_program_finds_no_fault(tmp_path):
    small(tmp_path / "m.tpm")
    done = subprocess.run(
        ["unzip", "-t", tmp_path / "m.tpm"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "No errors detected" in done.stdout


def test_every_part_starts_aligned_in_the_file(tmp_path):
    small(tmp_path / "m.tpm")
    opened = read(tmp_path / "m.tpm")
    whole = (tmp_path / "m.tpm").read_bytes()
    for row in opened.manifest.parts:
        assert opened._data[row.name] % 64 == 0
        assert whole[opened._data[row.name] :].startswith(bytes(opened.part(row.name)))
    for tensor in opened.tensors("weights.safetensors").values():
        assert tensor.data.flags.aligned
        assert not tensor.data.flags.writeable


def expected_name(opened: Container, good: bytes, at: int) -> str:
    """Return the region of the file that byte `at` belongs to, as an error names it."""
    if at >= good.index(b"PK\1\2"):
        return "container directory"
    sizes = {row.name: row.size for row in opened.manifest.parts}
    for name, start in opened._data.items():
        if name in sizes and start <= at < start + sizes[name]:
            return f"part {name!r} is damaged"
    manifest_end = opened._data["manifest.pb"] + int.from_bytes(good[22:26], "little")
    return "manifest" if at < manifest_end else "header of part"


@pytest.mark.slow
def test_every_flipped_byte_is_refused_and_the_part_named(tmp_path):
    path = tmp_path / "m.tpm"
    small(path)
    good = path.read_bytes()
    opened = read(path)
    for at in forge.flips(path):
        with pytest.raises(Corrupt) as caught:
            read(path)
        assert expected_name(opened, good, at) in str(caught.value), at
    read(path)


def test_damage_inside_a_tensor_names_the_tensor(tmp_path):
    path = tmp_path / "m.tpm"
    small(path)
    opened = read(path)
    entry = next(t for t in opened.manifest.tensors if t.name == "conv.bias")
    bad = bytearray(path.read_bytes())
    bad[opened._data["weights.safetensors"] + entry.offset] ^= 1
    path.write_bytes(bad)
    with pytest.raises(
        Corrupt, match=r"part 'weights.safetensors' is damaged in tensor 'conv.bias'"
    ):
        read(path)


@pytest.mark.slow
def test_every_truncation_and_extension_is_refused(tmp_path):
    path = tmp_path / "m.tpm"
    small(path)
    good = path.read_bytes()
    for _ in forge.truncations(path):
        with pytest.raises(Corrupt):
            read(path)
    for extra in (b"\0", b"PK\5\6", good):
        path.write_bytes(good + extra)
        with pytest.raises(Corrupt, match="container directory"):
            read(path)
        path.write_bytes(extra + good)
        with pytest.raises(Corrupt, match=r"manifest|container directory"):
            read(path)


def test_other_digest_other_kind_and_no_file_have_their_own_families(tmp_path):
    digest = small(tmp_path / "m.tpm")
    with pytest.raises(Corrupt, match=f"manifest: root digest is {digest}, not 00"):
        read(tmp_path / "m.tpm", expected_digest="00" * 32)
    with pytest.raises(InvalidInput, match=r"is a model file, not a plan; .*--plan"):
        Container(tmp_path / "m.tpm", kind="plan")
    with pytest.raises(NotFound):
        read(tmp_path / "absent")
    with pytest.raises(InvalidInput, match="not a regular file"):
        read(tmp_path)


def test_parts_are_hashed_when_asked_for_and_not_before(tmp_path):
    path = tmp_path / "m.tpm"
    small(path)
    bad = bytearray(path.read_bytes())
    bad[bad.index(b"any message")] ^= 1
    path.write_bytes(bad)
    opened = Container(path, kind="model")
    assert opened.tensors("weights.safetensors")
    with pytest.raises(Corrupt, match=r"m.tpm: part 'module.pb' is damaged"):
        opened.part("module.pb")


@pytest.mark.parametrize("given_size", [3, 5])
def test_chunks_of_another_size_than_announced_write_nothing(tmp_path, given_size):
    path = tmp_path / "m.tpm"
    with pytest.raises(InvalidInput, match="announced 4 bytes"):
        container.write(path, "model", [PartData("a", 4, [b"x"] * given_size)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../up", "/abs", "a/b", ".hidden", "", "A", "a\0b", "x" * 101])
def test_part_names_that_could_be_paths_are_refused_by_the_writer(tmp_path, name):
    with pytest.raises(InvalidInput, match="part name"):
        container.write(tmp_path / "m.tpm", "model", [part(name, b"")])


def test_file_too_large_for_version_one_is_refused_before_writing(tmp_path):
    with pytest.raises(InvalidInput, match="4294967295"):
        container.write(tmp_path / "m", "model", [PartData("a", 2**32 - 100, [])])
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    parts=st.dictionaries(
        st.from_regex(PART_NAME, fullmatch=True), st.binary(max_size=300), max_size=6
    ),
    properties=st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=50), max_size=4),
)
def test_any_content_survives_the_round_trip(tmp_path_factory, parts, properties):
    parts = {
        name: data
        for name, data in parts.items()
        if not name.endswith(".safetensors") and name != "manifest.pb"
    }
    path = tmp_path_factory.mktemp("round") / "m.tpm"
    digest = container.write(
        path, "model", [part(n, d) for n, d in parts.items()], properties=properties
    )
    opened = read(path, expected_digest=digest)
    assert {row.name: bytes(opened.part(row.name)) for row in opened.manifest.parts} == parts
    assert dict(opened.manifest.properties) == properties


def mapped_kb(path):
    """Kilobytes of a file's mappings that are in the memory of this process."""
    name, total = "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else ""
        elif line.startswith("Rss:") and name == str(path):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is mapped")
def test_released_views_take_no_memory_and_can_be_read_again(tmp_path):
    x = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    path = tmp_path / "x"
    container.write(path, "state", [container.tensor_part("x.safetensors", {"x": x})])
    view = container.Container(path, kind="state").tensors("x.safetensors")["x"].data
    assert view.sum() == x.sum()
    assert mapped_kb(path) >= x.nbytes // 1024
    container.release_mapped([view, x])
    assert mapped_kb(path) < x.nbytes // 1024 // 8
    np.testing.assert_array_equal(view, x)

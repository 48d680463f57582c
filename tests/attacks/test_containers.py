"""Hostile containers, each with the limit that stops it."""

import io
import os
import random
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attacks import forge
from tests.attacks.refusals import MEMORY_BYTES, refused

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.files.manifest import (
    MAX_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_PARTS,
    MAX_PROPERTIES,
    MAX_RANK,
    MAX_TENSORS,
)


def load(path) -> None:
    Container(path, kind="model").verify()


def test_empty_file(tmp_path):
    (tmp_path / "m").touch()
    with refused("0 bytes; a file of Triplane has 1 to"):
        load(tmp_path / "m")


@given(st.binary(max_size=4096))
def test_nonsense(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "nonsense"
    path.write_bytes(data)
    with pytest.raises(Corrupt):
        load(path)
    path.write_bytes(b"PK\3\4" + data)
    with pytest.raises(Corrupt):
        load(path)


def test_file_beyond_the_limit_is_not_read(tmp_path):
    with (tmp_path / "m").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with refused(f"has 1 to {MAX_FILE_BYTES}"):
        load(tmp_path / "m")


def test_huge_part_is_refused_by_its_hash_in_chunks(tmp_path):
    message = forge.manifest({"a": b""})
    message.parts[0].size = 32 << 20
    forge.write(tmp_path / "m", message)
    with refused("part 'a' is damaged"):
        load(tmp_path / "m")


def test_announced_sizes_beyond_the_file_are_not_believed(tmp_path):
    message = forge.manifest({"a": b"x"})
    forge.write(tmp_path / "m", message, {"a": b"x"})
    size = (tmp_path / "m").stat().st_size
    for announced in (2, 1 << 20, MAX_FILE_BYTES - 1000):
        message.parts[0].size = announced
        forge.write(tmp_path / "m", message)
        os.truncate(tmp_path / "m", size)
        with refused("container directory: "):
            load(tmp_path / "m")
    for announced in (MAX_FILE_BYTES + 1, 2**64 - 1):
        message.parts[0].size = announced
        forge_manifest_only(tmp_path / "m", message)
        with refused("part 'a' has a size or digest out of range"):
            load(tmp_path / "m")


def forge_manifest_only(path, message) -> None:
    """Write a container whose directory lists nothing: for manifests no layout exists for."""
    forge.write(path, message.SerializeToString())


def test_announced_manifest_size_is_bounded(tmp_path):
    forge.write(tmp_path / "m", forge.manifest({}))
    whole = bytearray((tmp_path / "m").read_bytes())
    whole[18:26] = struct.pack("<LL", MAX_MANIFEST_BYTES + 1, MAX_MANIFEST_BYTES + 1)
    (tmp_path / "m").write_bytes(whole + bytes(MAX_MANIFEST_BYTES + 1))
    with refused(f"manifest: .*more than {MAX_MANIFEST_BYTES}"):
        load(tmp_path / "m")


@pytest.mark.slow
def test_manifest_of_a_million_empty_entries_is_counted_before_it_is_parsed(tmp_path):
    forge.write(tmp_path / "m", b"\x22\x00" * (MAX_MANIFEST_BYTES // 2))
    with refused("manifest: more than", memory_bytes=MAX_MANIFEST_BYTES + MEMORY_BYTES):
        load(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_STORED])
def test_foreign_zips_and_compressed_bombs_are_never_inflated(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "m", "w", method) as file:
        file.writestr("manifest.pb", bytes(1 << 20))
        file.writestr("weights.safetensors", bytes(16 << 20))
    with refused("manifest: "):
        load(tmp_path / "m")


def test_compressed_member_behind_a_true_manifest_is_refused(tmp_path):
    forge.write(tmp_path / "m", forge.manifest({"a": bytes(100)}))
    whole = bytearray((tmp_path / "m").read_bytes())
    local = whole.index(b"PK\3\4", 4)
    whole[local + 8 : local + 10] = struct.pack("<H", zipfile.ZIP_DEFLATED)
    (tmp_path / "m").write_bytes(whole)
    with refused("header of part 'a'"):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    ("offset", "value", "what"),
    [
        (38, struct.pack("<L", 0o120777 << 16), "a symbolic link"),
        (38, struct.pack("<L", 0o104755 << 16), "a set-uid program"),
        (8, struct.pack("<H", 1), "encrypted"),
        (42, struct.pack("<L", 0), "another member's header"),
        (24, struct.pack("<L", 2**32 - 1), "a zip64 size"),
        (46, b"/", "another name than the member's"),
    ],
)
def test_directory_entry_that_says_something_else_is_refused(tmp_path, offset, value, what):
    forge.write(tmp_path / "m", forge.manifest({"a": b"data"}), {"a": b"data"})
    load(tmp_path / "m")
    whole = bytearray((tmp_path / "m").read_bytes())
    entry = whole.rindex(b"PK\1\2") + offset
    whole[entry : entry + len(value)] = value
    (tmp_path / "m").write_bytes(whole)
    with refused("container directory: is damaged"):
        load(tmp_path / "m")


def test_zip_comment_and_second_directory_are_refused(tmp_path):
    forge.write(tmp_path / "m", forge.manifest({"a": b"data"}), {"a": b"data"})
    good = (tmp_path / "m").read_bytes()
    with zipfile.ZipFile(io.BytesIO(good)) as file:
        assert file.namelist() == ["manifest.pb", "a"]
    for bad in (good[:-2] + b"\2\0hi", good + good[good.index(b"PK\1\2") :]):
        (tmp_path / "m").write_bytes(bad)
        with refused("container directory"):
            load(tmp_path / "m")


@pytest.mark.parametrize(
    "name",
    ["../a", "/etc/passwd", "a/b", "a\\b", ".", "..", ".ssh", "", "A", "a\n", "é", "x" * 101],
)
def test_part_name_that_could_be_a_path_is_refused(tmp_path, name):
    forge_manifest_only(tmp_path / "m", forge.manifest({name: b""}))
    with refused("manifest: part name"):
        load(tmp_path / "m")


def test_two_parts_of_one_name_and_a_second_manifest_are_refused(tmp_path):
    twice = forge.manifest({"a": b""})
    twice.parts.append(twice.parts[0])
    for message in (twice, forge.manifest({"manifest.pb": b""})):
        forge.write(tmp_path / "m", message)
        with refused("manifest: two parts are named"):
            load(tmp_path / "m")


def test_unknown_fields_are_refused_at_every_depth(tmp_path):
    top = forge.manifest({"a": b""}).SerializeToString() + b"\xf8\x07\x01"
    forge.write(tmp_path / "m", top)
    with refused("manifest: has fields this version does not know"):
        load(tmp_path / "m")
    message = forge.manifest({"a": b""})
    message.parts[0].MergeFromString(b"\xf8\x07\x01")
    forge.write(tmp_path / "m", message)
    with refused("manifest: has fields this version does not know"):
        load(tmp_path / "m")


def test_newer_format_is_told_apart_from_damage(tmp_path):
    message = forge.manifest({})
    message.format_version = 2
    forge.write(tmp_path / "m", message)
    with refused("has format version 2, this program reads 1", InvalidInput):
        load(tmp_path / "m")


def bent(**changes):
    """Return a manifest with one tensor bent by `changes`."""
    message = forge.manifest({"t.safetensors": bytes(64)})
    forge.add_tensor(message, **changes)
    return message


def overlapping():
    message = bent(offset=16)
    forge.add_tensor(message, name="b", offset=24)
    return message


def repeated():
    message = bent()
    forge.add_tensor(message, offset=16)
    return message


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (overlapping(), "'b' overlaps another"),
        (repeated(), "'a' has no part or occurs twice"),
        (bent(part="gone.safetensors"), "'a' has no part"),
        (bent(offset=56), "leaves its part"),
        (bent(offset=2**64 - 1), "leaves its part"),
        (bent(size=2**64 - 1), "does not take"),
        (bent(shape=[2**63, 2**63], size=0), "out of range"),
        (bent(shape=[2**32 - 1] * MAX_RANK), "out of range"),
        (bent(shape=[1] * (MAX_RANK + 1)), f"rank {MAX_RANK + 1}"),
        (bent(shape=[1] * 1_000_000), "rank 1000000"),
        (bent(shape=[0, 2**32 - 1, 2**32 - 1], size=0), "out of range"),
        (bent(shape=[5]), "does not take 16 bytes"),
        (bent(dtype="float128"), "unknown dtype"),
        (bent(dtype="bfloat16"), "does not take 16"),
        (bent(role="root"), "unknown dtype .* or role 'root'"),
        (bent(sha256=b"short"), "digest of 5 bytes"),
        (bent(name=""), "printable"),
        (bent(name="a\x1b[2J"), "printable"),
        (bent(name="n" * 513), "printable"),
    ],
)
def test_tensor_entry_that_cannot_be_is_refused(tmp_path, message, match):
    forge.write(tmp_path / "m", message)
    with refused(match, memory_bytes=64 << 20):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "z"},
        {"offset": 56},
        {"dtype": "uint32"},
        {"shape": [2, 2]},
        {"part": "u.safetensors"},
    ],
)
def test_manifest_that_disagrees_with_the_header_of_its_tensors_is_refused(tmp_path, change):
    made = container.tensor_part("t.safetensors", {"a": np.zeros(4, np.float32)})
    data = b"".join(bytes(chunk) for chunk in made.chunks)
    empty = b"\2" + bytes(7) + b"{}"
    message = forge.manifest({"t.safetensors": data, "u.safetensors": empty + bytes(0)})
    offset = len(data) - 16
    forge.add_tensor(message, **{"offset": offset, **change})
    forge.write(tmp_path / "m", message, {"t.safetensors": data, "u.safetensors": empty})
    with refused("its tensors are not those of the manifest|leaves its part"):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    ("field", "count", "match"),
    [
        ("parts", MAX_PARTS + 1, f"at most {MAX_PARTS}"),
        pytest.param("tensors", MAX_TENSORS + 1, f"at most {MAX_TENSORS}", marks=pytest.mark.slow),
        ("properties", MAX_PROPERTIES + 1, f"<= {MAX_PROPERTIES}"),
    ],
)
def test_number_of_entries_is_bounded(tmp_path, field, count, match):
    message = forge.manifest({"t.safetensors": b""})
    if field == "parts":
        for i in range(count):
            message.parts.add(name=f"p{i}", sha256=bytes(32), crc32=0)
    elif field == "tensors":
        for i in range(count):
            forge.add_tensor(message, name=f"t{i}")
    else:
        for i in range(count):
            message.properties.add(key=f"k{i:05}")
    forge_manifest_only(tmp_path / "m", message)
    with refused(match, memory_bytes=64 << 20):
        load(tmp_path / "m")


@pytest.mark.parametrize("keys", [["b", "a"], ["a", "a"], [""]])
def test_properties_that_could_be_read_two_ways_are_refused(tmp_path, keys):
    message = forge.manifest({})
    for key in keys:
        message.properties.add(key=key)
    forge.write(tmp_path / "m", message)
    with refused("manifest: "):
        load(tmp_path / "m")


def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "m")
    with refused("not a regular file", InvalidInput):
        load(tmp_path / "m")


def test_part_without_a_checksum_and_odd_parent_are_refused(tmp_path):
    message = forge.manifest({"a": b""})
    message.parts[0].ClearField("crc32")
    forge.write(tmp_path / "m", message)
    with refused("has no crc32"):
        load(tmp_path / "m")
    message = forge.manifest({})
    message.parent_digest = b"short"
    forge.write(tmp_path / "m", message)
    with refused("parent digest of 5 bytes"):
        load(tmp_path / "m")
    message = forge.manifest({}, kind="virus")
    forge.write(tmp_path / "m", message)
    with refused("kind must be one of"):
        load(tmp_path / "m")


PART_BYTES = 512 << 10
PARTS = 96
FLIPS = (300, pytest.param(2_000, marks=pytest.mark.long))


@pytest.mark.slow
@pytest.mark.parametrize("flips", FLIPS)
def test_random_flips_in_a_large_file_are_refused_and_named(tmp_path, flips):
    path, rng = tmp_path / "m", random.Random(7)
    noise = np.random.default_rng(7).integers(0, 256, (PARTS, PART_BYTES), np.uint8)
    made = [container.part(f"p{i}.bin", noise[i].data) for i in range(PARTS - 8)]
    for i in range(PARTS - 8, PARTS):
        values = {f"t{i}.{j}": x for j, x in enumerate(np.split(noise[i], 4))}
        made.append(container.tensor_part(f"p{i}.safetensors", values))
    container.write(path, "model", made)
    load(path)
    size = path.stat().st_size
    for at in forge.flips(path, (rng.randrange(size) for _ in range(flips))):
        assert_refused_at(path, at)
    load(path)


def assert_refused_at(path, at: int) -> None:
    """Demand that opening fails, or reading the part that holds byte `at` fails naming it."""
    try:
        opened = Container(path, kind="model")
    except Corrupt:
        return
    row = next(
        row
        for row in opened.manifest.parts
        if opened._data[row.name] <= at < opened._data[row.name] + row.size
    )
    entries = opened.manifest.tensors_of(row.name)
    inside = at - opened._data[row.name]
    hit = [t.name for t in entries if t.offset <= inside < t.offset + t.size]
    with pytest.raises(Corrupt, match=f"part '{row.name}' is damaged") as caught:
        opened.part(row.name)
    assert all(name in str(caught.value) for name in hit)

"""States and updates as files: what goes in comes out, and what strangers send is refused."""

from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.unified_ir.federated.core.compress import COMPRESSIONS
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.files import (
    CHANGE,
    FACTS,
    KINDS,
    STATE,
    BadUpdate,
    like_of,
    most_bytes,
    read_state,
    read_update,
    write_state,
    write_update,
)
from triplane.unified_ir.files import container

RUN, LEASE, PLAN = "0123456789abcdef", "ab" * 16, "cd" * 32
OF = {"run": RUN, "lease": LEASE}
FACT = {"compression": "", "lease": LEASE, "round": "3", "run": RUN}
STATED: dict[str, Any] = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.ones((), np.float32),
    "count": np.array(4, np.int64),
}
ROLES = {"w": "parameter", "b": "buffer", "count": "buffer"}
LIKE = like_of(STATED)


def change(seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(dtype) for name, (dtype, shape) in LIKE.items()}


def write(path, compression="", **given):
    options = {"round": 3, "keep": 0.5, "seed": 1, "compression": compression, **OF, **given}
    return write_update(path, change(), **options)


def read(path, **given):
    return read_update(path, LIKE, **{"max_bytes": most_bytes(LIKE), **OF, **given})


def forged(path, arrays, roles=None, properties=None, kind="update", name=CHANGE):
    roles = roles if roles is not None else dict.fromkeys(arrays, "parameter")
    part = container.tensor_part(name, arrays, roles)
    container.write(path, kind, [part], properties=FACT if properties is None else properties)
    return path


def test_a_state_comes_back_bit_for_bit(tmp_path):
    write_state(tmp_path / "s", STATED, ROLES, plan=PLAN)
    found = read_state(tmp_path / "s", plan=PLAN)
    assert {n: (x.dtype, x.tobytes()) for n, x in found.items()} == {
        n: (x.dtype, x.tobytes()) for n, x in STATED.items()
    }


def test_a_state_of_another_plan_is_a_conflict(tmp_path):
    write_state(tmp_path / "s", STATED, ROLES, plan=PLAN)
    with pytest.raises(Conflict, match="of plan cdcdcdcdcdcdcdcd, not eeee"):
        read_state(tmp_path / "s", plan="ee" * 32)


@pytest.mark.parametrize("role", ["personal", "key", "optimizer", ""])
def test_no_state_file_has_a_place_for_what_is_not_shared(tmp_path, role):
    roles = {**ROLES, "w": role}
    with pytest.raises(InvalidInput, match=r"parameters and buffers, got \['w'\]"):
        write_state(tmp_path / "s", STATED, roles, plan=PLAN)
    part = container.tensor_part(STATE, STATED, roles)
    container.write(tmp_path / "s", "state", [part], parent=PLAN)
    with pytest.raises(Corrupt, match=r"parameters and buffers, got \['w'\]"):
        read_state(tmp_path / "s", plan=PLAN)


def test_a_state_that_is_damaged_or_not_finite_is_refused(tmp_path):
    write_state(tmp_path / "s", {**STATED, "b": np.array(np.nan, np.float32)}, ROLES, plan=PLAN)
    with pytest.raises(InvalidInput, match="'b' of the state holds numbers that are not finite"):
        read_state(tmp_path / "s", plan=PLAN)
    write_state(tmp_path / "s", STATED, ROLES, plan=PLAN)
    data = bytearray((tmp_path / "s").read_bytes())
    at = bytes(data).index(STATED["w"].tobytes())
    data[at + 4] ^= 1
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(Corrupt, match="damaged in tensor 'w'"):
        read_state(tmp_path / "t", plan=PLAN)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_update_comes_back_and_its_remainder_is_what_it_lost(tmp_path, compression):
    written = write(tmp_path / "u", compression)
    found = read(tmp_path / "u", round=3, compression=compression)
    for name, x in change().items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        np.testing.assert_allclose(found[name] + written.remainder.get(name, 0), x, atol=1e-6)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_equal_arguments_write_equal_bytes_and_a_remainder_changes_them(tmp_path, compression):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    lost = write(one, compression).remainder
    write(two, compression)
    assert one.read_bytes() == two.read_bytes()
    if compression:
        write(three, compression, remainder=lost)
        assert one.read_bytes() != three.read_bytes()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_no_honest_update_is_larger_than_its_bound(tmp_path, compression):
    write(tmp_path / "u", compression, keep=1.0)
    assert (tmp_path / "u").stat().st_size <= most_bytes(LIKE)


def refused(path, **given):
    with pytest.raises(BadUpdate) as caught:
        read(path, **given)
    return caught.value.kind, str(caught.value)


def test_an_update_larger_than_its_lease_is_not_even_opened(tmp_path):
    (tmp_path / "u").write_bytes(bytes(100))
    kind, text = refused(tmp_path / "u", max_bytes=99)
    assert (kind, text) == ("oversized", "an update has at most 99 bytes here, got 100")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"run": "f" * 16}, "of run '0123456789abcdef', the lease of 'ffff"),
        ({"lease": "00" * 16}, "of lease 'abab"),
        ({"round": 4}, "of round '3', the lease of 4"),
    ],
)
def test_an_update_of_another_lease_is_foreign(tmp_path, given, says):
    write(tmp_path / "u")
    kind, text = refused(tmp_path / "u", **given)
    assert kind == "foreign"
    assert says in text


def test_a_compression_that_was_not_asked_for_is_refused(tmp_path):
    write(tmp_path / "u", "int8")
    assert refused(tmp_path / "u", compression="top-k")[0] == "compression"
    forged(tmp_path / "v", change(), properties={**FACT, "compression": "zip"})
    assert refused(tmp_path / "v") == (
        "compression", "compression is one of '', 'int8', 'top-k', got 'zip'",
    )  # fmt: skip


BAD = {
    "nan": ({"b": np.array(np.nan, np.float32)}, "nonfinite"),
    "infinite": ({"b": np.array(-np.inf, np.float32)}, "nonfinite"),
    "other shape": ({"w": np.zeros((4, 3), np.float32)}, "shape"),
    "other type": ({"w": np.zeros((3, 4), np.float16)}, "shape"),
    "far too large": ({"w": np.zeros((300, 400), np.float32)}, "shape"),
    "one more": ({"extra": np.zeros(1, np.float32)}, "names"),
    "what is not learned": ({"count": np.array(5, np.int64)}, "names"),
}


@pytest.mark.parametrize(("more", "kind"), BAD.values(), ids=BAD)
def test_hostile_tensors_are_refused_by_kind(tmp_path, more, kind):
    forged(tmp_path / "u", {**change(), **more})
    assert refused(tmp_path / "u", max_bytes=1 << 20)[0] == kind


def test_a_missing_tensor_is_refused(tmp_path):
    forged(tmp_path / "u", {"w": change()["w"]})
    assert refused(tmp_path / "u") == (
        "names", "the update and the shared state differ in tensor 'b'",
    )  # fmt: skip


@pytest.mark.parametrize("role", ["personal", "key", "optimizer"])
def test_a_personal_tensor_is_refused_whatever_its_name(tmp_path, role):
    forged(tmp_path / "u", change(), roles={"w": role, "b": "buffer"})
    assert refused(tmp_path / "u")[0] == "personal"


PACKED = {
    "w:index": np.array([1, 2], np.uint32),
    "w:value": np.ones(2, np.float32),
    "w:shape": np.array([3, 4]),
    "b:index": np.array([0], np.uint32),
    "b:value": np.ones(1, np.float32),
    "b:shape": np.zeros(0, np.int64),
}


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"w:shape": np.array([1 << 20, 1 << 20])}, "shape"),
        ({"w:shape": np.array([4, 3])}, "shape"),
        ({"w:index": np.array([2, 1], np.uint32)}, "compression"),
        ({"w:index": np.array([1, 12], np.uint32)}, "compression"),
        ({"w:value": np.array([1, np.inf], np.float32)}, "nonfinite"),
        ({"w:value": np.ones(2, np.float64)}, "shape"),
        ({"w:index": np.zeros(1000, np.uint32)}, "shape"),
    ],
)
def test_a_compressed_update_that_lies_is_refused(tmp_path, more, kind):
    forged(tmp_path / "u", {**PACKED, **more}, properties={**FACT, "compression": "top-k"})
    assert refused(tmp_path / "u", max_bytes=1 << 20)[0] == kind


def test_the_honest_form_of_that_update_is_taken(tmp_path):
    forged(tmp_path / "u", PACKED, properties={**FACT, "compression": "top-k"})
    assert read(tmp_path / "u")["w"].reshape(-1).tolist() == [0, 1, 1] + [0] * 9


@pytest.mark.parametrize(
    "forge",
    [
        lambda path: path.write_bytes(b"no zip at all"),
        lambda path: path.write_bytes(b""),
        lambda path: forged(path, change(), kind="state"),
        lambda path: forged(path, change(), name="other.safetensors"),
        lambda path: forged(path, change(), properties={**FACT, "more": "1"}),
        lambda path: forged(path, change(), properties={}),
    ],
)
def test_bytes_that_are_no_update_are_damaged(tmp_path, forge):
    forge(tmp_path / "u")
    assert refused(tmp_path / "u", max_bytes=1 << 20)[0] == "damaged"


@pytest.mark.slow
def test_no_flipped_byte_passes(tmp_path):
    """A byte may turn up as any refusal; it never gives other numbers."""
    write(tmp_path / "u", "int8")
    data = (tmp_path / "u").read_bytes()
    for at in Draws(0, 0, "flips", "test").permutation(len(data))[:200]:
        hurt = bytearray(data)
        hurt[at] ^= 0x10
        (tmp_path / "v").write_bytes(hurt)
        assert refused(tmp_path / "v")[0] in KINDS


def test_the_facts_of_an_update_are_those_written(tmp_path):
    write(tmp_path / "u")
    file = container.Container(tmp_path / "u", kind="update")
    assert tuple(dict(file.manifest.properties)) == FACTS
    assert file.manifest.parent == ""


@pytest.mark.parametrize("compression", ["int8", "top-k"])
def test_buffers_of_an_update_are_neither_compressed_nor_accepted_so(tmp_path, compression):
    write(tmp_path / "u", compression, buffers={"b"})
    found = read(tmp_path / "u", buffers={"b"})
    assert found["b"].tobytes() == change()["b"].tobytes()
    roles = {
        t.name: t.role for t in container.Container(tmp_path / "u", kind="update").manifest.tensors
    }
    assert {role for name, role in roles.items() if name.startswith("w")} == {"parameter"}
    assert roles["b"] == "buffer"
    write(tmp_path / "packed", compression)
    with pytest.raises(BadUpdate) as refused:
        read(tmp_path / "packed", buffers={"b"})
    assert refused.value.kind == "names"

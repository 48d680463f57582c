"""Nonsense inside a sound container: refused cleanly, whatever it says, in bounded time."""

import random
import time

import pytest
from google.protobuf.descriptor import FieldDescriptor
from tests.ir import graphs

from triplane.proto import ir_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import container
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.codec import PART, decode, encode
from triplane.unified_ir.ir.graph import ModuleContents
from triplane.unified_ir.ir.module import WEIGHTS_PART
from triplane.unified_ir.ir.text import module_text
from triplane.unified_ir.ops.check import check_module, load

MUTATIONS = 2_500  # of each of two kinds
SLOWEST_S = 5.0  # processor time; one takes 2 ms
EDGES = (0, 1, 2, 3, 7, 15, 64, 255, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, -1, -2, -(2**63))


def sources():
    """Small modules that use every table, every kind of region, and big constants."""
    regions = {n: f for n in graphs.WITH_REGIONS for f in graphs.with_gradients(n)[1:2]}
    whole = graphs.module()
    return [
        ModuleContents(whole.functions, whole.entries, whole.state, whole.meta),
        *(ModuleContents({name: function}) for name, function in regions.items()),
        ModuleContents({"held": graphs.held()}),
        ModuleContents({"split": graphs.split()}),
    ]


def bytes_bent(data, rng):
    """The bytes with a few of them changed, cut out or repeated."""
    bent = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(bent))
        match rng.randrange(5):
            case 0:
                bent[at] = rng.randrange(256)
            case 1:
                bent[at] ^= 1 << rng.randrange(8)
            case 2:
                del bent[at : at + rng.randrange(1, 9)]
            case 3:
                bent[at:at] = bent[at : at + rng.randrange(1, 40)]
            case 4:
                bent = bent[: max(at, 1)]
        if not bent:
            return b""
    return bytes(bent)


def message_bent(data, rng):
    """A sound encoding of a module that says something else: the way past the parser."""
    message = pb.Module.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change_somewhere(message, rng)
    return message.SerializeToString()


def change_somewhere(message, rng):
    """Walks down a random path and changes the scalar, or the list, at its end."""
    while True:
        fields = [pair for pair in message.ListFields() if pair[0].name != "format_version"]
        if not fields:
            return
        field, value = rng.choice(fields)
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            change_scalar(message, field, value, rng)
            return
        if not field.is_repeated:
            message = value
        elif rng.random() < 0.1:
            change_list(value, rng)
            return
        else:
            message = rng.choice(value)


def change_scalar(message, field, value, rng):
    listed = field.is_repeated
    old = rng.choice(value) if listed and value else value
    if isinstance(old, str):
        new = rng.choice(["", "N", "N//M", "-1", "Conv", "../x", old + "*N", old[:-1], "\0", "é"])
    elif isinstance(old, bytes):
        new = rng.choice([b"", old + b"\0", old[:-1], bytes(len(old)), b"\xff" * len(old)])
    elif isinstance(old, float):
        new = rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e308])
    else:
        new = rng.choice((*EDGES, old + 1, old - 1, rng.randrange(64)))
    try:
        if not listed:
            setattr(message, field.name, new)
        elif rng.random() < 0.3:
            change_list(value, rng)
        else:
            value[rng.randrange(len(value))] = new
    except (ValueError, TypeError):  # the number does not fit the field: no mutation
        return


def change_list(items, rng):
    at = rng.randrange(len(items))
    match rng.randrange(3):
        case 0:
            del items[at]
        case 1:
            items.append(items[rng.randrange(len(items))])
        case 2:
            other = rng.randrange(len(items))
            if isinstance(items[at], (int, float, str, bytes)):
                items[at] = items[other]
            else:
                items[at].CopyFrom(type(items[at]).FromString(items[other].SerializeToString()))


def read(data, tensors):
    """What loading does with the bytes once the container has passed."""
    found = decode(data, tensors)
    try:
        module = Module(found.functions, found.entries, found.state, found.meta)
    except InvalidInput as error:
        raise Corrupt(str(error)) from error
    check_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("bend", [bytes_bent, message_bent])
def test_a_mutated_module_is_refused_or_sound(bend):
    rng = random.Random(20)
    encoded = [encode(c) for c in sources()]
    refused = 0
    for _ in range(MUTATIONS):
        data, tensors = rng.choice(encoded)
        bent = bend(data, rng)
        start = time.process_time()
        try:
            module_text(read(bent, tensors))
        except Corrupt:
            refused += 1
        except InvalidInput as error:
            assert "format version" in str(error)
        assert time.process_time() - start < SLOWEST_S
    assert refused > MUTATIONS // 2


@pytest.mark.slow
def test_a_mutated_module_in_a_sound_container_names_the_file(tmp_path):
    rng = random.Random(3)
    data, tensors = encode(sources()[0])
    roles = {n: str(t.role) for n, t in graphs.module().state.items() if n in tensors}
    path = tmp_path / "m.tpm"
    for _ in range(40):
        parts = [
            container.part(PART, message_bent(data, rng)),
            container.tensor_part(WEIGHTS_PART, tensors, roles),
        ]
        container.write(path, "model", parts)
        try:
            load(path)
        except (Corrupt, InvalidInput) as error:
            assert "m.tpm" in str(error) or "format version" in str(error)

"""The wire's promise: what was once on it keeps its number, its type and its meaning.

`tests/golden/wire.binpb` is the descriptor set of everything that was ever released. Schemas may
grow; whatever the golden set holds must still be there, the same. To add what is new on purpose:
TRIPLANE_ACCEPT=1 python -m pytest tests/proto/test_compatibility.py
"""

import importlib
import os
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

PROTO = Path(__file__).parents[2] / "proto"
GOLDEN = Path(__file__).parents[1] / "golden" / "wire.binpb"
SCHEMAS = sorted(path.stem for path in PROTO.glob("*.proto"))
SAME = ("number", "type", "type_name", "label", "oneof_index", "proto3_optional")


def described():
    """Every schema as it is now, in the order of names."""
    found = descriptor_pb2.FileDescriptorSet()
    for name in SCHEMAS:
        module = importlib.import_module(f"triplane.proto.{name}_pb2")
        module.DESCRIPTOR.CopyToProto(found.file.add())
    return found


def promises(files):
    """(where, what) of every field, enum value and method; what may never change."""
    for file in files.file:
        for message in file.message_type:
            yield from _of_message(f"{file.package}.{message.name}", message)
        for enum in file.enum_type:
            yield from _of_enum(f"{file.package}.{enum.name}", enum)
        for service in file.service:
            for rpc in service.method:
                where = f"{file.package}.{service.name}/{rpc.name}"
                yield where, (
                    rpc.input_type, rpc.output_type, rpc.client_streaming, rpc.server_streaming,
                )  # fmt: skip


def _of_message(where, message):
    for field in message.field:
        grouped = field.HasField("oneof_index")
        what = tuple(getattr(field, name) for name in SAME if name != "oneof_index")
        group = message.oneof_decl[field.oneof_index].name if grouped else ""
        yield f"{where}.{field.name}", (*what, group)
    for inner in message.nested_type:
        yield from _of_message(f"{where}.{inner.name}", inner)
    for enum in message.enum_type:
        yield from _of_enum(f"{where}.{enum.name}", enum)


def _of_enum(where, enum):
    for value in enum.value:
        yield f"{where}.{value.name}", (value.number,)


def broken(before, after):
    """What the newer set does not keep."""
    now = dict(promises(after))
    return [where for where, what in promises(before) if now.get(where) != what]


def golden():
    found = descriptor_pb2.FileDescriptorSet()
    found.ParseFromString(GOLDEN.read_bytes())
    return found


def test_everything_that_was_ever_on_the_wire_is_still_there():
    now = described()
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        assert not GOLDEN.exists() or broken(golden(), now) == []
        GOLDEN.write_bytes(now.SerializeToString(deterministic=True))
    assert broken(golden(), now) == []


def test_what_is_on_the_wire_is_promised():
    new = set(dict(promises(described()))) - set(dict(promises(golden())))
    assert not new, "accept these on purpose, see the top of this file"


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.message_type[0].field[0].__setattr__("number", 77),
        lambda f: f.message_type[0].field[0].__setattr__("type", 5),
        lambda f: f.message_type[0].field.__delitem__(0),
        lambda f: f.service[0].method.__delitem__(0),
        lambda f: f.service[0].method[0].__setattr__("server_streaming", True),
    ],
)
def test_a_schema_that_breaks_the_promise_is_noticed(change):
    now = described()
    change(next(f for f in now.file if f.name.endswith("registry.proto")))
    assert broken(golden(), now)

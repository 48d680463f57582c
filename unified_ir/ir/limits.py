"""Limits of `module.pb`, and the check of its size before any byte is decoded.

The limits are several times what the largest known model needs (a function of 100,000 nodes takes
2 MiB); a file beyond them is refused, never read in part.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from triplane.proto import ir_pb2 as pb
from triplane.proto.errors import Corrupt

MAX_MODULE_BYTES: Final = 16 << 20
MAX_MESSAGES: Final = 1_000_000
"""A message of two bytes on the wire takes about a hundred in memory."""
MAX_FIELDS: Final = 4_000_000
MAX_NODES: Final = 250_000
"""In all functions and regions of a module together."""
MAX_STRINGS: Final = 250_000
MAX_TYPES: Final = 50_000
"""Also of operators, entries and state tensors."""
MAX_REGION_DEPTH: Final = 16
MAX_OPERANDS: Final = 65_536
"""Operands or outputs of a node, parameters or results of a function."""
MAX_FUNCTIONS: Final = 1_024
MAX_NAME_BYTES: Final = 512
MAX_STRING_BYTES: Final = 64 << 10
MAX_DIMS_CHARS: Final = 32 << 10
"""Symbolic sizes of a module, their texts together."""
MAX_PROPERTIES: Final = 1_024
MAX_SLICES: Final = 4_096
"""Of one operand, over all its axes: as many as a plan has devices."""
MAX_TENSOR_BYTES: Final = 2**32 - 1

# A region adds two levels, its function and the node that holds it; the rest is the path from the
# module to the first node, and what is below the last one.
_MAX_DEPTH: Final = 2 * MAX_REGION_DEPTH + 6
_Fields = dict[int, "Descriptor | None"]


def check_counts(data: bytes) -> None:
    """Refuse more bytes, fields, messages or nesting than the limits.

    Malformed bytes pass: the parser, which runs next, refuses them.
    """
    if len(data) > MAX_MODULE_BYTES:
        raise Corrupt(f"the module has {len(data)} bytes, at most {MAX_MODULE_BYTES} are read")
    # protobuf builds an object per message while it parses, so 16 MiB of empty messages would take
    # hundreds of megabytes before anything could be counted. This walk reads only tags and lengths,
    # and has its own stack instead of recursion.
    fields = messages = at = 0
    end, kinds = len(data), _kinds(pb.Module.DESCRIPTOR)
    stack: list[tuple[int, _Fields]] = []
    while True:
        while at >= end:
            if not stack:
                return
            end, kinds = stack.pop()
        tag, at = _varint(data, at)
        fields += 1
        wire = tag & 7
        if wire == 0:
            at = _varint(data, at)[1]
        elif wire == 2:
            size, at = _varint(data, at)
            inner = kinds.get(tag >> 3)
            # A string, bytes or packed numbers. A length beyond its message is left to the parser.
            if inner is None or at + size > end:
                at += size
                continue
            messages += 1
            stack.append((end, kinds))
            end, kinds = at + size, _kinds(inner)
            if len(stack) > _MAX_DEPTH:
                raise Corrupt(f"regions nest deeper than {MAX_REGION_DEPTH}")
        elif wire in {1, 5}:
            at += 8 if wire == 1 else 4
        elif wire == 3:
            # The parser would read on past a group, and this walk could not count there.
            raise Corrupt("it is not a Module message: it contains a group")
        else:
            return
        if fields > MAX_FIELDS or messages > MAX_MESSAGES:
            raise Corrupt(f"it has more than {MAX_FIELDS} fields or {MAX_MESSAGES} messages")


@cache
def _kinds(message: Descriptor) -> _Fields:
    return {
        f.number: f.message_type for f in message.fields if f.type == FieldDescriptor.TYPE_MESSAGE
    }


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at` and the position after it; past the end if it is incomplete."""
    if at >= len(data):
        return 0, len(data)
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    for after in range(at + 1, min(at + 10, len(data))):
        byte = data[after]
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, after + 1
    return value, len(data)

"""Check the outermost fields of an inference request before protobuf parses it.

An empty tensor of 2 bytes takes 90 bytes after parsing, so a message within its size limit could
take 40 times its size. Here everything but the raw contents is checked against a limit of its own,
by reading one tag and length per outermost field; raw contents are neither parsed nor copied.
"""

from typing import Final

from triplane.edge.serving.limits import ServingLimits
from triplane.proto.errors import InvalidInput

UNCHECKED_BYTES: Final = 64 << 10  # a smaller message parses to 3 MB at most
RAW_INPUT_CONTENTS: Final = 7
MAX_VARINT_BYTES: Final = 10
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types; groups do not occur


def split_raw(data: bytes, limits: ServingLimits) -> tuple[bytes, list[memoryview] | None]:
    """Return `data` without its raw contents, and these as views of it.

    A small message is returned complete, with None. InvalidInput if there are too many outermost
    fields or bytes besides raw contents. Bytes that are not protobuf may pass; the parser will
    refuse them.
    """
    if len(data) <= UNCHECKED_BYTES:
        return data, None
    view = memoryview(data)
    kept: list[memoryview] = []
    raw: list[memoryview] = []
    position = structure = 0
    for _ in range(3 * limits.tensors + limits.parameters + 16):
        if position >= len(data):
            return b"".join(kept), raw
        tag, body = _varint(data, position)
        end = _end(data, tag & 7, body)
        if tag >> 3 == RAW_INPUT_CONTENTS and tag & 7 == DELIMITED:
            start = _varint(data, body)[1]
            structure += start - position
            raw.append(view[start:end])
        else:
            structure += end - position
            kept.append(view[position:end])
        if structure > limits.structure_bytes:
            raise InvalidInput(
                f"more than {limits.structure_bytes} bytes beside the raw contents; "
                "send large tensors in raw_input_contents"
            )
        if end > len(data):
            raise InvalidInput("the message is truncated or not protobuf")
        position = end
    raise InvalidInput(
        f"the request has too many fields; {limits.tensors} tensors and "
        f"{limits.parameters} parameters at most"
    )


def _end(data: bytes, wire_type: int, body: int) -> int:
    """Return the end of the field whose content starts at `body`."""
    if wire_type == DELIMITED:
        length, start = _varint(data, body)
        return start + length
    if wire_type == VARINT:
        return _varint(data, body)[1]
    if wire_type in {FIXED32, FIXED64}:
        return body + (4 if wire_type == FIXED32 else 8)
    raise InvalidInput(f"the message has a field of wire type {wire_type}; the schema has none")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the value at `position` and the position after it."""
    value = 0
    for index, byte in enumerate(data[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise InvalidInput("the message is truncated or not protobuf")

"""Functions and modules as bytes and back.

`decode` reads back exactly what `encode` accepted: encoding ends by decoding its bytes and
comparing. Decoding accepts bytes from any source; anything that is not a module within the limits
is Corrupt, and the message names function, node and operator. The types that it returns are not
verified until `ops.check` has inferred them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from triplane.proto import ir_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import manifest
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.ir import limits
from triplane.unified_ir.ir.arrays import stored
from triplane.unified_ir.ir.decode import Decoder
from triplane.unified_ir.ir.encode import (
    FIRST_VERSION,
    FORMAT_VERSION,
    MAX_INLINE_BYTES,
    Encoder,
)
from triplane.unified_ir.ir.graph import Function, ModuleContents, Role
from triplane.unified_ir.ir.same import difference
from triplane.unified_ir.ir.types import TensorType

PART: Final = "module.pb"


def encode(contents: ModuleContents) -> tuple[bytes, dict[str, StoredTensor]]:
    """Return `module.pb`, and the tensors that the weights must hold: state, then large constants.

    Personal state has a name, a type and a role in the bytes, and no contents anywhere. Raise
    InvalidInput if the module breaks a rule of the format.
    """
    encoder = _encode_into(Encoder(), contents)
    tensors = {
        name: stored(tensor.array)
        for name, tensor in contents.state.items()
        if tensor.role is not Role.PERSONAL
    }
    taken = sorted(contents.state.keys() & encoder.constants.keys())
    if taken:
        raise InvalidInput(f"state {taken[0]!r} has the name of a constant; rename it")
    tensors |= {name: stored(array) for name, array in encoder.constants.items()}
    return _verified(encoder, contents, tensors), tensors


def decode(data: bytes, tensors: Mapping[str, StoredTensor]) -> ModuleContents:
    """Return the module in `data`, its arrays being views of `tensors`.

    Raise Corrupt for damaged bytes, InvalidInput for a newer format.
    """
    try:
        decoder = Decoder(_parsed(data), tensors)
        contents = decoder.contents()
        stray = sorted(tensors.keys() - decoder.used)
        if stray:
            raise Corrupt(f"the weights hold {stray[0][:80]!r}, which nothing uses")
    except Corrupt as error:
        raise Corrupt(f"{PART}: {error}") from error
    return contents


def version_of(data: bytes) -> int:
    """Return the format version that `data` declares."""
    return int(_parsed(data).format_version)


def encode_function(function: Function) -> bytes:
    """Return a function with all its constants as bytes."""
    contents = ModuleContents({function.name: function})
    encoder = Encoder(max_inline_bytes=limits.MAX_MODULE_BYTES)
    return _verified(_encode_into(encoder, contents), contents, {})


def decode_function(data: bytes) -> Function:
    """Return the function in `data`; raise Corrupt, or InvalidInput for a newer format."""
    functions = decode(data, {}).functions
    if len(functions) != 1:
        raise Corrupt(f"{PART}: {len(functions)} functions where one was expected")
    return next(iter(functions.values()))


def _encode_into(encoder: Encoder, contents: ModuleContents) -> Encoder:
    try:
        encoder.module(contents)
    except InvalidInput:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"the module holds values that a file cannot hold: {error}") from error
    return encoder


def _verified(
    encoder: Encoder, contents: ModuleContents, tensors: Mapping[str, StoredTensor]
) -> bytes:
    data = encoder.message.SerializeToString(deterministic=True)
    try:
        decoded = decode(data, tensors)
    except Corrupt as error:
        raise InvalidInput(f"the module cannot be stored: {error}") from error
    lost = _lost(contents, decoded)
    if lost:
        raise InvalidInput(f"the module cannot be stored, it would be read back changed: {lost}")
    return data


def _lost(wanted: ModuleContents, decoded: ModuleContents) -> str:
    """Describe what was lost in the bytes; the name of a large constant is already its digest."""
    pairs = ((wanted.entries, decoded.entries), (wanted.meta, decoded.meta))
    if any(dict(a) != dict(b) for a, b in pairs) or _declared(wanted) != _declared(decoded):
        return "its entries, properties or state"
    if wanted.functions.keys() != decoded.functions.keys():
        return "the names of its functions"
    for name, function in wanted.functions.items():
        if text := difference(function, decoded.functions[name], MAX_INLINE_BYTES):
            return f"function {name!r}: {text}"
    return ""


def _declared(contents: ModuleContents) -> list[tuple[str, Role, TensorType]]:
    return [(name, tensor.role, tensor.type) for name, tensor in contents.state.items()]


def _parsed(data: bytes) -> pb.Module:
    limits.check_counts(data)
    message = manifest.parse(pb.Module(), data, "a serialized module")
    if message.format_version > FORMAT_VERSION:
        raise InvalidInput(
            f"the module has format version {message.format_version}, this program reads "
            f"{FORMAT_VERSION}; a newer triplane may read it"
        )
    if message.format_version < FIRST_VERSION:
        raise Corrupt("the module has no format version")
    return message

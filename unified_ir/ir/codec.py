"""Functions and modules as bytes and back.

What `encode` accepts, `decode` reads as the same: encoding ends by decoding what it made and
comparing. Decoding takes bytes
from anywhere; whatever is not a module within the limits is Corrupt, naming function, node and
operator. The types it hands out are claims until `ops.check` has inferred them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from triplane.unified_ir.ir.graph import Function, Role, StateTensor
from triplane.unified_ir.ir.same import difference
from triplane.unified_ir.ir.types import TensorType

PART: Final = "module.pb"


@dataclass(frozen=True, slots=True, eq=False)
class ModuleContents:
    """What `module.pb` says; `ir.module.Module` adds what must hold between its parts."""

    functions: Mapping[str, Function]
    entries: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, StateTensor] = field(default_factory=dict)
    meta: Mapping[str, str] = field(default_factory=dict)


def encode(contents: ModuleContents) -> tuple[bytes, dict[str, StoredTensor]]:
    """`module.pb`, and the tensors that the weights must hold: state, then big constants.

    Personal state has a name, a type and a role in the bytes, and no contents anywhere.
    InvalidInput: the module breaks a rule of the format.
    """
    encoder = _filled(Encoder(), contents)
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
    """What `data` says, arrays being views of `tensors`; Corrupt, or InvalidInput if newer."""
    try:
        return _contents(_parsed(data), tensors)
    except Corrupt as error:
        raise Corrupt(f"{PART}: {error}") from error


def version_of(data: bytes) -> int:
    """The format version that `data` says it has."""
    return int(_parsed(data).format_version)


def encode_function(function: Function) -> bytes:
    """A function with all its constants, as bytes."""
    contents = ModuleContents({function.name: function})
    encoder = Encoder(max_inline_bytes=limits.MAX_MODULE_BYTES)
    return _verified(_filled(encoder, contents), contents, {})


def decode_function(data: bytes) -> Function:
    """The function in `data`; Corrupt, or InvalidInput if newer."""
    functions = decode(data, {}).functions
    if len(functions) != 1:
        raise Corrupt(f"{PART}: {len(functions)} functions where one was expected")
    return next(iter(functions.values()))


def _filled(encoder: Encoder, contents: ModuleContents) -> Encoder:
    try:
        encoder.module(contents.functions, contents.entries, contents.state, contents.meta)
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"the module holds what files cannot: {error}") from error
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
    """What the bytes say otherwise than the contents; big constants are named by their digest."""
    pairs = ((wanted.entries, decoded.entries), (wanted.meta, decoded.meta))
    if any(dict(a) != dict(b) for a, b in pairs) or _declared(wanted) != _declared(decoded):
        return "its entries, properties or state"
    if wanted.functions.keys() != decoded.functions.keys():
        return "the names of its functions"
    functions = ((name, f, decoded.functions[name]) for name, f in wanted.functions.items())
    said = ((n, difference(f, g, MAX_INLINE_BYTES)) for n, f, g in functions)
    return next((f"function {name!r}: {text}" for name, text in said if text), "")


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


def _contents(message: pb.Module, tensors: Mapping[str, StoredTensor]) -> ModuleContents:
    decoder = Decoder(message, tensors)
    contents = ModuleContents(
        decoder.functions(), decoder.entries(), decoder.state(), decoder.meta()
    )
    stray = sorted(tensors.keys() - decoder.used)
    if stray:
        raise Corrupt(f"the weights hold {stray[0][:80]!r}, which nothing uses")
    return contents

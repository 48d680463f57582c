"""SHA-256 digests: bytes inside files, hexadecimal text everywhere else."""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from triplane.proto.errors import InvalidInput

SIZE: Final = 32
"""Bytes of a digest; 64 hexadecimal digits as text."""

Buffer = bytes | bytearray | memoryview


def sha256(*chunks: Buffer) -> bytes:
    """Return the digest of the concatenated chunks."""
    return sha256_of(chunks)


def sha256_of(chunks: Iterable[Buffer]) -> bytes:
    """Return the digest of the concatenated chunks, reading each once."""
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return state.digest()


def same(a: bytes | str, b: bytes | str) -> bool:
    """Compare two digests, both bytes or both text, in constant time."""
    a, b = (x.encode() if isinstance(x, str) else x for x in (a, b))
    return hmac.compare_digest(a, b)


def from_hex(text: str) -> bytes:
    """Return the 32 bytes of a digest written as 64 lower-case hexadecimal digits."""
    # Stricter than `bytes.fromhex`, which also accepts capitals and spaces: one digest, one text.
    if len(text) != 2 * SIZE or not set(text) <= set("0123456789abcdef"):
        raise InvalidInput(f"a digest is 64 lower-case hexadecimal digits, got {text[:80]!r}")
    return bytes.fromhex(text)

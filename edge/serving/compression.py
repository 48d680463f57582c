"""Decompress requests here instead of in gRPC.

gRPC decompresses a message as soon as it has arrived: a hundred requests of 64 KiB became gigabytes
before any of our limits applied. Here the size is found first, memory is counted for it, and the
work is done in the call's turn. gRPC does not pass on the header with the encoding. It is known by
the first bytes: gzip's cannot begin a protobuf message, and zlib's begin none of this protocol.
"""

import zlib
from typing import Final

from triplane.proto.errors import InvalidInput

GZIP: Final = b"\x1f\x8b\x08"
ZLIB: Final = 0x78
PIECE_BYTES: Final = 64 << 10
EITHER: Final = 32 + zlib.MAX_WBITS  # lets zlib detect gzip or zlib by the header


def packed_size(data: bytes, limit_bytes: int) -> int | None:
    """Return the size of `data` after decompression; None if it is not compressed.

    InvalidInput beyond the limit. It decompresses piece by piece and drops each piece, because the
    size in a gzip trailer cannot be trusted.
    """
    is_zlib = len(data) > 1 and data[0] == ZLIB and int.from_bytes(data[:2]) % 31 == 0
    if not is_zlib and data[:3] != GZIP:
        return None
    unpacking, size = zlib.decompressobj(EITHER), 0
    try:
        for start in range(0, len(data), PIECE_BYTES):
            # The input is in pieces, too, because the unconsumed part is copied at each step.
            rest = data[start : start + PIECE_BYTES]
            while rest and not unpacking.eof:
                size += len(unpacking.decompress(rest, PIECE_BYTES))
                rest = unpacking.unconsumed_tail
                if size > limit_bytes:
                    raise InvalidInput(
                        f"the message has more than {limit_bytes} bytes after decompression, its "
                        "limit; send less in one call"
                    )
        while not unpacking.eof and (piece := unpacking.decompress(b"", PIECE_BYTES)):
            size += len(piece)
    except zlib.error as error:
        raise InvalidInput("the message begins as gzip or zlib, but is damaged") from error
    if not unpacking.eof:
        raise InvalidInput("the compressed message is cut off; send all of it")
    if size > limit_bytes:
        raise InvalidInput(f"the message has {size} bytes after decompression, limit {limit_bytes}")
    return size


def unpack(data: bytes, size: int) -> bytes:
    """Decompress a message, whose `packed_size` is `size`."""
    return zlib.decompress(data, EITHER, max(1, size))  # one buffer of the right size

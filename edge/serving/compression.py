"""Compressed requests, unpacked here and not by gRPC.

gRPC unpacks a message as soon as it has arrived: a hundred requests of 64 KiB became gigabytes
before any bound of ours was asked. Here the size is known first, memory is counted for it, and the
work is done in the call's turn. gRPC hands over no header that names the encoding; gzip's first
byte cannot begin a message of protobuf, and none of this protocol begins with zlib's.
"""

import zlib
from typing import Final

from triplane.proto.errors import InvalidInput

GZIP: Final = b"\x1f\x8b\x08"
ZLIB: Final = 0x78
PIECE_BYTES: Final = 64 << 10
EITHER: Final = 32 + zlib.MAX_WBITS  # zlib's word for gzip or zlib, whichever the header says


def packed_size(data: bytes, limit_bytes: int) -> int | None:
    """Bytes that `data` unpacks to, None when it is not compressed.

    Raises InvalidInput beyond the limit. It takes no memory: what is unpacked is dropped in pieces,
    because the size that gzip notes at its end is the sender's word.
    """
    if not _is_packed(data):
        return None
    unpacking, size = zlib.decompressobj(EITHER), 0
    try:
        for start in range(0, len(data), PIECE_BYTES):
            # In pieces on both sides: what is not consumed is copied, and would be again each time.
            rest = data[start : start + PIECE_BYTES]
            while rest and not unpacking.eof:
                size += len(unpacking.decompress(rest, PIECE_BYTES))
                rest = unpacking.unconsumed_tail
                if size > limit_bytes:
                    raise InvalidInput(
                        f"the message has more than {limit_bytes} bytes after decompression, which "
                        "is the most; send less in one call"
                    )
        while not unpacking.eof and (piece := unpacking.decompress(b"", PIECE_BYTES)):
            size += len(piece)
    except zlib.error as error:
        raise InvalidInput("the message is neither gzip nor zlib nor the protocol's") from error
    if not unpacking.eof:
        raise InvalidInput("the compressed message is cut off; send all of it")
    if size > limit_bytes:
        raise InvalidInput(
            f"the message has {size} bytes after decompression; {limit_bytes} at most"
        )
    return size


def unpack(data: bytes, size: int) -> bytes:
    """The message, whose `packed_size` is `size`."""
    return zlib.decompress(data, EITHER, max(1, size))  # one buffer of the right size


def _is_packed(data: bytes) -> bool:
    gzip = data[:3] == GZIP
    return gzip or (len(data) > 1 and data[0] == ZLIB and int.from_bytes(data[:2]) % 31 == 0)

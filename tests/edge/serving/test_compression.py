import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.edge.serving.compression import packed_size, unpack
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput

LIMIT = 1 << 20
PACKERS: list[Callable[[bytes], bytes]] = [gzip.compress, zlib.compress]


@pytest.mark.parametrize("pack", PACKERS)
@given(data=st.binary(max_size=200_000))
def test_what_was_packed_comes_back(pack, data):
    packed = pack(data)
    assert packed_size(packed, LIMIT) == len(data)
    assert unpack(packed, len(data)) == data


@pytest.mark.parametrize("pack", PACKERS)
def test_a_bomb_is_refused_without_memory(pack):
    bomb = pack(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="more than 1048576 bytes after decompression"):
            packed_size(bomb, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pack", PACKERS)
def test_a_packed_message_that_is_cut_off_is_refused(pack):
    with pytest.raises(InvalidInput, match="cut off"):
        packed_size(pack(bytes(range(256)) * 100)[:-5], LIMIT)


def test_a_damaged_packed_message_is_refused():
    packed = bytearray(gzip.compress(bytes(range(256)) * 100))
    packed[40:60] = bytes(20)
    with pytest.raises(InvalidInput, match=r"gzip or zlib, but is damaged|cut off"):
        packed_size(bytes(packed), LIMIT)


def test_a_plain_message_is_none():
    request = pb.ModelInferRequest(model_name="x", raw_input_contents=[b"1" * 100])
    assert packed_size(request.SerializeToString(), LIMIT) is None
    assert packed_size(b"", LIMIT) is None

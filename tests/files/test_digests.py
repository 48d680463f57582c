import hashlib

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files import digests


def test_chunks_hash_as_one():
    assert digests.sha256(b"ab", memoryview(b"c")) == hashlib.sha256(b"abc").digest()
    assert digests.sha256_of(iter([b"a", b"bc"])) == digests.sha256(b"abc")


def test_same_compares_bytes_and_text():
    a = digests.sha256(b"a")
    assert digests.same(a, bytes(a))
    assert digests.same(a.hex(), a.hex())
    assert not digests.same(a, digests.sha256(b"b"))
    assert not digests.same(a.hex(), "")
    assert not digests.same("é", "e")


@pytest.mark.parametrize("text", ["", "ab", "AB" * 32, "g" * 64, "٣" * 64, "a" * 65])
def test_text_that_is_no_digest_is_refused(text):
    with pytest.raises(InvalidInput, match="64 lower-case"):
        digests.from_hex(text)


def test_text_and_bytes_are_inverse():
    a = digests.sha256(b"a")
    assert digests.from_hex(a.hex()) == a

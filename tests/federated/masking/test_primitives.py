"""Published vectors of the primitives, and bytes that none of them accepts."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from tests.federated.masking.rounds import public_der

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.federated.masking.primitives import (
    EcdsaSigner,
    EcdsaVerifier,
    Keystream,
    RoundKey,
    hkdf,
    open_sealed,
    seal,
)

P = 2**255 - 19
# The points whose order divides 8, in all their encodings below 2^255 (RFC 7748, section 6.1, asks
# for a check of the zero output that they give).
LOW_ORDER = {
    "zero": bytes(32),
    "one": (1).to_bytes(32, "little"),
    "order 8": bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    "order 8, other": bytes.fromhex(
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"
    ),
    "p - 1": (P - 1).to_bytes(32, "little"),
    "p": P.to_bytes(32, "little"),
    "p + 1": (P + 1).to_bytes(32, "little"),
}


def read(stream, size):
    buffer = bytearray(size)
    stream.read_into(memoryview(buffer))
    return bytes(buffer)


def test_the_generator_is_aes_256_in_counter_mode():
    # NIST SP 800-38A, F.5.5.
    key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
    counter = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    plain = (
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = (
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    stream = Keystream(bytes.fromhex(key), bytes.fromhex(counter))
    mask = read(stream, 20) + read(stream, 44)  # the stream goes on where it stopped
    assert bytes(a ^ b for a, b in zip(mask, bytes.fromhex(plain), strict=True)).hex() == cipher


def test_keys_are_derived_by_hkdf_sha_256():
    # RFC 5869, A.1.
    okm = hkdf(bytes([11] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert okm.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_keys_agree_by_x25519():
    # RFC 7748, 5.2 and 6.1.
    scalar = "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4"
    point = "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c"
    product = RoundKey.from_private(bytes.fromhex(scalar)).agree(bytes.fromhex(point))
    assert product.hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    bob = RoundKey.from_private(
        bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    )
    alice = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert bob.agree(bytes.fromhex(alice)).hex() == shared


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_refused(point):
    with pytest.raises(InvalidInput, match="low order"):
        RoundKey.generate().agree(LOW_ORDER[point])


@pytest.mark.parametrize("size", [0, 31, 33, 65])
def test_public_keys_of_other_lengths_are_refused(size):
    with pytest.raises(InvalidInput, match="has 32 bytes, got"):
        RoundKey.generate().agree(bytes(size))


def test_no_two_round_keys_are_equal():
    assert len({RoundKey.generate().private for _ in range(100)}) == 100


@pytest.mark.parametrize("at", [0, 10, -1])
def test_a_changed_byte_of_a_sealed_message_is_noticed(at):
    key = bytes(range(32))
    sealed = bytearray(seal(key, b"shares", b"a to b"))
    assert open_sealed(key, bytes(sealed), b"a to b") == b"shares"
    with pytest.raises(Corrupt):
        open_sealed(key, bytes(sealed), b"b to a")
    sealed[at] ^= 1
    with pytest.raises(Corrupt):
        open_sealed(key, bytes(sealed), b"a to b")


def test_identities_are_keys_of_p_256_only():
    with pytest.raises(InvalidInput, match="'a' is of secp384r1"):
        EcdsaVerifier({"a": public_der(ec.generate_private_key(ec.SECP384R1()))})
    with pytest.raises(InvalidInput, match="Ed25519PublicKey"):
        EcdsaVerifier({"a": public_der(ed25519.Ed25519PrivateKey.generate())})
    with pytest.raises(InvalidInput, match="not a public key in DER"):
        EcdsaVerifier({"a": b"\x30\x03abc"})
    # An object identifier that no algorithm has: the last byte of that of the public key's kind.
    unknown = public_der(ec.generate_private_key(ec.SECP256R1())).replace(
        bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d0277")
    )
    with pytest.raises(InvalidInput, match="not a public key in DER"):
        EcdsaVerifier({"a": unknown})
    with pytest.raises(InvalidInput, match="this device is of secp256k1"):
        EcdsaSigner(ec.generate_private_key(ec.SECP256K1()))


@pytest.mark.parametrize("signature", [b"", b"0", b"\x30\x00", bytes(72), bytes(10_000_000)])
def test_hostile_signatures_are_not_valid(signature):
    key = ec.generate_private_key(ec.SECP256R1())
    verifier = EcdsaVerifier({"a": public_der(key)})
    assert verifier.verifies("a", b"data", EcdsaSigner(key).sign(b"data"))
    assert not verifier.verifies("a", b"data", signature)
    assert not verifier.verifies("a", b"other", EcdsaSigner(key).sign(b"data"))
    assert not verifier.verifies("b", b"data", EcdsaSigner(key).sign(b"data"))

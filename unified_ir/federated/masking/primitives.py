"""Cryptographic primitives of masking, the one module of `unified_ir` that imports cryptography.

X25519 (RFC 7748), HKDF-SHA-256 (RFC 5869), AES-256 in counter mode (NIST SP 800-38A) as the
generator of masks, AES-256-GCM (NIST SP 800-38D) for shares, and ECDSA P-256 with SHA-256, the kind
of key that `proto/identity.py` makes, for identities.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from triplane.proto.errors import Corrupt, InvalidInput, MissingExtra
from triplane.proto.roster import Roster

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, x25519
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:  # pragma: no cover - the tests' environment has it
    raise MissingExtra(
        f"masking needs cryptography ({error}); it comes with: pip install 'triplane[device]'"
    ) from error

KEY_BYTES: Final = 32
FIELD_PRIME: Final = 2**255 - 19
"""Public keys of X25519 are integers below it, little-endian."""
MAX_SIGNATURE_BYTES: Final = 80
"""A signature of ECDSA P-256 in DER has at most 72 bytes."""
CHUNK_BYTES: Final = 1 << 18
"""Bytes of masks that exist at a time: they stay in the processor's cache."""
_ZEROS: Final = bytes(CHUNK_BYTES)


class IdentitySigner(Protocol):
    """Signs with the identity key of one device."""

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""


class IdentityVerifier(Protocol):
    """Knows the identity keys of the devices that may take part, such as a signed roster."""

    def verifies(self, device: str, data: bytes, signature: bytes) -> bool:
        """Return whether `device` is known and signed `data`; never raise for hostile bytes."""


class EcdsaSigner:
    """Sign with a P-256 key. InvalidInput for a key of another curve."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        _check_curve(key.curve, "this device")
        self._key = key

    @classmethod
    def from_pem(cls, pem: bytes) -> EcdsaSigner:
        """Return the signer with a key in PKCS #8 PEM without a password, such as `key.pem`.

        Corrupt if it is none.
        """
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise Corrupt(f"the identity key cannot be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidInput(f"an identity key is ECDSA P-256, this is a {type(key).__name__}")
        return cls(key)

    @property
    def public_der(self) -> bytes:
        """The public key as SubjectPublicKeyInfo in DER."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def sign(self, data: bytes) -> bytes:
        """Return the signature in DER."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))


class EcdsaVerifier:
    """Verify with P-256 keys by device. keys: SubjectPublicKeyInfo in DER.

    InvalidInput for a key that is not one or is of another curve.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = {device: _public_key(device, der) for device, der in keys.items()}

    def verifies(self, device: str, data: bytes, signature: bytes) -> bool:
        """Return whether the device is listed and signed `data`."""
        key = self._keys.get(device)
        if key is None or len(signature) > MAX_SIGNATURE_BYTES:
            return False
        try:
            key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


def roster_verifier(roster: Roster, keys: Mapping[str, bytes]) -> EcdsaVerifier:
    """Return a verifier for the devices of a cohort, all of which must be in the roster.

    keys: by the name of each device in the round, SubjectPublicKeyInfo in DER, on the cloud's word.
    roster: one that has not expired. InvalidInput names a device outside of the roster, or two that
    have one key, so that neither the cloud nor one dishonest device can appear as several.
    """
    names: dict[bytes, str] = {}
    for device, der in keys.items():
        if not roster.holds(der):
            raise InvalidInput(f"{device[:80]!r} is no device of the {roster.summary}")
        other = names.setdefault(der, device)
        if other != device:
            raise InvalidInput(
                f"{other[:80]!r} and {device[:80]!r} have the same identity key, and a device "
                "counts once"
            )
    return EcdsaVerifier(keys)


def _public_key(device: str, der: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(der)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput(
            f"the identity key of {device!r} is not a public key in DER: {error}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidInput(
            f"an identity key is ECDSA P-256, that of {device!r} is a {type(key).__name__}"
        )
    _check_curve(key.curve, repr(device))
    return key


def _check_curve(curve: ec.EllipticCurve, device: str) -> None:
    if not isinstance(curve, ec.SECP256R1):
        raise InvalidInput(f"an identity key is ECDSA P-256, that of {device} is of {curve.name}")


@dataclass(frozen=True, slots=True, repr=False)
class RoundKey:
    """An X25519 key pair of one device for one round, both halves of 32 bytes."""

    private: bytes
    public: bytes
    _parsed: x25519.X25519PrivateKey = field(compare=False)

    @classmethod
    def generate(cls) -> RoundKey:
        """Return a new pair from the operating system's generator."""
        return cls.from_private(os.urandom(KEY_BYTES))

    @classmethod
    def from_private(cls, private: bytes) -> RoundKey:
        """Return the pair of a private key."""
        key = x25519.X25519PrivateKey.from_private_bytes(private)
        return cls(private, key.public_key().public_bytes_raw(), key)

    def agree(self, public: bytes) -> bytes:
        """Return the 32 bytes that both owners compute. InvalidInput for a point of low order.

        The result is not uniform, so it is used through `hkdf` only.
        """
        check_length(public, KEY_BYTES, "an X25519 public key")
        try:
            return self._parsed.exchange(x25519.X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise InvalidInput(
                f"the X25519 public key {public.hex()} is a point of low order, so it would agree "
                "on a secret that everybody knows"
            ) from error


def check_length(data: bytes, size: int, what: str) -> None:
    """Raise InvalidInput unless `data` has `size` bytes."""
    if len(data) != size:
        raise InvalidInput(f"{what} has {size} bytes, got {len(data)}")


def hkdf(secret: bytes, salt: bytes, info: bytes, size: int = KEY_BYTES) -> bytes:
    """Return `size` bytes derived by HKDF-SHA-256."""
    return HKDF(algorithm=hashes.SHA256(), length=size, salt=salt, info=info).derive(secret)


class Keystream:
    """AES-256 in counter mode over zeros. A key is used for one stream only.

    counter: the first counter block, 16 bytes. It is zero for masks.
    """

    def __init__(self, key: bytes, counter: bytes = bytes(16)) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, at most CHUNK_BYTES, with the next bytes of the stream."""
        self._encryptor.update_into(memoryview(_ZEROS)[: len(buffer)], buffer)


def seal(key: bytes, data: bytes, associated: bytes) -> bytes:
    """Encrypt `data` by AES-256-GCM; the result is 16 bytes longer. A key seals one message only.

    The nonce is zero, because every key is derived for one message of one round.
    """
    return AESGCM(key).encrypt(bytes(12), data, associated)


def open_sealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """Return what `seal` encrypted. Corrupt if anything differs."""
    try:
        return AESGCM(key).decrypt(bytes(12), sealed, associated)
    except InvalidTag as error:
        raise Corrupt("encrypted shares were changed, or are for another pair or round") from error

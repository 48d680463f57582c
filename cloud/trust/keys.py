"""Signing keys as files: PKCS #8 PEM, one key per file, readable by their owner only.

A key's file name is for people; which role a key signs for is said by the metadata alone, by key
id. Ed25519 throughout.
"""

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer._crypto_signer import CryptoSigner
from securesystemslib.signer._key import Key, SSlibKey

from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.errors import Conflict, Corrupt, NotFound

MAX_KEY_BYTES: Final = 16 << 10
MAX_KEYS: Final = 64


class KeyFolder:
    """A folder of private keys, mode 0700, each file 0600."""

    def __init__(self, path: Path, disk: Disk = OS_DISK) -> None:
        self.path, self._disk = path, disk

    def make(self, name: str) -> CryptoSigner:
        """Make a key and store it as NAME.pem; Conflict: that file exists."""
        file = self.path / f"{name}.pem"
        if file.exists():
            raise Conflict(f"{file} is there already; a key is never replaced, give a new name")
        self._disk.make_folder(self.path)
        self.path.chmod(0o700)
        signer = CryptoSigner.generate_ed25519()
        write_atomic(file, signer.private_bytes, self._disk)
        file.chmod(0o600)
        return signer

    def make_next(self, role: str) -> tuple[Path, CryptoSigner]:
        """Make another key of a role as ROLE-N.pem, with the first N from 2 on that is free."""
        number = next(
            n for n in range(2, MAX_KEYS + 2) if not (self.path / f"{role}-{n}.pem").exists()
        )
        return self.path / f"{role}-{number}.pem", self.make(f"{role}-{number}")

    def write_public(self, name: str) -> Path:
        """Write the public half of NAME.pem as NAME.pub, to be handed over."""
        file = self.path / f"{name}.pub"
        private = self._private(self.path / f"{name}.pem")
        pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        write_atomic(file, pem, self._disk)
        return file

    def signers(self) -> dict[str, CryptoSigner]:
        """Every key in the folder, by key id; Corrupt names a file that holds none."""
        files = sorted(self.path.glob("*.pem"))[:MAX_KEYS]
        signers = (self._signer(file) for file in files)
        return {signer.public_key.keyid: signer for signer in signers}

    def files_of(self, keyids: set[str]) -> list[Path]:
        """The files here that hold keys of these ids."""
        files = sorted(self.path.glob("*.pem"))[:MAX_KEYS]
        return [file for file in files if self._signer(file).public_key.keyid in keyids]

    def of(self, keyids: list[str], role: str) -> list[CryptoSigner]:
        """The keys here that may sign for a role of these key ids; NotFound where there is none."""
        here = self.signers()
        keys = [here[keyid] for keyid in keyids if keyid in here]
        if not keys:
            wanted = ", ".join(keyid[:12] for keyid in keyids)
            raise NotFound(
                f"{self.path} has no key of the role {role} (key ids {wanted}); it has "
                f"{len(here)} others: name the folder that `triplane cloud init` wrote for {role}"
            )
        return keys

    @classmethod
    def _signer(cls, file: Path) -> CryptoSigner:
        return CryptoSigner(cls._private(file))

    @staticmethod
    def _private(file: Path) -> Ed25519PrivateKey:
        try:
            key = load_pem_private_key(_few_bytes(file), password=None)
        except (ValueError, TypeError) as error:
            raise Corrupt(f"{file} is no private key in PKCS #8 PEM: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise Corrupt(f"{file} is a {type(key).__name__}; keys here are Ed25519")
        return key


def read_public(file: Path) -> Key:
    """The key that `KeyFolder.write_public` wrote. Corrupt."""
    try:
        key = load_pem_public_key(_few_bytes(file))
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{file} is no public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise Corrupt(f"{file} is a {type(key).__name__}; keys here are Ed25519")
    return SSlibKey.from_crypto(key)


def _few_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(MAX_KEY_BYTES)

"""Signing keys as files: PKCS #8 PEM, one key per file, readable by their owner only.

A key's file name is for people; only the metadata decides, by key id, for which role a key signs.
All keys are Ed25519.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer._crypto_signer import CryptoSigner
from securesystemslib.signer._key import Key, SSlibKey
from tuf.api.metadata import Metadata

from triplane.cloud.trust.roles import T
from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.errors import Conflict, Corrupt, NotFound

MAX_KEY_BYTES: Final = 16 << 10
MAX_KEYS: Final = 64

K = TypeVar("K")


class KeyFolder:
    """A folder of private keys, mode 0700, each file 0600."""

    def __init__(self, path: Path, disk: Disk = OS_DISK) -> None:
        self.path, self._disk = path, disk

    def make(self, name: str) -> CryptoSigner:
        """Make a key and store it as NAME.pem; Conflict: that file exists."""
        file = self.path / f"{name}.pem"
        if file.exists():
            raise Conflict(f"{file} exists already; a key is never replaced, so give a new name")
        self._disk.make_folder(self.path)
        self.path.chmod(0o700)
        signer = CryptoSigner.generate_ed25519()
        write_atomic(file, signer.private_bytes, self._disk)
        # The folder is 0700, so nobody else could open the file before this.
        file.chmod(0o600)
        return signer

    def make_next(self, role: str) -> tuple[Path, CryptoSigner]:
        """Make another key of a role as ROLE-N.pem, with the smallest unused N from 2 on."""
        number = next(
            n for n in range(2, MAX_KEYS + 2) if not (self.path / f"{role}-{n}.pem").exists()
        )
        return self.path / f"{role}-{number}.pem", self.make(f"{role}-{number}")

    def write_public(self, name: str) -> Path:
        """Write the public half of NAME.pem as NAME.pub, to be handed over."""
        file = self.path / f"{name}.pub"
        public = _private_key(self.path / f"{name}.pem").public_key()
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        write_atomic(file, pem, self._disk)
        return file

    def signers(self) -> dict[str, CryptoSigner]:
        """Return every key in the folder, by key id. Corrupt names a file that holds none."""
        return {signer.public_key.keyid: signer for _, signer in self._files()}

    def files_of(self, keyids: set[str]) -> list[Path]:
        """Return the files here that hold keys of these ids."""
        return [file for file, signer in self._files() if signer.public_key.keyid in keyids]

    def of(self, keyids: list[str], role: str) -> list[CryptoSigner]:
        """Return the keys here that may sign for a role of these key ids. NotFound: none."""
        # By key id and not by file name: files may be renamed, and a key may serve several roles.
        here = self.signers()
        keys = [here[keyid] for keyid in keyids if keyid in here]
        if not keys:
            wanted = ", ".join(keyid[:12] for keyid in keyids)
            raise NotFound(
                f"{self.path} has no key of the role {role} (key ids {wanted}); it has "
                f"{len(here)} others: name the folder that `triplane cloud init` wrote for {role}"
            )
        return keys

    def _files(self) -> list[tuple[Path, CryptoSigner]]:
        files = sorted(self.path.glob("*.pem"))[:MAX_KEYS]
        return [(file, read_private(file)) for file in files]


def add_signatures(metadata: Metadata[T], signers: Iterable[CryptoSigner]) -> Metadata[T]:
    """Sign metadata with each key, beside the signatures that it has."""
    for signer in signers:
        metadata.sign(signer, append=True)
    return metadata


def read_public(file: Path) -> Key:
    """Read the key that `KeyFolder.write_public` wrote. Corrupt."""
    key = _parsed(file, "public key in PEM", load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise Corrupt(f"{file} is a {type(key).__name__}; keys here are Ed25519")
    return SSlibKey.from_crypto(key)


def read_private(file: Path) -> CryptoSigner:
    """Read a key that `KeyFolder.make` wrote. Corrupt."""
    return CryptoSigner(_private_key(file))


def _private_key(file: Path) -> Ed25519PrivateKey:
    key = _parsed(file, "private key in PKCS #8 PEM", partial(load_pem_private_key, password=None))
    if not isinstance(key, Ed25519PrivateKey):
        raise Corrupt(f"{file} is a {type(key).__name__}; keys here are Ed25519")
    return key


def _parsed(file: Path, what: str, parse: Callable[[bytes], K]) -> K:
    with file.open("rb") as opened:
        data = opened.read(MAX_KEY_BYTES)
    try:
        return parse(data)
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{file} is not a {what}: {error}") from error

"""One identity on disk: what a caller shows and whom it trusts.

The folder holds `ca.pem`, `cert.pem`, `key.pem` (mode 0600) and `cloud` (HOST:PORT of the main
port). Reading the files needs no cryptography, which weighs more than the rest of the wire; it is
imported where a certificate is parsed.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triplane.proto.disk import OS_DISK, atomic_file, write_atomic
from triplane.proto.errors import Corrupt, NotFound

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MAX_CERTIFICATE_BYTES: Final = 16 << 10


class IdentityFolder:
    """One identity on disk."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def authority_pem(self) -> bytes:
        """The authority that both sides trust."""
        return self._read("ca.pem")

    @property
    def certificate_pem(self) -> bytes:
        """Our certificate."""
        return self._read("cert.pem")

    @property
    def key_pem(self) -> bytes:
        """Our key."""
        return self._read("key.pem")

    def load(self) -> "IdentityFolder":
        """Itself, once all four files were read; NotFound or Corrupt name the one at fault."""
        _ = self.authority_pem, self.key_pem, self.cloud, self.name
        return self

    @property
    def cloud(self) -> str:
        """HOST:PORT of the cloud's main port."""
        return self._read("cloud").decode().strip()

    @property
    def certificate(self) -> "Certificate":
        """Our certificate, parsed."""
        from cryptography import x509

        try:
            return x509.load_pem_x509_certificate(self.certificate_pem)
        except ValueError as error:
            raise Corrupt(f"{self.path / 'cert.pem'} is not a certificate: {error}") from error

    @property
    def name(self) -> str:
        """The name in our certificate."""
        return common_name(self.certificate)

    @property
    def expires_s(self) -> float:
        """When the certificate ends, seconds since 1970."""
        return self.certificate.not_valid_after_utc.timestamp()

    def save(self, *, authority: bytes, certificate: bytes, key: bytes, cloud: str) -> None:
        """Write all four files, each whole; `certificate` last, so a folder with one is complete.

        authority, certificate, key: PEM.
        """
        OS_DISK.make_folder(self.path)
        write_atomic(self.path / "ca.pem", authority)
        with atomic_file(self.path / "key.pem") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(key)
        write_atomic(self.path / "cloud", f"{cloud}\n".encode())
        write_atomic(self.path / "cert.pem", certificate)

    def _read(self, name: str) -> bytes:
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise NotFound(
                f"no identity in {self.path}: {name}: {error.strerror}; enrol first, or name "
                "another folder"
            ) from error
        if len(data) > MAX_CERTIFICATE_BYTES:
            raise Corrupt(f"{self.path / name} has {len(data)} bytes; not a file of ours")
        return data


def common_name(certificate: "Certificate") -> str:
    """The one common name of the subject; Corrupt where there is not exactly one."""
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or not isinstance(names[0].value, str):
        raise Corrupt(f"a certificate of ours has one common name, this one has {len(names)}")
    return names[0].value

"""The credentials of one node, device or person, as files in a folder.

The folder holds `ca.pem`, `cert.pem`, `key.pem` (mode 0600) and `cloud` (HOST:PORT of the main
port). The cryptography package takes more memory than everything else on the wire, so it is
imported only where a certificate is parsed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from triplane.proto.disk import OS_DISK, write_atomic, write_secret
from triplane.proto.errors import Corrupt, NotFound

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MAX_CERTIFICATE_BYTES: Final = 16 << 10


class IdentityFolder:
    """The folder of one identity. NotFound or Corrupt where a file is missing or too long."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def authority_pem(self) -> bytes:
        """Certificate of the authority that both sides trust."""
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
        """Return this folder after all four files were read; an error names the file at fault."""
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
        """The common name in our certificate."""
        return common_name(self.certificate)

    @property
    def expires_s(self) -> float:
        """Time at which the certificate expires, in seconds since 1970."""
        return self.certificate.not_valid_after_utc.timestamp()

    def save(self, *, authority: bytes, certificate: bytes, key: bytes, cloud: str) -> None:
        """Write the four files, each atomically. authority, certificate, key: PEM.

        The certificate comes last, so a folder that has one is complete.
        """
        OS_DISK.make_folder(self.path)
        write_atomic(self.path / "ca.pem", authority)
        write_secret(self.path / "key.pem", key)
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
            raise Corrupt(f"{self.path / name} has {len(data)} bytes; it is not a file of Triplane")
        return data


def common_name(certificate: "Certificate") -> str:
    """Return the common name of the subject. Corrupt unless there is exactly one."""
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or not isinstance(names[0].value, str):
        raise Corrupt(f"a certificate must have one common name, this one has {len(names)}")
    return names[0].value

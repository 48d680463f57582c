"""The cloud's certificate authority: one ECDSA P-256 key that signs all certificates."""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from triplane.proto.disk import write_atomic, write_secret
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.identity import (
    MAX_REQUEST_BYTES,
    Key,
    certificate_pem,
    check_name,
    key_pem,
    new_key,
)

AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 30
SKEW: Final = timedelta(minutes=5)
"""How long before its creation a certificate becomes valid, because clocks differ."""


class Authority:
    """The key and certificate in a folder: `ca.pem`, `ca.key` (mode 0600)."""

    def __init__(self, certificate: x509.Certificate, key: Key) -> None:
        self.certificate = certificate
        self._key = key

    @property
    def der(self) -> bytes:
        """The certificate as DER, whose fingerprint is part of tokens."""
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def pem(self) -> bytes:
        """The certificate that both sides of TLS trust."""
        return certificate_pem(self.certificate)

    @classmethod
    def make(cls, folder: Path, name: str, now_s: float) -> "Authority":
        """Create an authority in an existing, empty folder. Conflict: it has one already."""
        if (folder / "ca.key").exists():
            raise Conflict(f"{folder} holds an authority already, which is never replaced")
        key = new_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.fromtimestamp(now_s, UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
            # path_length=0: the authority issues leaf certificates only, never another authority.
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        # The key first: `make` refuses a folder with a key, so a crash in between never replaces
        # one.
        write_secret(folder / "ca.key", key_pem(key))
        write_atomic(folder / "ca.pem", certificate_pem(certificate))
        return cls(certificate, key)

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        """Load the authority in `folder`. NotFound, Corrupt."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except OSError as error:
            raise NotFound(f"no authority in {folder}: {error.strerror}") from error
        except ValueError as error:
            raise Corrupt(f"the authority in {folder} is damaged: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise Corrupt(f"the authority's key in {folder} is not an elliptic curve key")
        return cls(certificate, key)

    def issue(
        self, request_der: bytes, name: str, now_s: float, *, days: float = LEAF_DAYS
    ) -> x509.Certificate:
        """Issue a certificate for `name` and the key of a request. InvalidInput: a bad request."""
        return self._sign(_requested_key(request_der), name, now_s, days=days, hosts=())

    def issue_server(
        self, key: ec.EllipticCurvePublicKey, hosts: Sequence[str], now_s: float
    ) -> x509.Certificate:
        """Issue the cloud's own certificate, for the names and addresses by which it is called."""
        return self._sign(key, "cloud", now_s, days=AUTHORITY_DAYS, hosts=hosts)

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        now_s: float,
        *,
        days: float,
        hosts: Sequence[str],
    ) -> x509.Certificate:
        now = datetime.fromtimestamp(now_s, UTC)
        # A client certificate must never pass for the cloud: its holder could impersonate it.
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(name))]))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            # A leaf must not outlive its issuer (X.509 path validation would fail).
            .not_valid_after(min(now + timedelta(days=days), self.certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _requested_key(der: bytes) -> ec.EllipticCurvePublicKey:
    if len(der) > MAX_REQUEST_BYTES:
        raise InvalidInput(
            f"a certificate request has at most {MAX_REQUEST_BYTES} bytes, got {len(der)}"
        )
    try:
        request = x509.load_der_x509_csr(der)
        key, signed = request.public_key(), request.is_signature_valid
    except Exception as error:  # the parser raises many kinds on hostile bytes
        raise InvalidInput(f"not a certificate request: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInput("a certificate request must be for an ECDSA key on the curve P-256")
    # Proof of possession: without it, anybody could get a certificate for another one's key.
    if not signed:
        raise InvalidInput("the certificate request is not signed by its own key")
    return key


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )

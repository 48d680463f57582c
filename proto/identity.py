"""How a machine gets and renews its key and certificate.

They are stored in a `credentials.IdentityFolder`. Keys are ECDSA P-256, made where they are used
and never sent. A token is SECRET.PIN, both in base32. PIN is the SHA-256 of the authority's
certificate; SECRET is only used as the key of a MAC over the certificate request (see
`enrolment.proto`). So enrolment needs no TLS, and an eavesdropper learns nothing useful. This
module needs cryptography and, to enrol and renew, grpc.
"""

import base64
import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from triplane.proto.credentials import MAX_CERTIFICATE_BYTES
from triplane.proto.credentials import IdentityFolder as IdentityFolder  # noqa: PLC0414 -- callers
from triplane.proto.credentials import common_name as common_name  # noqa: PLC0414 -- name it here
from triplane.proto.disk import OS_DISK, write_atomic, write_secret
from triplane.proto.errors import Corrupt, InvalidInput, Unavailable
from triplane.proto.unreachable import unreachable_cause

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
SECRET_BYTES: Final = 32
TOKEN_ID_BYTES: Final = 16
MAX_REQUEST_BYTES: Final = 8 << 10
ENROL_S: Final = 20.0
RENEW_AT: Final = 2 / 3
"""Share of a certificate's lifetime after which it is renewed."""

Key = ec.EllipticCurvePrivateKey


def check_name(name: str) -> str:
    """Return `name`, or raise InvalidInput if it cannot be the name of a machine or a person."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"a name has 1 to 63 of a-z, 0-9, '.', '_', '-' and begins with a letter or digit, "
            f"got {name[:80]!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class Token:
    """A one-time right to enrol. The cloud stores only its `id` and `key`."""

    secret: bytes
    pin: bytes

    @classmethod
    def make(cls, authority_der: bytes) -> "Token":
        """Return a new token that pins this authority."""
        return cls(secrets.token_bytes(SECRET_BYTES), hashlib.sha256(authority_der).digest())

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Parse a token. InvalidInput if the text is not one."""
        if not text.strip():
            raise InvalidInput("the token is empty; `triplane cloud token` prints one")
        secret, _, pin = text.strip().partition(".")
        parts = _unbase32(secret), _unbase32(pin)
        if tuple(map(len, parts)) != (SECRET_BYTES, 32):
            raise InvalidInput(
                "a token is SECRET.PIN, 52 characters each, as `triplane cloud token` printed it; "
                f"got {len(secret)} and {len(pin)} characters"
            )
        return cls(*parts)

    @property
    def id(self) -> bytes:
        """The name by which the cloud knows the token."""
        # Id and key are derived with different prefixes: the id is sent in clear and reveals
        # nothing about the key, and the cloud's database never holds the secret itself.
        return hashlib.sha256(b"triplane token id" + self.secret).digest()[:TOKEN_ID_BYTES]

    @property
    def key(self) -> bytes:
        """The key of the MAC over a request."""
        return hashlib.sha256(b"triplane token key" + self.secret).digest()

    def __str__(self) -> str:
        return f"{_base32(self.secret)}.{_base32(self.pin)}"


def mac(key: bytes, request_der: bytes) -> bytes:
    """Return the HMAC-SHA-256 of a certificate request under a token's key."""
    return hmac.new(key, request_der, hashlib.sha256).digest()


def new_key() -> Key:
    """Generate a key for one certificate."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """Return a key as PKCS #8 in PEM, without a password: the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def private_key(folder: IdentityFolder) -> Key:
    """Return the key of the certificate in a folder. Corrupt unless it is ECDSA P-256."""
    try:
        key = serialization.load_pem_private_key(folder.key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{folder.path / 'key.pem'} is not a private key: {error}") from error
    if not isinstance(key, Key) or not isinstance(key.curve, ec.SECP256R1):
        raise Corrupt(f"{folder.path / 'key.pem'} is not a key of ECDSA P-256")
    return key


def key_digest(certificate: x509.Certificate) -> bytes:
    """Return the SHA-256 of the certificate's public key, by which a roster lists a device."""
    der = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).digest()


def certificate_request(key: Key, name: str = "enrolling") -> bytes:
    """Return a request as PKCS #10 in DER.

    The cloud ignores its name and takes the one of the token or of the old certificate.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def certificate_of(der: bytes, what: str) -> x509.Certificate:
    """Parse the certificate in `der`. Corrupt if it is not one; `what` names it in the error."""
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise Corrupt(f"{what} has {len(der)} bytes; at most {MAX_CERTIFICATE_BYTES} are read")
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise Corrupt(f"{what} is not a certificate: {error}") from error


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return the certificate in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def enrol(
    token: str, address: str, folder: Path, *, kind: str = "", timeout_s: float = ENROL_S
) -> IdentityFolder:
    """Get a certificate from the enrolment port at `address` and save it in `folder`.

    Until the token expires, a repeated call with the same folder and token gives the same
    certificate, so it can be repeated after a crash. kind: "node", "device" or "person", which the
    token must be for. Raises InvalidInput for a token that is not accepted or is for another kind,
    Corrupt for an authority that is not the pinned one, Unavailable if no enrolment port answers.
    """
    import grpc

    from triplane.proto import enrolment_pb2 as pb
    from triplane.proto.enrolment_pb2_grpc import EnrolmentStub
    from triplane.proto.status import remote_errors

    _check_address(address)
    parsed = Token.parse(token)
    key = _pending_key(Path(folder), parsed)
    request = _pending_request(Path(folder), parsed, key)
    # Without TLS, because this machine does not know the authority yet. The pinned fingerprint
    # authenticates the answer, and the MAC authenticates the request.
    with grpc.insecure_channel(address) as channel, _answers_for(address), remote_errors():
        stub = EnrolmentStub(channel)
        authority_der = stub.GetAuthority(pb.GetAuthorityRequest(), timeout=timeout_s).authority
        authority = _pinned(authority_der, parsed.pin, address)
        answer = stub.Enrol(
            pb.EnrolRequest(
                token_id=parsed.id, request=request, mac=mac(parsed.key, request), kind=kind
            ),
            timeout=timeout_s,
        )
    return _accept(IdentityFolder(folder), answer.certificate, authority, key, answer.address)


@contextlib.contextmanager
def _answers_for(address: str) -> Iterator[None]:
    """Replace gRPC's error of a failed connection by one that says which port is meant."""
    from triplane.proto.status import Unimplemented

    try:
        yield
    except (Unavailable, Unimplemented) as error:
        if (cause := unreachable_cause(str(error))) is None:
            raise
        raise Unavailable(
            f"no enrolment port answers at {address}: {cause}. `triplane cloud up` prints the "
            "port, usually 8444; the main port, usually 8443, does not take tokens. Check host, "
            "port and firewall"
        ) from error


def _check_address(address: str) -> None:
    if _ADDRESS.fullmatch(address) is None:
        raise InvalidInput(
            "the enrolment port of a cloud is HOST:PORT, such as fleet.example.org:8444, got "
            f"{address[:80]!r}; `triplane cloud up` prints it"
        )


_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):[0-9]{1,5}")
"""A host name, an IPv4 address or an IPv6 address in brackets, then a port."""


def renew(
    folder: IdentityFolder, *, key: Key | None = None, timeout_s: float = ENROL_S
) -> IdentityFolder:
    """Replace the key and the certificate in a folder, whose certificate must still be valid.

    key: of the new certificate; a new one by default.
    """
    from triplane.proto import enrolment_pb2 as pb
    from triplane.proto.channels import connect
    from triplane.proto.enrolment_pb2_grpc import RenewalStub
    from triplane.proto.status import remote_errors

    key = key or new_key()
    with connect(folder) as channel, remote_errors():
        answer = RenewalStub(channel).Renew(
            pb.RenewRequest(request=certificate_request(key)), timeout=timeout_s
        )
    authority = x509.load_pem_x509_certificate(folder.authority_pem)
    name = common_name(certificate_of(answer.certificate, "the cloud's answer"))
    # A renewal that changes the name would turn this machine into another one.
    if name != folder.name:
        raise Corrupt(f"the cloud renewed {folder.name!r} as {name!r}; names never change")
    return _accept(folder, answer.certificate, authority, key, answer.address or folder.cloud)


def needs_renewal(folder: IdentityFolder, now_s: float) -> bool:
    """Return whether two thirds of the certificate's lifetime have passed."""
    return now_s >= renewal_due_s(folder)


def renewal_due_s(folder: IdentityFolder) -> float:
    """Return when two thirds of the certificate's lifetime have passed, in seconds since 1970."""
    start, end = folder.certificate.not_valid_before_utc, folder.certificate.not_valid_after_utc
    return (start + RENEW_AT * (end - start)).timestamp()


def _accept(
    folder: IdentityFolder, der: bytes, authority: x509.Certificate, key: Key, address: str
) -> IdentityFolder:
    certificate = certificate_of(der, "the cloud's answer")
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise Corrupt("the certificate is not signed by the pinned authority") from error
    # Without this check, a certificate that works would be replaced by one that never can.
    if certificate.public_key() != key.public_key():
        raise Corrupt("the certificate is for a key other than ours")
    folder.save(
        authority=certificate_pem(authority),
        certificate=certificate_pem(certificate),
        key=key_pem(key),
        cloud=address,
    )
    # Only now: a crash before `save` must find key and request of this attempt again.
    for pending in folder.path.glob(".enrol-*"):
        pending.unlink(missing_ok=True)
    return folder


def _pinned(der: bytes, pin: bytes, address: str) -> x509.Certificate:
    fingerprint = hashlib.sha256(der).digest()
    if not hmac.compare_digest(fingerprint, pin):
        raise Corrupt(
            f"invalid token: it pins the authority {distinct_digest(pin, fingerprint)}, but "
            f"{address} has {distinct_digest(fingerprint, pin)}. The token was changed on its way "
            "or belongs to another cloud, or somebody answers in the cloud's place; request a new "
            "one with `triplane cloud token`"
        )
    return certificate_of(der, "the authority")


def distinct_digest(digest: bytes, other: bytes) -> str:
    """Return a digest in hexadecimal, long enough to distinguish it from the other."""
    mine, theirs = digest.hex(), other.hex()
    differs = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
    end = max(16, differs + 4)
    return mine if end >= len(mine) else f"{mine[:end]}..."


def _pending_key(folder: Path, token: Token) -> Key:
    """Return the key of an earlier attempt to enrol with this token, or store a new one."""
    OS_DISK.make_folder(folder)
    path = folder / f".enrol-{token.id.hex()}.key"
    if path.exists():
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    key = new_key()
    write_secret(path, key_pem(key))
    return key


def _pending_request(folder: Path, token: Token, key: Key) -> bytes:
    """Return the request of an earlier attempt, because ECDSA signs differently each time."""
    path = folder / f".enrol-{token.id.hex()}.csr"
    if path.exists():
        return path.read_bytes()
    request = certificate_request(key)
    write_atomic(path, request)
    return request


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _unbase32(text: str) -> bytes:
    try:
        return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError:
        return b""

"""Names, their roles and certificates, and the one-time tokens with which they enrol.

Every change is a transaction together with its audit entry. Times are seconds since 1970.
"""

import asyncio
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from triplane.cloud.identity import audit
from triplane.cloud.identity.admission_cache import AdmissionCache
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.rights import MACHINES, PrincipalRole
from triplane.cloud.identity.tables import CERTIFICATES, KEYS, PRINCIPALS, TOKENS
from triplane.cloud.store import Database
from triplane.proto.documents import check_labels
from triplane.proto.errors import Conflict, InvalidInput, NotFound, Unavailable
from triplane.proto.identity import Token, check_name, key_digest, mac
from triplane.proto.messages import value_from

TOKEN_S: Final = 3600.0
MAX_TOKEN_S: Final = 30 * 86_400.0
MAX_OPEN_TOKENS: Final = 10_000
MAX_RENEWALS: Final = 8
"""Renewals of one name within `OLD_CERTIFICATE_S`; each adds permanent rows, and few are needed."""
OLD_CERTIFICATE_S: Final = 3600.0
"""How long the old certificate stays valid: its owner may crash before it uses the new one."""
USED: Final = "this token was used already; request a new one with `triplane cloud token`"
REFUSED: Final = "the token is unknown, expired or used, or its secret is wrong; request a new one"

Labels = Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Principal:
    """A name with its role; times of its newest certificate, 0 before enrolment.

    key_sha256: of its public key; empty for certificates of early releases.
    """

    name: str
    role: PrincipalRole
    serial: str
    enrolled_s: float
    expires_s: float
    revoked: bool
    key_sha256: bytes = b""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A token, which is shown only once."""

    token: str
    name: str
    expires_s: float


@dataclass(frozen=True, slots=True)
class EnrolmentResult:
    """The result of an enrolment. labels: those of the token; empty for a repeated request."""

    certificate: bytes
    name: str
    role: PrincipalRole
    labels: Labels


class Principals:
    """All names and their certificates. clock: seconds since 1970."""

    def __init__(
        self, database: Database, authority: Authority, clock: Callable[[], float]
    ) -> None:
        self._database, self._authority, self._clock = database, authority, clock
        self._known = AdmissionCache()

    async def invite(
        self,
        actor: str,
        role: PrincipalRole,
        *,
        name: str = "",
        valid_s: float = 0.0,
        labels: Labels | None = None,
    ) -> Invitation:
        """Create a token for one enrolment. Conflict: the name is enrolled and not revoked."""
        valid_s = valid_s or TOKEN_S
        if not 0 < valid_s <= MAX_TOKEN_S:
            most, asked = MAX_TOKEN_S / 86_400, valid_s / 86_400
            raise InvalidInput(f"a token is valid for up to {most:g} days, got {asked:g} days")
        if not name and role not in MACHINES:
            raise InvalidInput(f"a {role} is a person, who needs a name: pass --name")
        name = check_name(name or f"{role}-{secrets.token_hex(4)}")
        labels = labels or {}
        check_labels(labels)
        token = Token.make(self._authority.der)
        now = self._clock()

        def work(connection: sa.Connection) -> None:
            # Expired tokens are removed here, where new ones are made, so the table stays bounded.
            connection.execute(sa.delete(TOKENS).where(TOKENS.c.expires_s < now))
            count = connection.scalar(sa.select(sa.func.count()).select_from(TOKENS)) or 0
            if count >= MAX_OPEN_TOKENS:
                raise Conflict(f"{count} tokens are open; wait until some expire")
            known = _principal(connection, name)
            if known and not known.revoked:
                raise Conflict(f"{name!r} is enrolled as {known.role}; revoke it first")
            connection.execute(
                TOKENS.insert().values(
                    id=token.id,
                    key=token.key,
                    name=name,
                    role=role.value,
                    labels=json.dumps(dict(labels), sort_keys=True),
                    expires_s=now + valid_s,
                )
            )
            details = {"role": role.value, "valid_s": valid_s}
            audit.record(connection, now, actor, "token.create", name, details)

        await self._database.write(work)
        return Invitation(str(token), name, now + valid_s)

    async def enrol(
        self, token_id: bytes, request: bytes, given_mac: bytes, kind: str = ""
    ) -> EnrolmentResult:
        """Issue a certificate for a token. InvalidInput does not tell unknown from forged tokens.

        kind: what the caller wants to be, or empty; a token for another kind is refused and remains
        valid.
        """
        now = self._clock()

        def work(connection: sa.Connection) -> EnrolmentResult:
            row = connection.execute(sa.select(TOKENS).where(TOKENS.c.id == token_id)).first()
            # The MAC is computed even for an unknown token, so that time does not tell them apart.
            key = bytes(row.key) if row else bytes(32)
            genuine = hmac.compare_digest(mac(key, request), given_mac)
            if row is None or not genuine or row.expires_s < now:
                raise InvalidInput(REFUSED)
            role = PrincipalRole(row.role)
            _check_kind(kind, role)
            # A used token answers only its own request again, for a machine that crashed before it
            # stored the certificate.
            if row.request is not None:
                if row.request != request:
                    raise Conflict(USED)
                return EnrolmentResult(row.certificate, row.name, role, {})
            # Two tokens for one name may have been made before either was used.
            known = _principal(connection, row.name)
            if known and not known.revoked:
                raise Conflict(f"{row.name!r} was enrolled by another token meanwhile")
            certificate = self._authority.issue(request, row.name, now)
            _admit(connection, certificate, row.name, role, now)
            der = certificate.public_bytes(serialization.Encoding.DER)
            connection.execute(
                sa.update(TOKENS)
                .where(TOKENS.c.id == token_id)
                .values(request=request, certificate=der)
            )
            details = {"role": row.role, "serial": serial_of(certificate)}
            audit.record(connection, now, row.name, "identity.enrol", row.name, details)
            return EnrolmentResult(der, row.name, role, json.loads(row.labels))

        return await self._write(work)

    async def renew(self, name: str, request: bytes) -> bytes:
        """Issue a new certificate (DER) for a name; the old one stays valid for another hour."""
        now = self._clock()

        def work(connection: sa.Connection) -> bytes:
            known = _principal(connection, name)
            if known is None or known.revoked:
                raise NotFound(f"{name!r} is not enrolled, or was revoked")
            _check_renewals(connection, name, now)
            certificate = self._authority.issue(request, name, now)
            connection.execute(
                sa.update(CERTIFICATES)
                .where(
                    CERTIFICATES.c.name == name,
                    # Only shorten: an older certificate that expires sooner keeps its time.
                    CERTIFICATES.c.expires_s > now + OLD_CERTIFICATE_S,
                )
                .values(expires_s=now + OLD_CERTIFICATE_S)
            )
            _store(connection, certificate, name, now)
            audit.record(
                connection, now, name, "identity.renew", name, {"serial": serial_of(certificate)}
            )
            return certificate.public_bytes(serialization.Encoding.DER)

        return await self._write(work)

    def admit_now(self, request: bytes, name: str, role: PrincipalRole) -> x509.Certificate:
        """Enrol a name without a token: the first operator, created with the cloud itself."""
        now = self._clock()
        certificate = self._authority.issue(request, name, now)

        def work(connection: sa.Connection) -> None:
            _admit(connection, certificate, name, role, now)
            details = {"role": role.value, "serial": serial_of(certificate)}
            audit.record(connection, now, "cloud", "identity.enrol", name, details)

        try:
            self._database.write_now(work)
        finally:
            self._known.forget()
        return certificate

    async def revoke(self, actor: str, name: str, reason: str) -> Principal:
        """Invalidate every certificate and open token of a name. NotFound."""
        now = self._clock()

        def work(connection: sa.Connection) -> Principal:
            if _principal(connection, name) is None:
                raise NotFound(f"no principal {name[:80]!r}; `triplane cloud who` lists them")
            connection.execute(
                sa.update(PRINCIPALS).where(PRINCIPALS.c.name == name).values(revoked=True)
            )
            connection.execute(
                sa.update(CERTIFICATES).where(CERTIFICATES.c.name == name).values(revoked=True)
            )
            connection.execute(sa.delete(TOKENS).where(TOKENS.c.name == name))
            audit.record(connection, now, actor, "identity.revoke", name, {"reason": reason[:500]})
            revoked = _principal(connection, name)
            assert revoked is not None
            return revoked

        return await self._write(work)

    async def all(self) -> list[Principal]:
        """Return all principals, by name."""

        def work(connection: sa.Connection) -> list[Principal]:
            # A later row of the same name has the same time of issue, and replaces the earlier one.
            return list({row.name: _read(row) for row in connection.execute(_query())}.values())

        return await self._database.read(work)

    async def holder(self, serial: str, name: str, key: bytes = b"") -> Principal | None:
        """Return the holder of a valid certificate; None if it is invalid.

        key: SHA-256 of its public key. A thief of the authority's key can copy a serial number and
        a name, but not the key that they were issued for.
        """
        # Read before the database, see `AdmissionCache.keep`.
        now, at = self._clock(), self._known.changes
        remembered = self._known.get((serial, name, key), now)
        if remembered is not None:
            return remembered

        def work(connection: sa.Connection) -> tuple[Principal, float] | None:
            row = connection.execute(
                sa.select(CERTIFICATES).where(CERTIFICATES.c.serial == serial)
            ).first()
            if row is None or row.revoked or row.name != name or row.expires_s < now:
                return None
            issued_for = connection.scalar(sa.select(KEYS.c.sha256).where(KEYS.c.serial == serial))
            # Rows of older releases have no digest of the key.
            if key and issued_for is not None and bytes(issued_for) != key:
                return None
            known = _principal(connection, name)
            return None if known is None or known.revoked else (known, row.expires_s)

        answer = await self._database.read(work)
        if answer is None:
            return None
        who, expires_s = answer
        self._known.keep((serial, name, key), who, expires_s=expires_s, now_s=now, at=at)
        return who

    async def _write(self, work: Callable[[sa.Connection], T]) -> T:
        """Write, and drop the cached answers after the commit, even if the caller is gone."""
        writing = asyncio.create_task(self._database.write(work))
        # Also after an error: a commit whose answer was lost may have taken effect.
        writing.add_done_callback(lambda _: self._known.forget())
        return await asyncio.shield(writing)


def serial_of(certificate: x509.Certificate) -> str:
    """Return the serial number in hexadecimal, as in the tables and the log."""
    return f"{certificate.serial_number:x}"


KINDS: Final = {
    "node": ((PrincipalRole.NODE,), "triplane edge enrol"),
    "device": ((PrincipalRole.DEVICE,), "triplane device enrol"),
    "person": (
        (PrincipalRole.VIEWER, PrincipalRole.OPERATOR, PrincipalRole.SIGNER),
        "triplane cloud enrol",
    ),
}
"""For each kind of caller the roles of its tokens, and the command that enrols it."""


def _check_kind(kind: str, role: PrincipalRole) -> None:
    if kind and role not in KINDS.get(kind, ((), ""))[0]:
        command = next(command for roles, command in KINDS.values() if role in roles)
        raise InvalidInput(
            f"this token is for a {role}, not for a {kind[:20]}, and is still unused; use it with "
            f"`{command}`, or request another with `triplane cloud token --role ROLE`"
        )


def _check_renewals(connection: sa.Connection, name: str, now: float) -> None:
    count = connection.scalar(
        sa.select(sa.func.count())
        .select_from(CERTIFICATES)
        .where(CERTIFICATES.c.name == name, CERTIFICATES.c.issued_s > now - OLD_CERTIFICATE_S)
    )
    if (count or 0) > MAX_RENEWALS:
        raise Unavailable(
            f"{name!r} got {count} certificates within {OLD_CERTIFICATE_S:.0f} s, its first and "
            f"{MAX_RENEWALS} renewals; use the newest, which is valid for weeks"
        )


def _admit(
    connection: sa.Connection,
    certificate: x509.Certificate,
    name: str,
    role: PrincipalRole,
    now: float,
) -> None:
    values = {"role": role.value, "enrolled_s": now, "revoked": False}
    if _principal(connection, name):
        connection.execute(sa.update(PRINCIPALS).where(PRINCIPALS.c.name == name).values(values))
    else:
        connection.execute(PRINCIPALS.insert().values(name=name, **values))
    _store(connection, certificate, name, now)


def _store(connection: sa.Connection, certificate: x509.Certificate, name: str, now: float) -> None:
    connection.execute(
        CERTIFICATES.insert().values(
            serial=serial_of(certificate),
            name=name,
            issued_s=now,
            expires_s=certificate.not_valid_after_utc.timestamp(),
            revoked=False,
        )
    )
    connection.execute(
        KEYS.insert().values(serial=serial_of(certificate), sha256=key_digest(certificate))
    )


# The newest certificate of each name, as SQLite and PostgreSQL both express it.
_NEWEST: Final = (
    sa.select(CERTIFICATES.c.name, sa.func.max(CERTIFICATES.c.issued_s).label("issued_s"))
    .group_by(CERTIFICATES.c.name)
    .subquery()
)


def _query() -> sa.Select[tuple[str, str, float, bool, str, float, bytes | None]]:
    """Select principals with their newest certificate."""
    return (
        sa.select(PRINCIPALS, CERTIFICATES.c.serial, CERTIFICATES.c.expires_s, KEYS.c.sha256)
        .join(_NEWEST, _NEWEST.c.name == PRINCIPALS.c.name)
        .join(
            CERTIFICATES,
            (CERTIFICATES.c.name == PRINCIPALS.c.name)
            & (CERTIFICATES.c.issued_s == _NEWEST.c.issued_s),
        )
        .outerjoin(KEYS, KEYS.c.serial == CERTIFICATES.c.serial)
        .order_by(PRINCIPALS.c.name, CERTIFICATES.c.serial)
    )


def _principal(connection: sa.Connection, name: str) -> Principal | None:
    row = connection.execute(_query().where(PRINCIPALS.c.name == name)).first()
    return None if row is None else _read(row)


def _read(row: sa.Row[tuple[str, str, float, bool, str, float, bytes | None]]) -> Principal:
    key = bytes(row.sha256 or b"")
    return value_from(Principal, row, role=PrincipalRole(row.role), key_sha256=key)

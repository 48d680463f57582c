"""The services for identities: enrolment (without TLS), renewal, tokens and the audit log."""

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

from triplane.cloud.identity import audit
from triplane.cloud.identity.auth_interceptor import AuthInterceptor, caller
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Labels, Principal, Principals
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.store import Database
from triplane.proto import enrolment_pb2 as enrolment
from triplane.proto import enrolment_pb2_grpc as enrolment_grpc
from triplane.proto import identity_pb2 as pb
from triplane.proto import identity_pb2_grpc as identity_grpc
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.proto.identity import MAX_REQUEST_BYTES
from triplane.proto.messages import message_from
from triplane.proto.status import status_of_aio

ENROLMENTS_PER_S: Final = 20
"""Attempts that the open port accepts from all callers: guessing a secret takes 2^255."""

Joined = Callable[[str, PrincipalRole, Labels], Awaitable[None]]


class EnrolmentServicer(enrolment_grpc.EnrolmentServicer):
    """The service on the enrolment port. joined: called with each new name and its labels."""

    def __init__(
        self, principals: Principals, authority: Authority, address: str, joined: Joined
    ) -> None:
        self._principals, self._authority = principals, authority
        self._address, self._joined = address, joined
        self._attempts: deque[float] = deque(maxlen=ENROLMENTS_PER_S)

    async def GetAuthority(
        self, request: enrolment.GetAuthorityRequest, context: Any
    ) -> enrolment.GetAuthorityResponse:
        """See enrolment.proto."""
        return enrolment.GetAuthorityResponse(authority=self._authority.der)

    async def Enrol(self, request: enrolment.EnrolRequest, context: Any) -> enrolment.Certificate:
        """See enrolment.proto."""
        async with status_of_aio(context):
            # Counted before any work: the port has no TLS and anyone may call it.
            self._count_attempt()
            if len(request.request) > MAX_REQUEST_BYTES:
                raise InvalidInput(f"a certificate request has at most {MAX_REQUEST_BYTES} bytes")
            enrolled = await self._principals.enrol(
                request.token_id, request.request, request.mac, request.kind
            )
            # Not in the transaction of the enrolment; a repeated request calls it again after a
            # crash.
            await self._joined(enrolled.name, enrolled.role, enrolled.labels)
            return enrolment.Certificate(certificate=enrolled.certificate, address=self._address)

    def _count_attempt(self) -> None:
        now = time.monotonic()
        if len(self._attempts) == ENROLMENTS_PER_S and now - self._attempts[0] < 1.0:
            raise Unavailable(f"more than {ENROLMENTS_PER_S} enrolments within a second; try again")
        self._attempts.append(now)


class RenewalServicer(enrolment_grpc.RenewalServicer):
    """Renewal of certificates, on the main port."""

    def __init__(self, principals: Principals) -> None:
        self._principals = principals

    async def Renew(self, request: enrolment.RenewRequest, context: Any) -> enrolment.Certificate:
        """See enrolment.proto."""
        async with status_of_aio(context):
            der = await self._principals.renew(caller().name, request.request)
            return enrolment.Certificate(certificate=der)


class IdentityServicer(identity_grpc.IdentityServicer):
    """Tokens, principals and the audit log, on the main port."""

    def __init__(
        self,
        principals: Principals,
        database: Database,
        interceptor: AuthInterceptor,
        enrol_address: Callable[[], str] = str,
    ) -> None:
        self._principals, self._database, self._interceptor = principals, database, interceptor
        self._enrol_address = enrol_address

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Any) -> pb.Principal:
        """See identity.proto."""
        return encode(caller())

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: Any
    ) -> pb.CreateTokenResponse:
        """See identity.proto."""
        async with status_of_aio(context):
            invitation = await self._principals.invite(
                caller().name,
                role_of(request.role),
                name=request.name,
                valid_s=request.valid_s,
                labels=dict(request.labels),
            )
            address = self._enrol_address()
            return message_from(pb.CreateTokenResponse, invitation, enrol_address=address)

    async def ListPrincipals(
        self, request: pb.ListPrincipalsRequest, context: Any
    ) -> pb.ListPrincipalsResponse:
        """See identity.proto."""
        async with status_of_aio(context):
            principals = await self._principals.all()
            return pb.ListPrincipalsResponse(principals=map(encode, principals))

    async def Revoke(self, request: pb.RevokeRequest, context: Any) -> pb.Principal:
        """See identity.proto."""
        async with status_of_aio(context):
            revoked = await self._principals.revoke(caller().name, request.name, request.reason)
            # After the commit: a stream that is opened from now on is refused by the database.
            self._interceptor.revoked(revoked.name)
            return encode(revoked)

    async def ReadAudit(
        self, request: pb.ReadAuditRequest, context: Any
    ) -> AsyncIterator[pb.AuditEntry]:
        """See identity.proto."""
        async with status_of_aio(context):
            following = max(1, request.from_number)
            # Page by page, so that a long log neither fills memory nor holds a transaction open.
            while page := await self._database.read(partial(audit.page, from_number=following)):
                for entry in page:
                    yield message_from(pb.AuditEntry, entry)
                following = page[-1].number + 1


def role_of(number: "pb.Role.ValueType") -> PrincipalRole:
    """Return the role of an enum value. InvalidInput."""
    try:
        return PrincipalRole(pb.Role.Name(number).lower())
    except ValueError as error:
        raise InvalidInput(f"no role {number}; there are {', '.join(PrincipalRole)}") from error


def encode(principal: Principal) -> pb.Principal:
    """Return a principal as a message."""
    return message_from(pb.Principal, principal, role=pb.Role.Value(principal.role.name))

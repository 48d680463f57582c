"""The services around identity: enrolment (no TLS), renewal, and the people's own."""

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
from triplane.proto.status import status_of_aio

ENROLMENTS_PER_S: Final = 20
"""Tries that the open port takes, all callers together: guessing a secret needs 2^255."""

Joined = Callable[[str, PrincipalRole, Labels], Awaitable[None]]


class EnrolmentServicer(enrolment_grpc.EnrolmentServicer):
    """On the enrolment port. joined: called with each enrolled name and the token's labels."""

    def __init__(
        self, principals: Principals, authority: Authority, address: str, joined: Joined
    ) -> None:
        self._principals, self._authority = principals, authority
        self._address, self._joined = address, joined
        self._tries: deque[float] = deque(maxlen=ENROLMENTS_PER_S)

    async def GetAuthority(
        self, request: enrolment.GetAuthorityRequest, context: Any
    ) -> enrolment.GetAuthorityResponse:
        """See enrolment.proto."""
        return enrolment.GetAuthorityResponse(authority=self._authority.der)

    async def Enrol(self, request: enrolment.EnrolRequest, context: Any) -> enrolment.Certificate:
        """See enrolment.proto."""
        async with status_of_aio(context):
            self._spend_a_try()
            if len(request.request) > MAX_REQUEST_BYTES:
                raise InvalidInput(f"a certificate request has at most {MAX_REQUEST_BYTES} bytes")
            enrolled = await self._principals.enrol(
                request.token_id, request.request, request.mac, request.kind
            )
            await self._joined(enrolled.name, enrolled.role, enrolled.labels)
            return enrolment.Certificate(certificate=enrolled.certificate, address=self._address)

    def _spend_a_try(self) -> None:
        now = time.monotonic()
        if len(self._tries) == ENROLMENTS_PER_S and now - self._tries[0] < 1.0:
            raise Unavailable(f"more than {ENROLMENTS_PER_S} enrolments in a second; try again")
        self._tries.append(now)


class RenewalServicer(enrolment_grpc.RenewalServicer):
    """On the main port."""

    def __init__(self, principals: Principals) -> None:
        self._principals = principals

    async def Renew(self, request: enrolment.RenewRequest, context: Any) -> enrolment.Certificate:
        """See enrolment.proto."""
        async with status_of_aio(context):
            der = await self._principals.renew(caller().name, request.request)
            return enrolment.Certificate(certificate=der)


class IdentityServicer(identity_grpc.IdentityServicer):
    """On the main port."""

    def __init__(
        self,
        principals: Principals,
        database: Database,
        gate: AuthInterceptor,
        enrol_address: Callable[[], str] = str,
    ) -> None:
        self._principals, self._database, self._gate = principals, database, gate
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
            return pb.CreateTokenResponse(
                token=invitation.token,
                name=invitation.name,
                expires_s=invitation.expires_s,
                enrol_address=self._enrol_address(),
            )

    async def ListPrincipals(
        self, request: pb.ListPrincipalsRequest, context: Any
    ) -> pb.ListPrincipalsResponse:
        """See identity.proto."""
        async with status_of_aio(context):
            principals = await self._principals.listed()
            return pb.ListPrincipalsResponse(principals=map(encode, principals))

    async def Revoke(self, request: pb.RevokeRequest, context: Any) -> pb.Principal:
        """See identity.proto."""
        async with status_of_aio(context):
            revoked = await self._principals.revoke(caller().name, request.name, request.reason)
            self._gate.revoked(revoked.name)
            return encode(revoked)

    async def ReadAudit(
        self, request: pb.ReadAuditRequest, context: Any
    ) -> AsyncIterator[pb.AuditEntry]:
        """See identity.proto."""
        async with status_of_aio(context):
            following = max(1, request.from_number)
            while page := await self._database.read(partial(audit.page, from_number=following)):
                for entry in page:
                    yield pb.AuditEntry(
                        number=entry.number,
                        time_s=entry.time_s,
                        actor=entry.actor,
                        action=entry.action,
                        subject=entry.subject,
                        details=entry.details,
                        previous=entry.previous,
                        digest=entry.digest,
                    )
                following = page[-1].number + 1


def role_of(number: "pb.Role.ValueType") -> PrincipalRole:
    """The role of a number on the wire. InvalidInput."""
    try:
        return PrincipalRole(pb.Role.Name(number).lower())
    except ValueError as error:
        raise InvalidInput(f"no role {number}; there are {', '.join(PrincipalRole)}") from error


def encode(principal: Principal) -> pb.Principal:
    """A principal as a message."""
    return pb.Principal(
        name=principal.name,
        role=pb.Role.Value(principal.role.name),
        serial=principal.serial,
        enrolled_s=principal.enrolled_s,
        expires_s=principal.expires_s,
        revoked=principal.revoked,
    )

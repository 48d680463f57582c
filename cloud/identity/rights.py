"""Which roles may call each method: one row per method; a method without a row is refused.

The role is the one that the database has for the caller's name; a certificate contains no role.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Final


class PrincipalRole(StrEnum):
    """The role of a principal, in the order of `identity.proto`."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    SIGNER = "signer"
    NODE = "node"
    DEVICE = "device"


PEOPLE: Final = frozenset({PrincipalRole.VIEWER, PrincipalRole.OPERATOR, PrincipalRole.SIGNER})
MACHINES: Final = frozenset({PrincipalRole.NODE, PrincipalRole.DEVICE})
OPERATORS: Final = frozenset({PrincipalRole.OPERATOR})
SIGNERS: Final = frozenset({PrincipalRole.SIGNER, PrincipalRole.OPERATOR})
NODES: Final = frozenset({PrincipalRole.NODE})
SENDERS: Final = OPERATORS | {PrincipalRole.DEVICE}
ALL: Final = PEOPLE | MACHINES

REFLECTION: Final = (
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)

# fmt: off
_ROWS: Final = (
    ("/triplane.enrolment.v1.Renewal/Renew",         ALL),
    ("/triplane.session.v1.Session/Open",            MACHINES),
    ("/triplane.metadata.v1.Metadata/Get",           ALL),
    ("/triplane.metadata.v1.Metadata/Submit",        SIGNERS),
    ("/triplane.metadata.v1.Metadata/GetPending",    PEOPLE),
    ("/triplane.transfer.v1.Transfer/Stat",          ALL),
    ("/triplane.transfer.v1.Transfer/Upload",        SENDERS),
    ("/triplane.transfer.v1.Transfer/Download",      ALL),
    ("/triplane.registry.v1.Registry/Push",          OPERATORS),
    ("/triplane.registry.v1.Registry/GetVersion",    PEOPLE),
    ("/triplane.registry.v1.Registry/ListModels",    PEOPLE),
    ("/triplane.registry.v1.Registry/ListVersions",  PEOPLE),
    ("/triplane.registry.v1.Registry/SetAlias",      OPERATORS),
    ("/triplane.registry.v1.Registry/GetBundle",     SIGNERS),
    ("/triplane.fleet.v1.Fleet/ListNodes",           PEOPLE),
    ("/triplane.fleet.v1.Fleet/GetNode",             PEOPLE),
    ("/triplane.fleet.v1.Fleet/SetLabels",           OPERATORS),
    ("/triplane.fleet.v1.Fleet/Cordon",              OPERATORS),
    ("/triplane.fleet.v1.Fleet/Deploy",              OPERATORS),
    ("/triplane.fleet.v1.Fleet/ListRollouts",        PEOPLE),
    ("/triplane.fleet.v1.Fleet/GetRollout",          PEOPLE),
    ("/triplane.fleet.v1.Fleet/WatchRollout",        PEOPLE),
    ("/triplane.fleet.v1.Fleet/Pause",               OPERATORS),
    ("/triplane.fleet.v1.Fleet/Resume",              OPERATORS),
    ("/triplane.fleet.v1.Fleet/Abort",               OPERATORS),
    ("/triplane.federation.v1.Federation/Start",     OPERATORS),
    ("/triplane.federation.v1.Federation/ListRuns",  PEOPLE),
    ("/triplane.federation.v1.Federation/GetRun",    PEOPLE),
    ("/triplane.federation.v1.Federation/WatchRun",  PEOPLE),
    ("/triplane.federation.v1.Federation/Stop",      OPERATORS),
    ("/triplane.federation.v1.Federation/Resume",    OPERATORS),
    ("/triplane.identity.v1.Identity/WhoAmI",        ALL),
    ("/triplane.identity.v1.Identity/CreateToken",   OPERATORS),
    ("/triplane.identity.v1.Identity/ListPrincipals", PEOPLE),
    ("/triplane.identity.v1.Identity/Revoke",        OPERATORS),
    ("/triplane.identity.v1.Identity/ReadAudit",     PEOPLE),
    ("/grpc.health.v1.Health/Check",                 ALL),
    ("/grpc.health.v1.Health/Watch",                 PEOPLE),
    *((method,                                       PEOPLE) for method in REFLECTION),
)
# fmt: on
RIGHTS: Final = MappingProxyType(dict(_ROWS))
assert len(RIGHTS) == len(_ROWS), "a method has two rows"

"""Rules for submitted metadata, checked before anything changes: one function per rule.

The repository calls `check` on parsed metadata; it raises InvalidInput with the rule and the value
that breaks it. Signatures are counted separately (`valid_signatures`), because too few of them are
not an error: the others may follow.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

from tuf.api._payload import Root, TargetFile, Targets
from tuf.api.exceptions import LengthOrHashMismatchError
from tuf.api.metadata import Metadata

from triplane.cloud.trust.chain import Chain, roster_in
from triplane.cloud.trust.roles import (
    CLOCK_SLACK_S,
    DELEGATED,
    LATER,
    ROLES,
    TOP,
    MetadataRole,
    moment,
)
from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.proto.plan_statement import NO_PLANS, PLAN_POLICY_PATH, PlanPolicy
from triplane.proto.signed_fields import PLANS
from triplane.proto.targets import POLICY_PATH, Policy, SignedTarget, read_target

MAX_TARGETS: Final = 20_000
MAX_KEYS: Final = 64

P = TypeVar("P")


def check(row: MetadataRole, metadata: Metadata[Any], chain: Chain, now_s: float) -> None:
    """Refuse metadata that must not be published as the next version of a role."""
    signed = metadata.signed
    if not chain.is_named(row.name):
        raise InvalidInput(unnamed(row.name))
    _check_version(row, signed.version, chain)
    _check_expiry(row, signed.expires, now_s)
    CONTENT[row.name](row, signed)
    if row.name == "targets":
        _check_kept(signed, chain)
    if row.name == PLANS:
        _check_roster(signed, chain)


def unnamed(role: str) -> str:
    """Return the message for a role that an older cloud's metadata does not name."""
    return (
        f"this cloud's metadata names no keys of the role {role}, because an earlier release made "
        f"it; add them with the key of targets: triplane cloud keys rotate {role} --keys DIR"
    )


def read_policy(top: Targets) -> Policy:
    """Return the policy that the offline targets role lists. Corrupt: there is no valid one.

    Its text is in the entry's custom field and must have the entry's length and digest.
    """
    if POLICY_PATH not in top.targets:
        raise Corrupt(f"targets {top.version} lists no {POLICY_PATH}")
    return _policy_at(top, POLICY_PATH, Policy.parse)


def read_plan_policy(top: Targets) -> PlanPolicy:
    """Return the policy for plans, which allows nothing where none is listed. Corrupt."""
    if PLAN_POLICY_PATH not in top.targets:
        return NO_PLANS
    return _policy_at(top, PLAN_POLICY_PATH, PlanPolicy.parse)


def _policy_at(top: Targets, path: str, parse: Callable[[str], P]) -> P:
    entry = top.targets[path]
    custom = entry.custom
    if not isinstance(custom, dict) or not isinstance(custom.get("text"), str):
        raise Corrupt(f"{path}: its entry must contain the policy as custom.text")
    try:
        entry.verify_length_and_hashes(custom["text"].encode())
        return parse(custom["text"])
    except (LengthOrHashMismatchError, InvalidInput, UnicodeEncodeError) as error:
        raise Corrupt(f"{path}: {error}") from error


def valid_signatures(
    row: MetadataRole, metadata: Metadata[Any], chain: Chain
) -> tuple[set[str], int, int]:
    """Return key ids that signed, the number of valid signatures, and the threshold.

    They are counted under the published delegator. A new root needs the signatures of both the
    published root and itself; the numbers are those of the one that lacks more.
    """
    if row.name != "root":
        verification = chain.verification(row.name, metadata)
        return set(verification.signed), len(verification.signed), verification.threshold
    both = metadata.signed.get_root_verification_result(
        chain.root.signed, metadata.signed_bytes, metadata.signatures
    )
    short = both.first if both.first.missing >= both.second.missing else both.second
    return set(both.signed), len(short.signed), short.threshold


def _check_version(row: MetadataRole, version: int, chain: Chain) -> None:
    published = chain.version(row.name)
    if version != published + 1:
        # A number up to the published one means that somebody else published meanwhile (Conflict);
        # any other number is wrong by itself.
        family = Conflict if 0 < version <= published else InvalidInput
        raise family(
            f"{row.name} {published} is published, so the next is {published + 1}, got {version}; "
            "fetch the newest and sign again"
        )


def _check_expiry(row: MetadataRole, expires: Any, now_s: float) -> None:
    now, latest = moment(now_s), moment(now_s + row.lifetime_s + CLOCK_SLACK_S)
    if not now < expires <= latest:
        raise InvalidInput(
            f"{row.name} expires after now ({now:%Y-%m-%d %H:%M} UTC) and within "
            f"{timedelta(seconds=row.lifetime_s).days} days, got {expires:%Y-%m-%d %H:%M}; "
            "are the clocks right?"
        )


def _check_root(row: MetadataRole, root: Root) -> None:
    if root.consistent_snapshot is not True:
        raise InvalidInput(
            f"{row.name}: consistent_snapshot must be true, or nodes could mix versions"
        )
    for role in TOP:
        described = root.roles[role]
        _check_keys(role, root.keys, described.keyids, described.threshold)


def _check_top(row: MetadataRole, targets: Targets) -> None:
    roles = (targets.delegations.roles if targets.delegations else None) or {}
    wanted = {delegated.name: [delegated.paths] for delegated in DELEGATED}
    named = {name: role.paths for name, role in roles.items()}
    # An older cloud has no delegation to the later roles.
    older = {name: paths for name, paths in wanted.items() if name not in LATER}
    if named not in (wanted, older):
        raise InvalidInput(f"targets delegates exactly {wanted}, got {named}")
    assert targets.delegations is not None
    for name, role in roles.items():
        # A terminating delegation ends the search, so no later role can supply the same path.
        if not role.terminating:
            raise InvalidInput(f"targets: the delegation of {name} must be terminating")
        _check_keys(name, targets.delegations.keys, role.keyids, role.threshold)
    try:
        policy = read_policy(targets)
        read_plan_policy(targets)
    except Corrupt as error:
        raise InvalidInput(f"targets: {error}") from error
    others = targets.targets.keys() - {POLICY_PATH, PLAN_POLICY_PATH}
    for path in others:
        if not path.startswith("golden/"):
            raise InvalidInput(
                f"targets lists {POLICY_PATH}, {PLAN_POLICY_PATH} and golden/NAME, "
                f"got {path[:200]!r}"
            )
        _target(row, path, targets.targets[path])
    missing = sorted({rule.golden for rule in policy.models.values()} - others)
    if missing:
        raise InvalidInput(f"the policy names golden sets that targets does not list: {missing}")


def _check_kept(targets: Targets, chain: Chain) -> None:
    """Refuse to take a delegation away: what the role has signed would have no delegator."""
    assert targets.delegations is not None
    names = (targets.delegations.roles or {}).keys()
    gone = [name for name in LATER if chain.is_named(name) and name not in names]
    if gone:
        raise InvalidInput(f"targets must keep its delegation to {', '.join(gone)}")


def _check_roster(plans: Targets, chain: Chain) -> None:
    """Refuse a roster that devices would refuse, because it is older than the published one."""
    new, old = roster_in(plans.targets), chain.roster
    if new is None:
        return
    # A roster is named after the list that it was first signed in, so that its numbers rise even
    # if the list was dropped in between.
    if new.version > plans.version or (old and new != old and new.version <= old.version):
        least = old.version + 1 if old else 1
        raise InvalidInput(
            f"the roster in {PLANS} {plans.version} has a version of {least} to {plans.version}, "
            f"got {new.version}"
        )


def _check_delegated(row: MetadataRole, targets: Targets) -> None:
    if targets.delegations is not None:
        raise InvalidInput(f"{row.name} must not delegate")
    if len(targets.targets) > MAX_TARGETS:
        raise InvalidInput(f"{row.name} has at most {MAX_TARGETS} targets")
    prefix = row.paths.removesuffix("*")
    for path in targets.targets:
        if not path.startswith(prefix):
            raise InvalidInput(f"{row.name} may list {row.paths} only, got {path[:200]!r}")
    for path, entry in targets.targets.items():
        _target(row, path, entry)


CONTENT: Final[dict[str, Callable[[MetadataRole, Any], None]]] = {
    "root": _check_root,
    "targets": _check_top,
    "release": _check_delegated,
    "auto": _check_delegated,
    "plans": _check_delegated,
}
"""The rules of each role that is submitted."""


def _target(row: MetadataRole, path: str, entry: TargetFile) -> SignedTarget:
    try:
        return read_target(path, entry.length, entry.hashes, entry.custom)
    except Corrupt as error:
        raise InvalidInput(f"{row.name}: {error}") from error


def _check_keys(role: str, keys: Any, keyids: list[str], threshold: int) -> None:
    """Check that a role has enough different keys to meet its threshold."""
    # By value: one key under several key ids would count several times towards the threshold.
    values = {str(keys[keyid].keyval) for keyid in keyids if keyid in keys}
    if len(values) != len(keyids) or not 1 <= threshold <= len(values) <= MAX_KEYS:
        raise InvalidInput(
            f"{role} needs its threshold of {threshold} met by different keys, at most {MAX_KEYS}; "
            f"it names {len(keyids)} key ids for {len(values)} different keys"
        )


assert set(CONTENT) == {row.name for row in ROLES.values() if row.submitted}

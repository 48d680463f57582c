"""Replace the keys of a role: where they are named, and who signs the lists again.

The root names the keys of root, targets, snapshot and timestamp; the targets role names those of
release, auto and plans. Metadata of an older cloud has no role plans: giving it keys creates it.
Signatures of the old keys are invalid as soon as the new keys are named, so the
lists of targets and release are signed again with the new keys at once; the cloud does the same for
its own roles. What is carried over was verified under the old keys before. After a theft nothing
may be carried over, because the thief may have signed it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from securesystemslib.signer._key import Key
from tuf.api._payload import DelegatedRole, Delegations, Root, TargetFile, Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust.chain import Chain, verify
from triplane.cloud.trust.repository import Submitted
from triplane.cloud.trust.roles import ROLES, TOP, Lists, parse
from triplane.cloud.trust.signing import (
    Metadatas,
    Signer,
    SigningResult,
    replace_keys,
    verified_chain,
)
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.signed_fields import AUTO, PLANS, RELEASE

TARGETS: Final = "targets"
LISTING: Final = (TARGETS, RELEASE, PLANS)
"""Roles of people that list targets."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """The outcome. named: submission that names the keys; again: submission of the role's list."""

    named: SigningResult
    again: SigningResult | None = None
    carried: tuple[str, ...] = ()


def rotate(
    cloud: Metadatas,
    role: str,
    keys: Sequence[Key],
    keys_folder: Path,
    *,
    threshold: int | None = None,
    lists: Lists = Lists.CARRIED,
    now_s: float | None = None,
) -> Rotated:
    """Give a role exactly these keys; `keys_folder` has the keys that decide about the role.

    threshold: by default unchanged, or the number of keys if that is less. InvalidInput: no such
    role, or the list of targets would be dropped. NotFound: a deciding key is missing, or the cloud
    has not the new key of auto, whose list it would have to drop. After an interruption, run it
    again with the same keys to complete it.
    """
    if role not in ROLES:
        raise InvalidInput(f"roles are {', '.join(ROLES)}, got {role[:100]!r}")
    if role == TARGETS and lists is Lists.DROPPED:
        raise InvalidInput(
            "the list of the role targets names the keys of release, auto and plans, so it cannot "
            "be dropped: rotate targets without --stolen, check what was carried over, then rotate "
            "the others too if the thief may have named keys for them"
        )
    chain = verified_chain(cloud, role, keys_folder)
    before = chain.delegator(role).get_delegated_role(role) if chain.is_named(role) else None
    usual = 1 if before is None else min(before.threshold, len(keys))
    need = usual if threshold is None else threshold
    if not 1 <= need <= len(keys):
        raise InvalidInput(f"a threshold is 1 to the number of keys, {len(keys)}, got {need}")
    # Before the keys change: afterwards the old signatures no longer verify.
    carried = _listed(cloud, chain, role) if lists is Lists.CARRIED else {}
    # An interrupted call has named these keys already; only the list is left to sign.
    if before and (before.threshold, {*before.keyids}) == (need, {key.keyid for key in keys}):
        named = SigningResult(Submitted(True, need, need, chain.root.signed.version))
    elif role in TOP:
        new = {role: keys}
        named = replace_keys(cloud, new, keys_folder, thresholds={role: need}, now_s=now_s)
    else:
        signer = Signer(cloud, keys_folder, TARGETS)
        delegations, base = _with_keys(signer.chain.top, role, keys, need), signer.published()
        waiting = signer.waiting(base)
        auto = lists if role == AUTO else Lists.CARRIED
        done = signer.sign(waiting, base, now_s, delegations=delegations, auto=auto)
        named = SigningResult(done)
    if not named.submitted.published or role not in LISTING:
        return Rotated(named)
    try:
        again = _sign_again(cloud, role, chain, carried, keys_folder, now_s)
    except NotFound:  # the new keys are with other people
        return Rotated(named)
    return Rotated(named, again, tuple(sorted(carried)))


def _with_keys(top: Targets, role: str, keys: Sequence[Key], need: int) -> Delegations:
    """Return delegations in which the role has these keys."""
    again = Metadata[Targets].from_bytes(Metadata(top).to_bytes()).signed
    assert again.delegations is not None
    assert again.delegations.roles is not None
    if role not in again.delegations.roles:
        paths = [ROLES[role].paths]
        again.delegations.roles[role] = DelegatedRole(role, [], 1, terminating=True, paths=paths)
    for keyid in list(again.get_delegated_role(role).keyids):
        again.revoke_key(keyid, role)
    for key in keys:
        again.add_key(key, role)
    again.get_delegated_role(role).threshold = need
    return again.delegations


def _listed(cloud: Metadatas, chain: Chain, role: str) -> dict[str, TargetFile]:
    """Return the targets that a role's keys have signed, the present ones or those just before."""
    if role not in LISTING or not chain.version(role):
        return {}
    listing = chain.targets[role]
    if not chain.is_signed(role):
        try:
            verify(_delegator_before(cloud, chain, role), role, listing, f"the published {role}")
        except (Corrupt, NotFound) as error:
            raise Conflict(
                f"neither the present keys of {role} nor those just before signed what it lists, "
                f"so none of it is carried over ({error}); drop it, then sign what you know again"
            ) from error
    return dict(listing.signed.targets)


def _delegator_before(cloud: Metadatas, chain: Chain, role: str) -> Root | Targets:
    """Return the metadata that named the keys of a role before the published one did."""
    if role == TARGETS:
        name = f"{chain.root.signed.version - 1}.root.json"
        return parse(Root, cloud.get(name), name).signed
    name = f"{chain.top.version - 1}.targets.json"
    older = parse(Targets, cloud.get(name), name)
    verify(chain.root.signed, TARGETS, older, name)
    return older.signed


def _sign_again(
    cloud: Metadatas,
    role: str,
    before: Chain,
    targets: dict[str, TargetFile],
    keys_folder: Path,
    now_s: float | None,
) -> SigningResult:
    """Sign the role's next version with those of its new keys that are here."""
    signer = Signer(cloud, keys_folder, role)
    delegations = before.top.delegations if role == TARGETS else None
    waiting = signer.waiting(targets)
    return SigningResult(signer.sign(waiting, targets, now_s, delegations=delegations))

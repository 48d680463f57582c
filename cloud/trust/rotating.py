"""Giving a role other keys: where they are named, and who signs again what the old ones signed.

Keys of root, targets, snapshot and timestamp are named by the root, keys of release and auto by the
targets role. What the old keys signed counts no more from the moment their names are gone, so the
lists of targets and release are signed again with the new keys in the same breath; the cloud does
so for its own roles. What is carried on was verified under the old keys before. After a theft
nothing may be carried on: the thief may have signed it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from securesystemslib.signer._key import Key
from tuf.api._payload import Delegations, Root, TargetFile, Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust.chain import Chain, newest_root, read, verify
from triplane.cloud.trust.repository import Submitted
from triplane.cloud.trust.roles import ROLES, TOP, parse
from triplane.cloud.trust.signing import (
    Metadatas,
    Signer,
    SigningResult,
    replace_keys,
    trusted_root,
)
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.targets import RELEASE

TARGETS: Final = "targets"


class Lists(Enum):
    """What to do with the targets that the old keys had signed."""

    CARRIED = "carried on"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Rotated:
    """How far it got. named: the submission that names the new keys; again: of the role's list."""

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
    """Let a role have these keys and no others; `keys_folder` has those that decide about it.

    threshold: as before where unstated, or the number of keys if that is less. InvalidInput: no
    such role, or a list of targets that would be dropped. NotFound: a deciding key is missing. Run
    again after an interruption, with the same keys, it does what is left.
    """
    if role not in ROLES:
        raise InvalidInput(f"roles are {', '.join(ROLES)}, got {role[:100]!r}")
    if role == TARGETS and lists is Lists.DROPPED:
        raise InvalidInput(
            "the list of the role targets names the keys of release and auto, so it is carried on, "
            "not dropped: rotate targets without --stolen, read what was carried, then rotate "
            "release and auto too if the thief may have named keys for them"
        )
    now = time.time() if now_s is None else now_s
    chain = read(cloud.get, newest_root(cloud.get, trusted_root(keys_folder)))
    before = chain.delegator(role).get_delegated_role(role)
    need = min(before.threshold, len(keys)) if threshold is None else threshold
    if not 1 <= need <= len(keys):
        raise InvalidInput(f"a threshold is 1 to the number of keys, {len(keys)}, got {need}")
    carried = _listed(cloud, chain, role) if lists is Lists.CARRIED else {}
    if (before.threshold, {*before.keyids}) == (need, {key.keyid for key in keys}):
        named = SigningResult(Submitted(True, need, need, chain.root.signed.version))
    else:
        name = _name_in_root if role in TOP else _name_in_targets
        named = name(cloud, role, keys, need, keys_folder, now)
    if not named.submitted.published or role not in {TARGETS, RELEASE}:
        return Rotated(named)
    try:
        again = _sign_again(cloud, role, chain, carried, keys_folder, now)
    except NotFound:  # the new keys are with other people
        return Rotated(named)
    return Rotated(named, again, tuple(sorted(carried)))


def _name_in_root(
    cloud: Metadatas, role: str, keys: Sequence[Key], need: int, keys_folder: Path, now_s: float
) -> SigningResult:
    return replace_keys(cloud, {role: keys}, keys_folder, thresholds={role: need}, now_s=now_s)


def _name_in_targets(
    cloud: Metadatas, role: str, keys: Sequence[Key], need: int, keys_folder: Path, now_s: float
) -> SigningResult:
    signer = Signer(cloud, keys_folder, TARGETS)
    delegations = _with_keys(signer.chain.top, role, keys, need)
    base = signer.published()
    submitted = signer.sign(signer.waiting(base), base, now_s, delegations=delegations)
    return SigningResult(submitted)


def _with_keys(top: Targets, role: str, keys: Sequence[Key], need: int) -> Delegations:
    """The delegations of a copy in which the role has these keys."""
    again = Metadata[Targets].from_bytes(Metadata(top).to_bytes()).signed
    assert again.delegations is not None
    for keyid in list(again.get_delegated_role(role).keyids):
        again.revoke_key(keyid, role)
    for key in keys:
        again.add_key(key, role)
    again.get_delegated_role(role).threshold = need
    return again.delegations


def _listed(cloud: Metadatas, chain: Chain, role: str) -> dict[str, TargetFile]:
    """Return the targets that a role's keys of now, or before an interruption, have signed."""
    if role not in {TARGETS, RELEASE}:
        return {}
    listing = chain.targets[role]
    if not chain.is_signed(role):
        try:
            verify(_delegator_before(cloud, chain, role), role, listing, f"the published {role}")
        except (Corrupt, NotFound) as error:
            raise Conflict(
                f"neither the keys of {role} nor those just before signed what it lists, so none "
                f"of it is carried on ({error}); drop it, then sign again what you know"
            ) from error
    return dict(listing.signed.targets)


def _delegator_before(cloud: Metadatas, chain: Chain, role: str) -> Root | Targets:
    """Who named the keys of a role before the published root, or targets, did."""
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
    now_s: float,
) -> SigningResult:
    """The role's next version, signed by those of its new keys that are here."""
    signer = Signer(cloud, keys_folder, role)
    delegations = before.top.delegations if role == TARGETS else None
    waiting = signer.waiting(targets)
    return SigningResult(signer.sign(waiting, targets, now_s, delegations=delegations))

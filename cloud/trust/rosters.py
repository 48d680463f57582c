"""Signing the roster of devices, in the list of the role `plans`.

The cloud knows which keys it has given certificates for, and nothing proves that they belong to
devices: that is what a signature of the roster says. So a signer gets to see every change, and no
digest enters the roster that the signer did not name or take from the cloud by decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triplane.cloud.trust.chain import newest_root, read, roster_in
from triplane.cloud.trust.repository import target_file
from triplane.cloud.trust.roles import DAY_S
from triplane.cloud.trust.signing import (
    Metadatas,
    Progress,
    Signer,
    SigningResult,
    until_signed,
)
from triplane.proto.errors import Conflict
from triplane.proto.roster import ROSTER_PATH, Roster
from triplane.proto.signed_fields import PLANS
from triplane.proto.targets import roster_target

ROSTER_S: Final = 365 * DAY_S
"""Time for which a roster is valid by default."""

Digests = frozenset[bytes]


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """The outcome of signing. before: the roster that was published, if any."""

    before: Roster | None
    roster: Roster
    signing: SigningResult


def published_roster(cloud: Metadatas, root: bytes) -> Roster | None:
    """Return the published roster, verified from a trusted root; None if there is none. Corrupt."""
    return read(cloud.get, newest_root(cloud.get, root)).roster


def change_roster(
    cloud: Metadatas,
    change: Callable[[Digests], Digests],
    keys_folder: Path,
    *,
    valid_s: float = ROSTER_S,
    progress: Progress = lambda _: None,
    now_s: float | None = None,
) -> SignedRoster:
    """Sign the roster that `change` makes of the published digests, with the keys of `plans`.

    Another signer who makes the same change signs the same roster. Conflict: plans wait for
    signatures that this key has not signed. NotFound, Corrupt: see `Signer`.
    """

    def attempt() -> SignedRoster:
        signer = Signer(cloud, keys_folder, PLANS)
        base = signer.published()
        before = roster_in(base)
        digests = change(before.digests if before else frozenset())
        plans = {path: entry for path, entry in base.items() if path != ROSTER_PATH}
        waiting = signer.waiting(plans)
        waits = {} if waiting is None else dict(waiting.signed.targets)
        theirs = roster_in(waits)
        waits.pop(ROSTER_PATH, None)
        if waiting is not None and waits != plans and not signer.has_signed(waiting):
            raise Conflict(
                f"{len(waits) - len(plans)} plans wait for signatures of the same role; sign them "
                "first: triplane federate sign RUN --keys DIR"
            )
        ends_s = int((time.time() if now_s is None else now_s) + valid_s)
        roster = Roster(signer.version + 1, ends_s, digests)
        if theirs and _is_signed_by_others(theirs, roster):
            roster = theirs
        entry = target_file(roster_target(roster))
        done = signer.sign(waiting, {**plans, **waits, ROSTER_PATH: entry}, now_s)
        return SignedRoster(before, roster, SigningResult(done))

    return until_signed(attempt, progress)


def _is_signed_by_others(theirs: Roster, ours: Roster) -> bool:
    """Return whether what waits is our roster; it may end sooner, as it was signed before."""
    same = (theirs.version, theirs.digests) == (ours.version, ours.digests)
    return same and theirs.expires_s <= ours.expires_s

"""The newest roster of devices that this device has verified.

Whoever verifies metadata (`signed_plans`) keeps it here, and what takes part in a masked round
reads it: the process that reads needs neither tuf nor cryptography. That there is no roster is a
fact of signed metadata too. A cloud that withholds or damages it does not get rid of the roster:
then there is a refusal, and no masked round.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from triplane.device.home import DeviceHome
from triplane.proto.disk import write_atomic
from triplane.proto.errors import Corrupt, InvalidInput, Unavailable
from triplane.proto.roster import MAX_ROSTER_BYTES, MAX_VERSION, Roster
from triplane.proto.signed_fields import PLANS, is_count

if TYPE_CHECKING:
    from triplane.proto.signed.trust import Trust

MAX_FILE_BYTES: Final = 2 * MAX_ROSTER_BYTES
MAX_REASON_CHARS: Final = 1000
_FIELDS: Final = {"version", "text", "refused"}


def current_roster(home: DeviceHome, now_s: float) -> Roster | None:
    """Return the verified roster; None if people have signed none.

    now_s: seconds since 1970. Corrupt: the device refused what it was shown, or the roster has
    expired; do not go on as without a roster. Unavailable: no metadata was verified yet.
    """
    known = _read(home)
    if known is None:
        raise Unavailable("this device has not verified yet whether there is a roster of devices")
    if known["refused"]:
        raise Corrupt(f"this device refuses the roster of devices: {known['refused']}")
    if known["text"] is None:
        return None
    roster = Roster.parse(known["text"])
    if roster.is_expired(now_s):
        raise Corrupt(f"the {roster.summary}, has expired; its signers renew it")
    return roster


def keep_roster(home: DeviceHome, trust: Trust) -> None:
    """Store what verified metadata says about the roster: it, that there is none, or a refusal.

    Its version is kept in any case, so that no older one ever counts again. Unavailable: the
    metadata cannot be fetched now; what was stored stays.
    """
    before = _read(home)
    least, known = (before["version"], before["text"]) if before else (0, None)
    try:
        roster = _newest(trust, least, known)
    except Corrupt as error:
        # With the roster: another one of its number does not count later either.
        after = _fields(least, known, str(error)[:MAX_REASON_CHARS])
    else:
        # The list that withdraws a roster has a higher number, below which no roster counts again.
        withdrawn = trust.versions().get(PLANS, 0) if known else 0
        after = _fields(roster.version, roster.text()) if roster else _fields(max(least, withdrawn))
    if after != before:
        write_atomic(home.roster_file, json.dumps(after).encode())


def _fields(version: int, text: str | None = None, refused: str = "") -> dict[str, Any]:
    return {"version": version, "text": text, "refused": refused}


def _newest(trust: Trust, least: int, known: str | None) -> Roster | None:
    roster = trust.roster()
    # A roster has the version of the list in which it was first signed, so a list that is older
    # than the roster cannot have withdrawn it.
    version = roster.version if roster else trust.versions().get(PLANS, 0)
    if version < least:
        shown, newest = (
            "roster" if is_roster else f"the list of {PLANS}" for is_roster in (roster, known)
        )
        raise Corrupt(
            f"{shown} {version} is older than {newest} {least}, which this device has verified "
            "before; somebody shows it an old list of devices"
        )
    if roster and known and roster.version == least and roster.text() != known:
        raise Corrupt(f"roster {least} lists other devices than when this device verified it")
    return roster


def _read(home: DeviceHome) -> dict[str, Any] | None:
    """Return what was stored; None before the first time. Corrupt."""
    try:
        with home.roster_file.open("rb") as file:
            known = json.loads(file.read(MAX_FILE_BYTES))
        has_fields = isinstance(known, dict) and set(known) == _FIELDS
        if has_fields and is_count(known["version"], 0, MAX_VERSION):
            if known["text"] is not None:
                Roster.parse(known["text"])
            return dict(known)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, InvalidInput) as error:
        reason = f": {error}"
    else:
        reason = ""
    # Not removed by itself: the file is what protects from older rosters.
    raise Corrupt(
        f"{home.roster_file} cannot be read{reason}; remove it if the disk was damaged, and the "
        "device takes the newest roster that its cloud has"
    )

"""The newest roster of devices that this device has verified.

Whoever verifies metadata (`signed_plans`) keeps it here, and what takes part in a masked round
reads it: the process that reads needs neither tuf nor cryptography. The version is kept even if
people withdraw the roster, so that no older one ever counts again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from triplane.device.home import DeviceHome
from triplane.proto.disk import write_atomic
from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.proto.roster import MAX_ROSTER_BYTES, Roster

if TYPE_CHECKING:
    from triplane.proto.signed.trust import Trust

MAX_FILE_BYTES: Final = 2 * MAX_ROSTER_BYTES
MAX_REASON_CHARS: Final = 1000


def current_roster(home: DeviceHome, now_s: float) -> Roster:
    """Return the verified roster. NotFound: there is none that counts now, with the reason.

    now_s: seconds since 1970.
    """
    known = _read(home)
    if not known.get("text"):
        reason = known.get("reason") or "no signed metadata has been verified yet"
        raise NotFound(f"this device has no roster of devices: {reason}")
    roster = Roster.parse(known["text"])
    if roster.is_expired(now_s):
        raise NotFound(f"the {roster.summary}, has expired; its signers renew it")
    return roster


def keep_roster(home: DeviceHome, trust: Trust) -> None:
    """Store what the verified metadata says about the roster: it, or why there is none.

    Unavailable: the metadata cannot be fetched now; what was stored stays.
    """
    before = _read(home)
    least = int(before.get("version") or 0)
    try:
        roster = _newest(trust, least, before.get("text"))
        after: dict[str, Any] = {"version": roster.version, "text": roster.text()}
    except Corrupt as error:
        after = {"version": least, "text": None, "reason": str(error)[:MAX_REASON_CHARS]}
    if after != before:
        write_atomic(home.roster_file, json.dumps(after).encode())


def _newest(trust: Trust, least: int, known: str | None) -> Roster:
    roster = trust.roster()
    if roster.version < least:
        raise Corrupt(
            f"roster {roster.version} is older than roster {least}, which this device has verified "
            "before; somebody shows it an old list of devices"
        )
    if roster.version == least and known and roster.text() != known:
        raise Corrupt(f"roster {least} lists other devices than when this device verified it")
    return roster


def _read(home: DeviceHome) -> dict[str, Any]:
    """Return what was stored; empty before the first time. Corrupt."""
    try:
        with home.roster_file.open("rb") as file:
            known = json.loads(file.read(MAX_FILE_BYTES))
        if isinstance(known, dict) and isinstance(known["version"], int):
            if known["text"] is not None:
                Roster.parse(known["text"])
            return known
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, InvalidInput) as error:
        reason = f": {error}"
    else:
        reason = ""
    # Not removed by itself: the file is what protects from older rosters.
    raise Corrupt(
        f"{home.roster_file} cannot be read{reason}; remove it if the disk was damaged, and the "
        "device takes the newest roster that its cloud has"
    )

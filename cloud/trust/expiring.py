"""Signatures that people must renew soon, for `cloud status`, the dashboard and the log."""

from collections.abc import Mapping
from typing import Final

from triplane.cloud.trust.chain import ROSTER
from triplane.cloud.trust.roles import DAY_S, ROLES, moment
from triplane.proto.signed_fields import PLANS

WARN_S: Final = 30 * DAY_S
"""Time before people's signatures expire at which warnings begin."""

STOPPED: Final = {PLANS: "devices run none of their plans"}
"""What an expired role stops, where that is not updates of nodes."""


def due(ends: Mapping[str, float], now_s: float) -> list[str]:
    """Return a sentence for each role, and the roster, to renew. ends: see `Chain.expiries`."""
    sentences = []
    for role, end_s in ends.items():
        if role == ROSTER:
            sentences += _of_roster(end_s, now_s)
        elif ROLES[role].keys == "offline" and end_s - now_s < WARN_S:
            date = f"{moment(end_s):%Y-%m-%d}"
            stopped = STOPPED.get(role, "nodes refuse updates")
            when = f"expire on {date}" if end_s > now_s else f"expired on {date}: {stopped}"
            sentences.append(
                f"the signatures of people for {role} {when}; with the offline folder: "
                f"triplane cloud keys renew --role {role} --keys DIR"
            )
        elif ROLES[role].keys == "online" and end_s < now_s:
            sentences.append(
                f"{role} has expired, and the cloud does not sign it again; see the cloud's log"
            )
    return sentences


def _of_roster(end_s: float, now_s: float) -> list[str]:
    if end_s - now_s >= WARN_S:
        return []
    when = "expires" if end_s > now_s else "expired"
    return [
        f"the roster of devices {when} on {moment(end_s):%Y-%m-%d}; with the offline folder: "
        "triplane cloud roster renew --keys DIR"
    ]

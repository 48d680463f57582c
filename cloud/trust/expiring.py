"""Signatures that people must renew soon, for `cloud status`, the dashboard and the log."""

from collections.abc import Mapping
from typing import Final

from triplane.cloud.trust.chain import ROSTER
from triplane.cloud.trust.roles import DAY_S, ROLES, moment
from triplane.proto.signed_fields import PLANS

WARN_S: Final = 30 * DAY_S
"""Time before people's signatures expire at which warnings begin."""

STOPPED: Final = {
    PLANS: "devices run none of their plans",
    ROSTER: "devices refuse masked rounds that need it",
}
"""What stops once something has expired, where that is not updates of nodes."""


def due(ends: Mapping[str, float], now_s: float) -> list[str]:
    """Return a sentence for each role, and the roster, to renew. ends: see `Chain.expiries`."""
    sentences = []
    for what, end_s in ends.items():
        if what == ROSTER or ROLES[what].keys == "offline":
            sentences += [_of_people(what, end_s, now_s)] if end_s - now_s < WARN_S else []
        elif end_s < now_s:
            sentences.append(
                f"{what} has expired, and the cloud does not sign it again; see the cloud's log"
            )
    return sentences


def _of_people(what: str, end_s: float, now_s: float) -> str:
    date = f"{moment(end_s):%Y-%m-%d}"
    if what == ROSTER:
        verb, subject, renew = "expires", "the roster of devices", "roster renew"
    else:
        verb, subject = "expire", f"the signatures of people for {what}"
        renew = f"keys renew --role {what}"
    stopped = STOPPED.get(what, "nodes refuse updates")
    when = f"{verb} on {date}" if end_s > now_s else f"expired on {date}: {stopped}"
    return f"{subject} {when}; with the offline folder: triplane cloud {renew} --keys DIR"

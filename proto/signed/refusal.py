"""Refusals: why a node does not accept an assignment or a file.

A refusal has a kind, one per attack or rule, and a text with the values. It is reported to the
cloud as an incident, for people to read. It is not retried automatically, because the same bytes
would be refused again.
"""

from typing import Final

from triplane.proto.documents import MAX_TEXT_CHARS
from triplane.proto.errors import Corrupt
from triplane.proto.fleet_pb2 import Incident

# fmt: off
KINDS: Final = {
    "signature":      "no valid signature of the role's keys: damaged, forged or an unknown key",
    "threshold":      "valid signatures, but fewer than the role's threshold",
    "rollback":       "an older version than one that was already verified",
    "fast-forward":   "a version number so far ahead that no honest repository reaches it",
    "freeze":         "expired metadata: the link hides newer metadata, or it was not signed again",
    "clock":          "the clock runs behind the latest time this node has seen",
    "mix-and-match":  "genuine metadata that does not belong to the same publication",
    "endless-data":   "more bytes than the limit of the file",
    "malformed":      "bytes that are no metadata of the role",
    "unknown-target": "a target that no role with the right to list it lists",
    "wrong-target":   "a target whose signed fields contradict its path or the assignment",
    "hardware":       "a bundle made for other hardware, or for another runtime, than this node's",
    "document":       "a document of the cloud with values out of their limits",
    "slow-retrieval": "a file that arrives so slowly that it would never be complete",
    "length":         "a file whose length is not the signed one",
    "digest":         "a file that does not have its signed SHA-256",
    "policy":         "an automatic release that the offline-signed policy does not allow",
    "share":          "an automatic release for a node outside the policy's share",
    "floor":          "an automatic release not above the committed version",
    "metric":         "a version below the metric floor of the policy",
    "golden":         "a bundle whose golden inputs do not give its golden outputs here",
    "load":           "a bundle that does not load here, or not within the limits of a trial",
    "latency":        "a bundle slower here than it allows itself",
    "memory":         "a bundle that takes more memory here than it allows itself",
    "probation":      "a version that failed or slowed down calls after the switch",
    "damaged":        "a file of this node that changed or vanished on its own disk",
    "adaptation":     "a start point that cannot be adapted to this node's own samples",
}
# fmt: on


class AttemptRefused(Corrupt):
    """A node refuses an assignment or a file. kind: a key of `KINDS`. text: cut for reports."""

    def __init__(self, kind: str, text: str) -> None:
        assert kind in KINDS
        text = clipped(text, MAX_TEXT_CHARS)
        super().__init__(text)
        self.kind, self.text = kind, text

    def incident(self, time_s: float) -> Incident:
        """Return the incident of a report."""
        return Incident(time_s=time_s, kind=self.kind, text=self.text)


def clipped(text: str, most: int) -> str:
    """Return `text`, which may quote anything from outside, as a report may contain it."""
    clean = text.replace("\0", "?")
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."

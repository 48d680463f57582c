"""Why a peer could not be reached, in plain words instead of gRPC's.

gRPC reports a failed connection only as text, so this module recognizes the texts. It does not
import grpc.
"""

import re
from typing import Final

LOST: Final = "the connection was lost"

# The first pattern that matches decides: the text of a failed handshake also says "failed to
# connect".
# fmt: off
_CAUSES: Final = tuple((re.compile(pattern, re.IGNORECASE), cause) for pattern, cause in (
    ("certificate_verify_failed",
     "its certificate is not one of this cloud for this address"),
    ("wrong_version_number",
     "it answers without TLS, as the cloud's enrolment and dashboard ports do"),
    (r"http1\.x server|parsing http/2|http2 header|method not found",
     "another server answers there, such as that of the dashboard"),
    ("errors resolving|dns resolution",
     "its host name cannot be resolved"),
    ("connection refused",
     "connection refused: nothing listens on this port"),
    ("no route to host|network is unreachable",
     "no network route leads there"),
    ("^deadline exceeded$|failed to connect.*tim(ed |e)out",
     "no answer in time"),
    ("socket closed|connection reset|broken pipe|recvmsg|goaway|endpoint closing|stream removed",
     "it closed the connection"),
    ("handshake",
     "the TLS handshake failed"),
    ("failed to connect|connection lost|keepalive",
     LOST),
))
# fmt: on


def unreachable_cause(details: str) -> str | None:
    """Return why no peer answered, or None if `details` is a text of the peer itself.

    details: the text of a gRPC error, UNAVAILABLE or of a deadline.
    """
    return next((cause for pattern, cause in _CAUSES if pattern.search(details)), None)

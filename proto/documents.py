"""Limits of the documents between cloud and node, labels included.

Both sides check what they receive, because either may be compromised: `cloud/fleet/reports.py`
checks a node's report, this module the cloud's document. The cloud ends the stream of a node that
exceeds a limit, so a node cuts its texts to the same limits.
"""

import math
import re
from collections.abc import Mapping
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.proto.fleet_pb2 import Assignment, Desired
from triplane.proto.signed_fields import NAME

MAX_MODELS: Final = 64
"""Models of one node: in a document's assignments and in a report."""
MAX_INCIDENTS: Final = 32
"""Incidents in one report; more wait for the next."""
MAX_REASON_CHARS: Final = 1000
"""Length of the reason of an attempt's phase."""
MAX_TEXT_CHARS: Final = 2000
"""Length of an incident's text."""
MAX_PATH_CHARS: Final = 256
MAX_ID_CHARS: Final = 64
MAX_LABELS: Final = 32
"""Labels of one node."""
MAX_VERSION: Final = 1_000_000_000
MAX_NUMBER: Final = 1 << 53
"""Largest number of a document, report or attempt: JSON and every database hold it exactly."""
MAX_SECONDS: Final = 30 * 86_400.0
MAX_TIME_S: Final = 253_402_300_799.0
"""Seconds since 1970: the last one of the year 9999."""

_NAME: Final = re.compile(NAME)
_LABEL_KEY: Final = re.compile(r"[a-z0-9][a-z0-9._/-]{0,62}")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_text(what: str, text: str, most: int) -> None:
    """Raise InvalidInput for more than `most` characters, or for some that cannot be stored.

    Python's strings may hold half a surrogate pair (from an escape in JSON, or from bytes of a
    command line that are not UTF-8), which cannot be encoded in a message or a page.
    """
    if len(text) > most:
        raise InvalidInput(f"{what} has at most {most} characters, got {len(text)}")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidInput(f"{what} is valid UTF-8 without NUL characters, got {text[:100]!a}")


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise InvalidInput for too many labels, or naming the first invalid one."""
    if len(labels) > MAX_LABELS:
        raise InvalidInput(f"a node has at most {MAX_LABELS} labels, got {len(labels)}")
    for key, value in labels.items():
        check_label(key, value)


def check_label(key: str, value: str) -> None:
    """Raise InvalidInput for a label that no selector can name."""
    if not _LABEL_KEY.fullmatch(key):
        raise InvalidInput(
            f"a label's key is 1 to 63 of a-z, 0-9, '.', '_', '-', '/', got {key[:100]!r}"
        )
    if not _LABEL_VALUE.fullmatch(value):
        raise InvalidInput(
            f"the value of label {key} is 1 to 63 letters, digits, '.', '_', '-', "
            f"got {value[:100]!r}"
        )


def check_desired(desired: Desired) -> None:
    """Raise InvalidInput naming the first field of the cloud's document that is out of range."""
    _bound("number", desired.number, MAX_NUMBER)
    _bound("number of assignments", len(desired.assignments), MAX_MODELS)
    for assignment in desired.assignments:
        _check_assignment(assignment)
    # A node makes one attempt per model at a time, so two assignments would undo each other.
    names = [assignment.model for assignment in desired.assignments]
    if len(set(names)) != len(names):
        raise InvalidInput("a document assigns each model once")


def _check_assignment(assignment: Assignment) -> None:
    if not _NAME.fullmatch(assignment.model):
        raise InvalidInput(f"a model's name matches {NAME}, got {assignment.model[:100]!r}")
    _bound("version", assignment.version, MAX_VERSION)
    _bound("attempt", assignment.attempt, MAX_NUMBER)
    _bound("length of target_path", len(assignment.target_path), MAX_PATH_CHARS)
    _bound("length of rollout", len(assignment.rollout), MAX_ID_CHARS)
    # An empty digest is valid: clouds of earlier releases do not send it.
    if len(assignment.sha256) not in {0, 32}:
        raise InvalidInput(f"sha256 has 32 bytes in an assignment, got {len(assignment.sha256)}")
    # NaN compares false with everything, so without isfinite it would pass a range check.
    if not (math.isfinite(assignment.probation_s) and 0 <= assignment.probation_s <= MAX_SECONDS):
        raise InvalidInput(
            f"probation_s is 0 to {MAX_SECONDS:.0f} in an assignment, got {assignment.probation_s}"
        )


def _bound(what: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidInput(f"{what} is at most {most} in the cloud's document, got {value}")

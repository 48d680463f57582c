"""Read the audit log, and recompute its chain on the caller's machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.text import record, table
from triplane.cloud.identity.audit import AuditRecord, verify
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.identity_pb2 import AuditEntry, ReadAuditRequest
from triplane.proto.messages import value_from

READ_S: Final = 600.0
_HEAD: Final = re.compile(r"([1-9][0-9]{0,18}):([0-9a-f]{64})")


def read(cloud: Calls, first: int = 1) -> Iterator[AuditEntry]:
    """Yield entries in order, from a number on."""
    yield from cloud.identity.ReadAudit(ReadAuditRequest(from_number=first), timeout=READ_S)


def entry_table(entries: Sequence[AuditEntry]) -> str:
    """Return a table with one line for each entry."""
    rows = [
        (str(e.number), _moment(e.time_s), e.actor, e.action, e.subject, _details_text(e))
        for e in entries
    ]
    return table(("NUMBER", "WHEN (UTC)", "WHO", "WHAT", "WHOM", "DETAILS"), rows)


def entry_record(entry: AuditEntry) -> dict[str, Any]:
    """Return an entry for `--json`, with its details as an object and its time as text too."""
    return record(entry) | {"time": _moment(entry.time_s), "details": _details(entry)}


def _moment(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S}"


def _details(entry: AuditEntry) -> Any:
    """Parse the details of an entry; a text that was cut off stays text."""
    try:
        return json.loads(entry.details)
    except ValueError:
        return entry.details


def _details_text(entry: AuditEntry) -> str:
    """Format details as "model=digits version=3"."""
    details = _details(entry)
    if not isinstance(details, dict):
        return str(details)
    return " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in details.items()
        if value not in ("", None, [], {})
    )


def parse_head(text: str) -> tuple[int, bytes]:
    """Parse "118:5f0c...e2"."""
    match = _HEAD.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(
            f"a head is NUMBER:DIGEST as `triplane audit verify` prints it, got {text!r}"
        )
    return int(match[1]), bytes.fromhex(match[2])


def verify_log(cloud: Calls, kept: tuple[int, bytes] | None) -> tuple[int, bytes]:
    """Return number and digest of the newest entry. Corrupt: the log was changed."""
    return verify(_checked(read(cloud), kept), head=kept[1] if kept else None)


def _checked(
    entries: Iterator[AuditEntry], kept: tuple[int, bytes] | None
) -> Iterator[AuditRecord]:
    for e in entries:
        # `verify` would only find that the digest is missing; here the message can name the entry.
        if kept and e.number == kept[0] and e.digest != kept[1]:
            raise Corrupt(
                f"audit entry {e.number} is not the one whose head you kept: the log was rewritten"
            )
        yield value_from(AuditRecord, e)

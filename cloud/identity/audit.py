"""The log of all changes and who made them, as a chain of digests.

The canonical text of an entry is the JSON array [number, time_s, actor, action, subject, details,
previous in hexadecimal], separators "," and ":", ASCII; its digest is the SHA-256 of that text, and
the next entry's `previous` is that digest. Entry 1 follows 32 zero bytes. With a copy of one digest
one can prove later that nothing up to it has changed.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Final

import sqlalchemy as sa

from triplane.cloud.identity.tables import AUDIT
from triplane.proto.errors import Corrupt
from triplane.proto.messages import value_from

START: Final = bytes(32)
MAX_DETAIL_CHARS: Final = 4000
PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One line of the log. details: a JSON object with sorted keys."""

    number: int
    time_s: float
    actor: str
    action: str
    subject: str
    details: str
    previous: bytes
    digest: bytes


def digest_of(entry: AuditRecord) -> bytes:
    """Return the SHA-256 of the canonical text, which leaves out the entry's own digest."""
    *fields, previous, _ = astuple(entry)
    fields.append(previous.hex())
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).digest()


def record(
    connection: sa.Connection,
    time_s: float,
    actor: str,
    action: str,
    subject: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Add an entry in the caller's transaction, so that both are committed or neither."""
    # The writer is single (see cloud/store), so no other transaction can add the same number.
    last = connection.execute(
        sa.select(AUDIT.c.number, AUDIT.c.digest).order_by(AUDIT.c.number.desc()).limit(1)
    ).first()
    number, previous = (last.number + 1, bytes(last.digest)) if last else (1, START)
    text = json.dumps(details or {}, sort_keys=True, separators=(",", ":"))[:MAX_DETAIL_CHARS]
    bare = AuditRecord(number, time_s, actor, action, subject[:256], text, previous, b"")
    entry = replace(bare, digest=digest_of(bare))
    connection.execute(AUDIT.insert().values(**asdict(entry)))


def page(connection: sa.Connection, from_number: int) -> list[AuditRecord]:
    """Return up to `PAGE` entries in order, from a number on."""
    rows = connection.execute(
        sa.select(AUDIT).where(AUDIT.c.number >= from_number).order_by(AUDIT.c.number).limit(PAGE)
    )
    return [value_from(AuditRecord, row) for row in rows]


def verify(entries: Iterable[AuditRecord], *, head: bytes | None = None) -> tuple[int, bytes]:
    """Recompute the chain from its start; return the number and digest of the last entry.

    Corrupt names the first entry that does not fit, or says that `head`, a digest noted earlier, is
    no longer in the chain.
    """
    number, digest, met = 0, START, head is None or head == START
    for entry in entries:
        expected = digest_of(replace(entry, number=number + 1, previous=digest))
        if (entry.number, entry.previous, entry.digest) != (number + 1, digest, expected):
            raise Corrupt(
                f"audit entry {entry.number} does not follow entry {number}: something at or "
                "before it was changed, removed or inserted"
            )
        number, digest = entry.number, entry.digest
        met = met or digest == head
    if not met:
        raise Corrupt(
            f"the kept head {(head or b'').hex()} is not among the {number} entries: the log was "
            "cut off or rewritten"
        )
    return number, digest

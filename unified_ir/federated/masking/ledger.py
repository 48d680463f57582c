"""What a device signed and revealed, kept across restarts.

A device contributes once for each (run, base state). Two masked vectors over the same state, or two
lists of survivors, would let a cloud subtract one sum from another. So the entry is on the disk
before the message leaves, and a device that finds an entry of an earlier process leaves the round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.masking.messages import MaskingTerms


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One contribution. session, survivors: digests in hexadecimal.

    survivors: the list that was signed, or "". It decides which share of each neighbour may be
    revealed.
    """

    round: int
    attempt: int
    session: str
    survivors: str = ""


@dataclass(frozen=True, slots=True)
class MaskingLedger:
    """Contributions of one device by (run, base state in hexadecimal)."""

    entries: Mapping[tuple[str, str], LedgerEntry] = field(default_factory=dict)

    def check_new(self, terms: MaskingTerms) -> None:
        """Raise Conflict if the device has contributed for this run and base state."""
        entry = self.entries.get(ledger_key(terms))
        if entry is not None:
            raise Conflict(
                f"a device contributes once for each run and base state; for run {terms.run!r} and "
                f"base {terms.base.hex()[:16]}... it did so in round {entry.round}, attempt "
                f"{entry.attempt}, and is asked again for round {terms.round}, attempt "
                f"{terms.attempt}; it leaves the round"
            )

    def with_(self, terms: MaskingTerms, entry: LedgerEntry) -> MaskingLedger:
        """Return the ledger with this entry for a run and base state."""
        return MaskingLedger({**self.entries, ledger_key(terms): entry})

    def encode(self) -> bytes:
        """Return the ledger as JSON, for a file of the device."""
        # `vars`, which needs an entry without slots: `asdict` took longer than the round's keys.
        rows = [[*key, vars(entry)] for key, entry in sorted(self.entries.items())]
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> MaskingLedger:
        """Return what `encode` wrote. Corrupt for anything else."""
        try:
            rows = json.loads(data)
            ledger = cls({(run, base): _entry(values) for run, base, values in rows})
            unchanged = ledger.encode() == data
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise Corrupt(
                f"the masking ledger cannot be read ({error}); this device must not contribute to "
                "masked runs that began before now"
            ) from error
        if not unchanged:
            raise Corrupt("the masking ledger was changed after it was written")
        return ledger


class LedgerStore(Protocol):
    """Where a device keeps its ledger."""

    def load(self) -> MaskingLedger:
        """Return the newest ledger, or an empty one."""

    def update(self, change: Callable[[MaskingLedger], MaskingLedger]) -> None:
        """Replace the ledger by `change` of the newest one; it is durable when this returns.

        No other update may come between, of this process or another one: `change` decides whether
        the device may contribute. If it raises, the ledger stays as it is.
        """


def _entry(values: Mapping[str, object]) -> LedgerEntry:
    return LedgerEntry(**values)  # type: ignore[arg-type]


def ledger_key(terms: MaskingTerms) -> tuple[str, str]:
    """Return (run, base state in hexadecimal)."""
    return terms.run, terms.base.hex()

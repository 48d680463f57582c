"""The shared state from which the device of a lease learns, or which it scores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBase:
    """A state of a run. version: number of states that the run had published, with this one last.

    state: its blob, SHA-256 in hexadecimal. A return publishes an earlier state again. Version 0 is
    the first state, before any was published.
    """

    version: int
    state: str

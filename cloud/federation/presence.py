"""Limits how often the presence of one device changes the journals of runs.

Each change of a device's offer or stream is an event in every run of its population, stored for
ever. A device has `BURST` changes at once and one more every `EVERY_S`. Faster changes are delayed,
and only the latest of them is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

BURST: Final = 64
"""Changes of one device that are written at once; a device that is killed makes two."""
EVERY_S: Final = 10.0
"""Time after which a device has one more change."""
MAX_KNOWN: Final = 4096
"""Devices whose pace is remembered; beyond that, those without recent changes are forgotten."""


@dataclass(slots=True)
class _Pace:
    """A device's pace. spent: recent changes, as of at_s. later: the timer of a delayed change."""

    spent: float = 0.0
    at_s: float = 0.0
    later: asyncio.TimerHandle | None = None

    def settle(self, now_s: float) -> None:
        self.spent = max(0.0, self.spent - (now_s - self.at_s) / EVERY_S)
        self.at_s = now_s


class Presence:
    """Calls `write` with a device's name, at once or as soon as its pace allows.

    write: lets each run check the device's presence. Its second argument is to be called for each
    event that follows. The first such call spends one change, however many runs write the change
    and however often they retry.
    """

    def __init__(self, write: Callable[[str, Callable[[], None]], None]) -> None:
        self._write = write
        self._paces: dict[str, _Pace] = {}

    def changed(self, name: str) -> None:
        """Handle a change of the device's offer or stream."""
        pace = self._pace(name)
        # A timer is set already; it will write whatever the presence is by then.
        if pace.later is None:
            self._try(name, pace)

    def stop(self) -> None:
        """Stop writing changes."""
        for pace in self._paces.values():
            if pace.later is not None:
                pace.later.cancel()

    def _pace(self, name: str) -> _Pace:
        now_s = asyncio.get_running_loop().time()
        if name not in self._paces:
            self._forget(now_s)
            self._paces[name] = _Pace(at_s=now_s)
        self._paces[name].settle(now_s)
        return self._paces[name]

    def _try(self, name: str, pace: _Pace) -> None:
        # A token bucket: `spent` drains by one every `EVERY_S`.
        if pace.spent > BURST - 1:
            wait_s = (pace.spent - (BURST - 1)) * EVERY_S
            pace.later = asyncio.get_running_loop().call_later(wait_s, self._again, name, pace)
        else:
            self._write(name, self._spending(name))

    def _spending(self, name: str) -> Callable[[], None]:
        is_spent = False

        def spend() -> None:
            nonlocal is_spent
            if not is_spent:
                is_spent = True
                self._pace(name).spent += 1

        return spend

    def _again(self, name: str, pace: _Pace) -> None:
        pace.later = None
        self._try(name, self._pace(name))

    def _forget(self, now_s: float) -> None:
        if len(self._paces) < MAX_KNOWN:
            return
        for pace in self._paces.values():
            pace.settle(now_s)
        self._paces = {n: p for n, p in self._paces.items() if p.spent or p.later is not None}

"""Sealed shares that their receivers say they could not open, and what follows from that.

Of a pair, nobody can tell whether the sender sealed garbage or the receiver lies: a proof would
need the receiver's key. So a report has no effect on the sum, and it is never a reason to reveal
anything. It does what the receiver can do anyway, which is to withhold the share. A device is taken
for a liar where more than half of its neighbours contradict it: only a majority can frame it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from triplane.unified_ir.federated.masking.session import MaskingSession

MAX_NAMED: Final = 5
"""Number of receivers that a reason names."""


class UnopenedShares:
    """The reports of one round. by_sender: positions of the receivers, by that of the sender."""

    def __init__(self) -> None:
        self.by_sender: dict[int, list[int]] = {}
        self._by_receiver: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.by_sender)

    def add(self, receiver: int, senders: Iterable[int]) -> None:
        """Take the report of a device that has made none before."""
        for sender in senders:
            self.by_sender.setdefault(sender, []).append(receiver)
            self._by_receiver[receiver] = self._by_receiver.get(receiver, 0) + 1

    def liars(self, session: MaskingSession) -> dict[int, str]:
        """Return the devices that most of their neighbours contradict, each with a reason."""
        most = session.parameters.neighbours // 2
        senders = {
            i: f"{len(receivers)} of its {session.parameters.neighbours} neighbours could not open "
            "the shares that it sealed for them"
            for i, receivers in self.by_sender.items()
            if len(receivers) > most
        }
        receivers = {
            i: f"it says that it could not open the shares of {count} of its "
            f"{session.parameters.neighbours} neighbours"
            for i, count in self._by_receiver.items()
            if count > most
        }
        return receivers | senders

    def text(self, session: MaskingSession, sender: int) -> str:
        """Return who could not open the shares of a device, for people; empty if all could."""
        receivers = sorted(self.by_sender.get(sender, ()))
        if not receivers:
            return ""
        more = ", ..." if len(receivers) > MAX_NAMED else ""
        names = ", ".join(map(session.name, receivers[:MAX_NAMED])) + more
        is_clear = 2 * len(receivers) > session.parameters.neighbours
        fault = (
            "it sealed garbage for most of its neighbours"
            if is_clear
            else ("either it or they are at fault")
        )
        return f"; its shares did not open at {names}: {fault}"

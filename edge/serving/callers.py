"""Callers, a queue that is fair between them, and the error for those that are refused.

A caller is an address, or the name in its certificate if the server requires one, and a connection.
Applications on one machine share an address, so addresses and their connections take turns.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from triplane.proto.errors import Unavailable
from triplane.proto.status import with_details

T = TypeVar("T")


def overloaded(text: str, retry_ms: int) -> Unavailable:
    """Return the error for a call that is refused now, with the time after which to retry."""
    return with_details(Unavailable(text), retry_after_ms=str(retry_ms))


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a call. All connections of a machine or certificate share the `address`."""

    address: str
    connection: str


def caller_of(context: grpc.ServicerContext, *, by_certificate: bool = False) -> Caller:
    """Return the caller of a call in progress."""
    connection = str(context.peer())  # such as ipv4:127.0.0.1:50000
    if by_certificate and (names := [*(context.peer_identities() or ())]):
        return Caller(str(names[0]), connection)
    return Caller(connection.rpartition(":")[0], connection)


class FairQueue(Generic[T]):
    """First in, first out per connection; addresses, and their connections, take turns."""

    def __init__(self) -> None:
        self._addresses: dict[str, dict[str, deque[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, caller: Caller, item: T) -> None:
        """Add `item` at the end of its connection's queue."""
        connections = self._addresses.setdefault(caller.address, {})
        connections.setdefault(caller.connection, deque()).append(item)
        self._count += 1

    def pop(self) -> T:
        """Remove and return the next item; its caller goes to the end of the round."""
        address, connections = next(iter(self._addresses.items()))
        connection, items = next(iter(connections.items()))
        item = items.popleft()
        self._count -= 1
        # A dict keeps insertion order, so an entry that is removed and added again is the last.
        del connections[connection], self._addresses[address]
        if items:
            connections[connection] = items
        if connections:
            self._addresses[address] = connections
        return item

    def remove(self, caller: Caller, item: T) -> bool:
        """Remove `item`; False when it is no longer in the queue."""
        items = self._addresses.get(caller.address, {}).get(caller.connection, deque())
        if item not in items:
            return False
        items.remove(item)
        self._removed(caller)
        return True

    def displace(self, newcomer: Caller) -> T | None:
        """Remove and return the newest item of the caller that has most.

        None if `newcomer` would then have as many: it must be refused itself.
        """
        held = {a: sum(map(len, c.values())) for a, c in self._addresses.items()}
        address = max(held, key=held.__getitem__)
        own = address == newcomer.address
        connections = self._addresses[address]
        connection = max(connections, key=lambda c: len(connections[c]))
        most = len(connections[connection]) if own else held[address]
        mine = (
            len(connections.get(newcomer.connection, ())) if own else held.get(newcomer.address, 0)
        )
        if most <= mine + 1:
            return None
        item = connections[connection].pop()
        self._removed(Caller(address, connection))
        return item

    def _removed(self, caller: Caller) -> None:
        self._count -= 1
        connections = self._addresses[caller.address]
        if not connections[caller.connection]:
            del connections[caller.connection]
        if not connections:
            del self._addresses[caller.address]

"""Who calls, and a queue that is fair between callers.

A caller is an address, or the name in its certificate where the server asks for one, and below it a
connection. Applications on one machine share an address, so turns go round at both levels.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """`address` is shared by all connections of a machine or certificate; `connection` is not."""

    address: str
    connection: str


def caller_of(context: grpc.ServicerContext, *, by_certificate: bool = False) -> Caller:
    """The caller of a call that is in progress."""
    connection = str(context.peer())  # such as ipv4:127.0.0.1:50000
    if by_certificate and (names := [*(context.peer_identities() or ())]):
        return Caller(str(names[0]), connection)
    return Caller(connection.rpartition(":")[0], connection)


class FairQueue(Generic[T]):
    """First in, first out per connection; connections of an address, and addresses, take turns."""

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
        # A dict keeps insertion order: what is taken out and put back stands last.
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
        """Remove and return the newest item of the caller that holds most.

        None when `newcomer` would then hold as much: it has to be refused itself.
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

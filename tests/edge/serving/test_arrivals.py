"""Against real sockets: the kernel's own count."""

import contextlib
import socket

import pytest

from triplane.edge.serving import arrivals
from triplane.edge.serving.arrivals import CALL_OVERHEAD_BYTES, Arrivals

MESSAGE_BYTES = 1 << 20


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request):
    """A connected pair, and gRPC's name of the peer that the accepting side sees."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((request.param, 0), family=family))
        caller = stack.enter_context(socket.create_connection(listening.getsockname()[:2]))
        accepted, (host, port, *_) = listening.accept()
        stack.enter_context(accepted)
        name = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        yield caller, accepted, name


def send(pair, n_bytes):
    """Returns when the kernel has all of it."""
    caller, accepted, _ = pair
    caller.sendall(bytes(n_bytes))
    left = n_bytes
    while left:
        left -= len(accepted.recv(left))


def test_a_new_connection_counts_from_its_first_byte(pair):
    looked = Arrivals(MESSAGE_BYTES)
    send(pair, 5000)
    looked.look({pair[2]: 1}, {})
    assert looked.tracks[pair[2]].arriving == 5000


def test_a_used_connection_counts_from_the_first_look(pair):
    looked = Arrivals(MESSAGE_BYTES)
    looked.finished_one(pair[2])
    for n_bytes, arriving in ((5000, 0), (300, 300), (40, 340)):
        send(pair, n_bytes)
        looked.look({pair[2]: 1}, {})
        assert looked.tracks[pair[2]].arriving == arriving


def test_finished_requests_are_taken_off(pair):
    looked = Arrivals(MESSAGE_BYTES)
    send(pair, 1000)
    looked.look({pair[2]: 2}, {})
    send(pair, 8000)
    looked.look({pair[2]: 1}, {pair[2]: 4000 + CALL_OVERHEAD_BYTES})
    assert looked.tracks[pair[2]].arriving == 5000 - CALL_OVERHEAD_BYTES
    looked.look({pair[2]: 1}, {pair[2]: 1 << 30})
    assert looked.tracks[pair[2]].arriving == 0


def test_a_connection_that_nobody_waits_on_is_forgotten(pair):
    looked = Arrivals(MESSAGE_BYTES)
    looked.look({pair[2]: 1}, {})
    looked.look({}, {})
    assert not looked.tracks


def test_a_closed_connection_counts_nothing(pair):
    looked = Arrivals(MESSAGE_BYTES)
    send(pair, 5000)
    looked.look({pair[2]: 1}, {})
    pair[1].close()
    looked.look({pair[2]: 1}, {})
    assert not looked.tracks


def test_where_the_kernel_does_not_tell_each_call_counts_as_the_largest(pair, monkeypatch):
    monkeypatch.delattr(socket, "TCP_INFO")
    looked = Arrivals(MESSAGE_BYTES)
    looked.look({pair[2]: 3}, {})
    assert looked.tracks[pair[2]].arriving == 3 * MESSAGE_BYTES


def test_looking_closes_no_descriptor(pair):
    for _ in range(3):
        assert arrivals._descriptors()
    send(pair, 10)


def test_a_mapped_address_is_the_plain_one():
    assert arrivals._plain("::ffff:10.0.0.1", 5) == ("10.0.0.1", 5)
    assert arrivals._address("ipv6:%5Bfe80::1%25eth0%5D:5") == ("fe80::1", 5)
    assert arrivals._address("unix:/run/x") is None

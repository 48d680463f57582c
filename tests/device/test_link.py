"""A channel that is closed under those who use it."""

import threading

import grpc
import pytest

from triplane.device.link import Link
from triplane.proto.errors import Unavailable
from triplane.proto.transfer_pb2_grpc import TransferStub


def test_a_stub_of_a_closed_link_is_refused_where_grpc_would_end_the_process():
    link = Link(grpc.insecure_channel("127.0.0.1:1"))
    TransferStub(link)
    link.close()
    link.close()
    with pytest.raises(Unavailable, match="closed meanwhile"):
        TransferStub(link)


def test_threads_that_make_stubs_while_it_closes_are_refused_or_served():
    for _ in range(20):
        link = Link(grpc.insecure_channel("127.0.0.1:1"))
        begun, ends = threading.Barrier(4), list[str]()

        def work(link=link, begun=begun, ends=ends):
            begun.wait()
            try:
                while True:
                    TransferStub(link)
            except Unavailable as error:
                ends.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        link.close()
        for thread in threads:
            thread.join(30)
        assert len(ends) == 3

"""A channel that is closed under those who use it."""

import threading

import grpc
import pytest

from triplane.proto.channels import Guarded
from triplane.proto.errors import Unavailable
from triplane.proto.transfer_pb2_grpc import TransferStub


def test_a_stub_of_a_closed_channel_is_refused_where_grpc_would_end_the_process():
    channel = Guarded(grpc.insecure_channel("127.0.0.1:1"))
    TransferStub(channel)
    channel.close()
    channel.close()
    with pytest.raises(Unavailable, match="cloud was closed"):
        TransferStub(channel)


def test_threads_that_make_stubs_while_it_closes_are_refused_or_served():
    for _ in range(20):
        channel = Guarded(grpc.insecure_channel("127.0.0.1:1"))
        begun, ends = threading.Barrier(4), list[str]()

        def work(channel=channel, begun=begun, ends=ends):
            begun.wait()
            try:
                while True:
                    TransferStub(channel)
            except Unavailable as error:
                ends.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        channel.close()
        for thread in threads:
            thread.join(30)
        assert len(ends) == 3

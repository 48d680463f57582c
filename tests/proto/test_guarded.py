"""A channel that is closed under those who use it."""

import threading
import time

import grpc
import pytest

from triplane.cloud.identity.authority import Authority
from triplane.proto import transfer_pb2 as pb
from triplane.proto.channels import Guarded, connect
from triplane.proto.credentials import IdentityFolder
from triplane.proto.errors import Unavailable
from triplane.proto.identity import certificate_pem, certificate_request, key_pem, new_key
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


def test_a_call_of_a_stub_whose_channel_was_closed_meanwhile_is_refused(tmp_path):
    """Where there are interceptors, grpc registers a method when it is called."""
    authority, key = Authority.make(tmp_path, "cloud", time.time()), new_key()
    certificate = authority.issue(certificate_request(key), "ann", time.time())
    identity = IdentityFolder(tmp_path / "identity")
    identity.save(
        authority=authority.pem,
        certificate=certificate_pem(certificate),
        key=key_pem(key),
        cloud="127.0.0.1:1",
    )
    channel = connect(identity)
    stub = TransferStub(channel)
    channel.close()
    with pytest.raises(Unavailable, match="cloud was closed"):
        stub.Stat(pb.StatRequest(sha256=bytes(32), size=1))

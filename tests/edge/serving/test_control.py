import json
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from triplane.edge.serving.control import Control
from triplane.edge.serving.pointers import Pointer, read_pointer, read_pointers, write_pointer
from triplane.edge.serving.repository import Repository
from triplane.edge.serving.server import Server
from triplane.edge.serving.wire import WIRE_NAME
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput, Unavailable
from triplane.proto.status import error_from
from triplane.unified_ir.runtime import Bundle, SessionOptions

X = np.ones((1, 4), np.float32)
POINTER = Pointer("digits", 3, "a" * 64, "b" * 64, "release/digits@3+ort-x64.bundle", "r1", 2)


def call(socket, method, request, answer):
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            return channel.unary_unary(
                f"/{WIRE_NAME}/{method}",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=answer.FromString,
            )(request, timeout=20)
        except grpc.RpcError as error:
            raise error_from(error) from error


def load(socket, name, **parameters):
    request = pb.RepositoryModelLoadRequest(model_name=name)
    for key, value in parameters.items():
        request.parameters[key].string_param = str(value)
    return call(socket, "RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)


@pytest.fixture
def control(tmp_path):
    server = Server(Repository())
    socket = tmp_path / "s"
    listening = Control(socket, server.repository, server.service, session=SessionOptions())
    yield socket, server
    listening.close()
    server.stop(0)


@pytest.fixture
def bundles(bundle):
    """Path and root digest of a bundle by version."""

    def made(version):
        path = bundle(version)
        return path, Bundle.load(path).digest

    return made


def ask(server, name):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        tensor = triton.InferInput("x", X.shape, "FP32")
        tensor.set_data_from_numpy(X)
        answer = client.infer(name, [tensor])
        return answer.get_response().model_version


def test_a_load_switches_to_the_bundle_and_an_unload_drops_it(control, bundles):
    socket, server = control
    for version in ("1", "2"):
        path, digest = bundles(version)
        load(socket, "linear", path=path, digest=digest)
        assert ask(server, "linear") == version
    request = pb.RepositoryModelUnloadRequest(model_name="linear")
    call(socket, "RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse)
    with pytest.raises(triton.InferenceServerException, match="no model"):
        ask(server, "linear")


def test_a_load_that_fails_leaves_the_old_version_serving(control, bundles, tmp_path):
    socket, server = control
    path, digest = bundles("1")
    load(socket, "linear", path=path, digest=digest)
    damaged = tmp_path / "damaged"
    data = bytearray(bundles("2")[0].read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(Corrupt):
        load(socket, "linear", path=damaged, digest=bundles("2")[1])
    with pytest.raises(Corrupt):
        load(socket, "linear", path=path, digest="0" * 64)
    with pytest.raises(InvalidInput, match="the bundle holds 'linear'"):
        load(socket, "other", path=path, digest=digest)
    with pytest.raises(InvalidInput, match="'digest'"):
        load(socket, "linear", path=path)
    assert ask(server, "linear") == "1"


def test_the_network_port_has_no_load(control):
    _, server = control
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        method: Any = channel.unary_unary(f"/{WIRE_NAME}/RepositoryModelLoad")
        with pytest.raises(grpc.RpcError) as caught:
            method(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_socket_path_too_long_for_linux_is_refused_by_length(tmp_path):
    server = Server(Repository())
    try:
        with pytest.raises(InvalidInput, match="at most 100 bytes"):
            Control(
                tmp_path / ("x" * 100), server.repository, server.service, session=SessionOptions()
            )
    finally:
        server.stop(0)


def test_a_file_that_is_no_socket_is_not_removed_to_listen_in_its_place(tmp_path):
    (tmp_path / "s").write_text("somebody's")
    server = Server(Repository())
    try:
        with pytest.raises(Unavailable, match="cannot listen"):
            Control(tmp_path / "s", server.repository, server.service, session=SessionOptions())
    finally:
        server.stop(0)
    assert (tmp_path / "s").read_text() == "somebody's"


def test_a_pointer_comes_back_as_it_was_written(tmp_path):
    write_pointer(tmp_path, POINTER)
    assert read_pointers(tmp_path) == ({"digits": POINTER}, [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model": 1}',
        "nonsense",
        json.dumps({**{n: getattr(POINTER, n) for n in Pointer.__slots__}, "version": "3"}),
        json.dumps({**{n: getattr(POINTER, n) for n in Pointer.__slots__}, "sha256": "../x"}),
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_pointer_is_corrupt_and_the_others_are_read(tmp_path, text):
    write_pointer(tmp_path, POINTER)
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(Corrupt, match="not a pointer file"):
        read_pointer(tmp_path / "other.json")
    found, broken = read_pointers(tmp_path)
    assert [*found] == ["digits"]
    assert len(broken) == 1

"""`triplane edge infer`: answers of a server, for any data; predict on the bundle is the oracle."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

from triplane.edge.cli import edge
from triplane.edge.served_model import served_model
from triplane.edge.serving.bundles import open_bundle
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.cli import predict

X = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)


@pytest.fixture
def server(serve, bundle):
    """A server of two versions of a bundle, whose weights differ."""
    paths = [bundle(version, weights=np.full((4, 3), int(version), np.float32)) for version in "12"]
    return serve(*(open_bundle(path) for path in paths)), paths


def run(command, *argv):
    result = CliRunner().invoke(command, [*map(str, argv), "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_the_answers_of_a_server_are_those_of_its_bundle(server, tmp_path):
    served, paths = server
    np.savez(tmp_path / "x.npz", x=X)
    at = ("--at", f"127.0.0.1:{served.port}")
    for version, more in (("1", ("--model-version", "1")), ("2", ())):
        asked = run(edge, "infer", "linear", tmp_path / "x.npz", *at, *more)
        answered = run(predict.command, paths[int(version) - 1], tmp_path / "x.npz")
        assert asked["answers"] == answered["answers"]
        assert {"ant", "bee", "cat"} == {c["class"] for c in asked["answers"][0]["top"]}
    out = tmp_path / "y.npz"
    run(edge, "infer", "linear", tmp_path / "x.npz", *at, "--out", out, "--batch-size", 2)
    assert np.load(out)["y"] == pytest.approx(X @ np.full((4, 3), 2.0), rel=1e-6)


def test_what_a_server_does_not_have_is_named(server):
    address = f"127.0.0.1:{server[0].port}"
    for name, version in (("linea", ""), ("linear", "3")):
        with (
            pytest.raises(NotFound, match=r"no model|no version"),
            served_model(address, name, version),
        ):
            raise AssertionError
    with (
        pytest.raises(Unavailable, match=r"no inference server answers at 127\.0\.0\.1:1: "),
        served_model("127.0.0.1:1", "linear"),
    ):
        raise AssertionError


@contextmanager
def answering(metadata, response):
    """A server of another make, which answers every call in this way."""
    answers: dict[str, Any] = {"ModelMetadata": (pb.ModelMetadataRequest, metadata),
               "ModelInfer": (pb.ModelInferRequest, response)}  # fmt: skip
    handlers: Any = {
        name: grpc.unary_unary_rpc_method_handler(
            lambda _request, _context, reply=reply: reply,
            request_deserializer=kind.FromString,
            response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        )
        for name, (kind, reply) in answers.items()
    }
    server = grpc.server(ThreadPoolExecutor(1))
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def metadata(shape=(-1, 3), datatype="FP32", takes=(-1, 4)):
    tensors = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name="m", inputs=[tensors(name="x", datatype="FP32", shape=takes)],
        outputs=[tensors(name="y", datatype=datatype, shape=shape)],
    )  # fmt: skip


def reply(data, shape=(5, 3), datatype="FP32", name="y"):
    tensor = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    return pb.ModelInferResponse(outputs=[tensor], raw_output_contents=data)


HOSTILE = {
    "fewer bytes": reply([bytes(56)]),
    "no bytes": reply([]),
    "another type": reply([bytes(120)], datatype="FP64"),
    "no such type": reply([bytes(60)], datatype="FP33"),
    "a negative size": reply([bytes(60)], shape=(-5, -3)),
    "a size that no memory has": reply([bytes(60)], shape=(2**62, 3)),
    "another output": reply([bytes(60)], name="z"),
    "another width": reply([bytes(140)], shape=(5, 7)),
    "another number of axes": reply([bytes(60)], shape=(5, 3, *(1,) * 70)),
    "no message": b"\xff\xff",
}


@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_that_the_server_did_not_declare_is_refused(response):
    with answering(metadata(), response) as address, served_model(address, "m") as model:
        assert model.labels == ()
        with pytest.raises(Corrupt, match="the server answers"):
            model.run({"x": X})


def test_an_answer_beyond_the_limit_says_how_to_get_smaller_ones(monkeypatch):
    monkeypatch.setattr("triplane.edge.served_model.MAX_REPLY_BYTES", 1000)
    response = reply([bytes(2000)], shape=(5, 100))
    with (
        answering(metadata(shape=(-1, 100)), response) as address,
        served_model(address, "m") as model,
        pytest.raises(InvalidInput, match=r"at most 1000 bytes.*--batch-size"),
    ):
        model.run({"x": X})


def test_an_empty_answer_of_a_size_that_numpy_lacks_is_refused():
    response = reply([b""], shape=(5, 2**62, 0))
    declared = metadata(shape=(-1, -1, -1))
    with (
        answering(declared, response) as address,
        served_model(address, "m") as model,
        pytest.raises(Corrupt, match="the server answers"),
    ):
        model.run({"x": X})


@pytest.mark.parametrize(
    ("declared", "error", "reason"),
    [
        (b"\xff\xff", Corrupt, "2 bytes that are no ModelMetadataResponse"),
        (metadata(takes=(-1, *(1,) * 100)), InvalidInput, "x has 101 axes"),
        (metadata(takes=(2**40, 4)), InvalidInput, "65536 rows are supported"),
    ],
)
def test_a_description_beyond_the_limits_is_refused(declared, error, reason):
    with (
        answering(declared, reply([bytes(60)])) as address,
        pytest.raises(error, match=reason),
        served_model(address, "m"),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    "declared", [metadata(datatype="BYTES"), metadata(shape=(-2, 3)), pb.ModelMetadataResponse()]
)
def test_a_model_whose_tensors_are_no_arrays_is_refused(declared):
    with (
        answering(declared, reply([bytes(60)])) as address,
        pytest.raises(InvalidInput, match=r"arrays of numbers|without inputs"),
        served_model(address, "m"),
    ):
        raise AssertionError


def test_an_input_of_any_size_takes_no_memory_before_there_are_samples():
    declared = metadata(takes=(-1, 2**40))
    with answering(declared, HOSTILE["no bytes"]) as address, served_model(address, "m") as model:
        assert model.inputs[0].shape == ("N", 2**40)


@pytest.mark.parametrize(
    ("entries", "labels"),
    [
        (["0.5:2:c", "0.25:0:a", "0:1:b:b"], ("a", "b:b", "c")),
        (["0.5:2:c", "0.25:0:a"], ()),
        (["0.5:2", "0.25:0", "0:1"], ()),
        (["?", "0:x:y", ""], ()),
    ],
)
def test_labels_are_those_of_a_classification(entries, labels):
    data = b"".join(len(e).to_bytes(4, "little") + e.encode() for e in entries)
    answers = reply([data], shape=(1, 3), datatype="BYTES")
    with answering(metadata(), answers) as address, served_model(address, "m") as model:
        assert model.labels == labels

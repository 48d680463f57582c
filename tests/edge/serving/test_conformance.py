"""Every call that an unmodified tritonclient makes, against a real server."""

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2

from triplane.edge.serving.wire import METHODS, WIRE_NAME
from triplane.proto import open_inference_pb2 as pb

X = np.arange(8, dtype=np.float32).reshape(2, 4)

# Calls of the client that the server declines, each with the arguments the client needs.
DECLINED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("load_model", ("linear",)),
    ("unload_model", ("linear",)),
    ("update_trace_settings", ("linear", {})),
    ("get_trace_settings", ("linear",)),
    ("update_log_settings", ({},)),
    ("get_log_settings", ()),
    ("get_system_shared_memory_status", ()),
    ("register_system_shared_memory", ("region", "key", 64)),
    ("unregister_system_shared_memory", ()),
    ("get_cuda_shared_memory_status", ()),
    ("register_cuda_shared_memory", ("region", b"AAAA", 0, 64)),
    ("unregister_cuda_shared_memory", ()),
)
SERVED = {
    "is_server_live",
    "is_server_ready",
    "is_model_ready",
    "get_server_metadata",
    "get_model_metadata",
    "get_model_config",
    "get_model_repository_index",
    "get_inference_statistics",
    "infer",
    "async_infer",
    "start_stream",
    "async_stream_infer",
    "stop_stream",
}


@pytest.fixture
def server(serve, kit):
    return serve(kit.linear(labels={"y": ("ant", "bee", "cat")}))


@pytest.fixture
def client(server, connect):
    return connect(server)


def test_every_call_of_the_client_is_either_served_or_declined_by_name_here():
    calls = {name for name in vars(triton.InferenceServerClient) if not name.startswith("_")}
    assert calls - {"close"} == SERVED | {name for name, _ in DECLINED}


@pytest.mark.parametrize(("call", "arguments"), DECLINED)
def test_a_declined_call_is_unimplemented_with_a_way_out(client, call, arguments):
    with pytest.raises(triton.InferenceServerException, match=r"docs/serving\.md") as raised:
        getattr(client, call)(*arguments)
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


def test_the_server_and_the_model_report_live_and_ready(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear")
    assert client.is_model_ready("linear", "1")


@pytest.mark.parametrize(("name", "version"), [("none", ""), ("linear", "9")])
def test_an_unknown_model_is_not_ready_and_that_is_no_error(client, name, version):
    assert not client.is_model_ready(name, version)


def test_server_metadata_names_only_extensions_that_are_there(client):
    metadata = client.get_server_metadata()
    assert metadata.name == "triplane"
    assert "system_shared_memory" not in metadata.extensions


def test_model_metadata_states_types_and_free_sizes(client):
    metadata = client.get_model_metadata("linear", as_json=True)
    assert metadata == {
        "name": "linear",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": ["-1", "4"]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": ["-1", "3"]}],
    }


def test_model_config_reads_in_the_client(client):
    config = client.get_model_config("linear").config
    assert (config.name, config.platform) == ("linear", "onnxruntime_onnx")
    assert [*config.input[0].dims] == [-1, 4]


def test_the_index_lists_the_model_as_ready(client):
    (entry,) = client.get_model_repository_index().models
    assert (entry.name, entry.version, entry.state) == ("linear", "1", "READY")


def test_statistics_count_calls_rows_and_failures(client, kit):
    client.infer("linear", [kit.tensor("x", X)])
    with pytest.raises(triton.InferenceServerException):
        client.infer("linear", [kit.tensor("z", X)])
    (counted,) = client.get_inference_statistics("linear").model_stats
    assert counted.inference_count == len(X)
    assert counted.execution_count == 1
    assert counted.inference_stats.success.count == 1
    assert counted.inference_stats.fail.count == 1
    assert [batch.batch_size for batch in counted.batch_stats] == [len(X)]


def test_infer_computes_what_the_model_computes(client, kit):
    result = client.infer("linear", [kit.tensor("x", X)], request_id="call-7")
    np.testing.assert_allclose(result.as_numpy("y"), X @ kit.WEIGHTS, rtol=1e-5)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("linear", "1", "call-7")


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_request_is_understood(client, kit, algorithm):
    result = client.infer("linear", [kit.tensor("x", X)], compression_algorithm=algorithm)
    np.testing.assert_allclose(result.as_numpy("y"), X @ kit.WEIGHTS, rtol=1e-5)


def test_async_infer_calls_back_with_the_result(client, kit):
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer(
        "linear", [kit.tensor("x", X)], lambda result, error: answers.put((result, error))
    )
    result, error = answers.get(timeout=30)
    assert error is None
    np.testing.assert_allclose(result.as_numpy("y"), X @ kit.WEIGHTS, rtol=1e-5)


def test_a_stream_answers_in_order_and_outlives_a_failed_request(client, kit):
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for index in range(20):
        name = "none" if index == 7 else "linear"
        x = np.full((1, 4), index, np.float32)
        client.async_stream_infer(name, [kit.tensor("x", x)], request_id=str(index))
    outcomes = [answers.get(timeout=30) for _ in range(20)]
    client.stop_stream()
    for index, (result, error) in enumerate(outcomes):
        if index == 7:
            assert "no model 'none'" in error.message()
        else:
            assert result.get_response().id == str(index)
            np.testing.assert_allclose(
                result.as_numpy("y"), np.full((1, 4), index) @ kit.WEIGHTS, rtol=1e-5
            )


def test_a_stream_that_asks_for_real_errors_is_closed_by_one(client, kit):
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(
        lambda result, error: answers.put(error or result), headers={"triton_grpc_error": "true"}
    )
    client.async_stream_infer("none", [kit.tensor("x", X)])
    assert answers.get(timeout=30).status() == "StatusCode.NOT_FOUND"
    client.stop_stream()


def test_a_stream_marks_final_responses_when_asked(client, kit):
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(result or error))
    client.async_stream_infer("linear", [kit.tensor("x", X)], enable_empty_final_response=True)
    response = answers.get(timeout=30).get_response()
    client.stop_stream()
    assert response.parameters["triton_final_response"].bool_param


def test_the_asyncio_client_gets_the_same_answer(server, kit):
    import asyncio

    async def ask():
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            return (await client.infer("linear", [kit.tensor("x", X)])).as_numpy("y")

    np.testing.assert_allclose(asyncio.run(ask()), X @ kit.WEIGHTS, rtol=1e-5)


def test_unrequested_outputs_are_all_sent_and_requested_ones_in_their_order(serve, connect, kit):
    from onnx import TensorProto, helper

    from triplane.unified_ir.runtime.session import Session

    nodes = [helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Abs", ["x"], ["b"])]
    row = TensorProto.FLOAT, ["N"]
    data = kit.graph(nodes, [("x", *row)], [("a", *row), ("b", *row)], {})
    client = connect(serve(kit.SessionServable(Session(data), name="two")))
    x = kit.tensor("x", np.array([1, -2], np.float32))
    response = client.infer("two", [x]).get_response()
    assert [output.name for output in response.outputs] == ["a", "b"]
    wanted = [triton.InferRequestedOutput(name) for name in ("b", "a")]
    result = client.infer("two", [x], outputs=wanted)
    assert [output.name for output in result.get_response().outputs] == ["b", "a"]
    assert result.as_numpy("b").tolist() == [1, 2]


def test_classification_gives_labelled_top_classes_per_row(client, kit):
    wanted = [triton.InferRequestedOutput("y", class_count=2)]
    classes = client.infer("linear", [kit.tensor("x", X)], outputs=wanted).as_numpy("y")
    assert classes.shape == (2, 2)
    names = "ant", "bee", "cat"
    for row, scores in zip(classes, X @ kit.WEIGHTS, strict=True):
        best = np.argsort(-scores)[:2]
        assert [entry.decode().split(":")[1:] for entry in row] == [
            [str(index), names[index]] for index in best
        ]


def test_an_empty_version_means_the_newest_by_number(serve, connect, kit):
    servables = [kit.linear(version=v, weights=kit.WEIGHTS * int(v)) for v in ("9", "10", "2")]
    client = connect(serve(*servables))
    result = client.infer("linear", [kit.tensor("x", X)])
    assert result.get_response().model_version == "10"
    old = client.infer("linear", [kit.tensor("x", X)], model_version="2")
    np.testing.assert_allclose(old.as_numpy("y"), X @ (kit.WEIGHTS * 2), rtol=1e-5)
    assert client.get_model_metadata("linear", as_json=True)["versions"] == ["2", "9", "10"]


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [
        ("BOOL", np.bool_),
        ("UINT8", np.uint8),
        ("UINT16", np.uint16),
        ("UINT32", np.uint32),
        ("UINT64", np.uint64),
        ("INT8", np.int8),
        ("INT16", np.int16),
        ("INT32", np.int32),
        ("INT64", np.int64),
        ("FP16", np.float16),
        ("FP32", np.float32),
        ("FP64", np.float64),
    ],
)
def test_every_datatype_passes_unchanged_both_ways(serve, connect, kit, datatype, dtype):
    from onnx import helper

    from triplane.unified_ir.runtime.session import Session

    row = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["N"]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    servable = kit.SessionServable(
        Session(kit.graph(nodes, [("x", *row)], [("y", *row)], {})), name="same"
    )
    client = connect(serve(servable))
    x = np.array([0, 1, 1, 0], dtype)
    result = client.infer("same", [kit.tensor("x", x, datatype)])
    assert result.as_numpy("y").dtype == x.dtype
    assert result.as_numpy("y").tolist() == x.tolist()


def test_nan_and_infinity_pass_through(serve, connect, kit):
    client = connect(serve(kit.linear(weights=np.eye(4, dtype=np.float32))))
    x = np.array([[np.inf, 0, 0, 0], [np.nan, 0, 0, 0]], np.float32)
    y = client.infer("linear", [kit.tensor("x", x)]).as_numpy("y")
    assert np.isposinf(y[0, 0])
    assert np.isnan(y[1]).all()


def test_the_schema_agrees_with_the_clients_field_by_field():
    (configs,) = service_pb2.DESCRIPTOR.dependencies
    theirs = {
        **service_pb2.DESCRIPTOR.message_types_by_name,
        **configs.message_types_by_name,
    }
    pairs = [(ours, theirs[name]) for name, ours in pb.DESCRIPTOR.message_types_by_name.items()]
    checked = 0
    while pairs:
        ours, other = pairs.pop()
        for field in ours.fields:
            twin = other.fields_by_number[field.number]
            assert (field.name, field.type, field.is_repeated) == (
                twin.name,
                twin.type,
                twin.is_repeated,
            ), ours.name
            checked += 1
        pairs += [(m, other.nested_types_by_name[m.name]) for m in ours.nested_types]
    assert checked > 100


def test_the_service_agrees_with_the_clients_method_by_method():
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert theirs.full_name == WIRE_NAME
    for method in METHODS:
        twin = theirs.methods_by_name[method.name]
        assert (method.client_streaming, method.server_streaming) == (
            twin.client_streaming,
            twin.server_streaming,
        )
        assert method.input_type.name == twin.input_type.name
        assert method.output_type.name == twin.output_type.name

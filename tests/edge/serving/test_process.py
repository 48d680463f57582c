"""The serving process as a parent, a shell and an operator meet it."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper

from triplane.edge.serving.__main__ import options_from, parse
from triplane.edge.serving.bundles import open_bundle
from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.options import Options
from triplane.edge.serving.process import start as start_server
from triplane.edge.serving.wire import WIRE_NAME
from triplane.proto.errors import Corrupt, InvalidInput, Unavailable
from triplane.unified_ir.cli.shell import EXIT_CODES
from triplane.unified_ir.runtime import (
    BundleSpec,
    Description,
    Session,
    available_providers,
    write_bundle,
)

X = np.ones((1, 4), np.float32)
WAIT_S = 60
TRIPLANE = (sys.executable, "-c", "from triplane.unified_ir.cli import main; main()")
# After the ready line the kernel gives signals to other threads: the system call in which the main
# thread waits is not interrupted, as by a signal that arrives just before the call blocks.
NOT_INTERRUPTED = """
import signal, sys
from triplane.edge.serving import process
from triplane.edge.serving.__main__ import main, parse
announce = process.announce
def announced(*given):
    announce(*given)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
process.announce = announced
main(parse(sys.argv[1:]))
"""
FORBIDDEN = ("onnx", "tuf", "securesystemslib", "cryptography", "click", "rich", "jax")


@pytest.fixture
def start():
    """Start serving processes; all are gone at the end."""
    processes = []

    def run(*bundles: Any, **options: Any) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        given = {"bundles": [*map(str, bundles)], "port": 0, "metrics_port": 0, "json": True}
        process = subprocess.Popen(
            [sys.executable, "-m", "triplane.edge.serving", json.dumps({**given, **options})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline() or "{}")

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def endless(tmp_path):
    """A bundle whose graph counts to 2^62."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["on"]), helper.make_node("Neg", ["v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(np.array(2**62), "n")],
    )
    opsets = [helper.make_opsetid("", 21)]
    data = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session, x = Session(data), np.zeros(1, np.float32)
    description = Description(
        name="endless",
        version="1",
        target="ort-x64",
        inputs=session.inputs,
        outputs=session.outputs,
        model_digest="00" * 32,
    )
    spec = BundleSpec(
        description=description,
        model=data,
        weights={},
        golden_inputs={"x": x},
        golden_outputs={"y": x},
    )
    write_bundle(tmp_path / "endless.bundle", spec)
    return tmp_path / "endless.bundle"


@pytest.mark.slow
def test_the_ready_line_names_the_ports_and_the_process_answers_on_them(start, bundle, kit):
    process, ready = start(bundle("1"), bundle("2", weights=kit.WEIGHTS * 2))
    assert ready["serving"] == [
        {"model": "linear", "version": "1"},
        {"model": "linear", "version": "2"},
    ]
    with triton.InferenceServerClient(f"{ready['host']}:{ready['port']}") as client:
        result = client.infer("linear", [kit.tensor("x", X)])
        np.testing.assert_allclose(result.as_numpy("y"), X @ (kit.WEIGHTS * 2), rtol=1e-5)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert log == ""


@pytest.mark.slow
def test_labels_of_the_bundle_reach_the_client(start, bundle, kit):
    _, ready = start(bundle())
    with triton.InferenceServerClient(f"127.0.0.1:{ready['port']}") as client:
        wanted = [triton.InferRequestedOutput("y", class_count=1)]
        x = kit.tensor("x", np.eye(4, dtype=np.float32)[:1])
        (entry,) = client.infer("linear", [x], outputs=wanted).as_numpy("y")[0]
    best = int(np.argmax(kit.WEIGHTS[0]))
    assert entry.decode().endswith(f":{best}:{('ant', 'bee', 'cat')[best]}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_fails_no_call_that_was_taken(start, bundle, kit, number):
    """Callers keep asking through the signal; after it only "not taken" may be an answer."""
    process, ready = start(bundle())
    loaded, outcomes = threading.Barrier(5), queue.Queue[Any]()

    def ask(client):
        for index in range(100_000):
            if index == 20:
                loaded.wait(30)
            x = np.full((1, 4), index, np.float32)
            try:
                result = client.infer("linear", [kit.tensor("x", x)])
            except triton.InferenceServerException as error:
                outcomes.put(error.status())
                return
            np.testing.assert_allclose(result.as_numpy("y"), x @ kit.WEIGHTS, rtol=1e-5)

    with triton.InferenceServerClient(f"127.0.0.1:{ready['port']}") as client:
        askers = [threading.Thread(target=ask, args=(client,)) for _ in range(4)]
        for asker in askers:
            asker.start()
        loaded.wait(30)
        process.send_signal(number)
        ended = [outcomes.get(timeout=30) for _ in askers]
        for asker in askers:
            asker.join(30)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert ended == ["StatusCode.UNAVAILABLE"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_interrupts_no_system_call_still_drains(bundle, number):
    given = {"bundles": [str(bundle())], "port": 0, "metrics_port": 0, "log_level": "info"}
    with subprocess.Popen(
        [sys.executable, "-c", NOT_INTERRUPTED, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.send_signal(number)
            _, log = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert log.splitlines()[-1].endswith("stopped")


@pytest.mark.slow
def test_a_ready_line_that_nobody_can_read_does_not_end_the_server(bundle):
    reader, writer = os.pipe()
    os.close(reader)
    command = [*TRIPLANE, "edge", "serve", str(bundle()), "--port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        try:
            assert process.stderr is not None
            assert "ready line not written" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert (process.returncode, log) == (0, "")


@pytest.mark.slow
def test_a_taken_port_is_told_in_one_line_of_ours(bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*TRIPLANE, "edge", "serve", str(bundle()), "--port", str(port)]
        done = subprocess.run(
            [*command, "--metrics-port", "0"],
            capture_output=True, text=True, check=False, timeout=WAIT_S,
        )  # fmt: skip
    assert done.returncode == EXIT_CODES[Unavailable]
    assert done.stderr.startswith("triplane: "), done.stderr
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert "add_port" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(
    "CUDAExecutionProvider" in available_providers(), reason="this is the build for GPUs"
)
def test_a_gpu_that_is_not_there_is_refused_before_any_bundle():
    options = Options(bundles=("absent.bundle",), device="cuda", port=0, metrics_port=0)
    with pytest.raises(Unavailable, match="pip install onnxruntime-gpu"):
        start_server(options)


@contextmanager
def a_call_that_never_ends(port):
    """A caller that began a call and says nothing more; gives the call and a client."""
    stalled = threading.Event()

    def nothing():
        stalled.wait(2 * WAIT_S)
        yield b""

    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        triton.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        ask: Any = channel.stream_unary(f"/{WIRE_NAME}/ModelInfer")
        call = ask.future(nothing())
        try:
            wait_until(client.is_server_ready)
            yield call, client
        finally:
            stalled.set()


def wait_until(holds):
    """Return when it holds; a failure says that it did not within the time."""
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s, f"not within {WAIT_S} s"


@pytest.mark.slow
def test_a_second_signal_ends_a_process_whose_caller_never_finishes(start, bundle):
    patient = {"receive_s": 3600, "call_s": 3600}  # no stalled call ends by itself
    process, ready = start(bundle(), drain_s=3600, limits=patient)
    with a_call_that_never_ends(ready["port"]) as (call, client):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.is_server_ready(client_timeout=WAIT_S))
        process.send_signal(signal.SIGTERM)
        assert isinstance(call.exception(WAIT_S), grpc.RpcError)
        assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
    process.communicate(timeout=WAIT_S)
    assert process.returncode in {0, 1}


@pytest.mark.slow
def test_a_second_signal_ends_a_process_whose_log_nobody_reads(start, bundle):
    """Standard error is a full pipe: the line that says that it drains blocks the main thread."""
    process, _ = start(bundle(), log_level="info")
    # The process logs too little to fill the pipe, so we fill it through its own descriptor.
    with Path(f"/proc/{process.pid}/fd/2").open("wb", buffering=0) as pipe:
        os.set_blocking(pipe.fileno(), False)
        while pipe.write(b"x" * 4096):
            pass
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 1


@pytest.mark.slow
def test_a_signal_ends_a_process_whose_model_never_finishes_loading(start, bundle, endless):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "triplane.edge.serving",
            json.dumps({"bundles": [str(bundle()), str(endless)], "port": 0, "log_level": "info"}),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert any("model ready" in line for line in process.stderr)  # the second one loads now
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_verb_prints_the_ready_line_in_words(bundle):
    command = [sys.executable, "-m", "triplane.edge.cli", "serve", str(bundle())]
    with subprocess.Popen(
        [*command, "--port", "0", "--metrics-port", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    assert re.fullmatch(r"serving linear version 1 on 127\.0\.0\.1:\d+ \(metrics :\d+\)\n", line)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_damaged_bundle_is_refused_in_one_line_before_any_port_opens(start, bundle):
    path = bundle()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    process, ready = start(path)
    _, log = process.communicate(timeout=30)
    assert ready == {}
    assert process.returncode == 1
    assert log.startswith("serving: ")
    assert log.count("\n") == 1


def test_a_bundle_whose_goldens_do_not_come_out_is_not_opened(bundle, kit, monkeypatch):
    from triplane.unified_ir.runtime.session import Session

    path = bundle()
    run = Session.run
    monkeypatch.setattr(
        Session, "run", lambda *a, **kw: {k: v + 1 for k, v in run(*a, **kw).items()}
    )
    with pytest.raises(Corrupt, match="off by"):
        open_bundle(path)


@pytest.mark.slow
def test_events_are_logged_as_a_constant_text_and_fields(start, bundle):
    process, _ = start(bundle(), log_level="info")
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    (line,) = [line for line in log.splitlines() if "model ready" in line]
    assert json.loads(line[line.index("{") :])["model"] == "linear"
    assert log.splitlines()[-1].endswith("stopped")


@pytest.mark.slow
def test_serving_imports_nothing_that_trains_signs_or_converts():
    code = (
        "import sys, triplane.edge.serving.process, triplane.edge.serving.__main__\n"
        f"print([m for m in {FORBIDDEN} if m in sys.modules])\n"
        "print([m for m in sys.modules if m.startswith('triplane.unified_ir.')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    forbidden, ours = ran.stdout.splitlines()
    assert forbidden == "[]"
    parts = {name.split(".")[2] for name in eval(ours)}
    assert parts == {"runtime", "files"}


def test_the_verb_imports_click_only_until_it_runs():
    code = (
        "import sys, triplane.edge.cli\n"
        "print([m for m in ('grpc', 'numpy', 'google.protobuf', 'onnxruntime', 'json')"
        " if m in sys.modules and m != 'json'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one JSON object"),
        (["nonsense"], "one JSON object"),
        (["[]"], "one JSON object"),
        (["{}"], "need bundles"),
        (['{"bundles": ["a"], "color": 1}'], r"no option 'color'"),
        (['{"bundles": ["a"], "limits": {"speed": 1}}'], r"no limit 'speed'"),
        (['{"bundles": ["a"], "limits": {"rows": "many"}}'], "whole number"),
        (['{"bundles": ["a"], "limits": null}'], "limits is an object"),
        (
            ['{"bundles": ["a"], "limits": {"message_bytes": 2147483648}}'],
            "it must be 1 to 2147483647",
        ),
        (['{"bundles": "abc"}'], "bundles a list"),
        (['{"bundles": [1]}'], "are texts"),
        (['{"bundles": ["a"], "host": ""}'], "are texts"),
        (['{"bundles": ["a"], "drain_s": Infinity}'], "drain_s is inf"),
        (['{"bundles": ["a"], "model_threads": 1000000000}'], "1 to 1024"),
        (['{"bundles": ["a"], "model_threads": 1.5}'], "1 to 1024"),
        (['{"bundles": ["a"], "device": ["cuda"]}'], "device is .'cuda'.; one of cpu, cuda"),
        (['{"bundles": []}'], "at least one bundle"),
        (['{"bundles": ["a"], "port": 70000}'], "port is 70000; give 0 to 65535"),
        (['{"bundles": ["a"], "metrics_port": "x"}'], "metrics_port is 'x'"),
        (['{"bundles": ["a"], "log_level": "loud"}'], "one of debug"),
        (['{"bundles": ["a"], "drain_s": -1}'], "drain_s is -1"),
        (['{"bundles": ["a"], "tls_cert": "c"}'], "certificate and its key"),
        (['{"bundles": ["a"], "tls_client_ca": "c"}'], "certificate and its key"),
    ],
)
def test_bad_options_are_refused_by_name(argv, message):
    with pytest.raises(InvalidInput, match=message):
        parse(argv)


def test_options_take_limits_as_text_and_keep_the_other_defaults():
    options = options_from({"bundles": ["a"], "limits": {"rows": "7"}})
    assert options == Options(bundles=("a",), limits=ServingLimits(rows=7))

import socket
import threading
import time
import urllib.request
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families

from triplane.edge.serving import metrics
from triplane.edge.serving.metrics import GAUGES, HISTOGRAMS, LANE_CALLS
from triplane.edge.serving.wire import WIRE_NAME

X = np.ones((3, 4), np.float32)


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        text = page.read().decode()
    keys = "model", "version", "code", "le"
    return {
        (sample.name, *(sample.labels.get(key, "") for key in keys)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_calls_are_counted_by_model_version_and_code(serve, connect, kit):
    server = serve(kit.linear(), metrics_port=0)
    client = connect(server)
    for _ in range(2):
        client.infer("linear", [kit.tensor("x", X)])
    for model, name in (("linear", "z"), ("other-1", "x"), ("other-2", "x")):
        with pytest.raises(triton.InferenceServerException):
            client.infer(model, [kit.tensor(name, X)])
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        ask: Any = channel.unary_unary(f"/{WIRE_NAME}/ModelInfer")
        with pytest.raises(grpc.RpcError):
            ask(b"no message")
    seen = scrape(server)
    calls = {key[1:4]: value for key, value in seen.items() if key[0].endswith("calls_total")}
    assert calls == {
        ("linear", "1", "OK"): 2,
        ("linear", "1", "INVALID_ARGUMENT"): 1,
        ("", "", "INVALID_ARGUMENT"): 1,
        ("", "", "NOT_FOUND"): 2,  # names of callers never become labels
    }


def test_callers_that_never_finish_asking_cannot_take_more_than_their_threads(serve, kit):
    server = serve(kit.linear(), metrics_port=0)
    before = threading.active_count()
    held = [socket.create_connection(("127.0.0.1", server.metrics_port)) for _ in range(40)]
    try:
        refused = held[-1].recv(1)  # the server has met all by the time it hangs up on the last
        assert refused == b""
        assert threading.active_count() - before <= 8
    finally:
        for one in held:
            one.close()


@pytest.mark.slow
def test_a_caller_that_asks_byte_by_byte_is_hung_up_on_by_the_clock(serve, kit, monkeypatch):
    monkeypatch.setattr(metrics, "PAGE_S", 0.2)
    server = serve(kit.linear(), metrics_port=0)
    with socket.create_connection(("127.0.0.1", server.metrics_port), timeout=0.05) as caller:
        caller.sendall(b"GET /metrics HTTP/1.1\r\nSlow: ")
        deadline, answer = time.monotonic() + 10, None
        while answer is None and time.monotonic() < deadline:
            try:
                caller.sendall(b"x")  # sooner than it could count as idle
                answer = caller.recv(1)
            except TimeoutError:
                continue
            except OSError:
                answer = b""
    assert answer == b""
    assert scrape(server)


def test_histograms_are_cumulative_and_end_at_the_count(serve, connect, kit):
    server = serve(kit.linear(), metrics_port=0)
    connect(server).infer("linear", [kit.tensor("x", X)])
    seen = scrape(server)
    for row in HISTOGRAMS:
        buckets = [value for key, value in seen.items() if key[0] == f"{row.name}_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == seen[f"{row.name}_count", "linear", "1", "", ""] == 1
    assert seen["triplane_inference_batch_rows_bucket", "linear", "1", "", "2.0"] == 0
    assert seen["triplane_inference_batch_rows_bucket", "linear", "1", "", "4.0"] == 1


def test_every_row_of_the_table_is_on_the_page(serve, kit):
    names = {key[0] for key in scrape(serve(kit.linear(), metrics_port=0))}
    assert {row.name for row in GAUGES} <= names
    assert {f"{row.name}_bucket" for row in HISTOGRAMS} <= names
    assert LANE_CALLS in names
    assert "process_resident_memory_bytes" in names

"""A normal caller beside slow ones, and beside large ones: what the others cost it.

A child process serves a model with the default limits. A caller asks it one row at a time, in turn
alone and beside N connections that send two bytes of a request each and never more; the ratio is
of its 99th percentile, beside to alone, round by round, and alone to alone is the control. Health
is asked all the while. Then 40 callers send 60 MiB each at once, with the normal caller beside
them; the server's peak memory is read from the kernel.

    python benchmarks/serving_slow.py [--rounds 9] [--calls 400]
"""

import argparse
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2
from harness import ROOT, ratio, table
from onnx import helper
from serving import child, onnx_bytes

sys.path.insert(0, str(ROOT))
from tests.attacks.http2 import CHECK, INFER, LIVE, connections

SLOW = (16, 64, 1000)
LARGE_CALLERS = 40
LARGE_BYTES = 60 << 20
WAIT_S = 120
SETTLE_S = 1.0  # from the opening of the connections to the first call that counts


def mean() -> bytes:
    """Mean of each row, of any length."""
    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=1)]
    return onnx_bytes(nodes, ("N", "M"), {"axes": np.array([1])})


def tensor(columns: int) -> Any:
    """One row."""
    made = triton.InferInput("x", (1, columns), "FP32")
    made.set_data_from_numpy(np.ones((1, columns), np.float32))
    return made


def connected(port: int) -> Any:
    """A client with a connection of its own; by default clients in one process share one."""
    apart = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=apart)


class Probe:
    """Asks for health once every 10 ms until it is closed, and counts what was not SERVING."""

    def __init__(self, port: int) -> None:
        self.asked = self.failed = 0
        self._port = port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            check = channel.unary_unary(
                CHECK,
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )
            while not self._ended.wait(0.01):
                self.asked += 1
                try:
                    answer = check(health_pb2.HealthCheckRequest(), timeout=1)
                    self.failed += answer.status != health_pb2.HealthCheckResponse.SERVING
                except grpc.RpcError:
                    self.failed += 1

    def close(self) -> None:
        """Stop asking."""
        self._ended.set()
        self._thread.join()


def latencies(client: Any, calls: int) -> list[float]:
    """Seconds of each call; one that fails raises."""
    row, seconds = tensor(4), []
    for _ in range(calls):
        started = time.perf_counter()
        client.infer("bench", [row], client_timeout=WAIT_S)
        seconds.append(time.perf_counter() - started)
    return seconds


def beside(port: int, client: Any, slow: int, calls: int) -> float:
    """99th percentile of the normal caller beside so many slow connections."""
    with connections(port, slow) if slow else nullcontext([]) as made:
        for number, one in enumerate(made):
            one.begin((INFER, INFER, LIVE, CHECK)[number % 4])
        started = time.perf_counter()
        while time.perf_counter() - started < SETTLE_S:
            latencies(client, 10)
        return float(np.percentile(latencies(client, calls), 99))


def slow_callers(port: int, rounds: int, calls: int) -> list[list[Any]]:
    """A row for each number of slow connections."""
    with connected(port) as client:
        latencies(client, calls)
        rows = []
        for slow in SLOW:
            probe = Probe(port)
            p99: dict[str, list[float]] = {"alone": [], "again": [], "beside": []}
            for number in range(rounds):
                order = [*p99][number % 3 :] + [*p99][: number % 3]
                for what in order:
                    count = slow if what == "beside" else 0
                    p99[what].append(beside(port, client, count, calls))
            probe.close()
            alone = np.median(p99["alone"]) * 1e3
            health = f"{probe.failed} of {probe.asked}"
            rows.append(
                [
                    slow,
                    f"{alone:.2f}",
                    ratio(p99["beside"], p99["alone"]),
                    ratio(p99["again"], p99["alone"]),
                    health,
                ]
            )
        return rows


def peak_mb(pid: int) -> int:
    """Largest resident memory so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def large_callers(pid: int, port: int) -> str:
    """What 40 x 60 MiB at once cost."""
    before, probe = peak_mb(pid), Probe(port)
    row, refusals = tensor(LARGE_BYTES // 4), []
    start = threading.Barrier(LARGE_CALLERS + 1)

    def send(_: int) -> None:
        with connected(port) as client:
            start.wait()
            try:
                client.infer("bench", [row], client_timeout=WAIT_S)
            except triton.InferenceServerException as error:
                refusals.append(str(error))

    with (
        ThreadPoolExecutor(LARGE_CALLERS) as pool,
        connected(port) as client,
    ):
        sent = [pool.submit(send, number) for number in range(LARGE_CALLERS)]
        small: list[float] = []
        start.wait()
        while not all(one.done() for one in sent):
            small += latencies(client, 10)
        for one in sent:
            one.result()
    probe.close()
    kinds = {refusal[:60] for refusal in refusals}
    return (
        f"{LARGE_CALLERS} x {LARGE_BYTES >> 20} MiB at once: {len(refusals)} refused {kinds}; peak "
        f"memory {before} -> {peak_mb(pid)} MB; {len(small)} small calls beside, none failed, p99 "
        f"{np.percentile(small, 99) * 1e3:.0f} ms; health failed {probe.failed} of {probe.asked}"
    )


def main() -> None:
    """Run both parts and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=400)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "model.onnx").write_bytes(mean())
        process, port = stack.enter_context(child("ours", folder / "model.onnx"))
        heads = (
            "slow connections",
            "alone p99 ms",
            "beside / alone",
            "alone / alone",
            "health failed",
        )
        print(table(heads, slow_callers(port, options.rounds, options.calls)), flush=True)
        print("\n" + large_callers(process.pid, port))


if __name__ == "__main__":
    main()

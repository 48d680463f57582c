"""Our inference server against a naive one and against no server at all.

Three child processes serve the same model on onnxruntime with one thread per run: ours (limits,
statistics, metrics, merging), and twice the shortest servicer that answers the same client (parse,
run, reply; no checks). An unmodified tritonclient asks them in turn, round by round. Ratios are of
seconds per call within one round: median and quartiles; naive/naive is the control. CPU is the
server's own, user and system. `session.run` is the model alone in this process.

    python benchmarks/serving.py [--rounds 15] [--json]
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper

from triplane.unified_ir.runtime.session import Session

SERVERS = ("ours", "naive", "naive again")
THREADS = 16


@dataclass(frozen=True)
class Case:
    """One model asked with one row per call by `callers` callers at once."""

    name: str
    model: Callable[[], bytes]
    shape: tuple[int, ...]
    callers: int
    calls: int  # per server and round, over all callers


def onnx_bytes(nodes: list[Any], shape: tuple[Any, ...], weights: Mapping[str, Any]) -> bytes:
    """Model from `x` of `shape` to `y`."""
    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", None])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opset = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def _normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)


def tiny() -> bytes:
    """4 -> 3."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return onnx_bytes(nodes, ("N", 4), {"w": _normal(4, 3)})


def image() -> bytes:
    """3 x 224 x 224 (602 KB) -> mean -> 1000."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    return onnx_bytes(nodes, ("N", 3, 224, 224), {"w": _normal(3, 1000)})


def deep() -> bytes:
    """8 layers of 1024 x 1024: bound by reading weights, so merging requests pays."""
    nodes, weights = [], {}
    for layer in range(8):
        weights[f"w{layer}"] = _normal(1024, 1024)
        nodes.append(
            helper.make_node(
                "MatMul",
                [f"h{layer}" if layer else "x", f"w{layer}"],
                [f"h{layer + 1}" if layer < 7 else "y"],
            )
        )
    return onnx_bytes(nodes, ("N", 1024), weights)


CASES = (
    Case("tiny, 1 caller", tiny, (1, 4), 1, 300),
    Case("tiny, 8 callers", tiny, (1, 4), 8, 600),
    Case("602 KB in, 1 caller", image, (1, 3, 224, 224), 1, 100),
    Case("602 KB in, 8 callers", image, (1, 3, 224, 224), 8, 160),
    Case("deep, 1 caller", deep, (1, 1024), 1, 60),
    Case("deep, 8 callers", deep, (1, 1024), 8, 160),
)


def serve(kind: str, path: str) -> None:
    """Child process: serve the model file, print the port, live until standard input closes."""
    session = Session(Path(path).read_bytes())
    port, stop = (_ours if kind == "ours" else _naive)(session)
    print(port, flush=True)
    sys.stdin.read()
    stop()


def _ours(session: Session) -> tuple[int, Callable[[], None]]:
    from triplane.edge.serving.limits import ServingLimits
    from triplane.edge.serving.probe import plan
    from triplane.edge.serving.repository import Repository
    from triplane.edge.serving.server import Server

    class Bench:
        name, version, labels = "bench", "1", {}
        inputs, outputs, run = session.inputs, session.outputs, staticmethod(session.run)

    repository = Repository(plan)
    repository.add(Bench())
    server = Server(repository, limits=ServingLimits(threads=THREADS), metrics_port=0)
    return server.port, lambda: server.stop(1)


def _naive(session: Session) -> tuple[int, Callable[[], None]]:
    import grpc

    from triplane.proto import open_inference_pb2 as pb

    def infer(request: pb.ModelInferRequest, _: Any) -> pb.ModelInferResponse:
        tensor = request.inputs[0]
        x = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tensor.shape)
        y = session.run({tensor.name: x})["y"]
        output = pb.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=y.shape)
        return pb.ModelInferResponse(
            model_name=request.model_name,
            id=request.id,
            outputs=[output],
            raw_output_contents=[y.tobytes()],
        )

    handler = grpc.unary_unary_rpc_method_handler(
        infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    methods = {"ModelInfer": handler}
    server = grpc.server(
        ThreadPoolExecutor(THREADS),
        handlers=[grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)],
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, lambda: server.stop(1).wait() and None


@contextmanager
def child(kind: str, path: Path) -> Iterator[tuple[psutil.Process, int]]:
    """A serving child process and its port."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", kind.split(maxsplit=1)[0], str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield psutil.Process(process.pid), int(process.stdout.readline())
        process.stdin.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True)
class Row:
    """Figures of one case: (median, first quartile, third quartile) where there are three."""

    case: str
    run_ms: float
    naive_ms: tuple[float, float, float]
    ratio: tuple[float, float, float]
    control: tuple[float, float, float]
    cpu_ms: dict[str, float]
    rss_mb: dict[str, float]


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return median, first, third


def measure(case: Case, rounds: int) -> Row:
    """Run one case; see the module."""
    x = _normal(*case.shape)
    data = case.model()
    session = Session(data)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "model.onnx").write_bytes(data)
        servers = {
            kind: stack.enter_context(child(kind, folder / "model.onnx")) for kind in SERVERS
        }
        clients = {
            kind: [
                stack.enter_context(triton.InferenceServerClient(f"127.0.0.1:{port}"))
                for _ in range(case.callers)
            ]
            for kind, (_, port) in servers.items()
        }
        pool = stack.enter_context(ThreadPoolExecutor(case.callers))
        expected = session.run({"x": x})["y"]

        def ask(client: Any) -> None:
            tensor = triton.InferInput("x", x.shape, "FP32")
            tensor.set_data_from_numpy(x)
            for _ in range(case.calls // case.callers):
                result = client.infer("bench", [tensor]).as_numpy("y")
            np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)

        def timed(kind: str) -> tuple[float, float]:
            cpu, started = _cpu_s(servers[kind][0]), time.perf_counter()
            list(pool.map(ask, clients[kind]))
            seconds = time.perf_counter() - started
            return seconds / case.calls, (_cpu_s(servers[kind][0]) - cpu) / case.calls

        seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in SERVERS}
        for number in range(rounds + 1):
            for kind in SERVERS[number % 3 :] + SERVERS[: number % 3]:
                seen[kind].append(timed(kind))
        started = time.perf_counter()
        for _ in range(50):
            session.run({"x": x})
        run_ms = (time.perf_counter() - started) / 50 * 1e3
        rss_mb = {kind: process.memory_info().rss / 2**20 for kind, (process, _) in servers.items()}
    warm = {kind: rows[1:] for kind, rows in seen.items()}
    ours, naive, again = ([wall for wall, _ in warm[kind]] for kind in SERVERS)
    return Row(
        case=case.name,
        run_ms=run_ms,
        naive_ms=spread([wall * 1e3 for wall in naive]),
        ratio=spread([a / b for a, b in zip(ours, naive, strict=True)]),
        control=spread([a / b for a, b in zip(again, naive, strict=True)]),
        cpu_ms={k: statistics.median(cpu for _, cpu in rows) * 1e3 for k, rows in warm.items()},
        rss_mb=rss_mb,
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| case | run ms | naive ms/call | ours / naive | naive / naive | CPU ms/call | RSS MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio, control, naive = (
            f"{median:.2f} ({first:.2f}-{third:.2f})"
            for median, first, third in (row.ratio, row.control, row.naive_ms)
        )
        cpu = f"{row.cpu_ms['ours']:.2f} : {row.cpu_ms['naive']:.2f}"
        rss = f"{row.rss_mb['ours']:.0f} : {row.rss_mb['naive']:.0f}"
        lines.append(
            f"| {row.case} | {row.run_ms:.3f} | {naive} | {ratio} | {control} | {cpu} | {rss} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    rows = [measure(case, options.rounds) for case in CASES if options.case in case.name]
    packages = ("grpcio", "onnxruntime", "protobuf", "numpy", "tritonclient")
    machine = {
        "python": platform.python_version(),
        "cores": psutil.cpu_count(),
        **{name: version(name) for name in packages},
    }
    if options.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows), "\n\n" + ", ".join(f"{k} {v}" for k, v in machine.items()))


if __name__ == "__main__":
    main()

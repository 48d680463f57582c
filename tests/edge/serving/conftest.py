"""Real models, real servers on a free port, and an unmodified client."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.repository import Plan, Repository
from triplane.edge.serving.running import CallContext
from triplane.edge.serving.server import Server
from triplane.unified_ir.runtime.bundle import BundleSpec, write_bundle
from triplane.unified_ir.runtime.description import Description
from triplane.unified_ir.runtime.session import Session

WEIGHTS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def graph(nodes: list[Any], inputs: Any, outputs: Any, weights: Mapping[str, Any]) -> bytes:
    """ONNX bytes; inputs and outputs are (name, type, shape) triples."""
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*row) for row in inputs],
        [helper.make_tensor_value_info(*row) for row in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString()


def linear_bytes(weights: Any = WEIGHTS) -> bytes:
    """y = x W, x: (N, 4), y: (N, 3)."""
    rows, columns = weights.shape
    return graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", TensorProto.FLOAT, ["N", rows])],
        [("y", TensorProto.FLOAT, ["N", columns])],
        {"w": weights},
    )


@dataclass
class SessionServable:
    """A servable straight over onnxruntime."""

    session: Session
    name: str = "linear"
    version: str = "1"
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self):
        self.inputs, self.outputs = self.session.inputs, self.session.outputs

    def run(self, feeds, *, stop=None):
        return self.session.run(feeds, stop=stop)


class Gated:
    """Holds each run of a real servable until the test opens the gate; counts the runs."""

    def __init__(self, inner):
        self.inner = inner
        self.name, self.version, self.labels = inner.name, inner.version, inner.labels
        self.inputs, self.outputs = inner.inputs, inner.outputs
        self.gate = threading.Event()
        self.runs = 0
        self._entered = threading.Condition()

    def run(self, feeds, *, stop=None):
        with self._entered:
            self.runs += 1
            self._entered.notify_all()
        assert self.gate.wait(30)
        return self.inner.run(feeds, stop=stop)

    def wait_for_runs(self, count):
        with self._entered:
            assert self._entered.wait_for(lambda: self.runs >= count, timeout=30)


def linear(**fields: Any) -> SessionServable:
    """The linear model as a servable; `weights` and the servable's fields may be given."""
    weights = fields.pop("weights", WEIGHTS)
    return SessionServable(Session(linear_bytes(weights)), **fields)


def tensor(name: str, array: Any, datatype: str = "FP32") -> Any:
    """A client-side input."""
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def waiting_call(seconds: float = 30.0) -> CallContext:
    """A call whose caller waits that long from now."""
    return CallContext(time.monotonic() + seconds, time.perf_counter_ns(), lambda: True)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers over servables; all are drained at the end."""
    servers = []

    def start(
        *servables: Any, limits: ServingLimits | None = None, plan: Plan | None = None, **kw: Any
    ) -> Server:
        repository = Repository(plan)
        for servable in servables:
            repository.add(servable)
        servers.append(Server(repository, limits=limits, **kw))
        return servers[-1]

    yield start
    for server in servers:
        server.stop(10)


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    """Clients of a server; all are closed at the end."""
    clients = []

    def make(server: Server, **kw: Any) -> Any:
        clients.append(triton.InferenceServerClient(f"127.0.0.1:{server.port}", **kw))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def write_linear_bundle(
    folder: Path, version: str = "1", weights: Any = WEIGHTS, name: str = "linear"
) -> Path:
    """Write a bundle of the linear model and give its path."""
    data = linear_bytes(weights)
    session = Session(data)
    x = np.eye(4, dtype=np.float32)
    path = folder / f"{name}-{version}.bundle"
    write_bundle(
        path,
        BundleSpec(
            description=Description(
                name=name,
                version=version,
                target="ort-x64",
                inputs=session.inputs,
                outputs=session.outputs,
                labels={"y": ("ant", "bee", "cat")},
                model_digest="00" * 32,
            ),
            model=data,
            weights={},
            golden_inputs={"x": x},
            golden_outputs={"y": session.run({"x": x})["y"]},
        ),
    )
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[..., Path]:
    """Write a bundle of the linear model and give its path."""

    return functools.partial(write_linear_bundle, tmp_path)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above, for tests: a mirrored folder is no package to import from."""
    return SimpleNamespace(
        Gated=Gated,
        SessionServable=SessionServable,
        WEIGHTS=WEIGHTS,
        call=waiting_call,
        graph=graph,
        linear=linear,
        tensor=tensor,
        write_bundle=write_linear_bundle,
    )

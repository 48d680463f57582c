"""Our algorithm and our device's work under Flower's own SuperLink and SuperNodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra [flower]")

from tests.faults.fleet import free_port

from triplane.unified_ir import data, nn, ops, optim, train
from triplane.unified_ir.federated.algorithms import Hyper, algorithm, plan_of
from triplane.unified_ir.federated.core.learn import Shard, Work, learn
from triplane.unified_ir.federated.core.reduce import reduce
from triplane.unified_ir.runtime import Plan, SessionOptions

BIN = Path(sys.executable).parent
NAMESPACE = Path(__file__).parents[2] / ".ci" / "namespace"
ROUNDS = 2
READY_S = 60.0
RUN_S = 240.0
STEP_S = 0.1
HYPER = Hyper(inner_steps=1)

APP = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "digits-app"
    version = "0.1.0"
    license = "Apache-2.0"

    [tool.flwr.app]
    publisher = "triplane"

    [tool.flwr.app.components]
    serverapp = "digits_app.server:app"
    clientapp = "digits_app.client:app"

    [tool.flwr.app.config]
    plan = "run.plan"
    digest = ""
    out = "out.npz"
"""
SERVER = """
    from pathlib import Path
    import numpy as np
    from flwr.serverapp import ServerApp
    from triplane.cloud.federation.flower.adapter import Sampling, Triplane, named_arrays, record_of
    from triplane.unified_ir.federated.algorithms import Hyper
    from triplane.unified_ir.federated.core.learn import shared
    from triplane.unified_ir.runtime import Plan

    app = ServerApp()

    @app.main()
    def main(grid, context):
        config = context.run_config
        path = Path(config["plan"])
        plan = Plan.load(path)
        first = {name: plan.state()[name] for name in shared(plan.roles)}
        strategy = Triplane(
            "maml", path.read_bytes(), config["digest"], hyper=Hyper(inner_steps=1),
            sampling=Sampling(steps=2, batch_size=4, support=4, query=4), seed=5,
            fraction_evaluate=0.0,
        )
        result = strategy.start(grid, record_of(first), num_rounds=2)
        np.savez(config["out"], **named_arrays(result.arrays))
"""
CLIENT = """
    import numpy as np
    from triplane.device.flower import client_app
    from triplane.unified_ir import data
    from triplane.unified_ir.federated.core.learn import Shard

    def shard(context):
        rows = np.arange(30) + 30 * int(context.node_config["partition-id"])
        digits = data.digits().select(rows)
        return Shard(
            {"x": digits.x[:20], "y": digits.y[:20]}, {"x": digits.x[20:], "y": digits.y[20:]}
        )

    app = client_app(shard)
"""


class Digits(nn.Cell):
    def __init__(self):
        super().__init__()
        self.head = nn.Dense(64, 10)

    def construct(self, x):
        return self.head(ops.flatten(x))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan of MAML, and the state after two rounds of our own in this process."""
    nn.seed(0)
    trainer = train.Trainer(Digits(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    digits = data.digits()
    trainer.prepare(digits.x, digits.y)
    path = tmp_path_factory.mktemp("plan") / "run.plan"
    plan = plan_of(trainer.export(entries=("loss", "evaluate", "predict")), "maml", HYPER, path)
    slots: dict[str, Any] = {}
    state, row = dict(plan.state), algorithm("maml")
    for number in range(1, ROUNDS + 1):
        updates = []
        for device in ("0", "1"):
            found = learned(path, state, number, device)
            updates.append((found.examples, lambda change=found.change: change))
        state, slots = reduce(
            state, slots, updates, weighting=row.weighting, server=row.server, hyper=HYPER
        )
    return path, plan.digest, state


def learned(path, state, number, device):
    digits = data.digits().select(np.arange(30) + 30 * int(device))
    shard = Shard(
        {"x": digits.x[:20], "y": digits.y[:20]}, {"x": digits.x[20:], "y": digits.y[20:]}
    )
    plan = Plan.load(path, options=SessionOptions(threads=1))
    plan.assign(state)
    work = Work(
        run="", round=number, device=device, seed=5, steps=2, batch_size=4, support=4, query=4
    )
    return learn(plan, work, shard)


@pytest.fixture
def flower(tmp_path):
    """Starts Flower's programs with its telemetry and update check off; none is left at the end."""
    home = tmp_path / "flwr"
    home.mkdir()
    env = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(NAMESPACE),
        "PYTHONWARNINGS": "ignore",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(*command):
        log = (tmp_path / f"{len(started)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=tmp_path, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process

    made: Any = start
    made.home = home
    yield made
    mark = f"FLWR_HOME={home}".encode()
    deadline = time.monotonic() + READY_S
    for process in started:
        process.terminate()
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.poll()
        time.sleep(STEP_S)
    for process in started:
        process.wait(READY_S)
    assert not marked(mark)


def marked(mark):
    """Processes of that environment, wherever they hang in the tree."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def wait_for_port(port, process):
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended while it started"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(STEP_S)
    pytest.fail(f"nothing listens on {port} after {READY_S} s")


@pytest.mark.slow
def test_two_supernodes_give_the_bits_of_our_own_rounds(made, flower, tmp_path):
    path, digest, expected = made
    port = free_port()
    (flower.home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    folder = tmp_path / "app" / "digits_app"
    folder.mkdir(parents=True)
    for name, text in (("__init__", ""), ("server", SERVER), ("client", CLIENT)):
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "app" / "pyproject.toml").write_text(textwrap.dedent(APP))
    link = flower(
        "flower-superlink", "--insecure", "--disable-runtime-dependency-installation",
        "--host", "127.0.0.1", "--port", str(port),
    )  # fmt: skip
    wait_for_port(port, link)
    for number in (0, 1):
        flower(
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}",
            "--port", str(free_port()), "--node-config", f"partition-id={number}",
        )  # fmt: skip
    out = tmp_path / "out.npz"
    config = f"plan='{path}' digest='{digest}' out='{out}'"
    run = flower("flwr", "run", str(tmp_path / "app"), "here", "--stream", "--run-config", config)
    run.wait(RUN_S)
    assert out.is_file(), (tmp_path / "3.log").read_text()[-4000:]
    with np.load(out) as found:
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert set(found) == set(expected)

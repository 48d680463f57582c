"""A cloud and nodes as real processes, a client under load, and what must be true of them."""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import tritonclient.grpc as triton
from tests.quantize import nets

from triplane.edge.serving.pointers import read_pointers
from triplane.edge.supervisor.children import recorded

COMMAND = (sys.executable, "-c", "from triplane.unified_ir.cli import main; main()")
RATE_HZ = 50.0
STEP_S = 0.02
# Connections take theirs from 32768 on; workers of one run begin far from each other.
PORTS = itertools.cycle(random.Random(os.getpid()).sample(range(10000, 32000), 20000))
# By default grpc waits 1 s, then 1.6 times as long, before it looks for a server again.
RECONNECT = {"grpc.min_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 200}


def wait_until(condition, what, timeout_s=60.0):
    """Until the condition holds; AssertionError says what was waited for."""
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {timeout_s} s for {what}"
        threading.Event().wait(STEP_S)
    return found


def verb(*args, check=True, timeout=120):
    """The JSON answer of a verb of the command; the last of several."""
    command = [*COMMAND, *map(str, args), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, (args, done.stdout, done.stderr)
    try:
        return json.loads(done.stdout or "{}")
    except json.JSONDecodeError:
        return json.loads(done.stdout.splitlines()[-1])


def free_port():
    """A port that nobody listens on, outside the range from which connections get theirs."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class Process:
    """A child of ours that can be killed and started again with the same command."""

    def __init__(self, command, log, ready=False):
        self.command, self.log, self.ready = [*map(str, command)], log, ready
        self.said = {}
        self.start()

    def start(self):
        with self.log.open("ab") as err:
            self.child = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE if self.ready else err,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        if self.ready:
            assert self.child.stdout
            line = self.child.stdout.readline()
            assert line, self.log.read_text()[-2000:]
            self.said = json.loads(line)

    def kill(self):
        self.child.kill()
        self._reap()

    def stop(self):
        self.child.terminate()
        self._reap()

    def _reap(self):
        self.child.wait(60)
        if self.child.stdout:
            self.child.stdout.close()


class Node:
    """An enrolled node and its supervisor."""

    def __init__(self, fleet, name, folder):
        self.name, self.home = name, folder / name
        self.port = free_port()
        token = fleet.ask("cloud", "token", "--role", "node", "--name", name, "--label", "site=lab")
        verb(
            "edge", "enrol", token["token"], "--cloud", f"127.0.0.1:{fleet.enrol_port}",
            "--home", self.home, "--port", self.port, "--metrics-port", free_port(),
            "--probation-seconds", "0.3",
        )  # fmt: skip
        self.supervisor = Process(
            [sys.executable, "-m", "triplane.edge.supervisor", self.home], folder / f"{name}.log"
        )

    def pid(self, child):
        record = recorded(child, self.home / "run")
        return record.pid if record else None

    def kill(self, child):
        """Kill -9 one of the node's processes, whatever it is doing."""
        if child == "supervisor":
            self.supervisor.kill()
            self.supervisor.start()
            return
        pid = self.pid(child)
        if pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def committed(self, model="lenet"):
        pointer = read_pointers(self.home / "models")[0].get(model)
        return pointer.version if pointer else None

    def stop(self):
        self.supervisor.stop()
        for child in ("serving", "agent"):  # whatever a failed test left
            pid = self.pid(child)
            if pid and self.supervisor.child.returncode != 0:
                self.kill(child)


class Fleet:
    """One cloud and its nodes."""

    def __init__(self, folder):
        self.folder = folder
        self.home, self.keys = folder / "cloud", folder / "keys"
        self.nodes = []
        verb("cloud", "init", "--home", self.home, "--offline-keys", self.keys)
        options = {
            "home": str(self.home), "host": "127.0.0.1", "port": free_port(),
            "enrol_port": free_port(), "dashboard_port": free_port(),
        }  # fmt: skip
        self.cloud = Process(
            [sys.executable, "-m", "triplane.cloud", json.dumps(options)],
            folder / "cloud.log",
            ready=True,
        )
        self.enrol_port = self.cloud.said["enrol_port"]

    def ask(self, *args, **options):
        return verb(*args, "--identity", self.home / "operator", **options)

    def add_node(self, name):
        node = Node(self, name, self.folder)
        self.nodes.append(node)
        return node

    def publish(self, model_file, name="lenet"):
        """Push a model file, sign its bundle; returns the version."""
        pushed = self.ask("registry", "push", model_file, "--name", name)
        reference = f"{name}@{pushed['version']}"
        self.ask("sign", reference, "--target", "ort-x64", "--keys", self.keys)
        return pushed["version"]

    def deploy(self, reference, *options, check=True):
        return self.ask("deploy", reference, "--to", "site=lab", *options, check=check)

    def restart_cloud(self):
        self.cloud.kill()
        self.cloud.start()

    def stop(self):
        with ExitStack() as stack:
            stack.callback(self.cloud.stop)
            for node in self.nodes:
                stack.callback(node.stop)


@contextmanager
def fleet(folder):
    made = Fleet(folder)
    try:
        yield made
    finally:
        made.stop()


def write_model(path, seed):
    """A model file of a small network; every seed has other weights."""
    nets.module_of(nets.shaken(nets.LeNet(), seed), nets.IMAGE).save(path)
    return path


class Load:
    """Calls at a fixed rate, whatever becomes of them; no call is tried again."""

    def __init__(self, port, model, x):
        self._client = triton.InferenceServerClient(
            f"127.0.0.1:{port}", channel_args=[*RECONNECT.items()]
        )
        self._model = model
        self._tensor = triton.InferInput("x", x.shape, "FP32")
        self._tensor.set_data_from_numpy(x)
        self._stop = threading.Event()
        self._lock = threading.Condition()
        self.sent = self.answered = 0
        self.errors = []
        self._thread = threading.Thread(target=self._send)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._lock.wait_for(lambda: self.answered + len(self.errors) == self.sent, 30)
        self._client.close()

    def _send(self):
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += 1 / RATE_HZ
            self.sent += 1
            self._client.async_infer(self._model, [self._tensor], self._done, client_timeout=10)

    def _done(self, result, error):
        with self._lock:
            if error is None:
                self.answered += 1
            else:
                self.errors.append((time.monotonic(), str(error)))
            self._lock.notify_all()

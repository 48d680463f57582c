"""A cloud and nodes as real processes, a client under load, and what must be true of them."""

import functools
import itertools
import json
import os
import random
import shutil
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
from triplane.edge.supervisor.children import adopt, read_record

COMMAND = (sys.executable, "-c", "from triplane.unified_ir.cli import main; main()")
RATE_HZ = 50.0
STEP_S = 0.02
# Connections take theirs from 32768 on; workers of one run begin far from each other.
PORTS = itertools.cycle(random.Random(os.getpid()).sample(range(10000, 32000), 20000))
# By default grpc waits 1 s, then 1.6 times as long, before it looks for a server again. A new
# channel would also share the connection of one just closed, and with it its last failure.
RECONNECT = {
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 200,
    "grpc.use_local_subchannel_pool": 1,
}


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
        record = read_record(child, self.home / "run")
        return record.pid if record else None

    def kill(self, child):
        """Kill -9 one of the node's processes, whatever it is doing."""
        if child == "supervisor":
            self.supervisor.kill()
            self.supervisor.start()
            return
        process = adopt(child, self.home / "run")
        if process:
            process.signal(signal.SIGKILL)
            process.wait(60)
            process.close()

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

    def back_up(self):
        """Copy the home of the cloud, which is down meanwhile."""
        self.cloud.stop()
        shutil.rmtree(self.folder / "backup", ignore_errors=True)
        shutil.copytree(self.home, self.folder / "backup", symlinks=True)
        self.cloud.start()

    def restore(self):
        """Give the cloud the home that was copied; what it did since then is lost to it."""
        self.cloud.stop()
        shutil.rmtree(self.home)
        shutil.copytree(self.folder / "backup", self.home, symlinks=True)
        self.cloud.start()

    def warned_of_nodes_ahead(self):
        """What the cloud warns of, once it noticed that nodes have seen newer metadata."""

        def warned():
            told = self.ask("cloud", "status")["warnings"]
            return told if any("--role release" in text for text in told) else None

        return wait_until(warned, "the cloud to say that nodes are ahead", 120)

    def go_past(self, warnings):
        """Follow the advice of the warnings: a release that is newer than what nodes have seen."""
        (past,) = {t.partition("--past ")[2].split()[0] for t in warnings if "--role release" in t}
        self.ask("cloud", "keys", "renew", "--role", "release", "--past", past, "--keys", self.keys)

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
    """Calls at a fixed rate, whatever becomes of them; no call is tried again.

    errors: (seconds when it was sent, seconds when it failed, message) of each call that failed.
    served_s: when each call was sent that was answered.
    """

    def __init__(self, port, model, x):
        self._client = triton.InferenceServerClient(
            f"127.0.0.1:{port}", channel_args=[*RECONNECT.items()]
        )
        self._model = model
        self._tensor = triton.InferInput("x", x.shape, "FP32")
        self._tensor.set_data_from_numpy(x)
        self._stop = threading.Event()
        self._lock = threading.Condition()
        self.sent = 0
        self.errors, self.served_s = [], []
        self._thread = threading.Thread(target=self._send)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._lock.wait_for(lambda: self.answered + len(self.errors) == self.sent, 90)
        self._client.close()

    def _send(self):
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += 1 / RATE_HZ
            self.sent += 1
            done = functools.partial(self._done, time.monotonic())
            self._client.async_infer(self._model, [self._tensor], done, client_timeout=60)

    def _done(self, sent_s, result, error):
        with self._lock:
            if error is None:
                self.served_s.append(sent_s)
            else:
                self.errors.append((sent_s, time.monotonic(), str(error)))
            self._lock.notify_all()

    @property
    def answered(self):
        return len(self.served_s)

    def unexplained(self, outages):
        """Failures that no outage explains.

        outages: (seconds before, seconds after) each moment when the server was ended. An outage
        explains the failures after it, until a call was answered that was sent after it.
        """
        return [
            failure
            for failure in self.errors
            if not any(
                began_s <= failure[1]
                and not any(ended_s < sent_s < failure[0] for sent_s in self.served_s)
                for began_s, ended_s in outages
            )
        ]

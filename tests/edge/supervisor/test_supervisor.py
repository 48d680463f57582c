"""`triplane edge up` as a process: what it says, what it keeps, what it takes over."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import tritonclient.grpc as client

from triplane.cloud.home import initialize
from triplane.cloud.identity.authority import Authority
from triplane.edge.home import NodeHome, NodeSettings
from triplane.edge.serving.wire import WIRE_NAME
from triplane.edge.supervisor.children import is_alive, read_record
from triplane.proto.errors import Corrupt
from triplane.proto.identity import certificate_pem, certificate_request, key_pem, new_key
from triplane.proto.signed.trust import bootstrap
from triplane.unified_ir.cli.shell import EXIT_CODES
from triplane.unified_ir.runtime import available_providers

pytestmark = pytest.mark.slow
COMMAND = (sys.executable, "-c", "from triplane.unified_ir.cli import main; main()")
WAIT_S = 60
# Serving drains for an hour and waits as long for a caller: only a second signal ends it before.
PATIENT = """
import json, sys
from pathlib import Path
from triplane.edge.supervisor import supervisor
from triplane.edge.supervisor.__main__ import main
supervisor.DRAIN_S = supervisor.LIMIT_S = 3600.0
command = supervisor.Supervisor._serving_command
def patient(self):
    *start, options = command(self)
    limits = {"receive_s": 3600, "call_s": 3600}
    return [*start, json.dumps(json.loads(options) | {"limits": limits})]
supervisor.Supervisor._serving_command = patient
main(Path(sys.argv[1]))
"""
# The signal comes before the first look at what an earlier supervisor left.
AT_ONCE = """
import os, signal, sys
from pathlib import Path
from triplane.edge.supervisor.__main__ import main
from triplane.edge.supervisor.supervisor import Supervisor
Supervisor._look = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
main(Path(sys.argv[1]))
"""

# The first look that finds serving ready meets a fault that nobody foresaw.
FAULTY = """
import sys
from pathlib import Path
from triplane.edge.supervisor.__main__ import main
from triplane.edge.supervisor.ready import said_in
from triplane.edge.supervisor.supervisor import Supervisor
def listen(self):
    if said_in(self._says):
        raise RuntimeError("unforeseen")
Supervisor._listen = listen
main(Path(sys.argv[1]))
"""
# The disk is full, or no process can be made, at the first start of each child.
FULL_AT_FIRST = """
import errno, os, sys
from pathlib import Path
from triplane.edge.supervisor import supervisor
from triplane.edge.supervisor.__main__ import main
start, failed = supervisor.start, set()
def fail_once(name, *args, **options):
    if name in failed:
        return start(name, *args, **options)
    failed.add(name)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
supervisor.start = fail_once
main(Path(sys.argv[1]))
"""


@pytest.fixture
def node(tmp_path):
    """A node of a cloud that is away, with any free port."""
    cloud = initialize(tmp_path / "cloud", offline_keys=tmp_path / "keys").home
    made = NodeHome(tmp_path / "node")
    made.make()
    authority, key = Authority.load(cloud.authority), new_key()
    issued = authority.issue(certificate_request(key), "camera-1", time.time())
    made.identity.save(
        authority=authority.pem,
        certificate=certificate_pem(issued),
        key=key_pem(key),
        cloud="127.0.0.1:1",
    )
    bootstrap(made.trust, lambda _: (cloud.metadata / "1.root.json").read_bytes())
    made.save_settings(NodeSettings(port=0, metrics_port=0))
    return made


@contextmanager
def up(node, *options, command=None):
    """The verb as a process, ended by SIGTERM."""
    process = subprocess.Popen(
        command or [*COMMAND, "edge", "up", "--home", str(node.path), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)


def line_of(stream):
    """The next line, or a failure when none comes."""
    ready, _, _ = select.select([stream], [], [], WAIT_S)
    assert ready, "nothing was said in time"
    return stream.readline()


def answers(port):
    with client.InferenceServerClient(f"127.0.0.1:{port}") as asked:
        return asked.is_server_live(client_timeout=WAIT_S)


def test_the_ready_line_names_the_port_that_was_taken_and_it_is_kept(node):
    with up(node, "--json") as process:
        told = json.loads(line_of(process.stdout))
        assert told["name"] == "camera-1"
        assert told["port"] > 0
        assert answers(told["port"])
        kept = node.settings
        assert (kept.port, kept.metrics_port) == (told["port"], told["metrics_port"])
    assert process.returncode == 0
    with up(node) as process:
        said = line_of(process.stdout)
        assert f"camera-1 of 127.0.0.1:1 answers calls on 127.0.0.1:{told['port']} " in said
        assert answers(told["port"])


def test_a_killed_up_is_followed_by_one_that_says_the_same(node):
    with up(node, "--json") as first:
        said = line_of(first.stdout)
        serving = read_record("serving", node.run)
        first.kill()
        first.wait(WAIT_S)
        assert is_alive("serving", node.run)
        with up(node, "--json") as second:
            assert line_of(second.stdout) == said
            assert read_record("serving", node.run) == serving
    assert not is_alive("serving", node.run)


def test_a_port_that_is_taken_is_named_and_nothing_is_called_ready(node):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node.save_settings(NodeSettings(port=port, metrics_port=0))
        with up(node) as process:
            while "ended" not in (told := line_of(process.stderr)):
                assert "answers calls" not in told
    assert f"127.0.0.1:{port}" in told
    assert process.stdout.closed


@pytest.mark.skipif(
    "CUDAExecutionProvider" in available_providers(), reason="onnxruntime here has CUDA"
)
def test_the_device_of_the_node_reaches_serving_and_its_refusal_is_shown(node):
    node.save_settings(NodeSettings(port=0, metrics_port=0, device="cuda"))
    with up(node) as process:
        while "ended" not in (told := line_of(process.stderr)):
            assert "answers calls" not in told
    assert "device 'cuda' needs CUDAExecutionProvider" in told
    assert "pip uninstall onnxruntime && pip install onnxruntime-gpu" in told


def test_a_second_signal_cuts_the_drain_short(node):
    with up(node, command=[sys.executable, "-c", PATIENT, str(node.path)]) as process:
        line_of(process.stdout)
        stalled = threading.Event()

        def nothing():
            stalled.wait(2 * WAIT_S)
            yield b""

        with grpc.insecure_channel(f"127.0.0.1:{node.settings.port}") as channel:
            grpc.channel_ready_future(channel).result(WAIT_S)
            ask: Any = channel.stream_unary(f"/{WIRE_NAME}/ModelInfer")
            call = ask.future(nothing())
            try:
                process.send_signal(signal.SIGTERM)
                log = node.logs / "serving.log"
                until_s = time.monotonic() + WAIT_S
                while "draining" not in log.read_text():
                    assert time.monotonic() < until_s, log.read_text()
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_S) == 0
            finally:
                stalled.set()
                call.cancel()
    assert not is_alive("serving", node.run)
    assert not is_alive("agent", node.run)


def test_a_signal_also_stops_children_that_were_not_taken_over_yet(node):
    with up(node) as first:
        line_of(first.stdout)
        first.kill()
        first.wait(WAIT_S)
    assert is_alive("serving", node.run)
    with up(node, command=[sys.executable, "-c", AT_ONCE, str(node.path)]) as second:
        assert second.wait(WAIT_S) == 0
    assert not is_alive("serving", node.run)
    assert not is_alive("agent", node.run)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_ready_line_that_nobody_can_read_does_not_end_the_node(node, options):
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [*COMMAND, "edge", "up", "--home", str(node.path), *options],
        stdout=writer, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(writer)
        while "not written" not in (said := line_of(process.stderr)):
            assert said, "it ended without a word"
        assert answers(node.settings.port)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert not is_alive("serving", node.run)
    assert not is_alive("agent", node.run)


def test_a_fault_of_the_supervisor_leaves_no_child_behind(node):
    with up(node, command=[sys.executable, "-c", FAULTY, str(node.path)]) as process:
        assert process.wait(WAIT_S) == 1
    assert read_record("serving", node.run)
    assert not is_alive("serving", node.run)
    assert not is_alive("agent", node.run)


def test_a_damaged_certificate_is_said_before_anything_starts(node):
    certificate = node.identity.path / "cert.pem"
    certificate.write_bytes(certificate.read_bytes()[:200])
    with up(node, "--json") as process:
        assert process.wait(WAIT_S) == EXIT_CODES[Corrupt]
    assert read_record("serving", node.run) is None


def test_a_child_that_cannot_be_started_now_is_started_later(node):
    with up(node, command=[sys.executable, "-c", FULL_AT_FIRST, str(node.path)]) as process:
        line_of(process.stdout)
        assert answers(node.settings.port)
    assert process.returncode == 0
    assert not is_alive("serving", node.run)

"""Training on many hosts: real processes, joined over loopback."""

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir import data
from triplane.unified_ir.cli import watching
from triplane.unified_ir.cli.shell import EXIT_CODES
from triplane.unified_ir.cli.watching import failure, lost_processes
from triplane.unified_ir.engines.xla.hosts import Hosts, ProcessLost, first_node, hosts_of
from triplane.unified_ir.engines.xla.processes import neighbours
from triplane.unified_ir.train.snapshot import read

SCRIPTS = Path(__file__).parent
ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 240
"""Of a wait that ends as soon as its event is there."""
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "TRIPLANE_X": ""}
NET = """
from triplane.unified_ir import nn, ops

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Dense(64, 16)
        self.head = nn.Dense(16, 10)
    def construct(self, x):
        return self.head(ops.relu(self.hidden(ops.flatten(x))))
"""


def address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def started(*command, cwd=None, **env):
    return subprocess.Popen(
        list(map(str, command)), cwd=cwd, env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process):
    """The exit code, and what the process printed."""
    try:
        printed, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, printed, said


def script(name, *arguments, **env):
    own = {"PYTHONPATH": str(ROOT), **env}
    return started(sys.executable, SCRIPTS / f"{name}.py", *arguments, **own)


def all_held(*processes):
    for code, printed, said in map(ended, processes):
        assert (code, printed.splitlines()[-1:]) == (0, ["all held"]), said


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["whole", "split", "bucketed", "measured"], marks=pytest.mark.long),
        pytest.param(["planned"], marks=pytest.mark.deep),
    ],
)
def test_two_processes_give_the_bits_of_one_with_two_devices(tmp_path, layouts):
    at, training = address(), ("hosts_training", ",".join(layouts))
    all_held(
        script(*training, tmp_path / "one", "one", JAX_NUM_CPU_DEVICES="2"),
        script(*training, tmp_path / "two", "1/2", at),
        script(*training, tmp_path / "two", "2/2", at),
    )
    for layout in layouts:
        one = np.load(tmp_path / "one" / layout / "one" / "end.npz")
        assert len(one["loss"]) >= 24
        assert one["loss"][-1] < one["loss"][0]
        for which in ("1of2", "2of2"):
            both = np.load(tmp_path / "two" / layout / which / "end.npz")
            for name in one:
                np.testing.assert_array_equal(both[name], one[name], err_msg=f"{layout} {name}")
        folder = tmp_path / "two" / layout
        assert sorted(p.name for p in folder.iterdir()) == ["1of2", "2of2", "run"]
        assert [p.parent.name for p in folder.glob("*/history.json")] == ["1of2"]
        # What the first process wrote of state that both hold in parts is whole.
        written = read(max((folder / "run").iterdir())).state
        for name, array in written.items():
            np.testing.assert_array_equal(array, one[name], err_msg=f"{layout} {name}")


@pytest.mark.deep
def test_sums_of_integers_over_two_processes_are_exact():
    at = address()
    all_held(*(script("hosts_soak", f"{i}/2", at, 200) for i in (1, 2)))


def command(folder, *options, epochs=200):
    return [
        Path(sys.executable).with_name("triplane"), "train", "net.py:Net", "--data", "few.npz",
        "--validation", "few.npz", "--epochs", epochs, "--batch-size", 16, "--optimizer", "sgd",
        "--lr", 0.05, "--engine", "xla", "--checkpoint", folder, "--out", f"{folder}.tpm",
        "--history", f"{folder}.json", *options,
    ]  # fmt: skip


def pair(cwd, folder, epochs=200):
    """Two processes of one run, once its first checkpoint is there."""
    options = ("--coordinator", address(), "--heartbeat", 4)
    both = [
        started(*command(folder, *options, "--process", f"{i}/2", epochs=epochs), cwd=cwd)
        for i in (1, 2)
    ]
    before, limit = sorted((cwd / folder).glob("*.tpc")), time.monotonic() + LIMIT_S
    while sorted((cwd / folder).glob("*.tpc")) == before:
        assert all(p.poll() is None for p in both), [ended(p) for p in both]
        assert time.monotonic() < limit
        time.sleep(0.01)
    return both


def final(cwd, folder):
    newest = max((cwd / folder).glob("*.tpc"))
    return json.loads((cwd / f"{folder}.json").read_text()), read(newest).state


def files(folder):
    held = np.load(data.__path__[0] + "/digits.npz")
    np.savez(folder / "few.npz", x=held["x"][:64] / np.float32(16), y=held["y"][:64])
    (folder / "net.py").write_text(NET)


@pytest.mark.long
def test_a_coordinator_that_falls_silent_is_noticed(tmp_path):
    files(tmp_path)
    first, second = pair(tmp_path, "run", epochs=100_000)
    child = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text())
    os.kill(child, signal.SIGSTOP)  # a host without power: its connections stay open
    try:
        code, _, said = ended(second)
    finally:
        os.kill(child, signal.SIGKILL)
    assert code == 7
    assert "triplane: process 1 of 2, the coordinator, was lost (no sign of life for 4 s" in said
    code, _, said = ended(first)
    assert code == 7
    assert "this process, 1 of 2, was ended by SIGKILL" in said


@pytest.mark.long
def test_a_run_that_lost_a_process_goes_on_without_it(tmp_path):
    files(tmp_path)
    alone = started(*command("alone"), cwd=tmp_path)

    # A request to end reaches all processes, which end after the same step.
    first, second = pair(tmp_path, "both")
    second.send_signal(signal.SIGTERM)
    for code, printed, said in map(ended, (first, second)):
        assert (code, printed) == (130, ""), said
        assert "the same command continues from both" in said
    assert not (tmp_path / "both.tpm").exists()

    # A process that is killed ends the run; its checkpoint stands.
    first, second = pair(tmp_path, "both")
    second.kill()
    code, printed, said = ended(first)
    assert (code, printed) == (7, ""), said
    ended(second)
    last = said.splitlines()[-1]
    newest = max((tmp_path / "both").glob("*.tpc"))
    assert last.startswith("triplane: process 2 of 2 was lost")
    assert f"both/{newest.name} stands" in last
    way = last.rpartition("to go on without it: ")[2].split()
    assert "--coordinator" not in way
    assert "--process" not in way

    # As the message says it, with one process.
    code, printed, said = ended(started(command("")[0], *way[1:], cwd=tmp_path))
    assert code == 0, said
    assert ended(alone)[0] == 0
    rows, state = final(tmp_path, "both")
    wanted_rows, wanted = final(tmp_path, "alone")
    assert len(rows) == 200
    for row, wanted_row in zip(rows, wanted_rows, strict=True):
        assert row == pytest.approx(wanted_row, rel=1e-3, abs=1e-3)
    for name, array in wanted.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("options", "env", "wanted"),
    [
        ((None, None), {}, None),
        ((None, None), SLURM, None),
        (("n1:9300", "2/3"), SLURM, ("n1:9300", 2, 3, "--coordinator and --process")),
        (("n1:9300", None), SLURM, ("n1:9300", 3, 4, "--coordinator and SLURM")),
        (
            ("auto", None),
            SLURM | {"SLURM_STEP_NODELIST": "n[007-9],m"},
            ("n007:61517", 3, 4, "SLURM"),
        ),
        (
            (None, None),
            {
                "TRIPLANE_COORDINATOR": "train-0.train:9300",
                "JOB_COMPLETION_INDEX": "0",
                "TRIPLANE_PROCESSES": "4",
            },
            ("train-0.train:9300", 1, 4, "TRIPLANE_COORDINATOR and the Kubernetes Job"),
        ),
    ],
)
def test_a_process_is_known_from_options_or_the_environment(options, env, wanted):
    coordinator, process = options
    hosts = hosts_of(coordinator, process, env)
    if wanted is None:
        assert hosts is None
    else:
        assert hosts is not None
        assert (hosts.coordinator, hosts.process, hosts.count, hosts.source) == wanted


@pytest.mark.parametrize(
    ("options", "env", "why"),
    [
        (("n1", "1/2"), {}, "HOST:PORT of the first process.*'n1' from --coordinator"),
        (("n1:70000", "1/2"), {}, "HOST:PORT"),
        (("n1:9300 x", "1/2"), {}, "HOST:PORT"),
        (("n1:9300", "0/2"), {}, "1/N to N/N.*got 0/2"),
        (("n1:9300", "3/2"), {}, "1/N to N/N.*got 3/2"),
        (("n1:9300", "two"), {}, "the first of four being 1/4, got 'two'"),
        (("n1:9300", None), {}, "which process is this one.*--process I/N"),
        ((None, "1/2"), {}, "pass --coordinator HOST:PORT"),
        (("auto", "1/2"), {}, "pass --coordinator HOST:PORT"),
        (("auto", None), SLURM | {"SLURM_STEP_NODELIST": "]["}, "names no host"),
        (("n1:9300", None), SLURM | {"SLURM_NTASKS": "4x"}, "SLURM_NTASKS in the .*'4x'"),
        (("n1:9300", None), {"JOB_COMPLETION_INDEX": "1"}, "TRIPLANE_PROCESSES in the .*''"),
    ],
)
def test_what_names_no_process_is_refused(options, env, why):
    coordinator, process = options
    with pytest.raises(InvalidInput, match=why):
        hosts_of(coordinator, process, env)


@pytest.mark.parametrize(
    "wrong",
    [
        {"coordinator": None},
        {"process": "1"},
        {"count": 2.0},
        {"heartbeat_s": True},
        {"meet_within_s": 1.5},
    ],
)
def test_hosts_of_other_types_are_refused(wrong):
    with pytest.raises(InvalidInput, match="whole numbers, got"):
        Hosts(**{"coordinator": "n1:9300", "process": 1, "count": 2, **wrong})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3,5-9]", "n3"),
        ("rack[1-2]n[08-12]x,m", "rack1n08x"),
        ("[4-5].cluster", "4.cluster"),
        (f"n[{','.join(map(str, range(1000, 3000, 2)))}]", "n1000"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


def test_the_first_process_listens_on_loopback_only_where_all_are_there():
    at = {a: Hosts(coordinator=a, process=1, count=2).bind_address for a in
          ("127.0.0.1:9", "localhost:9", "[::1]:9", "node:9")}  # fmt: skip
    assert at == {
        "127.0.0.1:9": "127.0.0.1:9",
        "localhost:9": "localhost:9",
        "[::1]:9": "[::1]:9",
        "node:9": "[::]:9",
    }


def test_processes_that_never_met_lose_nothing(tmp_path):
    hosts = Hosts(coordinator="n1:9300", process=2, count=2)
    said = "DEADLINE_EXCEEDED\n\nRPC: /xla.coordination.CoordinationService/RegisterTask"
    error = failure(hosts, -signal.SIGABRT, said, tmp_path)
    assert type(error) is Unavailable
    assert "did not all meet within 300 s; is each of 1/2 to 2/2 started" in str(error)


@pytest.mark.parametrize(
    ("process", "is_there", "said"),
    [
        (1, False, "for the others; start each of 2/3 to 3/3"),
        (2, False, "process 1 does not answer at 127.0.0.1:"),
        (2, True, "process 1 answers, so another one is not there"),
    ],
)
def test_who_waits_says_for_what(monkeypatch, process, is_there, said):
    monkeypatch.setattr(watching, "WAITING_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as first:
        at = f"127.0.0.1:{first.getsockname()[1]}"
        if not is_there:
            first.close()
        hosts = Hosts(coordinator=at, process=process, count=3, meet_within_s=77)
        lines: SimpleQueue[str] = SimpleQueue()
        with watching.waiting(hosts, lines.put):
            line = lines.get(timeout=LIMIT_S)
    assert line.startswith(f"process {process} of 3 has waited 0 of 77 s (--meet-within) for")
    assert said in line


def test_no_line_says_of_more_than_all_the_time_that_it_was_waited():
    """JAX takes some seconds to give up."""
    hosts = Hosts(coordinator="h:1", process=1, count=3, meet_within_s=14)
    assert "has waited 10 of 14 s" in watching._waited(hosts, 10)
    assert "has waited all 14 s" in watching._waited(hosts, 20)


@pytest.mark.long
def test_a_process_that_stays_alone_ends_when_its_wait_does(tmp_path):
    files(tmp_path)
    options = ("--coordinator", address(), "--process", "2/2", "--meet-within", 1)
    code, _, said = ended(started(*command("run", *options), cwd=tmp_path))
    assert code == EXIT_CODES[Unavailable]
    assert "the processes did not all meet within 1 s; is each of 1/2 to 2/2 started" in said


@pytest.mark.parametrize(
    ("source", "lost", "way"),
    [
        ("--coordinator and --process", "2", "--coordinator n1:9300 --process I/3 -x"),
        ("--coordinator and --process", "0", "--coordinator HOST:PORT --process I/3 -x"),
        ("--coordinator and --process", "0\n1", "--coordinator HOST:PORT --process I/2 -x"),
        ("--coordinator and --process", "0\n1\n2", "to go on without it: triplane train a b -x"),
        ("SLURM", "2", "run the same command as 3 processes"),
        # Without options the environment would make it one of four again.
        ("SLURM", "0\n1\n2", "run the same command as 1 process"),
    ],
)
def test_the_message_says_how_to_go_on(monkeypatch, source, lost, way):
    words = ["triplane", "train", "a", "b", "--coordinator", "n1:9300", "--process=4/4", "-x"]
    if way.endswith("b -x"):  # what only several processes take
        words += ["--heartbeat", "4", "--meet-within=20"]
    monkeypatch.setattr(sys, "argv", words)
    hosts = Hosts(coordinator="n1:9300", process=4, count=4, source=source)
    said = f"(stopped sending heartbeats):\n{lost}\nThe tasks"
    error = failure(hosts, -signal.SIGABRT, said, None)
    assert type(error) is ProcessLost
    assert str(error).endswith(way)
    assert "there is no checkpoint, which --checkpoint FOLDER would write" in str(error)


@pytest.mark.parametrize("option", ["--buckets=auto", "--shard=*.weight=data,-"])
def test_the_command_for_one_process_has_the_mesh_that_an_option_needs(monkeypatch, option):
    """Several processes have one by default: all of their devices."""
    words = ["triplane", "train", "a", option, "--coordinator", "n1:9300", "--process=2/2"]
    hosts = Hosts(coordinator="n1:9300", process=2, count=2, source="--coordinator and --process")
    for mesh in ([], ["--mesh", "data=2"]):
        monkeypatch.setattr(sys, "argv", words + mesh)
        said = str(failure(hosts, -signal.SIGABRT, "(stopped sending heartbeats):\n0\n", None))
        command = shlex.join(["triplane", "train", "a", option, *mesh])
        note = (
            " (--mesh must fit the devices left)"
            if mesh
            else " --mesh data=N (N devices of this machine)"
        )
        assert said.endswith(f"to go on without it: {command}{note}")


def test_torn_lines_of_gloo_are_not_shown():
    torn = (
        b"[Gloo] Rank [Gloo] Rank 3 is connected to 3 peer ranks.\n"
        b"2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
        b"epoch 1/1\n"
    )
    shown = io.BytesIO()
    watching._relay(io.BytesIO(torn), shown, deque())
    assert shown.getvalue() == b"epoch 1/1\n"


def test_a_number_that_is_taken_twice_is_named():
    hosts = Hosts(coordinator="n1:9300", process=1, count=2)
    said = "ABORTED: 1 unexpectedly tried to connect with a different incarnation. It has likely"
    error = str(failure(hosts, -signal.SIGABRT, said, None))
    assert error.startswith("process 2 of 2 was started a second time")
    assert "without it" not in error


def test_a_damaged_checkpoint_does_not_hide_the_loss(tmp_path):
    (tmp_path / f"step-{7:012d}.tpc").write_bytes(b"x")
    hosts = Hosts(coordinator="n1:9300", process=1, count=2)
    error = failure(hosts, -signal.SIGABRT, "Task 1 heartbeat timeout", tmp_path)
    assert type(error) is ProcessLost
    assert "process 2 of 2 was lost" in str(error)
    assert "no checkpoint can be read (all 1 checkpoints in" in str(error)


@pytest.mark.long
def test_a_port_that_is_taken_is_refused(tmp_path):
    files(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ("--coordinator", at, "--process", "1/2")
        code, _, said = ended(started(*command("run", *options), cwd=tmp_path))
    assert code == 4
    assert f"cannot listen on port {at.partition(':')[2]} of this machine" in said


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        ("tasks are unhealthy (stopped sending heartbeats):\n1\n3\nThe tasks have crashed", [2, 4]),
        ("UNAVAILABLE: Task 1 heartbeat timeout. This", [2]),
        ("Shutdown barrier has failed.\nBarrier result. The first task at the barrier: 2. So", [3]),
        ("Failed to send RPC to coordination service. Either the leader task was preempted", [1]),
        ("Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/Heartbeat", [1]),
        ("Segmentation fault", []),
    ],
)
def test_the_words_of_jax_name_the_lost_processes(said, numbers):
    assert lost_processes(said) == numbers


@pytest.mark.parametrize(
    ("machines", "devices", "count"),
    [
        ("aabb", 1, 2),  # two processes on each of two machines
        ("ab", 4, 4),
        ("abab", 2, 2),  # dealt out in turn: only those of a process are neighbours
        ("aaabb", 2, 2),  # 6 and 4
        ("a", 8, 8),
    ],
)
def test_devices_of_a_host_are_counted_over_the_processes_on_it(machines, devices, count):
    each = [SimpleNamespace(process_index=p) for p in range(len(machines)) for _ in range(devices)]
    assert neighbours(each, dict(enumerate(machines))) == count

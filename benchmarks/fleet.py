"""Nodes by the hundred over real streams: how long a rollout takes them, what memory a node costs.

    python benchmarks/fleet.py 10 100 1000
    python benchmarks/fleet.py --repeat 3 --record     # 10 to 1,000, into docs/evidence/scale.md
    python benchmarks/fleet.py 1000 --keep runs.jsonl  # one by one, then:
    python benchmarks/fleet.py --repeat 0 --keep runs.jsonl --record
    python benchmarks/fleet.py 1000 --starved 17 --keep runs.jsonl

A cloud process, certificates, streams and a database as in life; only the work of a node is left
out (`fleet_nodes.py`). 30 percent of the nodes are away when the rollout begins and come after the
others have committed. At the end the cloud is killed with -9 and started again under all of them.
With `--starved` cloud and nodes get a small part of one core. One line of JSON per run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fleet_cloud import CloudProcess, let_in, released
from fleet_nodes import is_away

from triplane.cloud.cli.connection import Calls, calls
from triplane.cloud.home import Home
from triplane.proto import fleet_pb2 as pb
from triplane.unified_ir.files.chart import line_chart, stack

SIZES = (10, 30, 100, 300, 1000)
PROCESSES = 4
DEADLINE_S = 240.0
IDLE_S = 20.0
"""Two beats of every stream."""
SEED = 2026
EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence"
COLUMNS = {
    "connect_s": "all that are there connected and reported",
    "deploy_s": "they committed",
    "late_s": "those that were away came and committed",
    "back_s": "all reported again after kill -9",
}
"""Seconds of each stage, by field."""


class Nodes:
    """Client processes that live as the nodes between them."""

    def __init__(self, folder: Path, address: str, size: int, seed: int) -> None:
        bounds = [size * i // PROCESSES for i in range(PROCESSES + 1)]
        script = Path(__file__).with_name("fleet_nodes.py")
        self._children = [
            subprocess.Popen(
                [sys.executable, script, folder, address, str(a), str(b), str(seed)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for a, b in itertools.pairwise(bounds)
            if b > a
        ]  # fmt: skip

    def go_on(self) -> None:
        """Have every process begin its next stage."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()

    def wait(self, word: str) -> float:
        """Seconds until every process has said the word."""
        start_s = time.monotonic()
        late = threading.Timer(DEADLINE_S, self.kill)
        late.start()
        try:
            for child in self._children:
                assert child.stdout is not None
                heard = child.stdout.readline().strip()
                if heard != word:
                    raise RuntimeError(f"no {word!r} within {DEADLINE_S} s, heard {heard!r}")
        finally:
            late.cancel()
        return time.monotonic() - start_s

    def kill(self) -> None:
        """End them."""
        for child in self._children:
            child.kill()

    def end(self) -> None:
        """Wait until they ended by themselves."""
        for child in self._children:
            if child.wait(60):
                raise RuntimeError(f"a client process ended with {child.returncode}")


@contextlib.contextmanager
def nodes(folder: Path, address: str, size: int, seed: int) -> Iterator[Nodes]:
    """Processes that are gone after the block, however it ends."""
    made = Nodes(folder, address, size, seed)
    try:
        yield made
        made.end()
    finally:
        made.kill()


def deploy(people: Calls) -> pb.Rollout:
    """To every node, in one wave; those that are away have time."""
    request = pb.DeployRequest(
        reference="line@1", selector="all", key=b"1", role="release", node_deadline_s=DEADLINE_S
    )
    return people.fleet.Deploy(request)


def idle_share(cloud: CloudProcess, seconds: float) -> float:
    """Of one core, what nodes cost that have nothing to say but that they live."""
    before_s = cloud.cpu_s()
    time.sleep(seconds)
    return (cloud.cpu_s() - before_s) / seconds


def measured(
    cloud: CloudProcess, home: Home, folder: Path, size: int, seed: int, idle_s: float
) -> dict[str, Any]:
    """One size, from the first connection to the last."""
    with nodes(folder, cloud.address, size, seed) as crowd, calls(home.operator) as people:
        crowd.wait("ready")
        bytes_before, cpu_before = cloud.resident_bytes(), cloud.cpu_s()
        crowd.go_on()
        found: dict[str, Any] = {"nodes": size, "away": sum(map(is_away, range(size)))}
        found["connect_s"] = crowd.wait("reported")
        start_s = time.monotonic()
        made = deploy(people)
        crowd.wait("committed")
        found["deploy_s"] = time.monotonic() - start_s
        crowd.go_on()
        found["late_s"] = crowd.wait("all")
        found["cloud_cpu_s"] = cloud.cpu_s() - cpu_before
        found["idle_share"] = idle_share(cloud, idle_s)
        found["cloud_bytes"] = cloud.resident_bytes()
        found["bytes_per_node"] = (found["cloud_bytes"] - bytes_before) // size
        found["descriptors"] = cloud.descriptors()
        rollout = people.fleet.GetRollout(pb.GetRolloutRequest(id=made.id))
        found["state"] = pb.Rollout.State.Name(rollout.state)
        found["committed"] = sum(node.state == pb.COMMITTED for node in rollout.nodes)
        cloud.kill()
        crowd.go_on()
        crowd.wait("lost")
        cloud.start()
        found["back_s"] = crowd.wait("back")
        found["connected"] = sum(n.connected for n in people.fleet.ListNodes(EVERYONE).nodes)
        crowd.go_on()
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()
    }


EVERYONE = pb.ListNodesRequest(page_size=1000)


@contextlib.contextmanager
def starved(beside: int) -> Iterator[None]:
    """In the block, this process and what it starts share one core with so many busy processes.

    Nothing changes for 0.
    """
    if not beside:
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
    try:
        yield
    finally:
        for child in busy:
            child.kill()
            child.wait()
        os.sched_setaffinity(0, cores)


def one_run(size: int, seed: int, idle_s: float, beside: int = 0) -> dict[str, Any]:
    """A cloud of its own, its nodes, the figures.

    beside: busy processes with which all of them share one core; 0 for a machine of their own.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = released(folder)
        let_in(home, folder / "nodes", size)
        with starved(beside):
            cloud = CloudProcess(home, folder / "cloud.log")
            try:
                return measured(cloud, home, folder / "nodes", size, seed, idle_s)
            finally:
                cloud.stop()


def medians(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a size: the median of every figure."""
    sizes = sorted({run["nodes"] for run in runs})
    return [
        {
            key: statistics.median(run[key] for run in runs if run["nodes"] == size)
            for key, value in runs[0].items()
            if not isinstance(value, str)
        }
        | {"runs": sum(run["nodes"] == size for run in runs)}
        for size in sizes
    ]


def plot(rows: Sequence[dict[str, Any]], subtitle: str) -> str:
    """Seconds and memory over the number of nodes."""
    at = lambda key, unit: [(row["nodes"], row[key] / unit) for row in rows]
    seconds = {key.removesuffix("_s"): at(key, 1) for key in COLUMNS}
    charts = [
        line_chart(seconds, "Seconds of each stage", "nodes", "s"),
        line_chart(
            {"CPU": at("cloud_cpu_s", 1)}, "Processor time of the cloud until all committed",
            "nodes", "s",
        ),
        line_chart({"memory": at("cloud_bytes", 1 << 20)}, "Memory of the cloud", "nodes", "MiB"),
        line_chart(
            {"per node": at("bytes_per_node", 1024)}, "Its growth, divided by the nodes", "nodes",
            "KiB",
        ),
    ]  # fmt: skip
    return stack(charts, "A rollout from 10 to 1,000 nodes", [subtitle])


def starved_text(runs: Sequence[dict[str, Any]]) -> str:
    """What runs of `--starved` showed."""
    if not runs:
        return "Not measured this time; `--starved 17 1000` does."
    lines = ["| nodes | busy processes beside | connect, s | late, s | back, s |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {run['nodes']} | {run['beside']} | {run['connect_s']:.0f} | {run['late_s']:.0f} "
        f"| {run['back_s']:.0f} |"
        for run in runs
    ]
    return (
        "The cloud and all client processes on one core, which as many busy processes want too\n"
        "(`python benchmarks/fleet.py --starved 17 1000`), run by run:\n\n" + "\n".join(lines)
    )


def page(
    rows: Sequence[dict[str, Any]], machine: str, starved_runs: Sequence[dict[str, Any]]
) -> str:
    """The text of docs/evidence/scale.md."""
    head = [
        "nodes",
        "runs",
        "away at first",
        *(f"{name}, s" for name in ("connect", "deploy", "late")),
    ]
    head += ["back, s", "cloud's CPU, s", "CPU per node, ms", "cloud, MiB", "per node, KiB"]
    head += ["idle, % of a core", "descriptors"]
    lines = [
        [
            f"{row['nodes']:.0f}", row["runs"], f"{row['away']:.0f}",
            *(f"{row[key]:.2f}" for key in COLUMNS),
            f"{row['cloud_cpu_s']:.2f}", f"{1000 * row['cloud_cpu_s'] / row['nodes']:.1f}",
            f"{row['cloud_bytes'] / (1 << 20):.0f}", f"{row['bytes_per_node'] / 1024:.0f}",
            f"{100 * row['idle_share']:.1f}", f"{row['descriptors']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    cells = [head, ["---"] * len(head), *lines]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in cells)
    stages = "\n".join(f"* {key.removesuffix('_s')}: {what}." for key, what in COLUMNS.items())
    return TEXT.format(
        machine=machine, seed=SEED, table=table, stages=stages, processes=PROCESSES,
        further_kib=further(rows, "cloud_bytes") / 1024,
        further_ms=further(rows, "cloud_cpu_s") * 1000, starved=starved_text(starved_runs),
    )  # fmt: skip


def further(rows: Sequence[dict[str, Any]], key: str) -> float:
    """What one more node adds to a figure, between the two largest sizes."""
    below, above = rows[-2:]
    found: float = (above[key] - below[key]) / (above["nodes"] - below["nodes"])
    return found


TEXT = """# A thousand nodes

`python benchmarks/fleet.py --repeat 3 --record`, or one size at a time with `--keep FILE`. Medians
of the runs; seed {seed}.
{machine}.

![seconds, processor time and memory over the number of nodes](scale.svg)

{table}

Seconds of wall time, one stage after another:

{stages}

Of the two largest sizes, each further node costs {further_kib:.0f} KiB and {further_ms:.1f} ms.

Every run above ended with the rollout DONE, every node COMMITTED, and every node connected and
reporting to the restarted cloud; a run that does not ends with an error and is not in the table.

## On a small part of a core

{starved}

A node that gets no welcome waits longer each time (10 s to 120 s), and a TLS handshake may take
60 s, so a slow cloud finishes what it begins. Before, a node gave up after 10 s and a handshake
after 5 s, each try threw away the work of the one before, and 53 of 700 nodes got in.

## What is real, and what is not

* Real: the cloud process with its database on disk, a certificate and a stream over mutual TLS for
  every node, numbered and acknowledged reports, one rollout in one wave. All nodes of a stage come
  at once, from {processes} client processes.
* After the kill each node tries again as a node does, with full jitter over a wait that doubles
  from half a second to 30 s while nobody answers. Those waits are most of the last stage, and what
  keeps a thousand from coming in the same instant; a node serves calls meanwhile.
* Left out: the work of a node. It says COMMITTED at once, so bundles are not downloaded here;
  `large-file.md` and the fault tests do that with real nodes.
* Clients and cloud share the machine, and whatever else ran on it: seconds are an upper bound, and
  processor time is the steadier figure. Memory per node is the growth of the cloud from no node to
  all, divided, so among few nodes the first growth weighs. Idle is what the cloud uses while all
  are connected and say nothing but that they live.
* A node takes one descriptor; the cloud takes as many as the system's hard limit allows. Past 1,000
  nodes nothing was measured.
"""


def machine_text() -> str:
    """Date, machine and versions, in one line."""
    names = ("grpcio", "protobuf", "sqlalchemy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Linux, Python {platform.python_version()}, {versions}"
    )


def refuse(run: dict[str, Any]) -> None:
    """RuntimeError where a run did not converge."""
    reached = (run["state"], run["committed"], run["connected"])
    if reached != ("DONE", run["nodes"], run["nodes"]):
        raise RuntimeError(f"a run did not converge: {run}")


def main() -> None:
    """Measure each size, a line of JSON per run; with --record write the evidence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--idle", type=float, default=IDLE_S, metavar="SECONDS")
    parser.add_argument("--keep", type=Path, default=Path(os.devnull))
    parser.add_argument("--record", action="store_true")
    parser.add_argument(
        "--starved", type=int, default=0, metavar="N",
        help="cloud and nodes share one core with N busy processes",
    )  # fmt: skip
    given = parser.parse_args()
    runs = []
    if given.keep.exists():
        runs = [json.loads(line) for line in given.keep.read_text().splitlines()]
    for _, size in itertools.product(range(given.repeat), given.sizes):
        before = sum(run["nodes"] == size for run in runs if run["beside"] == given.starved)
        run = one_run(size, SEED + 1_000_000 * before, given.idle, given.starved)
        refuse(run)
        run["beside"] = given.starved
        print(json.dumps(run), flush=True)
        with given.keep.open("a") as kept:
            kept.write(f"{json.dumps(run)}\n")
        runs.append(run)
    if given.record:
        rows, machine = medians([run for run in runs if not run["beside"]]), machine_text()
        (EVIDENCE / "scale.svg").write_text(plot(rows, machine))
        starved_runs = [run for run in runs if run["beside"]]
        (EVIDENCE / "scale.md").write_text(page(rows, machine, starved_runs))


if __name__ == "__main__":
    main()

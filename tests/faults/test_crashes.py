"""Kill -9 again and again while versions go back and forth, under load.

Among the kills, processes stand still for a while, files of the node are damaged, and the cloud is
restored from a backup. After all of them: the node serves what its pointer says is committed, the
rollout ends with the version it was for, no call failed unless the serving process was ended, and
none after the first that was answered again.
"""

import os
import platform
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tests.faults.damages import DAMAGES, OF_BUNDLES, bundle_of, spoil_document, spoil_journal
from tests.faults.fleet import Load, fleet, wait_until, write_model

from triplane.edge.agent.journal import readable
from triplane.edge.agent.seam import Seam
from triplane.edge.serving.pointers import read_pointers
from triplane.proto import fleet_pb2 as pb
from triplane.proto.channels import connect
from triplane.proto.errors import TriplaneError
from triplane.proto.fleet_pb2_grpc import FleetStub
from triplane.proto.identity import IdentityFolder

X = np.zeros((1, 1, 8, 8), np.float32)
VICTIMS = ("agent", "serving", "supervisor", "cloud")
STATES = ("ASSIGNED", "DOWNLOADING", "VERIFIED", "STAGED", "TRIED", "PROBATION", "COMMITTED")
LONGEST_S = 0.8
INSTANT_S = 1.5
FAULTS_A_ROUND = 4
HELD, DAMAGED = 0.15, 0.1  # shares of the faults that are no kills
LONGEST_HOLD_S = 2.0
ROUNDS_A_RESTORE = 12
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "crash.md"


@dataclass
class Tally:
    kills: Counter = field(default_factory=Counter)
    holds: Counter = field(default_factory=Counter)
    damages: Counter = field(default_factory=Counter)
    restores: int = 0
    instants: Counter = field(default_factory=Counter)
    states: Counter = field(default_factory=Counter)
    calls: int = 0
    failed: int = 0
    longest_gap_s: float = 0.0


class Operator:
    """Calls to the cloud that are tried again while it is down; writes carry a key."""

    def __init__(self, running):
        self._channel = connect(IdentityFolder(running.home / "operator"))
        self._stub = FleetStub(self._channel)

    def call(self, name, request):
        until = time.monotonic() + 60
        while True:
            try:
                return getattr(self._stub, name)(request, timeout=10)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise

    def deploy(self, version):
        request = pb.DeployRequest(
            reference=f"lenet@{version}", selector="site=lab", success_share=1.0,
            node_deadline_s=600, role="release", key=os.urandom(16),
        )  # fmt: skip
        return self.call("Deploy", request).id

    def finished(self, rollout):
        """Whether the rollout is done; one that paused itself after a kill is told to go on."""
        found = self.call("GetRollout", pb.GetRolloutRequest(id=rollout))
        if found.state == pb.Rollout.PAUSED:
            self.call("Resume", pb.ChangeRolloutRequest(id=rollout, reason="after a kill"))
        return found.state == pb.Rollout.DONE

    def close(self):
        self._channel.close()


def served(node):
    seam = Seam(node.home / "run" / "serving.sock")
    try:
        return seam.versions().get("lenet")
    except TriplaneError:
        return None
    finally:
        seam.close()


def kill(running, node, victim):
    if victim == "cloud":
        running.restart_cloud()
    else:
        node.kill(victim)


@contextmanager
def held(running, node, victim):
    """The process stands still in the block; nothing happens where it is down just now."""
    own = {"cloud": running.cloud, "supervisor": node.supervisor}.get(victim)
    pid = own.child.pid if own else node.pid(victim)
    try:
        process = psutil.Process(pid) if pid else None
        if process:
            process.suspend()
    except psutil.NoSuchProcess:
        process = None
    yield
    if process:
        with suppress(psutil.NoSuchProcess):  # its supervisor may have ended it
            process.resume()


def damage(node, rng):
    """Damage one file of the home while the node is down; the kind of damage."""
    node.stop()
    kinds = list(DAMAGES)
    if "lenet" not in read_pointers(node.home / "models")[0]:  # damaged in this round already
        kinds = [spoil_journal, spoil_document]
    elif not bundle_of(node, "lenet").is_file():
        kinds = [kind for kind in kinds if kind not in OF_BUNDLES]
    kind = rng.choice(kinds)
    kind(node, "lenet")
    node.supervisor.start()
    return kind.__name__


def wait_for_instant(node, rng, tally):
    """A random moment, or right after a transition was journaled."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, LONGEST_S))
        tally.instants["random"] += 1
        return
    state = rng.choice(STATES)
    lines = len(readable(node.home / "journal"))
    until = time.monotonic() + INSTANT_S
    while time.monotonic() < until:
        if any(line.state == state for line in readable(node.home / "journal")[lines:]):
            tally.instants["journaled"] += 1
            tally.states[state] += 1
            return
    tally.instants["random"] += 1


def campaign(folder, *, kills, seed):
    """Kill so often; returns what happened. Raises AssertionError at the first broken promise."""
    rng, tally = random.Random(seed), Tally()
    with fleet(folder) as running:
        node = running.add_node("node-a")
        for number in (0, 1):
            running.publish(write_model(folder / f"m{number}.tpm", number))
        running.deploy("lenet@1")
        operator = Operator(running)
        try:
            rounds = 0
            while sum(tally.kills.values()) < kills:
                one_round(running, node, operator, rng, tally)
                rounds += 1
                if rounds % ROUNDS_A_RESTORE == ROUNDS_A_RESTORE // 2:
                    restored(running, node, operator, rng, tally)
        finally:
            operator.close()
    return tally


def restored(running, node, operator, rng, tally):
    """The cloud loses a rollout that the node followed, and the node returns to what it knows.

    Every second time it loses a signature too, and its operator signs past what the node has seen.
    """
    running.back_up()
    known, is_signed = node.committed(), tally.restores % 2 == 0
    if is_signed:
        running.ask("cloud", "keys", "renew", "--role", "release", "--keys", running.keys)
    one_round(running, node, operator, rng, tally)
    assert node.committed() == 3 - known
    running.restore()
    if is_signed:
        running.go_past(running.warned_of_nodes_ahead())
    wait_until(lambda: node.committed() == known, "the node to follow the restored cloud", 120)
    wait_until(lambda: served(node) == str(known), "the version that the cloud knows", 120)
    tally.restores += 1


def one_round(running, node, operator, rng, tally):
    """One rollout, a few faults in the middle of it, and what must be true afterwards."""
    version = 3 - node.committed()
    faults, outages, damaged = [], [], False
    with Load(node.port, "lenet", X) as load:
        rollout = operator.deploy(version)
        for _ in range(FAULTS_A_ROUND):
            wait_for_instant(node, rng, tally)
            chance, victim = rng.random(), rng.choice(VICTIMS)
            began_s = time.monotonic()
            if chance < DAMAGED:
                kind = damage(node, rng)
                tally.damages[kind] += 1
                faults.append(kind)
                outages.append((began_s, time.monotonic()))
                damaged = True
            elif chance < DAMAGED + HELD:
                with held(running, node, victim):
                    threading.Event().wait(rng.uniform(0.1, LONGEST_HOLD_S))
                tally.holds[victim] += 1
                faults.append(f"{victim} held")
            else:
                kill(running, node, victim)
                if victim == "serving":
                    outages.append((began_s, time.monotonic()))
                tally.kills[victim] += 1
                faults.append(victim)
        wait_until(lambda: operator.finished(rollout), f"{rollout} after {faults}", 120)
        if damaged:  # a rollout that was done before is not done again
            wait_until(lambda: node.committed() == version, f"the commit after {faults}", 120)
            wait_until(lambda: served(node) == str(version), f"its version after {faults}", 120)
        wait_until(lambda: served(node) is not None, "serving", 60)
        assert node.committed() == version, faults
        assert served(node) == str(version), faults
    tally.calls += load.sent
    tally.failed += len(load.errors)
    assert not load.unexplained(outages), (faults, outages, load.unexplained(outages)[:3])
    for _, failed_s, _ in load.errors:
        gap_s = failed_s - max(began_s for began_s, _ in outages if began_s <= failed_s)
        tally.longest_gap_s = max(tally.longest_gap_s, gap_s)


@pytest.mark.slow
@pytest.mark.long
def test_fifty_kills_at_random_and_journaled_instants_leave_nothing_broken(tmp_path):
    tally = campaign(tmp_path, kills=int(os.environ.get("TRIPLANE_KILLS", "52")), seed=1)
    assert sum(tally.kills.values()) >= 52
    assert tally.calls > 500


@pytest.mark.deep
def test_five_hundred_kills_leave_nothing_broken(tmp_path):
    seed, kills = 2026, int(os.environ.get("TRIPLANE_KILLS", "500"))
    started = time.time()
    tally = campaign(tmp_path, kills=kills, seed=seed)
    EVIDENCE.parent.mkdir(exist_ok=True)
    EVIDENCE.write_text(
        "# Kills\n\n"
        f"`make deep SUITE=crash`, {time.strftime('%Y-%m-%d', time.gmtime(started))}, seed {seed}, "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{(time.time() - started) / 60:.0f} minutes.\n\n"
        f"| what | count |\n|---|---|\n"
        + "".join(f"| kill -9 of {name} | {count} |\n" for name, count in tally.kills.items())
        + "".join(
            f"| {name} held still, 0.1 to 2 s | {count} |\n" for name, count in tally.holds.items()
        )
        + "".join(f"| damaged: {name} | {count} |\n" for name, count in tally.damages.items())
        + f"| the cloud restored from a backup | {tally.restores} |\n"
        + "".join(f"| at a {name} instant | {count} |\n" for name, count in tally.instants.items())
        + "".join(f"| right after {name} | {count} |\n" for name, count in tally.states.items())
        + f"| calls sent, 50 a second, no retries | {tally.calls} |\n"
        f"| calls failed, all after serving was ended | {tally.failed} |\n"
        f"| longest time from such an end to the last failed call | {tally.longest_gap_s:.2f} s |\n"
        "| versions that served without being committed, rollouts that did not end | 0 |\n"
    )

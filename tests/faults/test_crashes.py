"""Kill -9 again and again while versions go back and forth, under load.

After each kill: the node serves what its pointer says is committed, the rollout ends with the
version it was for, no call failed unless the serving process was the one killed, and then only
until it was back.
"""

import os
import platform
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.faults.fleet import Load, fleet, wait_until, write_model

from triplane.edge.agent.journal import readable
from triplane.edge.agent.seam import Seam
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
KILLS_A_ROUND = 4
BACK_S = 5.0
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "crash.md"


@dataclass
class Tally:
    kills: Counter = field(default_factory=Counter)
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


def strike(running, node, victim):
    if victim == "cloud":
        running.restart_cloud()
    else:
        node.kill(victim)


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
            for _ in range(-(-kills // KILLS_A_ROUND)):
                one_round(running, node, operator, rng, tally)
        finally:
            operator.close()
    return tally


def one_round(running, node, operator, rng, tally):
    """One rollout, a few kills in the middle of it, and what must be true afterwards."""
    victims = [rng.choice(VICTIMS) for _ in range(KILLS_A_ROUND)]
    version = 3 - node.committed()
    serving_killed_s = None
    with Load(node.port, "lenet", X) as load:
        rollout = operator.deploy(version)
        for victim in victims:
            wait_for_instant(node, rng, tally)
            if victim == "serving":
                serving_killed_s = time.monotonic()
            strike(running, node, victim)
            tally.kills[victim] += 1
        wait_until(lambda: operator.finished(rollout), f"{rollout} after {victims}", 90)
        wait_until(lambda: served(node) is not None, "serving", 30)
        assert node.committed() == version
        assert served(node) == str(version)
    tally.calls += load.sent
    tally.failed += len(load.errors)
    if load.errors:
        assert serving_killed_s is not None, (victims, load.errors[:3])
        gap_s = load.errors[-1][0] - serving_killed_s
        tally.longest_gap_s = max(tally.longest_gap_s, gap_s)
        assert gap_s < BACK_S, load.errors[-1]


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
        + "".join(f"| at a {name} instant | {count} |\n" for name, count in tally.instants.items())
        + "".join(f"| right after {name} | {count} |\n" for name, count in tally.states.items())
        + f"| calls sent, 50 a second, no retries | {tally.calls} |\n"
        f"| calls failed, all after a kill of serving | {tally.failed} |\n"
        f"| longest time from such a kill to the last failed call | {tally.longest_gap_s:.2f} s |\n"
        "| versions that served without being committed, rollouts that did not end | 0 |\n"
    )

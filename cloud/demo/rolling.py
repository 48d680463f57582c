"""The second part of the demo: signed rollouts to two nodes; a refusal, a killed agent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.cloud.demo import processes
from triplane.cloud.demo.ask import CallStatistics, ask
from triplane.cloud.demo.fleet import (
    NODES,
    DemoFleet,
    agent_process,
    fleet_at,
    until,
)
from triplane.cloud.demo.stage import DemoStage, first
from triplane.proto.errors import InvalidInput

CELL: Final = Path(__file__).with_name("digits.py")
MODEL: Final = "digits"
TARGET: Final = "ort-x64"
PROBATION: Final = "1s"
LONG_PROBATION: Final = "4s"
"""Long enough to see the new version, and to kill the agent meanwhile."""
NOT_DONE: Final = 4
FLOOR: Final = 0.9
ASKED: Final = 200


@contextlib.contextmanager
def fleet_of(stage: DemoStage) -> Iterator[DemoFleet]:
    """Run a cloud and two enrolled nodes as processes; stop them at the end."""
    stage.say(
        "\n6  Deploy: a cloud and two nodes as processes, enrolled by tokens, over mutual TLS"
    )
    with fleet_at(stage.folder) as fleet:
        stage.say(f"   dashboard: {fleet.dashboard} (token in {fleet.home / 'dashboard.token'})")
        yield fleet


def deploy(stage: DemoStage, fleet: DemoFleet) -> None:
    """Roll out the trained model, signed by a key that the cloud lacks, in two waves."""
    _push(fleet, stage.file("digits.tpm"))
    stage.say("   signed offline: the conversion is repeated, and the bundles are compared")
    fleet.ask("sign", f"{MODEL}@1", "--target", TARGET, "--keys", fleet.offline_keys)
    roll_out(fleet, f"{MODEL}@1", "--waves", "1,100%")
    rollout = fleet.ask("rollout", "show")
    answers = [_ask_node(stage, fleet, name) for name in NODES]
    for name, answer in zip(NODES, answers, strict=True):
        stage.say(f"   {name}: {answer.calls} digits asked, accuracy {answer.accuracy:.3f}")
    seconds = rollout["ended_s"] - rollout["created_s"]
    stage.summary.add(
        "deploy", f"{MODEL}@1", f"2 of 2 nodes in 2 waves, {seconds:.1f} s; accuracy "
        f"{answers[0].accuracy:.3f}", rollout_seconds=seconds,
        node_accuracy=[answer.accuracy for answer in answers],
    )  # fmt: skip


def refuse(stage: DemoStage, fleet: DemoFleet) -> None:
    """Release a version that loads and answers wrongly, signed by the cloud itself.

    Its own golden samples agree with it, so they cannot refuse it. The policy refuses it: labelled
    samples and a least accuracy on them, signed offline and measured on the node.
    """
    stage.say(
        f"\n7  A bad version: trained on shuffled labels, released automatically; "
        f"the policy, signed offline, requires accuracy {FLOOR} on its own samples"
    )
    fleet.ask(
        "cloud", "policy", "set", MODEL, "--golden", _golden(stage), "--floor", f"{FLOOR:.0%}",
        "--share", "100%", "--keys", fleet.offline_keys,
    )  # fmt: skip
    _push(fleet, _wrong_model(stage))
    code = fleet.followed("deploy", f"{MODEL}@2", "--to", "all", "--waves", "1,100%",
                          "--role", "auto", "--probation", PROBATION)  # fmt: skip
    rollout = fleet.ask("rollout", "show")
    if code != NOT_DONE or rollout["state"] != "paused":
        raise InvalidInput(f"the bad version was not refused: {rollout['state']}, exit code {code}")
    failed = [node for node in rollout["nodes"] if node["state"] in {"failed", "returned"}]
    held = {name: serving(node) for name, node in fleet.nodes().items()}
    answers = [_ask_node(stage, fleet, name) for name in NODES]
    fleet.ask("rollout", "abort", "last", "--reason", "answers wrongly")
    stage.say(f"   both nodes still serve {MODEL}@1, accuracy {answers[0].accuracy:.3f}")
    stage.summary.add(
        "refuse", f"{MODEL}@2", f"refused by {failed[0]['name']}, rollout paused, version 1 serves",
        refused_reason=failed[0]["reason"], refused_exit_code=code, held=held,
        held_accuracy=[answer.accuracy for answer in answers],
    )  # fmt: skip


def heal(stage: DemoStage, fleet: DemoFleet, epochs: int) -> None:
    """Roll out a better version while the agent of one node is killed in the middle of it."""
    victim = NODES[-1]
    stage.say(f"\n8  A kill: {victim}'s agent is killed (kill -9) during the next rollout")
    _push(fleet, _train(stage, "train", epochs, "better.tpm"))
    fleet.ask("sign", f"{MODEL}@3", "--target", TARGET, "--keys", fleet.offline_keys)
    before = agent_process(fleet.homes[victim])
    killer = _AgentKiller(fleet, victim)
    killer.start()
    roll_out(fleet, f"{MODEL}@3", probation=LONG_PROBATION)
    killer.join()
    if killer.killed_at is None:
        raise InvalidInput(f"{victim} committed version 3 before its agent could be killed")
    after = agent_process(fleet.homes[victim])
    answer = _ask_node(stage, fleet, victim)
    stage.say(
        f"   killed at {killer.killed_at}; a new agent (process {after}, was {before}) continued; "
        f"{victim} serves {serving(fleet.nodes()[victim])}"
    )
    stage.summary.add(
        "heal", f"{MODEL}@3", f"agent killed at {killer.killed_at}, node has it; accuracy "
        f"{answer.accuracy:.3f}", killed_at=killer.killed_at, healed=after != before,
        healed_accuracy=answer.accuracy,
    )  # fmt: skip


def addresses(fleet: DemoFleet) -> dict[str, Any]:
    """Return the fleet's addresses, and the commands that start it again from kept files."""
    ports = f"--port {fleet.port} --enrol-port {fleet.enrol_port}"
    page = f"--dashboard-port {fleet.dashboard.rpartition(':')[2]}"
    start = [f"triplane cloud up --home {fleet.home} --host 127.0.0.1 {ports} {page}"]
    start += [f"triplane edge up --home {home}" for home in fleet.homes.values()]
    token = fleet.home / "dashboard.token"
    return {"dashboard": fleet.dashboard, "dashboard_token": str(token), "start_again": start}


def linger(stage: DemoStage, fleet: DemoFleet) -> None:
    """On a terminal, leave the fleet up until Ctrl-C; elsewhere say how to start it again."""
    places = addresses(fleet)
    stage.say(f"\nDashboard: {places['dashboard']} (to change things: {places['dashboard_token']})")
    stage.say(f"Operator:  export TRIPLANE_IDENTITY={fleet.home / 'operator'}")
    if sys.stdin.isatty() and sys.stderr.isatty():
        stage.say("The cloud and both nodes keep running. Ctrl-C stops them.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    again = "\n".join(f"  {command}" for command in places["start_again"])
    stage.say(
        f"The cloud and the nodes are stopped. Start them again, each in a terminal:\n{again}"
    )


class _AgentKiller(threading.Thread):
    """Kills a node's agent as soon as the node is at the new version."""

    def __init__(self, fleet: DemoFleet, node: str) -> None:
        super().__init__(name="killer")
        self._fleet, self._node = fleet, node
        self.killed_at: str | None = None

    def run(self) -> None:
        """Watch the node until then."""
        with contextlib.suppress(Exception):
            until("the node at the new version", self._has_reached_it)

    def _has_reached_it(self) -> bool:
        report = self._fleet.models(MODEL)[self._node]
        if report.get("version") != 3:
            return False
        if report["state"] != "committed":
            # Only while it works on the version; a kill after the commit would show nothing.
            os.kill(agent_process(self._fleet.homes[self._node]), signal.SIGKILL)
            self.killed_at = report["state"]
        return True


def serving(node: dict[str, Any]) -> str:
    """Return the versions that a node serves, such as "digits@1"."""
    models = node["report"]["models"]
    return ", ".join(f"{m['model']}@{m['committed_version']}" for m in models)


def _push(fleet: DemoFleet, file: Path) -> None:
    fleet.ask("registry", "push", file, "--name", MODEL, "--target", TARGET)


def roll_out(fleet: DemoFleet, reference: str, *more: str, probation: str = PROBATION) -> None:
    """Deploy to both nodes and follow the rollout here. InvalidInput: it did not succeed."""
    code = fleet.followed("deploy", reference, "--to", "site=demo", *more, "--probation", probation)
    if code != 0:
        raise InvalidInput(f"the rollout of {reference} ended with exit code {code}")


def _ask_node(stage: DemoStage, fleet: DemoFleet, name: str) -> CallStatistics:
    samples = first(stage.held_out, ASKED)
    return ask(fleet.serving_address(name), MODEL, samples.x, samples.y)


def _golden(stage: DemoStage) -> Path:
    samples = first(stage.held_out, ASKED)
    np.savez(stage.file("golden.npz"), x=samples.x, y=samples.y)
    return stage.file("golden.npz")


def _wrong_model(stage: DemoStage) -> Path:
    labels = np.random.default_rng(0).permutation(stage.train.y)
    np.savez(stage.file("shuffled.npz"), x=stage.train.x, y=labels)
    return _train(stage, "shuffled", 1, "shuffled.tpm")


def _train(stage: DemoStage, data: str, epochs: int, out: str) -> Path:
    processes.output(
        "train", f"{CELL}:Digits", "--data", stage.file(f"{data}.npz"),
        "--validation", stage.file("held_out.npz"), "--epochs", str(epochs),
        "--out", stage.file(out), "--json",
    )  # fmt: skip
    return stage.file(out)

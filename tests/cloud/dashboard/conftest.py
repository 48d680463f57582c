"""A fleet that a test writes, a real server on the loopback, a real browser."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.browser import chromium

from triplane.cloud.dashboard import NodeIncident, application
from triplane.cloud.dashboard.page import Page
from triplane.proto.errors import Conflict, NotFound
from triplane.proto.federation_pb2 import Run, Spread
from triplane.proto.fleet_pb2 import (
    COMMITTED,
    DOWNLOADING,
    FAILED,
    NODE_STATE_UNSPECIFIED,
    Incident,
    ModelReport,
    Node,
    Report,
    Rollout,
    Wave,
)
from triplane.proto.registry_pb2 import Bundle, Version

TOKEN = "operator-token-of-this-test"
STATES = (*(COMMITTED,) * 7, FAILED, DOWNLOADING, DOWNLOADING, NODE_STATE_UNSPECIFIED)


@dataclass
class WrittenFleet:
    """A source whose documents the test holds; changes obey the rules of rollouts."""

    held_nodes: list[Node] = field(default_factory=list)
    held_rollouts: list[Rollout] = field(default_factory=list)
    held_runs: list[Run] = field(default_factory=list)
    held_versions: list[Version] = field(default_factory=list)
    held_incidents: list[NodeIncident] = field(default_factory=list)
    held_due: list[str] = field(default_factory=list)
    asked: list[tuple] = field(default_factory=list)

    async def nodes(self):
        return self.held_nodes

    async def rollouts(self):
        return self.held_rollouts

    async def runs(self):
        return self.held_runs

    async def versions(self):
        return self.held_versions

    async def incidents(self):
        return self.held_incidents

    async def due(self):
        return self.held_due

    async def pause(self, rollout_id, reason):
        return self._to(rollout_id, reason, {Rollout.RUNNING}, Rollout.PAUSED)

    async def resume(self, rollout_id, reason):
        return self._to(rollout_id, reason, {Rollout.PAUSED}, Rollout.RUNNING)

    async def abort(self, rollout_id, reason, *, revert):
        rollout = self._to(rollout_id, reason, {Rollout.RUNNING, Rollout.PAUSED}, Rollout.ABORTED)
        self.asked[-1] += (revert,)
        return rollout

    def _to(self, rollout_id, reason, allowed, state):
        self.asked.append((rollout_id, reason))
        for i, rollout in enumerate(self.held_rollouts):
            if rollout.id == rollout_id:
                if rollout.state not in allowed:
                    raise Conflict(f"rollout {rollout_id} is {rollout.state}")
                changed = Rollout()
                changed.CopyFrom(rollout)
                changed.state, changed.reason = state, reason
                self.held_rollouts[i] = changed
                return changed
        raise NotFound(f"no rollout {rollout_id}")


def small_run() -> Run:
    """Three of five rounds among twelve phones: one straggler, one refused, judged once."""
    run = Run(
        id="4f1c0a2b9d8e7f60", phase=Run.COLLECTING, round=4, started_s=1.7e9,
        started_by="operator",
    )  # fmt: skip
    run.spec.model, run.spec.population, run.spec.algorithm = "digits@4", "phones", "maml"
    run.spec.rounds = 5
    for number, counted, given_up in ((1, 10, ""), (2, 9, ""), (3, 3, "3 updates of 8 needed")):
        run.rounds.add(
            number=number, opened_s=1.7e9, closed_s=1.7e9 + 1.5, asked=10, counted=counted,
            lost=10 - counted, loss=1 / number, bytes_up=1 << 20, bytes_down=2 << 20,
            given_up=given_up,
        )  # fmt: skip
    judged = run.rounds.add(number=3, evaluates=True, asked=12, counted=12)
    judged.before.CopyFrom(Spread(mean=0.5, worst=0.3, worst_tenth=0.3))
    judged.after.CopyFrom(Spread(mean=0.875, worst=0.75, worst_tenth=0.75))
    run.rounds.add(number=4, opened_s=1.7e9, asked=10, counted=2)
    for i in range(12):
        member = run.members.add(
            device=f"phone-{i:02}", connected=i != 7, examples=40, counted=3, dropped=2 * (i == 7)
        )
        member.reason = "its stream was away too long" if i == 7 else ""
        member.score.samples, member.score.round = 20, 3
        member.score.before, member.score.after = 0.3 + i / 30, 0.75 + i / 60
    run.refusals.reasons.add(kind="nan", count=2, newest="phone-03: 'head.weight' holds NaN")
    return run


def small_fleet() -> WrittenFleet:
    """Forty nodes, one failed, a rollout that paused in its second wave."""
    fleet = WrittenFleet()
    rollout = Rollout(
        id="r-7c41", model="digits", version=4, selector="site=factory", state=Rollout.PAUSED,
        reason="1 of 10 nodes of wave 2 failed, more than 5%", wave=1, created_s=1.7e9,
        created_by="operator",
    )  # fmt: skip
    rollout.request.waves.extend([Wave(percent=5), Wave(percent=25), Wave(percent=100)])
    for i in range(40):
        wave = 0 if i < 2 else 1 if i < 10 else 2
        state = STATES[min(i, 10)]
        reason = "golden sample 3: |y - g| = 4.1 > 0.002" if state == FAILED else ""
        name = f"camera-{i:02}"
        rollout.nodes.add(
            name=name, wave=wave, state=state, reason=reason, connected=i % 9 != 8,
            downloaded_bytes=40, total_bytes=100,
        )  # fmt: skip
        model = ModelReport(
            model="digits", committed_version=4 if state == COMMITTED else 3,
            version=4 if state else 3, state=state or COMMITTED, reason=reason,
        )  # fmt: skip
        report = Report(serving_up=True, serving_address=f"10.0.0.{i}:8001", models=[model])
        labels = {"site": "factory", "line": str(i % 3)}
        node = Node(name=name, labels=labels, connected=i % 9 != 8, last_seen_s=1.7e9)
        node.report.CopyFrom(report)
        fleet.held_nodes.append(node)
    fleet.held_rollouts.append(rollout)
    fleet.held_runs.append(small_run())
    for number, alias in ((4, ["latest"]), (3, ["stable"])):
        version = Version(
            model="digits", version=number, model_digest=bytes([number] * 32), size=131_207,
            created_s=1.7e9 + number, created_by="operator", aliases=alias,
        )  # fmt: skip
        version.bundles.add(
            target="ort-x64", state=Bundle.READY,
            signed_path=f"release/digits@{number}+ort-x64.bundle" if number == 3 else "",
        )  # fmt: skip
        fleet.held_versions.append(version)
    incident = Incident(time_s=1.7e9, kind="golden", text="golden sample 3: |y - g| = 4.1 > 0.002")
    fleet.held_incidents.append(NodeIncident("camera-07", incident))
    return fleet


@contextmanager
def served(app):
    """The application on a free port of the loopback; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Page(app)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def fleet():
    return small_fleet()


@pytest.fixture
def address(fleet):
    with served(application(fleet, token=TOKEN)) as address:
        yield address


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def shots():
    """Where screenshots go: TRIPLANE_SHOTS, or nowhere."""
    folder = os.environ.get("TRIPLANE_SHOTS")
    return Path(folder) if folder else None

import time
from dataclasses import replace

import pytest
from tests.cloud.fleet.given import CAPABILITY

from triplane.cloud.fleet import state
from triplane.cloud.fleet.capability import Needs
from triplane.cloud.fleet.deploying import Asked, begun
from triplane.cloud.fleet.facts import BundleReady, Stage, State
from triplane.cloud.fleet.messages import rollout_message
from triplane.cloud.fleet.state import Fleet, Node
from triplane.proto import fleet_pb2 as pb
from triplane.proto.channels import MESSAGE_BYTES


def deployed(nodes):
    """A fleet of that many nodes, each told to serve digits@3."""
    said = pb.Report(capability=CAPABILITY)
    fleet = Fleet({name: Node(name=name, report=said) for name in (f"n{i}" for i in range(nodes))})
    request = pb.DeployRequest(selector="all", key=b"k", role="release")
    fleet = begun(fleet, Asked("r-1", request, "digits", 3, None, "olga", 0.0))
    ready = BundleReady("ort-x64", Needs(), "release/digits@3+ort-x64.bundle")
    return state.after_event(fleet, "r-1", ready, 0.0)


def committed(name):
    report = pb.Report(capability=CAPABILITY)
    report.models.add(model="digits", version=3, committed_version=3, attempt=1, state=pb.COMMITTED)
    return name, report


def test_reports_that_come_together_are_the_same_as_one_by_one():
    fleet = deployed(20)
    reports = [committed(name) for name in fleet.nodes]
    together = state.after_reports(fleet, reports, 5.0)
    for report in reports:
        fleet = state.after_reports(fleet, [report], 5.0)
    assert together == fleet
    rollout = together.papers["r-1"].rollout
    assert rollout.state is State.DONE
    assert {m.stage for m in rollout.members.values()} == {Stage.COMMITTED}


@pytest.mark.slow
def test_a_fleet_that_reports_at_once_is_looked_at_once():
    fleet = deployed(500)
    reports = [committed(name) for name in fleet.nodes]

    def seconds(batches):
        now, start_s = fleet, time.process_time()
        for batch in batches:
            now = state.after_reports(now, batch, 5.0)
        return time.process_time() - start_s

    together = min(seconds([reports]) for _ in range(3))
    assert together < 0.5 * seconds([report] for report in reports)


@pytest.mark.parametrize("count", [3, 1000, 4000])
def test_a_rollout_of_any_size_and_any_words_fits_into_a_message(count):
    fleet = deployed(count)
    paper = fleet.papers["r-1"]
    words = "\N{SNAIL}" * 2000
    members = {name: replace(m, reason=words) for name, m in paper.rollout.members.items()}
    paper = replace(paper, rollout=replace(paper.rollout, members=members, reason=words))
    message = rollout_message(paper, lambda _: True)
    assert message.ByteSize() < MESSAGE_BYTES
    assert len(message.nodes) == count
    assert all(node.reason.startswith("\N{SNAIL}" * 8) for node in message.nodes)
    assert (message.nodes[0].reason == words) is (count == 3)

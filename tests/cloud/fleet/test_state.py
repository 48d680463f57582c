import time
from dataclasses import replace

import pytest
from tests.cloud.fleet.given import CAPABILITY

from triplane.cloud.fleet import state
from triplane.cloud.fleet.capability import BundleNeeds
from triplane.cloud.fleet.deploying import ResolvedDeploy, begin_rollout
from triplane.cloud.fleet.messages import desired_message, rollout_message
from triplane.cloud.fleet.state import FleetNode, FleetState
from triplane.cloud.fleet.values import Abort, BundleReady, NodeStage, RolloutState
from triplane.proto import fleet_pb2 as pb
from triplane.proto.channels import MESSAGE_BYTES


def deployed(nodes):
    """A fleet of that many nodes, each told to serve digits@3."""
    said = pb.Report(capability=CAPABILITY)
    fleet = FleetState(
        {name: FleetNode(name=name, report=said) for name in (f"n{i}" for i in range(nodes))}
    )
    request = pb.DeployRequest(selector="all", key=b"k", role="release")
    fleet = begin_rollout(fleet, ResolvedDeploy("r-1", request, "digits", 3, None, "olga", 0.0))
    ready = BundleReady("ort-x64", BundleNeeds(), "release/digits@3+ort-x64.bundle")
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
    rollout = together.rollouts["r-1"].rollout
    assert rollout.state is RolloutState.DONE
    assert {m.stage for m in rollout.members.values()} == {NodeStage.COMMITTED}


def test_a_rollout_may_begin_in_the_commit_that_ends_the_one_before():
    fleet = state.after_event(deployed(2), "r-1", Abort("", revert=False), 1.0)
    request = pb.DeployRequest(selector="all", key=b"l", role="release")
    fleet = begin_rollout(fleet, ResolvedDeploy("r-2", request, "digits", 4, None, "olga", 1.0))
    states = {name: record.rollout.state for name, record in fleet.rollouts.items()}
    assert states == {"r-1": RolloutState.ABORTED, "r-2": RolloutState.PREPARING}


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
    record = fleet.rollouts["r-1"]
    words = "\N{SNAIL}" * 2000
    members = {name: replace(m, reason=words) for name, m in record.rollout.members.items()}
    record = replace(record, rollout=replace(record.rollout, members=members, reason=words))
    message = rollout_message(record, lambda _: True)
    assert message.ByteSize() < MESSAGE_BYTES
    assert len(message.nodes) == count
    assert all(node.reason.startswith("\N{SNAIL}" * 8) for node in message.nodes)
    assert (message.nodes[0].reason == words) is (count == 3)


OURS, THEIRS = bytes.fromhex("ab" * 32), bytes.fromhex("cd" * 32)


def held_and_said(version, sha256, **metadata):
    """A node that was given digits@3 with OURS, and reports to serve something."""
    report = pb.Report(capability=CAPABILITY, metadata_versions=metadata)
    report.models.add(model="digits", committed_version=version, committed_sha256=sha256)
    held = state.NodeAssignment(version=3, sha256=OURS.hex(), good_version=2, good_sha256="")
    return FleetNode(name="n", report=report, held={"digits": held})


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (held_and_said(3, OURS), []),
        (held_and_said(3, b""), []),
        (held_and_said(2, THEIRS), []),
        (held_and_said(0, b""), []),
        (FleetNode(name="n"), []),
        (held_and_said(3, THEIRS), ["digits@3 with other content: sha256 cdcdcdcdcdcdcdcd..., "]),
        (held_and_said(4, OURS), ["digits@4, which this cloud did not assign"]),
        (held_and_said(3, OURS, timestamp=8, release=1), []),
        (held_and_said(3, OURS, timestamp=9), [r"timestamp 9 (this cloud: 8)"]),
    ],
)
def test_a_node_that_contradicts_the_cloud_is_warned_of_by_content(node, told):
    found = state.warnings(node, {"timestamp": 8, "release": 1})
    assert len(found) == len(told)
    for text, part in zip(found, told, strict=True):
        assert part in text
        assert "Restore a backup" in text


def test_a_version_of_other_content_is_not_what_a_node_goes_back_to():
    fleet = FleetState({"n": held_and_said(3, b"")})
    for sha256, good in ((THEIRS, 2), (OURS, 3)):
        report = held_and_said(3, sha256).report
        after = state.after_reports(fleet, [("n", report)], 1.0)
        assert after.nodes["n"].held["digits"].good_version == good


def test_a_document_names_the_content_of_each_version():
    message = desired_message(held_and_said(3, OURS))
    assert message.assignments[0].sha256 == OURS

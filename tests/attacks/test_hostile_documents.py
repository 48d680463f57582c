"""Documents of a cloud that was taken over, and what a node may write to be heard at all."""

from dataclasses import replace
from typing import Any

import pytest
from tests.faults.crash_disk import CrashDisk
from tests.support.node_power import BAD, MODEL, Node, made_home, path_of

from triplane.cloud.fleet.reports import check_report
from triplane.edge.agent import journal
from triplane.edge.agent.reconciler import read_desired, report
from triplane.edge.home import NodeHome
from triplane.proto import fleet_pb2 as pb
from triplane.proto.documents import MAX_INCIDENTS, MAX_MODELS, MAX_NUMBER, check_desired
from triplane.proto.errors import InvalidInput
from triplane.proto.signed.refusal import AttemptRefused


@pytest.fixture
def node(tmp_path):
    """A node that serves version 1."""
    disk = CrashDisk(made_home(tmp_path / "n").path)
    made = Node(NodeHome(tmp_path / "n"), disk, {})
    made.bring(1)
    yield made
    disk.close()


def assignment(**changes):
    given = {"model": MODEL, "version": 2, "target_path": path_of(2), "rollout": "x", "attempt": 1}
    return pb.Assignment(**{**given, **changes})


def document(number=9, **changes):
    return pb.Desired(number=number, assignments=[assignment(**changes)])


def settle(node, desired, epoch=b""):
    node.reconciler.take(desired, epoch)
    while not node.reconciler.step():
        pass


def said(node):
    return report(
        node.reconciler, pb.Capability(), metadata_age_s=0.0, serving_up=True, serving_address=""
    )


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a model's name that leads out": ({"model": "../../x"}, "got '../../x'"),
    "a model's name without end": ({"model": "a" * 70_000}, "a model's name matches"),
    "an attempt that uses the numbers up": (
        {"attempt": MAX_NUMBER + 1},
        f"attempt is at most {MAX_NUMBER} in the cloud's document, got {MAX_NUMBER + 1}",
    ),
    "a version no registry has": ({"version": 2**31}, "version is at most 1000000000"),
    "a path without end": ({"target_path": "release/" * 99}, "length of target_path is at most"),
    "a rollout without end": ({"rollout": "r" * 65}, "length of rollout is at most 64"),
    "a probation without end": ({"probation_s": float("inf")}, "probation_s is 0 to 2592000"),
    "a probation that is no number": ({"probation_s": float("nan")}, "probation_s is 0 to"),
    "a probation that ended before it began": ({"probation_s": -1.0}, "got -1.0"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_document_out_of_its_limits_is_an_incident_and_changes_nothing(node, attack):
    changes, message = HOSTILE[attack]
    known = node.reconciler.desired
    settle(node, document(**changes))
    assert node.reconciler.desired == known == read_desired(node.home.desired)
    (incident,) = said(node).incidents
    assert incident.kind == "document"
    assert message in incident.text
    check_report(said(node))
    assert node.server.served == {MODEL: "1"}


@pytest.mark.parametrize(
    ("desired", "message"),
    [
        (pb.Desired(number=MAX_NUMBER + 1), "number is at most"),
        (pb.Desired(assignments=[assignment(model=f"m{i}") for i in range(65)]), "is at most 64"),
        (pb.Desired(assignments=[assignment()] * 2), "assigns each model once"),
    ],
)
def test_a_document_is_refused_whole(desired, message):
    with pytest.raises(InvalidInput, match=message):
        check_desired(desired)


def test_a_cloud_taken_back_is_obeyed_whatever_the_thief_counted_to(node):
    """Numbers of documents are compared within one epoch, those of attempts within a rollout."""
    thief = document(MAX_NUMBER, version=BAD, target_path=path_of(BAD), attempt=MAX_NUMBER)
    settle(node, thief, b"thief")
    assert node.reconciler.progress[MODEL].state == "FAILED"
    settle(node, document(10, rollout="thief's"), b"thief")
    assert node.server.served == {MODEL: "1"}, "an older number of the same epoch"
    settle(node, document(2, rollout="honest"), b"honest")
    assert node.server.served == {MODEL: "2"}
    check_report(said(node))


def test_the_same_document_again_is_no_new_attempt(node):
    bad = document(3, version=BAD, target_path=path_of(BAD))
    settle(node, bad, b"a")
    ever = [*node.server.ever]
    settle(node, bad, b"another epoch")
    assert node.server.ever == ever


def test_a_flood_of_incidents_does_not_silence_a_node(node):
    """The cloud takes 32 incidents of 2000 characters; more would have the report refused."""
    for i in range(80):
        node.reconciler.incident(AttemptRefused("signature", f"{i}: " + "\0ключ" * 5000))
    told = []
    while incidents := said(node).incidents:
        assert len(incidents) <= MAX_INCIDENTS
        check_report(said(node))
        told += [incident.text.partition(":")[0] for incident in incidents]
        node.reconciler.drop_reported(incidents)
    assert told == [str(i) for i in range(80)]


def test_incidents_that_come_while_a_report_is_on_its_way_are_not_lost(node):
    node.reconciler.incident(AttemptRefused("signature", "before"))
    on_its_way = said(node)
    for i in range(200):
        node.reconciler.incident(AttemptRefused("signature", f"meanwhile {i}"))
    node.reconciler.drop_reported(on_its_way.incidents)
    assert said(node).incidents[0].text == "meanwhile 100"


def test_a_node_that_met_many_models_is_still_heard(node):
    progress = node.reconciler.progress[MODEL]
    node.reconciler.progress |= {
        f"m{i}": replace(progress, model=f"m{i}") for i in range(2 * MAX_MODELS)
    }
    check_report(said(node))
    assert MODEL in {model.model for model in said(node).models}


@pytest.mark.slow
def test_a_flood_of_attempts_does_not_fill_the_disk(node, monkeypatch):
    """Names and attempts are the cloud's to choose; the journal is cut while it grows."""
    monkeypatch.setattr(journal, "MAX_JOURNAL_BYTES", 20_000)
    kept = node.journal.last[MODEL]
    for i in range(400):
        node.journal.add(replace(kept, model=f"m{i % 300}", reason="x" * 200, state="FAILED"))
        assert node.home.journal.stat().st_size < 200_000
    last = {line.model: line for line in journal.readable(node.home.journal)}
    assert last["m99"] == node.journal.last["m99"]
    assert len(last) <= 300

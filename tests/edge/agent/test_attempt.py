"""Attempts that do not get through: what is told, what serves, what is on disk."""

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.faults.crash_disk import CrashDisk
from tests.support.node_power import (
    MODEL,
    Node,
    Server,
    Signed,
    content,
    digest,
    made_home,
    path_of,
    trial,
)

from triplane.edge.agent.adapting import Compared
from triplane.edge.agent.attempt import Attempt, Superseded
from triplane.edge.agent.reconciler import LOOK_S
from triplane.edge.agent.trying import judge_trial
from triplane.edge.home import NodeHome
from triplane.edge.serving.pointers import read_pointers
from triplane.proto import fleet_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput, NotFound, Unavailable
from triplane.proto.signed.policy import Admission
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import Freshness
from triplane.proto.targets import Rule


@pytest.fixture
def node(tmp_path):
    """A node that serves version 1."""
    disk = CrashDisk(made_home(tmp_path / "n").path)
    made = Node(NodeHome(tmp_path / "n"), disk, {})
    made.bring(1)
    yield made
    disk.close()


def attempt(node, version=2, *, superseded=lambda: False, **changed):
    told: list[Any] = []
    incidents: list[Any] = []
    world = replace(node.reconciler._context, incident=incidents.append, **changed)
    assignment = pb.Assignment(
        model=MODEL, version=version, target_path=path_of(version), attempt=version
    )
    made = Attempt(world, assignment, node.reconciler.pointers[MODEL], told.append, superseded)
    return made, told, incidents


def still_serves_one(node):
    assert node.server.served == {MODEL: "1"}
    assert read_pointers(node.home.models)[0][MODEL].version == 1


def test_a_version_that_gets_through_goes_through_every_state(node):
    made, told, incidents = attempt(node)
    assert made.run().version == 2
    states = [*dict.fromkeys(progress.state for progress in told)]
    assert states == [
        "ASSIGNED", "DOWNLOADING", "VERIFIED", "STAGED", "TRIED", "PROBATION", "COMMITTED",
    ]  # fmt: skip
    assert incidents == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "not the one signed"),
        ({"version": 7}, "version 7 for 2"),
        ({"content_digest": "0" * 64}, "content_digest"),
        ({"latency_limit_s": 0.001, "latency_s": 0.5}, "500.00 ms here, the bundle allows 1.00"),
        ({"memory_limit_bytes": 1, "grown_bytes": 1 << 40}, "the bundle states 1"),
    ],
)
def test_a_trial_that_finds_something_else_fails_the_attempt(node, changes, reason):
    made, told, incidents = attempt(node, trial=lambda *a, **k: {**trial(*a, **k), **changes})
    assert made.run() is None
    assert told[-1].state == "FAILED"
    assert reason in told[-1].reason
    assert len(incidents) == 1
    still_serves_one(node)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_bundle_is_fetched_only_where_the_disk_has_twice_its_size(node, monkeypatch, missing):
    free = iter([2 * len(content(2)) - missing])  # afterwards the transfer asks for its reserve
    monkeypatch.setattr(
        "os.statvfs", lambda _: SimpleNamespace(f_bavail=next(free, 1 << 40), f_frsize=1)
    )
    made, told, _ = attempt(node)
    made.run()
    assert told[-1].state == ("FAILED" if missing else "COMMITTED")
    if missing:
        assert f"needs {2 * len(content(2))}; make room" in told[-1].reason
        still_serves_one(node)


def test_wrong_answers_fail_the_attempt_before_any_switch(node):
    made, told, incidents = attempt(node, version=3)
    assert made.run() is None
    assert (told[-1].state, incidents[0].kind) == ("FAILED", "golden")
    assert "3" not in node.server.ever
    still_serves_one(node)


def test_a_metric_below_the_signed_floor_fails_the_attempt(node):
    class Auto(Signed):
        def admit(self, path, *, node, committed_version):
            plain = super().admit(path, node=node, committed_version=committed_version)
            rule = Rule(share=1.0, golden="golden/m", metric="accuracy", floor=0.9)
            return Admission(plain.target, rule, plain.target)

    made, told, incidents = attempt(
        node, trust=Auto(), trial=lambda *a, **k: {**trial(*a, **k), "accuracy": 0.5}
    )
    assert made.run() is None
    assert incidents[0].kind == "metric"
    assert "0.5000" in told[-1].reason
    still_serves_one(node)


def test_stale_metadata_is_no_verdict_but_takes_nothing_new(node):
    class Stale(Signed):
        def refresh(self):
            return Freshness(False, -1.0, (AttemptRefused("freeze", "it has expired"),))

    made, told, incidents = attempt(node, trust=Stale())
    with pytest.raises(Unavailable, match="stale"):
        made.run()
    assert told[-1].state == "ASSIGNED"
    assert incidents[0].kind == "freeze"
    still_serves_one(node)


def test_a_target_of_another_version_than_assigned_is_refused(node):
    class Swapped(Signed):
        def admit(self, path, *, node, committed_version):
            return super().admit(path_of(4), node=node, committed_version=committed_version)

    made, _, incidents = attempt(node, trust=Swapped())
    assert made.run() is None
    assert incidents[0].kind == "wrong-target"
    still_serves_one(node)


def test_calls_that_fail_on_probation_send_the_version_back(node):
    node.server.calls = lambda _: (4, 6)
    made, told, incidents = attempt(node)
    assert made.run() is None
    assert told[-1].state == "RETURNED"
    assert "6 of 10 calls failed" in told[-1].reason
    assert incidents[0].kind == "probation"
    still_serves_one(node)


def test_a_server_that_restarts_on_probation_is_seen(node):
    class Restarting(Server):
        def load(self, model, path, digest_):
            super().load(model, path, digest_)
            self.served = {MODEL: "1"}

    seam = Restarting(dict(node.server.served))
    made, told, _ = attempt(node, seam=seam)
    assert made.run() is None
    assert told[-1].state == "RETURNED"
    assert "the serving process ended" in told[-1].reason


def test_what_serving_refuses_is_returned(node):
    def refuse(model, path, digest_):
        raise InvalidInput("no such runtime")

    node.server.load = refuse
    made, told, _ = attempt(node)
    assert made.run() is None
    assert "serving refused it: no such runtime" in told[-1].reason
    still_serves_one(node)


def test_an_attempt_that_is_superseded_stops_without_a_verdict(node):
    made, told, _ = attempt(node, superseded=lambda: True)
    with pytest.raises(Superseded):
        made.run()
    assert told[-1].state not in {"FAILED", "RETURNED", "COMMITTED"}
    still_serves_one(node)


def test_a_failed_attempt_is_not_tried_again_until_its_number_grows(node):
    node.bring(3)
    ever = [*node.server.ever]
    node.bring(3)
    assert node.server.ever == ever
    assert node.reconciler.progress[MODEL].state == "FAILED"


def test_bundles_that_no_pointer_names_are_removed(node):
    node.bring(2)
    kept = [path.read_bytes() for path in node.home.bundles.iterdir() if path.is_file()]
    assert kept == [content(2)]


def test_an_older_document_changes_nothing(node):
    node.bring(2)
    node.reconciler.take(pb.Desired(number=1))
    assert node.reconciler.desired.number == 2


ADAPTED = b"an adapted bundle"


def give_samples(node):
    node.home.samples.mkdir(exist_ok=True)
    (node.home.samples / f"{MODEL}.npz").write_bytes(b"samples")


def start_point(*args, **kwargs):
    return {**trial(*args, **kwargs), "adapt_steps": 3}


def comparing(adapted, current, seen):
    """A child that writes an adapted bundle and says how it compares."""

    def adaptation(path, *, size, samples, seed, out, current=None):
        seen.update(samples=samples, seed=seed, current=current)
        out.write_bytes(ADAPTED)
        return Compared(
            support=5, held_out=5, start=0.1, adapted=adapted, current=told, digest="ad" * 32
        )

    told = current
    return adaptation


def test_a_start_point_serves_in_the_form_it_was_adapted_to(node):
    give_samples(node)
    before = read_pointers(node.home.models)[0][MODEL]

    class Serving(Server):
        def load(self, model, path, digest_):
            assert (path.read_bytes(), digest_) == (ADAPTED, "ad" * 32)
            self.served[model] = "2"

    seen: dict[str, Any] = {}
    made, told, incidents = attempt(
        node, trial=start_point, adaptation=comparing(0.9, 0.5, seen), seam=Serving()
    )
    pointer = made.run()
    assert (pointer.version, pointer.digest) == (2, "ad" * 32)
    assert pointer.sha256 == hashlib.sha256(ADAPTED).hexdigest()
    states = [*dict.fromkeys(progress.state for progress in told)]
    assert states[-4:] == ["TRIED", "ADAPTED", "PROBATION", "COMMITTED"]
    assert seen["current"] == node.home.bundles / before.sha256
    assert seen["seed"].endswith(f"\0{MODEL}")
    assert list(node.home.run.glob("*.adapted")) == []
    assert incidents == []


def test_what_serves_stays_where_it_is_better_on_the_nodes_own_samples(node):
    give_samples(node)
    made, told, incidents = attempt(node, trial=start_point, adaptation=comparing(0.8, 0.9, {}))
    assert made.run() is None
    assert told[-1].state == "KEPT"
    assert (
        "accuracy 0.800 (0.100 before) on 5 others; the serving version has 0.900"
        in told[-1].reason
    )
    assert incidents == []
    still_serves_one(node)
    assert node.reconciler._context.journal.last[MODEL].ended


def test_a_start_point_without_samples_is_refused_with_where_to_put_them(node):
    made, told, incidents = attempt(node, trial=start_point)
    assert made.run() is None
    assert (told[-1].state, incidents[0].kind) == ("FAILED", "adaptation")
    assert f"triplane edge samples {MODEL} FILE.npz --home {node.home.path}" in told[-1].reason
    still_serves_one(node)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("length", "says", "grown", "refused"),
    [
        (150 * MIB, 300 * MIB, 375 * MIB, False),  # a matrix product of 6000 by 6553
        (36 * MIB, 68 * MIB, 220 * MIB, False),  # a convolution of 1,000 channels
        (381 * MIB, 763 * MIB, 777 * MIB, False),
        (MIB // 50, MIB // 25, 200 * MIB, True),  # a small file that asks for much
        (100 * MIB, 200 * MIB, 1000 * MIB, True),
    ],
)
def test_memory_is_judged_by_what_the_runtime_needs_for_a_bundle(length, says, grown, refused):
    answer = {**trial_of(1), "memory_limit_bytes": says, "grown_bytes": grown}
    target = replace(
        Signed().admit(path_of(1), node="n", committed_version=0).target, length=length
    )
    if not refused:
        judge_trial(answer, target)
        return
    with pytest.raises(AttemptRefused) as told:
        judge_trial(answer, target)
    assert told.value.kind == "memory"


def trial_of(version):
    return {
        "model": MODEL, "version": version, "target": "ort-x64", "latency_limit_s": 0,
        "content_digest": digest(version), "model_digest": digest(version),
    }  # fmt: skip


def two_models(node):
    """A document that assigns version 2 of the model, and of another whose name comes before."""
    desired = pb.Desired(number=9)
    for model in ("a", MODEL):
        path = path_of(2).replace(f"/{MODEL}@", f"/{model}@")
        desired.assignments.add(
            model=model, version=2, target_path=path, attempt=9, rollout="r", probation_s=1e-9
        )
    node.reconciler.take(desired)


@pytest.mark.parametrize(
    "error", [Unavailable("away"), Conflict("busy"), NotFound("gone"), KeyError("a fault of ours")]
)
def test_what_one_model_meets_does_not_stop_another(node, error):
    signed = Signed()

    class Odd(Signed):
        def admit(self, path, *, node, committed_version):
            if path.startswith("release/a@"):
                raise error
            return signed.admit(path, node=node, committed_version=committed_version)

    node.reconciler._context = replace(node.reconciler._context, trust=Odd())
    two_models(node)
    for _ in range(4):
        node.reconciler.step()
    assert node.server.served == {MODEL: "2"}
    assert str(error) in node.reconciler.progress["a"].reason


def test_a_model_that_is_not_wanted_any_more_leaves_no_pause_behind(node):
    class Away(Signed):
        def admit(self, path, *, node, committed_version):
            raise Unavailable("away")

    trust = node.reconciler._context.trust
    node.reconciler._context = replace(node.reconciler._context, trust=Away())
    two_models(node)
    for _ in range(3):
        waits_s = node.reconciler.step()
    assert 0 < waits_s <= LOOK_S
    node.reconciler._context = replace(node.reconciler._context, trust=trust)
    node.reconciler.take(pb.Desired(number=10))
    for model, pause in node.reconciler._pauses.items():
        node.reconciler._pauses[model] = replace(pause, until_s=0.0)
    assert node.reconciler.step() == LOOK_S

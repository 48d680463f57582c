"""Real devices in runs whose scores are masked, off, or declined by owners."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.cloud.federation.given import ended, start_request
from tests.cloud.federation.masked import masked_request
from tests.device.devices import client_of, cloud_of, taking_part
from tests.support.deadlines import within

from triplane.cloud.cli.runs import headline, run_text
from triplane.cloud.federation import journal
from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.run_projection import RunProjection, follow
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.run import Arrived, Exchanged

NAMES = ("ann", "bob", "cem")

pytestmark = [pytest.mark.slow, pytest.mark.long]


async def story(folder, request, owners=()):
    """(the ended run, its record, events and last projection, the devices' own choices)."""
    async with cloud_of(folder) as cloud:
        clients = [await client_of(cloud, folder, n, i) for i, n in enumerate(NAMES)]
        for client, settings in zip(clients, owners, strict=False):
            client.settings = replace(client.settings, **settings)
        async with taking_part(*clients):
            begun = await cloud.federation.begin(request, by="operator")
            run = await ended(cloud, begun.id)
            choices = [await asyncio.to_thread(client.choice) for client in clients]
        record = await cloud.database.read(lambda c: journal.run_record(c, run.id))
        events = await cloud.database.read(lambda c: journal.events(c, run.id))
        last = await cloud.database.read(lambda c: journal.last_projection(c, run.id))
        return run, record, events, last, choices


def test_the_mean_of_masked_scores_is_that_of_what_the_devices_measured(tmp_path):
    request = masked_request(model="tiny@1", scores="", rounds=1)
    run, record, events, last, choices = within(story(tmp_path, request))
    assert (run.phase, run.reason, run.spec.scores) == (pb.Run.DONE, "", "masked")
    assert run.rounds[-1].counted == 3
    means = [np.mean([getattr(c, at) for c in choices]) for at in ("before", "after")]
    shown = run.rounds[-1].before.mean, run.rounds[-1].after.mean
    assert shown == pytest.approx(means, abs=1e-6)
    assert not any(m.HasField("score") for m in run.members)
    assert f"{shown[1]:.1%} (masked)" in run_text(run)
    projection = journal.first_projection(record)
    for event in events:
        projection, _ = follow(projection, event)
    assert projection == last == from_json(RunProjection, to_json(last))
    assert [e.score is not None for e in events if isinstance(e, Exchanged)] == [False] * 9 + [True]


def test_an_owner_who_shares_no_scores_is_not_asked_and_the_others_score(tmp_path):
    request = start_request(model="tiny@1", cohort={"devices": 3, "quorum": 1.0}, rounds=1)
    run, *_ = within(story(tmp_path, request, [{"scores": False}]))
    assert run.phase == pb.Run.DONE, run.reason
    assert (run.rounds[-1].evaluates, run.rounds[-1].asked, run.rounds[-1].counted) == (True, 2, 2)
    scored = {m.device for m in run.members if m.HasField("score")}
    assert scored == {"bob", "cem"}
    assert "no device scored" not in headline(run)


@pytest.mark.parametrize("masked", [False, True])
def test_a_run_that_nobody_scores_says_so_and_does_not_wait(tmp_path, masked):
    cohort = {"devices": 3, "quorum": 1.0, "deadline_s": 3600.0}
    make = masked_request if masked else start_request
    request = make(model="tiny@1", cohort=cohort, rounds=1, **({"scores": ""} if masked else {}))
    run, *_ = within(story(tmp_path, request, [{"scores": False}] * 3))
    assert run.phase == pb.Run.DONE, run.reason
    assert not any(r.evaluates for r in run.rounds)
    assert "no device scored the result" in headline(run)


def test_with_noise_of_devices_nobody_scores_and_the_first_line_says_so(tmp_path):
    noise = pb.Noise(clip=0.5, multiplier=5.0, epsilon=50.0, placement="distributed")
    request = masked_request(model="tiny@1", scores="", rounds=1, noise=noise)
    run, *_ = within(story(tmp_path, request))
    assert (run.phase, run.spec.scores) == (pb.Run.DONE, "off")
    assert not any(r.evaluates for r in run.rounds)
    assert "devices do not score" in headline(run)


def test_an_update_with_noise_tells_neither_loss_nor_times(tmp_path):
    request = start_request(
        model="tiny@1", cohort={"devices": 3, "quorum": 1.0}, rounds=1,
        noise=pb.Noise(clip=0.5, multiplier=5.0, epsilon=50.0),
    )  # fmt: skip
    run, _, events, *_ = within(story(tmp_path, request))
    assert run.phase == pb.Run.DONE, run.reason
    updates = [e.update for e in events if isinstance(e, Arrived)]
    assert [(u.examples, u.loss, u.seconds) for u in updates] == [(1, 0.0, 0.0)] * 3
    assert run.rounds[0].loss == 0
    assert "epsilon does not cover scores" in headline(run)

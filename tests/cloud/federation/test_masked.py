"""Whole masked runs over mutual TLS: sums, losses, dishonest devices, devices that are spent."""

import asyncio
import itertools
import secrets

import numpy as np
import pytest
from tests.cloud.federation.given import (
    CLASSES,
    FEATURES,
    ended,
    enrolled,
    living,
    make_home,
    model_bytes,
    registered,
    start_request,
)
from tests.cloud.federation.masked import NORM, MaskedDevice, masked_request, weighted_mean
from tests.support.deadlines import within

from triplane.cloud.cli.runs import run_text
from triplane.cloud.federation import live
from triplane.cloud.federation.live import LiveRun
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.cloud.trust.rosters import change_roster
from triplane.proto import federation_pb2 as pb
from triplane.proto.disk import NoRoom
from triplane.proto.identity import key_digest
from triplane.unified_ir.federated.core.files import INLINE_BYTES, read_state
from triplane.unified_ir.federated.core.masked_step import STEPS
from triplane.unified_ir.federated.core.run import Exchanged
from triplane.unified_ir.federated.masking import range_for

NAMES = ("ann", "bob", "cem", "dia", "eli", "fay")
WIDTH = 6000  # of a model whose masked update is uploaded

pytestmark = pytest.mark.slow


async def masked_devices(cloud, folder, count, **fields):
    plain = [await enrolled(cloud, folder, name, n) for n, name in enumerate(NAMES[:count])]
    return [MaskedDevice(d.identity, d.shard, d.folder, **fields) for d in plain]


async def run_of(tmp_path, count, request, prepare=lambda _: None, *, settled=False):
    """(the ended run, its devices, the shared states by round).

    settled: wait until each device was told what became of its contribution.
    """
    async with running(make_home(tmp_path)) as cloud:
        if request.spec.model == "own":
            await pushed(cloud, "own", model_bytes(tmp_path, normalized=True))
        else:
            await registered(cloud, tmp_path)
        devices = await masked_devices(cloud, tmp_path, count)
        prepare(devices)
        async with living(devices):
            made = await cloud.federation.begin(request, by="operator")
            run = await ended(cloud, made.id)
            for device in devices if settled else ():
                await device.until(lambda work: work.settled)
            states = await asyncio.to_thread(states_of, devices)
            return run, devices, states


async def pushed(cloud, model, data):
    push = Push(model=model, blob=cloud.blobs.put(data), key=secrets.token_bytes(16))
    await cloud.registry.push(push, by="operator")


def states_of(devices):
    """The states that devices were sent, by round, the evaluation of the last one included."""
    states = {}
    for device in devices:
        for work in device.heard:
            for task in work.tasks:
                evaluates = task.WhichOneof("work") == "evaluate"
                plan = next(iter(device.plans.values()))
                path = device.blobs.find(task.state.sha256)
                states[task.round, evaluates] = read_state(path, plan=plan.digest)
    return states


def check_mean(before, after, secrets_of, cap):
    """The change of the state is the weighted mean of the clipped updates, but for the rounding.

    Each entry of the sum of a section is off by less than a step for each device, in a block of
    256.
    """
    mean = weighted_mean(secrets_of, cap)
    weight = sum(min(s.examples, cap) for s in secrets_of)
    for names in secrets_of[0].sections:
        step = 2 * range_for(NORM, sum(mean[n].size for n in names)) / 255
        bound = len(secrets_of) * step * np.sqrt(256) * cap / weight
        length = norm_of([np.asarray(after[n], np.float64) - before[n] - mean[n] for n in names])
        assert 0 < length < bound
        assert length < 0.2 * norm_of([mean[n] for n in names]), "the rounding is small beside it"


def check_bytes_down(round_, devices):
    """Each step counts once, and the state is sent with the first one only."""
    tasks = [task for d in devices for task, _ in d.answers if task.round == 1]
    steps = sum(task.masking.ByteSize() for task in tasks)
    state = sum(len(task.inline_state) for task in tasks)
    assert 0 < state == sum(d.answers[0][0].state.size for d in devices)
    fetched = round_.bytes_down - steps - state
    assert 0 <= fetched <= sum(task.plan.size + task.state.size for task in tasks) / 5


def norm_of(tensors):
    return np.sqrt(sum(float(np.square(x).sum()) for x in tensors))


@pytest.mark.parametrize(
    ("model", "algorithm", "cap"),
    [
        ("tiny", "fedavg", 24),
        pytest.param("tiny", "maml", 1, marks=pytest.mark.long),
        pytest.param("own", "fedavg", 24, marks=pytest.mark.long),
    ],
)
def test_the_state_of_a_masked_run_moves_by_the_weighted_mean_of_the_updates(
    tmp_path, model, algorithm, cap
):
    def prepare(devices):
        devices[1].shard.train["x"] = devices[1].shard.train["x"][:15]
        devices[1].shard.train["y"] = devices[1].shard.train["y"][:15]

    request = masked_request(model=model, algorithm=algorithm)
    run, devices, states = within(run_of(tmp_path, 3, request, prepare))
    assert run.phase == pb.Run.DONE, run.reason
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 3), (2, False, 3), (2, True, 3),
    ]  # fmt: skip
    assert all(r.loss == 0 for r in run.rounds), "no loss of a device is published"
    check_bytes_down(run.rounds[0], devices)
    assert not run.refusals.reasons
    for number, following in ((1, (2, False)), (2, (2, True))):
        tasks = {d.name: next(t for t, _ in d.answers if t.round == number) for d in devices}
        secrets_of = [d.open[tasks[d.name].lease] for d in devices]
        assert tasks["ann"].masking.encoding.cap == cap
        assert len(secrets_of[0].sections) == 1 + (model == "own")
        check_mean(states[number, False], states[following], secrets_of, cap)


@pytest.mark.long
def test_commits_that_fail_while_answers_are_taken_change_no_sum(tmp_path, monkeypatch):
    """The cohort has taken the answers by then; the devices send them once more."""
    monkeypatch.setattr(live, "RETRY_S", 0.0)
    commit, tried = LiveRun._commit, set()

    async def refused_once(self, before, batch):
        step = next((x.event.step for x, _ in batch.steps if isinstance(x.event, Exchanged)), None)
        if step is not None and (step, batch.state.state.turn[0]) not in tried:
            tried.add((step, batch.state.state.turn[0]))
            raise NoRoom("the database has no room")
        return await commit(self, before, batch)

    monkeypatch.setattr(LiveRun, "_commit", refused_once)
    run, devices, states = within(run_of(tmp_path, 3, masked_request(rounds=1)))
    assert run.phase == pb.Run.DONE, run.reason
    assert len(tried) == len(STEPS)
    assert (run.rounds[0].counted, run.rounds[0].lost) == (3, 0)
    secrets_of = [next(iter(d.open.values())) for d in devices]
    check_mean(states[1, False], states[1, True], secrets_of, 24)


@pytest.mark.long
@pytest.mark.parametrize("step", ["share", "mask", "sign", "unmask"])
def test_a_device_lost_in_a_step_is_in_the_sum_only_if_its_input_came(tmp_path, step):
    # The shares are waited for until the deadline of the round.
    cohort = {"deadline_s": 20.0 if step == "share" else 600.0}
    request = masked_request(5, lost_share=0.2, phase_s=1.0, rounds=1, cohort=cohort)
    run, devices, states = within(
        run_of(tmp_path, 5, request, lambda devices: devices[2].lost.update({1: step}))
    )
    assert run.phase == pb.Run.DONE, run.reason
    stays = step in {"sign", "unmask"}
    assert (run.rounds[0].counted, run.rounds[0].lost) == (4 + stays, 1 - stays)
    inside = [d for d in devices if stays or d.name != "cem"]
    tasks = [next(t for t, _ in d.answers if t.round == 1) for d in inside]
    secrets_of = [d.open[t.lease] for d, t in zip(inside, tasks, strict=True)]
    check_mean(states[1, False], states[1, True], secrets_of, 24)


def wrong(step, change):
    """A twist of the device's answer to this step."""

    def twist(_device, _task, at, sent):
        if at == step:
            change(sent.masked)
        return sent

    return twist


def of_another(message):
    for body in ("shares", "input", "signature", "revealed"):
        if message.WhichOneof("answer") == body:
            getattr(message, body).position ^= 1


def shorter(message):
    message.input.data = message.input.data[:-1]


def unsigned(message):
    body = getattr(message, message.WhichOneof("answer"))
    body.signature = body.signature[:-1] + bytes([body.signature[-1] ^ 1])


def larger(message):
    for i in range(400):
        message.revealed.self_masks[i] = bytes(33)


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "change", "kind", "text"),
    [
        ("keys", unsigned, "masking", "not signed by its identity key"),
        ("share", of_another, "masking", "answers for itself"),
        ("mask", shorter, "masking", "bytes here, got"),
        ("mask", unsigned, "masking", "is not valid"),
        ("sign", of_another, "masking", "answers for itself"),
        ("unmask", larger, "oversized", "answered by at most"),
    ],
)
def test_a_wrong_answer_is_refused_and_the_others_go_on(tmp_path, step, change, kind, text):
    def prepare(devices):
        devices[0].twist = wrong(step, change)

    request = masked_request(5, lost_share=0.2, phase_s=20.0, rounds=1, cohort={"quorum": 0.8})
    run, _, _ = within(run_of(tmp_path, 5, request, prepare))
    assert run.phase == pb.Run.DONE, run.reason
    ((refusal),) = run.refusals.reasons
    assert (refusal.kind, refusal.count) == (kind, 1)
    assert text in refusal.newest
    assert run.rounds[0].counted == 4 + (step in {"sign", "unmask"})


@pytest.mark.long
def test_a_round_that_fails_after_inputs_stops_a_run_that_has_no_other_devices(tmp_path):
    def prepare(devices):
        for device in devices[:2]:
            device.lost[1] = "sign"

    request = masked_request(3, phase_s=1.0)
    run, devices, _ = within(run_of(tmp_path, 3, request, prepare))
    assert run.phase == pb.Run.STOPPED
    assert "Add devices and resume the run" in run.reason
    assert "2 survivors must sign the list" in run.rounds[0].given_up
    assert "no answer to the step signatures from ann, bob" in run.rounds[0].given_up
    assert all(len(d.ledger.load().entries) == 1 for d in devices)


@pytest.mark.long
def test_the_run_says_whose_shares_made_a_round_fail_and_other_devices_do_not_learn_it(tmp_path):
    def unreadable(message):
        for i, sealed in message.shares.sealed.items():
            message.shares.sealed[i] = bytes(len(sealed))

    def prepare(devices):
        devices[1].twist = wrong("share", unreadable)

    run, devices, _ = within(run_of(tmp_path, 3, masked_request(3), prepare, settled=True))
    assert run.phase == pb.Run.STOPPED
    assert "neighbours of 'bob' (" in run.rounds[0].given_up
    assert run.rounds[0].given_up in run.reason
    ((refusal),) = run.refusals.reasons
    assert "could not open the shares that it sealed" in refusal.newest
    settled = {(d.name, s.reason) for d in devices for work in d.heard for s in work.settled}
    assert settled == {
        ("bob", refusal.newest), *((d, "the round was given up") for d in ("ann", "cem"))
    }  # fmt: skip


@pytest.mark.long
def test_a_sum_beyond_what_honest_devices_can_send_is_refused(tmp_path):
    def prepare(devices):
        devices[0].lies = True

    request = masked_request(3, phase_s=20.0)
    run, _, _ = within(run_of(tmp_path, 3, request, prepare))
    assert run.phase == pb.Run.STOPPED
    assert "so a device lied, and the state is kept" in run.rounds[0].given_up


def bounds_of(devices):
    """(norms of parameters, norms of buffers) that devices were told, by round."""
    told = {
        (t.round, t.masking.encoding.norm, t.masking.encoding.buffer_norm)
        for d in devices
        for t, _ in d.answers
    }
    rounds = sorted(told)
    assert [n for n, *_ in rounds] == list(range(1, len(rounds) + 1)), "one bound in a round"
    return [p for _, p, _ in rounds], [b for _, _, b in rounds]


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny", "own"])
def test_the_bound_follows_the_updates_from_round_to_round(tmp_path, model):
    """Models with and without float buffers, whose bound is one of its own."""
    request = masked_request(3, norm="adaptive:64", rounds=8, model=model)
    run, devices, _ = within(run_of(tmp_path, 3, request))
    assert run.phase == pb.Run.DONE, run.reason
    assert run.spec.robustness.norm_bound == "adaptive:64"
    norms, buffer_norms = bounds_of(devices)
    assert norms[0] == buffer_norms[0] == 64
    for before, after in itertools.pairwise(norms):
        share = (np.log(before / after) + 0.5) * 3
        assert share == pytest.approx(round(share)), "a count of three devices"
    assert [r.norm_bound for r in run.rounds if not r.evaluates] == norms
    assert "norm bound 64" in run_text(run)
    assert norms[4] == pytest.approx(64 * np.exp(-2)), "all were short"
    assert (buffer_norms[1] < 64) is (model == "own")


@pytest.mark.long
def test_a_device_that_lies_about_its_bit_moves_the_bound_by_its_bit(tmp_path):
    def prepare(devices):
        devices[0].bits = 0

    request = masked_request(3, norm="adaptive:64", rounds=3)
    run, devices, _ = within(run_of(tmp_path, 3, request, prepare))
    assert run.phase == pb.Run.DONE, run.reason
    norms, _ = bounds_of(devices)
    assert norms == pytest.approx([64 * np.exp(-i / 6) for i in range(3)])


@pytest.mark.long
def test_a_device_that_adds_more_than_a_bit_spoils_the_round_and_the_bound_stays(tmp_path):
    def prepare(devices):
        devices[0].bits = 3  # all that two bits hold

    request = masked_request(3, norm="adaptive:64")
    run, _, _ = within(run_of(tmp_path, 3, request, prepare))
    assert run.phase == pb.Run.STOPPED
    assert "so a device lied" in run.rounds[0].given_up


@pytest.mark.long
def test_an_update_in_the_clear_is_refused_in_a_masked_round(tmp_path):
    def prepare(devices):
        devices[0].in_the_clear = True

    request = masked_request(3, cohort={"devices": 4, "quorum": 0.75}, rounds=1)
    run, _, _ = within(run_of(tmp_path, 4, request, prepare))
    assert run.phase == pb.Run.DONE, run.reason
    ((refusal),) = run.refusals.reasons
    assert refusal.newest == "the round is masked, and this update is in the clear"


@pytest.mark.long
def test_masked_updates_above_the_inline_limit_are_uploaded_and_removed_after_the_round(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await pushed(cloud, "wide", model_bytes(tmp_path, hidden=WIDTH))
            devices = await masked_devices(cloud, tmp_path, 3)
            async with living(devices):
                request = masked_request(3, model="wide", rounds=1)
                run = await ended(cloud, (await cloud.federation.begin(request, by="op")).id)
            return run, devices, cloud.federation.updates.folder.folder

    run, devices, folder = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    sent = [x.masked.input for d in devices for _, x in d.answers if x.masked.HasField("input")]
    assert all(x.blob.size > INLINE_BYTES and not x.data for x in sent)
    assert len(sent) == 3
    entries = FEATURES * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES
    assert all(x.blob.size < 0.5 * 4 * entries for x in sent)
    assert run.rounds[0].bytes_up > 3 * sent[0].blob.size
    assert not [p for p in folder.iterdir() if p.is_file()]


@pytest.mark.long
def test_answers_that_are_sent_again_change_nothing(tmp_path):
    def prepare(devices):
        devices[1].repeats = True

    run, _, _ = within(run_of(tmp_path, 3, masked_request(3), prepare))
    assert run.phase == pb.Run.DONE, run.reason
    assert not run.refusals.reasons
    assert all((m.counted, m.dropped) == (3, 0) for m in run.members)


@pytest.mark.long
def test_an_answer_to_a_step_that_is_not_the_present_one_is_refused(tmp_path):
    def early(device, task, step, sent):
        if step == "share":
            sent.masked.signature.CopyFrom(pb.SurvivorSignature(signature=b"s"))
        return sent

    def prepare(devices):
        devices[1].twist = early

    request = masked_request(5, lost_share=0.2, rounds=1)
    run, _, _ = within(run_of(tmp_path, 5, request, prepare))
    assert run.phase == pb.Run.DONE, run.reason
    ((refusal),) = run.refusals.reasons
    assert refusal.newest == "the round is at the step shares, and this answers signatures"


@pytest.mark.long
def test_an_answer_of_a_masked_round_is_refused_in_a_round_in_the_clear(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await masked_devices(cloud, tmp_path, 2)

            async def answers(device, task):
                sent = pb.Contribution(run=task.run, round=task.round, lease=task.lease)
                sent.masked.signature.signature = b"s"
                await device.client.send(sent)

            devices[0]._worked = lambda task: answers(devices[0], task)
            async with living(devices):
                request = start_request(rounds=1, cohort={"devices": 2, "quorum": 0.5})
                return await ended(cloud, (await cloud.federation.begin(request, by="op")).id)

    run = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert {r.kind for r in run.refusals.reasons} == {"kind"}
    assert run.rounds[0].counted == 1


@pytest.mark.long
def test_a_device_outside_of_the_roster_does_not_cost_the_others_their_round(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await masked_devices(cloud, tmp_path, 4)
            listed = frozenset(key_digest(d.identity.certificate) for d in devices[:3])
            await asyncio.to_thread(
                change_roster, cloud.repository, lambda _: listed, tmp_path / "keys"
            )
            request = masked_request(4, cohort={"quorum": 0.75}, lost_share=0.25, rounds=1)
            async with living(devices):
                made = await cloud.federation.begin(request, by="operator")
                return await ended(cloud, made.id)

    run = within(story())
    assert (run.phase, run.reason) == (pb.Run.DONE, "")
    assert (run.rounds[0].counted, run.rounds[0].refused) == (3, 1)
    (refused,) = run.refusals.reasons
    assert "is not in the roster 2 of 3 devices" in refused.newest


def scores_of(run):
    """(after the round, mean before, mean after) of each evaluating round that counted."""
    return [(r.number, r.before.mean, r.after.mean) for r in run.rounds if r.HasField("after")]


def test_the_cloud_learns_the_mean_of_masked_scores_and_no_score_of_a_device(tmp_path):
    def prepare(devices):
        held_out = devices[1].shard.held_out
        devices[1].shard.held_out.update({name: x[:5] for name, x in held_out.items()})

    request = masked_request(3, scores="masked", evaluate_every=1)
    run, devices, _ = within(run_of(tmp_path, 3, request, prepare))
    assert (run.phase, run.reason) == (pb.Run.DONE, "")
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 3), (1, True, 3), (2, False, 3), (2, True, 3),
    ]  # fmt: skip
    for number, before, after in scores_of(run):
        scores = [d.scored[number] for d in devices]
        samples = sum(x.samples for x in scores)
        assert samples == 12 + 5 + 12
        exact = [sum(s * x.samples for s, x in pairs) / samples for pairs in (
            [(x.before, x) for x in scores], [(x.after, x) for x in scores],
        )]  # fmt: skip
        assert (before, after) == pytest.approx(exact, abs=1e-6)
    assert len(scores_of(run)) == 2
    assert not any(m.HasField("score") for m in run.members)
    assert run.rounds[1].after.masked
    assert run.rounds[1].after.worst == 0
    sent = {sent.WhichOneof("outcome") for d in devices for _, sent in d.answers}
    assert sent == {"masked"}
    entries = [len(d.ledger.load().entries) for d in devices]
    assert entries == [4, 4, 4], "an update for each of two states, a score for two"


@pytest.mark.long
def test_a_score_in_the_clear_is_refused_in_a_masked_evaluation_and_the_run_goes_on(tmp_path):
    def clear(_device, task, step, sent):
        if step == "keys" and task.WhichOneof("work") == "evaluate":
            sent.score.CopyFrom(pb.Score(samples=12, before=0.5, after=0.5))
        return sent

    def prepare(devices):
        devices[0].twist = clear

    request = masked_request(3, scores="masked", rounds=1)
    run, _, _ = within(run_of(tmp_path, 3, request, prepare))
    assert run.phase == pb.Run.DONE, run.reason
    ((refusal),) = run.refusals.reasons
    assert refusal.newest == "the round is masked, and this score is in the clear"
    assert "2 devices of 3 needed advertised keys; ann did not" in run.rounds[-1].given_up
    assert not scores_of(run)


@pytest.mark.long
def test_a_mean_score_that_no_devices_have_is_refused_and_the_run_goes_on(tmp_path):
    def lies(device, task, step, sent):
        if step == "keys" and task.WhichOneof("work") == "evaluate":
            levels, weight = device.open[task.lease].vectors
            device.open[task.lease].vectors = levels * 0 + np.uint64((1 << 25) - 1), weight
        return sent

    def prepare(devices):
        devices[0].twist = lies
        held_out = devices[0].shard.held_out
        held_out.update({name: x[:1] for name, x in held_out.items()})

    request = masked_request(3, scores="masked", rounds=1)
    run, _, _ = within(run_of(tmp_path, 3, request, prepare))
    assert run.phase == pb.Run.DONE, run.reason
    assert "a device lied" in run.rounds[-1].given_up
    assert not scores_of(run)

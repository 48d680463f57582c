"""Runs with differential privacy: over the wire, after kills, and what is refused."""

import asyncio
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from tests.cloud.federation.given import (
    devices_of,
    ended,
    living,
    make_home,
    registered,
    start_request,
)

from triplane.cloud.cli.runs import run_text
from triplane.cloud.dashboard.runs import run_row
from triplane.cloud.federation import journal
from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.masked_cohort import CohortMean
from triplane.cloud.federation.masked_encoding import next_norms, round_encoding
from triplane.cloud.federation.masked_spec import least_and_honest
from triplane.cloud.federation.private_runs import noise_terms, privacy_of, published_change
from triplane.cloud.federation.spec import with_defaults
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert.conversion import read_model
from triplane.unified_ir.federated.core.run import Reduced, RunState
from triplane.unified_ir.federated.masking.noise import joint_multiplier
from triplane.unified_ir.federated.privacy.accountant import NoiseEvent, spending

DEADLINE_S = 90.0
NAMES = ("ann", "bob", "cy", "dan")


def spec(**fields):
    return pb.Spec(**{"model": "tiny", "noise": pb.Noise(epsilon=4.0), "rounds": 10, **fields})


def budget_of(made):
    privacy = privacy_of(made)
    assert privacy is not None
    return privacy.budget()


def story(folder, **fields):
    """The ended run, its Reduced events, its last projection and the meta of its result."""

    async def play():
        async with asyncio.timeout(DEADLINE_S), running(make_home(folder)) as cloud:
            await registered(cloud, folder)
            devices = await devices_of(cloud, folder, NAMES)
            async with living(devices):
                made = await cloud.federation.begin(start_request(**fields), by="operator")
                run = await ended(cloud, made.id)
            events = await cloud.database.read(lambda c: journal.events(c, run.id))
            last = await cloud.database.read(lambda c: journal.last_projection(c, run.id))
            meta = {}
            if run.result:
                version = await cloud.registry.version(run.result)
                module, _ = read_model(cloud.blobs.find(version.blob))
                meta = dict(module.meta)
            tasks = [k.task for d in devices for k in d.kept]
            return run, [e for e in events if isinstance(e, Reduced)], last, meta, tasks

    return asyncio.run(play())


@pytest.mark.long
def test_a_private_run_spends_its_epsilon_and_says_so_everywhere(tmp_path):
    noise = pb.Noise(epsilon=4.0, clip=0.5, separation=2, correlated=True)
    run, reduced, last, meta, tasks = story(tmp_path, rounds=4, noise=noise)
    assert run.phase == pb.Run.DONE, run.reason
    multiplier = run.spec.noise.multiplier
    assert run.epsilon_spent == pytest.approx(spending([NoiseEvent(multiplier, 2)]).epsilon(1e-5))
    assert [e.charged for e in reduced] == [1, 2, 3, 4]
    assert {m.uses for m in last.state.members.values()} == {2}
    for text in (run_text(run), run_row(run)["privacy"]):
        assert "epsilon 4 of 4 spent at delta 1e-05 for one device" in text
    facts = json.loads(meta["privacy"])
    assert facts["epsilon"] == pytest.approx(4.0, rel=1e-4)
    assert (facts["unit"], facts["rounds"], facts["law"]) == ("one device", 4, "gaussian")
    assert facts["noise_multiplier"] == multiplier
    asked = [t.noise for t in tasks if t.WhichOneof("work") == "learn"]
    assert {(n.clip, n.multiplier, n.separation) for n in asked} == {(0.5, multiplier, 2)}
    assert not list((tmp_path / "home" / "federation" / "noise").glob("*"))


@pytest.mark.long
def test_a_run_ends_before_its_budget_is_passed(tmp_path):
    noise = pb.Noise(epsilon=4.0, multiplier=2.0)
    run, reduced, last, _, _ = story(tmp_path, rounds=50, noise=noise)
    budget = budget_of(run.spec)
    most = budget.most_rounds(50)
    assert 1 < most < 10
    assert [e.number for e in reduced] == list(range(1, most + 1))
    assert run.phase == pb.Run.DONE
    assert run.reason.startswith(f"{most} of 50 rounds fit into epsilon 4")
    assert last.state.budget.spent <= 4.0 < replace(budget, rounds=most + 1).spent
    assert any(r.evaluates for r in run.rounds), "the last round is scored"


@pytest.mark.long
def test_the_norm_follows_the_updates_in_the_journal(tmp_path):
    noise = pb.Noise(epsilon=50.0, clip=1e3, adaptive=True)
    run, reduced, last, _, tasks = story(tmp_path, rounds=4, noise=noise)
    assert run.phase == pb.Run.DONE, run.reason
    norms = [1e3, *(e.clip for e in reduced)]
    assert all(abs(np.log(b / a)) <= 0.1 + 1e-9 for a, b in itertools.pairwise(norms))
    assert len(set(norms)) > 1
    assert last.state.norm == norms[-1]
    sent = {(t.round, t.noise.clip) for t in tasks if t.WhichOneof("work") == "learn"}
    assert sent == set(enumerate(norms[:4], 1))


@pytest.mark.long
def test_a_model_with_statistics_of_batches_fails_before_its_first_round(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "triplane.cloud.federation.results.sent_buffers", lambda *_: ("norm.variance",)
    )
    run = story(tmp_path, noise=pb.Noise(epsilon=4.0))[0]
    assert run.phase == pb.Run.FAILED
    assert "'noise-central' does not compose with 'buffers'" in run.reason
    assert not run.rounds


def test_defaults_are_filled_in_and_the_noise_is_the_least_that_epsilon_allows():
    made = with_defaults(spec(noise=pb.Noise(epsilon=4.0, separation=2)))
    noise = made.noise
    assert (noise.placement, noise.clip, noise.delta) == ("central", 1.0, 1e-5)
    assert spending([NoiseEvent(noise.multiplier, 5)]).epsilon(1e-5) == pytest.approx(4.0)
    assert (made.robustness.norm_bound, made.robustness.returns) == ("1.0", 0)
    assert with_defaults(made) == made
    assert journal.plan_of(made).budget == budget_of(made)
    assert journal.plan_of(made).clip == 1.0
    assert not with_defaults(spec(noise=None)).HasField("noise")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"noise": pb.Noise()}, "an epsilon or a noise multiplier"),
        ({"noise": pb.Noise(epsilon=-1.0)}, "epsilon is above 0"),
        ({"noise": pb.Noise(epsilon=float("nan"))}, "epsilon is above 0"),
        ({"noise": pb.Noise(epsilon=1.0, delta=2.0)}, "delta is a probability"),
        ({"noise": pb.Noise(epsilon=1.0, clip=-3.0)}, "clipping norm"),
        ({"noise": pb.Noise(epsilon=1.0, clip_quantile=0.5)}, "belongs to adaptive clipping"),
        ({"noise": pb.Noise(epsilon=1.0, correlated=True)}, "needs devices that rest"),
        ({"noise": pb.Noise(epsilon=1.0, placement="distributed")},
         "'noise-distributed' does not compose with updates in the clear"),
        ({"noise": pb.Noise(epsilon=1.0, multiplier=0.2)}, "one round with noise multiplier 0.2"),
        ({"compression": "int8"}, "'noise-central' does not compose with 'int8'"),
        ({"algorithm": "scaffold"}, "does not compose with 'control-variates'"),
        ({"robustness": pb.Robustness(norm_bound="adaptive")}, "do not go with differential"),
        ({"robustness": pb.Robustness(returns=2)}, "do not go with differential"),
        ({"robustness": pb.Robustness(max_examples=9)}, "do not go with differential"),
        ({"robustness": pb.Robustness(aggregator="median"), "cohort": pb.Cohort(devices=5)},
         "'median' does not compose with 'noise-central'"),
        ({"flower": pb.Flower(strategy="fedavg")},
         "'flower-strategy' does not compose with 'noise-central'"),
        ({"masking": pb.MaskedRounds(least=3), "cohort": pb.Cohort(devices=5)},
         "'noise-central' does not compose with 'mask': the cloud cannot clip"),
        ({"masking": pb.MaskedRounds(least=3), "cohort": pb.Cohort(devices=5),
          "noise": pb.Noise(epsilon=1.0, placement="distributed", separation=2, correlated=True)},
         "does not compose with"),
        ({"masking": pb.MaskedRounds(least=3), "cohort": pb.Cohort(devices=5),
          "compression": "int8", "noise": pb.Noise(epsilon=1.0, placement="distributed")},
         "does not compose with 'int8'"),
    ],
)  # fmt: skip
def test_what_a_private_run_cannot_have_is_refused_by_name(fields, words):
    with pytest.raises(InvalidInput, match=words):
        with_defaults(spec(**fields))


def test_a_round_with_noise_of_devices_divides_by_its_devices_and_frees_frozen_tensors_of_it():
    """A missing device counts as zeros; honest changes of frozen tensors are zero, noise is not."""
    change = {"w": np.array([2.0, -4.0]), "still": np.array([1.0])}
    made = published_change(spec(cohort=pb.Cohort(devices=4)), change, 3, ("still",))
    assert made["w"].tolist() == [1.5, -3.0]
    assert made["still"].tolist() == [0.0]


def test_the_mean_of_groups_with_noise_is_that_of_the_round():
    """Of groups of 4 and 3 devices, of which one each is missing and adds zeros."""
    made = spec(cohort=pb.Cohort(devices=7), masking=pb.MaskedRounds(groups=2))
    sums, counts = (12.0, 5.0), (3, 2)
    groups = [
        published_change(made, {"w": np.array([total / count])}, count, ())["w"]
        for total, count in zip(sums, counts, strict=True)
    ]
    assert np.mean(groups) == pytest.approx(sum(sums) / 7)
    assert groups[0] == pytest.approx(12 / 3.5)


def test_a_masked_run_counts_on_the_fewest_honest_devices():
    noise = pb.Noise(epsilon=4.0, placement="distributed", clip=0.5)
    made = with_defaults(
        spec(noise=noise, masking=pb.MaskedRounds(), cohort=pb.Cohort(devices=10, quorum=0.6))
    )
    assert (made.masking.least, made.robustness.norm_bound) == (6, "0.5")
    assert least_and_honest(made) == (6, 5)
    assert with_defaults(made) == made
    budget = journal.plan_of(made).budget
    assert budget is not None
    assert (budget.law, budget.spent) == ("concentrated", 0.0)
    encoding = round_encoding(made, parameters=1000, buffers=0, cap=1, seed=3)
    assert encoding.noise is not None
    assert encoding.noise.honest == 5
    assert encoding.noise.noise_multiplier >= made.noise.multiplier
    assert round(encoding.own_std**2) == encoding.noise.variance
    assert encoding.parsed.fields[0].noise_bits > 0


def test_a_masked_run_with_a_quantile_gets_noise_in_its_bits_and_is_charged_the_same():
    noise = pb.Noise(
        epsilon=4.0, placement="distributed", clip=0.5, adaptive=True, clip_quantile=0.7
    )
    made = with_defaults(
        spec(noise=noise, masking=pb.MaskedRounds(), cohort=pb.Cohort(devices=10, quorum=0.6))
    )
    assert (made.robustness.norm_bound, made.noise.clip_quantile) == ("adaptive", 0.7)
    assert with_defaults(made) == made
    assert journal.plan_of(made).clip == 0.5
    encoding = round_encoding(made, parameters=1000, buffers=0, cap=1, seed=3, norms=(0.25, 0.5))
    assert (encoding.message.norm, encoding.message.bit_share) == (0.25, 1.0)
    assert encoding.noise is not None
    assert encoding.bit_noise is not None
    assert joint_multiplier(encoding.noise, encoding.bit_noise) >= made.noise.multiplier
    assert round(encoding.own_bit_std**2) == encoding.bit_noise.variance
    assert encoding.parsed.fields[-1].noise_bits > 0
    state = RunState(plan=journal.plan_of(made), run="0" * 16, shared="ab")
    terms = noise_terms(made, state, encoding.own_std, encoding.own_bit_std)
    assert terms is not None
    assert (terms.clip, terms.clip_bit) == (0.5, True)
    mean = CohortMean((np.zeros(4, np.float32),), 8, 8, bits=(4,))
    norm, none = next_norms(made, state, [mean], {"w": np.full(4, 9.0)}, ())
    assert norm == pytest.approx(0.5 * np.exp(-0.2 * ((4 / 10 + 1) / 2 - 0.7)))
    assert none == 0


def test_the_bounds_of_parameters_and_buffers_follow_their_own_bits():
    made = with_defaults(
        spec(
            noise=None, masking=pb.MaskedRounds(), cohort=pb.Cohort(devices=4),
            robustness=pb.Robustness(norm_bound="adaptive:2"),
        )
    )  # fmt: skip
    state = RunState(plan=journal.plan_of(made), run="0" * 16, shared="ab", buffer_clip=8.0)
    shared = {"w": np.full(4, 0.5), "mean": np.full(4, 8.0), "count": np.array(3)}
    zeros = np.zeros(4, np.float32)
    mean = CohortMean((zeros, zeros), 9, 4, bits=(4, -4))
    down, up = next_norms(made, state, [mean], shared, ["mean"])
    assert [down, up] == pytest.approx([2 * np.exp(-0.5), 8 * np.exp(0.5)])
    # Of two groups: all four devices, as in one.
    groups = [replace(mean, devices=n, bits=(n, -n)) for n in (3, 1)]
    assert next_norms(made, state, groups, shared, ["mean"]) == (down, up)
    # No further than the first bound, and the norm of what is learned: 1 and 16.
    mean = replace(mean, bits=(-4, -4))
    state = replace(state, buffer_clip=12.0)
    assert next_norms(made, state, [mean], shared, ["mean"]) == (2.0, 16.0)
    assert next_norms(made, state, [replace(mean, bits=())], shared, ["mean"]) == (0.0, 0.0)
    stored = Reduced(at_s=1.0, number=1, shared="ab", clip=2.0, buffer_clip=3.0)
    assert from_json(Reduced, to_json(stored)) == stored
    assert from_json(RunState, to_json(state)) == state


def test_the_state_of_a_private_run_is_stored_and_that_of_others_as_before():
    made = with_defaults(spec())
    plan = journal.plan_of(made)
    state = RunState(plan=plan, run="0" * 16, shared="ab", charged=3, clip=0.5)
    assert from_json(RunState, to_json(state)) == state
    assert state.budget == replace(budget_of(made), rounds=3)
    other = RunState(plan=journal.plan_of(with_defaults(spec(noise=None))), run="0" * 16, shared="")
    assert not {"budget", "clip", "charged", "buffer_clip"} & {*json.loads(to_json(other)),
                                                *json.loads(to_json(other.plan))}  # fmt: skip
    plain = Reduced(at_s=1.0, number=1, shared="ab")
    assert to_json(plain) == '{"at_s":1.0,"number":1,"shared":"ab"}'

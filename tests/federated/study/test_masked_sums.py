"""Masked studies: the integers' mean against the plain one, their noise, groups and bytes."""

from dataclasses import replace

import numpy as np
import pytest
from tests.federated.study import given
from tests.support.liars import LyingServer, scaled, taking_the_bound_of_sums

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms.aggregators import Robustness
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.masking.adaptive import next_bound
from triplane.unified_ir.federated.masking.groups import groups_of
from triplane.unified_ir.federated.masking.noise import joint_multiplier
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy
from triplane.unified_ir.federated.study import simulate
from triplane.unified_ir.federated.study.checkpoint import identity
from triplane.unified_ir.federated.study.masked_sums import MaskedStudy, masked_sum, means_and_bits

MASKING = MaskedStudy(norm=2.0, cap=64)
GROUPED = MaskedStudy(norm=2.0, groups=3)
MEDIAN = Robustness(norm_bound="2.0", aggregator="median")
OWN = DifferentialPrivacy(epsilon=20.0, clip=0.5, placement="distributed")


def changes(count, entries=700, norm=1.0):
    rng = np.random.default_rng(5)
    drawn = rng.normal(size=(count, entries))
    drawn *= norm / np.linalg.norm(drawn, axis=1, keepdims=True)
    return [{"b": x[:200].astype(np.float32), "a": x[200:].reshape(50, 10).astype(np.float32)}
            for x in drawn]  # fmt: skip


def flat(change):
    return np.concatenate([np.asarray(change[n], np.float64).ravel() for n in ("a", "b")])


def test_the_mean_of_integers_is_the_weighted_mean_within_the_bound_of_the_encoding():
    updates = list(zip((10, 64, 200), changes(3), strict=True))
    sums = masked_sum(updates[0][1], MASKING, devices=3, seed=1, privacy=None)
    weights = np.array([10, 64, 64])
    expected = sum(w * flat(c) for w, (_, c) in zip(weights, updates, strict=True)) / weights.sum()
    section = sums.encoding.sections[0]
    bound = section.error_bound(3) * 64 / weights.sum()
    assert np.linalg.norm(flat(sums.mean(updates)) - expected) < bound
    assert sums.bytes_up < 0.4 * 4 * section.padded


def test_updates_above_the_norm_are_clipped():
    updates = [(1, c) for c in changes(3, norm=50.0)]
    sums = masked_sum(updates[0][1], replace(MASKING, cap=1), devices=3, seed=1, privacy=None)
    expected = sum(flat(c) * 2 / 50 for _, c in updates) / 3
    error = np.linalg.norm(flat(sums.mean(updates)) - expected)
    assert error < sums.encoding.sections[0].error_bound(3) / 3


def test_the_noise_of_the_sum_is_at_least_what_the_fewest_honest_devices_need():
    """Measured on sums of zeros: all devices add noise, the account counts on the honest ones."""
    privacy = replace(OWN, clip=2.0).resolved(4)
    zeros = [(1, {n: np.zeros_like(x) for n, x in changes(1)[0].items()})] * 9
    masking = replace(MASKING, cap=1)
    sums = masked_sum(zeros[0][1], masking, devices=9, seed=1, privacy=privacy)
    assert sums.noise is not None
    assert sums.noise.noise_multiplier >= privacy.multiplier
    assert (sums.noise.honest, MASKING.least_and_honest(9)) == (4, (5, 4))
    measured = float(np.std(9 * flat(sums.mean(zeros))))
    assert measured > privacy.multiplier * 2.0
    step = sums.encoding.sections[0].step
    expected = step * np.sqrt(9 * (sums.noise.variance + 0.25))
    assert measured == pytest.approx(expected, rel=0.15)


def draws():
    return Draws(3, 1, "", "masking")


def test_each_group_of_a_round_has_a_mean_of_its_own():
    examples = (10, 64, 200, 3, 64, 64, 30, 64, 9, 64)
    updates = list(zip(examples, changes(10), strict=True))
    masking = replace(MASKING, groups=3)
    means = [mean for mean, _ in means_and_bits(updates, masking, draws=draws(), privacy=None)]
    groups = groups_of(draws().words(5)[1:].tobytes(), 10, 3)
    assert [len(g) for g in groups] == [4, 3, 3]
    for group, mean in zip(groups, means, strict=True):
        weights = np.array([min(examples[i], 64) for i in group])
        expected = weights @ [flat(updates[i][1]) for i in group] / weights.sum()
        section = masked_sum(updates[0][1], masking, devices=10, seed=1, privacy=None)
        bound = section.encoding.sections[0].error_bound(len(group)) * 64 / weights.sum()
        assert np.linalg.norm(flat(mean) - expected) < bound


def test_noise_of_devices_is_enough_in_the_sum_of_each_group():
    privacy = replace(OWN, clip=2.0).resolved(4)
    zeros = [(1, {n: np.zeros_like(x) for n, x in changes(1)[0].items()})] * 20
    masking = replace(GROUPED, groups=2, colluding_share=0.05)
    sums = masked_sum(zeros[0][1], masking, devices=20, seed=1, privacy=privacy)
    assert sums.noise is not None
    assert (sums.devices, sums.noise.honest, masking.least_and_honest(20)) == (10, 5, (6, 5))
    assert sums.noise.noise_multiplier >= privacy.multiplier
    means = [mean for mean, _ in means_and_bits(zeros, masking, draws=draws(), privacy=privacy)]
    for mean in means:
        assert np.std(10 * flat(mean)) > privacy.multiplier * 2.0


def test_with_noise_groups_of_different_sizes_are_divided_by_the_same_number():
    """As in a run, so that a mean of few devices has no more noise; decision 0082."""
    privacy = replace(OWN, clip=2.0, multiplier=0.02)
    (change,) = changes(1)
    masking = replace(GROUPED, cap=1, colluding_share=0.0)
    pairs = means_and_bits([(1, change)] * 10, masking, draws=draws(), privacy=privacy)
    lengths = [flat(mean) @ flat(change) for mean, _ in pairs]
    assert lengths == pytest.approx([4 * 3 / 10, 3 * 3 / 10, 3 * 3 / 10], abs=0.08)


class Watching(LyingServer):
    """A server that keeps what the devices of the first round send."""

    def __init__(self):
        super().__init__({f"device-{i}" for i in range(99)}, self.keep, {1})
        self.changes = []

    def keep(self, contribution):
        self.changes.append(dict(contribution.change))
        return contribution


def test_a_round_in_groups_takes_the_aggregate_of_their_means():
    made = given.study(robustness=MEDIAN, masking=GROUPED, rounds=1)
    server = Watching()
    trial = simulate(given.module(), given.shards(9), made, server=server)
    assert len(server.changes) == 9
    start = given.module().state
    words = Draws(made.seed, 1, "", "masking").words(5)[1:].tobytes()
    for name, x in trial.state.items():
        means = [
            np.mean([server.changes[i][name] for i in group], axis=0)
            for group in groups_of(words, 9, 3)
        ]
        assert np.allclose(x, start[name].array + np.median(means, axis=0), atol=0.05), name
        assert not np.allclose(x, start[name].array, atol=1e-4), name


@pytest.mark.long
@pytest.mark.parametrize(("groups", "is_spoilt"), [(1, True), (3, False)])
def test_a_device_that_takes_the_bound_of_its_sum_spoils_its_group_alone(groups, is_spoilt):
    """The change of its state by the lie, against the norm to which devices clip."""
    limits = MEDIAN if groups > 1 else Robustness(norm_bound="2.0")
    made = given.study(robustness=limits, masking=replace(GROUPED, groups=groups), rounds=1)
    shards = given.shards(9)
    honest = simulate(given.module(), shards, made).state
    with taking_the_bound_of_sums():
        server = LyingServer({"device-1"}, scaled(-1e9))
        spoilt = simulate(given.module(), shards, made, server=server).state
    moved = np.sqrt(sum(np.sum((spoilt[n] - x) ** 2) for n, x in honest.items()))
    assert (moved > 1.5) == is_spoilt


def test_progress_of_a_study_without_groups_is_that_of_earlier_releases():
    facts = identity("plan", given.study(masking=MASKING), {}, {})
    assert "groups" not in facts["masking"]
    assert '"groups": 3' in identity("plan", given.study(masking=GROUPED), {}, {})["masking"]


def test_people_read_what_holds_for_groups():
    lines = GROUPED.text(10).splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("masking")] == [
        "masking for groups of 3 of 10 devices",
        "masking for groups of 4 of 10 devices",
    ]
    assert lines[-2] == "the mean of each of the 3 groups is one input of the aggregator"


@pytest.mark.parametrize("algorithm", ["fedavg", "reptile"])
def test_a_masked_study_ends_near_the_plain_one(algorithm):
    limits = Robustness(norm_bound="2.0", returns=0)
    made = given.study(algorithm, robustness=limits)
    plain = simulate(given.module(), given.shards(), made)
    masked = simulate(given.module(), given.shards(), replace(made, masking=MASKING))
    for name, x in plain.state.items():
        assert np.allclose(masked.state[name], x, atol=0.15), name
    assert masked.bytes_up != plain.bytes_up


def test_a_study_with_noise_of_devices_is_accounted():
    trial = simulate(given.module(), given.shards(6), given.study(privacy=OWN, masking=MASKING))
    spent = given.there(trial.privacy)
    assert (spent.law, spent.noise) == ("concentrated", "distributed")
    assert spent.epsilon == pytest.approx(20.0, rel=1e-3)


def test_the_bound_of_a_masked_study_follows_twice_the_median_of_the_norms():
    """Measured: changes of known norms, through encoding, sum and rule."""
    masking = replace(MASKING, norm=40.0, follows=True, cap=1)
    updates = [(1, c) for scale in (0.8, 1.0, 1.3) for c in changes(3, norm=scale)]
    bounds = [masking.norm]
    for _ in range(30):
        sums = masked_sum(
            updates[0][1], replace(masking, norm=bounds[-1]), devices=9, seed=1, privacy=None
        )
        mean, bits = sums.mean_and_bits(updates)
        bounds.append(
            next_bound(bounds[-1], bits[0], 9, devices=9, privacy=None, most=masking.norm)
        )
    assert bounds[1] == pytest.approx(40 * np.exp(-0.5))
    assert all(1.5 < x < 2.7 for x in bounds[10:])
    expected = sum(flat(c) for _, c in updates) / 9
    assert np.linalg.norm(flat(mean) - expected) < sums.encoding.sections[0].error_bound(9) / 9


@pytest.mark.long
@pytest.mark.parametrize("start", [0.01, 5.0])
def test_a_masked_study_whose_bound_follows_ends_near_the_plain_one(start, tmp_path):
    made = given.study(rounds=12, robustness=Robustness(norm_bound="off", returns=0))
    masking = replace(MASKING, norm=start, follows=True)
    plain = simulate(given.module(), given.shards(), made)
    folders = tmp_path / "one", tmp_path / "two"
    study = replace(made, masking=masking)
    masked = simulate(given.module(), given.shards(), study, folder=folders[0])
    for name, x in plain.state.items():
        assert np.allclose(masked.state[name], x, atol=0.3), name
    # The bound is kept with the progress, and a study with a fixed one is as before.
    simulate(given.module(), given.shards(), replace(study, rounds=4), folder=folders[1])
    resumed = simulate(given.module(), given.shards(), study, folder=folders[1])
    assert len(resumed.rounds) == 12
    facts = identity("plan", replace(made, masking=MASKING), given.shards(), {})
    assert "follows" not in facts["masking"]
    assert '"follows": true' in identity("plan", study, given.shards(), {})["masking"]


@pytest.mark.long
def test_a_study_with_noise_and_a_quantile_is_accounted_and_its_norm_follows():
    privacy = replace(OWN, quantile=0.5, clip=0.5)
    made = given.study(privacy=privacy, masking=replace(MASKING, norm=0.5))
    trial = simulate(given.module(), given.shards(6), made)
    assert given.there(trial.privacy).epsilon == pytest.approx(20.0, rel=1e-3)
    change = changes(1)[0]
    resolved = privacy.resolved(4)
    masking = replace(MASKING, norm=0.5, cap=1, follows=True)
    sums = masked_sum(change, masking, devices=6, seed=1, privacy=resolved)
    assert sums.bit_noise is not None
    assert sums.noise is not None
    assert joint_multiplier(sums.noise, sums.bit_noise) >= resolved.multiplier
    _, (bits,) = sums.mean_and_bits([(1, change)] * 6)
    deviation = np.sqrt(6 * sums.bit_noise.variance)
    assert abs(bits + 6) < 6 * deviation


@pytest.mark.long
def test_groups_compose_with_noise_of_devices_and_leave_frozen_tensors_alone():
    made = given.study(privacy=OWN, masking=GROUPED, robustness=MEDIAN, rounds=2)
    module = given.module(given.half_frozen)
    trial = simulate(module, given.shards(9), made)
    assert given.there(trial.privacy).epsilon == pytest.approx(20.0, rel=1e-3)
    same = {n for n, x in trial.state.items() if np.array_equal(x, module.state[n].array)}
    assert same == {"0.weight"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"privacy": OWN}, "'noise-distributed' does not compose with updates in the clear"),
        ({"masking": MASKING, "compression": "int8"}, "does not compose with 'mask'"),
        ({"masking": MASKING, "privacy": replace(OWN, separation=2, correlated=True)},
         "does not compose with 'noise-"),
        ({"masking": MASKING, "privacy": DifferentialPrivacy(epsilon=5.0)},
         "'noise-central' does not compose with 'mask': the cloud cannot clip"),
        ({"robustness": Robustness(norm_bound="adaptive:3")}, "which only masked rounds need"),
        ({"masking": MASKING, "algorithm": "scaffold"}, "8 bits are too few"),
        ({"masking": replace(MASKING, least=9)}, "got least cohort 9 and 3 devices"),
        ({"masking": MASKING, "robustness": MEDIAN},
         "'median' does not compose with 'mask': .*form groups whose sums it combines"),
        ({"masking": GROUPED, "devices": 9},
         "'group-sums' does not compose with the mean of updates"),
        ({"masking": replace(GROUPED, groups=2), "robustness": MEDIAN, "devices": 6},
         "median needs at least 3 sums of groups in each round; a round may have 2. Form more"),
        ({"masking": GROUPED, "robustness": MEDIAN, "devices": 8},
         "8 devices make 1 to 2 of them, got 3 groups"),
        ({"masking": replace(GROUPED, least=4), "robustness": MEDIAN, "devices": 9},
         "got least cohort 4 and groups of 3 devices; form fewer groups, or ask more"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_masking_is_refused(options, words):
    with pytest.raises(InvalidInput, match=words):
        simulate(given.module(), given.shards(9), given.study(**{"devices": 3, **options}))


@pytest.mark.parametrize("norm", [1e-9, 1e9, float("nan")])
def test_a_bound_out_of_range_is_refused_before_anything_is_learned(norm):
    with pytest.raises(InvalidInput, match="a clipping norm is 1e-06 to 1e\\+06"):
        MaskedStudy(norm=norm)

"""Studies with differential privacy: what they compute, spend, refuse and resume."""

from dataclasses import replace

import numpy as np
import pytest
from tests.federated.study import given

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.federated.algorithms.aggregators import Robustness
from triplane.unified_ir.federated.privacy.accountant import NoiseEvent, spending
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy
from triplane.unified_ir.federated.study import simulate
from triplane.unified_ir.federated.study.checkpoint import Keeper, identity
from triplane.unified_ir.federated.study.export import trial_record
from triplane.unified_ir.federated.study.masked_sums import MaskedStudy
from triplane.unified_ir.federated.study.report import page

HARDLY = DifferentialPrivacy(multiplier=0.005, clip=2.0)
"""Noise and a norm that change next to nothing."""
SOME = DifferentialPrivacy(epsilon=8.0, clip=0.5)
BANDED = DifferentialPrivacy(epsilon=8.0, clip=0.5, separation=2, correlated=True)


def run(privacy, folder=None, algorithm="fedavg", count=4, **options):
    made = given.study(algorithm, privacy=privacy, **{"devices": 2, **options})
    return simulate(given.module(), given.shards(count), made, folder=folder)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["reptile", "fedprox", "fedavgm", "fomaml"])
def test_hardly_any_noise_gives_the_mean_in_which_all_devices_weigh_the_same(algorithm):
    """Reptile and FOMAML weigh equally anyway; for the others, all devices have one size."""
    shards = {f"d{i}": next(iter(given.shards(1, first=0).values())) for i in range(4)}
    made = given.study(algorithm, devices=4, robustness=Robustness(norm_bound="off", returns=0))
    plain = simulate(given.module(), shards, made)
    noisy = simulate(given.module(), shards, replace(made, privacy=HARDLY))
    for name, x in plain.state.items():
        assert np.allclose(noisy.state[name], x, atol=0.05), name
        assert not np.array_equal(noisy.state[name], x)


def test_epsilon_is_spent_round_by_round_and_in_all():
    trial = run(SOME)
    multiplier = trial.privacy.noise_multiplier
    expected = [spending([NoiseEvent(multiplier, n)]).epsilon(1e-5) for n in range(1, 5)]
    assert [r.epsilon for r in trial.rounds] == pytest.approx(expected)
    assert trial.rounds[-1].epsilon == pytest.approx(8.0, rel=1e-6)
    record = trial_record(trial)["privacy"]
    assert record["epsilon"] == pytest.approx(8.0, rel=1e-4)
    assert (record["unit"], record["rounds"], record["law"]) == ("one device", 4, "gaussian")
    assert "epsilon 8 of 8 spent" in page([trial], "private")
    assert "privacy" not in trial_record(run(None))


def test_a_study_ends_before_its_budget_is_passed_and_says_so():
    trial = run(replace(SOME, multiplier=1.5))
    assert len(trial.rounds) == 4 == run(None).last_round
    trial = run(replace(SOME, multiplier=1.5), rounds=9)
    assert len(trial.rounds) == 6
    assert trial.ended.startswith("6 of 9 rounds fit into epsilon 8")
    assert trial.scores, "the last round is scored"
    assert "6 of 9 rounds fit" in page([trial], "private")
    with pytest.raises(InvalidInput, match=r"one round with noise multiplier 0\.1 spends epsilon"):
        run(replace(SOME, multiplier=0.1))


def test_correlated_noise_is_smaller_at_equal_epsilon_because_devices_rest():
    assert run(BANDED).privacy.noise_multiplier < run(SOME).privacy.noise_multiplier
    assert run(BANDED).privacy.uses == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "scaffold"}, "'noise-central' does not compose with 'control-variates'"),
        ({"compression": "int8"}, "'noise-central' does not compose with 'int8'"),
        ({"robustness": Robustness(aggregator="median"), "count": 6, "devices": 3},
         "'median' does not compose with 'noise-central'"),
        ({"privacy": replace(BANDED, quantile=0.5)},
         "'clip-adaptive' does not compose with 'noise-correlated'"),
        ({"privacy": replace(SOME, separation=3)}, "need 6 devices, the population has 4"),
        ({"privacy": replace(SOME, most_uses=1)}, "4 rounds of 2 devices need 8 uses"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_noise_is_refused_before_the_first_round(options, words):
    with pytest.raises(InvalidInput, match=words):
        run(**{"privacy": SOME, **options})


def test_a_model_with_trained_buffers_is_refused():
    with pytest.raises(InvalidInput, match="'noise-central' does not compose with 'buffers'"):
        simulate(given.module(given.Normed), given.shards(), given.study(privacy=SOME))


def test_devices_rest_and_are_used_as_often_as_they_may_be(tmp_path, monkeypatch):
    privacy = replace(SOME, separation=2, most_uses=3)
    run(privacy, tmp_path, rounds=6)
    shards = given.shards()
    made = given.study(privacy=privacy, devices=2, rounds=6)
    stored = Keeper(tmp_path, identity("", made, shards, {}))
    monkeypatch.setattr(stored, "_check", lambda _: None)
    used = given.there(stored.newest()).used
    assert {uses for _, uses in used.values()} == {3}
    assert len(used) == 4


@pytest.mark.long
@pytest.mark.parametrize("privacy", [SOME, BANDED, replace(SOME, quantile=0.5)])
def test_a_study_that_was_ended_anywhere_goes_on_with_its_account(tmp_path, privacy):
    """The noise is other noise, so only the account and what devices did are compared."""
    asked = privacy.resolved(6)
    for rounds in range(1, 7):
        trial = run(asked, tmp_path, rounds=rounds)
        assert len(trial.rounds) == rounds
    whole = run(asked, rounds=6)
    assert [r.epsilon for r in trial.rounds] == [r.epsilon for r in whole.rounds]
    assert [r.bytes_up for r in trial.rounds] == [r.bytes_up for r in whole.rounds]
    with pytest.raises(Conflict, match="privacy differs"):
        run(replace(asked, clip=0.4), tmp_path, rounds=6)


def test_the_same_seed_gives_other_noise():
    one, other = run(SOME), run(SOME)
    assert any(not np.array_equal(one.state[n], other.state[n]) for n in one.state)


def test_clipped_changes_are_counted():
    assert [r.scaled for r in run(replace(SOME, clip=1e-3)).rounds] == [2] * 4
    assert [r.scaled for r in run(HARDLY).rounds] == [0] * 4


@pytest.mark.parametrize("masking", [None, MaskedStudy(norm=0.5)])
def test_frozen_parameters_get_no_noise(masking):
    placement = "distributed" if masking else "central"
    made = given.study(privacy=replace(SOME, placement=placement), masking=masking)
    module = given.module(given.half_frozen)
    trial = simulate(module, given.shards(6), made)
    moved = {n for n, x in trial.state.items() if not np.array_equal(x, module.state[n].array)}
    assert moved == {"0.bias", "2.weight", "2.bias"}

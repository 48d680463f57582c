"""What a round with central noise publishes, compared with plain numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.privacy.accountant import NoiseEvent, spending
from triplane.unified_ir.federated.privacy.release import (
    RoundNoise,
    check_release,
    draw,
    entries_of,
    release,
)
from triplane.unified_ir.federated.privacy.report import privacy_spent
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy

SHAPES = {"b": (3,), "a": (2, 2)}
ENTRIES = 7
PRIVACY = DifferentialPrivacy(epsilon=5.0, clip=1.0, multiplier=2.0)
ADAPTIVE = DifferentialPrivacy(epsilon=5.0, clip=1.0, multiplier=2.0, quantile=0.5)


def changes(count, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [
        {n: (scale * rng.normal(size=s)).astype(np.float32) for n, s in SHAPES.items()}
        for _ in range(count)
    ]


def flat(change):
    """In the order of names: a, then b."""
    return np.concatenate([np.asarray(change[n], np.float64).ravel() for n in sorted(SHAPES)])


def published(updates, privacy=PRIVACY, devices=4, noise=None, clip=1.0):
    noise = noise or RoundNoise(np.zeros(ENTRIES, np.int64))
    opens = [lambda c=c: c for c in updates]
    return release(SHAPES, opens, privacy=privacy, clip=clip, devices=devices, noise=noise)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_the_mean_is_of_clipped_changes_over_the_number_that_completes_a_round(count):
    updates = changes(count)
    norms = [np.linalg.norm(flat(c)) for c in updates]
    expected = sum((flat(c) * min(1, 1 / n) for c, n in zip(updates, norms, strict=True)),
                   np.zeros(ENTRIES)) / 4  # fmt: skip
    assert np.allclose(flat(published(updates).mean), expected, atol=1e-6)
    assert published(updates).clipped == sum(n > 1 for n in norms)


@given(st.permutations(range(4)))
def test_the_order_of_updates_changes_no_bit(order):
    updates = changes(4, seed=3)
    once, again = published(updates), published([updates[i] for i in order])
    assert flat(once.mean).tobytes() == flat(again.mean).tobytes()


def test_noise_is_added_in_steps_of_the_grid():
    step = PRIVACY.central(1.0, ENTRIES, 4).step
    steps = np.arange(-3, 4) * 1000
    plain, noisy = published(changes(4)), published(changes(4), noise=RoundNoise(steps))
    assert np.array_equal(flat(noisy.mean) - flat(plain.mean), steps * step / 4)


def test_a_device_that_lies_moves_the_sum_by_the_clipping_norm():
    """As far as a device that contributes zeros is from one that contributes anything."""
    for scale in (1e6, 3e37):
        lie = changes(1, scale=scale)
        moved = 4 * flat(published([*changes(3), *lie]).mean) - 4 * flat(published(changes(3)).mean)
        assert np.linalg.norm(moved) <= 1.0 + 1e-6
    with pytest.raises(InvalidInput, match="NaN"):
        published([{n: np.full(s, np.nan, np.float32) for n, s in SHAPES.items()}])


def test_more_updates_than_the_divisor_are_refused():
    with pytest.raises(InvalidInput, match="sums at most 2 updates"):
        published(changes(3), devices=2)


@pytest.mark.parametrize(("scale", "unclipped"), [(1e-3, 4), (100.0, 0)])
def test_the_norm_follows_the_share_of_unclipped_changes(scale, unclipped):
    """Andrew et al. 2021, algorithm 1, with a noise of one device in the count."""
    sum_of_bits = unclipped - (4 - unclipped) + 0.5
    share = min(1.0, max(0.0, (sum_of_bits / 4 + 1) / 2))
    noise = RoundNoise(np.zeros(ENTRIES, np.int64), 0.5)
    after = published(changes(4, scale=scale), ADAPTIVE, noise=noise)
    assert after.clip == pytest.approx(math.exp(-0.2 * (share - 0.5)))
    assert published(changes(4, scale=scale)).clip == 1.0


def test_updates_and_clipping_bits_cost_together_what_the_multiplier_says():
    norm = ADAPTIVE.adaptive(1.0, 100)
    assert norm is not None
    assert norm.bit_noise == 5.0
    parts = [NoiseEvent(ADAPTIVE.update_multiplier(100)), NoiseEvent(2 * norm.bit_noise)]
    assert spending(parts).epsilon(1e-5) == pytest.approx(spending([NoiseEvent(2.0)]).epsilon(1e-5))


def test_the_noise_of_clipping_bits_has_its_deviation():
    draws = [draw(ADAPTIVE, 1.0, 1, 100, ()).bits for _ in range(400)]
    assert 8.5 < np.std(draws) < 11.5, "twice 5; 400 draws are within 4 deviations of this"
    assert draw(PRIVACY, 1.0, 1, 100, ()).bits == 0.0


@pytest.mark.parametrize("multiplier", [1e-3, 600.0, 8e5])
@pytest.mark.parametrize("devices", [1, 10_000])
def test_clipping_bits_get_noise_of_every_deviation(multiplier, devices):
    privacy = DifferentialPrivacy(multiplier=multiplier, quantile=0.5)
    norm = privacy.adaptive(1.0, devices)
    assert norm is not None
    draws = [draw(privacy, 1.0, 4, devices, ()).bits for _ in range(12)]
    assert any(draws), "one in 64 of the smallest noise is 0, twelve of them never"
    assert max(map(abs, draws)) < 2 * 8 * norm.bit_noise


@pytest.mark.parametrize(
    ("options", "frozen", "words"),
    [
        ({"epsilon": 1.0}, ("w",), "moves no tensor"),
        ({"multiplier": 1e5}, (), "beyond the resolution"),
        ({"multiplier": 9e5, "quantile": 0.5}, (), "noise multiplier is"),
    ],
)
def test_noise_that_no_round_could_get_is_refused_before_the_first(options, frozen, words):
    privacy = DifferentialPrivacy(**options).resolved(10)
    state: dict[str, Array] = {"w": np.zeros(10**6, np.float32), "count": np.zeros(3, np.int64)}
    with pytest.raises(InvalidInput, match=words):
        check_release(privacy, state, frozen, 10)
    check_release(DifferentialPrivacy(epsilon=1.0).resolved(10), state, (), 10)


@pytest.mark.long  # dp-accounting takes a second to import
def test_the_least_noise_for_all_rounds_spends_the_epsilon():
    asked = DifferentialPrivacy(epsilon=3.0, separation=4, correlated=True).resolved(20)
    budget = asked.budget()
    assert budget.most_rounds(100) == 20
    spent = budget.charge(1)
    for round_ in range(2, 21):
        spent = spent.charge(round_)
    report = privacy_spent(asked, spent)
    assert report.epsilon == pytest.approx(3.0, rel=1e-6)
    assert (report.uses, report.rounds, report.noise) == (5, 20, "correlated central")
    assert "epsilon 3 of 3 spent at delta 1e-05 for one device after 20 rounds" in report.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "an epsilon or a noise multiplier"),
        ({"epsilon": 0.0}, "epsilon is above 0"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta is a probability"),
        ({"epsilon": 1.0, "clip": 0.0}, "clipping norm"),
        ({"epsilon": 1.0, "placement": "edge"}, "central or distributed"),
        ({"epsilon": 1.0, "correlated": True}, "needs devices that rest"),
        ({"epsilon": 1.0, "separation": 0}, "rounds apart"),
        ({"epsilon": 1.0, "multiplier": math.nan}, "noise multiplier"),
        ({"epsilon": 1.0, "quantile": 1.5}, "quantile in"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(InvalidInput, match=words):
        DifferentialPrivacy(**options)


def test_entries_count_every_tensor_of_a_change():
    assert entries_of({"scalar": (), "empty": (0, 3), "m": (2, 5)}) == 11

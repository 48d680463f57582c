"""Central noise: the factorization, its sensitivity, its error against independent noise."""

import math
from fractions import Fraction

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy import central, secret
from triplane.unified_ir.federated.privacy.accountant import gaussian_delta, spending
from triplane.unified_ir.federated.privacy.central import (
    CentralNoise,
    central_noise,
    check_population,
    coefficients,
    column_norm,
    prefix_error,
    relative_error,
)


def toeplitz(column, n):
    rows = np.arange(n)[:, None] - np.arange(n)[None, :]
    padded = np.concatenate([column, np.zeros(n)])[:n]
    return np.where(rows >= 0, padded[np.abs(rows)], 0)


def test_without_cutting_the_factor_is_the_square_root_of_prefix_sums():
    c = toeplitz(coefficients(40), 40)
    np.testing.assert_allclose(c @ c, np.tri(40), atol=1e-13)


def test_coefficients_are_binomials():
    expected = [math.comb(2 * j, j) / 4**j for j in range(30)]
    np.testing.assert_allclose(coefficients(30), expected, rtol=1e-14)


@pytest.mark.parametrize("bands", [1, 4, 10])
def test_separated_uses_have_orthogonal_columns(bands):
    n = 47
    c = toeplitz(coefficients(bands), n)
    gram = c.T @ c
    far = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :]) >= bands
    assert (gram[far] == 0).all()
    # So uses in rounds 0, b, 2b, ... have sensitivity sqrt(k) |c|, cut at the end only.
    uses = np.zeros(n)
    uses[::bands] = 1
    k = int(uses.sum())
    assert np.linalg.norm(c @ uses) <= math.sqrt(k) * column_norm(bands) * (1 + 1e-12)
    assert np.linalg.norm(c @ uses) >= math.sqrt(k - 1) * column_norm(bands)


@pytest.mark.parametrize(("bands", "rounds"), [(1, 30), (5, 30), (10, 8), (10, 100)])
def test_the_error_is_that_of_the_matrix(bands, rounds):
    b = np.tri(rounds) @ np.linalg.inv(toeplitz(coefficients(bands), rounds))
    rms = math.sqrt((b**2).sum() / rounds)
    assert prefix_error(bands, rounds) == pytest.approx(rms, rel=1e-10)


def test_at_equal_epsilon_the_error_is_2_4_times_smaller_as_computed():
    gain = relative_error(1, 200) / relative_error(10, 200)
    assert gain == pytest.approx(2.47, abs=0.01)


def run_of(noise, rounds):
    past: list[secret.Integers] = []
    published = []
    for _ in range(rounds):
        n = noise.draw(past)
        published.append(n * noise.step)
        past = [n, *past][: noise.bands - 1]
    return np.array(published)


def rms_of_prefix_sums(noise, rounds):
    return math.sqrt(float((np.cumsum(run_of(noise, rounds), axis=0) ** 2).mean()))


@pytest.mark.parametrize(
    ("entries", "margin"), [(300, 0.15), pytest.param(20_000, 0.02, marks=pytest.mark.long)]
)
def test_at_equal_epsilon_the_error_is_2_4_times_smaller_as_measured(entries, margin):
    """200 rounds, separation 10, 20 uses of a device; noise as a run draws it."""
    norm = 1.0
    independent = central_noise(4.0, norm=norm, entries=entries)
    banded = central_noise(4.0, norm=norm, entries=entries, bands=10)
    spent = [spending([noise.event(20)]).epsilon(1e-5) for noise in (independent, banded)]
    assert spent[0] == pytest.approx(spent[1], rel=1e-5)
    gain = rms_of_prefix_sums(independent, 200) / rms_of_prefix_sums(banded, 200)
    assert gain == pytest.approx(2.47, rel=margin)
    assert entries < 20_000 or gain >= 2.4


def test_streamed_noise_solves_the_banded_system_up_to_rounding(monkeypatch):
    z = secret.rounded_gaussian(30 * 20, 2.0**25).reshape(30, 20)
    draws = iter(z)
    monkeypatch.setattr(secret, "rounded_gaussian", lambda _entries, _std: next(draws))
    noise = CentralNoise(3.0, 5, 1.0, 20)
    n = run_of(noise, 30) / noise.step
    residue = toeplitz(coefficients(5), 30) @ n - z
    assert np.abs(residue).max() <= 0.5 + 1e-6
    expected = np.linalg.solve(toeplitz(coefficients(5), 30), z)
    assert np.abs(n - expected).max() < 10


@pytest.mark.parametrize("bands", [1, 3, 10])
def test_the_shift_that_an_observer_sees_is_within_the_charge(bands):
    """Two neighbouring runs that publish the same: the draws differ by integers of bounded norm.

    This is the argument of the module, followed on numbers: z_t - z'_t summed in squares.
    """
    rng = np.random.default_rng(11)
    noise = CentralNoise(2.0**-10, bands, 1.0, 8)
    rounds = 3 * bands
    sums = rng.normal(size=(rounds, 8))
    other = sums.copy()
    for use in range(0, rounds, bands):
        contribution = rng.normal(size=8)
        other[use] += contribution / np.linalg.norm(contribution)
    published = [noise.add(s, noise.draw([])) for s in sums]
    shift = draws_behind(noise, other, published) - draws_behind(noise, sums, published)
    uses = 3
    charged = uses * (noise.std / noise.step / noise.noise_multiplier) ** 2
    assert (shift.astype(float) ** 2).sum() <= charged
    assert (shift.astype(float) ** 2).sum() > 0.9 * charged


def test_rounding_is_charged_in_every_round_that_a_use_reaches():
    noise = CentralNoise(2.0**25, 2, 1.0, 4)
    assert noise.step == 1.0
    # Two entries' worth of rounding: 1 + 2 in its own round, (1 + 2) / 2 + 2 in the next one.
    expected = 2.0**25 / math.hypot(3.0, 3.5)
    assert expected * 0.998 < noise.noise_multiplier < expected


def test_rounding_moves_large_sums_by_no_more_than_is_charged():
    """The largest sums that are accepted, rounded to float64 and to the grid, step 1."""
    noise, none = CentralNoise(2.0**25, 1, 1.0, 1), np.zeros(1, np.int64)
    rng = np.random.default_rng(13)
    base = central.MAX_ENTRY - 10
    for a, b in rng.uniform(0, 4, size=(2_000, 2)):
        sums = [np.array([float(base + Fraction(x))]) for x in (a, b)]
        first, second = (float(noise.add(total, none)[0]) for total in sums)
        assert abs(first - second) <= abs(a - b) + 1 + 2.0**-10


def test_sums_of_rounded_contributions_are_exact():
    noise = CentralNoise(2.0**-10, 1, 1.0, 3)
    contributions = np.random.default_rng(5).normal(size=(300, 3))
    contributions /= np.linalg.norm(contributions, axis=1, keepdims=True)
    rounded = [noise.round(x) for x in contributions]
    exact = [sum(map(Fraction, column)) for column in np.array(rounded).T.tolist()]
    total = np.add.reduce(rounded)
    assert [Fraction(x) for x in total] == exact
    assert (noise.round(total) == total).all()
    error = np.linalg.norm(np.array(rounded) - contributions, axis=1)
    assert error.max() <= noise.step * math.sqrt(3) / 2


@pytest.mark.parametrize("bands", [1, 2])
def test_the_exact_privacy_loss_of_two_rounds_is_within_the_charge(bands, monkeypatch):
    """Every pair of published integers and its probability, on a grid as coarse as the noise."""
    monkeypatch.setattr(central, "GRID", 1)
    rng = np.random.default_rng(bands)
    for _ in range(20):
        noise = CentralNoise(1.5, bands, float(rng.uniform(0.1, 4)), 1)
        assert noise.step == 1
        first, second = rng.uniform(-3, 3, size=2)
        p = law_of_two_rounds(noise, first, second)
        q = law_of_two_rounds(noise, first + noise.norm, second)
        for epsilon in (0.0, 0.1, 1.0, 4.0):
            charged = gaussian_delta(epsilon, 1 / noise.noise_multiplier)
            for one, other in ((p, q), (q, p)):
                assert np.maximum(one - math.exp(epsilon) * other, 0).sum() <= charged + 1e-12


def law_of_two_rounds(noise, first, second):
    """Probabilities of what two rounds publish, (129, 129), from -64."""
    k = np.arange(-24, 25)
    edges = [math.erfc((x - 0.5) / noise.std / math.sqrt(2)) / 2 for x in range(-24, 26)]
    p = -np.diff(edges)
    c = (*coefficients(noise.bands), 0.0)[1]
    law = np.zeros((129, 129))
    for z, probability in zip(k, p, strict=True):
        shift = 64 + round(second) - round(c * z)
        law[64 + round(first) + z, shift - 24 : shift + 25] = probability * p
    return law


def draws_behind(noise, sums, published):
    """The draws z_t of a run that published these values."""
    past: list[secret.Integers] = []
    draws = []
    for total, value in zip(sums, published, strict=True):
        n = np.rint(value / noise.step).astype(np.int64) - np.rint(total / noise.step).astype(
            np.int64
        )
        taken_back = sum(
            (c * e for c, e in zip(coefficients(noise.bands)[1:], past, strict=False)), np.zeros(8)
        )
        draws.append(n + np.rint(taken_back).astype(np.int64))
        past = [n, *past][: noise.bands - 1]
    return np.array(draws)


@pytest.mark.parametrize("bands", [1, 10])
@pytest.mark.parametrize("multiplier", [0.3, 4.0, 50.0])
@pytest.mark.parametrize("entries", [1, 10**6, 10**9])
def test_noise_has_the_multiplier_that_was_asked_for(bands, multiplier, entries):
    noise = central_noise(multiplier, norm=0.7, entries=entries, bands=bands)
    assert multiplier <= noise.noise_multiplier <= multiplier * (1 + 1e-6)
    plain = multiplier * 0.7 * column_norm(bands)
    # Rounding costs little: nothing visible at a million entries.
    assert plain <= noise.std <= plain * (1.002 if entries <= 10**6 else 1.2) * 1.005


def test_the_noise_has_the_stated_deviation_on_a_grid():
    noise = central_noise(2.0, norm=3.0, entries=100_000)
    total = np.linspace(-5, 5, 100_000)
    result = noise.add(total, noise.draw([]))
    assert np.std(result - total) == pytest.approx(6.0, rel=6 / math.sqrt(2e5))
    assert (result / noise.step == np.rint(result / noise.step)).all()


def test_earlier_noise_is_taken_back():
    noise = CentralNoise(1.0, 2, 1.0, 50_000)
    first = noise.draw([])
    second = noise.draw([first])
    correlation = np.corrcoef(first, second)[0, 1]
    assert correlation == pytest.approx(-0.5 / math.sqrt(1.25), abs=0.03)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_sums_beyond_the_grid_are_refused(bad):
    noise = CentralNoise(1.0, 1, 1.0, 2)
    with pytest.raises(InvalidInput, match=r"NaN or above .* were contributions clipped"):
        noise.add(np.array([0.0, bad]), np.zeros(2, np.int64))


def test_noise_of_another_shape_is_refused():
    noise = CentralNoise(1.0, 2, 1.0, 2)
    with pytest.raises(InvalidInput, match="int64 with 2 entries"):
        noise.draw([np.zeros(3, np.int64)])
    with pytest.raises(InvalidInput, match="int64 with 2 entries"):
        noise.draw([np.zeros(2)])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="have 2 entries"):
        noise.add(np.zeros(3), np.zeros(3, np.int64))


@pytest.mark.parametrize(
    "change", [{"std": 0.0}, {"std": math.nan}, {"bands": 0}, {"norm": 0.0}, {"entries": 0}]
)
def test_impossible_noise_is_refused(change):
    with pytest.raises(InvalidInput):
        CentralNoise(**{"std": 1.0, "bands": 1, "norm": 1.0, "entries": 2} | change)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_impossible_norms_are_named(norm):
    with pytest.raises(InvalidInput, match=r"a norm in \(0, 1e30\)"):
        central_noise(1.0, norm=norm, entries=2)


@pytest.mark.parametrize("rounds", [0, -1])
def test_the_error_of_no_rounds_is_refused(rounds):
    with pytest.raises(InvalidInput, match="at least one round"):
        prefix_error(10, rounds)


def test_resolution_limits_are_named():
    with pytest.raises(InvalidInput, match="beyond the resolution"):
        central_noise(1e4, norm=1.0, entries=2**32)


def test_a_population_too_small_to_rest_is_refused_with_the_numbers():
    check_population(500, 50, 10)
    with pytest.raises(InvalidInput, match=r"need 500 devices, .* has 499; ask at most 49 "):
        check_population(499, 50, 10)
    with pytest.raises(InvalidInput, match=r"has 40; shorten the separation to 5"):
        check_population(40, 8, 1000)

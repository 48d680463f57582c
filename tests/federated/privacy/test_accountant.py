"""The accountant: equal to dp-accounting and to closed forms, with every use charged in full."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput, MissingExtra
from triplane.unified_ir.federated.privacy import accountant, dp_accounting_door
from triplane.unified_ir.federated.privacy.accountant import (
    CONCENTRATED,
    GAUSSIAN,
    LAWS,
    NoiseEvent,
    Spending,
    concentrated_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    noise_multiplier_for,
    spending,
)
from triplane.unified_ir.federated.privacy.budget import run_budget

needs_dp_accounting = pytest.mark.skipif(
    not dp_accounting_door.installed(), reason="needs the extra privacy"
)
uses = st.lists(
    st.builds(NoiseEvent, st.floats(0.3, 100), st.integers(0, 500), st.sampled_from(LAWS)),
    max_size=3,
)


def own(events, delta):
    return spending(events).epsilon(delta)


@pytest.mark.parametrize(
    ("multiplier", "times", "delta", "exact", "bound"),
    [
        (4.0, 20, 1e-5, 4.983306405970682, 5.377728336819822),
        (0.5, 1, 1e-6, 10.997151214220652, 11.689011019385767),
        (30.0, 1000, 1e-8, 6.125460781221241, 6.4529532548329875),
    ],
)
def test_epsilon_is_that_which_dp_accounting_gave(multiplier, times, delta, exact, bound):
    """`get_epsilon_gaussian` and `RdpAccountant(ORDERS)` of dp-accounting 0.6.0."""
    assert own([NoiseEvent(multiplier, times)], delta) == pytest.approx(exact, rel=1e-9)
    concentrated = NoiseEvent(multiplier, times, CONCENTRATED)
    assert own([concentrated], delta) == pytest.approx(bound, rel=1e-9)


@needs_dp_accounting
@pytest.mark.long
@given(uses, st.floats(1e-12, 0.1))
def test_epsilon_equals_that_of_dp_accounting(events, delta):
    ours = own(events, delta)
    if ours < 500:
        assert accountant.epsilon(events, delta) == pytest.approx(ours, rel=1e-9, abs=1e-9)


@needs_dp_accounting
@pytest.mark.long
def test_the_account_of_a_run_is_that_of_privacy_loss_distributions():
    """Noise multiplier 4, a device in 20 rounds, delta 1e-5."""
    import dp_accounting

    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 20)
    theirs = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    ours = own([NoiseEvent(4.0, 20)], 1e-5)
    assert ours == pytest.approx(4.98, abs=0.01)
    assert theirs * 0.999 < ours <= theirs
    renyi = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    bounded = own([NoiseEvent(4.0, 20, CONCENTRATED)], 1e-5)
    assert ours < bounded <= renyi


@needs_dp_accounting
def test_a_report_asks_dp_accounting_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(dp_accounting_door, "gaussian_epsilon", lambda _m, _delta: 42.0)
    monkeypatch.setattr(dp_accounting_door, "concentrated_epsilon", lambda _rho, _d, _orders: 43.0)
    assert accountant.epsilon([NoiseEvent(1.0)], 1e-5) == 42
    assert accountant.epsilon([NoiseEvent(1.0), NoiseEvent(1.0, 1, CONCENTRATED)], 1e-5) == 43


@pytest.mark.parametrize("law", LAWS)
def test_without_the_extra_the_own_accountant_answers(law, monkeypatch):
    monkeypatch.setattr(dp_accounting_door, "installed", lambda: False)
    events = [NoiseEvent(2.0, 3, law)]
    assert accountant.epsilon(events, 1e-5) == own(events, 1e-5)


def test_the_door_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match=r"pip install 'triplane\[privacy\]'"):
        dp_accounting_door.gaussian_epsilon(1.0, 1e-5)
    with pytest.raises(MissingExtra, match=r"pip install 'triplane\[privacy\]'"):
        dp_accounting_door.concentrated_epsilon(1.0, 1e-5, accountant.ORDERS)


@pytest.mark.parametrize("m", [1e-3, 0.1, 1.0, 20.0])
@pytest.mark.parametrize("delta", [1e-60, 1e-10, 1e-5, 1e-2])
def test_epsilon_is_the_least_on_the_curve(m, delta):
    epsilon = gaussian_epsilon(m, delta)
    assert gaussian_delta(epsilon, m) <= delta
    assert epsilon == 0 or gaussian_delta(epsilon * (1 - 1e-9), m) > delta


def test_the_curve_is_the_integral_of_the_densities():
    """Delta is the integral of the positive part of p - exp(epsilon) q."""
    import numpy as np

    x = np.linspace(-12, 14, 200_001)
    for m, epsilon in ((0.5, 0.2), (1.0, 1.0), (2.0, 5.0)):
        p, q = (np.exp(-((x - shift) ** 2) / 2) / math.sqrt(2 * math.pi) for shift in (m, 0))
        integral = np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0])
        assert gaussian_delta(epsilon, m) == pytest.approx(integral, rel=1e-5)


def test_the_bound_of_divergences_is_above_the_curve_and_near_it():
    for m in (0.1, 0.5, 1.0, 3.0, 10.0):
        exact, bound = gaussian_epsilon(m, 1e-6), concentrated_epsilon(m**2 / 2, 1e-6)
        assert exact < bound < 1.2 * exact


def test_the_minimum_over_all_real_orders_is_missed_by_little():
    for rho in (1e-6, 1e-3, 0.1, 3.0, 50.0):
        orders = [1 + math.exp(k / 200) for k in range(-400, 3000)]
        fine = min(a * rho + math.log1p(-1 / a) - math.log(1e-6 * a) / (a - 1) for a in orders)
        assert concentrated_epsilon(rho, 1e-6) <= max(fine, 0) * (1 + 1e-3)


@pytest.mark.parametrize("law", LAWS)
def test_uses_and_events_compose_by_their_squares(law):
    apart = own([NoiseEvent(3.0, 2, law), NoiseEvent(6.0, 4, law)], 1e-6)
    joint = NoiseEvent((2 / 3.0**2 + 4 / 6.0**2) ** -0.5, 1, law)
    assert apart == pytest.approx(own([joint], 1e-6), rel=1e-12)


def test_one_bounded_use_takes_all_uses_to_divergences():
    mixed = own([NoiseEvent(3.0, 7, GAUSSIAN), NoiseEvent(3.0, 1, CONCENTRATED)], 1e-6)
    assert mixed == pytest.approx(own([NoiseEvent(3.0, 8, CONCENTRATED)], 1e-6), rel=1e-12)


def test_nothing_spent_is_epsilon_zero():
    assert own([], 1e-5) == 0
    assert accountant.epsilon([], 1e-5) == 0
    assert own([NoiseEvent(1.0, 0), NoiseEvent(1.0, 0, CONCENTRATED)], 1e-5) == 0


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("times", [1, 20, 1000])
def test_the_multiplier_for_a_target_is_the_least_one(times, law):
    z = noise_multiplier_for(2.0, 1e-6, times, law=law)
    assert own([NoiseEvent(z, times, law)], 1e-6) <= 2.0
    assert own([NoiseEvent(z * (1 - 1e-9), times, law)], 1e-6) > 2.0


@pytest.mark.parametrize("error", [2.0**-52, -(2.0**-53)])
def test_a_budget_has_as_many_rounds_where_erfc_rounds_differently(monkeypatch, error):
    budget = run_budget(0.01, 1e-3, 10, separation=10)
    normal = accountant._normal
    monkeypatch.setattr(accountant, "_normal", lambda x: normal(x) * (1 + error))
    assert budget.most_rounds(10) == 10


@pytest.mark.parametrize(
    "case", [(0.0,), (math.nan,), (math.inf,), (-1.0,), (1.0, -1), (1.0, 1.5), (1.0, True)]
)
def test_impossible_events_are_refused(case):
    with pytest.raises(InvalidInput):
        NoiseEvent(*case)


def test_laws_that_are_not_accounted_are_refused_by_name():
    with pytest.raises(InvalidInput, match="gaussian or concentrated, got 'laplace'"):
        NoiseEvent(1.0, 1, "laplace")


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_impossible_deltas_are_refused(delta):
    with pytest.raises(InvalidInput, match="delta is a probability"):
        accountant.epsilon([NoiseEvent(1.0)], delta)


@pytest.mark.parametrize("spent", [(-1.0, 0.0), (0.0, math.inf), (math.nan, 0.0), (1e31, 0.0)])
def test_impossible_spending_is_refused(spent):
    with pytest.raises(InvalidInput, match=r"a sum of z\^-2 is 0 to 1e\+30"):
        Spending(*spent)


def test_an_unreachable_target_is_refused():
    with pytest.raises(InvalidInput, match="no noise multiplier up to 1e"):
        noise_multiplier_for(1e-12, 1e-100, 10**9)

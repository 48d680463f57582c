"""Masked updates with clipping bits: what both cost, against divergences computed directly."""

import math

import numpy as np
import pytest

from triplane.unified_ir.federated.masking.noise import bit_noise_of, joint_multiplier
from triplane.unified_ir.federated.privacy.accountant import CONCENTRATED, NoiseEvent, Spending
from triplane.unified_ir.federated.privacy.distributed import DistributedNoise

DELTAS = (1e-2, 1e-4, 1e-6)


def law_of_sum(variance, honest):
    """Probabilities of the sum of the noise of honest devices, from -w to w."""
    w = int(24 * math.sqrt(variance))
    x = np.arange(-w, w + 1)
    one = np.exp(-(x**2) / (2 * variance))
    one /= one.sum()
    total = one
    for _ in range(honest - 1):
        total = np.convolve(total, one)
    return total


def released(update, bit, moves, shift):
    """The joint law of (sum of updates, sum of bits), flat, with and without a device.

    moves: of its integer. shift: its bit, +1 or -1; a device that sends zeros moves neither.
    """
    sums, bits = law_of_sum(update.variance, update.honest), law_of_sum(bit.variance, bit.honest)
    with_device = np.outer(np.roll(sums, moves), np.roll(bits, shift))
    return with_device.ravel(), np.outer(sums, bits).ravel()


def delta_of(p, q, epsilon):
    """The least delta for which no event is more likely by e^epsilon: the hockey stick."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


@pytest.mark.parametrize("honest", [1, 2, 3])
@pytest.mark.parametrize(("variance", "bit_variance"), [(4, 2), (9, 30), (2, 1)])
@pytest.mark.parametrize(("moves", "shift"), [(3, 1), (3, -1), (-2, 1), (0, 1)])
def test_the_charge_of_a_use_covers_its_update_and_its_bit(
    honest, variance, bit_variance, moves, shift
):
    update, bit = DistributedNoise(variance, honest, 3.0, 1), bit_noise_of(bit_variance, honest)
    assert bit is not None
    event = NoiseEvent(joint_multiplier(update, bit), 1, CONCENTRATED)
    p, q = released(update, bit, moves, shift)
    for delta in DELTAS:
        epsilon = Spending().plus(event).epsilon(delta)
        assert delta_of(p, q, epsilon) <= delta
        assert delta_of(q, p, epsilon) <= delta


@pytest.mark.parametrize("order", [1.5, 2, 8])
def test_divergences_of_both_add_up_to_nearly_the_bound(order):
    update, bit = DistributedNoise(9, 2, 3.0, 1), bit_noise_of(4, 2)
    assert bit is not None
    p, q = released(update, bit, 3, 1)
    keep = (p > 1e-280) & (q > 1e-280)
    terms = order * np.log(p[keep]) + (1 - order) * np.log(q[keep])
    exact = float(np.logaddexp.reduce(terms) / (order - 1))
    assert 0.98 < exact / (order / (2 * joint_multiplier(update, bit) ** 2)) <= 1 + 1e-9


def test_an_account_without_the_bits_would_be_too_low():
    """The bit alone, with noise of its own, tells more than the update's charge allows."""
    update, bit = DistributedNoise(900, 2, 3.0, 1), bit_noise_of(1, 2)
    assert bit is not None
    p, q = law_of_sum(bit.variance, 2), np.roll(law_of_sum(bit.variance, 2), 1)
    epsilon = Spending().plus(update.event()).epsilon(1e-2)
    assert delta_of(p, q, epsilon) > 10 * 1e-2

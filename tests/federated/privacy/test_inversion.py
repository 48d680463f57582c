"""What a cloud reads of digits in updates, by gradient inversion, and what protects from it.

Errors are relative to that of the mean image: above 1, a reconstruction is no nearer to a digit
than the mean of all digits, which everybody knows. `make deep SUITE=inversion` writes the table and
the picture to docs/evidence/.
"""

import numpy as np
import pytest
from tests.support import inversion, inversion_page
from tests.support.inversion import BATCH, DigitsAtDevices, guesses, guesses_between

from triplane.unified_ir.federated.algorithms import ALGORITHMS
from triplane.unified_ir.federated.core.reduce import reduce

EPSILON = 8
LUCK = 0.9
"""Of 256 random guesses, the nearest to one of eight digits once came to 0.98 in 7,500 tries."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return DigitsAtDevices(tmp_path_factory.mktemp("inversion"))


def errors(digits, view, by=guesses):
    return digits.errors(by(view.change), view.samples)


def recovered(digits, view, by=guesses):
    """Digits that are reconstructed with at most a hundredth of the mean image's error."""
    return int(np.sum(errors(digits, view, by) < 0.01))


def assert_says_nothing(digits, view, by=guesses):
    """Assert that guesses at the first device's digits are no nearer than the mean image."""
    of_one_device = errors(digits, view, by)[:BATCH]
    assert np.median(of_one_device) > 1.2
    assert of_one_device.min() > LUCK


def test_an_unprotected_update_contains_its_digits(digits):
    for samples in (1, 4, 8):
        assert errors(digits, digits.learned(0, samples)).max() < 1e-3


def test_more_steps_and_larger_batches_do_not_hide_all_digits(digits):
    assert errors(digits, digits.learned(0, steps=5)).max() < 1e-3
    assert recovered(digits, digits.learned(0, 32)) >= 5
    assert recovered(digits, digits.learned(0, 100, steps=5)) >= 3


def test_a_masked_input_is_no_nearer_than_the_mean_image(digits):
    updates = digits.updates(3)
    assert errors(digits, inversion.masked_sum(updates[:1])).max() < 0.5, "it is the masks"
    assert_says_nothing(digits, inversion.masked_input(updates))


@pytest.mark.parametrize("noised", [inversion.with_central_noise, inversion.with_noise_of_devices])
@pytest.mark.parametrize("chosen", [False, True], ids=["honest state", "chosen state"])
def test_a_sum_with_noise_is_no_nearer_than_the_mean_image(digits, noised, chosen):
    state, by = (digits.chosen_state(), guesses_between) if chosen else (None, guesses)
    view = noised(digits.updates(10, state=state), EPSILON)
    assert_says_nothing(digits, view, by)
    # It is the noise, and not the way in which it is added: with next to none digits show.
    nearly_none = errors(digits, noised(digits.updates(10, state=state), 1e6), by)
    assert nearly_none.min() < 0.9
    assert np.median(nearly_none) < np.median(errors(digits, view, by)) - 0.15


def test_a_sum_without_noise_still_contains_digits(digits):
    """Masking hides who contributed what, and not what the sum itself says: docs/privacy.md."""
    updates = digits.updates(30)
    for devices in (3, 10, 30):
        assert recovered(digits, inversion.summed(updates[:devices])) >= 3
        rounded = errors(digits, inversion.masked_sum(updates[:devices]))
        assert rounded.min() < 0.5
        assert np.median(rounded) < 0.8


def test_in_a_round_of_two_each_device_reads_the_digits_of_the_other(digits):
    first, second = digits.learned(0), digits.learned(BATCH)
    updates = [(BATCH, _opening(view)) for view in (first, second)]
    before = {name: digits.start[name] for name in first.change}
    server = ALGORITHMS["fedavg"].server
    after, _ = reduce(
        before, {}, updates, weighting="examples", server=server, hyper={"server_lr": 1.0}
    )
    other = {n: 2 * (after[n] - before[n]) - second.change[n] for n in before}
    assert np.median(digits.errors(guesses(other), first.samples)) < 0.05


def _opening(view):
    return lambda: view.change


def test_a_state_that_the_cloud_chose_reveals_half_of_a_sum_of_ten(digits):
    """No signature covers the numbers that a round begins from: docs/privacy.md."""
    updates = digits.updates(10, state=digits.chosen_state())
    total = inversion.summed(updates)
    assert recovered(digits, total, guesses_between) > 30
    assert recovered(digits, inversion.summed(digits.updates(10))) < 10
    rounded = errors(digits, inversion.masked_sum(updates), guesses_between)
    assert np.median(rounded) < 0.8


@pytest.mark.deep
def test_the_page_and_the_picture(digits):
    views = inversion_page.views(digits)
    inversion_page.write(digits, views)
    protected = [row for row in views if row.protected]
    assert len(protected) == 7
    for row in protected:
        assert_says_nothing(digits, row.view, row.by)

"""A device in masked rounds in groups over the wire: its group, and what it declines."""

import numpy as np
import pytest
from tests.device.masked_play import plain_change, play
from tests.support.deadlines import within

from triplane.unified_ir.federated.masking import wire
from triplane.unified_ir.federated.masking.messages import MaskingCohort


def test_a_device_masks_with_the_devices_of_its_group(tmp_path):
    async def story():
        async with play(tmp_path, simulated=5, groups=2, encoding={"bits": 16}) as made:
            request = await made.reach("unmask")
            return made.round, made.round.mean(made.round.sum(await made.answered(request)))

    round_, ((w, _), weight) = within(story())
    assert (len(round_.cohort.advertisements), len(round_.cloud.contributors)) == (6, 3)
    assert weight == 20 + 2
    wanted = plain_change(tmp_path)["w"].reshape(-1) * 20 / weight
    bound = round_.codec.sections[0].error_bound(3) * 32 / weight
    assert np.linalg.norm(w - wanted) < bound
    assert np.linalg.norm(wanted) > 10 * bound, "the bound tells something"


def cohort_of(made, keys):
    """The step `share` of all devices, whatever the cloud thinks of their number."""
    advertisement, key = wire.advertisement_of(keys.keys)
    made.round.verifier.keys[advertisement.device] = key
    everybody = [advertisement, *(d.advertise() for d in made.round.simulated)]
    cohort = MaskingCohort(advertisements=tuple(sorted(everybody, key=lambda a: a.device)))
    return made.round.step(share=wire.cohort_message(cohort, made.round.verifier.keys))


def other_number(step):
    step.terms.groups = 2


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"groups": 2}, None, "4 devices make 1 to 1 of them, got 2 groups"),
        (
            {"simulated": 6, "groups": 2, "least": 4},
            None,
            "got least cohort 4 and groups of 3 devices",
        ),
        ({"simulated": 5, "groups": 1}, other_number, "the same in all its steps"),
    ],
)
def test_groups_that_are_too_small_or_not_those_of_the_terms_are_declined(
    tmp_path, options, change, reason
):
    async def story():
        async with play(tmp_path, **options) as made:
            step = cohort_of(made, await made.answered(made.round.step()))
            if change is not None:
                change(step)
            return await made.asked(step)

    assert reason in within(story()).declined

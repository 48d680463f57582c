"""The noise that a device adds in a masked round: sized, charged, drawn once, and refused."""

from dataclasses import replace

import numpy as np
import pytest
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within
from tests.support.masked_rounds import MaskedRound

from triplane.device.masked_rounds import OwnNoise, _Agreed
from triplane.device.privacy_account import NoiseTask
from triplane.device.tasks import Blob, Task
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.federated.masking.encoding import EncodedSection, range_for
from triplane.unified_ir.federated.masking.noise import noise_for
from triplane.unified_ir.federated.masking.parameters import choose_parameters
from triplane.unified_ir.federated.privacy.accountant import CONCENTRATED, NoiseEvent

CLIP = 0.5
SECTION = EncodedSection(500, range_for(CLIP, 500))
NOISE = noise_for(SECTION, CLIP, 5.0, 4)


def own(variance=NOISE.variance, charge=lambda: None):
    event = NoiseEvent(5.0, 1, CONCENTRATED)
    return OwnNoise(NoiseTask(clip=CLIP, event=event, variance=variance), SECTION, charge)


def cohort(least, colluding_share):
    return choose_parameters(
        10, least=least, lost_share=0.1, colluding_share=colluding_share, failure=1e-6
    )


def test_noise_below_what_is_charged_is_refused():
    own().check(cohort(6, 0.2))
    own().check(cohort(8, 0.2))
    with pytest.raises(InvalidInput, match=r"noise of 3 honest devices .* no less than"):
        own().check(cohort(6, 0.3))
    with pytest.raises(InvalidInput, match="noise of 4 honest devices"):
        own(NOISE.variance * 99 // 100).check(cohort(6, 0.2))


def test_noise_is_drawn_once_and_every_answer_is_charged_before_it():
    charges = []
    noise = own(charge=lambda: charges.append(1))
    vectors = [np.full(SECTION.padded, 127, np.uint8), np.array([1], np.uint8)]
    noise.add(vectors)
    first = vectors[0].copy()
    assert np.std(first) == pytest.approx(np.sqrt(NOISE.variance), rel=0.2)
    noise.add(vectors)
    assert np.array_equal(vectors[0], first)
    assert len(charges) == 2


def test_without_a_charge_nothing_is_added():
    def refused():
        raise Conflict("above this device's 3")

    vectors = [np.full(SECTION.padded, 127, np.uint8)]
    with pytest.raises(Conflict, match="above this device's"):
        own(charge=refused).add(vectors)
    assert (vectors[0] == 127).all()


NOISED = NoiseTask(clip=CLIP, event=NoiseEvent(5.0, 1, CONCENTRATED), variance=900)


def agreed(noise, **sampling):
    asked = MaskedRound("0" * 16, 1, bytes(32), parameters=500, buffers=0, encoding={"cap": 1})
    task = Task(
        kind="learn", lease="00" * 16, plan=Blob(bytes(32), 1), state=Blob(bytes(32), 1),
        work=plans.WORK, until_s=0.0, noise=noise, step="keys",
        document=pb.Task(masking=asked.step(), sampling=pb.Sampling(**sampling)),
    )  # fmt: skip
    return _Agreed.of(task, bytes(32))


def test_noise_that_changes_between_two_steps_is_another_round():
    assert agreed(NOISED) == agreed(replace(NOISED))
    for other in (
        None,
        replace(NOISED, variance=899),
        replace(NOISED, event=replace(NOISED.event, noise_multiplier=6.0)),
    ):
        assert agreed(NOISED) != agreed(other)


def test_all_devices_of_a_round_sign_that_they_learn_alike_and_add_the_same_noise():
    """Otherwise a cloud tells those on whose noise a device relies to add less of it."""
    others = NOISED, replace(NOISED, variance=899), replace(NOISED, bit_variance=5)
    made = [agreed(noise) for noise in others]
    made += [agreed(NOISED, **{name: 1}) for name in ("steps", "batch_size", "support", "query")]
    assert len({x.terms.encode() for x in made}) == 7


TERMS = {"clip": CLIP, "multiplier": 5.0, "separation": 1, "delta": 1e-5, "own_std": 400.0}


@pytest.mark.long
def test_a_device_declines_noise_that_does_not_cover_its_update(tmp_path):
    async def story():
        async with staged(tmp_path / "stage") as stage:
            plan, digest = stage.plan()
            files = {"plan": plan, "state": stage.state(digest)}
            client = client_at(stage, tmp_path / "ann", plans.shard(held_out=6))
            declined = []
            async with serving(client):
                await stage.offer()
                for number, (changes, norm) in enumerate(CASES, 1):
                    run = f"{number:016x}"
                    round_ = MaskedRound(
                        run, 1, files["state"].sha256, parameters=2, buffers=1,
                        encoding={"norm": norm},
                    )  # fmt: skip
                    noise = pb.NoiseTerms(**{**TERMS, **changes})
                    stage.tell(
                        stage.task(number, **files, run=run, masking=round_.step(), noise=noise)
                    )
                    declined.append((await stage.contribution(lease(number))).declined)
            return declined

    said = within(story())
    for reason, words in zip(said, WORDS, strict=True):
        assert words in reason
    assert not (tmp_path / "ann" / "privacy.json").exists(), "nothing left, nothing is charged"


CASES: tuple[tuple[dict, float], ...] = (
    ({}, CLIP),  # the plan has a float buffer
    ({}, 2 * CLIP),
    ({"own_std": 0.0}, CLIP),
    ({"own_std": float("nan")}, CLIP),
    ({"clip_bit": True}, CLIP),
)
WORDS = (
    "no float buffers and every device has the weight 1",
    "scaled by the norm 0.5 to which it is clipped, the encoding says 1",
    "relies on no noise of the cloud",
    "deviation of 1 to",
    "a clipping bit gets noise of the device exactly if",
)

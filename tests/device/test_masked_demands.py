"""What the signers of a plan and the owner of a device demand of masked rounds."""

import hashlib
from typing import Any

import pytest
from tests.device.masked_play import play
from tests.device.stage import lease
from tests.federated.masking.rounds import identity_key, public_der
from tests.support.deadlines import within

from triplane.device.home import DeviceHome
from triplane.proto import federation_pb2 as pb
from triplane.proto.identity import key_digest
from triplane.proto.plan_statement import Least, LeastMasking

DEMANDS: dict[str, tuple[dict[str, Any], str]] = {
    "devices, of its owner": (
        {"owner": {"least_devices": 4}},
        "at least 4 devices in a round, got 3",
    ),
    "devices, of the signature": (
        {"statement": {"least": Least(devices=5)}},
        "at least 5 devices in a round, got 3",
    ),
    "colluding, of its owner": (
        {"owner": {"least_colluding_share": 0.1}},
        "a share of at least 0.1 colluding devices, got 0",
    ),
    "colluding, of the signature": (
        {"statement": {"masking": LeastMasking(0.2)}},
        "a share of at least 0.2 colluding devices, got 0",
    ),
    "a roster, of the signature": (
        {"statement": {"masking": LeastMasking(roster=True)}},
        "demand a signed roster of devices",
    ),
}


@pytest.mark.parametrize("case", DEMANDS, ids=list(DEMANDS))
def test_weaker_masking_than_is_demanded_is_declined(tmp_path, case):
    options, reason = DEMANDS[case]

    async def story():
        async with play(tmp_path, **options) as made:
            return await made.asked(made.round.step())

    assert reason in within(story()).declined


@pytest.mark.parametrize(
    "options",
    [{"owner": {"masked_only": True}}, {"statement": {"masking": LeastMasking()}}],
    ids=["owner", "signature"],
)
def test_an_update_in_the_clear_is_declined_where_masking_is_demanded(tmp_path, options):
    async def story():
        async with play(tmp_path, **options) as made:
            made.stage.tell(made.stage.task(1, **made.files))
            plain = await made.stage.contribution(lease(1))
            made.stage.tell(made.stage.task(2, **made.files, evaluate=pb.Evaluate(steps=1)))
            score = await made.stage.contribution(lease(2))
            return plain, score, await made.asked(made.round.step(), 3)

    plain, score, masked = within(story())
    assert "demand masking, and updates are in the clear" in plain.declined
    assert "demand masking, and scores are in the clear" in score.declined
    assert masked.WhichOneof("outcome") == "masked"


def test_the_update_of_a_masked_lease_is_never_sent_in_the_clear(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            await made.answered(made.round.step())
            made.stage.tell(made.stage.task(1, **made.files, inline_bytes=65536))
            return await made.stage._until(
                lambda m: isinstance(m, pb.Contribution) and m.WhichOneof("outcome") == "declined"
            )

    assert "is masked and is sent in no other way" in within(story()).declined


@pytest.mark.parametrize("invented", [0, 1])
def test_every_device_of_a_cohort_must_be_in_the_roster(tmp_path, invented):
    demand = {"masking": LeastMasking(roster=True)}

    async def story():
        async with play(tmp_path, statement=demand) as made:
            mine = key_digest(DeviceHome(tmp_path / "ann").identity.certificate)
            keys = [public_der(identity_key(number)) for number in range(3 - invented)]
            made.stage.signer.enlist(mine, *(hashlib.sha256(key).digest() for key in keys))
            return await made.asked(await made.reach("share"))

    said = within(story())
    if invented:
        assert "is no device of the roster 3 of 3 devices" in said.declined
    else:
        assert said.WhichOneof("outcome") == "masked", said.declined

"""The cloud counts the size of a run's rounds as its devices do."""

import pytest

from triplane.cloud.federation.plan_signing import (
    _check_masking,
    _check_size,
    least_masking_of,
    least_of,
)
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict
from triplane.proto.plan_statement import Least, LeastMasking


def spec(algorithm="fedavg", **sampling):
    fields = {"steps": 3, "batch_size": 32, "support": 20, "query": 20, **sampling}
    cohort = pb.Cohort(devices=2, quorum=1.0)
    return pb.Spec(algorithm=algorithm, cohort=cohort, sampling=pb.Sampling(**fields))


@pytest.mark.parametrize(
    ("run", "batch"),
    [
        (spec(batch_size=1), 1),
        (spec("maml", query=1), 1),
        (spec("maml+adam", batch_size=1, support=3), 3),
    ],
)
def test_a_run_whose_steps_are_too_small_for_its_devices_is_refused(run, batch):
    assert least_of(run).batch == min(batch, 2)
    with pytest.raises(Conflict, match=f"at least 4 samples in a step, got {batch}"):
        _check_size(run, Least(batch=4))


def test_a_batch_may_be_as_large_as_a_spec_allows():
    _check_size(spec(batch_size=1 << 24), Least(batch=1_000_000))


def masked(**fields):
    run = spec()
    run.masking.CopyFrom(pb.MaskedRounds(colluding_share=0.1, **fields))
    return run


def test_a_run_is_masked_as_its_signed_plan_demands():
    assert least_masking_of(spec()) is None
    assert least_masking_of(masked()) == LeastMasking(0.1, 1e-6)
    assert least_masking_of(masked(failure=1e-9)) == LeastMasking(0.1, 1e-9)
    _check_masking(masked(), LeastMasking(0.1))
    _check_masking(masked(), None)
    in_the_clear = masked()
    in_the_clear.scores = "clear"
    _check_masking(in_the_clear, None)
    with pytest.raises(Conflict, match="demands masking, and scores are in the clear"):
        _check_masking(in_the_clear, LeastMasking(0.1))
    _check_masking(masked(), LeastMasking(0.1, roster=True))
    with pytest.raises(Conflict, match="demands masking, and updates are in the clear"):
        _check_masking(spec(), LeastMasking())
    with pytest.raises(Conflict, match=r"at least 0\.2 colluding devices, got 0\.1"):
        _check_masking(masked(), LeastMasking(0.2))

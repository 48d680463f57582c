"""Which cohort devices are asked for, and whose inputs are added to its sum when they arrive."""

import asyncio
from dataclasses import replace
from typing import Any

from tests.cloud.federation.journals import entry

from triplane.cloud.federation import journal
from triplane.cloud.federation.masked_cohorts import MaskedCohorts, RoundTerms
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.masked_step import MaskedProgress, MaskedStep, StepAnswer
from triplane.unified_ir.federated.core.run import Lease, Leases, Outcome, Phase, Round

SIGN = pb.MaskingStep(sign=pb.SurvivorSet(positions=[1, 2]))


class Cohort:
    """A cohort in the step of signatures."""

    def asks(self, _step, _device):
        message = pb.MaskingStep()
        message.CopyFrom(SIGN)
        return message


def test_work_of_an_earlier_round_leaves_the_newer_one_its_cohort(monkeypatch):
    """A run that was stopped and resumed, or whose commit was refused, while a thread went on."""
    nothing: Any = None
    terms = RoundTerms(nothing, nothing, (), pb.MaskingStep())
    monkeypatch.setattr(MaskedCohorts, "_terms", lambda *_: terms)
    cohorts, record = MaskedCohorts(nothing, nothing, lambda: None), entry()
    newer = in_step(record, MaskedStep.SIGNATURES, attempt=1)
    known: Any = cohorts._of(record, newer)
    known.cohort = Cohort()
    cohorts.terms(record, in_step(record, MaskedStep.SIGNATURES))  # as an exchange of then does
    assert cohorts.asks(record, newer, "ann") == SIGN


class Adding:
    """A cohort in the step of inputs."""

    def __init__(self):
        self.added: list[str] = []

    def is_at(self, step):
        return step is MaskedStep.INPUTS

    def add_input(self, device):
        self.added.append(device)


def test_the_input_of_a_device_that_left_in_the_same_commit_is_not_added(monkeypatch):
    """Its cohort would have to be computed again when the step ends."""
    nothing: Any = None
    monkeypatch.setattr(MaskedCohorts, "_terms", lambda *_: nothing)
    monkeypatch.setattr(MaskedCohorts, "_answer", lambda _, _record, lease, _step: lease.device)
    cohorts, record, cohort = MaskedCohorts(nothing, nothing, lambda: None), entry(), Adding()
    answers = (StepAnswer(step=MaskedStep.INPUTS, blob="aa" * 32, size=1),)
    ann, bob = (Lease(id=x, device=x, answers=answers) for x in ("ann", "bob"))
    state = in_step(record, MaskedStep.INPUTS, [ann, replace(bob, outcome=Outcome.DECLINED)])
    known: Any = cohorts._of(record, state)
    known.cohort = cohort

    async def arrived():
        cohorts.arrived(record, state, ["ann", "bob"])
        await known.adding

    asyncio.run(arrived())
    assert cohort.added == ["ann"]


def in_step(record, step, leases=(), attempt=0):
    masked = MaskedProgress(step=step, opened_s=1.0, cap=1)
    round_ = Round(
        number=1, evaluates=False, attempt=attempt, opened_s=1.0,
        leases=Leases.from_leases(leases), masked=masked,
    )  # fmt: skip
    state = journal.first_projection(record).state
    return replace(state, phase=Phase.COLLECTING, round=round_)

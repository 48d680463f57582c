"""Whose cohort devices are asked for while work of an earlier round is still under way."""

from dataclasses import replace
from typing import Any

from tests.cloud.federation.journals import entry

from triplane.cloud.federation import journal
from triplane.cloud.federation.masked_cohorts import MaskedCohorts, RoundTerms
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.masked_step import MaskedProgress, MaskedStep
from triplane.unified_ir.federated.core.run import Phase, Round

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
    newer = in_signatures(record, attempt=1)
    known: Any = cohorts._of(record, newer)
    known.cohort = Cohort()
    cohorts.terms(record, in_signatures(record, attempt=0))  # as an exchange of then does
    assert cohorts.asks(record, newer, "ann") == SIGN


def in_signatures(record, attempt):
    masked = MaskedProgress(step=MaskedStep.SIGNATURES, opened_s=1.0, cap=1)
    round_ = Round(
        number=1, evaluates=False, attempt=attempt, opened_s=1.0, leases=(), masked=masked
    )
    state = journal.first_projection(record).state
    return replace(state, phase=Phase.COLLECTING, round=round_)

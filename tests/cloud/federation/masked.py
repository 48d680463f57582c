"""Devices that take part in masked rounds over the real protocol, and the runs for them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.cloud.federation.given import Device, Kept, start_request, work_of

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.masking import (
    EcdsaSigner,
    EcdsaVerifier,
    MaskingDevice,
    MaskingLedger,
    wire,
)
from triplane.unified_ir.federated.masking.scores import ScoreEncoding, score_base
from triplane.unified_ir.federated.privacy import secret

NORM = 0.5
STEPS = ("keys", "share", "mask", "sign", "unmask")


def masked_request(
    devices=3,
    *,
    lost_share=None,
    colluding_share=0.0,
    phase_s=20.0,
    norm: float | str = NORM,
    **fields,
):
    """A masked run of so many devices."""
    masking = pb.MaskedRounds(colluding_share=colluding_share, phase_s=phase_s)
    if lost_share is not None:
        masking.lost_share = lost_share
    masking.least, masking.groups = fields.pop("least", 3), fields.pop("groups", 0)
    # Tests of the rounds that learn look at each score; those of masked scores ask for them.
    fields = {"scores": "clear"} | fields
    cohort = {"devices": devices, "quorum": 1.0} | fields.pop("cohort", {})
    robustness = pb.Robustness(norm_bound=str(norm), aggregator=fields.pop("aggregator", ""))
    return start_request(masking=masking, cohort=cohort, robustness=robustness, **fields)


class MemoryLedger:
    """A ledger in memory, which is what a device keeps over restarts."""

    def __init__(self):
        self.ledger = MaskingLedger()

    def load(self):
        return self.ledger

    def update(self, change):
        self.ledger = change(self.ledger)


@dataclass
class Secrets:
    """What a device keeps of one masked round. change: after clipping, as float32.

    sections: the names of each section of the update.
    """

    device: MaskingDevice
    verifier: dict
    vectors: tuple
    change: dict
    examples: int
    sections: list[list[str]]


@dataclass
class MaskedDevice(Device):
    """Learns and masks. lost: the step from which on it is silent, by round. answers: all sent.

    twist: changes an answer before it is sent. lies: masks the largest integers instead of its
    update; bits: what it masks as its bits, if it lies about them. in_the_clear: sends its update
    as if the round were not masked. repeats: sends each answer twice, and all earlier ones of the
    round again.
    """

    lost: dict[int, str] = field(default_factory=dict)
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    open: dict[bytes, Secrets] = field(default_factory=dict)
    answers: list[tuple[pb.Task, pb.Contribution]] = field(default_factory=list)
    twist: Any = None
    lies: bool = False
    bits: int | None = None
    in_the_clear: bool = False
    repeats: bool = False
    scored: dict[int, learn.LearnerScore] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        self.signer = EcdsaSigner.from_pem(self.identity.key_pem)

    async def _obey(self):
        done = set()

        def key(task):
            return task.lease, task.masking.WhichOneof("asks")

        while True:
            await self.until(lambda w: any(key(t) not in done for t in w.tasks))
            task = next(t for t in self.work.tasks if key(t) not in done)
            done.add(key(task))
            step = key(task)[1]
            if step is None or self.in_the_clear:
                await self._worked(task)
                continue
            lost = self.lost.get(task.round)
            if lost is not None and STEPS.index(step) >= STEPS.index(lost):
                continue
            await self._answered(task, step)

    async def _answered(self, task, step):
        try:
            message = await self.apart(self.answer, task, step)
        except (InvalidInput, Conflict) as error:
            sent = pb.Contribution(run=task.run, round=task.round, lease=task.lease)
            sent.declined = str(error)
        else:
            sent = pb.Contribution(run=task.run, round=task.round, lease=task.lease)
            sent.masked.CopyFrom(message)
        if self.twist is not None:
            sent = self.twist(self, task, step, sent)
        self.answers.append((task, sent))
        self.kept.append(Kept(task, sent))
        await self.client.send(sent)
        self.kept[-1].acknowledged = True
        earlier = [x for t, x in self.answers if t.lease == task.lease] if self.repeats else []
        for again in earlier:
            await self.client.send(again)

    def answer(self, task, step):
        body = task.masking
        if step == "keys":
            return pb.MaskingAnswer(keys=self._begun(task))
        ours = self.open[task.lease]
        if step == "share":
            cohort, keys = wire.cohort_of(body.share)
            ours.verifier |= {name: EcdsaVerifier({name: key}) for name, key in keys.items()}
            return pb.MaskingAnswer(shares=wire.shares_message(ours.device.share(cohort)))
        if step == "mask":
            made = ours.device.mask(wire.delivery_of(body.mask), ours.vectors)
            message = pb.MaskedInput(
                position=made.position, signature=made.signature, unopened=made.unopened
            )
            if len(made.data) <= task.inline_bytes:
                message.data = made.data
            else:
                message.blob.CopyFrom(self.sent(made.data, examples=1).blob)
            return pb.MaskingAnswer(input=message)
        if step == "sign":
            signature = ours.device.sign(wire.survivors_of(body.sign))
            return pb.MaskingAnswer(signature=wire.signature_message(signature))
        revealed = ours.device.unmask(wire.request_of(body.unmask))
        return pb.MaskingAnswer(revealed=wire.revealed_message(revealed))

    def _begun(self, task):
        plan = self.plan(task)
        if task.WhichOneof("work") == "evaluate":
            return self._began_scores(plan, task)
        made = learn.learn(plan, work_of(task, self.name), self.shard)
        sections = sections_of(made.change, plan)
        sizes = [sum(x.size for x in kind.values()) for kind in sections]
        variance, bit_variance = round(task.noise.own_std**2), round(task.noise.own_bit_std**2)
        asked = task.masking.encoding
        encoding = wire.encoding_of(
            asked, *sizes, variance=variance, bit_variance=bit_variance,
            least=task.masking.terms.least,
        )  # fmt: skip
        bounded = zip(sections, (asked.norm, asked.buffer_norm), strict=True)
        pairs = [(kind, norm) for kind, norm in bounded if kind]
        kinds = [clipped(kind, norm) for kind, norm in pairs]
        is_short = [length_of(kind) <= asked.bit_share * norm for kind, norm in pairs]
        flat = [np.concatenate([x.reshape(-1) for x in kind.values()]) for kind in kinds]
        vectors = encoding.encode(flat, made.examples, is_short)
        if variance:
            vectors = tuple(
                x.astype(np.int64) + secret.discrete_gaussian(len(x), v) if v else x
                for x, v in zip(vectors, (variance, 0, bit_variance), strict=False)
            )
        if self.lies:
            for vector in vectors[: len(flat)]:
                vector[:] = 255
        if self.bits is not None:
            vectors[-1][:] = self.bits
        change = {name: x for kind in kinds for name, x in kind.items()}
        return self._advertised(
            task, task.state.sha256, encoding, vectors, change, made.examples,
            [list(kind) for kind in kinds],
        )  # fmt: skip

    def _began_scores(self, plan, task):
        made = learn.evaluate(plan, work_of(task, self.name), self.shard, steps=task.evaluate.steps)
        encoding = ScoreEncoding(learn.metric_of_plan(plan), task.masking.encoding.cap)
        self.scored[task.round] = made
        vectors = encoding.encode((made.before, made.after), made.samples)
        return self._advertised(
            task, score_base(task.state.sha256), encoding, vectors, {}, made.samples, []
        )

    def _advertised(self, task, base, encoding, vectors, *kept):
        variance, bit_variance = round(task.noise.own_std**2), round(task.noise.own_bit_std**2)
        terms = wire.terms_of(
            task.masking.terms, run=task.run, round_=task.round, base=base,
            encoding=wire.encoding_digest(
                task.masking.encoding, task.sampling, variance=variance,
                bit_variance=bit_variance, adaptation=task.evaluate.steps,
            ),
        )  # fmt: skip
        assert terms.fields == encoding.fields
        known: dict = {}
        device = MaskingDevice(
            terms, wire.pseudonym(self.signer.public_der), signer=self.signer,
            verifier=Known(known), store=self.ledger,
        )  # fmt: skip
        self.open[task.lease] = Secrets(device, known, vectors, *kept)
        return wire.advertisement_message(device.advertise(), self.signer.public_der)


class Known:
    """Verifies with the keys that the cohort's message had."""

    def __init__(self, keys):
        self.keys = keys

    def verifies(self, device, data, signature):
        return device in self.keys and self.keys[device].verifies(device, data, signature)


def sections_of(change, plan):
    """(parameters, float buffers) by sorted name, as float32."""
    own = learn.buffers(plan.roles)
    parts: tuple[dict, dict] = ({}, {})
    for name in sorted(change):
        parts[name in own][name] = np.asarray(change[name], np.float32)
    return parts


def length_of(kind):
    return np.sqrt(sum(float(np.square(x.astype(np.float64)).sum()) for x in kind.values()))


def clipped(kind, norm):
    length = length_of(kind)
    factor = np.float32(min(1.0, norm / length)) if length else np.float32(1)
    return {name: x * factor for name, x in kind.items()}


def weighted_mean(secrets_of, cap):
    """The mean of the changes of devices, in float64, by the weights that count."""
    weights = [min(s.examples, cap) for s in secrets_of]
    return {
        name: sum(
            w * s.change[name].astype(np.float64) for w, s in zip(weights, secrets_of, strict=True)
        )
        / sum(weights)
        for name in secrets_of[0].change
    }

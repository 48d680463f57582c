"""A device's part in masked rounds: from each step of a round to its answer.

The device learns in the first step and keeps its update as integers; the other steps hide it and
help to remove the masks from the sum. Secrets and integers are in the memory of this process only.
If it ends, or if a step is refused, the device leaves the round and declines every further step of
the lease. `masking.MaskingDevice` enforces the protocol, and this module what binds a round to the
task: run, round, base state and encoding are computed here and never taken from the message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from triplane.device.home import DeviceHome
from triplane.device.masking_ledger import LedgerFile
from triplane.device.memory import UNSYNCED, drop
from triplane.device.privacy_account import NoiseTask, PrivacyAccount
from triplane.device.stopping import StopToken
from triplane.device.tasks import KEYS, Task
from triplane.proto import federation_pb2 as pb
from triplane.proto.disk import write_atomic
from triplane.proto.errors import Conflict, InvalidInput
from triplane.proto.roster import Roster
from triplane.proto.transfer import upload
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.learn import BUFFER, PARAMETER, shared
from triplane.unified_ir.federated.core.metric import Metric
from triplane.unified_ir.federated.masking import (
    EcdsaSigner,
    EcdsaVerifier,
    EncodedSection,
    MaskedField,
    MaskingDevice,
    MaskingParameters,
    MaskingTerms,
    UpdateEncoding,
    roster_verifier,
    wire,
)
from triplane.unified_ir.federated.masking.fields import Vector
from triplane.unified_ir.federated.masking.messages import MaskedInput
from triplane.unified_ir.federated.masking.noise import (
    bit_noise_of,
    joint_multiplier,
    noise_of,
    rounded,
    with_noise,
)
from triplane.unified_ir.federated.masking.scores import ScoreEncoding, score_base
from triplane.unified_ir.federated.privacy.clipping import check_norm, clip, l2_norm
from triplane.unified_ir.federated.privacy.distributed import DistributedNoise

MAX_OPEN: Final = 8
"""Masked rounds that a device takes part in at the same time."""
MAX_REFUSALS: Final = 256
"""Rounds that the device has left, whose reasons it remembers."""

NewestRoster = Callable[[], Roster | None]
"""Returns the verified roster, None if people have signed none; see `roster.current_roster`."""
Answer = pb.MaskingAnswer | MaskedInput
"""An answer to a step; the bytes of a masked input may be sent as a blob."""


class CohortVerifier:
    """Verifies with the identity keys of a cohort, which are known from its message on."""

    def __init__(self, roster: NewestRoster) -> None:
        self._roster, self._inner = roster, EcdsaVerifier({})

    def use(self, keys: Mapping[str, bytes]) -> None:
        """Use these keys (DER) by device.

        InvalidInput for a device that is not in the roster. Corrupt: the roster was refused.
        """
        # Read for each cohort: people may have signed another one since the round began.
        roster = self._roster()
        self._inner = roster_verifier(roster, keys) if roster else EcdsaVerifier(keys)

    def verifies(self, device: str, data: bytes, signature: bytes) -> bool:
        """See `IdentityVerifier`."""
        return self._inner.verifies(device, data, signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRound:
    """One round. names: the tensors of each section of an update, in the order of their entries.

    vectors: the update, or the scores, as integers, with noise from the step `mask` on. noise: what
    this device adds to them, or None. identity_key: the public key of this device, in DER.
    """

    agreed: _Agreed
    encoding: UpdateEncoding | ScoreEncoding
    names: tuple[tuple[str, ...], ...]
    norms: tuple[float, ...]
    device: MaskingDevice
    verifier: CohortVerifier
    identity_key: bytes
    noise: OwnNoise | None = None
    vectors: list[Vector] = field(default_factory=list)


class OwnNoise:
    """The noise that a device adds in one round: drawn once, and charged before the update leaves.

    It is enough for the event that the device charges if a sum that is revealed contains as many
    honest devices as the terms count on.
    """

    def __init__(
        self, task: NoiseTask, section: EncodedSection, charge: Callable[[], None]
    ) -> None:
        """Take the parsed terms, and what charges the use of this lease durably."""
        self._task, self._section, self._charge = task, section, charge
        self._is_added = False

    def of_sum(self, honest: int) -> DistributedNoise:
        """Return the noise if so many honest devices add theirs."""
        return noise_of(self._section, self._task.clip, self._task.variance, honest)

    def check(self, parameters: MaskingParameters) -> None:
        """Raise InvalidInput unless a cohort's noise is what the round is said to cost."""
        honest = parameters.least - parameters.colluding
        bit = bit_noise_of(self._task.bit_variance, honest)
        multiplier = joint_multiplier(self.of_sum(honest), bit)
        if multiplier < self._task.event.noise_multiplier:
            raise InvalidInput(
                f"the noise of {honest} honest devices of a cohort of {parameters.devices} has the "
                f"multiplier {multiplier:.6g}, and the task says "
                f"{self._task.event.noise_multiplier:.6g}; this device adds no less than it charges"
            )

    def rounded(
        self,
        encoding: UpdateEncoding,
        sections: Sequence[npt.NDArray[np.float32]],
        is_short: Sequence[bool],
    ) -> tuple[Vector, ...]:
        """Return a clipped update as integers within the bound that the noise is sized for."""
        return rounded(encoding, sections, self.of_sum(1), is_short)

    def add(self, vectors: list[Vector]) -> None:
        """Charge the use, then add the noise to the integers unless it was added before."""
        self._charge()
        if not self._is_added:
            vectors[0] = with_noise(vectors[0], self.of_sum(1))
            if (bit := bit_noise_of(self._task.bit_variance, 1)) is not None:
                vectors[-1] = with_noise(vectors[-1], bit)
            self._is_added = True


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What may not change from one step of a lease to the next."""

    terms: MaskingTerms
    encoding: bytes
    bit_share: float
    plan: bytes
    noise: NoiseTask | None

    @classmethod
    def of(cls, task: Task, state: bytes) -> _Agreed:
        step, work = task.document.masking, task.work
        base = score_base(state) if task.kind == "evaluate" else state
        sampling = task.document.sampling
        digest = wire.encoding_digest(step.encoding, sampling, **_variances(task.noise))
        terms = wire.terms_of(
            step.terms, run=work.run, round_=work.round, base=base, encoding=digest
        )
        encoding = step.encoding.SerializeToString(deterministic=True)
        return cls(terms, encoding, step.encoding.bit_share, task.plan.sha256, task.noise)


class MaskedRounds:
    """The masked rounds of this process, by lease. One thread at a time uses it."""

    def __init__(
        self,
        home: DeviceHome,
        channel: Callable[[], grpc.Channel],
        roster: NewestRoster,
        account: PrivacyAccount,
    ) -> None:
        """Take where the newest roster is; without one, the cloud's word counts."""
        self._home, self._channel, self._roster, self._account = home, channel, roster, account
        self._ledger = LedgerFile(home.masking_ledger)
        self._open: dict[str, MaskedRound] = {}
        self._refused: dict[str, str] = {}

    def begin(self, task: Task, state: bytes, like: Mapping[str, Array], roles: Any) -> MaskedRound:
        """Check the terms of a round, and return it with new secrets, before anything is learned.

        state: SHA-256 of the state that the device has verified for this task. like, roles: the
        shared state. Conflict: the device has contributed for this run and state. InvalidInput:
        terms or encoding do not follow from the task.
        """
        self._check_open(task)
        agreed = _Agreed.of(task, state)
        names, norms, encoding = _encoding_of(task, agreed.terms.least, like, roles)
        return self._begun(task, agreed, encoding, names, norms, self._own_noise(task, encoding))

    def begin_scores(self, task: Task, state: bytes, metric: Metric) -> MaskedRound:
        """Check the terms of an evaluating round as `begin` does: one score for each state."""
        self._check_open(task)
        encoding = ScoreEncoding(metric, task.document.masking.encoding.cap)
        return self._begun(task, _Agreed.of(task, state), encoding)

    def _begun(
        self,
        task: Task,
        agreed: _Agreed,
        encoding: UpdateEncoding | ScoreEncoding,
        names: tuple[tuple[str, ...], ...] = (),
        norms: tuple[float, ...] = (),
        noise: OwnNoise | None = None,
    ) -> MaskedRound:
        if task.lease in self._open or len(self._open) >= MAX_OPEN:
            raise Conflict(
                f"a device begins each lease once and takes part in at most {MAX_OPEN} masked "
                f"rounds at a time, it is in {len(self._open)}"
            )
        _check_fields(agreed.terms.fields, encoding.fields)
        signer = EcdsaSigner.from_pem(self._home.identity.key_pem)
        verifier = CohortVerifier(self._roster)
        return MaskedRound(
            agreed=agreed,
            encoding=encoding,
            names=names,
            norms=norms,
            device=MaskingDevice(
                agreed.terms,
                wire.pseudonym(signer.public_der),
                signer=signer,
                verifier=verifier,
                store=self._ledger,
            ),
            verifier=verifier,
            identity_key=signer.public_der,
            noise=noise,
        )

    def _own_noise(self, task: Task, encoding: UpdateEncoding) -> OwnNoise | None:
        noise, work = task.noise, task.work
        if noise is None:
            return None
        charge = partial(self._account.charge, work.run, work.round, task.lease, noise)
        return OwnNoise(noise, encoding.sections[0], charge)

    def advertise(
        self, task: Task, masked: MaskedRound, change: MutableMapping[str, Array], examples: int
    ) -> pb.Contribution:
        """Clip and encode an update, which empties `change`, and send the keys of the round."""
        assert isinstance(masked.encoding, UpdateEncoding)
        share, sections, is_short = masked.agreed.bit_share, [], []
        for names, norm in zip(masked.names, masked.norms, strict=True):
            flat, length = _clipped(change, names, norm)
            sections.append(flat)
            is_short.append(length <= share * norm)
        if masked.noise is None:
            vectors = masked.encoding.encode(sections, examples, is_short)
        else:
            vectors = masked.noise.rounded(masked.encoding, sections, is_short)
        return self._advertised(task, masked, vectors)

    def advertise_scores(
        self, task: Task, masked: MaskedRound, scores: tuple[float, float], samples: int
    ) -> pb.Contribution:
        """Encode the scores before and after adaptation, and send the keys of the round."""
        assert isinstance(masked.encoding, ScoreEncoding)
        return self._advertised(task, masked, masked.encoding.encode(scores, samples))

    def _advertised(
        self, task: Task, masked: MaskedRound, vectors: Sequence[Vector]
    ) -> pb.Contribution:
        masked.vectors.extend(_smallest(vectors))
        self._open[task.lease] = masked
        keys = wire.advertisement_message(masked.device.advertise(), masked.identity_key)
        return task.contribution(masked=pb.MaskingAnswer(keys=keys))

    def contribution(self, task: Task, stop: StopToken) -> pb.Contribution:
        """Answer a step after the first. After any error but Unavailable, call `leave`."""
        answer = self._answer(task)
        stop.check()
        if isinstance(answer, MaskedInput):
            is_small = len(answer.data) <= task.inline_bytes
            blob = None if is_small else self._uploaded(task, answer.data)
            answer = pb.MaskingAnswer(input=wire.input_message(answer, blob))
        return task.contribution(masked=answer)

    def _uploaded(self, task: Task, data: bytes) -> pb.Blob:
        """Upload bytes through an unsynced file, which is removed."""
        path = self._home.pending / f"{task.work.run}.masked.new"
        write_atomic(path, data, UNSYNCED)
        try:
            return pb.Blob(sha256=upload(self._channel(), path), size=len(data))
        finally:
            drop(path)

    def _answer(self, task: Task) -> Answer:
        self._check_open(task)
        masked = self._open.get(task.lease)
        if masked is None:
            raise Conflict(
                "this device has no secrets of the masked round: the process that held them has "
                "ended, or it never began; it leaves the round"
            )
        if _Agreed.of(task, task.state.sha256) != masked.agreed:
            raise Conflict(
                "terms, encoding, plan and state of a masked round are the same in all its steps, "
                "the cloud changed them; this device leaves the round"
            )
        return _ANSWERS[task.step](masked, task.document.masking)

    def leave(self, task: Task, reason: str) -> None:
        """Forget the secrets of a task's round, if it is masked, and decline what follows."""
        if task.step:
            self._open.pop(task.lease, None)
            self._refused.setdefault(task.lease, reason)
            while len(self._refused) > MAX_REFUSALS:
                del self._refused[next(iter(self._refused))]

    def keep(self, leases: Collection[str]) -> None:
        """Forget the rounds of all other leases."""
        for lease in self._open.keys() - set(leases):
            del self._open[lease]

    def _check_open(self, task: Task) -> None:
        if task.lease in self._refused:
            raise Conflict(f"this device left this masked round: {self._refused[task.lease]}")


def _share(masked: MaskedRound, step: pb.MaskingStep) -> pb.MaskingAnswer:
    cohort, keys = wire.cohort_of(step.share)
    # The number first: thousands of keys of a cohort that is refused would cost time.
    for parameters in masked.agreed.terms.group_parameters(len(keys)):
        if masked.noise is not None:
            masked.noise.check(parameters)
    masked.verifier.use(keys)
    return pb.MaskingAnswer(shares=wire.shares_message(masked.device.share(cohort)))


def _mask(masked: MaskedRound, step: pb.MaskingStep) -> MaskedInput:
    if masked.noise is not None:
        masked.noise.add(masked.vectors)
    return masked.device.mask(wire.delivery_of(step.mask), masked.vectors)


def _sign(masked: MaskedRound, step: pb.MaskingStep) -> pb.MaskingAnswer:
    signature = masked.device.sign(wire.survivors_of(step.sign))
    # The cloud has the masked input: it only asks who survived once all of them were counted.
    masked.vectors.clear()
    return pb.MaskingAnswer(signature=wire.signature_message(signature))


def _unmask(masked: MaskedRound, step: pb.MaskingStep) -> pb.MaskingAnswer:
    revealed = masked.device.unmask(wire.request_of(step.unmask))
    return pb.MaskingAnswer(revealed=wire.revealed_message(revealed))


_ANSWERS: Final[Mapping[str, Callable[[MaskedRound, pb.MaskingStep], Answer]]] = {
    "share": _share,
    "mask": _mask,
    "sign": _sign,
    "unmask": _unmask,
}
"""By field of `MaskingStep.asks`; the first one, `keys`, is `begin` and `advertise`."""
assert KEYS not in _ANSWERS


def _encoding_of(
    task: Task, least: int, like: Mapping[str, Array], roles: Mapping[str, str]
) -> tuple[tuple[tuple[str, ...], ...], tuple[float, ...], UpdateEncoding]:
    """Return the names and the norm of each section, and the encoding."""
    message, noise = task.document.masking.encoding, task.noise
    if noise is not None and message.norm != noise.clip:
        raise InvalidInput(
            f"the integers of an update with noise are scaled by the norm {noise.clip:g} to which "
            f"it is clipped, the encoding says {message.norm:g}"
        )
    floats = [name for name in shared(roles) if np.issubdtype(like[name].dtype, np.floating)]
    kinds = {
        role: tuple(name for name in floats if roles[name] == role) for role in (PARAMETER, BUFFER)
    }
    sizes = {role: sum(like[name].size for name in names) for role, names in kinds.items()}
    norms = {PARAMETER: message.norm, BUFFER: message.buffer_norm}
    encoding = wire.encoding_of(
        message, sizes[PARAMETER], sizes[BUFFER], least=least, **_variances(noise)
    )
    used = [role for role in kinds if sizes[role]]
    for role in used:
        check_norm(norms[role])
    return tuple(kinds[role] for role in used), tuple(norms[role] for role in used), encoding


def _variances(noise: NoiseTask | None) -> dict[str, int]:
    """Return those of the noise of each device, in its update and in its bit."""
    if noise is None:
        return {}
    return {"variance": noise.variance, "bit_variance": noise.bit_variance}


def _check_fields(fields: Sequence[MaskedField], expected: Sequence[MaskedField]) -> None:
    if tuple(fields) != tuple(expected):
        raise InvalidInput(
            "the masked fields of this plan and encoding are "
            f"{_listed(expected)}, the terms have {_listed(fields)}"
        )


def _listed(fields: Sequence[MaskedField]) -> str:
    sizes = [f"{f.entries} of {f.bits}+{f.noise_bits} bits" for f in fields[:4]]
    return ", ".join(sizes) + (", ..." if len(fields) > 4 else "")


def _clipped(
    change: MutableMapping[str, Array], names: Sequence[str], norm: float
) -> tuple[npt.NDArray[np.float32], float]:
    """Remove these tensors from `change`; return them as one vector of at most this norm.

    Also return the norm that it had.
    """
    flat = np.empty(sum(change[name].size for name in names), np.float32)
    at = 0
    for name in names:
        x = change.pop(name)  # one of the two copies is freed before the next one is made
        flat[at : at + x.size] = x.reshape(-1)
        at += x.size
    length = l2_norm({"update": flat})
    clip({"update": flat}, norm)
    return flat, length


def _smallest(vectors: Sequence[Vector]) -> list[Vector]:
    """Return vectors of few bits as bytes: they wait for the step `mask`."""
    return [x.astype(np.uint8) if int(x.max()) < 1 << 8 else x for x in vectors]

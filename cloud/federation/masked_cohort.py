"""The cohort of one masked round in the cloud: answers of a step in, what the next step asks out.

It is a function of the answers that were taken, in the order of their devices, so that a process
that was killed computes it again from the answers on the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.cloud.federation.masked_spec import FewestLeft
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.unified_ir.federated.core.masked_step import MaskedStep
from triplane.unified_ir.federated.masking import (
    EcdsaVerifier,
    MaskingCloud,
    MaskingTerms,
    UpdateEncoding,
    wire,
)
from triplane.unified_ir.federated.masking.fields import Vector
from triplane.unified_ir.federated.masking.noise import noise_length
from triplane.unified_ir.federated.masking.scores import ScoreEncoding
from triplane.unified_ir.federated.privacy.distributed import DistributedNoise

_Ask = Callable[[int], pb.MaskingStep]
"""Returns what a step asks of the device at a position of a group."""
FIELD_OF: Final[Mapping[MaskedStep, str]] = {
    MaskedStep.KEYS: "keys",
    MaskedStep.SHARES: "shares",
    MaskedStep.INPUTS: "input",
    MaskedStep.SIGNATURES: "signature",
    MaskedStep.REVEALS: "revealed",
}
"""The field of `MaskingAnswer` that answers each step."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """A device's answer. data: the bytes of a masked input, and of nothing else."""

    device: str
    message: pb.MaskingAnswer
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class CohortMean:
    """The weighted mean of the `devices` of a cohort or group, a vector for each section.

    weight: of all of them. bits: for each section the sum of their bits, +1 or -1; empty without.
    Of scores there is one vector: those before and after adaptation.
    """

    sections: tuple[Vector, ...]
    weight: int
    devices: int
    bits: tuple[int, ...] = ()


class _AdvertisedKeys:
    """Verifies by the identity keys that devices advertised; see `wire.pseudonym`."""

    def __init__(self) -> None:
        self._verifiers: dict[str, EcdsaVerifier] = {}

    def add(self, device: str, key: bytes) -> None:
        """Add a key in DER. InvalidInput for a key that is none."""
        self._verifiers[device] = EcdsaVerifier({device: key})

    def verifies(self, device: str, data: bytes, signature: bytes) -> bool:
        """See `IdentityVerifier`."""
        verifier = self._verifiers.get(device)
        return verifier is not None and verifier.verifies(device, data, signature)


class MaskedCohort:
    """One masked round. norms: largest norm of each section of the encoding. noise: of a device.

    Where the cohort has groups, one that fails is left out, and the others go on while they are
    as many as `fewest` says.
    """

    def __init__(
        self,
        terms: MaskingTerms,
        encoding: UpdateEncoding | ScoreEncoding,
        norms: tuple[float, ...],
        noise: DistributedNoise | None = None,
        fewest: FewestLeft | None = None,
    ) -> None:
        self._encoding, self._norms, self._noise = encoding, norms, noise
        self._terms, self._fewest = terms, fewest or FewestLeft()
        self._known, self._identities = _AdvertisedKeys(), dict[str, bytes]()
        self._cloud = MaskingCloud(terms, verifier=self._known)
        self._names: dict[str, str] = {}  # pseudonyms by device
        self._next: MaskedStep | None = MaskedStep.KEYS
        self._groups: dict[int, MaskingCloud] = {}  # those that are left, by number
        self._group_of: dict[str, int] = {}  # by pseudonym
        self._asks: dict[MaskedStep, dict[int, _Ask]] = {}
        self._means: dict[int, CohortMean] = {}
        self._left_out: dict[str, tuple[str, ...]] = {}
        self._accused: dict[str, str] = {}  # why, by device
        self._added: set[str] = set()

    @property
    def means(self) -> tuple[CohortMean, ...]:
        """The result of each group that is left, after the last step. Corrupt: it is not there."""
        if not self.is_over:
            raise Corrupt("the answers of a masked round give no sum again; restore a backup")
        return tuple(self._means[number] for number in sorted(self._means))

    @property
    def left_out(self) -> Mapping[str, tuple[str, ...]]:
        """The devices of groups that the newest step has left out, by the reason for people."""
        return self._left_out

    @property
    def added(self) -> Collection[str]:
        """The devices whose masked inputs are in the sum, while `take` has not taken them."""
        return self._added

    @property
    def is_over(self) -> bool:
        """Whether the last step was taken."""
        return bool(self._means) and self._means.keys() == self._groups.keys()

    def is_at(self, step: MaskedStep) -> bool:
        """Return whether the answers of this step are taken next."""
        return self._next is step

    def group_size(self, device: str) -> int:
        """Return the number of devices that are masked together with this one; 0 if none are."""
        group = self._groups.get(self._group_of.get(self._names.get(device, ""), 0))
        return len(group.session) if group else 0

    def add_input(self, answer: GivenAnswer) -> None:
        """Add a masked input to the sum before its step ends, so that `take` need not.

        One that is refused stays for `take`, which says why.
        """
        with contextlib.suppress(InvalidInput, Conflict):
            self._add(MaskedStep.INPUTS, answer)
            self._added.add(answer.device)

    def take(self, step: MaskedStep, answers: Iterable[GivenAnswer]) -> tuple[dict[str, str], str]:
        """Take the answers of a step and end it; those of `added` are not given again.

        Return the reasons of the answers that were refused, by device, and the reason why the round
        cannot go on, or an empty text. It is for the people of the cloud: it names devices as they
        know them. After such a reason, only a new cohort takes the answers again.
        """
        refused = {}
        self._next, self._left_out, self._accused, self._added = None, {}, {}, set()
        for answer in answers:
            try:
                self._add(step, answer)
            except (InvalidInput, Conflict) as error:
                refused[answer.device] = str(error)
            except Unavailable as error:
                return refused, self._named(str(error))
        try:
            self._end(step)
        except TriplaneError as error:
            return refused | self._accused, self._named(str(error))
        self._next = step.next
        return refused | self._accused, ""

    def asks(self, step: MaskedStep, device: str) -> pb.MaskingStep | None:
        """Return what a step asks of a device of the cohort; None for another step or device."""
        number = self._group_of.get(self._names.get(device, ""), 0)
        ask = self._asks.get(step, {}).get(number)
        if ask is None or number not in self._groups:
            return None
        return ask(self._position(device))

    def _named(self, text: str) -> str:
        """Return the text with the names of devices in place of their pseudonyms."""
        for device, pseudonym in self._names.items():
            text = text.replace(pseudonym, device)
        return text

    def _add(self, step: MaskedStep, answer: GivenAnswer) -> None:
        message = answer.message
        if message.WhichOneof("answer") != FIELD_OF[step]:
            raise InvalidInput(f"the step {step} is answered by {FIELD_OF[step]}")
        if step is MaskedStep.KEYS:
            advertisement, key = wire.advertisement_of(message.keys)
            if advertisement.device in self._identities:
                raise Conflict("another device of this round has the same identity key")
            self._known.add(advertisement.device, key)
            self._cloud.add_keys(advertisement)
            self._identities[advertisement.device] = key
            self._names[answer.device] = advertisement.device
            return
        cloud, body = self._group(answer.device), getattr(message, FIELD_OF[step])
        if body.position != self._position(answer.device):
            raise InvalidInput(
                f"a device answers for itself, at position {self._position(answer.device)}; got "
                f"{body.position}"
            )
        match step:
            case MaskedStep.SHARES:
                cloud.add_shares(wire.shares_of(message.shares))
            case MaskedStep.INPUTS:
                cloud.add_input(wire.input_of(message.input, answer.data))
            case MaskedStep.SIGNATURES:
                cloud.add_signature(wire.signature_of(message.signature))
            case MaskedStep.REVEALS:
                cloud.add_reveal(wire.revealed_of(message.revealed))

    def _group(self, device: str) -> MaskingCloud:
        number = self._group_of.get(self._names.get(device, ""), 0)
        if number not in self._groups:
            raise InvalidInput("the group of this device is not part of the round")
        return self._groups[number]

    def _position(self, device: str) -> int:
        return self._group(device).session.devices.index(self._names[device])

    def _end(self, step: MaskedStep) -> None:
        """End a step and keep what the next one asks."""
        if step is MaskedStep.KEYS:
            asks = self._with_groups()
        else:
            asks = {}
            for number, group in list(self._groups.items()):
                try:
                    asks[number] = self._end_group(step, number, group)
                except TriplaneError as error:
                    self._accuse(group)
                    if self._terms.groups == 1:
                        raise
                    self._leave_out(number, str(error))
            self._check_left()
        if step.next is not None:
            # The step before is kept: documents name it until this one is committed.
            self._asks = {**dict(list(self._asks.items())[-1:]), step.next: asks}

    def _with_groups(self) -> dict[int, _Ask]:
        """Form the groups, and return what they are asked."""
        cohort = wire.cohort_message(self._cloud.cohort(), self._identities)
        self._groups = dict(enumerate(self._cloud.groups, 1))
        self._group_of = {x: n for n, g in self._groups.items() for x in g.session.devices}
        return dict.fromkeys(self._groups, lambda _: pb.MaskingStep(share=cohort))

    def _accuse(self, group: MaskingCloud) -> None:
        """Note the devices that made a group fail by the word of most of their neighbours."""
        names = {pseudonym: device for device, pseudonym in self._names.items()}
        for position, reason in group.liars().items():
            self._accused[names[group.session.devices[position]]] = reason

    def _leave_out(self, number: int, reason: str) -> None:
        names = {pseudonym: device for device, pseudonym in self._names.items()}
        devices = sorted(names[x] for x in self._groups.pop(number).session.devices)
        text = f"group {number} of {self._terms.groups}: {self._named(reason)}"
        self._left_out[text] = tuple(devices)

    def _check_left(self) -> None:
        """Raise Unavailable if groups were left out and the others are not enough for a state."""
        if not self._left_out:
            return  # a device whose keys were refused is a loss that the masking tolerates
        devices = sum(len(group.session) for group in self._groups.values())
        fewest = self._fewest
        if len(self._groups) >= fewest.groups and devices >= fewest.devices:
            return
        raise Unavailable(
            f"{len(self._groups)} of {self._terms.groups} groups are left, with {devices} devices; "
            f"the aggregator needs {fewest.groups} groups and the quorum is {fewest.devices} "
            f"devices ({'; '.join(self._left_out)})"
        )

    def _end_group(self, step: MaskedStep, number: int, cloud: MaskingCloud) -> _Ask:
        if step is MaskedStep.SHARES:
            deliveries = cloud.delivery()
            return lambda i: pb.MaskingStep(mask=wire.delivery_message(deliveries[i]))
        if step is MaskedStep.INPUTS:
            survivors = wire.survivors_message(cloud.survivors())
            return lambda _: pb.MaskingStep(sign=survivors)
        if step is MaskedStep.SIGNATURES:
            requests = cloud.requests()
            return lambda i: pb.MaskingStep(unmask=wire.request_message(requests[i]))
        self._means[number] = self._unmasked(cloud)
        return lambda _: pb.MaskingStep()

    def _unmasked(self, cloud: MaskingCloud) -> CohortMean:
        sums, devices = cloud.sum(), len(cloud.contributors)
        cohort = len(cloud.session)
        encoding = self._encoding
        means, weight = encoding.decode(sums, devices, cohort=cohort)
        if isinstance(encoding, ScoreEncoding):
            return CohortMean(means, weight, devices)
        bits = encoding.sums_of_bits(sums, devices, cohort=cohort)
        for section, norm, mean in zip(encoding.sections, self._norms, means, strict=True):
            # No device can be asked alone, so the mean is held to what honest devices can reach.
            # By its weight: one device that takes from the masked sum of weights what the others
            # gave would lengthen the mean by as much.
            length = float(np.linalg.norm(mean.astype(np.float64)))
            rounding = section.error_bound(devices)
            if self._noise is not None:
                rounding += section.step * noise_length(self._noise, devices)
            most = norm + rounding * encoding.cap / weight
            if not length <= most:
                raise Corrupt(
                    f"the mean of {devices} masked updates has the norm {length:.4g}; updates of "
                    f"at most {norm:g} each cannot exceed {most:.4g}, so a device lied, and the "
                    "state is kept"
                )
        return CohortMean(means, weight, devices, bits)

"""The cohort of one masked round in the cloud: answers of a step in, what the next step asks out.

It is a function of the answers that were taken, in the order of their devices, so that a process
that was killed computes it again from the answers on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

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
from triplane.unified_ir.federated.masking.noise import noise_length
from triplane.unified_ir.federated.privacy.distributed import DistributedNoise

Floats = npt.NDArray[np.float32]
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
    """The weighted mean of `devices` updates, a vector for each section. weight: of all."""

    sections: tuple[Floats, ...]
    weight: int
    devices: int


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
    """One masked round. norms: largest norm of each section of the encoding. noise: of a device."""

    def __init__(
        self,
        terms: MaskingTerms,
        encoding: UpdateEncoding,
        norms: tuple[float, ...],
        noise: DistributedNoise | None = None,
    ) -> None:
        self._encoding, self._norms, self._noise = encoding, norms, noise
        self._known, self._identities = _AdvertisedKeys(), dict[str, bytes]()
        self._cloud = MaskingCloud(terms, verifier=self._known)
        self._names: dict[str, str] = {}  # pseudonyms by device
        self._asks: dict[MaskedStep, Callable[[int], pb.MaskingStep]] = {}
        self._mean: CohortMean | None = None

    @property
    def mean(self) -> CohortMean:
        """The result, once the last step was taken. Corrupt: it is not there."""
        if self._mean is None:
            raise Corrupt("the answers of a masked round give no sum again; restore a backup")
        return self._mean

    def is_at(self, step: MaskedStep) -> bool:
        """Return whether the answers of this step are taken next."""
        return self._cloud.phase.name == step.name

    def take(self, step: MaskedStep, answers: Iterable[GivenAnswer]) -> tuple[dict[str, str], str]:
        """Take the answers of a step and end it.

        Return the reasons of the answers that were refused, by device, and the reason why the round
        cannot go on, or an empty text. It is for the people of the cloud: it names devices as they
        know them.
        """
        refused = {}
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
            return refused | self._liars(), self._named(str(error))
        return refused, ""

    def asks(self, step: MaskedStep, device: str) -> pb.MaskingStep | None:
        """Return what a step asks of a device of the cohort; None for another step or device."""
        name = self._names.get(device)
        if step not in self._asks or name not in self._cloud.session.devices:
            return None
        return self._asks[step](self._position(device))

    def _liars(self) -> dict[str, str]:
        """Return the devices that made the round fail by the word of most of their neighbours."""
        by_position = self._cloud.liars()
        at = {self._position(device): device for device in self._names} if by_position else {}
        return {at[position]: reason for position, reason in by_position.items()}

    def _named(self, text: str) -> str:
        """Return the text with the names of devices in place of their pseudonyms."""
        for device, pseudonym in self._names.items():
            text = text.replace(pseudonym, device)
        return text

    def _add(self, step: MaskedStep, answer: GivenAnswer) -> None:
        message, cloud = answer.message, self._cloud
        if message.WhichOneof("answer") != FIELD_OF[step]:
            raise InvalidInput(f"the step {step} is answered by {FIELD_OF[step]}")
        if step is MaskedStep.KEYS:
            advertisement, key = wire.advertisement_of(message.keys)
            if advertisement.device in self._identities:
                raise Conflict("another device of this round has the same identity key")
            self._known.add(advertisement.device, key)
            cloud.add_keys(advertisement)
            self._identities[advertisement.device] = key
            self._names[answer.device] = advertisement.device
            return
        body = getattr(message, FIELD_OF[step])
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

    def _position(self, device: str) -> int:
        return self._cloud.session.devices.index(self._names[device])

    def _end(self, step: MaskedStep) -> None:
        """End a step and keep what the next one asks."""
        cloud = self._cloud
        if step is MaskedStep.KEYS:
            cohort = wire.cohort_message(cloud.cohort(), self._identities)
            self._ask(MaskedStep.SHARES, lambda _: pb.MaskingStep(share=cohort))
        elif step is MaskedStep.SHARES:
            deliveries = cloud.delivery()
            self._ask(
                MaskedStep.INPUTS,
                lambda i: pb.MaskingStep(mask=wire.delivery_message(deliveries[i])),
            )
        elif step is MaskedStep.INPUTS:
            survivors = wire.survivors_message(cloud.survivors())
            self._ask(MaskedStep.SIGNATURES, lambda _: pb.MaskingStep(sign=survivors))
        elif step is MaskedStep.SIGNATURES:
            requests = cloud.requests()
            self._ask(
                MaskedStep.REVEALS,
                lambda i: pb.MaskingStep(unmask=wire.request_message(requests[i])),
            )
        else:
            self._mean = self._unmasked()

    def _ask(self, step: MaskedStep, ask: Callable[[int], pb.MaskingStep]) -> None:
        # The step before is kept until the next: documents name it until this one is committed.
        self._asks = {**dict(list(self._asks.items())[-1:]), step: ask}

    def _unmasked(self) -> CohortMean:
        sums, devices = self._cloud.sum(), len(self._cloud.contributors)
        means, weight = self._encoding.decode(sums, devices, cohort=len(self._cloud.session))
        for section, norm, mean in zip(self._encoding.sections, self._norms, means, strict=True):
            # No device can be asked alone, so the mean is held to what honest devices can reach.
            # By its weight: one device that takes from the masked sum of weights what the others
            # gave would lengthen the mean by as much.
            length = float(np.linalg.norm(mean.astype(np.float64)))
            rounding = section.error_bound(devices)
            if self._noise is not None:
                rounding += section.step * noise_length(self._noise, devices)
            most = norm + rounding * self._encoding.cap / weight
            if not length <= most:
                raise Corrupt(
                    f"the mean of {devices} masked updates has the norm {length:.4g}; updates of "
                    f"at most {norm:g} each cannot exceed {most:.4g}, so a device lied, and the "
                    "state is kept"
                )
        return CohortMean(means, weight, devices)

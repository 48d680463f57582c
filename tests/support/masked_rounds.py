"""The cloud's side of a masked round as messages of the wire, with some devices simulated.

`MaskedRound` has the honest cloud's state machine, and real devices answer what it asks. A test may
change any message on its way.
"""

import hashlib

import numpy as np
from tests.federated.masking.rounds import MemoryStore, identity_key, public_der

from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.masking import (
    EcdsaSigner,
    EcdsaVerifier,
    MaskingCloud,
    MaskingDevice,
    wire,
)

ENCODING = {"norm": 2.0, "buffer_norm": 1.0, "bits": 8, "cap": 32, "seed": 5}
SAMPLING = pb.Sampling(steps=3, batch_size=4, support=4, query=3)


class ListedKeys:
    """A verifier that learns keys as they are advertised."""

    def __init__(self):
        self.keys = {}

    def verifies(self, device, data, signature):
        return EcdsaVerifier(self.keys).verifies(device, data, signature)


class MaskedRound:
    """One round over a state. parameters, buffers: entries of an update. simulated: devices."""

    def __init__(
        self, run, round_, state, *, parameters, buffers, simulated=0, encoding=(), **changes
    ):
        self.encoding = pb.MaskingEncoding(**{**ENCODING, **dict(encoding)})
        self.codec = wire.encoding_of(self.encoding, parameters, buffers)
        digest = wire.encoding_digest(self.encoding, SAMPLING)
        message = pb.MaskingTerms(
            **{
                "attempt": 0, "least": 3, "lost_share": 0.3, "colluding_share": 0.0,
                "failure": 1e-6, **changes,
            },
            fields=[pb.MaskedField(entries=f.entries, bits=f.bits) for f in self.codec.fields],
        )  # fmt: skip
        self.message = message
        self.terms = wire.terms_of(message, run=run, round_=round_, base=state, encoding=digest)
        self.verifier = ListedKeys()
        self.cloud = MaskingCloud(self.terms, verifier=self.verifier)
        self.simulated = [self._device(number) for number in range(simulated)]
        self.sizes = parameters, buffers

    def _device(self, number):
        der = public_der(identity_key(number))
        self.verifier.keys[wire.pseudonym(der)] = der
        return MaskingDevice(
            self.terms,
            wire.pseudonym(der),
            signer=EcdsaSigner(identity_key(number)),
            verifier=self.verifier,
            store=MemoryStore(),
        )

    def step(self, **asks):
        """The message of a step; by default it asks for keys."""
        return pb.MaskingStep(
            terms=self.message, encoding=self.encoding, **(asks or {"keys": pb.AdvertiseKeys()})
        )

    def zeros(self):
        update = [np.zeros(size, np.float32) for size in self.sizes if size]
        return self.codec.encode(update, 1, [True] * len(update))

    def position(self, device):
        return self.cloud.session.devices.index(device)

    # Each of these takes the answers of real devices, and returns what the next step asks.

    def share(self, *answers):
        for answer in answers:
            advertisement, key = wire.advertisement_of(answer.keys)
            self.verifier.keys[advertisement.device] = key
            self.cloud.add_keys(advertisement)
        for device in self.simulated:
            self.cloud.add_keys(device.advertise())
        self.cohort = self.cloud.cohort()
        # The groups of other devices, if there are several, are nothing to the real ones.
        real = {answer.keys.device for answer in answers}
        self.cloud = next(g for g in self.cloud.groups if real <= set(g.session.devices))
        inside = set(self.cloud.session.devices)
        self.simulated = [d for d in self.simulated if d.advertise().device in inside]
        return self.step(share=wire.cohort_message(self.cohort, self.verifier.keys))

    def mask(self, *answers):
        for answer in answers:
            self.cloud.add_shares(wire.shares_of(answer.shares))
        for device in self.simulated:
            self.cloud.add_shares(device.share(self.cohort))
        self.deliveries = self.cloud.delivery()
        return lambda position: self.step(mask=wire.delivery_message(self.deliveries[position]))

    def sign(self, *answers, data=lambda message: message.data):
        """data: how to get the bytes of a masked input."""
        for answer in answers:
            self.cloud.add_input(wire.input_of(answer.input, data(answer.input)))
        for device in self.simulated:
            self.cloud.add_input(
                device.mask(self.deliveries[self._position_of(device)], self.zeros())
            )
        self.survivors = self.cloud.survivors()
        return self.step(sign=wire.survivors_message(self.survivors))

    def unmask(self, *answers):
        for answer in answers:
            self.cloud.add_signature(wire.signature_of(answer.signature))
        for device in self.simulated:
            self.cloud.add_signature(device.sign(self.survivors))
        self.requests = self.cloud.requests()
        return lambda position: self.step(unmask=wire.request_message(self.requests[position]))

    def sum(self, *answers):
        for answer in answers:
            self.cloud.add_reveal(wire.revealed_of(answer.revealed))
        for device in self.simulated:
            self.cloud.add_reveal(device.unmask(self.requests[self._position_of(device)]))
        return self.cloud.sum()

    def mean(self, sums):
        """The sections of the weighted mean, and the weight."""
        return self.codec.decode(sums, len(self.cloud.contributors), cohort=len(self.cloud.session))

    def _position_of(self, device):
        return self.position(device.advertise().device)


def sha256(data):
    return hashlib.sha256(data).digest()

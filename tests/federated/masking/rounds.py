"""Whole masked rounds in one process: honest devices, a cloud, and losses in each phase."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from triplane.unified_ir.federated.masking import (
    EcdsaSigner,
    EcdsaVerifier,
    MaskedField,
    MaskingCloud,
    MaskingDevice,
    MaskingLedger,
    MaskingTerms,
)

BASE = bytes(range(32))
PHASES = ("share", "mask", "sign", "unmask")
KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(8)]
"""Identity keys are slow to make; a device has its own by number, beyond these made on demand."""


def identity_key(number):
    while number >= len(KEYS):
        KEYS.append(ec.generate_private_key(ec.SECP256R1()))
    return KEYS[number]


def public_der(key):
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def device_name(number):
    return f"device-{number:05}"


def verifier(n):
    return EcdsaVerifier({device_name(i): public_der(identity_key(i)) for i in range(n)})


def terms(fields=((50, 8),), **changes):
    settings = {
        "run": "run-1",
        "base": BASE,
        "round": 1,
        "attempt": 0,
        "fields": tuple(MaskedField(*f) for f in fields),
        "least": 3,
        "lost_share": 1 / 3,
        "colluding_share": 0.0,
    }
    return MaskingTerms(**{**settings, **changes})


@dataclass
class MemoryStore:
    """A ledger store; `saved` has every ledger in order, `fail` makes the next update raise.

    meanwhile: what another process of the device does just before the next update.
    """

    saved: list = field(default_factory=list)
    fail: bool = False
    meanwhile: Callable | None = None

    def load(self):
        return self.saved[-1] if self.saved else MaskingLedger()

    def update(self, change):
        if self.fail:
            raise OSError("disk full")
        other, self.meanwhile = self.meanwhile, None
        if other is not None:
            other()
        # Through its bytes: what a device reads after a restart is what counts.
        self.saved.append(MaskingLedger.decode(change(self.load()).encode()))


class RememberingVerifier:
    """Verify each statement once, though every device of a large round verifies the same ones."""

    def __init__(self, inner):
        self.verifies = functools.cache(inner.verifies)


class Round:
    """n honest devices and the cloud's state machine; `step` performs one phase."""

    def __init__(self, n, masking_terms=None, stores=None):
        self.terms = masking_terms or terms()
        self.verifier = verifier(n) if n <= 50 else RememberingVerifier(verifier(n))
        self.stores = stores or [MemoryStore() for _ in range(n)]
        self.cloud = MaskingCloud(self.terms, verifier=self.verifier)
        self.devices = [self.device(i) for i in range(n)]
        self.uploads = [0] * n

    def device(self, i):
        return MaskingDevice(
            self.terms,
            device_name(i),
            signer=EcdsaSigner(identity_key(i)),
            verifier=self.verifier,
            store=self.stores[i],
        )

    def count(self, message, i):
        self.uploads[i] += message.size_bytes
        return message

    def advertise(self, members=None):
        for i in members or range(len(self.devices)):
            self.cloud.add_keys(self.count(self.devices[i].advertise(), i))
        self.cohort = self.cloud.cohort()
        return self.cohort

    def share(self, members):
        for i in members:
            self.cloud.add_shares(self.count(self.devices[i].share(self.cohort), i))
        self.deliveries = self.cloud.delivery()
        return self.deliveries

    def mask(self, members, vectors):
        for i in members:
            masked = self.devices[i].mask(self.deliveries[i], vectors(i))
            self.cloud.add_input(self.count(masked, i))
        self.survivors = self.cloud.survivors()
        return self.survivors

    def sign(self, members):
        for i in members:
            self.cloud.add_signature(self.count(self.devices[i].sign(self.survivors), i))
        self.requests = self.cloud.requests()
        return self.requests

    def unmask(self, members):
        for i in members:
            self.cloud.add_reveal(self.count(self.devices[i].unmask(self.requests[i]), i))
        return self.cloud.sum()

    def run(self, vectors, lost=None):
        """Run all phases; `lost` has the devices that are gone from each phase on."""
        alive, lost = set(range(len(self.devices))), lost or {}
        self.advertise()
        for phase in PHASES:
            alive -= set(lost.get(phase, ()))
            members = sorted(alive)
            arguments = (members, vectors) if phase == "mask" else (members,)
            result = getattr(self, phase)(*arguments)
        return result


def vectors_of(fields, seed):
    """Return a device's integers, each within its field, from its number."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 2**f.bits, f.entries, dtype=np.uint64) for f in fields]


def sum_of(fields, members):
    return [
        np.sum([vectors_of(fields, i)[at] for i in members], axis=0, dtype=np.uint64)
        for at in range(len(fields))
    ]

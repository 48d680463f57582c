"""A cohort whose keys are fixed: what device and cloud derive from it alike.

The digest of all keys names the session. It decides the graph and enters every key that is
derived and every signature, so nothing of one session is accepted in another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.graph import NeighbourGraph
from triplane.unified_ir.federated.masking.groups import groups_of
from triplane.unified_ir.federated.masking.messages import (
    Advertisement,
    MaskingCohort,
    MaskingTerms,
    check_pseudonym,
    position_bytes,
    statement,
)
from triplane.unified_ir.federated.masking.primitives import (
    FIELD_PRIME,
    KEY_BYTES,
    IdentityVerifier,
    RoundKey,
    check_length,
    hkdf,
    open_sealed,
    seal,
)


class MaskingSession:
    """A verified cohort, or one group of it. InvalidInput where it breaks a rule.

    Signatures are checked by `check_advertisement`: the cloud does so on arrival, a device for all.
    of, size: the digest that decided the groups, and the devices of all of them; see
    `group_sessions`.
    """

    def __init__(
        self, terms: MaskingTerms, cohort: MaskingCohort, *, of: bytes = b"", size: int = 0
    ) -> None:
        self.terms = terms
        self.advertisements = cohort.advertisements
        self.devices = [a.device for a in cohort.advertisements]
        _check_listed(self.devices)
        _check_distinct_keys(cohort.advertisements)
        self.parameters = terms.parameters(len(self.devices), cohort=size)
        # Shares of a group open only where all devices of the round have the same groups.
        self.digest = _digest("session", terms, cohort, *([of] if of else []))
        self._graph = NeighbourGraph(len(self.devices), self.parameters.neighbours, self.digest)

    def __len__(self) -> int:
        return len(self.devices)

    def neighbours(self, position: int) -> tuple[int, ...]:
        """Return the neighbours of a position, in rising order."""
        return self._graph.neighbours(position)

    def neighbours_among(self, position: int, members: Collection[int]) -> list[int]:
        """Return the neighbours of a position that are in `members`."""
        members = frozenset(members)
        return [i for i in self.neighbours(position) if i in members]

    def name(self, position: int) -> str:
        """Return a device's name and position, for errors."""
        return f"{self.devices[position]!r} ({position})"

    def input_statement(self, position: int, sharers: Sequence[int]) -> bytes:
        """Return what a device signs with its masked input."""
        place = position.to_bytes(4, "big")
        return statement("input", self.digest, place, position_bytes(sharers))

    def survivor_statement(self, sharers: Sequence[int], survivors: Sequence[int]) -> bytes:
        """Return what a device signs about the survivors."""
        both = position_bytes(sharers), position_bytes(survivors)
        return statement("survivors", self.digest, *both)

    def self_mask_key(self, seed: bytes) -> bytes:
        """Return the generator's key for a device's own mask."""
        return hkdf(seed, self.digest, statement("self mask"))

    def pair_mask_key(self, own: RoundKey, position: int, other: int) -> bytes:
        """Return the generator's key for the mask that two neighbours have in common.

        The device at the lower position adds the mask, the other one subtracts it.
        """
        secret = own.agree(self.advertisements[other].mask_key)
        pair = position_bytes(sorted((position, other)))
        return hkdf(secret, self.digest, statement("pair mask", pair))

    def seal(self, own: RoundKey, sender: int, receiver: int, data: bytes) -> bytes:
        """Encrypt shares for a neighbour; once only for each pair and session."""
        key, info = self._sealing_key(own, sender, receiver, receiver)
        return seal(key, data, info)

    def open(self, own: RoundKey, sender: int, receiver: int, sealed: bytes) -> bytes:
        """Decrypt shares that a neighbour sealed for us. Corrupt if anything differs."""
        key, info = self._sealing_key(own, sender, receiver, sender)
        return open_sealed(key, sealed, info)

    def _sealing_key(
        self, own: RoundKey, sender: int, receiver: int, other: int
    ) -> tuple[bytes, bytes]:
        secret = own.agree(self.advertisements[other].encryption_key)
        info = statement("shares", position_bytes((sender, receiver)))
        return hkdf(secret, self.digest, info), info


def group_sessions(terms: MaskingTerms, cohort: MaskingCohort) -> tuple[MaskingSession, ...]:
    """Return the session of each group of a cohort, or of the whole one if it has no groups.

    terms: those under which all devices signed their keys. Nobody is sent the groups: they follow
    from the terms and all keys, as the graph does. InvalidInput where the cohort breaks a rule.
    """
    if terms.groups == 1:
        return (MaskingSession(terms, cohort),)
    everybody = cohort.advertisements
    _check_listed([a.device for a in everybody])
    _check_distinct_keys(everybody)
    digest = _digest("groups", terms, cohort)
    return tuple(
        MaskingSession(
            replace(terms, group=number),
            MaskingCohort(advertisements=tuple(everybody[i] for i in positions)),
            of=digest,
            size=len(everybody),
        )
        for number, positions in enumerate(groups_of(digest, len(everybody), terms.groups), 1)
    )


def _digest(purpose: str, terms: MaskingTerms, cohort: MaskingCohort, *more: bytes) -> bytes:
    """Return the digest of the terms and all keys of a cohort."""
    # Not of the signatures: whoever has one can write ECDSA signatures in a second form.
    keys = [
        statement("member", a.device.encode(), a.encryption_key, a.mask_key)
        for a in cohort.advertisements
    ]
    return hashlib.sha256(statement(purpose, terms.encode(), *keys, *more)).digest()


def _check_listed(devices: Sequence[str]) -> None:
    if devices != sorted(set(devices)):
        raise InvalidInput("a cohort lists each device once, in the order of their names")


def self_mask_commitment(seed: bytes) -> bytes:
    """Return the digest by which the cloud recognizes the seed of a device's own mask."""
    return hashlib.sha256(statement("self mask commitment", seed)).digest()


def check_advertisement(
    terms: MaskingTerms, advertisement: Advertisement, verifier: IdentityVerifier
) -> None:
    """Raise InvalidInput unless the keys are well-formed and signed by a known device."""
    check_pseudonym(advertisement.device, "a device")
    for key in (advertisement.encryption_key, advertisement.mask_key):
        check_length(key, KEY_BYTES, f"a round key of {advertisement.device!r}")
        # X25519 takes a second encoding for the same key; a recovered key would not match it.
        if int.from_bytes(key, "little") >= FIELD_PRIME:
            raise InvalidInput(
                f"the round key {key.hex()} of {advertisement.device!r} is not below 2^255 - 19"
            )
    signed = advertisement.signed_bytes(terms)
    if not verifier.verifies(advertisement.device, signed, advertisement.signature):
        raise InvalidInput(
            f"the round keys of {advertisement.device!r} are not signed by its identity key for "
            f"run {terms.run!r}, round {terms.round}, attempt {terms.attempt}, this base state, "
            "and the same norm, noise and steps; devices of earlier builds sign less"
        )


def _check_distinct_keys(advertisements: Iterable[Advertisement]) -> None:
    owners: dict[bytes, str] = {}
    for advertisement in advertisements:
        for key in (advertisement.encryption_key, advertisement.mask_key):
            owner = owners.setdefault(key, advertisement.device)
            if owner != advertisement.device or advertisement.encryption_key == (
                advertisement.mask_key
            ):
                raise InvalidInput(
                    f"every round key is used once; {owner!r} and {advertisement.device!r} have "
                    f"the key {key.hex()}"
                )

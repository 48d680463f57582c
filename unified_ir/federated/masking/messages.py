"""What device and cloud say to each other in one masked round, and the bytes that are signed.

The phases, each one message from every device that is left and one answer to it:

    device -> Advertisement      cloud -> MaskingCohort     keys of the round, signed
    device -> SealedShares       cloud -> ShareDelivery     shares of secrets, for neighbours
    device -> MaskedInput        cloud -> SurvivorSet       the vector, folded on arrival
    device -> SurvivorSignature  cloud -> UnmaskRequest     one list of survivors, signed
    device -> RevealedShares                                what removes the masks from the sum

Positions number the devices of a cohort in the order of their names. Everything that is signed
begins with its purpose, and each part with its length, so no two statements share their bytes.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.masking.fields import MaskedField
from triplane.unified_ir.federated.masking.groups import group_parameters
from triplane.unified_ir.federated.masking.parameters import (
    MAX_COHORT,
    MIN_COHORT,
    MaskingParameters,
    choose_parameters,
)
from triplane.unified_ir.federated.masking.shamir import SHARE_BYTES

DIGEST_BYTES: Final = 32
SEALED_BYTES: Final = 2 * 4 + 2 * SHARE_BYTES + 16
"""Encrypted shares: sender, receiver, two shares, and the tag of AES-GCM."""
MAX_FIELDS: Final = 64
MAX_NUMBER: Final = 1 << 40
PSEUDONYM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of runs, and names of devices in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingTerms:
    """What everybody in a masked round agrees on; every signature covers all of it.

    base: SHA-256 of the state that the round begins from. groups: of the round's cohort, each of
    which is masked apart; see `group_sessions`. group: from 1 in the terms of one of several
    groups, 0 until the keys of all devices have decided who is in which. least: fewest devices, of
    a group, whose sum may be unmasked. lost_share, colluding_share, failure: see
    `choose_parameters`. fields: the vectors. encoding: SHA-256 of what the integers mean, of the
    noise in them and of how devices learn; empty where that is agreed on in another way. It keeps a
    cloud from telling all devices but one a norm next to which their updates are nothing, or less
    noise than that one relies on, or few steps: the sum would be its update.
    """

    run: str
    base: bytes
    round: int
    attempt: int
    group: int = 0
    groups: int = 1
    fields: tuple[MaskedField, ...]
    least: int
    lost_share: float
    colluding_share: float
    failure: float = defaults.MASK_FAILURE
    encoding: bytes = b""

    def __post_init__(self) -> None:
        check_pseudonym(self.run, "a run")
        if len(self.base) != DIGEST_BYTES or not 1 <= len(self.fields) <= MAX_FIELDS:
            raise InvalidInput(
                f"masking needs a base of {DIGEST_BYTES} bytes and 1 to {MAX_FIELDS} fields, got "
                f"{len(self.base)} bytes and {len(self.fields)} fields"
            )
        if len(self.encoding) not in {0, DIGEST_BYTES}:
            raise InvalidInput(f"an encoding is named by SHA-256, got {len(self.encoding)} bytes")
        if not MIN_COHORT <= self.least <= MAX_COHORT:
            raise InvalidInput(
                f"the least cohort of a masked round is {MIN_COHORT} to {MAX_COHORT} devices, got "
                f"{self.least}"
            )
        if not all(0 <= i < MAX_NUMBER for i in (self.round, self.attempt)):
            raise InvalidInput(
                f"round and attempt are in [0, 2^40), got {self.round} and {self.attempt}"
            )
        last = self.groups if self.groups > 1 else 0
        if not (1 <= self.groups <= MAX_COHORT and 0 <= self.group <= last):
            raise InvalidInput(
                f"a cohort has 1 to {MAX_COHORT} groups, numbered from 1 if there are several, got "
                f"group {self.group} of {self.groups}"
            )

    def parameters(self, devices: int, *, cohort: int = 0) -> MaskingParameters:
        """Return the parameters for `devices` that are masked together; see `choose_parameters`."""
        return choose_parameters(
            devices,
            cohort=cohort,
            least=self.least,
            lost_share=self.lost_share,
            colluding_share=self.colluding_share,
            failure=self.failure,
        )

    def group_parameters(self, cohort: int) -> tuple[MaskingParameters, ...]:
        """Return the parameters of a cohort's groups, for each size that a group has.

        InvalidInput: one of them is too small.
        """
        return group_parameters(
            cohort,
            self.groups,
            least=self.least,
            lost_share=self.lost_share,
            colluding_share=self.colluding_share,
            failure=self.failure,
        )

    def encode(self) -> bytes:
        """Return the bytes that signatures cover."""
        numbers = [self.round, self.attempt, self.group, self.least]
        if self.groups > 1:  # without groups, the bytes are those of earlier releases
            numbers.append(self.groups)
        return statement(
            "terms",
            self.run.encode(),
            self.base,
            struct.pack(f">{len(numbers)}Q", *numbers),
            struct.pack(">3d", self.lost_share, self.colluding_share, self.failure),
            *(struct.pack(">QII", f.entries, f.bits, f.noise_bits) for f in self.fields),
            *([self.encoding] if self.encoding else []),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertisement:
    """A device's X25519 keys for this round, signed by its identity key.

    encryption_key: for the shares that are sent to it. mask_key: for the masks that it and a
    neighbour have in common.
    """

    device: str
    encryption_key: bytes
    mask_key: bytes
    signature: bytes

    def signed_bytes(self, terms: MaskingTerms) -> bytes:
        """Return what the signature covers."""
        name = self.device.encode()
        return statement("keys", terms.encode(), name, self.encryption_key, self.mask_key)

    @property
    def size_bytes(self) -> int:
        """Bytes of its contents."""
        keys = len(self.encryption_key) + len(self.mask_key)
        return len(self.device) + keys + len(self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingCohort:
    """The devices of the round, in the order of their names."""

    advertisements: tuple[Advertisement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShares:
    """Shares of a device's two secrets, encrypted for each neighbour, by position.

    commitment: SHA-256 of the seed of its own mask, by which the cloud recognizes wrong shares.
    """

    position: int
    commitment: bytes
    sealed: Mapping[int, bytes]

    @property
    def size_bytes(self) -> int:
        """Bytes of its contents."""
        return 4 + len(self.commitment) + sum(4 + len(s) for s in self.sealed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDelivery:
    """Who shared, and what the receiver's neighbours among them sealed for it, by position."""

    sharers: tuple[int, ...]
    sealed: Mapping[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedInput:
    """A device's masked vectors; the signature states with which sharers it masked.

    unopened: positions of the neighbours whose sealed shares it could not open.
    """

    position: int
    data: bytes
    signature: bytes
    unopened: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its contents."""
        return 4 + len(self.data) + len(self.signature) + 4 * len(self.unopened)


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorSet:
    """The devices whose masked vectors the cloud has."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorSignature:
    """A device's only signature over survivors in this round."""

    position: int
    signature: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of its contents."""
        return 4 + len(self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmaskRequest:
    """Signatures over the survivors, and those of the receiver's surviving neighbours' inputs."""

    signatures: Mapping[int, bytes]
    receipts: Mapping[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RevealedShares:
    """Shares by neighbour: self_masks of the survivors, mask_keys of the lost; never both."""

    position: int
    self_masks: Mapping[int, bytes]
    mask_keys: Mapping[int, bytes]

    @property
    def size_bytes(self) -> int:
        """Bytes of its contents."""
        shares = [*self.self_masks.values(), *self.mask_keys.values()]
        return 4 + sum(4 + len(share) for share in shares)


def statement(purpose: str, *parts: bytes) -> bytes:
    """Return `parts` under a purpose, each preceded by its length."""
    head = f"triplane masking 1 {purpose}".encode()
    return b"".join(len(part).to_bytes(8, "big") + part for part in (head, *parts))


def check_pseudonym(name: str, what: str) -> None:
    """Raise InvalidInput unless `name` has 1 to 64 letters, digits, '.', '_' or '-'."""
    if not PSEUDONYM.fullmatch(name):
        raise InvalidInput(
            f"{what} is named by 1 to 64 letters, digits, '.', '_' or '-', got {name[:80]!r}"
        )


def check_positions(positions: Sequence[int], devices: int, what: str) -> None:
    """Raise InvalidInput unless positions rise strictly and are below `devices`."""
    rising = all(a < b for a, b in itertools.pairwise(positions))
    if not (rising and all(0 <= i < devices for i in positions)):
        raise InvalidInput(
            f"{what} are positions that rise strictly within [0, {devices}), got "
            f"{len(positions)}: {str(list(positions[:8]))[:80]}"
        )


def position_bytes(positions: Sequence[int]) -> bytes:
    """Return positions as signed bytes."""
    return struct.pack(f">{len(positions)}I", *positions)


def encode_shares(sender: int, receiver: int, self_mask: bytes, mask_key: bytes) -> bytes:
    """Return the bytes that are encrypted for a neighbour."""
    return struct.pack(">2I", sender, receiver) + self_mask + mask_key


def decode_shares(data: bytes, sender: int, receiver: int) -> tuple[bytes, bytes]:
    """Return the shares of (self mask, mask key). InvalidInput for another pair or length."""
    expected = struct.pack(">2I", sender, receiver)
    if len(data) != SEALED_BYTES - 16 or data[:8] != expected:
        raise InvalidInput(f"shares from {sender} for {receiver} were expected")
    return data[8 : 8 + SHARE_BYTES], data[8 + SHARE_BYTES :]

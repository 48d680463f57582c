"""Messages of a masked round as protobuf (federation.proto), and back.

Whatever `..._of` returns is only well-formed: the state machines check what it means. InvalidInput
for more than a cohort can have.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sized

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.encoding import (
    EncodedSection,
    UpdateEncoding,
    range_for,
)
from triplane.unified_ir.federated.masking.fields import MaskedField
from triplane.unified_ir.federated.masking.messages import (
    MAX_FIELDS,
    Advertisement,
    MaskedInput,
    MaskingCohort,
    MaskingTerms,
    RevealedShares,
    SealedShares,
    ShareDelivery,
    SurvivorSet,
    SurvivorSignature,
    UnmaskRequest,
)
from triplane.unified_ir.federated.masking.noise import bit_noise_bits, with_noise_bits
from triplane.unified_ir.federated.masking.parameters import MAX_COHORT

MAX_KEY_BYTES = 1024
"""Largest identity key in DER; one of P-256 has 91 bytes."""


def pseudonym(identity_key: bytes) -> str:
    """Return the name of a device in masked rounds: the SHA-256 of its identity key (DER)."""
    return hashlib.sha256(identity_key).hexdigest()


def terms_message(terms: MaskingTerms) -> pb.MaskingTerms:
    """Return the terms without run, round and base, which the task has."""
    return pb.MaskingTerms(
        attempt=terms.attempt,
        group=terms.group,
        groups=terms.groups if terms.groups > 1 else 0,
        least=terms.least,
        lost_share=terms.lost_share,
        colluding_share=terms.colluding_share,
        failure=terms.failure,
        fields=[
            pb.MaskedField(entries=f.entries, bits=f.bits, noise_bits=f.noise_bits)
            for f in terms.fields
        ],
    )


def terms_of(
    message: pb.MaskingTerms, *, run: str, round_: int, base: bytes, encoding: bytes = b""
) -> MaskingTerms:
    """Return the terms of a task. encoding: see `encoding_digest`."""
    if len(message.fields) > MAX_FIELDS:
        raise InvalidInput(f"masking has at most {MAX_FIELDS} fields, got {len(message.fields)}")
    return MaskingTerms(
        run=run,
        base=base,
        round=round_,
        attempt=message.attempt,
        group=message.group,
        groups=message.groups or 1,
        fields=tuple(MaskedField(f.entries, f.bits, f.noise_bits) for f in message.fields),
        least=message.least,
        lost_share=message.lost_share,
        colluding_share=message.colluding_share,
        failure=message.failure,
        encoding=encoding,
    )


def encoding_digest(
    message: pb.MaskingEncoding,
    sampling: pb.Sampling,
    *,
    variance: int = 0,
    bit_variance: int = 0,
) -> bytes:
    """Return what the terms of a round name its encoding by, and how its devices learn.

    variance, bit_variance: see `encoding_of`.
    """
    numbers = (message.norm, message.buffer_norm, message.bit_share)
    whole = (message.bits, message.cap, message.seed, variance, bit_variance)
    sizes = (sampling.steps, sampling.batch_size, sampling.support, sampling.query)
    return hashlib.sha256(struct.pack(">3d9Q", *numbers, *whole, *sizes)).digest()


def encoding_of(
    message: pb.MaskingEncoding,
    parameters: int,
    buffers: int,
    *,
    variance: int = 0,
    bit_variance: int = 0,
    least: int = 0,
) -> UpdateEncoding:
    """Return the encoding of updates with so many entries of parameters and of float buffers.

    Device and cloud derive it alike: a section for each kind that has entries, parameters first.
    variance: of the noise that each device adds to an integer, in steps squared; 0 for none.
    bit_variance: of that in its clipping bit. least: fewest devices of a cohort, from which follows
    the room for the noise. InvalidInput: noise with float buffers, with weights, or with bits that
    get none.
    """
    has_bits = bool(message.bit_share)
    if not 0 <= message.bit_share <= 1 or bool(bit_variance) != (has_bits and bool(variance)):
        raise InvalidInput(
            "a clipping bit is about a share of the norm from 0 to 1, and has noise exactly if the "
            f"update has; got the share {message.bit_share:g}, variance {variance} in the update "
            f"and {bit_variance} in the bit"
        )
    if variance and (buffers or message.cap != 1):
        raise InvalidInput(
            "with noise of devices an update has no float buffers and every device has the weight "
            f"1, because noise covers neither; got {buffers} entries of buffers and a cap of "
            f"{message.cap}"
        )
    pairs = ((parameters, message.norm), (buffers, message.buffer_norm))
    sections = tuple(
        EncodedSection(entries, range_for(norm, entries), message.bits)
        for entries, norm in pairs
        if entries
    )
    if variance:
        sections = tuple(with_noise_bits(section, variance, least) for section in sections)
    return UpdateEncoding(
        sections,
        cap=message.cap,
        seed=message.seed,
        has_bits=has_bits,
        bit_noise_bits=bit_noise_bits(bit_variance, least),
    )


def advertisement_message(advertisement: Advertisement, identity_key: bytes) -> pb.Advertisement:
    """Return the keys of a device with the identity key (DER) that its name is the digest of."""
    return pb.Advertisement(
        device=advertisement.device,
        encryption_key=advertisement.encryption_key,
        mask_key=advertisement.mask_key,
        signature=advertisement.signature,
        identity_key=identity_key,
    )


def advertisement_of(message: pb.Advertisement) -> tuple[Advertisement, bytes]:
    """Return the keys and the identity key. InvalidInput unless the name is the key's digest."""
    key = message.identity_key
    if len(key) > MAX_KEY_BYTES or message.device != pseudonym(key):
        raise InvalidInput(
            f"a device in a masked round is named by the SHA-256 of its identity key, of at most "
            f"{MAX_KEY_BYTES} bytes; {message.device[:64]!r} is not that of its {len(key)} bytes"
        )
    advertisement = Advertisement(
        device=message.device,
        encryption_key=message.encryption_key,
        mask_key=message.mask_key,
        signature=message.signature,
    )
    return advertisement, key


def cohort_message(cohort: MaskingCohort, keys: Mapping[str, bytes]) -> pb.MaskingCohort:
    """Return the cohort. keys: identity keys (DER) by device."""
    return pb.MaskingCohort(
        advertisements=[advertisement_message(a, keys[a.device]) for a in cohort.advertisements]
    )


def cohort_of(message: pb.MaskingCohort) -> tuple[MaskingCohort, dict[str, bytes]]:
    """Return the cohort, and the identity key (DER) of each device."""
    _check_count(message.advertisements)
    parsed = [advertisement_of(a) for a in message.advertisements]
    keys = {advertisement.device: key for advertisement, key in parsed}
    return MaskingCohort(advertisements=tuple(a for a, _ in parsed)), keys


def shares_message(shares: SealedShares) -> pb.SealedShares:
    """Return the encrypted shares of a device."""
    return pb.SealedShares(
        position=shares.position, commitment=shares.commitment, sealed=dict(shares.sealed)
    )


def shares_of(message: pb.SealedShares) -> SealedShares:
    """Return the encrypted shares of a device."""
    _check_count(message.sealed)
    return SealedShares(
        position=message.position, commitment=message.commitment, sealed=dict(message.sealed)
    )


def delivery_message(delivery: ShareDelivery) -> pb.ShareDelivery:
    """Return what a device's neighbours sealed for it."""
    return pb.ShareDelivery(sharers=delivery.sharers, sealed=dict(delivery.sealed))


def delivery_of(message: pb.ShareDelivery) -> ShareDelivery:
    """Return what a device's neighbours sealed for it."""
    _check_count(message.sharers)
    _check_count(message.sealed)
    return ShareDelivery(sharers=tuple(message.sharers), sealed=dict(message.sealed))


def input_message(masked: MaskedInput, blob: pb.Blob | None = None) -> pb.MaskedInput:
    """Return a masked input. blob: the name of its bytes, if they are not in the message."""
    message = pb.MaskedInput(
        position=masked.position, signature=masked.signature, unopened=masked.unopened
    )
    if blob is None:
        message.data = masked.data
    else:
        message.blob.CopyFrom(blob)
    return message


def input_of(message: pb.MaskedInput, data: bytes) -> MaskedInput:
    """Return a masked input. data: its bytes, which the message or a blob has."""
    _check_count(message.unopened)
    return MaskedInput(
        position=message.position,
        data=data,
        signature=message.signature,
        unopened=tuple(message.unopened),
    )


def survivors_message(survivors: SurvivorSet) -> pb.SurvivorSet:
    """Return the list of survivors."""
    return pb.SurvivorSet(positions=survivors.positions)


def survivors_of(message: pb.SurvivorSet) -> SurvivorSet:
    """Return the list of survivors."""
    _check_count(message.positions)
    return SurvivorSet(positions=tuple(message.positions))


def signature_message(signature: SurvivorSignature) -> pb.SurvivorSignature:
    """Return a device's signature over the survivors."""
    return pb.SurvivorSignature(position=signature.position, signature=signature.signature)


def signature_of(message: pb.SurvivorSignature) -> SurvivorSignature:
    """Return a device's signature over the survivors."""
    return SurvivorSignature(position=message.position, signature=message.signature)


def request_message(request: UnmaskRequest) -> pb.UnmaskRequest:
    """Return the signatures that allow a device to reveal its shares."""
    return pb.UnmaskRequest(signatures=dict(request.signatures), receipts=dict(request.receipts))


def request_of(message: pb.UnmaskRequest) -> UnmaskRequest:
    """Return the signatures that allow a device to reveal its shares."""
    _check_count(message.signatures)
    _check_count(message.receipts)
    return UnmaskRequest(signatures=dict(message.signatures), receipts=dict(message.receipts))


def revealed_message(revealed: RevealedShares) -> pb.RevealedShares:
    """Return the shares that a device reveals."""
    return pb.RevealedShares(
        position=revealed.position,
        self_masks=dict(revealed.self_masks),
        mask_keys=dict(revealed.mask_keys),
    )


def revealed_of(message: pb.RevealedShares) -> RevealedShares:
    """Return the shares that a device reveals."""
    _check_count(message.self_masks)
    _check_count(message.mask_keys)
    return RevealedShares(
        position=message.position,
        self_masks=dict(message.self_masks),
        mask_keys=dict(message.mask_keys),
    )


def _check_count(items: Sized) -> None:
    if len(items) > MAX_COHORT:
        raise InvalidInput(f"a masked cohort has at most {MAX_COHORT} devices, got {len(items)}")

"""A device's side of one masked round.

Call `advertise`, `share`, `mask`, `sign` and `unmask` in this order, each with the cloud's newest
answer, one call at a time. A repeated call with an equal message returns the first answer again;
with another message it is refused, and nothing is sent. All secrets are new in every round and are
never stored, so after a restart the device leaves the round (`ledger.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, TypeVar

from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.unified_ir.federated.masking.fields import Vector
from triplane.unified_ir.federated.masking.integers import IntegerSum
from triplane.unified_ir.federated.masking.ledger import (
    LedgerEntry,
    LedgerStore,
    MaskingLedger,
    ledger_key,
)
from triplane.unified_ir.federated.masking.messages import (
    SEALED_BYTES,
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
    check_positions,
    check_pseudonym,
    decode_shares,
    encode_shares,
)
from triplane.unified_ir.federated.masking.primitives import (
    KEY_BYTES,
    IdentitySigner,
    IdentityVerifier,
    RoundKey,
)
from triplane.unified_ir.federated.masking.session import (
    MaskingSession,
    check_advertisement,
    group_sessions,
    self_mask_commitment,
)
from triplane.unified_ir.federated.masking.shamir import split_secret

_Answer = TypeVar("_Answer")
STEPS: Final = ("share", "mask", "sign", "unmask")


@dataclass(frozen=True, slots=True, repr=False)
class _Secrets:
    encryption: RoundKey
    mask: RoundKey
    seed: bytes


class MaskingDevice:
    """One device in one round.

    store: its ledger, which is updated before each message that it restricts; if that raises,
    there is no message. Conflict if this device has contributed for the run and base state.
    """

    def __init__(
        self,
        terms: MaskingTerms,
        device: str,
        *,
        signer: IdentitySigner,
        verifier: IdentityVerifier,
        store: LedgerStore,
    ) -> None:
        check_pseudonym(device, "a device")
        store.load().check_new(terms)
        self._terms, self._device = terms, device
        self._signer, self._verifier = signer, verifier
        self._store = store
        self._secrets = _Secrets(RoundKey.generate(), RoundKey.generate(), os.urandom(KEY_BYTES))
        self._session: MaskingSession
        self._position: int
        self._received: dict[int, tuple[bytes, bytes]]
        self._sharers: tuple[int, ...]
        self._survivors: tuple[int, ...]
        self._answers: dict[str, tuple[Any, Any]] = {}
        self._advertisement = self._signed_keys()

    def advertise(self) -> Advertisement:
        """Return the signed round keys."""
        return self._advertisement

    def share(self, cohort: MaskingCohort) -> SealedShares:
        """Check the cohort and share both secrets with the neighbours in this device's group."""
        earlier: SealedShares | None = self._earlier("share", cohort)
        if earlier is not None:
            return earlier
        if self._advertisement not in cohort.advertisements:
            raise InvalidInput(
                f"the cohort does not contain {self._device!r} with the keys that it advertised"
            )
        # The size first, because each signature of too many would cost time.
        self._terms.group_parameters(len(cohort.advertisements))
        for advertisement in cohort.advertisements:
            check_advertisement(self._terms, advertisement, self._verifier)
        sessions = group_sessions(self._terms, cohort)
        self._session = next(s for s in sessions if self._device in s.devices)
        self._position = self._session.devices.index(self._device)
        return self._answer("share", cohort, self._shares())

    def mask(self, delivery: ShareDelivery, vectors: Sequence[Vector]) -> MaskedInput:
        """Return the masked vectors, one of integers for each field of the terms."""
        earlier: MaskedInput | None = self._earlier("mask", delivery)
        if earlier is not None:
            return earlier
        session, position = self._session, self._position
        sharers = self._check_members(delivery.sharers, "sharers")
        neighbours = session.neighbours_among(position, sharers)
        self._check_delivery(delivery, neighbours)
        total = IntegerSum(self._terms.fields, len(session))
        total.add(vectors)
        self._received = self._open(delivery.sealed)
        self._add_masks(total, neighbours)
        self._store.update(self._begun)
        signature = self._signer.sign(session.input_statement(position, sharers))
        # The report names who may have lied. Masks and what is revealed later are the same.
        unopened = tuple(i for i in neighbours if i not in self._received)
        masked = MaskedInput(
            position=position, data=total.encode(), signature=signature, unopened=unopened
        )
        self._sharers = sharers
        return self._answer("mask", delivery, masked)

    def sign(self, survivors: SurvivorSet) -> SurvivorSignature:
        """Sign the only list of survivors of this round."""
        earlier: SurvivorSignature | None = self._earlier("sign", survivors)
        if earlier is not None:
            return earlier
        positions = self._check_members(survivors.positions, "survivors")
        if unknown := sorted(set(positions) - set(self._sharers)):
            raise InvalidInput(
                f"survivors are devices that shared their secrets; {unknown[:8]} did not"
            )
        signed = self._session.survivor_statement(self._sharers, positions)
        digest = hashlib.sha256(signed).hexdigest()

        def change(ledger: MaskingLedger) -> MaskingLedger:
            entry = self._entry(ledger)
            if entry.survivors not in {"", digest}:
                _refuse_second("sign")
            return ledger.with_(self._terms, replace(entry, survivors=digest))

        self._store.update(change)
        signature = self._signer.sign(signed)
        self._survivors = positions
        answer = SurvivorSignature(position=self._position, signature=signature)
        return self._answer("sign", survivors, answer)

    def unmask(self, request: UnmaskRequest) -> RevealedShares:
        """Reveal one share of each neighbour, once enough devices signed the same survivors."""
        # Also for another request: it may have more signatures, and the answer is the same.
        earlier: RevealedShares | None = self._answers.get("unmask", (None, None))[1]
        if earlier is not None:
            return earlier
        self._require("unmask")
        self._check_quorum(request.signatures)
        self._check_receipts(request.receipts)
        alive = frozenset(self._survivors)
        received = self._received
        revealed = RevealedShares(
            position=self._position,
            self_masks={i: shares[0] for i, shares in received.items() if i in alive},
            mask_keys={i: shares[1] for i, shares in received.items() if i not in alive},
        )
        self._check_signed(self._store.load())
        return self._answer("unmask", request, revealed)

    def _signed_keys(self) -> Advertisement:
        unsigned = Advertisement(
            device=self._device,
            encryption_key=self._secrets.encryption.public,
            mask_key=self._secrets.mask.public,
            signature=b"",
        )
        return replace(unsigned, signature=self._signer.sign(unsigned.signed_bytes(self._terms)))

    def _shares(self) -> SealedShares:
        session, position, secrets = self._session, self._position, self._secrets
        neighbours = session.neighbours(position)
        threshold = session.parameters.threshold
        self_masks = split_secret(secrets.seed, threshold, neighbours)
        mask_keys = split_secret(secrets.mask.private, threshold, neighbours)
        sealed = {}
        for other in neighbours:
            shares = encode_shares(position, other, self_masks[other], mask_keys[other])
            sealed[other] = session.seal(secrets.encryption, position, other, shares)
        commitment = self_mask_commitment(secrets.seed)
        return SealedShares(position=position, commitment=commitment, sealed=sealed)

    def _add_masks(self, total: IntegerSum, neighbours: Sequence[int]) -> None:
        session, position = self._session, self._position
        for other in neighbours:
            key = session.pair_mask_key(self._secrets.mask, position, other)
            total.add_mask(key, negative=position > other)
        total.add_mask(session.self_mask_key(self._secrets.seed), negative=False)

    def _check_members(self, positions: Sequence[int], what: str) -> tuple[int, ...]:
        """Check a list of the cloud: this device, the least cohort, enough of its neighbours."""
        session, parameters = self._session, self._session.parameters
        check_positions(positions, len(session), what)
        if self._position not in positions:
            raise InvalidInput(f"the {what} do not contain this device, {self._device!r}")
        if len(positions) < parameters.least:
            raise InvalidInput(
                f"the {what} must be at least {parameters.least} devices, the cloud lists "
                f"{len(positions)}; this device would reveal too small a sum"
            )
        neighbours = session.neighbours_among(self._position, positions)
        if len(neighbours) < parameters.threshold:
            raise InvalidInput(
                f"the {what} must contain {parameters.threshold} of this device's "
                f"{parameters.neighbours} neighbours, the cloud lists {len(neighbours)}"
            )
        return tuple(positions)

    def _check_delivery(self, delivery: ShareDelivery, neighbours: Sequence[int]) -> None:
        if sorted(delivery.sealed) != list(neighbours):
            missing = sorted(set(neighbours) ^ set(delivery.sealed))
            raise InvalidInput(
                "shares are delivered from exactly the neighbours that the cloud lists as sharers; "
                f"they differ in {missing[:8]}"
            )
        sizes = {len(sealed) for sealed in delivery.sealed.values()} - {SEALED_BYTES}
        if sizes:
            raise InvalidInput(f"sealed shares have {SEALED_BYTES} bytes, got {min(sizes)}")

    def _open(self, sealed: Mapping[int, bytes]) -> dict[int, tuple[bytes, bytes]]:
        """Return the shares that can be read; one neighbour's garbage must not end the round."""
        received = {}
        for other, data in sealed.items():
            try:
                plain = self._session.open(self._secrets.encryption, other, self._position, data)
                received[other] = decode_shares(plain, other, self._position)
            except (Corrupt, InvalidInput):
                continue
        return received

    def _check_quorum(self, signatures: Mapping[int, bytes]) -> None:
        signed = self._session.survivor_statement(self._sharers, self._survivors)
        names, quorum = self._session.devices, self._session.parameters.quorum
        verified = (
            i
            for i in self._survivors
            if i in signatures and self._verifier.verifies(names[i], signed, signatures[i])
        )
        # No further ones: verifying takes most of this step's time.
        valid = sum(1 for _ in itertools.islice(verified, quorum))
        if valid < quorum:
            raise InvalidInput(
                f"{quorum} devices must have signed the same survivors as this device, the cloud "
                f"shows {valid} valid signatures of {len(signatures)}; no share is revealed"
            )

    def _check_receipts(self, receipts: Mapping[int, bytes]) -> None:
        """Check that each surviving neighbour masked with the same devices as this one."""
        session = self._session
        for i in session.neighbours_among(self._position, self._survivors):
            signed = session.input_statement(i, self._sharers)
            if not self._verifier.verifies(session.devices[i], signed, receipts.get(i, b"")):
                raise InvalidInput(
                    f"the cloud lists {session.name(i)} as a survivor but shows no valid signature "
                    "of its masked input over the same sharers; no share is revealed"
                )

    def _begun(self, ledger: MaskingLedger) -> MaskingLedger:
        """Return the ledger with this round's entry, unless another attempt has contributed."""
        ledger.check_new(self._terms)
        terms, digest = self._terms, self._session.digest.hex()
        entry = LedgerEntry(round=terms.round, attempt=terms.attempt, session=digest)
        return ledger.with_(terms, entry)

    def _check_signed(self, ledger: MaskingLedger) -> None:
        """Raise Conflict unless the ledger has the list of survivors that decides the shares.

        It is on the disk since `sign`, so no process of this device ever reveals by another list.
        """
        signed = self._session.survivor_statement(self._sharers, self._survivors)
        if self._entry(ledger).survivors != hashlib.sha256(signed).hexdigest():
            _refuse_second("sign")

    def _entry(self, ledger: MaskingLedger) -> LedgerEntry:
        """Return this round's entry. Conflict if the ledger lacks it or has another session's."""
        entry = ledger.entries.get(ledger_key(self._terms))
        if entry is None or entry.session != self._session.digest.hex():
            raise Conflict(
                "the masking ledger does not contain this round's contribution; the device leaves "
                "the round"
            )
        return entry

    def _earlier(self, step: str, message: Any) -> Any:
        """Return the answer to an equal message, or None; refuse another message."""
        if step not in self._answers:
            self._require(step)
            return None
        first, answer = self._answers[step]
        if first != message:
            _refuse_second(step)
        return answer

    def _require(self, step: str) -> None:
        before = STEPS[: STEPS.index(step)]
        if not all(name in self._answers for name in before):
            raise Conflict(
                f"a device does {', '.join(STEPS)} in this order; {step} comes before {before[-1]}"
            )

    def _answer(self, step: str, message: Any, answer: _Answer) -> _Answer:
        self._answers[step] = message, answer
        return answer


def _refuse_second(step: str) -> NoReturn:
    what = {"share": "cohort", "mask": "list of sharers", "sign": "list of survivors"}[step]
    raise Conflict(
        f"a device accepts one {what} in a round, and the cloud sent a second, different one; the "
        "first one stays valid"
    )

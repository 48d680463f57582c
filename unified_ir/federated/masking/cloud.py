"""The cloud's side of one masked round: it learns the sum of the survivors and nothing else.

A phase takes one message of each device and ends by a call that returns the answer for all. Masked
vectors are added on arrival and not kept, so memory holds one vector however many devices there
are. Messages of a phase that has ended are refused with Conflict; equal messages count once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from triplane.proto.errors import Conflict, Corrupt, InvalidInput, Unavailable
from triplane.unified_ir.federated.masking.fields import Vector
from triplane.unified_ir.federated.masking.integers import IntegerSum
from triplane.unified_ir.federated.masking.messages import (
    DIGEST_BYTES,
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
)
from triplane.unified_ir.federated.masking.parameters import MAX_COHORT
from triplane.unified_ir.federated.masking.primitives import (
    IdentityVerifier,
    RoundKey,
    check_length,
)
from triplane.unified_ir.federated.masking.session import (
    MaskingSession,
    check_advertisement,
    group_sessions,
    self_mask_commitment,
)
from triplane.unified_ir.federated.masking.shamir import join_shares, parse_share, wrong_shares
from triplane.unified_ir.federated.masking.unopened import UnopenedShares

MAX_CHOICES: Final = 64
"""Sets of shares to try where more than half of the surplus is wrong: all, for up to 9 devices."""


class MaskingPhase(IntEnum):
    """The phase of a masked round, named by the messages that it takes."""

    KEYS = 1
    SHARES = 2
    INPUTS = 3
    SIGNATURES = 4
    REVEALS = 5
    DONE = 6


class MaskingCloud:
    """One masked round. Unavailable where too few devices are left; it names the threshold.

    Where the cohort has groups, it is the round of the first of them from the phase of shares on,
    and `groups` has all: each goes on by itself, or fails by itself.
    """

    def __init__(
        self,
        terms: MaskingTerms,
        *,
        verifier: IdentityVerifier,
        session: MaskingSession | None = None,
    ) -> None:
        """Begin with the phase of keys. session: the group whose keys are known already."""
        self._terms, self._verifier = terms, verifier
        self._phase = MaskingPhase.KEYS
        self._groups: tuple[MaskingCloud, ...] = (self,)
        self._inputs: dict[int, bytes] = {}
        self._advertisements: dict[str, Advertisement] = {}
        self._keys: set[bytes] = set()
        self._shares: dict[int, SealedShares] = {}
        self._commitments: dict[int, bytes] = {}
        self._receipts: dict[int, bytes] = {}
        self._unopened = UnopenedShares()
        self._signatures: dict[int, bytes] = {}
        self._revealed: dict[int, RevealedShares] = {}
        self._suspects: set[int] = set()
        self._session: MaskingSession
        self._sharers: tuple[int, ...]
        self._survivors: tuple[int, ...]
        self._total: IntegerSum
        if session is not None:
            self._begin(session)

    def _begin(self, session: MaskingSession) -> None:
        self._session = session
        self._total = IntegerSum(self._terms.fields, len(session))
        self._phase = MaskingPhase.SHARES

    @property
    def phase(self) -> MaskingPhase:
        """The phase whose messages are taken now."""
        return self._phase

    @property
    def session(self) -> MaskingSession:
        """The cohort, or the group, and its parameters, once `cohort` was called."""
        return self._session

    @property
    def groups(self) -> tuple[MaskingCloud, ...]:
        """The round of each group, once `cohort` was called; this one alone without groups."""
        return self._groups

    def add_keys(self, advertisement: Advertisement) -> None:
        """Take a device's keys. InvalidInput where they break a rule."""
        self._require(MaskingPhase.KEYS)
        check_advertisement(self._terms, advertisement, self._verifier)
        earlier = self._advertisements.get(advertisement.device)
        if earlier == advertisement:
            return
        if earlier is not None:
            raise Conflict(f"{advertisement.device!r} advertised other keys in this round before")
        self._check_keys(advertisement)
        if len(self._advertisements) >= MAX_COHORT:
            raise Unavailable(f"a masked cohort has at most {MAX_COHORT} devices; ask fewer")
        self._advertisements[advertisement.device] = advertisement
        self._keys |= {advertisement.encryption_key, advertisement.mask_key}

    def cohort(self) -> MaskingCohort:
        """End the phase of keys and return the answer for every device."""
        self._require(MaskingPhase.KEYS)
        listed = (self._advertisements[name] for name in sorted(self._advertisements))
        cohort = MaskingCohort(advertisements=tuple(listed))
        try:
            first, *others = group_sessions(self._terms, cohort)
        except InvalidInput as error:
            raise Unavailable(f"no cohort can be formed: {error}") from error
        self._begin(first)
        rounds = (MaskingCloud(s.terms, verifier=self._verifier, session=s) for s in others)
        self._groups = (self, *rounds)
        return cohort

    def add_shares(self, shares: SealedShares) -> None:
        """Take a device's encrypted shares."""
        self._check_position(MaskingPhase.SHARES, shares.position)
        if sorted(shares.sealed) != list(self._session.neighbours(shares.position)):
            raise InvalidInput(
                f"{self._session.name(shares.position)} must share with its "
                f"{self._session.parameters.neighbours} neighbours, got {len(shares.sealed)}"
            )
        check_length(shares.commitment, DIGEST_BYTES, "a commitment")
        for sealed in shares.sealed.values():
            check_length(sealed, SEALED_BYTES, "a sealed share")
        if self._shares.setdefault(shares.position, shares) != shares:
            raise Conflict(f"{self._session.name(shares.position)} sent other shares before")

    def delivery(self) -> dict[int, ShareDelivery]:
        """End the phase of shares and return the answer for each device, by position."""
        self._require(MaskingPhase.SHARES)
        sharers = self._enough(self._shares, "shared their secrets")
        self._sharers, self._phase = sharers, MaskingPhase.INPUTS
        answers = {}
        for i in sharers:
            neighbours = self._session.neighbours_among(i, sharers)
            sealed = {j: self._shares[j].sealed[i] for j in neighbours}
            answers[i] = ShareDelivery(sharers=sharers, sealed=sealed)
        # From here on only the devices need what was sealed: megabytes in large cohorts.
        self._commitments = {i: shares.commitment for i, shares in self._shares.items()}
        self._shares.clear()
        return answers

    def add_input(self, masked: MaskedInput) -> None:
        """Verify a masked input and add it to the sum at once."""
        self._check_position(MaskingPhase.INPUTS, masked.position)
        name = self._session.name(masked.position)
        if masked.position not in self._commitments:
            raise InvalidInput(f"{name} did not share its secrets, so its mask cannot be removed")
        if self._is_repeated(masked.position, masked.data):
            return
        self._check_unopened(masked)
        signed = self._session.input_statement(masked.position, self._sharers)
        self._verify(masked.position, signed, masked.signature)
        self._total.add_encoded(masked.data)
        self._inputs[masked.position] = hashlib.sha256(masked.data).digest()
        self._receipts[masked.position] = masked.signature
        self._unopened.add(masked.position, masked.unopened)

    def survivors(self) -> SurvivorSet:
        """End the phase of inputs and return the answer for every survivor."""
        self._require(MaskingPhase.INPUTS)
        self._survivors = self._enough(self._receipts, "sent a masked input")
        self._check_opened()
        self._phase = MaskingPhase.SIGNATURES
        return SurvivorSet(positions=self._survivors)

    def add_signature(self, signature: SurvivorSignature) -> None:
        """Take a survivor's signature over the list of survivors."""
        self._check_survivor(MaskingPhase.SIGNATURES, signature.position)
        signed = self._session.survivor_statement(self._sharers, self._survivors)
        self._verify(signature.position, signed, signature.signature)
        self._signatures[signature.position] = signature.signature

    def requests(self) -> dict[int, UnmaskRequest]:
        """End the phase of signatures and return the answer for each survivor, by position."""
        self._require(MaskingPhase.SIGNATURES)
        quorum = self._session.parameters.quorum
        if len(self._signatures) < quorum:
            raise Unavailable(
                f"{quorum} survivors must sign the list of survivors, {len(self._signatures)} of "
                f"{len(self._survivors)} did; the round cannot be unmasked"
            )
        self._phase = MaskingPhase.REVEALS
        # One table for all requests: copies for 10,000 survivors would need gigabytes.
        signatures = MappingProxyType(dict(self._signatures))
        return {
            i: UnmaskRequest(signatures=signatures, receipts=self._receipts_for(i))
            for i in self._survivors
        }

    def add_reveal(self, revealed: RevealedShares) -> None:
        """Take the shares that a survivor reveals."""
        self._check_survivor(MaskingPhase.REVEALS, revealed.position)
        neighbours = self._session.neighbours(revealed.position)
        alive = frozenset(self._survivors)
        self_masks = {i for i in neighbours if i in alive}
        mask_keys = {i for i in neighbours if i not in alive and i in self._commitments}
        name = self._session.name(revealed.position)
        if not (
            revealed.self_masks.keys() <= self_masks and revealed.mask_keys.keys() <= mask_keys
        ):
            raise InvalidInput(
                f"{name} may reveal its neighbours' self masks if they survived and mask keys if "
                "they were lost; it sent others"
            )
        for share in (*revealed.self_masks.values(), *revealed.mask_keys.values()):
            parse_share(share)
        if self._revealed.setdefault(revealed.position, revealed) != revealed:
            raise Conflict(f"{name} revealed other shares before")

    def sum(self) -> tuple[Vector, ...]:
        """Remove the masks and return the survivors' exact sum: uint64, one vector for each field.

        Unavailable, and more shares can be added, if a secret has fewer shares than the threshold.
        Corrupt if too many shares of a secret are wrong.
        """
        self._require(MaskingPhase.REVEALS)
        # Every secret is recovered before the first mask is removed: the sum stays whole.
        seeds = {i: self._seed(i) for i in self._survivors}
        alive = frozenset(self._survivors)
        lost = [i for i in self._sharers if i not in alive]
        keys = {i: self._mask_key(i) for i in lost if self._session.neighbours_among(i, alive)}
        for seed in seeds.values():
            self._total.add_mask(self._session.self_mask_key(seed), negative=True)
        for i, key in keys.items():
            for other in self._session.neighbours_among(i, alive):
                mask = self._session.pair_mask_key(key, i, other)
                # The survivor added it if its position is the lower one.
                self._total.add_mask(mask, negative=other < i)
        self._phase = MaskingPhase.DONE
        return self._total.values()

    @property
    def contributors(self) -> tuple[str, ...]:
        """Names of the devices whose sum `sum` returns."""
        return tuple(self._session.devices[i] for i in self._survivors)

    def liars(self) -> dict[int, str]:
        """Return which devices lied about sealed shares unless most of their neighbours did.

        By position, with a reason for the device itself, which names no other one.
        """
        return self._unopened.liars(self._session) if self._unopened else {}

    def _check_unopened(self, masked: MaskedInput) -> None:
        """Check whose shares a device says it could not open: neighbours that shared."""
        session, name = self._session, self._session.name(masked.position)
        check_positions(masked.unopened, len(session), f"unopened shares of {name}")
        neighbours = session.neighbours_among(masked.position, self._sharers)
        if odd := sorted(set(masked.unopened) - set(neighbours)):
            raise InvalidInput(f"{name} was sent no shares of {odd[:8]} that it could not open")

    def _check_opened(self) -> None:
        """Raise Unavailable if too few neighbours of a device could open its shares.

        Its mask could not be removed from the sum, so nobody needs to reveal anything.
        """
        threshold = self._session.parameters.threshold
        for position, senders in sorted(self._unopened.by_sender.items()):
            alive = self._session.neighbours_among(position, self._survivors)
            able = len(alive) - len(senders)
            if able < threshold:
                raise Unavailable(
                    f"{threshold} neighbours of {self._session.name(position)} must open the "
                    f"shares that it sealed for them, and {able} of {len(alive)} did"
                    f"{self._unopened.text(self._session, position)}"
                )

    def _check_keys(self, advertisement: Advertisement) -> None:
        """Refuse keys that would make every device refuse the cohort."""
        keys = {advertisement.encryption_key, advertisement.mask_key}
        if len(keys) < 2 or keys & self._keys:
            raise InvalidInput(
                f"every round key is used once; {advertisement.device!r} advertised one that is "
                "in use already"
            )
        probe = RoundKey.generate()
        for key in keys:
            probe.agree(key)

    def _receipts_for(self, position: int) -> dict[int, bytes]:
        neighbours = self._session.neighbours_among(position, self._receipts.keys())
        return {i: self._receipts[i] for i in neighbours}

    def _seed(self, position: int) -> bytes:
        shares = {
            i: revealed.self_masks[position]
            for i, revealed in sorted(self._revealed.items())
            if position in revealed.self_masks
        }
        commitment = self._commitments[position]
        what = f"the self mask of {self._session.name(position)}"
        return self._join(position, shares, what, lambda s: self_mask_commitment(s) == commitment)

    def _mask_key(self, position: int) -> RoundKey:
        shares = {
            i: revealed.mask_keys[position]
            for i, revealed in sorted(self._revealed.items())
            if position in revealed.mask_keys
        }
        public = self._session.advertisements[position].mask_key
        what = f"the mask key of {self._session.name(position)}, which was lost,"
        secret = self._join(
            position, shares, what, lambda s: RoundKey.from_private(s).public == public
        )
        return RoundKey.from_private(secret)

    def _join(
        self,
        position: int,
        shares: Mapping[int, bytes],
        what: str,
        matches: Callable[[bytes], bool],
    ) -> bytes:
        """Return the secret that matches. Unavailable for too few shares."""
        threshold = self._session.parameters.threshold
        if len(shares) < threshold:
            raise Unavailable(
                f"{threshold} shares recover {what} and {len(shares)} were revealed, by "
                f"{len(self._revealed)} of {len(self._survivors)} survivors"
                f"{self._unopened.text(self._session, position)}"
            )
        for chosen in self._choices(shares, threshold):
            try:
                secret = join_shares({i: shares[i] for i in chosen})
            except Corrupt:
                continue
            if matches(secret):
                return secret
        raise Corrupt(
            f"{what} cannot be recovered of {len(shares)} shares: wrong shares were revealed, or "
            "the device shared something else; repeat the round from a new state"
        )

    def _choices(self, shares: Mapping[int, bytes], threshold: int) -> Iterator[Sequence[int]]:
        """Yield holders whose shares may all be right, as many as the threshold.

        A device that lied is asked last from then on, so each costs the cloud time once.
        """
        holders = sorted(shares, key=lambda i: (i in self._suspects, i))
        yield holders[:threshold]
        wrong = wrong_shares(shares, threshold)
        if wrong is None:
            yield from itertools.islice(itertools.combinations(holders, threshold), 1, MAX_CHOICES)
        else:
            self._suspects |= wrong
            yield [i for i in holders if i not in wrong][:threshold]

    def _enough(self, members: Collection[int], what: str) -> tuple[int, ...]:
        parameters = self._session.parameters
        least = max(parameters.least, parameters.quorum)
        if len(members) < least:
            raise Unavailable(
                f"at least {least} of {len(self._session)} devices must have {what}, "
                f"{len(members)} did"
            )
        chosen = tuple(sorted(members))
        short = [
            i
            for i in chosen
            if len(self._session.neighbours_among(i, chosen)) < parameters.threshold
        ]
        if short:
            raise Unavailable(
                f"{parameters.threshold} neighbours of every device must have {what}; for "
                f"{len(short)} devices fewer did, the first is {self._session.name(short[0])}"
            )
        return chosen

    def _is_repeated(self, position: int, data: bytes) -> bool:
        digest = hashlib.sha256(data).digest()
        earlier = self._inputs.get(position)
        if earlier not in {None, digest}:
            raise Conflict(f"{self._session.name(position)} sent another masked input before")
        return earlier is not None

    def _verify(self, position: int, signed: bytes, signature: bytes) -> None:
        if not self._verifier.verifies(self._session.devices[position], signed, signature):
            raise InvalidInput(
                f"the signature of {self._session.name(position)} is not valid for this round and "
                "its devices"
            )

    def _check_survivor(self, phase: MaskingPhase, position: int) -> None:
        self._check_position(phase, position)
        if position not in self._receipts:
            raise InvalidInput(
                f"{self._session.name(position)} sent no masked input in time, so it is no survivor"
            )

    def _check_position(self, phase: MaskingPhase, position: int) -> None:
        self._require(phase)
        if not 0 <= position < len(self._session):
            raise InvalidInput(
                f"positions are in [0, {len(self._session)}) in this round, got {position}"
            )

    def _require(self, phase: MaskingPhase) -> None:
        if self._phase is not phase:
            raise Conflict(
                f"this round takes {self._phase.name.lower()} now, the message or call is for "
                f"{phase.name.lower()}"
            )

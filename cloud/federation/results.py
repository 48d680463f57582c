"""Results of a run's effects: the next shared state from a round's updates, and the final model.

The same inputs give the same bytes, so work that a crash interrupted is simply done again. A file
is on the disk before the event that names it is committed, and removed only after an event that no
longer needs it. A state of at most 64 KiB becomes durable with the commit of that event, in a row
of the database; its file is not synced, and `restore` writes it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from triplane.cloud.federation import journal
from triplane.cloud.federation.children import Children, Planned
from triplane.cloud.federation.journal import Prepared, RunRecord, references
from triplane.cloud.federation.live import MakeEvent, Write
from triplane.cloud.federation.masked_cohorts import MaskedCohorts
from triplane.cloud.federation.masked_encoding import next_norms, round_encoding
from triplane.cloud.federation.noise_store import NoiseStore
from triplane.cloud.federation.private_runs import (
    check_rows,
    check_tensors,
    privacy_of,
    published_change,
    reduce_with_noise,
    spent_by,
)
from triplane.cloud.federation.run_projection import RunProjection, turn_of
from triplane.cloud.federation.spec import hyper_of, robustness_of
from triplane.cloud.federation.update_store import UpdateStore
from triplane.cloud.registry.collecting import claim
from triplane.cloud.registry.registry import Registry
from triplane.cloud.registry.values import KEY_BYTES, Lineage, Push
from triplane.cloud.store import Database
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder, digest_of
from triplane.proto.disk import refusal
from triplane.proto.errors import Corrupt, TriplaneError
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.files import (
    INLINE_BYTES,
    Like,
    encode_state,
    like_of,
    read_state,
    write_state,
)
from triplane.unified_ir.federated.core.learn import buffers, sent_buffers
from triplane.unified_ir.federated.core.limits import RoundUpdate
from triplane.unified_ir.federated.core.run import (
    ENDED,
    NEWEST_RULES,
    Exchange,
    Finished,
    Judged,
    Lease,
    Phase,
    Reduce,
    Reduced,
    RunState,
)
from triplane.unified_ir.federated.privacy.release import entries_of, shapes_of

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms.aggregators import Reduction

logger = logging.getLogger(__name__)

UNFINISHED: Final = "state-"
"""Prefix of the names of files that are not blobs yet."""
BUFFER: Final = "buffer"
"""The role of the optimizer's tensors in their file."""

SharesPlan = Callable[[RunRecord], bool]
"""Returns whether another run that has not ended has the same plan."""


class Results:
    """See `live.Worker`."""

    def __init__(
        self,
        db: Database,
        blobs: BlobFolder,
        updates: UpdateStore,
        children: Children,
        registry: Registry,
        shares_plan: SharesPlan,
        *,
        noise: NoiseStore,
        masked: MaskedCohorts,
    ) -> None:
        self._db, self._blobs, self._updates, self._children = db, blobs, updates, children
        self.noise, self._masked = noise, masked
        self._registry, self._shares_plan = registry, shares_plan
        for pattern in (f"{UNFINISHED}*", f".{UNFINISHED}*"):  # of a process that was killed
            for left in blobs.partial.glob(pattern):
                blobs.disk.remove(left)
        blobs.disk.sync_folder(blobs.folder)  # later writes rely on the states that it named

    async def restore(self, record: RunRecord, projection: RunProjection) -> None:
        """Write again the small states of a run that a power cut damaged or removed. NoRoom.

        The run is not live before that, so nobody reads the states meanwhile.
        """
        states = await self._db.read(lambda c: journal.small_states(c, record.id))
        # The row of a spoilt state stays until the next reduction, but nothing needs its file.
        needed = states.keys() & references(record, projection)
        await asyncio.to_thread(self._restore, {name: states[name] for name in needed})

    def _restore(self, states: Mapping[bytes, bytes]) -> None:
        for sha256, data in states.items():
            if not self._has(sha256, data):
                self._write_unsynced(sha256, data)
                logger.info("state written again", extra={"blob": sha256.hex()})

    def _has(self, sha256: bytes, data: bytes) -> bool:
        """Return whether the blob has these bytes: after a power cut only its name may exist."""
        try:
            return self._blobs.path(sha256).read_bytes() == data
        except FileNotFoundError:
            return False

    def _make_durable(self, names: Iterable[bytes]) -> None:
        """Sync files that were written without a sync, before the rows with their bytes go."""
        try:
            for name in names:
                with self._blobs.find(name).open("rb") as file:
                    self._blobs.disk.sync(file)
            self._blobs.disk.sync_folder(self._blobs.folder)
        except OSError as error:
            raise refusal(error, f"could not make a state durable: {error}") from error

    async def prepare(self, record: RunRecord, clock: Callable[[], float]) -> Prepared:
        """Make the plan of a run and its first state, as blobs. clock: read at the end."""
        version = await self._registry.version(record.spec.model)
        model = self._blobs.find(version.blob)
        async with self._children.plan(model, record.spec) as planned:
            plan = await asyncio.to_thread(self._blobs.put_file, planned.plan)
            state = await asyncio.to_thread(self._blobs.put_file, planned.state)
            await asyncio.to_thread(self._make_durable, {state})  # it may be another run's
            if record.spec.HasField("noise"):
                await asyncio.to_thread(self._check_noise, record.spec, planned, state)
        # Garbage collection removes blobs that no row names, and the rows are written later.
        await claim(self._db, self._blobs, {plan, state})
        return Prepared(
            plan=plan.hex(),
            plan_digest=planned.digest,
            state=state.hex(),
            roles=planned.roles,
            weighting=planned.weighting,
            server=planned.server,
            metric=planned.metric,
            # Stored where it matters only, so that an earlier release can read other runs.
            frozen=planned.frozen if record.spec.HasField("noise") else (),
            since_s=clock(),
            rules=NEWEST_RULES,
        )

    def _check_noise(self, spec: pb.Spec, planned: Planned, state: bytes) -> None:
        """Raise InvalidInput if the run's noise does not go with the tensors that it has."""
        tensors = read_state(self._blobs.find(state), plan=planned.digest)
        check_rows(spec, robustness_of(spec), buffers=bool(sent_buffers(tensors, planned.roles)))
        if spec.HasField("masking"):
            entries = entries_of(shapes_of(tensors))
            round_encoding(spec, parameters=entries, buffers=0, cap=1, seed=0)
        else:
            check_tensors(spec, tensors, planned.frozen)

    async def reduce(
        self, record: RunRecord, projection: RunProjection, order: Reduce
    ) -> tuple[MakeEvent, Write | None]:
        """See `live.Worker`."""
        known: set[bytes] = set()
        small: dict[str, bytes] = {}
        state, slots, done = await asyncio.to_thread(
            self._reduce, record, projection.state, order, known, small
        )
        budget = projection.state.budget
        charged = 0 if budget is None else budget.charge(order.number).rounds
        await claim(self._db, self._blobs, known)

        def write(connection: sa.Connection, after: RunProjection) -> bool:
            kept = references(replace(record, slots=bytes.fromhex(slots)), after)
            journal.save_small_states(connection, record.id, small, kept)
            if slots == record.slots.hex():
                return False
            journal.change(connection, record.id, slots=bytes.fromhex(slots))
            return True

        left_out = tuple(order.leases[at].device for at in done.left_out)
        return reduced_event(
            order, state, done.scaled, charged=charged, clip=done.clip,
            buffer_clip=done.buffer_clip, left_out=left_out,
        ), write  # fmt: skip

    def _reduce(
        self,
        record: RunRecord,
        before: RunState,
        order: Reduce,
        known: set[bytes],
        small: dict[str, bytes],
    ) -> tuple[str, str, Reduction]:
        """Return the digests of the next state and of the optimizer's, and the reduction.

        Adds to `known` the blobs that existed before, and to `small` the bytes to write as rows.
        """
        prepared = record.prepared
        assert prepared is not None
        state = self._read(bytes.fromhex(before.shared), prepared)
        remembered = record.slots and not before.fresh_optimizer
        slots: dict[str, Array] = self._read(record.slots, prepared) if remembered else {}
        done = self._reduced(record, before, order, state, slots)
        roles = dict(prepared.roles)
        name = self._write(done.state, roles, prepared.plan_digest, known, small)
        if not done.slots:
            return name, "", done
        slot_roles = dict.fromkeys(done.slots, BUFFER)
        kept = self._write(done.slots, slot_roles, prepared.plan_digest, known, small)
        return name, kept, done

    def _reduced(
        self,
        record: RunRecord,
        before: RunState,
        order: Reduce,
        state: dict[str, Array],
        slots: dict[str, Array],
    ) -> Reduction:
        # The graphs come with them.
        from triplane.unified_ir.federated.algorithms import algorithm
        from triplane.unified_ir.federated.algorithms.aggregators import reduce_round

        prepared, spec, at_hand = record.prepared, record.spec, before.round
        assert prepared is not None
        assert at_hand is not None
        limits, like = robustness_of(spec), like_of(state)
        own, norms = frozenset(buffers(prepared.roles)), (0.0, 0.0)
        row, hyper = algorithm(spec.algorithm), hyper_of(spec)
        if at_hand.masked is not None:
            # Devices kept the limits, and the sum was held to them when it was unmasked.
            means = self._masked.means(record, before)
            norms = next_norms(spec, before, [mean for _, mean in means], state, own)
            if before.budget is not None:
                means = [
                    (published_change(spec, change, mean.devices, prepared.frozen), mean)
                    for change, mean in means
                ]
            updates = [RoundUpdate(mean.weight, partial(dict, change)) for change, mean in means]
            limits = limits.of_sums
        else:
            updates = self._round_updates(record, order, like)
        if before.budget is not None and at_hand.masked is None:
            return reduce_with_noise(
                self.noise, spec, before, state, slots, updates, leases=order.leases,
                frozen=prepared.frozen, server=row.server, hyper=hyper,
            )  # fmt: skip
        done = reduce_round(
            state, slots, updates, robustness=limits,
            draws=Draws(spec.seed, order.number, "", "buckets"),
            weighting=prepared.weighting, server=row.server, hyper=hyper,
            buffers=own,
            shares=row.shares(
                hyper, like, updates=len(order.leases), members=at_hand.population
            ),
        )  # fmt: skip
        return replace(done, clip=norms[0], buffer_clip=norms[1])

    def _round_updates(self, record: RunRecord, order: Reduce, like: Like) -> list[RoundUpdate]:
        def opened(lease: Lease) -> dict[str, Array]:
            assert lease.update is not None
            return self._updates.opened(record, lease.id, lease.update, like)

        updates = [(lease, lease.update) for lease in order.leases if lease.update is not None]
        assert len(updates) == len(order.leases)  # all counted, so positions are those of leases
        return [RoundUpdate(x.examples, partial(opened, lease), x.norms) for lease, x in updates]

    def _read(self, sha256: bytes, prepared: Prepared) -> dict[str, Array]:
        path = self._blobs.find(sha256)
        return read_state(path, plan=prepared.plan_digest, verified=True)

    def _write(
        self,
        tensors: dict[str, Array],
        roles: dict[str, str],
        plan: str,
        known: set[bytes],
        small: dict[str, bytes],
    ) -> str:
        if sum(x.nbytes for x in tensors.values()) <= INLINE_BYTES:
            data = encode_state(tensors, roles, plan=plan)
            sha256 = hashlib.sha256(data).digest()
            # Compare the bytes, not only the name: the file was written without a sync.
            if self._has(sha256, data):
                known.add(sha256)
            else:
                self._write_unsynced(sha256, data)
            small[sha256.hex()] = data
            return sha256.hex()
        path = self._blobs.partial / f"{UNFINISHED}{secrets.token_hex(8)}"
        try:
            write_state(path, tensors, roles, plan=plan)
            sha256 = digest_of(path)
            if self._blobs.has(sha256):
                known.add(sha256)
            adopt_file(self._blobs, path, sha256)
            return sha256.hex()
        finally:
            path.unlink(missing_ok=True)

    def _write_unsynced(self, sha256: bytes, data: bytes) -> None:
        """Write a small blob without a sync, for readers of files; a row makes it durable."""
        disk, path = self._blobs.disk, self._blobs.partial / f"{UNFINISHED}{secrets.token_hex(8)}"
        try:
            with disk.create(path) as file:
                file.write(data)
            disk.replace(path, self._blobs.path(sha256))
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise refusal(error, f"could not write a state: {error}") from error
            raise

    async def exchange(
        self, record: RunRecord, projection: RunProjection, order: Exchange
    ) -> MakeEvent:
        """See `live.Worker`."""
        return await self._masked.exchange(record, projection, order)

    def arrived(self, record: RunRecord, projection: RunProjection, devices: Sequence[str]) -> None:
        """See `live.Worker`."""
        self._masked.arrived(record, projection.state, devices)

    async def judged(self, record: RunRecord, projection: RunProjection, order: Judged) -> None:
        """See `live.Worker`: scores are in the projection already."""

    async def finish(self, record: RunRecord, projection: RunProjection) -> tuple[MakeEvent, Write]:
        """See `live.Worker`."""
        prepared, spec = record.prepared, record.spec
        assert prepared is not None
        version = await self._registry.version(spec.model)
        model = self._blobs.find(version.blob)
        state = self._blobs.find(bytes.fromhex(projection.state.shared))
        last = {bytes.fromhex(projection.state.shared), record.slots} - {b""}
        # `write` below deletes the rows that could restore these files.
        await asyncio.to_thread(self._make_durable, last)
        from triplane.unified_ir.federated.algorithms.plan import PRIVACY_KEY

        spent = await asyncio.to_thread(spent_by, spec, projection.state)
        meta = {} if spent is None else {PRIVACY_KEY: json.dumps(spent.to_json())}
        finishing = self._children.finish(model, spec, state, prepared.plan_digest, meta)
        async with finishing as finished:
            blob = await asyncio.to_thread(self._blobs.put_file, finished.path)
        await claim(self._db, self._blobs, {blob})
        push = Push(
            model=version.model,
            blob=blob,
            # A key derived from the run makes the push idempotent: if a crash repeats `finish`, no
            # second version is registered.
            key=hashlib.sha256(f"federated run {record.id}".encode()).digest()[:KEY_BYTES],
            aliases=(spec.alias,) if spec.alias else (),
            recipe=version.recipe,
            lineage=Lineage(
                parent=str(version),
                source=f"federated run {record.id}",
                note=f"{algorithm_text(spec)}, {projection.state.plan.rounds} rounds, population "
                f"{spec.population}" + ("" if spent is None else f"; {spent.text}"),
            ),
        )

        def write(connection: sa.Connection, _: RunProjection) -> bool:
            journal.save_small_states(connection, record.id, {})
            registered = self._registry.insert(connection, push, finished.digest, record.started_by)
            journal.change(connection, record.id, result=str(registered))
            return True

        return _finished, write

    def settled(
        self, old: RunRecord, new: RunRecord, before: RunProjection, after: RunProjection
    ) -> None:
        """See `live.Worker`: removes what a closed round leaves."""
        ends = after.state.phase in ENDED
        if new.spec.HasField("noise") and (ends or after.state.charged > before.state.charged):
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, self._note_published, new, after.state)
        closed = before.state.round
        if closed is None or turn_of(closed) == turn_of(after.state.round):
            return
        updates = self._updates.forget(closed.leases)
        self._masked.forget_before(new.id, turn_of(after.state.round))
        stale = references(old, before) - references(new, after)
        if self._shares_plan(new):
            stale = frozenset()  # the other run may publish the same bytes; `collect` looks again
        # After the commit, so that an error only leaves files behind.
        asyncio.get_running_loop().run_in_executor(None, self._drop, new.id, updates, stale)

    def _note_published(self, record: RunRecord, state: RunState) -> None:
        privacy = privacy_of(record.spec)
        assert privacy is not None
        try:
            if state.phase in ENDED:
                self.noise.forget(record.id)
            else:
                self.noise.note_published(record.id, state.charged, privacy.bands)
        except (OSError, TriplaneError):
            logger.exception("noise stays", extra={"run_id": record.id})

    def _drop(self, run: str, updates: Iterable[bytes], stale: Iterable[bytes]) -> None:
        try:
            self._updates.remove(updates)
            for sha256 in stale:
                self._blobs.remove(sha256)
        except (OSError, TriplaneError):
            logger.exception("old files stay", extra={"run_id": run})


def _finished(now: RunState, at_s: float) -> Finished | None:
    return Finished(at_s=at_s) if now.phase is Phase.FINISHING else None


def reduced_event(order: Reduce, shared: str, scaled: int = 0, **fields: Any) -> MakeEvent:
    """Return the event of a round's next state, unless the run has left that round.

    fields: others of `Reduced`.
    """

    def make(now: RunState, at_s: float) -> Reduced | None:
        if now.phase is not Phase.REDUCING or now.turn[0] != order.number:
            return None
        return Reduced(at_s=at_s, number=order.number, shared=shared, scaled=scaled, **fields)

    return make


def algorithm_text(spec: pb.Spec) -> str:
    """Describe the algorithm, and the strategy that decided the rounds."""
    if not spec.HasField("flower"):
        return spec.algorithm
    flower = spec.flower
    pinned = f" of file {flower.sha256.hex()[:16]}" if flower.sha256 else ""
    work = "ClientApp" if flower.app else spec.algorithm
    return f"{flower.strategy}{pinned} of flwr {flower.version} over {work}"


def adopt_file(blobs: BlobFolder, path: Path, sha256: bytes) -> None:
    """Make a durable file on the same file system the blob of its digest."""
    if not blobs.has(sha256):
        blobs.disk.replace(path, blobs.path(sha256))
        blobs.disk.sync_folder(blobs.folder)
    elif blobs.find(sha256).stat().st_size != path.stat().st_size:
        raise Corrupt(f"blob {sha256.hex()} has another size than its bytes; restore a backup")

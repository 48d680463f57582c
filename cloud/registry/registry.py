"""Models, versions, aliases, and bundles that are converted on demand.

Invariants: a version never changes, and no number is used twice; what a call returned is on the
disk; a bundle that was requested becomes READY or FAILED, even if processes die meanwhile, because
the request itself is a row, and `start` continues unfinished rows.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from triplane.cloud.identity import audit
from triplane.cloud.registry import queries
from triplane.cloud.registry.collecting import claim
from triplane.cloud.registry.conversions import Conversions, Files
from triplane.cloud.registry.names import Reference, check_alias
from triplane.cloud.registry.values import (
    BundleRecord,
    ConversionRecipe,
    Model,
    Push,
    State,
    Version,
)
from triplane.cloud.store import Database
from triplane.cloud.tasks import BackgroundTasks
from triplane.proto.blobs import BlobFolder, digest_of
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.proto.targets import SignedTarget

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 3
"""Attempts at one bundle; after so many that died, it has failed."""
DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
STOPPING: Final = "the cloud is stopping; the conversion continues when it runs again"
SYSTEM: Final = "cloud"
"""Actor in the audit log of changes that the cloud makes by itself."""

Key = tuple[str, int, str]
"""(model, version, target)."""


class Registry:
    """The registry of one cloud. Asynchronous methods belong to one event loop.

    clock: seconds since 1970.
    """

    def __init__(
        self,
        db: Database,
        blobs: BlobFolder,
        conversions: Conversions,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.blobs = blobs
        self._db, self._conversions = db, conversions
        self._clock = clock
        self._tasks = BackgroundTasks()  # conversions under way, by key of their bundle
        self._listeners: list[Callable[[BundleRecord], None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Continue the conversions that an earlier process left unfinished."""
        unfinished = await self._db.read(lambda c: queries.in_state(c, State.CONVERTING))
        for bundle in unfinished:
            await self._begin_again(bundle)

    async def stop(self) -> None:
        """End the children; after `start`, their conversions begin again."""
        self._stopping = True
        await self._tasks.stop()

    async def push(self, push: Push, *, by: str) -> Version:
        """Register an uploaded model file as the next version; the same key gives the same one.

        NotFound: a blob was not uploaded, or no such parent. Conflict: the key made another version
        before. Corrupt, InvalidInput: the file is damaged, or it or its samples break a rule.
        """
        known = await self._db.read(lambda connection: queries.version_of_push(connection, push))
        if known is not None:
            return known
        # A damaged copy is dropped, so that `claim` reports it as missing and the client uploads
        # again.
        for blob in (push.blob, *push.recipe.blobs):
            await asyncio.to_thread(self.blobs.drop_damaged, blob)
        await claim(self._db, self.blobs, {push.blob, *push.recipe.blobs})
        files = self._files(push.model, push.blob, push.recipe)
        # Outside the transaction: a check takes up to minutes and would block all writers.
        digest = await self._conversions.check(files)
        version = await self._db.write(lambda connection: self.insert(connection, push, digest, by))
        logger.info(
            "version registered", extra={"model": version.model, "version": version.version}
        )
        return version

    def insert(self, connection: Connection, push: Push, digest: bytes, by: str) -> Version:
        """Register a model in the caller's transaction, such as one that the cloud itself made.

        digest: its root digest. The same key gives the same version, as for `push`.
        """
        # Again inside the writer: a repeated request may have been registered during the check.
        known = queries.version_of_push(connection, push)
        if known is not None:
            return known
        # Looked up again inside the one writer, where blobs are collected too.
        size = self._files(push.model, push.blob, push.recipe).model.stat().st_size
        now_s = self._clock()
        version = queries.insert(connection, push, digest=digest, size=size, now_s=now_s, by=by)
        # The upload replaced damaged copies of these files, so what failed on them may succeed now.
        queries.allow_again(connection, {push.blob, *push.recipe.blobs})
        details = {"model_digest": digest.hex(), "aliases": sorted(set(push.aliases))}
        audit.record(connection, self._clock(), by, "registry.push", str(version), details)
        return version

    async def version(self, reference: str) -> Version:
        """Return the version that `reference` means now, with its bundles.

        If a bundle's file was lost or damaged, this begins its conversion again (CONVERTING).
        """
        parsed = Reference.parse(reference)
        version = await self._db.read(lambda connection: queries.get(connection, parsed))
        outdated = [bundle for bundle in version.bundles if await self._is_outdated(bundle)]
        if not outdated or self._stopping:
            return version
        for bundle in outdated:
            await self._begin(bundle.key)
        return await self._db.read(
            lambda connection: queries.get(connection, Reference(version.model, version.version))
        )

    async def models(self) -> list[Model]:
        """Return all models, by name."""
        return await self._db.read(queries.models)

    async def versions(self, model: str, *, size: int = 0, before: int = 0) -> list[Version]:
        """Return at most `size` versions (0: 100) below `before` (0: all), newest first."""
        if not 0 <= size <= MAX_PAGE:
            raise InvalidInput(f"a page has 1 to {MAX_PAGE} versions, got {size}")
        parsed = Reference.parse(model)
        return await self._db.read(
            lambda connection: queries.page(connection, parsed.model, size or DEFAULT_PAGE, before)
        )

    async def set_alias(self, model: str, alias: str, version: int, *, by: str) -> Model:
        """Set `alias` to `version`; 0 removes it."""
        parsed = Reference.parse(model)
        check_alias(alias)

        def work(connection: Connection) -> Model:
            queries.point(connection, parsed.model, alias, version)
            details = {"alias": alias, "version": version}
            audit.record(connection, self._clock(), by, "registry.alias", parsed.model, details)
            return queries.model(connection, parsed.model)

        return await self._db.write(work)

    async def bundle(self, model: str, version: int, target: str) -> BundleRecord:
        """Return the bundle in its current state; starts its conversion, also after a child died.

        If its file was lost or damaged, it is converted again, to the same bytes. NotFound: no such
        version or target.
        """
        key = (model, version, target)
        stored = await self._db.read(lambda connection: queries.bundle(connection, *key))
        if stored is None:
            await asyncio.to_thread(_check_target, target)
        if stored is not None and (key in self._tasks.running or not await self._may_begin(stored)):
            return stored
        return await self._begin(key)

    async def wait_bundle(self, model: str, version: int, target: str) -> BundleRecord:
        """Wait until the bundle is READY or FAILED; see `bundle`. Use it within a timeout."""
        asked = await self.bundle(model, version, target)
        if asked.state is not State.CONVERTING:
            return asked
        task = self._tasks.running.get((model, version, target))
        if task is not None:
            # `wait` does not cancel the task if this caller gives up: others may wait for the
            # bundle.
            await asyncio.wait([task])
        if self._stopping:
            raise Unavailable(STOPPING)
        stored = await self._db.read(
            lambda connection: queries.bundle(connection, model, version, target)
        )
        assert stored is not None
        return stored

    def on_bundle(self, callback: Callable[[BundleRecord], None]) -> None:
        """Call `callback` in the event loop after a bundle became READY or FAILED or was signed."""
        self._listeners.append(callback)

    async def mark_signed(
        self, model: str, version: int, target: str, path: str, *, by: str = SYSTEM
    ) -> BundleRecord:
        """Record the path of the published signed target. Conflict: the bundle is not READY."""

        def work(connection: Connection) -> tuple[BundleRecord, bool]:
            before = queries.bundle(connection, model, version, target)
            signed = self._sign(connection, (model, version, target), path, by)
            return signed, signed != before

        signed, is_changed = await self._db.write(work)
        if is_changed:
            self._tell(signed)
        return signed

    async def note_signed(self, signed: Mapping[Key, SignedTarget]) -> list[BundleRecord]:
        """Update the signed path of every finished bundle; return those that changed.

        signed: all signed targets, by (model, version, target). One counts if its bytes are those
        of the bundle. A bundle without one, for example after a change of keys, becomes unsigned.
        """

        def work(connection: Connection) -> list[BundleRecord]:
            return [
                self._sign(connection, bundle.key, path, SYSTEM)
                for bundle in queries.in_state(connection, State.READY)
                if (path := _path_for(bundle, signed)) != bundle.signed_path
            ]

        changed = await self._db.write(work)
        for bundle in changed:
            self._tell(bundle)
        return changed

    def _sign(self, connection: Connection, key: Key, path: str, by: str) -> BundleRecord:
        """Record the path and audit it, unless it is recorded.

        A publication and a rollout that waits for it both notice the same signature.
        """
        before = queries.bundle(connection, *key)
        signed = queries.sign(connection, *key, path)
        if signed != before:
            details = {"path": path}
            audit.record(connection, self._clock(), by, "registry.signed", str(signed), details)
        return signed

    def _files(self, name: str, blob: bytes, recipe: ConversionRecipe) -> Files:
        return Files(
            name=name,
            model=self.blobs.find(blob),
            recipe=recipe,
            calibration=self._blob_path(recipe.calibration),
            evaluation=self._blob_path(recipe.evaluation),
        )

    def _blob_path(self, blob: bytes) -> Path | None:
        return self.blobs.find(blob) if blob else None

    async def _may_begin(self, bundle: BundleRecord) -> bool:
        """Return whether the conversion of a requested bundle may begin again now."""
        if bundle.state is State.READY:
            return await self._is_outdated(bundle)
        if bundle.state is State.CONVERTING:
            return True
        begun, may_retry = await self._db.read(lambda c: queries.attempts(c, bundle))
        if begun == 0:
            return await self._is_outdated(bundle)
        return may_retry and begun < MAX_ATTEMPTS

    async def _is_outdated(self, bundle: BundleRecord) -> bool:
        """Return whether its state is out of date: its file is lost, or lost inputs are back."""
        if bundle.key in self._tasks.running:
            return False
        if bundle.state is State.READY:
            return await asyncio.to_thread(self.blobs.is_lost, bundle.blob)
        if bundle.state is State.CONVERTING:
            return False
        begun, _ = await self._db.read(lambda c: queries.attempts(c, bundle))
        return begun == 0 and not await self._lost_input(bundle)

    async def _lost_input(self, bundle: BundleRecord, *, reread: bool = False) -> str:
        """Return the first lost or damaged input of this bundle's conversion; empty if none."""
        version = await self._version_of(bundle)
        named = {
            "model file": version.blob,
            "calibration samples": version.recipe.calibration,
            "evaluation samples": version.recipe.evaluation,
        }
        for what, blob in named.items():
            if not blob:
                continue
            is_lost = await asyncio.to_thread(self.blobs.is_lost, blob, reread=reread)
            if is_lost:
                return what
        return ""

    async def _version_of(self, bundle: BundleRecord) -> Version:
        reference = Reference(bundle.model, bundle.version)
        return await self._db.read(lambda connection: queries.get(connection, reference))

    async def _begin(self, key: Key) -> BundleRecord:
        if self._stopping:
            raise Unavailable(STOPPING)
        asked = await self._db.write(lambda connection: self._ask(connection, key))
        if asked.state is State.CONVERTING:
            self._convert(asked)
        return asked

    def _ask(self, connection: Connection, key: Key) -> BundleRecord:
        """Return the bundle, set to CONVERTING if it must begin; decided in the one writer."""
        model, version, target = key
        queries.number(connection, Reference(model, version))
        stored = queries.bundle(connection, *key)
        is_remade = False
        if stored is not None:
            begun, may_retry = queries.attempts(connection, stored)
            # Decided in the writer, so that two callers cannot start the same conversion.
            is_remade = stored.state is State.READY and not self.blobs.has(stored.blob)
            is_retried = stored.state is State.FAILED and may_retry and begun < MAX_ATTEMPTS
            if not is_remade and not is_retried:
                return stored
        if is_remade:
            logger.error("lost bundle is made again", extra={"bundle": str(stored)})
        queries.start(connection, model, version, target, is_remade=is_remade)
        begun_now = queries.bundle(connection, *key)
        assert begun_now is not None
        return begun_now

    async def _begin_again(self, left: BundleRecord) -> None:
        """Convert what a stopped cloud had begun, unless it seems to stop the cloud every time."""

        def work(connection: Connection) -> bool:
            begun, _ = queries.attempts(connection, left)
            # Attempts are counted before they begin, so a model that kills the whole cloud is
            # noticed, too.
            if begun >= MAX_ATTEMPTS:
                reason = f"its conversion was begun {begun} times, and the cloud ended each time"
                queries.finish(connection, _failed_record(left, reason))
                return False
            queries.start(connection, *left.key)
            return True

        if await self._db.write(work):
            self._convert(left)

    def _convert(self, asked: BundleRecord) -> None:
        if asked.key in self._tasks.running or self._stopping:
            return
        self._tasks.spawn(self._run_conversion(asked), f"convert {asked}", key=asked.key)

    async def _run_conversion(self, asked: BundleRecord) -> None:
        started_s = time.monotonic()
        may_retry = is_input_lost = False
        report = b""
        try:
            outcome, report = await self._make(asked)
        except _InputLost as error:
            outcome, is_input_lost = _failed_record(asked, str(error)), True
        except TriplaneError as error:
            outcome, may_retry = _failed_record(asked, str(error)), isinstance(error, Unavailable)
        except Exception as error:
            logger.exception("conversion failed", extra={"bundle": str(asked)})
            outcome = _failed_record(
                asked, f"internal error: {type(error).__name__}; see the cloud's log"
            )

        def work(connection: Connection) -> BundleRecord:
            # Looked up inside the one writer, where blobs are collected too.
            is_lost = outcome.state is State.READY and not self.blobs.has(outcome.blob)
            ended = (
                _failed_record(asked, "its file was collected meanwhile") if is_lost else outcome
            )
            queries.finish(
                connection, ended, may_retry=may_retry or is_lost, is_input_lost=is_input_lost
            )
            if ended.state is State.READY:
                queries.keep_report(connection, ended, report)
            details = {"state": ended.state.name, "reason": ended.reason}
            audit.record(connection, self._clock(), SYSTEM, "registry.bundle", str(ended), details)
            return ended

        outcome = await self._db.write(work)
        seconds = time.monotonic() - started_s
        facts = {"bundle": str(outcome), "state": outcome.state.name, "seconds": seconds}
        logger.info("bundle finished", extra=facts)
        self._tell(outcome)

    async def _make(self, asked: BundleRecord) -> tuple[BundleRecord, bytes]:
        """Convert; return the finished bundle and its report."""
        version = await self._version_of(asked)
        # Read the inputs once more: converting damaged samples would give a wrong bundle.
        if lost := await self._lost_input(asked, reread=True):
            raise _InputLost(_lost_text(lost, version))
        files = self._files(version.model, version.blob, version.recipe)
        kept = b""
        if asked.blob:
            kept = await self._db.read(lambda connection: queries.report(connection, asked))
        async with self._conversions.convert(
            files,
            version=version.version,
            target=asked.target,
            model_digest=version.model_digest,
            report=kept,
        ) as converted:
            # A signed bundle that was lost must come back with the same bytes, or its signature is
            # invalid.
            if asked.blob and await asyncio.to_thread(digest_of, converted.path) != asked.blob:
                raise Conflict(_differs_text(asked))
            blob = await asyncio.to_thread(self.blobs.put_file, converted.path)
        ready = replace(
            asked,
            state=State.READY,
            reason="",
            blob=blob,
            size=converted.size,
            root_digest=converted.root_digest,
            content_digest=converted.content_digest,
            needs=converted.needs,
        )
        return ready, converted.report

    def _tell(self, bundle: BundleRecord) -> None:
        for callback in self._listeners:
            try:
                callback(bundle)
            except Exception:
                logger.exception("a listener failed", extra={"bundle": str(bundle)})


class _InputLost(Corrupt):
    """An input of the conversion is missing in the cloud, or damaged."""


def _lost_text(what: str, version: Version) -> str:
    option = {"calibration samples": " --calibrate FILE", "evaluation samples": " --evaluate FILE"}
    return (
        f"the cloud's copy of the {what} is lost or damaged; push the same file again: "
        f"triplane registry push MODEL.tpm --name {version.model}{option.get(what, '')}"
    )


def _differs_text(asked: BundleRecord) -> str:
    return (
        f"its file {asked.blob.hex()[:16]}... was lost or damaged in the cloud, and the present "
        "converter makes other bytes of the same model, which are not signed; push the model as a "
        f"new version: triplane registry push MODEL.tpm --name {asked.model}"
    )


def _path_for(bundle: BundleRecord, signed: Mapping[Key, SignedTarget]) -> str:
    target = signed.get(bundle.key)
    if target is None or (target.sha256, target.length) != (bundle.blob, bundle.size):
        return ""
    return target.path


def _check_target(name: str) -> None:
    """Raise NotFound for an unknown target. The slow import of the converter is done only here."""
    from triplane.unified_ir.convert.targets import target_row

    target_row(name)


def _failed_record(asked: BundleRecord, reason: str) -> BundleRecord:
    return replace(asked, state=State.FAILED, reason=reason)

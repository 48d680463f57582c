"""Periodic work of the cloud: sign metadata again, remove old blobs, renew its certificate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

from triplane.cloud.home import Home, one_renews
from triplane.cloud.identity import audit
from triplane.cloud.identity.principals import Principals
from triplane.cloud.registry import Registry
from triplane.cloud.registry.collecting import Stored, collect
from triplane.cloud.roots import audit_removals, roots_of
from triplane.cloud.store import Database
from triplane.cloud.tasks import BackgroundTasks
from triplane.cloud.trust import MetadataRepository
from triplane.cloud.trust.expiring import due
from triplane.cloud.trust.repository import MAX_OVERTAKEN
from triplane.proto.blobs import BlobFolder
from triplane.proto.disk import write_atomic
from triplane.proto.errors import TriplaneError
from triplane.proto.identity import (
    IdentityFolder,
    certificate_of,
    certificate_pem,
    certificate_request,
    key_pem,
    needs_renewal,
    new_key,
)

logger = logging.getLogger(__name__)

FRESH_AT_LEAST_S: Final = 60.0
"""Shortest time between two checks of the metadata, unless a publication causes one."""
FRESH_AT_MOST_S: Final = 3600.0
"""Longest time between two checks of the metadata."""
WARN_EVERY_S: Final = 86_400.0
OVERTAKE_EVERY_S: Final = 60.0
"""Shortest time between two increases of metadata versions for nodes that have seen higher ones."""
RAISED_EVERY_S: Final = 86_400.0
"""Time in which all such increases together are at most `MAX_OVERTAKEN`."""
OPERATOR_LOOK_S: Final = 6 * 3600.0
COLLECT_FIRST_S: Final = 3600.0
COLLECT_EVERY_S: Final = 86_400.0
COLLECT_AGE_S: Final = 7 * 86_400.0
"""Age at which unreferenced blobs are removed: an interrupted upload may be resumed until then."""


class MetadataUpkeep:
    """Keeps signed metadata fresh, and the registry informed about signatures."""

    def __init__(
        self,
        repository: MetadataRepository,
        registry: Registry,
        database: Database,
        tasks: BackgroundTasks,
        clock: Callable[[], float],
    ) -> None:
        self._repository, self._registry, self._database = repository, registry, database
        self._tasks, self._clock = tasks, clock
        self._noting = asyncio.Lock()
        self._published = asyncio.Event()
        self._warned_s = self._overtook_s = self._raised_since_s = -math.inf
        self._raised = 0

    def start(self) -> None:
        """Begin to sign metadata again before it expires."""
        self._tasks.spawn(self._keep_fresh(), "metadata freshness")

    def note_publication(self) -> None:
        """Handle a new version of a role."""
        self._published.set()
        self._tasks.spawn(self.note_signed(), "signatures")

    async def note_signed(self) -> None:
        """Record in the registry which bundles are signed."""
        # One at a time, and each reads the newest signatures: an older result never overwrites a
        # newer one.
        async with self._noting:
            try:
                signed = await asyncio.to_thread(self._repository.signed_bundles)
                await self._registry.note_signed(signed)
            except TriplaneError:
                logger.exception("signatures were not recorded; the next publication tries again")

    def note_seen(self, name: str, seen: Mapping[str, int], sha256: bytes) -> None:
        """Raise metadata versions if a machine has seen higher ones, since it rejects lower ones.

        seen: the versions by role; sha256: of its timestamp.
        """
        now_s = self._clock()
        seen = {role: seen[role] for role in self._repository.versions() if role in seen}
        # A machine that lies about versions could otherwise make the cloud sign all the time.
        if now_s - self._overtook_s < OVERTAKE_EVERY_S:
            return
        if self._repository.is_behind(seen, sha256):
            self._overtook_s = now_s
            facts = {"machine": name, "seen": seen, "ours": self._repository.versions()}
            logger.warning("a machine has seen newer metadata; was a backup restored?", extra=facts)
            if self._may_follow(self._repository.lead(seen), now_s):
                self._tasks.spawn(self._overtake(name, seen), "numbers after a restore")

    def _may_follow(self, lead: int, now_s: float) -> bool:
        """Return whether versions may rise that far today, and count it.

        Any device can claim to have seen higher ones, again and again. A jump of a million between
        two refreshes would lock machines out (`proto.signed.metadata.MAX_VERSION_JUMP`).
        """
        if now_s - self._raised_since_s > RAISED_EVERY_S:
            self._raised_since_s, self._raised = now_s, 0
        if self._raised + lead > MAX_OVERTAKEN:
            return False
        self._raised += lead
        return True

    async def _overtake(self, name: str, seen: Mapping[str, int]) -> None:
        try:
            if not await asyncio.to_thread(self._repository.overtake, seen):
                return
            now_s, after = self._clock(), self._repository.versions()
            await self._database.write(
                lambda connection: audit.record(
                    connection, time_s=now_s, actor="cloud", action="metadata.overtake",
                    subject=name, details={"seen": dict(seen), "published": after},
                )
            )  # fmt: skip
        except (TriplaneError, OSError):
            logger.exception("the numbers of signed metadata were not raised")

    async def _keep_fresh(self) -> None:
        while True:
            wait_s = FRESH_AT_MOST_S
            try:
                due_s = await asyncio.to_thread(self._repository.keep_fresh)
                wait_s = min(due_s - self._clock(), FRESH_AT_MOST_S)
                self._warn()
            except (TriplaneError, OSError):
                logger.exception("metadata was not signed again")
                wait_s = FRESH_AT_LEAST_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, FRESH_AT_LEAST_S)):
                    await self._published.wait()
            # A publication may have changed which metadata expires first.
            self._published.clear()

    def _warn(self) -> None:
        """Log, once a day, which metadata people must sign again."""
        now_s = self._clock()
        if now_s - self._warned_s < WARN_EVERY_S:
            return
        self._warned_s = now_s
        for what in due(self._repository.expiries(), now_s):
            logger.warning("a signature ends", extra={"what": what})


class BlobCollection:
    """Removes blobs that nothing references."""

    def __init__(
        self,
        database: Database,
        blobs: BlobFolder,
        repository: MetadataRepository,
        clock: Callable[[], float],
    ) -> None:
        self._database, self._blobs = database, blobs
        self._repository, self._clock = repository, clock

    async def collect(self, older_than_s: float) -> tuple[Stored, ...]:
        """Remove unreferenced blobs that were not written or claimed for that time."""
        return await collect(
            self._database,
            self._blobs,
            roots_of(self._repository),
            older_than_s=older_than_s,
            clock=self._clock,
            on_removed=audit_removals(self._clock()),
        )

    async def run(self) -> None:
        """Once a day, remove interrupted uploads and samples of old policies after a week."""
        wait_s = COLLECT_FIRST_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = COLLECT_EVERY_S
            try:
                removed = await self.collect(COLLECT_AGE_S)
            except (TriplaneError, OSError):
                logger.exception("blobs were not collected")
            else:
                size = sum(blob.size for blob in removed)
                logger.info("blobs collected", extra={"blobs": len(removed), "bytes": size})


class OperatorIdentity:
    """The first operator's identity in the cloud's own home: its address, and its renewal."""

    def __init__(self, home: Home, principals: Principals, clock: Callable[[], float]) -> None:
        self._path, self._principals, self._clock = home.operator, principals, clock

    def record_address(self, address: str) -> None:
        """Write the address that this process listens on into the identity."""
        # The port may have changed since the last start.
        path, line = self._path / "cloud", f"{address}\n".encode()
        if path.is_file() and path.read_bytes() != line:
            write_atomic(path, line)

    async def run(self) -> None:
        """Renew the certificate in time, so that the operator is never locked out."""
        folder = IdentityFolder(self._path)
        while True:
            try:
                if needs_renewal(folder, self._clock()):
                    # `triplane cloud` on this machine renews the same identity, and key and
                    # certificate are two files.
                    with one_renews(folder):
                        await self._renew(folder)
                    logger.info("operator's certificate renewed", extra={"principal": folder.name})
            except (TriplaneError, OSError) as error:  # the identity was moved away, or revoked
                logger.info("no operator's identity is kept here", extra={"reason": str(error)})
            await asyncio.sleep(OPERATOR_LOOK_S)

    async def _renew(self, folder: IdentityFolder) -> None:
        key = new_key()
        der = await self._principals.renew(folder.name, certificate_request(key))
        await asyncio.to_thread(
            folder.save,
            authority=folder.authority_pem,
            certificate=certificate_pem(certificate_of(der, "our own certificate")),
            key=key_pem(key),
            cloud=folder.cloud,
        )

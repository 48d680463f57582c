"""The agent process: a session with the cloud, the reconciler in a thread, reports, renewal.

The process may be killed at any instant. Serving goes on without it, and the next agent finds the
identity, the desired document, the pointers and the journal on disk.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from triplane.edge.agent.attempt import AttemptContext
from triplane.edge.agent.capability import capability
from triplane.edge.agent.journal import Journal
from triplane.edge.agent.reconciler import Reconciler, report
from triplane.edge.agent.seam import Seam
from triplane.edge.home import NodeHome, NodeSettings
from triplane.proto import fleet_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.channels import connect, connect_aio
from triplane.proto.errors import TriplaneError, Unavailable
from triplane.proto.identity import needs_renewal, renew
from triplane.proto.signals import Termination
from triplane.proto.signed.metadata import fetch_over
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import Trust
from triplane.proto.stream import SessionClient
from triplane.proto.transfer import Pace, download

logger = logging.getLogger(__name__)

REPORT_S: Final = 15.0
"""Time between two reports if nothing changes."""
SETTLE_S: Final = 0.1
"""Changes within this time go into one report."""
RENEWAL_LOOK_S: Final = 3600.0
STOP_S: Final = 8.0
"""Longest time from a signal to the end. The supervisor waits longer; a kill loses nothing."""


class Agent:
    """One run of the agent."""

    def __init__(self, home: NodeHome) -> None:
        home.require_enrolled()
        home.make()
        self._home, self._settings = home, home.settings
        self._pace = _pace(self._settings)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: SessionClient | None = None
        self._trust = Trust(home.trust, self._metadata)
        self._seam = Seam(home.control_socket)
        self._channel: grpc.Channel | None = None
        self._certificate = b""
        self._channel_lock = threading.Lock()
        blobs = BlobFolder(home.bundles, max_bytes=self._settings.max_disk_bytes)
        context = AttemptContext(
            node=home.identity.name,
            targets=tuple(capability(home.path, self._settings.targets).targets),
            home=home,
            blobs=blobs,
            trust=self._trust,
            seam=self._seam,
            fetch=self._fetch,
            journal=Journal(home.journal),
            incident=self._incident,
            probation_s=self._settings.probation_s,
        )
        self._reconciler = Reconciler(context, self._note_change)

    async def run(self) -> None:
        """Work until SIGTERM or SIGINT."""
        self._loop = loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        termination = Termination(lambda: loop.call_soon_threadsafe(stopped.set), limit_s=STOP_S)
        # A thread of its own, because it calls synchronous gRPC, hashes files and waits for
        # children; heartbeats of the session must go on meanwhile.
        reconciling = asyncio.create_task(asyncio.to_thread(self._reconciler.run))
        session = self._session = SessionClient(
            lambda: connect_aio(self._home.identity), self._on_message, software="triplane"
        )
        tasks = [
            asyncio.create_task(work)
            for work in (session.run(), self._report(session), self._renew())
        ]
        logger.info("agent started", extra={"node": self._home.identity.name})
        try:
            waiting = asyncio.create_task(stopped.wait())
            done, _ = await asyncio.wait(
                {waiting, reconciling, *tasks}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done - {waiting}:
                task.result()  # an unexpected error ends the process; the supervisor restarts it
        finally:
            termination.request()
            for task in tasks:
                task.cancel()
            # A thread cannot be cancelled: ask it to end, then wait for it together with the tasks.
            self._reconciler.stop()
            await asyncio.gather(reconciling, *tasks, return_exceptions=True)

    async def _on_message(self, message: object) -> None:
        if isinstance(message, pb.Desired):
            assert self._session is not None
            # Returns when the document is on the disk; only then does the session acknowledge it.
            await asyncio.to_thread(self._reconciler.take, message, self._session.peer_epoch)

    def _note_change(self) -> None:
        """Note, from any thread, that there is something new to report."""
        if self._loop:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)

    def _incident(self, refusal: AttemptRefused) -> None:
        self._reconciler.incident(refusal)

    async def _report(self, session: SessionClient) -> None:
        while True:
            # Before the report is made: a later change sets the event again and is reported next.
            self._changed.clear()
            message = await asyncio.to_thread(self._current_report)
            await session.send(message)
            # Only what this report contained: others may have been added while it was sent.
            self._reconciler.drop_reported(message.incidents)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._changed.wait()
                await asyncio.sleep(SETTLE_S)

    def _current_report(self) -> pb.Report:
        verified_s = self._trust.verified_s
        age_s = max(0.0, time.time() - verified_s) if verified_s >= 0 else -1.0
        try:
            self._seam.versions()
            up = True
        except Unavailable:
            up = False
        return report(
            self._reconciler,
            capability(self._home.path, self._settings.targets),
            metadata_age_s=age_s,
            serving_up=up,
            serving_address=f"{self._settings.host}:{self._settings.port}",
            metadata_versions=self._trust.versions(),
            metadata_sha256=self._trust.digest(),
        )

    async def _renew(self) -> None:
        while True:
            if needs_renewal(self._home.identity, time.time()):
                try:
                    await asyncio.to_thread(renew, self._home.identity)
                    logger.info("certificate renewed")
                except TriplaneError as error:
                    logger.warning("certificate not renewed", extra={"reason": str(error)})
            await asyncio.sleep(RENEWAL_LOOK_S)

    def _metadata(self, name: str) -> bytes:
        return fetch_over(self._open_channel())(name)

    def _fetch(
        self, sha256: bytes, size: int, into: BlobFolder, progress: Callable[[int, int], None]
    ) -> Path:
        return download(self._open_channel(), sha256, size, into, progress, pace=self._pace)

    def _open_channel(self) -> grpc.Channel:
        """Return the channel of the present certificate, which a renewal or enrolment replaces."""
        # Read for each use, because `triplane edge enrol` in another process may have replaced it.
        certificate = self._home.identity.certificate_pem
        with self._channel_lock:
            old = self._channel
            if old is not None and certificate == self._certificate:
                return old
            self._certificate = certificate
            self._channel = channel = connect(self._home.identity)
        if old is not None:
            # Outside the lock: a call on the old channel ends with an error and is repeated on the
            # new one.
            old.close()
        return channel


def _pace(settings: NodeSettings) -> Pace:
    chosen = {name: getattr(settings, name) for name in ("min_bytes_per_s", "patience_s")}
    return Pace(**{name: value for name, value in chosen.items() if value is not None})

"""Devices with an open stream: their offers, their work, their contributions and files.

A device is a member of each live run of its population. It is sent one document: a task for each
open lease, oldest run first, and the settlements of its newest contributions. It may download the
blobs of its open tasks, and upload the updates for its open leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from triplane.cloud.federation import messages
from triplane.cloud.federation.flower.runs import FlowerRuns
from triplane.cloud.federation.live import CONTRIBUTIONS, LiveRun, MakeEvent
from triplane.cloud.federation.live_runs import LiveRuns
from triplane.cloud.federation.masked_answers import judge_answer, without_left
from triplane.cloud.federation.masked_cohorts import MaskedCohorts
from triplane.cloud.federation.preparation import Preparation
from triplane.cloud.federation.presence import Presence
from triplane.cloud.federation.recovery import Recovery
from triplane.cloud.federation.spec import check_population
from triplane.cloud.federation.update_store import (
    LEASE_BYTES,
    UpdateStore,
    bytes_in,
    printable,
    wrong_base,
)
from triplane.cloud.federation.work_documents import WorkDocuments
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.run import (
    Event,
    Joined,
    Left,
    RunState,
)

logger = logging.getLogger(__name__)

MAX_RUN_CHARS: Final = 64
MAX_SOFTWARE_CHARS: Final = 200
MAX_EXAMPLES: Final = 1 << 32
"""Largest number of examples that one device may offer."""
WAITS_S: Final = 0.5
"""Shortest time between two log messages about why a device waits."""

SendWork = Callable[[str, pb.Work], None]
"""Sends a device its document if it has a stream."""


@dataclass(slots=True)
class _Device:
    """A device with an open stream.

    answers: settlements of contributions that no live run settles, by run and lease. log_waits:
    the timer that logs why it waits. is_asked: whether a run asks its population, as last sent.
    """

    offer: pb.Offer | None = None
    log_waits: asyncio.TimerHandle | None = None
    is_asked: bool | None = None
    answers: dict[tuple[str, bytes], pb.Settlement] = field(default_factory=dict)


class DeviceSessions:
    """The `SessionPeer` of devices, and the `Audience` of runs."""

    def __init__(
        self,
        runs: LiveRuns,
        preparation: Preparation,
        recovery: Recovery,
        documents: WorkDocuments,
        updates: UpdateStore,
        *,
        flower: FlowerRuns,
        masked: MaskedCohorts,
        send: SendWork,
    ) -> None:
        self._runs, self._preparation, self._recovery = runs, preparation, recovery
        self._documents, self._updates, self._flower = documents, updates, flower
        self._masked, self._send = masked, send
        self._devices: dict[str, _Device] = {}
        self._presence = Presence(self._write_presence)
        self._on_offer: list[Callable[[str, pb.Offer], None]] = []
        self._looks: set[tuple[str, str]] = set()  # (run, device) whose presence is to be checked

    def stop(self) -> None:
        """Stop recording changes of presence."""
        self._presence.stop()

    def on_offer(self, callback: Callable[[str, pb.Offer], None]) -> None:
        """Call `callback` with each device's name and offer."""
        self._on_offer.append(callback)

    def waiting(self) -> dict[str, str]:
        """Return, by device, the reason that it gave for not being able to work now."""
        offers = {name: device.offer for name, device in self._devices.items()}
        return {name: printable(o.waits) for name, o in offers.items() if o is not None and o.waits}

    # A `SessionPeer`

    def greeting(self, name: str) -> pb.Work:
        """Return the document that a device's new stream begins with.

        Unavailable: a run waits to be taken up. A document without its leases and settlements would
        make devices give up updates that counted.
        """
        self._recovery.check_taken_up()
        self._devices.setdefault(name, _Device())
        return self.work_of(name)

    async def take(self, name: str, message: Any) -> None:
        """Handle a device's message; returns after the commit. InvalidInput: a limit is broken."""
        if isinstance(message, pb.Offer):
            self._take_offer(name, message)
        elif isinstance(message, pb.Contribution):
            await self._take_contribution(name, message)
        else:
            raise InvalidInput("a device sends offers and contributions")

    def left(self, name: str) -> None:
        """Handle the end of the device's stream."""
        device = self._devices.pop(name, None)
        if device and device.log_waits:
            device.log_waits.cancel()
        self._presence.changed(name)

    def _take_offer(self, name: str, offer: pb.Offer) -> None:
        check_population(offer.population)
        if max(offer.examples, offer.held_out) > MAX_EXAMPLES:
            raise InvalidInput(f"a device offers at most {MAX_EXAMPLES} examples")
        if len(offer.software) > MAX_SOFTWARE_CHARS:
            raise InvalidInput(f"software has at most {MAX_SOFTWARE_CHARS} characters")
        offer.waits = printable(offer.waits)
        device = self._devices.setdefault(name, _Device())
        before, device.offer = device.offer, offer
        for callback in self._on_offer:
            callback(name, offer)
        self._presence.changed(name)
        if before is None or before.population != offer.population:
            self.tell(name)
        if offer.waits != (before.waits if before else "") and device.log_waits is None:
            loop = asyncio.get_running_loop()
            # Delayed, and one timer per device: a device may change its reason as often as it
            # likes.
            device.log_waits = loop.call_later(WAITS_S, self._log_waits, name, device)

    def _log_waits(self, name: str, device: _Device) -> None:
        device.log_waits = None
        if device.offer is not None:
            logger.info("device waits", extra={"device": name, "reason": device.offer.waits})
            self._runs.signal_change()

    # Contributions

    async def _take_contribution(self, name: str, contribution: pb.Contribution) -> None:
        if len(contribution.lease) != LEASE_BYTES or len(contribution.run) > MAX_RUN_CHARS:
            raise InvalidInput(f"a lease has {LEASE_BYTES} bytes and a run is named by its id")
        outcome = contribution.WhichOneof("outcome")
        if outcome is None:
            raise InvalidInput(
                "a contribution is an update, a score, an answer to a masked step, or declined"
            )
        run = self._runs.get(contribution.run)
        if run is None or run.is_over:
            await self._settle_late(name, contribution)
            return
        check = self._flower.check_reply if run.record.spec.flower.app else None
        # Judge before the queue, since reading an update takes time. Whether it counts is decided
        # when its event's turn comes, because the round may have closed meanwhile.
        data = b""
        if (refusal := wrong_base(run.projection.state, name, contribution)) is not None:
            make = without_left(run, name, refusal)
        elif outcome == "masked":
            make, data = judge_answer(run, name, contribution, self._masked, self._updates)
        else:
            make = await self._updates.judge(run, name, contribution, check)
            make = without_left(run, name, make)
            if outcome == "update":
                data = bytes_in(contribution.update)
        bytes_down = self._documents.bytes_down(run).get(name, 0)
        # Returns after the commit. The session acknowledges the contribution only then, so a crash
        # before it makes the device send the same bytes again.
        await run.put(_with_bytes_down(make, bytes_down), data)

    async def _settle_late(self, name: str, contribution: pb.Contribution) -> None:
        """Settle a contribution to a run that is over, from the run's last projection."""
        run_id, lease = contribution.run, contribution.lease
        projection = await self._runs.last_projection(run_id)
        member = projection.state.members.get(name) if projection else None
        # Answer even for an unknown run: a device keeps its update until it is settled.
        answer = pb.Settlement(run=run_id, lease=lease, reason="its run is over")
        known = messages.settlements(run_id, member) if member else []
        answers = {(run_id, lease): answer, **{(x.run, x.lease): x for x in known}}
        self._devices.setdefault(name, _Device()).answers = answers
        self.tell(name)

    # Presence

    def _write_presence(self, name: str, spend: Callable[[], None]) -> None:
        """See `Presence`."""
        for run in self._runs.going():
            self._note_presence(run, name, spend)

    def introduce(self, run: LiveRun) -> None:
        """Tell a new run which devices are present; that spends no change of theirs."""
        for name in list(self._devices):
            self._note_presence(run, name, lambda: None)

    def _note_presence(self, run: LiveRun, name: str, spend: Callable[[], None]) -> None:
        """Queue one look of a run at the device, however often it changes until then.

        spend: called with each event, also with one that is retried.
        """
        looks = run.record.id, name
        if looks in self._looks:
            return
        self._looks.add(looks)

        def make(state: RunState, at_s: float) -> Joined | Left | None:
            self._looks.discard(looks)
            event = self._presence_event(run, state, name, at_s)
            if event is not None:
                spend()
            return event

        run.note(make)

    def _presence_event(
        self, run: LiveRun, state: RunState, name: str, at_s: float
    ) -> Joined | Left | None:
        """Return the event of the device's presence; None if the run's state has it already."""
        member, offer = state.members.get(name), self._offer_to(run, name)
        is_there = member is not None and member.connected
        if offer is None:
            return Left(at_s=at_s, device=name) if is_there else None
        examples, held_out = offer.examples, offer.held_out
        if is_there and member and (member.examples, member.held_out) == (examples, held_out):
            return None
        return Joined(at_s=at_s, device=name, examples=examples, held_out=held_out)

    def _offer_to(self, run: LiveRun, name: str) -> pb.Offer | None:
        """Return the device's offer if its stream is open and it belongs to the run's population.

        None also if the run needs a `ClientApp` and the device has none.
        """
        device, spec = self._devices.get(name), run.record.spec
        offer = device.offer if device is not None else None
        if offer is None or spec.population != offer.population or spec.flower.app > offer.app:
            return None
        return offer

    # Files

    def check_readable(self, device: str, blob: bytes) -> None:
        """Raise unless an open task of the device names the blob. InvalidInput, Unavailable."""
        self._recovery.check_taken_up()
        self._documents.check_readable(device, blob)

    async def folder_for(self, device: str, sha256: bytes, size: int) -> BlobFolder:
        """Return the folder for a device's update; see `UpdateStore.admit`. Unavailable."""
        self._recovery.check_taken_up()
        return await self._updates.admit(self._runs.going(), device, sha256, size)

    # Documents

    def tell(self, device: str) -> None:
        """Send the device its work if it has a stream; see `live.Audience`."""
        if device in self._devices:
            self._send(device, self.work_of(device))

    def moved_now(self, *, over: bool) -> None:
        """See `live.Audience`."""
        self._runs.signal_change()
        if over:
            self._runs.signal_end()
            self.tell_whether_asked()

    def work_of(self, name: str) -> pb.Work:
        """Return all open tasks of the device, and the settlements of its contributions."""
        device = self._devices.get(name)
        work = self._documents.work_of(name, device.answers if device else {})
        if device is not None and device.offer is not None:
            device.is_asked = device.offer.population in self._asked_populations()
            work.population_asked = device.is_asked
        return work

    def tell_whether_asked(self) -> None:
        """Send a document to each device whose `population_asked` has changed."""
        asked = self._asked_populations()
        for name, device in list(self._devices.items()):
            if device.offer and device.is_asked is not (device.offer.population in asked):
                self.tell(name)

    def _asked_populations(self) -> set[str]:
        """Return the populations of the runs that are not over."""
        records = [*(run.record for run in self._runs.going()), *self._preparation.records]
        return {record.spec.population for record in records}


def _with_bytes_down(make: MakeEvent, bytes_down: int) -> MakeEvent:
    """Add to a contribution's event the bytes that the device downloaded for it."""

    def counted(state: RunState, at_s: float) -> Event | None:
        event = make(state, at_s)
        if isinstance(event, CONTRIBUTIONS):
            return replace(event, bytes_down=bytes_down)
        return event

    return counted

"""Automatic release of a run's result: one rollout under the automatic role for each such run.

The policy that people signed decides which nodes a rollout may reach and which accuracy it must
show on episodes; nothing here extends it. The rollout's key is derived from the run's id, so a
cloud that was killed meanwhile begins it only once, and an aborted rollout does not begin again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Final

from triplane.cloud.federation.federation import Federation
from triplane.cloud.fleet.fleet import LiveFleet
from triplane.cloud.trust import MetadataRepository
from triplane.proto.errors import Conflict, InvalidInput, NotFound, TriplaneError
from triplane.proto.federation_pb2 import Run
from triplane.proto.fleet_pb2 import DeployRequest
from triplane.proto.signed_fields import AUTO

logger = logging.getLogger(__name__)

RETRY_S: Final = 5.0
"""Pause between two attempts while another rollout of the model is running."""
KEY_BYTES: Final = 16


class Releasing:
    """Watches for runs that end, and begins their rollouts. `run` ends only when cancelled."""

    def __init__(self, federation: Federation, fleet: LiveFleet) -> None:
        self._federation, self._fleet = federation, fleet
        self._ended: set[str] = set()

    async def run(self) -> None:
        """Check after the end of each run, and again while a release waits."""
        while True:
            # Taken before reading, so that a run that ends meanwhile is not missed.
            ended = self._federation.ended
            waiting = await self._release_ended()
            try:
                async with asyncio.timeout(RETRY_S if waiting else None):
                    await ended.wait()
            except TimeoutError:
                continue

    async def _release_ended(self) -> bool:
        """Release ended runs; return whether one has to wait for another rollout."""
        waiting = False
        for run in await self._federation.runs():
            asked = run.phase == Run.DONE and run.spec.release == AUTO and run.result
            if asked and run.id not in self._ended:
                waiting |= not await self._release(run)
        return waiting

    async def _release(self, run: Run) -> bool:
        """Begin the run's rollout; return whether no further attempt is needed."""
        request = DeployRequest(
            reference=run.result, selector="all", role=AUTO, key=release_key(run.id)
        )
        try:
            record = await self._fleet.deploy(request, by=f"run {run.id}")
            logger.info(
                "result released", extra={"run_id": run.id, "rollout_id": record.rollout.id}
            )
        # Another rollout of the model is running; try again when it may have ended.
        except Conflict as error:
            logger.info("release waits", extra={"run_id": run.id, "reason": str(error)})
            return False
        # A repetition would fail in the same way, so the run counts as handled.
        except (NotFound, InvalidInput) as error:
            logger.warning("not released", extra={"run_id": run.id, "reason": str(error)})
        except TriplaneError:
            logger.exception("release failed", extra={"run_id": run.id})
            return False
        self._ended.add(run.id)
        return True


def check_release(repository: MetadataRepository, model: str) -> None:
    """Raise InvalidInput if the signed policy does not allow automatic releases of the model."""
    rules = repository.policy().models
    if model not in rules:
        listed = ", ".join(sorted(rules)) or "none"
        raise InvalidInput(
            f"the release policy has no rule for model {model!r} (listed: {listed}), so a run "
            "cannot release its result; sign one: triplane cloud policy set --help"
        )


def release_key(run: str) -> bytes:
    """Return the key of the rollout that releases a run's result."""
    return hashlib.sha256(f"release {run}".encode()).digest()[:KEY_BYTES]

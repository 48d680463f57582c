"""Which files devices may download and upload."""

from __future__ import annotations

from triplane.cloud.federation.live_runs import LiveRuns
from triplane.cloud.federation.recovery import Recovery
from triplane.cloud.federation.update_store import UpdateStore
from triplane.cloud.federation.work_documents import WorkDocuments
from triplane.proto.blobs import BlobFolder


class DeviceTransfers:
    """Access to blobs by open leases. Unavailable: a run waits to be taken up."""

    def __init__(
        self, runs: LiveRuns, recovery: Recovery, documents: WorkDocuments, updates: UpdateStore
    ) -> None:
        self._runs, self._recovery = runs, recovery
        self._documents, self._updates = documents, updates

    def check_readable(self, device: str, blob: bytes) -> None:
        """Raise unless an open task of the device names the blob; InvalidInput."""
        self._recovery.check_taken_up()
        self._documents.check_readable(device, blob)

    async def folder_for(self, device: str, sha256: bytes, size: int) -> BlobFolder:
        """Return the folder for a device's update; see `UpdateStore.admit`."""
        self._recovery.check_taken_up()
        return await self._updates.admit(self._runs.going(), device, sha256, size)

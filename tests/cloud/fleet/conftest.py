"""A fleet on a real database, with bundles that the test makes and signs."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.cloud.fleet.given import Shelf

from triplane.cloud.fleet.fleet import LiveFleet
from triplane.cloud.store import Database


@pytest.fixture
def shelf():
    made = Shelf()
    for version in range(1, 10):
        made.put("digits", version)
    return made


@pytest.fixture
def opened(tmp_path, shelf):
    """Opens the fleet kept in this test's folder; leaving it is a crash unless `stop` is called."""

    @asynccontextmanager
    async def opened(**options):
        database = Database.open(f"sqlite:///{tmp_path}/cloud.db")
        fleet = LiveFleet(database, shelf, **options)
        try:
            await fleet.start()
            yield fleet
            await fleet.stop()
        finally:
            if (task := fleet._rollouts_task) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await fleet._machine.stop()
            database.close()

    return opened

"""The numbers of signed metadata rise for machines that have seen higher ones, within a bound."""

import asyncio
from typing import Any

import pytest
from tests.support.deadlines import within
from tests.support.plan_signatures import PlanSigner

from triplane.cloud.tasks import BackgroundTasks
from triplane.cloud.trust.repository import MAX_OVERTAKEN
from triplane.cloud.upkeep import OVERTAKE_EVERY_S, MetadataUpkeep

pytestmark = pytest.mark.long


class Clock:
    now_s = 1.7e9

    def __call__(self):
        return self.now_s


class Records:
    """A database that takes every write."""

    async def write(self, _):
        return None


def versions_after(folder, leads, *, every_s=OVERTAKE_EVERY_S):
    """The timestamp's versions after machines that claim to be ahead by `leads`."""
    clock = Clock()
    repository = PlanSigner(folder, clock).repository

    async def story():
        tasks = BackgroundTasks()
        registry: Any = None
        database: Any = Records()
        upkeep = MetadataUpkeep(repository, registry, database, tasks, clock)
        for lead in leads:
            clock.now_s += every_s
            seen = {"timestamp": repository.versions()["timestamp"] + lead}
            upkeep.note_seen("liar", seen, b"")
            await asyncio.gather(*tasks.running.values())
            versions.append(repository.versions()["timestamp"])

    versions: list[int] = []
    within(story())
    return versions


def test_the_numbers_rise_past_what_a_machine_has_seen(tmp_path):
    assert versions_after(tmp_path, [MAX_OVERTAKEN - 50, 20])[0] > MAX_OVERTAKEN - 50


def test_a_machine_that_lies_again_and_again_does_not_use_the_numbers_up(tmp_path):
    """A jump of a million between two refreshes locks nodes and devices out."""
    assert max(versions_after(tmp_path, [MAX_OVERTAKEN] * 10)) < 2 * MAX_OVERTAKEN


def test_the_bound_is_one_of_a_day(tmp_path):
    first, second = versions_after(tmp_path, [MAX_OVERTAKEN, MAX_OVERTAKEN], every_s=86_401.0)
    assert second > first + MAX_OVERTAKEN

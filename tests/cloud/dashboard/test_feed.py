import asyncio
import gc
from contextlib import aclosing

import pytest
from starlette.requests import Request
from tests.support.deadlines import within

from triplane.cloud.dashboard import feed as feed_module
from triplane.cloud.dashboard.feed import DashboardFeed
from triplane.cloud.dashboard.rows import SECTIONS
from triplane.cloud.dashboard.web import _Board
from triplane.proto.errors import Unavailable
from triplane.proto.fleet_pb2 import Node

QUICK_S = 0.01


def test_a_page_hears_everything_first_and_then_only_what_changed(fleet):
    async def story():
        feed = DashboardFeed(fleet, period_s=QUICK_S)
        async with aclosing(feed.changes()) as page:
            first = await anext(page)
            fleet.held_nodes = [*fleet.held_nodes[1:], Node(name="new")]
            second = await anext(page)
        return first["change"], second["change"]

    first, second = within(story())
    assert len(first["nodes"]["set"]) == 40
    assert set(first) == {*SECTIONS, "totals"}
    assert set(second["nodes"]["set"]) == {"new"}
    assert second["nodes"]["gone"] == ["camera-00"]
    assert "rollouts" not in second


def test_a_slow_page_skips_states_and_ends_with_the_newest(fleet):
    async def story():
        feed = DashboardFeed(fleet, period_s=QUICK_S)
        async with aclosing(feed.changes()) as slow, aclosing(feed.changes()) as quick:
            await anext(slow)
            await anext(quick)
            for i in range(5):
                fleet.held_nodes = [Node(name=f"n{i}")]
                await anext(quick)
            return (await anext(slow))["change"]["nodes"]

    nodes = within(story())
    assert set(nodes["set"]) == {"n4"}
    assert len(nodes["gone"]) == 40


def test_the_cloud_is_asked_only_while_a_page_is_open(fleet):
    looks = []

    async def story():
        async def nodes():
            looks.append(1)
            return []

        fleet.nodes = nodes
        feed = DashboardFeed(fleet, period_s=QUICK_S)
        async with aclosing(feed.changes()) as page:
            await anext(page)
        seen = len(looks)
        await asyncio.sleep(20 * QUICK_S)  # long enough for a look that should not happen
        assert len(looks) == seen
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "dashboard feed"]

    within(story())


def test_a_look_that_fails_does_not_end_the_stream(fleet, caplog):
    async def story():
        feed = DashboardFeed(fleet, period_s=QUICK_S)
        whole = fleet.nodes
        async with aclosing(feed.changes()) as page:
            await anext(page)

            async def failing():
                fleet.nodes = whole
                fleet.held_nodes = []
                raise OSError("disk is gone")

            fleet.nodes = failing
            return (await anext(page))["change"]["nodes"]

    assert len(within(story())["gone"]) == 40
    assert "dashboard look failed" in caplog.text


def test_pages_beyond_the_limit_are_refused(fleet, monkeypatch):
    monkeypatch.setattr(feed_module, "MOST_PAGES", 1)

    async def story():
        feed = DashboardFeed(fleet, period_s=QUICK_S)
        async with aclosing(feed.changes()) as page:
            await anext(page)
            with pytest.raises(Unavailable, match="pages are open: 1, the limit"):
                await anext(feed.changes())

    within(story())


def test_closing_ends_every_page(fleet):
    async def story():
        feed = DashboardFeed(fleet, period_s=QUICK_S)
        async with aclosing(feed.changes()) as page:
            await anext(page)
            waiting = asyncio.create_task(anext(page, None))
            await feed.close()
            return await waiting

    assert within(story()) is None


@pytest.mark.parametrize("at", ["http.response.start", "http.response.body"])
def test_a_page_that_leaves_while_it_is_written_to_is_not_counted_on(fleet, at):
    async def story():
        board = _Board(fleet, "token")
        answer = await board.events(Request({"type": "http"}))
        writing = asyncio.Event()

        async def send(message):
            if message["type"] == at:
                writing.set()
                await asyncio.Event().wait()

        async def receive():
            await writing.wait()
            return {"type": "http.disconnect"}

        await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        return board.feed._pages

    gc.disable()  # what only the collector would close counts as left open
    try:
        assert within(story()) == 0
    finally:
        gc.enable()

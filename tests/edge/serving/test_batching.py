"""Merging: nobody gets another's rows, waits for company, or pays for another's mistake."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.edge.serving import batching
from triplane.edge.serving.batching import Merged
from triplane.edge.serving.running import CallContext, Direct
from triplane.edge.serving.statistics import Statistics
from triplane.proto.errors import InvalidInput
from triplane.proto.status import DeadlineExceeded

MERGED_ROWS = 8


@pytest.fixture(params=["direct", "merged"])
def runner_over(request):
    """Every runner answers the same questions."""

    def make(servable):
        if request.param == "direct":
            return Direct(servable, Statistics())
        return Merged(servable, Statistics(), MERGED_ROWS)

    return make


@settings(max_examples=settings().max_examples * 3 // 10)
@given(
    sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=2, max_size=8),
)
def test_concurrent_callers_get_exactly_their_own_rows(kit, sizes):
    runner = Merged(kit.linear(), Statistics(), MERGED_ROWS)
    start = threading.Barrier(len(sizes))

    def caller(number):
        start.wait()
        for index, rows in enumerate(sizes[number]):
            x = np.full((rows, 4), number * 100 + index, np.float32)
            y = runner.run({"x": x}, rows, kit.call()).results["y"]
            np.testing.assert_allclose(y, x @ kit.WEIGHTS, rtol=1e-5)

    with ThreadPoolExecutor(len(sizes)) as pool:
        for done in [pool.submit(caller, number) for number in range(len(sizes))]:
            done.result(timeout=30)


def test_what_queues_during_a_run_is_one_run_afterwards(kit):
    gated, counted = kit.Gated(kit.linear()), Statistics()
    runner = Merged(gated, counted, MERGED_ROWS)
    x = np.ones((1, 4), np.float32)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(runner.run, {"x": x}, 1, kit.call())
        gated.wait_for_runs(1)
        others = [pool.submit(runner.run, {"x": x * i}, 1, kit.call()) for i in range(2, 6)]
        while len(runner._queue) < 4:
            time.sleep(0)  # yields; the queue has no event of its own
        gated.gate.set()
        for i, other in enumerate(others, 2):
            np.testing.assert_allclose(
                other.result(30).results["y"], x * i @ kit.WEIGHTS, rtol=1e-5
            )
        first.result(30)
    assert gated.runs == 2
    assert {rows: batch.count for rows, batch in counted.batches.items()} == {1: 1, 4: 1}


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ((3, 5), {8: 1}),
        ((3, 6), {3: 1, 6: 1}),
        ((4, 4, 1), {8: 1, 1: 1}),
        ((7, 1, 1), {8: 1, 1: 1}),
    ],
)
def test_a_shared_run_holds_at_most_the_merged_rows(kit, sizes, runs):
    gated, counted = kit.Gated(kit.linear()), Statistics()
    runner = Merged(gated, counted, MERGED_ROWS)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(runner.run, {"x": np.ones((2, 4), np.float32)}, 2, kit.call())
        gated.wait_for_runs(1)
        others = []
        for rows in sizes:  # one after the other, so that they queue in this order
            x = np.ones((rows, 4), np.float32)
            others.append(pool.submit(runner.run, {"x": x}, rows, kit.call()))
            while len(runner._queue) < len(others):
                time.sleep(0)
        gated.gate.set()
        for done in (first, *others):
            done.result(30)
    assert {rows: batch.count for rows, batch in counted.batches.items()} == {2: 1, **runs}


def test_as_many_runs_go_at_once_as_are_free(kit):
    gated = kit.Gated(kit.linear())
    runner = Merged(gated, Statistics(), MERGED_ROWS, runs=2)
    feeds = {"x": np.ones((1, 4), np.float32)}
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(runner.run, feeds, 1, kit.call()) for _ in range(2)]
        gated.wait_for_runs(2)
        calls += [pool.submit(runner.run, feeds, 1, kit.call()) for _ in range(3)]
        while len(runner._queue) < 3:
            time.sleep(0)
        gated.gate.set()
        for call in calls:
            call.result(30)
    assert gated.runs in {3, 4}  # one heir takes all three, or both free runs have an heir
    assert runner._free == 2


@pytest.fixture
def after_a_shared_run(kit, monkeypatch):
    """A runner whose last run was shared by two callers, and the statistics of its runs."""
    monkeypatch.setattr(batching, "BACK_S", 3600)

    def make(pause_s):
        gated, counted = kit.Gated(kit.linear()), Statistics()
        runner = Merged(gated, counted, MERGED_ROWS, pause_s=pause_s)
        feeds = {"x": np.ones((1, 4), np.float32)}
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(runner.run, feeds, 1, kit.call())]
            gated.wait_for_runs(1)
            calls += [pool.submit(runner.run, feeds, 1, kit.call()) for _ in range(2)]
            while len(runner._queue) < 2:
                time.sleep(0)
            gated.gate.set()
            for call in calls:
                call.result(30)
        return runner, feeds, counted.batches

    return make


def test_after_a_shared_run_the_next_waits_for_its_callers_to_come_back(kit, after_a_shared_run):
    runner, feeds, batches = after_a_shared_run(pause_s=3600)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(runner.run, feeds, 1, kit.call())]
        while not runner._pausing:
            time.sleep(0)
        calls += [pool.submit(runner.run, feeds, 1, kit.call()) for _ in range(2)]
        for call in calls:
            call.result(30)
    assert {rows: batch.count for rows, batch in batches.items()} == {1: 1, 2: 1, 3: 1}


def test_the_pause_ends_when_nobody_comes_and_is_not_repeated(kit, after_a_shared_run):
    runner, feeds, batches = after_a_shared_run(pause_s=0.01)
    for _ in range(3):
        runner.run(feeds, 1, kit.call())
    assert {rows: batch.count for rows, batch in batches.items()} == {1: 4, 2: 1}
    assert runner._shared_rows == 0


def test_a_lone_caller_never_waits_for_company(kit):
    counted = Statistics()
    runner = Merged(kit.linear(), counted, MERGED_ROWS)
    for _ in range(5):
        runner.run({"x": np.ones((2, 4), np.float32)}, 2, kit.call())
    assert {rows: batch.count for rows, batch in counted.batches.items()} == {2: 5}


def test_requests_of_other_shapes_are_not_merged(kit):
    from onnx import TensorProto, helper

    from triplane.unified_ir.runtime.session import Session

    row = TensorProto.FLOAT, ["N", "M"]
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    inner = kit.SessionServable(Session(kit.graph(nodes, [("x", *row)], [("y", *row)], {})))
    gated = kit.Gated(inner)
    runner = Merged(gated, Statistics(), MERGED_ROWS)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(runner.run, {"x": np.zeros((1, 1), np.float32)}, 1, kit.call())]
        gated.wait_for_runs(1)
        calls += [
            pool.submit(runner.run, {"x": np.full((1, m), m, np.float32)}, 1, kit.call())
            for m in (2, 3, 2)
        ]
        gated.gate.set()
        shapes = [call.result(30).results["y"].shape for call in calls]
    assert shapes == [(1, 1), (1, 2), (1, 3), (1, 2)]


def test_a_callers_bad_values_fail_nobody_else(kit):
    """Gather refuses an index beyond its table only when it runs."""
    from onnx import TensorProto, helper

    from triplane.unified_ir.runtime.session import Session

    nodes = [helper.make_node("Gather", ["table", "i"], ["y"])]
    data = kit.graph(
        nodes,
        [("i", TensorProto.INT64, ["N"])],
        [("y", TensorProto.FLOAT, ["N"])],
        {"table": np.arange(5, dtype=np.float32)},
    )
    gated = kit.Gated(kit.SessionServable(Session(data)))
    runner = Merged(gated, Statistics(), MERGED_ROWS)

    def ask(index):
        return runner.run({"i": np.array([index])}, 1, kit.call()).results["y"].tolist()

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(ask, 0)]
        gated.wait_for_runs(1)
        calls += [pool.submit(ask, index) for index in (1, 99, 2)]
        while len(runner._queue) < 3:
            time.sleep(0)
        gated.gate.set()
        with pytest.raises(InvalidInput, match="graph failed"):
            calls[2].result(30)
        assert [calls[i].result(30) for i in (0, 1, 3)] == [[0], [1], [2]]


def test_a_late_or_abandoned_call_is_never_run(kit, runner_over):
    gated = kit.Gated(kit.linear())
    gated.gate.set()
    runner = runner_over(gated)
    feeds = {"x": np.ones((1, 4), np.float32)}
    abandoned = CallContext(time.monotonic() + 30, 0, lambda: False)
    for call in (kit.call(seconds=-1), abandoned):
        with pytest.raises(DeadlineExceeded, match="nothing was computed"):
            runner.run(feeds, 1, call)
    assert gated.runs == 0


def test_a_call_whose_deadline_passes_in_the_queue_leaves_it_unrun(kit):
    gated = kit.Gated(kit.linear())
    runner = Merged(gated, Statistics(), MERGED_ROWS)
    feeds = {"x": np.ones((1, 4), np.float32)}
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(runner.run, feeds, 1, kit.call())
        gated.wait_for_runs(1)
        late = pool.submit(runner.run, feeds, 1, kit.call(seconds=0.05))
        with pytest.raises(DeadlineExceeded, match="nothing ran"):
            late.result(30)
        gated.gate.set()
        first.result(30)
    assert gated.runs == 1


def test_an_abandoned_call_in_the_queue_does_not_stop_the_ones_behind_it(kit):
    gated = kit.Gated(kit.linear())
    runner = Merged(gated, Statistics(), 1)
    feeds = {"x": np.ones((1, 4), np.float32)}
    here = threading.Event()
    here.set()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(runner.run, feeds, 1, kit.call())
        gated.wait_for_runs(1)
        gone = pool.submit(runner.run, feeds, 1, CallContext(time.monotonic() + 30, 0, here.is_set))
        while len(runner._queue) < 1:
            time.sleep(0)
        behind = pool.submit(runner.run, feeds, 1, kit.call())
        while len(runner._queue) < 2:
            time.sleep(0)
        here.clear()
        gated.gate.set()
        with pytest.raises(DeadlineExceeded):
            gone.result(30)
        first.result(30)
        behind.result(30)
    assert gated.runs == 2

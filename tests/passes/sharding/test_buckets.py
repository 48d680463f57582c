"""Gradient buckets: the optimal split against all splits, and how values are cut."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.sharding import LinkCost
from triplane.unified_ir.passes.sharding.batch_split import split_batch
from triplane.unified_ir.passes.sharding.buckets import (
    AUTO,
    AllReduceCost,
    ReadyTensor,
    all_reduce_cost,
    best_buckets,
    capped_buckets,
    check_buckets,
    planned_buckets,
    record,
    table,
    timeline,
)
from triplane.unified_ir.passes.sharding.ready_times import MeasuredTimes, to_measure


def every_split(n):
    """Each way to cut n tensors into runs."""
    for count in range(n):
        for cuts in combinations(range(1, n), count):
            yield tuple(tuple(range(a, b)) for a, b in pairwise((0, *cuts, n)))


def end_of(buckets, tensors, cost):
    free = 0.0
    for bucket in buckets:
        begin = max([free, *(tensors[k].ready_s for k in bucket)])
        free = begin + cost.alpha_s + cost.s_per_byte * sum(tensors[k].size_bytes for k in bucket)
    return free


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(0, 30),
    st.integers(0, 4),
)
def test_no_split_ends_earlier_and_none_as_early_has_fewer_buckets(steps, alpha, beta):
    ready = np.cumsum([gap for _, gap in steps])
    tensors = [ReadyTensor("g", size, float(r)) for (size, _), r in zip(steps, ready, strict=True)]
    cost = AllReduceCost(float(alpha), float(beta))
    best = best_buckets(tensors, cost)
    assert [k for bucket in best for k in bucket] == list(range(len(tensors)))
    ends = {b: end_of(b, tensors, cost) for b in every_split(len(tensors))}
    least = min(ends.values())
    assert ends[best] == pytest.approx(least, rel=1e-8)
    assert len(best) == min(len(b) for b, end in ends.items() if end <= least * (1 + 1e-9))


def test_a_timeline_by_hand():
    tensors = [ReadyTensor("a", 10, 1.0), ReadyTensor("b", 20, 2.0), ReadyTensor("c", 5, 9.0)]
    cost = AllReduceCost(1.0, 0.1)
    plan = timeline("x", ((0,), (1,), (2,)), tensors, cost, 9.0)
    assert plan.starts_s == (1.0, 3.0, 9.0)
    assert plan.ends_s == (3.0, 6.0, 10.5)
    assert plan.exposed_s == 1.5
    # Two buckets end as early as three.
    assert best_buckets(tensors, cost) == ((0, 1), (2,))


def test_capped_buckets_end_where_the_cap_is_reached():
    tensors = [ReadyTensor("g", n, 0.0) for n in (1, 3, 2, 2, 5, 1)]
    assert capped_buckets(tensors, 4) == ((0, 1), (2, 3), (4,), (5,))
    assert capped_buckets(tensors, 4, 1) == ((0,), (1, 2), (3, 4), (5,))
    assert capped_buckets([], 4) == best_buckets([], AllReduceCost(1, 1)) == ()


def test_an_all_reduce_costs_two_passes():
    cost = all_reduce_cost(LinkCost(1e-6, 1e9), 6)
    assert cost.alpha_s == pytest.approx(2 * 3 * 1e-6)
    assert cost.seconds(600) == pytest.approx(6e-6 + 2 * 500 / 1e9)


@pytest.mark.parametrize("value", ["AUTO", "", 0, -1, True, 1.5, 1 << 50, None])
def test_other_choices_are_refused(value):
    with pytest.raises(InvalidInput, match="buckets is 'auto', 'one', or the bytes"):
        check_buckets(value)


class Net(nn.Cell):
    def __init__(self, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = norm or nn.Identity()
        self.head = nn.Dense(4 * 36, 10)

    def construct(self, x):
        return self.head(ops.flatten(ops.relu(self.norm(self.conv(x)))))


def step_of(cell, loss=None):
    trainer = train.Trainer(
        cell, loss=loss or nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1, momentum=0.9)
    )
    trainer.prepare(TensorSpec(("N", 1, 8, 8)), TensorSpec(("N",), "int64"))
    return trainer.train_function()


def test_the_gradients_are_ready_from_the_last_layer_to_the_first():
    split = split_batch(step_of(Net()), 6, sizes={"N": 48})
    parts = split.gradients()
    sizes = {"head": [10 * 144 * 4, 10 * 4], "conv": [4 * 9 * 4, 4 * 4]}
    layers = [p.name.partition(":")[0] for p in parts]
    assert layers == ["loss", "loss", "head", "head", "conv", "conv"]
    assert [p.is_mean for p in parts] == [True, True, False, False, False, False]
    for layer, expected in sizes.items():
        held = [p.size_bytes for p in parts if p.name.startswith(layer)]
        assert sorted(held, reverse=True) == expected
    times = [p.ready_s for p in parts]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] <= split.seconds
    assert split.local_sizes == {"N": 8}


def test_sums_that_the_backward_pass_awaits_are_apart():
    norm = split_batch(step_of(Net(nn.BatchNorm2d(4))), 4, sizes={"N": 48})
    awaited = [p for p in norm.partial if p.is_awaited]
    assert len(awaited) == 2  # the sums of batch normalization's gradient
    ignoring = nn.SoftmaxCrossEntropy(ignore_index=-1)
    counts = split_batch(step_of(Net(), ignoring), 4, sizes={"N": 48})
    assert [p.size_bytes for p in counts.partial if p.is_awaited] == [4]  # the labels that count


def test_measured_times_decide_about_the_buckets():
    split, link = split_batch(step_of(Net()), 6, sizes={"N": 48}), LinkCost(1e-3, 1e6)
    predicted = planned_buckets(split, link)
    # A slow link after a fast backward pass: one all-reduce.
    assert len(predicted.chosen(AUTO).buckets) == 1
    numbers = to_measure(predicted.predicted_s)
    assert numbers[-1] == len(predicted.tensors) - 1
    times = tuple(0.1 * (k + 1) for k in range(len(numbers)))
    measured = planned_buckets(split, link, MeasuredTimes(numbers, times, runs=5))
    assert [measured.tensors[k].ready_s for k in numbers] == pytest.approx(times)
    best = measured.chosen(AUTO)
    ends = {
        b: end_of(b, measured.tensors, measured.cost) for b in every_split(len(measured.tensors))
    }
    assert len(best.buckets) > 1
    assert ends[best.buckets] == pytest.approx(min(ends.values()))
    assert measured.ending_at("again", best.ends).buckets == best.buckets
    # The same gradients, whatever their times; others over another number of devices.
    assert measured.digest == predicted.digest
    fewer = split_batch(step_of(Net()), 4, sizes={"N": 48})
    assert planned_buckets(fewer, link).digest != predicted.digest


def test_the_table_fits_80_columns():
    split = split_batch(step_of(Net()), 6, sizes={"N": 48})
    buckets = planned_buckets(split, LinkCost(1e-9, 1e9))
    lines = list(table(buckets))
    assert max(map(len, lines)) <= 80
    for text in ("planned", "25 MiB, the first 1 MiB", "one all-reduce", "exposed"):
        assert any(text in line for line in lines)
    assert "ready times: predicted" in lines
    assert record(buckets)["ready_times"] == "predicted"


def test_the_table_shows_what_was_measured():
    split = split_batch(step_of(Net()), 6, sizes={"N": 48})
    measured = MeasuredTimes((1, 5), (2e-3, 7e-3), runs=3)
    lines = list(table(planned_buckets(split, LinkCost(1e-9, 1e9), measured)))
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert "measured, the median of 3 runs of the step that end with each of 2 results" in text
    assert "the last ready after 7 ms" in text
    assert any(line.split()[:3] == ["6", "7", "ms"] and "conv" in line for line in lines)


def test_many_gradients_on_a_fast_link_are_split():
    tensors = [ReadyTensor("g", 1, float(k)) for k in range(200)]
    cost = AllReduceCost(0.5, 0.1)
    assert end_of(best_buckets(tensors, cost), tensors, cost) == pytest.approx(199.6)
    # Each must go when it is ready, which takes more buckets than are counted.
    tensors = [ReadyTensor("g", 1, 0.6 * k) for k in range(200)]
    cost = AllReduceCost(0.0, 0.6)
    assert end_of(best_buckets(tensors, cost), tensors, cost) == pytest.approx(200 * 0.6)


def scattered(value):
    """Labels counted by class, on top of an array."""
    build = Build(TABLE, "counts")
    with build:
        y = build.param("y", TensorSpec(("N", 1), "int64"))
        base = build.constant(np.full(10, value, np.int64))
        ones = ops.ones_like(y.reshape((y.shape[0],)))
        counts = ops.scatter_nd(base, y, ones, reduction="add")
    return build.finish({"counts": counts})


@pytest.mark.parametrize("value", [0, 1])
def test_an_array_to_which_parts_are_added_must_be_zero(value):
    function = scattered(value)
    if value:
        with pytest.raises(InvalidInput, match="ScatterND"):
            split_batch(function, 4, sizes={"N": 8})
    else:
        assert len(split_batch(function, 4, sizes={"N": 8}).partial) == 1


class Across(Net):
    def construct(self, x):
        return super().construct(x - ops.transpose(ops.transpose(x, [1, 0, 2, 3]), [1, 0, 2, 3])
                                 * ops.softmax(x, axis=0))  # fmt: skip


def test_what_needs_rows_of_other_devices_is_refused_by_name_and_line():
    with pytest.raises(InvalidInput, match=r"Softmax \(at .*test_buckets.py:\d+\) cannot work on"):
        split_batch(step_of(Across()), 4, sizes={"N": 48})


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(InvalidInput, match=r"rows divide over 5 devices \(sizes: N=48\)"):
        split_batch(step_of(Net()), 5, sizes={"N": 48})

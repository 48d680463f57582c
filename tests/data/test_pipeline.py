# mypy: disable-error-code="union-attr,arg-type"
"""Pipelines: what each step gives, and that the stream depends on seed and epoch alone."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.streams import numbers, stream

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import data
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.ahead import Loading
from triplane.unified_ir.data.columns import Columns, Ragged, Schema
from triplane.unified_ir.data.dataset import Dataset, of_source
from triplane.unified_ir.data.form import from_json
from triplane.unified_ir.data.loader import Loader
from triplane.unified_ir.data.opened import Origin
from triplane.unified_ir.data.registry import STEPS
from triplane.unified_ir.data.table import ArrayTable
from triplane.unified_ir.data.transforms import Cast, Flip, Noise, Rename, Scale
from triplane.unified_ir.data.zipping import ZipSource


@dataclass
class Counting:
    """A feed of n numbers, in blocks of different sizes; counts how often it is read."""

    n: int
    block: int = 7

    @property
    def schema(self) -> Schema:
        return {"x": columns.Field("int64")}

    def blocks(self, start: int) -> Iterator[Columns]:
        at, size = start, self.block
        while at < self.n:
            yield {"x": np.arange(at, min(at + size, self.n))}
            at, size = at + size, size % 11 + 1


def feed(n: int) -> Dataset:
    return Dataset(Origin(None, Counting(n), "a feed"), inputs=("x",))


# What steps give

STREAMS = {
    "batch": (lambda d: d.batch(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    "drop_last": (lambda d: d.batch(4, drop_last=True), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "take": (lambda d: d.take(3).batch(9), [[0, 1, 2]]),
    "skip": (lambda d: d.skip(7).batch(9), [[7, 8, 9]]),
    "repeat": (lambda d: d.take(3).repeat(2).batch(4), [[0, 1, 2, 0], [1, 2]]),
    "where": (lambda d: d.where("x", ">=", 8).batch(4), [[8, 9]]),
    "filter": (lambda d: d.filter(lambda s: s["x"] % 3 == 0).batch(3), [[0, 3, 6], [9]]),
    "map": (lambda d: d.map(lambda s: {"x": s["x"] * 2}).take(3).batch(3), [[0, 2, 4]]),
    "map of batches": (lambda d: d.batch(5).map(lambda b: {"x": b["x"][::-1]}),
                       [[4, 3, 2, 1, 0], [9, 8, 7, 6, 5]]),
    "window": (lambda d: d.window(3, stride=3).batch(9), [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]]),
    "window with gaps": (lambda d: d.window(2, stride=5).batch(9), [[[0, 1], [5, 6]]]),
    "overlapping windows": (lambda d: d.take(4).window(3).batch(9), [[[0, 1, 2], [1, 2, 3]]]),
}  # fmt: skip


@pytest.mark.parametrize("source", [numbers, feed])
@pytest.mark.parametrize(("steps", "expected"), STREAMS.values(), ids=STREAMS)
def test_steps_give_the_same_of_tables_and_feeds(source, steps, expected):
    dataset = steps(source(10))
    assert stream(dataset) == expected
    for start in range(len(expected) + 2):
        assert stream(dataset, start=start) == expected[start:]


def test_window_gives_what_comes_next():
    (batch,) = numbers(7).window(3, stride=2, ahead=1, into="y").batch(9).opened().batches(0)
    assert batch["x"].tolist() == [[0, 1, 2], [2, 3, 4]]
    assert batch["y"].tolist() == [[1, 2, 3], [3, 4, 5]]


def test_windows_keep_other_axes():
    (batch,) = data.arrays(np.arange(20).reshape(10, 2)).window(3).batch(9).opened().batches(0)
    assert batch["x"].shape == (8, 3, 2)
    assert batch["x"][2].tolist() == [[4, 5], [6, 7], [8, 9]]


def test_shards_are_of_one_size_and_disjoint():
    shards = [stream(numbers(11).shuffle().shard(k, 3).batch(99), seed=4)[0] for k in range(3)]
    assert [len(s) for s in shards] == [3, 3, 3]
    assert len({*itertools.chain(*shards)}) == 9


def test_weighted_and_balanced_draw_in_proportion():
    n = 40_000
    y = np.repeat([0, 1, 2], [70, 20, 10])
    dataset = data.arrays(np.arange(100), y, w=(y == 2) * 3.0 + (y == 0))
    (balanced,) = dataset.balanced(count=n).batch(n).opened(1).batches(0)
    shares = np.bincount(balanced["y"]) / n
    assert np.abs(shares - 1 / 3).max() < 4 * np.sqrt(2 / 9 / n)
    (weighted,) = dataset.weighted("w", count=n).batch(n).opened(1).batches(0)
    shares = np.bincount(weighted["y"], minlength=3) / n
    assert np.abs(shares - [0.7, 0, 0.3]).max() < 4 * np.sqrt(0.21 / n)
    again = [stream(dataset.weighted("w").batch(5), seed=s, epoch=e) for s, e in
             ((0, 0), (0, 0), (0, 1), (1, 0))]  # fmt: skip
    assert again[0] == again[1]
    assert again[0] != again[2]
    assert again[0] != again[3]


def test_a_buffer_shuffles_what_is_read_in_order():
    dataset = feed(200).shuffle(32).batch(64)
    order = list(itertools.chain(*stream(dataset, seed=3)))
    assert sorted(order) == list(range(200))
    assert order != list(range(200))
    assert order == list(itertools.chain(*stream(dataset, seed=3)))
    assert order != list(itertools.chain(*stream(dataset, seed=3, epoch=1)))
    with pytest.raises(InvalidInput, match="shuffle needs buffer=N"):
        stream(feed(9).shuffle().batch(2))


def test_repeats_are_shuffled_each_in_its_own_order():
    dataset = numbers(8).shuffle().repeat(3).batch(8)
    orders = stream(dataset, seed=5)
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    # Each repetition has the order that an epoch of its own would have.
    assert orders == [stream(numbers(8).shuffle().batch(8), seed=5, epoch=e)[0] for e in range(3)]
    across = stream(numbers(8).shuffle().repeat(3).batch(5), seed=5)
    assert list(itertools.chain(*across)) == list(itertools.chain(*orders))


def test_zip_puts_columns_side_by_side():
    a, b = numbers(5).shuffle(), data.arrays(np.arange(5) * 10).then(Rename("x", "z"))
    dataset = of_source(ZipSource((a, b)), "both").batch(5)
    (batch,) = dataset.opened(2).batches(1)
    assert batch["x"].tolist() == stream(a.batch(5), seed=2, epoch=1)[0]
    assert batch["z"].tolist() == [0, 10, 20, 30, 40]
    mixed = of_source(ZipSource((feed(5), b)), "both").batch(2)
    assert [(p["x"].tolist(), p["z"].tolist()) for p in mixed.opened().batches(0, 1)] == [
        ([2, 3], [20, 30]),
        ([4], [40]),
    ]
    with pytest.raises(InvalidInput, match=r"a column 'x'; rename"):
        of_source(ZipSource((a, a)), "both")
    with pytest.raises(InvalidInput, match=r"have \[5, 4\] samples"):
        of_source(ZipSource((a, b.take(4))), "both")


def test_sequences_are_padded_to_the_longest_of_a_batch():
    rows = [np.arange(k) + 1 for k in (1, 3, 2, 4, 0)]
    dataset = data.arrays(Ragged.of(rows)).padded_batch(2, fill=-1, lengths=True)
    batches = list(dataset.opened().batches(0))
    assert [b["x"].tolist() for b in batches] == [
        [[1, -1, -1], [1, 2, 3]], [[1, 2, -1, -1], [1, 2, 3, 4]], [[]],
    ]  # fmt: skip
    assert [b["x.length"].tolist() for b in batches] == [[1, 3], [2, 4], [0]]
    assert str(dataset.schema["x"]) == "int64[*]"
    ragged = data.arrays(Ragged.of(rows), np.arange(5)).batch(2)
    with pytest.raises(InvalidInput, match="padded_batch"):
        ragged.arrays_of(next(ragged.opened().batches(0)))


def test_cache_computes_once_and_refuses_to_freeze_random_steps():
    calls: list[int] = []

    def counted(sample):
        calls.append(int(sample["x"]))
        return sample

    dataset = numbers(6).map(counted).cache().batch(2)
    first = stream(dataset)
    n = len(calls)
    assert n == 6
    assert stream(dataset, epoch=1) == first
    assert len(calls) == n
    with pytest.raises(InvalidInput, match="put cache before"):
        stream(numbers(6).shuffle().cache().batch(2))


def test_a_filter_after_random_steps_is_tried_in_each_epoch():
    images = data.arrays(np.zeros((50, 1, 2, 2), np.float32))
    noisy = images.then(Noise("x", 1.0, low=-9.0, high=9.0)).filter(lambda s: s["x"].mean() > 0)
    sizes = {sum(len(b["x"]) for b in noisy.batch(9).opened(0).batches(e)) for e in range(6)}
    assert len(sizes) > 1


# One stream, however it is read

STEP_CHOICES = st.sampled_from(
    [
        lambda d: d.shuffle(5),
        lambda d: d.take(17),
        lambda d: d.skip(2),
        lambda d: d.repeat(2),
        lambda d: d.where("x", "!=", 5),
        lambda d: d.filter(lambda s: s["x"] % 7 != 3),
        lambda d: d.map(lambda s, rng: {"x": s["x"] + 100 * rng.integers(5)}, random=True),
        lambda d: d.then(Cast("x", "int32")),
    ]
)


@settings(max_examples=60)
@given(
    source=st.sampled_from([numbers, feed]),
    n=st.integers(18, 40),
    steps=st.lists(STEP_CHOICES, max_size=4),
    size=st.integers(1, 9),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
    start=st.integers(0, 5),
    workers=st.integers(0, 4),
)
def test_a_stream_is_one_whatever_reads_it(source, n, steps, size, seed, epoch, start, workers):
    dataset = source(n)
    for step in steps:
        if not isinstance(dataset.view(), type(dataset.view())):
            continue
        dataset = step(dataset) if (dataset.samples or 99) > 18 else dataset
    dataset = dataset.batch(size)
    whole = stream(dataset, seed=seed, epoch=epoch)
    assert stream(dataset, seed=seed, epoch=epoch, start=start) == whole[start:]
    loader = Loader(dataset, seed, Loading(workers, prefetch=1 + n % 3))
    read = [b["x"].tolist() for b in loader.batches(epoch, start)]
    loader.close()
    assert read == whole[start:]


def test_random_steps_do_not_depend_on_the_size_of_batches():
    images = data.arrays(np.random.default_rng(0).random((23, 3, 4, 4), np.float32))
    augmented = images.then(Flip("x"), Noise("x", 0.1)).map(
        lambda s, rng: {"x": s["x"] * rng.random(dtype=np.float32)}, random=True
    )
    whole = [
        np.concatenate([b["x"] for b in augmented.batch(size).opened(7).batches(2)])
        for size in (1, 4, 23)
    ]
    assert np.array_equal(whole[0], whole[1])
    assert np.array_equal(whole[0], whole[2])
    later = np.concatenate([b["x"] for b in augmented.batch(4).opened(7).batches(3)])
    assert not np.array_equal(whole[0], later)


def doubled(sample):
    return {**sample, "x": sample["x"] * 2}


def failing(sample):
    if sample["x"] == 25:
        raise RuntimeError("25 is too much")
    return sample


def test_child_processes_give_the_same_stream(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(30), y=np.arange(30) % 3)
    dataset = data.load(tmp_path / "a.npz").map(doubled).shuffle().batch(4)
    loader = Loader(dataset, 3, Loading(2, processes=True))
    try:
        for epoch in range(2):
            read = [b["x"].tolist() for b in loader.batches(epoch, 1)]
            assert read == stream(dataset, seed=3, epoch=epoch, start=1)
    finally:
        loader.close()


def test_an_error_in_a_child_process_reaches_the_caller(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(30))
    loader = Loader(
        data.load(tmp_path / "a.npz").map(failing).batch(4), 0, Loading(1, processes=True)
    )
    with pytest.raises(InvalidInput, match="RuntimeError: 25 is too much"):
        list(loader.batches(0))
    loader.close()


def test_processes_refuse_what_they_cannot_import(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(30))
    own = data.load(tmp_path / "a.npz").map(lambda s: s).batch(4)
    with pytest.raises(InvalidInput, match=r"<lambda> cannot be imported by a worker process"):
        Loader(own, 0, Loading(1, processes=True))
    with pytest.raises(InvalidInput, match="arrays in memory cannot be written as JSON"):
        Loader(numbers(4).batch(2), 0, Loading(1, processes=True))


@pytest.mark.parametrize("source", [numbers, feed])
def test_reading_ahead_stops_at_the_limit_and_when_the_reader_stops(source):
    calls: list[int] = []

    def counted(batch):
        calls.append(1)
        return batch

    before = threading.active_count()
    loader = Loader(source(1000).batch(10).map(counted), 0, Loading(2, prefetch=3))
    batches = loader.batches(0)
    next(batches)
    deadline = time.monotonic() + 30
    while len(calls) < 7 and time.monotonic() < deadline:  # the one in use, and 6 ahead
        time.sleep(0.01)
    assert len(calls) >= 7
    time.sleep(0.2)  # time to read on, if nothing stopped it at the limit
    # And for a feed the call that learns the columns, and the batch that waits for its place.
    assert len(calls) <= 7 + 2 * (source is feed)
    batches.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("source", [numbers, feed])
def test_an_error_in_a_function_of_the_users_reaches_the_reader(source, workers):
    loader = Loader(source(30).map(failing).batch(4), 0, Loading(workers))
    batches = loader.batches(0)
    assert next(batches)["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="25 is too much"):
        list(batches)


# JSON


def test_a_pipeline_reads_back_to_the_same_stream():
    dataset = (
        data.digits().where("y", "<", 7).then(Flip("x"), Noise("x", 0.1)).shuffle()
        .repeat(2).batch(32, drop_last=True)
    )  # fmt: skip
    again = from_json(dataset.json())
    assert again.json() == dataset.json()
    assert (again.inputs, again.targets, again.labels) == (("x",), ("y",), dataset.labels)
    pairs = zip(dataset.opened(1).batches(2), again.opened(1).batches(2), strict=True)
    assert all(np.array_equal(a[k], b[k]) for a, b in pairs for k in ("x", "y"))


def test_a_pipeline_within_a_pipeline_reads_back():
    both = of_source(ZipSource((data.digits(), data.digits().then(
        Rename("x", "x2"), Rename("y", "y2")))), "both")  # fmt: skip
    assert from_json(both.json()).schema == both.schema


def test_functions_are_named_in_json_and_passed_when_it_is_read():
    text = data.digits().map(doubled).json()
    name = f"{__name__}:doubled"
    assert name in text
    with pytest.raises(NotFound, match="pass functions="):
        from_json(text)
    again = from_json(text, functions={name: doubled})
    assert again.column("x").max() == 2


def with_step(fields):
    return f'{{"format": 1, "source": {{"kind": "digits"}}, "steps": [{{{fields}}}]}}'


HOSTILE = {
    "no object": "[]",
    "not JSON": "{",
    "deep": "[" * 100_000,
    "format": '{"format": 2, "source": {"kind": "digits"}}',
    "key": '{"format": 1, "source": {"kind": "digits"}, "extra": 1}',
    "source": '{"format": 1, "source": {"kind": "pickle", "path": "x"}}',
    "field": '{"format": 1, "source": {"kind": "npz", "path": "x", "mode": 1}}',
    "missing": '{"format": 1, "source": {"kind": "npz"}}',
    "type": '{"format": 1, "source": {"kind": "npz", "path": 5}}',
    "step": '{"format": 1, "source": {"kind": "digits"}, "steps": [{"step": "exec"}]}',
    "size": with_step('"step": "batch", "size": 0'),
    "bool": with_step('"step": "take", "count": true'),
    "float": with_step('"step": "take", "count": 1.5'),
    "function": with_step('"step": "map", "function": 1'),
    "column": '{"format": 1, "source": {"kind": "digits"}, "inputs": ["z"]}',
    "names": '{"format": 1, "source": {"kind": "digits"}, "inputs": "x"}',
    "parts": '{"format": 1, "source": {"kind": "zip", "parts": 3}}',
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_refused(text):
    with pytest.raises(InvalidInput):
        from_json(text)


def test_pipelines_within_pipelines_end():
    deep: object = {"format": 1, "source": {"kind": "digits"}}
    for _ in range(20):
        deep = {"format": 1, "source": {"kind": "zip", "parts": [deep]}}
    with pytest.raises(InvalidInput, match="at most 16 deep"):
        from_json(json.dumps(deep))


def test_every_step_has_one_name():
    assert len({*STEPS.values()}) == len(STEPS)


# Looking


def test_a_dataset_is_shown_on_one_screen():
    text = repr(data.digits().then(Flip("x")).shuffle().batch(32))
    assert "1,797 samples of digits" in text
    assert "x: float32[1, 8, 8]  input" in text
    assert "then batch(size=32)" in text
    assert len(text.splitlines()) < 12
    wide = data.arrays({f"{k} c": np.zeros(3) for k in range(300)})
    assert "and 292 more columns" in repr(wide)


def test_a_profile_accounts_for_each_step():
    def slow(sample):
        end = time.thread_time() + 2e-4
        while time.thread_time() < end:
            pass
        return sample

    profile = data.digits().map(slow).profile(batches=5)
    assert (profile.samples, profile.batches) == (160, 5)
    slowest = max(profile.steps, key=lambda s: s.seconds)
    assert slowest.step.startswith("map(")
    assert 190 < slowest.us_per_sample < 1000
    assert "samples/s in one thread" in str(profile)


def test_a_wrong_column_or_place_is_named():
    with pytest.raises(InvalidInput, match=r"no column 'z'; there are x, y"):
        data.digits().roles("z")
    with pytest.raises(InvalidInput, match="works on samples; put it before batch"):
        stream(numbers(4).batch(2).shuffle())
    with pytest.raises(InvalidInput, match=r"add \.batch"):
        stream(numbers(4))
    with pytest.raises(InvalidInput, match=r"[Ss]cale"):
        stream(numbers(4).then(Scale("x")).batch(2))


def test_columns_of_different_length_are_refused():
    with pytest.raises(InvalidInput, match="lengths differ"):
        ArrayTable({"a": np.zeros(2), "b": np.zeros(3)})


def test_a_split_comes_before_random_steps_and_spares_the_held_out_part():
    images = data.arrays(np.arange(40, dtype=np.float32).reshape(40, 1, 1, 1), np.arange(40) % 4)
    plain = images.split(0.25, seed=3)
    rest, held_out = (
        images.then(Noise("x", 1.0, low=-99, high=99)).shuffle().batch(8).split(0.25, seed=3)
    )
    assert sorted(y for b in rest for y in b["y"]) == sorted(plain[0].y)
    shown = np.concatenate([b["x"] for b in held_out])
    assert np.array_equal(shown, plain[1].x)
    noisy = np.concatenate([b["x"] for b in rest]).ravel()
    assert not set(noisy.tolist()) & set(plain[0].x.ravel().tolist())
    assert from_json(data.digits().shuffle().split()[1].json()).samples == 360


@pytest.mark.parametrize("batched", [False, True])
def test_showing_a_dataset_does_not_try_a_filter_on_all_samples(batched):
    calls: list[int] = []

    def odd(sample):
        calls.append(1)
        return sample["x"] % 2

    dataset = numbers(5000).filter(odd)
    text = repr(dataset.batch(4) if batched else dataset)
    assert text.startswith("? samples of arrays in memory")
    assert not calls
    assert len(dataset) == 2500

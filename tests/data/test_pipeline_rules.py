# mypy: disable-error-code="union-attr,arg-type"
"""What pipelines once got wrong without an error, and hostile steps: each test states the rule."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tests.support.streams import numbers, stream

from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir import data
from triplane.unified_ir.data import workers as worker_processes
from triplane.unified_ir.data.ahead import Loading
from triplane.unified_ir.data.by_name import stored
from triplane.unified_ir.data.columns import Ragged
from triplane.unified_ir.data.form import from_json
from triplane.unified_ir.data.loader import Loader
from triplane.unified_ir.data.ordering import Split
from triplane.unified_ir.data.transforms import Flip, Noise, Rename
from triplane.unified_ir.data.views import Reordered


def test_steps_after_zip_see_the_shuffling_of_its_parts():
    x, z = (data.arrays({name: np.arange(20)}) for name in "xz")
    small = data.zipped(x.shuffle(), z).filter(lambda s: s["x"] < 10).batch(20)
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        (batch,) = small.opened(seed).batches(epoch)
        assert sorted(batch["x"]) == list(range(10))
    with pytest.raises(InvalidInput, match="cache keeps what the first epoch computed"):
        data.zipped(x.shuffle(), z).cache().view()


def test_parts_of_zip_and_steps_after_it_draw_different_numbers():
    zeros = np.zeros(6, np.float32)
    x, z, w = (data.arrays({name: zeros}).then(Noise(name, 1, low=-9, high=9)) for name in "xzw")
    both = data.zipped(data.zipped(x, z), w, data.arrays({"v": zeros}))
    (batch,) = both.then(Noise("v", 1, low=-9, high=9)).batch(6).opened(3).batches(0)
    assert len({tuple(column) for column in batch.values()}) == 4


def test_split_after_a_random_step_is_refused():
    numbers = data.arrays({"x": np.arange(20)})
    with pytest.raises(InvalidInput, match="put split before that step"):
        numbers.shuffle().then(Split(0.2, held_out=True)).view()
    with pytest.raises(InvalidInput, match="put split before that step"):
        data.zipped(numbers.shuffle(), data.arrays({"z": np.arange(20)})).split()


def sequences() -> Iterator[dict[str, np.ndarray]]:
    """Return sequences of which the first 256, a block, have the same length."""
    return ({"x": np.full(2 if k < 256 else k % 3 + 1, k)} for k in range(512))


@pytest.mark.parametrize("size", [1, 100, 300])
def test_sequences_that_happen_to_have_one_length_are_padded_like_others(size: int):
    made = data.generated(sequences, ragged=("x",))
    for dataset in (
        made.shuffle(1),
        made.map(lambda s: {"x": s["x"]}),
        data.generated(lambda: ({"k": k} for k in range(512))).map(
            lambda s: {"x": np.full(2 if s["k"] < 256 else s["k"] % 3 + 1, s["k"])}, ragged=("x",)
        ),
    ):
        batches = list(dataset.padded_batch(size, length=4, lengths=True))
        assert all(b["x"].shape == (len(b["x.length"]), 4) for b in batches)
        assert np.concatenate([b["x"][:, 0] for b in batches]).tolist() == list(range(512))


def test_map_refuses_lengths_that_differ_unless_they_are_stated():
    rows = data.arrays(np.arange(5)).map(lambda s: {"x": np.zeros(int(s["x"]))})
    with pytest.raises(InvalidInput, match=r"state map\(..., ragged=\('x',\)\)"):
        next(rows.batch(5).opened().batches(0))


def test_list_reads_samples_of_unknown_number():
    dataset = data.generated(lambda: ({"x": k} for k in range(5)))
    assert [int(one["x"]) for one in list(dataset)] == list(range(5))
    with pytest.raises(InvalidInput, match=r"number of samples of .* is not known"):
        len(dataset)


def test_split_does_not_put_copies_of_a_sample_in_both_parts():
    rest, held_out = numbers(10).repeat(3).split(0.3)
    assert (len(rest), len(held_out)) == (7 * 3, 3)
    assert not set(rest.x.tolist()) & set(held_out.x.tolist())


def test_split_holds_out_the_last_of_windows_that_overlap():
    rest, held_out = numbers(20).then(Rename("x", "z")).window(3).roles("z").split(0.25)
    assert set(rest.x.ravel().tolist()) == set(range(15))
    assert set(held_out.x.ravel().tolist()) == set(range(15, 20))
    with pytest.raises(InvalidInput, match="leaves one part without a window"):
        numbers(20).window(8).split(0.25)
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        numbers(20).window(8).split(1.5)
    apart, _ = numbers(20).window(2, stride=2).split(0.5, seed=3)
    assert apart.x[:, 0].tolist() != list(range(0, 10, 2))


def test_a_character_of_a_text_is_a_target_once_so_that_no_held_out_target_is_learned(tmp_path):
    """Neighbours share one character: the last target of a window is the next one's first input."""
    path = tmp_path / "letters.txt"
    path.write_text("".join(chr(0x4E00 + k) for k in range(400)), encoding="utf-8")
    rest, held_out = data.load(path, window=8).split(0.2)
    for role in ("x", "y"):
        learned, scored = (getattr(part, role).ravel().tolist() for part in (rest, held_out))
        assert set(learned).isdisjoint(scored)
        assert len({*learned, *scored}) == len(learned) + len(scored) == 49 * 8


@pytest.mark.parametrize(
    "windows",
    [
        lambda d: d.then(Noise("x", 0.01, 0, 99)).window(3),
        lambda d: d.then(Noise("x", 0.01, 0, 99)).window(3, stride=3),
        lambda d: d.window(3).window(2),
        lambda d: d.window(3, stride=3, ahead=3),
        lambda d: d.window(3, ahead=2),
    ],
)
def test_split_of_a_series_keeps_rows_together_and_apart(windows):
    """Random steps before the windows, windows of windows, and windows that look ahead."""
    parts = windows(data.arrays({"x": np.arange(40, dtype=np.float32)})).split(0.4)
    rows = [
        {*np.concatenate([np.round(part.column(n)).ravel() for n in part.schema])} for part in parts
    ]
    assert rows[0].isdisjoint(rows[1])
    assert all((np.diff(np.round(part.column("x")), axis=-1) == 1).all() for part in parts)


def test_overlap_counts_the_windows_before_that_share_samples():
    rows = np.arange(60)
    for size, stride, ahead, outer in [(4, 1, 0, 1), (4, 1, 2, 1), (2, 3, 4, 1), (3, 2, 0, 4)]:
        dataset = data.arrays({"x": rows}).window(size, stride=stride, ahead=ahead)
        dataset = dataset if outer == 1 else dataset.window(outer)
        seen = [{*np.concatenate([np.ravel(a) for a in s.values()]).tolist()} for s in dataset]
        shares = [k for k in range(len(seen)) if seen[0] & seen[k]]
        assert dataset.overlap == max(shares)
    assert data.arrays({"x": rows}).window(4, stride=4).overlap == 0
    assert data.arrays({"x": rows}).window(4, stride=4, ahead=1).overlap == 0  # of a text


def test_where_refuses_bytes():
    rows = data.arrays({"x": np.array([b"a", b"b"], object)})
    with pytest.raises(InvalidInput, match="where compares one number or text"):
        rows.where("x", "==", "a").view()


def test_window_does_not_write_what_comes_next_over_its_input():
    with pytest.raises(InvalidInput, match="would write over the column"):
        numbers(9).window(3, ahead=1, into="x").view()


@pytest.mark.parametrize(
    "steps",
    [
        [{"step": []}],
        [{"step": {}}],
        [{"step": "weighted", "column": "y", "count": 10**15}],
        [{"step": "balanced", "column": "y", "count": 10**15}],
        [{"step": "window", "size": 2, "stride": 10**30}],
        [{"step": "skip", "count": 10**30}],
        [{"step": "repeat", "times": 2**32}] * 3,
    ],
)
def test_hostile_steps_are_refused(steps: list[object]):
    text = json.dumps({"format": 1, "source": {"kind": "digits"}, "steps": steps})
    with pytest.raises(InvalidInput, match=r"step 1|must be at most|are more than"):
        from_json(text).view()


def test_zip_in_json_has_no_other_fields():
    parts = [{"format": 1, "source": {"kind": "digits"}, "steps": []}] * 2
    text = json.dumps({"format": 1, "source": {"kind": "zip", "parts": parts, "path": "a"}})
    with pytest.raises(InvalidInput, match="and no more"):
        from_json(text)


def test_no_samples_may_be_repeated():
    assert not len(numbers(3).where("x", "<", 0).repeat(2).column("x"))


@dataclass
class Times:
    """A function that compares equal to any other of its kind."""

    factor: int = dataclasses.field(compare=False)

    def __call__(self, sample: dict[str, int]) -> dict[str, int]:
        return {"x": sample["x"] * self.factor}


def test_functions_are_told_apart_by_identity():
    once, twice = (numbers(3).map(Times(k)).cache() for k in (1, 2))
    twice = dataclasses.replace(twice, _memo=once._memo)
    assert (once.x.tolist(), twice.x.tolist()) == ([0, 1, 2], [0, 2, 4])


def test_repeat_after_a_filter_of_random_samples_is_refused():
    few = numbers(6).shuffle().take(3)
    with pytest.raises(InvalidInput, match="put repeat before the filter"):
        few.where("x", "<", 3).repeat(2).view()
    order = stream(few.repeat(2).where("x", "<", 3).batch(9), seed=4)
    both = [stream(few.where("x", "<", 3).batch(9), seed=4, epoch=e) for e in (0, 1)]
    assert order == [[x for part in both for batch in part for x in batch]]


def without_target(sample):
    return {"x": sample["x"]}


def endless(sample):
    time.sleep(60)
    return sample


def test_a_function_may_drop_a_column_of_a_role(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(8), y=np.arange(8))
    dataset = data.load(tmp_path / "a.npz").map(without_target).batch(4)
    loader = Loader(dataset, 0, Loading(1, processes=True))
    assert [b["x"].tolist() for b in loader.batches(0)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.close()
    with pytest.raises(InvalidInput, match=r"column 'y', but a batch has x; .*roles"):
        next(dataset.batches(4, seed=0))


def test_processes_end_although_a_function_does_not_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_processes, "_END_S", 0.5)
    np.savez(tmp_path / "a.npz", x=np.arange(8))
    dataset = data.load(tmp_path / "a.npz").map(endless).batch(2)
    pool = worker_processes.ChildPool(dataset, 0, 2)
    errors: list[BaseException] = []

    def read():
        try:
            pool.batch(0, 0)
        except Unavailable as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.3)
    start = time.monotonic()
    pool.close()
    reader.join()
    assert time.monotonic() - start < 10
    assert "ended with code -9" in str(errors[0])


def test_records_of_some_samples_still_hold_pixels(tmp_path):
    stored("digits").take(100).shuffle().write(tmp_path / "a.tpr")
    some = data.load(tmp_path / "a.tpr")
    assert some.x.max() == 1.0
    assert not some.notes


def test_roles_read_back_from_json():
    for inputs, targets in (((), ()), (("y",), ()), ((), ("x",))):
        again = from_json(data.digits().roles(inputs, targets).json())
        assert (again.inputs, again.targets) == (inputs, targets)


def test_targets_of_two_files_have_one_type(tmp_path):
    (tmp_path / "whole.csv").write_text("x,y\n1,0\n2,3\n")
    (tmp_path / "parts.csv").write_text("x,y\n1,0.5\n2,1.5\n")
    with pytest.raises(InvalidInput, match=r"y holds whole numbers in .*whole.csv"):
        data.load_both(tmp_path / "whole.csv", tmp_path / "parts.csv")
    _, held_out = data.load_both(tmp_path / "parts.csv", tmp_path / "whole.csv")
    assert held_out.y.dtype == np.float64
    assert held_out.y.tolist() == [0, 3]


def test_two_views_do_not_wait_for_each_other():
    table, lock, waits = numbers(3).view(), threading.Lock(), threading.Event()

    def waiting():
        waits.set()
        with lock:
            return np.arange(3)

    first, second = Reordered(table, waiting), Reordered(table, lambda: np.arange(3))
    other = threading.Thread(target=lambda: first.order)
    with lock:
        other.start()
        waits.wait()
        main = threading.Thread(target=lambda: second.order, daemon=True)
        main.start()
        main.join(5)
        assert not main.is_alive()
    other.join()


def test_padding_must_fit_the_type_and_lengths_a_free_name():
    rows = Ragged.of([np.arange(2, dtype=np.uint8), np.arange(3, dtype=np.uint8)])
    for fill in (300, -1, 0.5):
        with pytest.raises(InvalidInput, match="PaddedBatch: fill must be a value of uint8"):
            data.arrays(rows).padded_batch(2, fill=fill).view()
    both = data.arrays({"x": rows, "x.length": np.arange(2)})
    assert both.padded_batch(2).view()
    with pytest.raises(InvalidInput, match=r"already has a column 'x\.length'"):
        both.padded_batch(2, lengths=True).view()


def test_select_takes_numbers_and_no_mask():
    for rows in (np.array([True, False, True]), np.array([0.5]), np.array([[1]])):
        with pytest.raises(InvalidInput, match="select takes the numbers of samples"):
            numbers(3).select(rows)


def test_columns_of_batches_are_refused_as_such():
    with pytest.raises(InvalidInput, match=r"is read in batches, .* leave out .batch"):
        numbers(4).batch(2).column("x")


def test_random_steps_refuse_batches_of_another_size():
    images = data.arrays(np.zeros((6, 4), np.float32)).batch(3)
    doubled = images.map(lambda b: {"x": np.repeat(b["x"], 2, axis=0)}).then(Flip("x"))
    with pytest.raises(InvalidInput, match=r"Flip draws numbers for each of 3 samples, .* 6; put"):
        next(doubled.opened().batches(0))


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_only_the_columns_that_are_chosen_are_read_of_a_table(tmp_path, suffix):
    """An empty cell elsewhere is no fault of the samples."""
    path = tmp_path / f"a.{suffix}"
    rows = ("a0,age,a1,who:is,does", "1,30,2,ann,run", "3,,4,bob,sit")
    path.write_text("\n".join(rows).replace(",", "\t" if suffix == "tsv" else ",") + "\n")
    with pytest.raises(InvalidInput, match=r":3: column 'age': there is no value"):
        data.load(path, x=["a*", "age"], y="does")
    for x in (["a0,a1"], ["a1,a0"]):
        dataset = data.load(path, x=x, y="does", keep="who:is")
        expected = [[1, 2], [3, 4]] if x == ["a0,a1"] else [[2, 1], [4, 3]]
        assert np.asarray(dataset.x).tolist() == expected
        assert np.asarray(dataset.y).tolist() == [0, 1]
        assert dataset.column("who:is").tolist() == ["ann", "bob"]
    with pytest.raises(NotFound, match="no column is called 'b'; there are a0, age, a1"):
        data.load(path, x="b", y="does")


def test_a_table_without_rows_has_no_classes(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n")
    with pytest.raises(InvalidInput, match=r"a.csv holds no samples, so y has no classes"):
        data.load(tmp_path / "a.csv")

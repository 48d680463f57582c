# mypy: disable-error-code="union-attr,arg-type,misc"
"""Windows within runs of equal values: no window crosses the border of a file or of a person."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.dataset import Dataset
from triplane.unified_ir.data.form import from_json
from triplane.unified_ir.data.grouping import Windowed
from triplane.unified_ir.data.opened import Origin


class BlocksOf:
    """A feed of columns, in blocks of a few samples."""

    def __init__(self, whole, block):
        self.whole, self.block = whole, block

    @property
    def schema(self):
        return columns.schema_of(self.whole)

    def blocks(self, start):
        n = columns.count(self.whole)
        for at in range(start, n, self.block):
            yield columns.part(self.whole, at, min(at + self.block, n))


def windows(people, days, size, stride, ahead):
    """The same in Python: (person, day, window, the window ahead of it)."""
    keys = list(zip(people, days, strict=True))
    result, at = [], 0
    for key, run in groupby(keys):
        n = len(list(run))
        starts = range(at, at + n - size - ahead + 1, stride)
        result += [(*key, *([*range(i, i + size)] for i in (k, k + ahead))) for k in starts]
        at += n
    return result


@settings(deadline=None, max_examples=150)
@given(
    people=st.lists(st.sampled_from(["ann", "bob"]), min_size=1, max_size=30),
    size=st.integers(1, 4), stride=st.integers(1, 5), ahead=st.integers(0, 2),
    block=st.integers(1, 9), seed=st.integers(0, 9),
)  # fmt: skip
def test_windows_stay_within_runs_in_tables_and_feeds(people, size, stride, ahead, block, seed):
    days = np.random.default_rng(seed).integers(0, 2, len(people)) // 2
    whole = {"x": np.arange(len(people)), "who": np.array(people, object), "day": days}
    expected = windows(people, days.tolist(), size, stride, ahead)
    step = Windowed(size, stride, ahead, "y", ("who", "day"))
    table = data.arrays(whole).then(step)
    assert table.samples == len(expected)
    feed = Dataset(Origin(None, BlocksOf(whole, block), "a feed")).then(step)
    for start in {0, 1, len(expected) // 2, len(expected)}:
        rows: list[tuple] = []
        for part in feed.view().blocks(start):
            y = part["y"] if ahead else part["x"]
            rows += zip(part["who"], part["day"], part["x"].tolist(), y.tolist(), strict=True)
        assert [(who, int(day), x, y) for who, day, x, y in rows] == expected[start:]
    if expected:
        block_of_all = table.view().take(np.arange(len(expected))[::-1])
        assert block_of_all["x"].tolist() == [x for _, _, x, _ in expected][::-1]
        assert block_of_all["who"].tolist() == [who for who, *_ in expected][::-1]


def test_within_is_part_of_the_json_form():
    people = np.array(["ann"] * 4 + ["bob"] * 4, object)
    dataset = data.arrays({"x": np.arange(8.0), "who": people}).window(3, within=["who"])
    assert dataset.steps[-1] == Windowed(3, within=("who",))
    assert [(s["who"], s["x"].tolist()) for s in dataset] == [
        ("ann", [0, 1, 2]), ("ann", [1, 2, 3]), ("bob", [4, 5, 6]), ("bob", [5, 6, 7]),
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="window: within is of type"):
        from_json(
            '{"format": 1, "source": {"kind": "digits"},'
            ' "steps": [{"step": "window", "size": 2, "within": "y"}]}'
        )


@pytest.mark.parametrize(
    ("within", "message"),
    [(("who",), "'who' is absent"), (("pair",), r"'pair' is float64\[2\]")],
)
def test_windows_need_one_value_for_each_sample(within, message):
    with pytest.raises(InvalidInput, match=message):
        data.arrays({"x": np.arange(4.0), "pair": np.zeros((4, 2))}).window(2, within=within).view()


def test_rows_of_a_table_become_windows_of_one_person(tmp_path):
    rows = [f"{k},{['ann', 'bob'][k // 5]}" for k in range(10)]
    (tmp_path / "steps.csv").write_text("\n".join(["ax,who", *rows]))
    dataset = data.load(tmp_path / "steps.csv", x=["ax"], keep=["who"], window=4)
    assert dataset.column("who").tolist() == ["ann", "ann", "bob", "bob"]
    assert dataset.x[:, 0].tolist() == [0, 1, 5, 6]
    _, held_out = data.load_split(tmp_path / "steps.csv", x=["ax"], window=4, group="who")
    assert len({*held_out.column("who")}) == 1


def test_windows_of_a_folder_of_texts_stay_within_its_files(tmp_path):
    for name, text in {"ann": "abcabca", "bob": "cdcdcdc"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    dataset = data.load(tmp_path, keep=["file"], window=3)
    assert dataset.column("file").tolist() == ["ann", "ann", "bob", "bob"]
    assert dataset.labels == ("a", "b", "c", "d")
    assert dataset.y.tolist() == [[1, 2, 0], [1, 2, 0], [3, 2, 3], [2, 3, 2]]
    assert data.load(tmp_path, window=3).samples == 4

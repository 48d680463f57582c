"""Numbered columns of a wide table are shown as one line."""

import pytest

from triplane.proto.errors import NotFound
from triplane.unified_ir.cli import shell
from triplane.unified_ir.data import load
from triplane.unified_ir.data.column_runs import column_runs, names_text


@pytest.fixture
def wide(tmp_path):
    names = [*(f"ax{k}" for k in range(64)), *(f"ay{k}" for k in range(64)), "site", "speed"]
    rows = [[*map(str, range(128)), "north", "1.5"]] * 2
    path = tmp_path / "wide.csv"
    path.write_text("\n".join(",".join(row) for row in [names, *rows]) + "\n")
    return path


def test_neighbours_with_one_stem_and_one_value_are_one_run():
    kinds = {"t0": 1, "t1": 1, "t2": 1, "t3": 1, "u4": 1, "t5": 1, "y": 2}
    assert column_runs(kinds) == [("t0", "t1", "t2", "t3"), ("u4",), ("t5",), ("y",)]
    assert column_runs({**dict.fromkeys(["t0", "t1"], 1), "t2": 2, "t3": 2}) == [
        ("t0",), ("t1",), ("t2",), ("t3",),
    ]  # fmt: skip


def test_names_in_a_message_are_runs_and_a_few():
    assert names_text([f"a{k}" for k in range(9)] + ["y"]) == "a0 ... a8, y"
    assert names_text("abcdefghijk") == "a, b, c, d, e, f, g, h, ..."


def test_a_wide_table_shows_the_columns_behind_the_numbered_ones(wide, capsys):
    assert shell.run(["data", "inspect", str(wide), "--samples", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 samples of wide.csv",
        "  ax0 ... ax63: int64  (64 columns)",
        "  ay0 ... ay63: int64  (64 columns)",
        "  site: text",
        "  speed: float64",
        "sample 0",
        "  ax0 ... ax63: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,...",
        "  ay0 ... ay63: 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 8...",
        "  site: 'north'",
        "  speed: 1.5",
    ]


def test_a_missing_column_is_refused_with_all_that_exist(wide):
    there = r"there are ax0 \.\.\. ax63, ay0 \.\.\. ay63, site, speed"
    with pytest.raises(NotFound, match=rf"no column is called 'sped'; {there}"):
        load(wide, x=["ax*"], y=["sped"])

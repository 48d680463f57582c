"""The history as columns and as a chart."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from triplane.proto.errors import NotFound
from triplane.unified_ir.train import History

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    {"epoch": 1.0, "step": 10.0, "loss": 1.0, "f1": math.nan, "validation.loss": 1.5},
    {"epoch": 2.0, "step": 20.0, "loss": 0.5, "f1": 0.5, "validation.accuracy": 0.5},
    {"epoch": 3.0, "step": 30.0, "loss": 0.25, "f1": 0.75, "validation.loss": 0.5},
]


def lines(svg: str) -> list[int]:
    """Return the number of points of each line."""
    root = ET.fromstring(svg)
    return [len(line.attrib["points"].split()) for line in root.iter(f"{SVG}polyline")]


def titles(svg: str) -> list[str | None]:
    return [title.text for title in ET.fromstring(svg).iter(f"{SVG}title")]


def test_steps_and_epochs_are_whole_numbers_of_any_size() -> None:
    history = History([{"epoch": 12345.0, "step": 1234567.0, "loss\x1b[31m": 0.123456}])
    assert repr(history).splitlines()[1:] == [
        "epoch     step  loss [31m", "12345  1234567     0.1235"
    ]  # fmt: skip
    assert "<td>1234567</td>" in history._repr_html_()


def test_a_table_has_columns_of_one_length() -> None:
    table = History(ROWS).table()
    assert list(table) == ["epoch", "step", "loss", "f1", "validation.loss", "validation.accuracy"]
    assert table["loss"] == [1.0, 0.5, 0.25]
    assert [math.isnan(x) for x in table["validation.loss"]] == [False, True, False]
    assert {len(column) for column in table.values()} == {3}
    assert History().table() == {}


def test_a_plot_has_a_chart_for_each_measure_and_a_line_for_each_kind_of_data(
    tmp_path: Path,
) -> None:
    chart = History(ROWS).plot()
    assert titles(chart.svg) == ["3 epochs", "loss", "f1", "accuracy"]
    assert lines(chart.svg) == [3, 2, 2, 1]
    chart.save(tmp_path / "h.svg")
    assert (tmp_path / "h.svg").read_text("utf-8") == chart._repr_svg_()


@pytest.mark.parametrize("name", ["loss", "validation.loss"])
def test_a_plot_of_one_measure_is_one_chart(name: str) -> None:
    chart = History(ROWS).plot(name)
    assert titles(chart.svg) == ["loss"]
    assert lines(chart.svg) == [3, 2]
    texts = [t.text for t in ET.fromstring(chart.svg).iter(f"{SVG}text")]
    assert {"training", "validation", "epoch", "1", "2", "3"} <= set(texts)
    assert "4" not in texts


def test_a_plot_draws_at_most_four_measures_by_itself() -> None:
    rows = [{"epoch": k, **{f"m{c}": c * k for c in range(9)}} for k in (1.0, 2.0)]
    assert titles(History(rows).plot().svg)[1:] == ["m0", "m1", "m2", "m3"]


def test_what_has_no_points_is_refused_with_what_there_is() -> None:
    with pytest.raises(NotFound, match="no epoch has a finite measure 'top5'; there are: loss, f1"):
        History(ROWS).plot("top5")
    for rows in ([], [{"epoch": 1.0, "step": 1.0, "loss": math.nan}]):
        with pytest.raises(NotFound, match="no epoch with a finite measure is finished yet"):
            History(rows).plot()

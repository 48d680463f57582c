"""Charts as SVG."""

from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files.chart import (
    HEIGHT,
    MAX_DOTS,
    WIDTH,
    Chart,
    Column,
    bar_chart,
    dot_chart,
    line_chart,
    stack,
)

SVG = "{http://www.w3.org/2000/svg}"
LINES = {"training": [(0, 2.0), (1, 1.0), (2, 0.5)], "held out": [(0, 2.1), (1, 1.2), (2, 0.9)]}


def test_a_line_chart_names_its_axes_and_lines_and_stays_inside():
    root = ET.fromstring(line_chart(LINES, "Loss <per> epoch", "epoch", "loss & more"))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"Loss <per> epoch", "epoch", "loss & more", "training", "held out"} <= set(texts)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


@pytest.mark.parametrize("points", [[(0, 1.0)], [(3, 5.0), (3, 5.0)], [(0, 0.0), (1, 0.0)]])
def test_a_line_without_extent_is_drawn(points):
    assert "polyline" in line_chart({"a": points}, "t", "x", "y")


@pytest.mark.parametrize(
    "values", [[1e-13, 3e-15], [1e-300], [5e-324, 0.0], [-1e300, 1e300], [1e17, 1e17 + 32]]
)
def test_values_of_any_size_are_drawn_apart(values):
    root = ET.fromstring(line_chart({"a": list(enumerate(values))}, "t", "x", "y"))
    (line,) = root.iter(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert all(0 <= y <= HEIGHT for y in heights)
    if values[0] > 1e-300:
        assert len(set(heights)) == len(values)


def test_values_whose_difference_is_not_finite_are_refused():
    with pytest.raises(InvalidInput, match="up to 1e\\+300"):
        line_chart({"a": [(0, -1e308), (1, 1e308)]}, "t", "x", "y")


@pytest.mark.parametrize("values", [[100, 100.002], [0.93, 0.93002], [123456, 123456.1]])
def test_labels_of_an_axis_differ_where_values_are_close(values):
    root = ET.fromstring(line_chart({"a": list(enumerate(values))}, "t", "x", "y"))
    texts = [(t.text or "").replace(",", "") for t in root.iter(f"{SVG}text")]
    numbers = [float(t) for t in texts if t[0].isdigit() and float(t) > 0.9 * values[0]]
    assert len(set(numbers)) == len(numbers) > 2


@pytest.mark.parametrize("epochs", [2, 3, 12, 13, 37, 100, 400])
def test_the_horizontal_axis_ends_where_the_lines_do(epochs):
    lines = {"training": [(k, 1 / k) for k in range(1, epochs + 1)]}
    root = ET.fromstring(line_chart(lines, "Loss", "epoch", ""))
    (line,) = root.iter(f"{SVG}polyline")
    right = max(float(rule.attrib["x2"]) for rule in root.iter(f"{SVG}line"))
    assert float(line.attrib["points"].split()[-1].split(",")[0]) == pytest.approx(right, abs=0.01)
    texts = {t.text or "": float(t.attrib["x"]) for t in root.iter(f"{SVG}text")}
    numbers = [float(t) for t, x in texts.items() if t.isdigit() and x > 60]
    assert 2 <= len(numbers) <= 8
    assert max(numbers) <= epochs
    assert texts["training"] > right, "the name stands beside the grid"


def test_long_names_of_lines_are_cut_and_stay_apart_lines():
    names = [f"a name of a measure that is much too long, {k}" for k in range(3)]
    root = ET.fromstring(line_chart({n: [(0, 1.0), (1, 2.0)] for n in names}, "t", "x", "y"))
    assert len(list(root.iter(f"{SVG}polyline"))) == 3
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["x"]) + 7 * len(text.text or "") <= WIDTH + 10


@pytest.mark.parametrize("name", ["a\x00b", "\ud800", "a\nb", "\u202eb", "<b>&'\""])
def test_any_name_gives_a_well_formed_chart(name):
    lines = line_chart({name: [(0, 1.0)]}, name, name, name)
    for drawn in (lines, bar_chart({name: 1.0}, name, "")):
        texts = [t.text for t in ET.fromstring(drawn.encode()).iter(f"{SVG}text")]
        assert "".join(c if c.isprintable() else " " for c in name) in texts


def test_a_chart_is_shown_by_notebooks_and_saved_and_short_at_a_prompt(tmp_path):
    chart = Chart(line_chart(LINES, "größe", "x", "y"))
    assert chart._repr_svg_() == chart.svg
    chart.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text("utf-8") == chart.svg
    assert len(repr(chart)) < 80


def test_labels_at_the_ends_never_touch():
    flat = {name: [(0, 1.0), (1, 1.0)] for name in ("a", "b", "c", "d")}
    root = ET.fromstring(line_chart(flat, "t", "x", "y"))
    heights = sorted(float(t.attrib["y"]) for t in root.iter(f"{SVG}text") if t.text in flat)
    assert all(b - a >= 15 for a, b in pairwise(heights))


def test_bars_are_proportional_and_say_their_value():
    root = ET.fromstring(bar_chart({"one": 10.0, "two": 5.0}, "Size", "kB"))
    widths = [float(r.attrib["width"]) for r in root.iter(f"{SVG}rect")][1:]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert {"10 kB", "5 kB"} <= {t.text for t in root.iter(f"{SVG}text")}


def test_a_stack_is_one_well_formed_page():
    page = stack([bar_chart({"a": 1.0}, "A", ""), line_chart(LINES, "B", "x", "y")], "T", ["sub"])
    inner = ET.fromstring(page).findall(f"{SVG}svg")
    assert len(inner) == 2
    assert float(inner[1].attrib["y"]) > float(inner[0].attrib["y"])


def test_the_same_data_gives_the_same_bytes_and_refers_to_nothing_outside():
    drawn = line_chart(LINES, "t", "x", "y")
    assert drawn == line_chart(LINES, "t", "x", "y")
    assert drawn.count("http") == 1
    assert "<script" not in drawn


@pytest.mark.parametrize("bad", [{}, {"a": float("nan")}, {"a": float("inf")}, {"a": -1.0}])
def test_bars_that_are_no_amounts_are_refused(bad):
    with pytest.raises(InvalidInput):
        bar_chart(bad, "t", "")


@pytest.mark.parametrize("bad", [{}, {"a": []}, {"a": [(0, float("nan"))]}])
def test_lines_without_finite_points_are_refused(bad):
    with pytest.raises(InvalidInput, match="finite"):
        line_chart(bad, "t", "x", "y")


def test_names_of_lines_stay_on_the_picture_apart():
    series = {f"line {k}": [(0.0, 2.0), (300.0, 0.001 * k)] for k in range(7)}
    root = ET.fromstring(line_chart(series, "t", "x", "y"))
    names = {e.text: float(e.attrib["y"]) for e in root.iter() if e.text in series}
    heights = sorted(names.values())
    assert len(names) == 7
    assert heights[-1] <= HEIGHT - 40
    assert min(b - a for a, b in pairwise(heights)) >= 15.9


def test_many_devices_are_thinned():
    column = Column("fedavg", "unseen", [(k / 5000, k / 5000) for k in range(5000)])
    assert dot_chart([column], "t", "y").count("<circle") <= 2 * MAX_DOTS

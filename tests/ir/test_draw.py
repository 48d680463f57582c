"""Drawings: sound, equal on every run, with every computed node once and no box on another."""

from functools import partial
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from tests.ir import graphs

from triplane.unified_ir.ir import draw
from triplane.unified_ir.ir.draw import STYLE, function_svg
from triplane.unified_ir.ir.graph import Function, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import TensorSpec

SVG = "{http://www.w3.org/2000/svg}"
FUNCTIONS = {
    f"{name}-{order}": partial(lambda name, order: graphs.with_gradients(name)[order], name, order)
    for name in graphs.WITH_REGIONS
    for order in range(3)
}
FUNCTIONS |= {name: partial(graphs.module().entry, name) for name in ("predict", "train_step")}


def boxes(svg):
    """(title, x, y, width) of every box."""
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        if rect is not None and title is not None:
            yield title.text or "", *(float(rect.attrib[k]) for k in ("x", "y", "width"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_computed_node_is_drawn_once_and_nothing_overlaps(name):
    function = FUNCTIONS[name]()
    svg = function_svg(function, graphs.module().state)
    assert svg == function_svg(FUNCTIONS[name](), graphs.module().state)
    drawn = list(boxes(svg))
    nodes = [title for title, *_ in drawn if title.startswith("node ")]
    assert len(nodes) == len(set(nodes))
    derived = set(function.params)
    for node in function.nodes:
        if derived & set(node.inputs):
            derived.update(node.outputs)
    computed = [i for i, n in enumerate(function.nodes) if derived & set(n.inputs)]
    assert sorted(int(t.split(":")[0].removeprefix("node ")) for t in nodes) == computed
    assert len([t for t, *_ in drawn if t.startswith("result ")]) == len(function.results)
    rows: dict[float, list] = {}
    for title, x, y, width in drawn:
        rows.setdefault(y, []).append((x, width, title))
    for row in rows.values():
        for (x, width, a), (after, _, b) in pairwise(sorted(row)):
            assert x + width <= after, (a, b)


def test_backward_and_later_nodes_have_colours_of_their_own():
    svg = function_svg(graphs.with_gradients("scan")[1])
    assert STYLE["backward"][0] in svg
    assert "backward" in svg
    assert STYLE["update"][2] not in svg


def test_names_cannot_leave_their_place():
    x = Value(TensorSpec((2,)), "</title><script>alert(1)</script>")
    y = Value(TensorSpec((2,)))
    relu = Node(OpId("", "Relu", 14), (x,), (y,), meta=Meta(None, "<b>"))
    svg = function_svg(Function("<f>", (x,), (y,), ("<r>",), (relu,)))
    assert not any(tag in svg for tag in ("<script>", "<b>", "<f>", "<r>"))
    assert next(t for t, *_ in boxes(svg) if "script" in t).startswith("input </title>")


def test_huge_functions_are_told_instead_of_drawn(monkeypatch):
    monkeypatch.setattr(draw, "MAX_DRAWN", 3)
    svg = function_svg(graphs.with_gradients("scan")[1])
    assert "at most 3 are drawn" in svg
    ET.fromstring(svg)

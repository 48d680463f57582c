"""The SVG of an outline: sound, equal on every run, no box on another, texts that stay texts."""

from xml.etree import ElementTree as ET

from tests.ir import graphs

from triplane.unified_ir.cli.drawing.outline import outline
from triplane.unified_ir.cli.drawing.placing import placed
from triplane.unified_ir.cli.drawing.svg import svg
from triplane.unified_ir.ir.graph import Function, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import TensorSpec

SVG = "{http://www.w3.org/2000/svg}"


def overlap(a, b):
    beside = a.x + a.width <= b.x or b.x + b.width <= a.x
    return not beside and not (a.y + a.height <= b.y or b.y + b.height <= a.y)


def check_places(box):
    boxes = [spot for spot in box.inner if spot.item]
    for i, a in enumerate(boxes):
        assert a.x >= 0
        assert a.y >= 0
        assert a.x + a.width <= box.width
        assert a.y + a.height <= box.height
        assert not any(overlap(a, b) for b in boxes[i + 1 :])
        check_places(a)


def test_nothing_overlaps_and_everything_is_inside_its_group(function):
    root = outline(function, graphs.module().state)
    for item in root.walk():
        item.opened = bool(item.children)
    check_places(placed(root))


def test_links_run_down_and_in_a_backward_pass_up(tower):
    root = placed(outline(tower.entry("train_step"), tower.state))
    for phase in root.inner:
        assert phase.item is not None
        for spot in phase.inner:
            for reader in spot.below:
                assert (reader.top < spot.top) == (phase.item.name == "backward")


def test_equal_functions_give_equal_pictures(function):
    assert svg(outline(function)) == svg(outline(function))


def test_every_box_of_the_first_view_has_its_lines_and_a_tip(resnet):
    root = ET.fromstring(svg(outline(resnet.entry("train_step"), resnet.state)))
    boxes = [g for g in root.iter(f"{SVG}g") if "data-n" in g.attrib]
    assert len(boxes) > 15
    assert all(g.find(f"{SVG}title") is not None for g in boxes)
    texts = {t.text for t in root.iter(f"{SVG}text")}
    assert {"conv", "Conv 3\u00d73, pad 1", "float32[N,16,32,32]", "\u25be backward"} <= texts
    kinds = {g.attrib["class"].split()[0] for g in boxes}
    assert kinds == {"input", "forward", "backward", "update", "result"}


def test_names_stay_text():
    x = Value(TensorSpec((2,)), "</title><script>alert(1)</script>")
    y = Value(TensorSpec((2,)))
    relu = Node(OpId("", "Relu", 14), (x,), (y,), meta=Meta(None, "<b>"))
    text = svg(outline(Function("<f>", (x,), (y,), ("<r>",), (relu,))))
    assert not any(tag in text for tag in ("<script", "<b>", "<f>", "<r>"))
    assert x.name in [t.text for t in ET.fromstring(text).iter(f"{SVG}text")]

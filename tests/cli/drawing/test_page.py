"""The page of a graph in a real browser: what a person sees and can do."""

import json
import re
from xml.etree import ElementTree as ET

import pytest
from tests.ir import graphs
from tests.support.page_policy import check_policy, policy_of

from triplane.unified_ir.cli.drawing.outline import outline
from triplane.unified_ir.cli.drawing.page import page
from triplane.unified_ir.cli.drawing.svg import svg
from triplane.unified_ir.ir.graph import Function, Location, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import TensorSpec

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    "<img src=x onerror=document.title='owned'></script><script>document.title='owned'</script>"
)
PLACES = """return [...document.querySelectorAll("[data-n]")].map((g) => {
  const rect = [...g.children].filter((e) => e.tagName === "rect").pop();
  return [g.dataset.n, g.getAttribute("transform"), rect.getAttribute("width"),
          rect.getAttribute("height")];
})"""


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of an outline; at the end of the test there must be no complaint."""

    def open_page(root):
        path = tmp_path / "graph.html"
        path.write_text(page(root), "utf-8")
        browser.set_window_size(1200, 900)
        browser.get_log("browser")
        browser.get(path.as_uri())
        return browser

    yield open_page
    complaints = browser.get_log("browser")
    browser.get("about:blank")
    assert complaints == []


def boxes(browser):
    return [g.get_attribute("data-n") for g in browser.find_elements("css selector", "[data-n]")]


def box(browser, name):
    """The title of the visible box with this first line."""
    texts = browser.find_elements("css selector", "[data-n] > text.first")
    return next(t for t in texts if t.text.lstrip("\u25b8\u25be ") == name)


def data_of(text):
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(block)


def test_the_data_holds_every_box_with_its_texts(resnet):
    root = outline(resnet.entry("train_step"), resnet.state)
    data = data_of(page(root))
    assert len(data["parent"]) == len([*root.walk()])
    names = {data["strings"][i] for line in data["lines"] for i in line[:1]}
    assert {"conv", "x", "loss", "head"} <= names


def test_the_page_may_run_its_own_script_and_style_only(resnet):
    text = page(outline(resnet.entry("predict"), resnet.state))
    check_policy(text, policy_of(text))


def test_names_are_data_and_never_markup():
    x, y = Value(TensorSpec((2,)), HOSTILE), Value(TensorSpec((2,)))
    relu = Node(OpId("", "Relu", 14), (x,), (y,), meta=Meta(Location("[[DATA]]", 1), "[[POLICY]]"))
    text = page(outline(Function("[[DATA]]</title><b>", (x,), (y,), (HOSTILE,), (relu,))))
    assert "<img" not in text
    assert "<b>" not in text
    assert text.count("<script") == 2
    assert any(s.startswith("[[DATA]]") for s in data_of(text)["strings"])


@pytest.mark.slow
def test_a_hostile_model_changes_nothing_but_texts(show):
    x, y = Value(TensorSpec((2,)), HOSTILE), Value(TensorSpec((2,)))
    relu = Node(OpId("", HOSTILE, 14), (x,), (y,), meta=Meta(Location(HOSTILE, 1), HOSTILE))
    browser = show(outline(Function(HOSTILE, (x,), (y,), (HOSTILE,), (relu,))))
    assert browser.title.startswith("<img src=x")
    browser.find_elements("css selector", "[data-n]")[1].click()
    assert "onerror" in browser.find_element("tag name", "aside").text
    assert browser.find_elements("css selector", "img") == []


@pytest.mark.slow
def test_the_page_opens_with_the_picture_of_the_svg(show, resnet, random_function):
    scopes = ("", "a", "a.b", "b.0", "b.1", "grad.a", "grad.b.0")
    for root in (
        outline(resnet.entry("train_step"), resnet.state),
        outline(random_function(200, scopes)),
        outline(graphs.with_gradients("nested")[1]),
    ):
        shown = show(root).execute_script(PLACES)
        drawn = []
        for group in ET.fromstring(svg(root)).iter(f"{SVG}g"):
            if "data-n" in group.attrib:
                rect = group.findall(f"{SVG}rect")[-1]
                place = (group.attrib["data-n"], group.attrib["transform"])
                drawn.append([*place, rect.attrib["width"], rect.attrib["height"]])
        numbers = re.compile(r"-?[\d.]+")
        assert [row[0] for row in shown] == [row[0] for row in drawn]
        for a, b in zip(shown, drawn, strict=True):
            left, right = (list(map(float, numbers.findall(" ".join(row)))) for row in (a, b))
            assert left == pytest.approx(right, abs=0.11)


@pytest.mark.slow
def test_groups_unfold_and_fold_by_mouse_and_by_keyboard(show, tower):
    browser = show(outline(tower.entry("train_step"), tower.state))
    before = boxes(browser)
    repeat = box(browser, "layers.0 \u2026 layers.5 \u00d7 6")
    repeat.click()
    assert len(boxes(browser)) == len(before) + 6
    box(browser, "layers.0 \u2026 layers.5 \u00d7 6").click()
    assert boxes(browser) == before
    group = box(browser, "forward").find_element("xpath", "..")
    assert group.get_attribute("aria-expanded") == "true"
    group.send_keys("\ue007")  # Enter
    assert len(boxes(browser)) < len(before)
    focused = browser.switch_to.active_element
    assert focused.get_attribute("aria-expanded") == "false"
    browser.find_element("id", "reset").click()
    assert boxes(browser) == before


@pytest.mark.slow
def test_search_unfolds_what_holds_the_node_and_tells_about_it(show, resnet):
    browser = show(outline(resnet.entry("train_step"), resnet.state))
    browser.find_element("tag name", "body").send_keys("/")
    browser.switch_to.active_element.send_keys("blocks.1.conv2.weight")
    panel = browser.find_element("tag name", "aside")
    results = panel.find_elements("css selector", "button")
    assert any("forward / blocks.1" in button.text for button in results)
    next(b for b in results if "forward / blocks.1" in b.text).click()
    assert "reads blocks.1.conv2.weight: float32[32,32,3,3]" in panel.text
    chosen = browser.find_element("css selector", ".chosen > text.first")
    assert chosen.text == "conv2"
    assert browser.find_elements("css selector", ".near")
    assert "Read by" in panel.text


@pytest.mark.slow
def test_the_view_moves_and_zooms_by_mouse_and_keys(show, tower):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    browser = show(outline(tower.entry("train_step"), tower.state))
    canvas = browser.find_element("id", "canvas")

    def place():
        text = browser.find_element("id", "view").get_attribute("transform")
        return [float(n) for n in re.findall(r"-?[\d.]+", text)]

    first = place()
    ActionChains(browser).drag_and_drop_by_offset(canvas, 50, 30).perform()
    dragged = place()
    assert [b - a for a, b in zip(first, dragged, strict=True)] == pytest.approx([50, 30, 0])
    ActionChains(browser).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -200).perform()
    assert place()[2] > first[2]
    canvas.send_keys("0")
    assert place() == pytest.approx(first)
    canvas.send_keys("\ue014")  # to the right
    assert place()[0] == pytest.approx(first[0] - 60)


@pytest.mark.long
def test_a_hundred_thousand_nodes_are_all_there_and_few_are_shown(show, random_function):
    root = outline(random_function(100_000))
    browser = show(root)
    assert browser.title == "random: 100,000 nodes"
    assert len(boxes(browser)) < 100
    nodes = "return data.tip.filter((t) => t.length && strings[t[0]].startsWith('node ')).length"
    assert browser.execute_script(nodes) == 100_000
    search = browser.find_element("id", "search")
    search.send_keys("node 77777:\n")
    assert "node 77777: " in browser.find_element("tag name", "aside").text

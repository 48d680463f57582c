"""The page of a study in a real browser: on a phone and on a desk, light and dark.

TRIPLANE_SHOTS names a folder for a picture of each (docs/evidence/study-report.md).
"""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.browser import chromium
from tests.support.digits_model import digits_trainer

from triplane.unified_ir import data
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.core.metric import LOSS
from triplane.unified_ir.federated.study import Study, by_label_shards, page, simulate

pytestmark = pytest.mark.slow
LOOKS = [(width, scheme) for width in (390, 1440) for scheme in ("light", "dark")]
SEEDS = (0, 1, 2)
HOSTILE = "<script>window.injected = true</script> with_a_long_name_" + "x" * 60
PHONE = 500
SHADES = 96
"""Colours of a picture in the documentation: text and charts need few."""

MEASURE = """
const width = document.documentElement.clientWidth, out = [], low = [];
const parse = c => c.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const paper = e => {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
};
for (const details of document.querySelectorAll("details")) details.open = true;
for (const e of document.body.querySelectorAll("*")) {
  if (!e.checkVisibility() || e.closest("thead, script")) continue;
  const box = e.getBoundingClientRect();
  if (box.width && (box.left < -0.5 || box.right > width + 0.5)) out.push(e.outerHTML.slice(0, 90));
  if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== "visible")
    out.push("clipped " + e.outerHTML.slice(0, 90));
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || e.closest("title")) continue;
  const style = getComputedStyle(e), ink = e instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(parse(ink)), light(paper(e))].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize);
  if ((a + 0.05) / (b + 0.05) < 4.5 || size < 12) low.push([e.outerHTML.slice(0, 90), ink, size]);
}
return {overflow: document.documentElement.scrollWidth - width, out, low, dark: matchMedia(
    "(prefers-color-scheme: dark)").matches, width: innerWidth, injected: !!window.injected};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def trials():
    digits, module = data.digits(), digits_trainer().export()
    return [
        simulate(
            module,
            {name: shard for name, shard in devices.items() if name < "device-08"},
            Study(
                algorithm=name, rounds=12, hyper=Hyper(lr=0.3, meta_lr=0.1, server_lr=server_lr),
                evaluate_every=2, seed=seed, devices=5, steps=2,
            ),
            unseen={name: shard for name, shard in devices.items() if name >= "device-08"},
        )
        for seed in SEEDS
        for devices in [
            by_label_shards({"x": digits.x, "y": np.asarray(digits.y)}, 12, shards=2, seed=seed)
        ]
        for name, server_lr in (("fedavg", 1.0), ("fedadam", 0.03), ("maml", 1.0))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def file(trials, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "study.html"
    facts = {"data": "digits", "rounds": "12", "seeds": "0, 1, 2", "partition": "labels"}
    path.write_text(page(trials, "Digits, two classes on each device", facts))
    return path


def opened(browser, file, width, scheme):
    """The page at that width; the emulation stays until the next call."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    resize(browser, width, 900)
    browser.get_log("browser")
    browser.get(file.as_uri())
    return browser


def resize(browser, width, height):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_everything_is_within_the_screen_and_legible(browser, file, width, scheme):
    opened(browser, file, width, scheme)
    look = browser.execute_script(MEASURE)
    assert (look["width"], look["dark"]) == (width, scheme == "dark")
    assert look["overflow"] == 0
    assert look["out"] == []
    assert look["low"] == []
    assert browser.get_log("browser") == []
    save(browser, width, f"study-report-{width}-{scheme}.png")


WIDE = """
const right = e => Math.round(e.getBoundingClientRect().right);
return [...document.querySelectorAll("table:not(.facts), .charts, p.said")]
    .filter(e => e.checkVisibility()).map(right);
"""


@pytest.mark.parametrize("width", [900, 1200, 1440])
def test_tables_of_losses_end_where_text_and_charts_end(browser, trials, tmp_path, width):
    from dataclasses import replace

    names = {"maml": "FedAdam over meta-sgd", "fedavg": "FedAdam over fedavg+adam"}
    wide = [
        replace(t, algorithm=names[t.algorithm], metric=LOSS) for t in trials[:-1]
        if t.algorithm in names
    ]  # fmt: skip
    path = tmp_path / "wide.html"
    path.write_text(page(wide, "t", {"data": "digits"}))
    opened(browser, path, width, "light")
    ends = browser.execute_script(WIDE)
    assert len(set(ends)) == 1, ends
    assert browser.execute_script(MEASURE)["out"] == []


def save(browser, width, name):
    """Save the whole page, as it is before its folded parts were opened."""
    if folder := os.environ.get("TRIPLANE_SHOTS"):
        from PIL import Image

        browser.refresh()
        resize(browser, width, browser.execute_script("return document.body.offsetHeight"))
        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        picture.quantize(SHADES, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            Path(folder) / name, optimize=True
        )


def test_long_and_hostile_names_stay_text_within_the_screen(browser, trials, tmp_path):
    from dataclasses import replace

    odd = [
        replace(t, scores=[replace(s, device=HOSTILE + s.device) for s in t.scores]) for t in trials
    ]
    path = tmp_path / "odd.html"
    path.write_text(page(odd, HOSTILE, {HOSTILE: HOSTILE}))
    opened(browser, path, 390, "light")
    look = browser.execute_script(MEASURE)
    assert not look["injected"]
    assert (look["overflow"], look["out"]) == (0, [])
    assert browser.get_log("browser") == []


def test_a_mark_under_the_pointer_is_named_and_shown_in_every_panel(browser, file):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    opened(browser, file, 1440, "light")
    mark = browser.find_element(By.CSS_SELECTOR, ".panel .mark")
    dot = mark.find_element(By.CSS_SELECTOR, "circle:not(.open)")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", dot)
    ActionChains(browser).move_to_element(dot).perform()
    tip = browser.find_element(By.ID, "tip")
    assert tip.is_displayed()
    assert "before" in tip.text
    assert "adapted" in tip.text
    key = browser.find_element(By.CSS_SELECTOR, ".mark.on").get_attribute("data-key")
    on = browser.find_elements(By.CSS_SELECTOR, ".mark.on")
    assert {mark.get_attribute("data-key") for mark in on} == {key}
    assert len(on) == 3 * len(SEEDS)
    heading = browser.find_element(By.TAG_NAME, "h1")
    browser.execute_script("arguments[0].scrollIntoView()", heading)
    ActionChains(browser).move_to_element(heading).perform()
    assert not tip.is_displayed()


def test_a_point_of_a_line_tells_its_round_to_a_finger(browser, file):
    opened(browser, file, 390, "dark")
    tip = browser.execute_script("""
        const circle = document.querySelector(".chart .area circle");
        circle.scrollIntoView({block: "center"});
        const box = circle.getBoundingClientRect();
        const at = {clientX: box.x + 3, clientY: box.y + 3, bubbles: true};
        circle.dispatchEvent(new PointerEvent("pointerdown", at));
        const tip = document.getElementById("tip"), place = tip.getBoundingClientRect();
        return {text: tip.textContent, hidden: tip.hidden, left: place.left, right: place.right};
    """)
    assert not tip["hidden"]
    assert tip["text"].startswith("fedavg, round 0: ")
    assert 0 <= tip["left"] < tip["right"] <= 390

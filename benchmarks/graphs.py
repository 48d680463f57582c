"""Seconds to write the page of a large graph, and to open it in headless Chromium.

`--record` writes docs/evidence/graphs.md with screenshots. One run of each: the figures are looked
at for their size. Seconds to open are the browser's own, from the start of the navigation until
its load event, by which the picture is drawn.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from growth import Deep
from harness import ROOT, machine, table
from PIL import Image
from selenium import webdriver

from triplane.unified_ir import nn, optim, train, zoo
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.cli.drawing.outline import outline
from triplane.unified_ir.cli.drawing.page import page
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Role, StateTensor, TensorSpec
from triplane.unified_ir.ir.graph import Function, Node, OpId, Value

PLACE: Final = ROOT / "docs" / "evidence"
LOADED: Final = "return performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"
BOXES: Final = "return document.querySelectorAll('[data-n]').length"
DARK: Final = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
COLOURS: Final = 160
HEADS: Final = (
    "graph", "nodes", "outline, s", "page, s", "page, MB", "opens in, s", "boxes when opened",
)  # fmt: skip


def resnet50() -> tuple[Function, dict[str, StateTensor]]:
    """A training step of ResNet-50 with momentum."""
    trainer = train.Trainer(
        zoo.resnet50(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1, momentum=0.9)
    )
    trainer.prepare(np.zeros((2, 3, 224, 224), np.float32), np.zeros(2, np.int64))
    module = trainer.export(entries=("train_step",))
    return module.entry("train_step"), dict(module.state)


def deep() -> tuple[Function, dict[str, StateTensor]]:
    """12,500 dense layers with every gradient: scopes, and one block that repeats."""
    net = Deep(12_500)
    forward = trace(net, TensorSpec(("N", 8)))
    function = value_and_grad(forward, [name for name in forward.param_names if name != "x"])
    state = {k: StateTensor(Role.PARAMETER, p.array) for k, p in net.parameters().items()}
    return function, state


def wild() -> tuple[Function, dict[str, StateTensor]]:
    """100,000 nodes without scopes that read two of the last 200 values."""
    rng = np.random.default_rng(0)
    values, nodes = [Value(TensorSpec((4,)), "x")], []
    for _ in range(100_000):
        read = tuple(values[-1 - int(i)] for i in rng.integers(0, min(200, len(values)), 2))
        values.append(Value(TensorSpec((4,))))
        op = OpId("", str(rng.choice(["Add", "Mul", "Sub", "Div", "Max"])), 14)
        nodes.append(Node(op, read, (values[-1],)))
    return Function("random", (values[0],), (values[-1],), ("y",), tuple(nodes)), {}


GRAPHS: Final = {
    "training step of ResNet-50": resnet50,
    "12,500 layers with gradients": deep,
    "100,000 nodes at random": wild,
}


def measured(browser: Any, name: str, file: Path) -> tuple[Item, list[str]]:
    """Write the page of a graph and open it; return its outline and the row of the table."""
    function, state = GRAPHS[name]()
    start = time.perf_counter()
    root = outline(function, state)
    outlined = time.perf_counter()
    file.write_text(page(root), "utf-8")
    written = time.perf_counter()
    browser.get(file.as_uri())
    opened, boxes = browser.execute_script(LOADED), browser.execute_script(BOXES)
    size = file.stat().st_size / 1e6
    seconds = (f"{outlined - start:.1f}", f"{written - outlined:.1f}", f"{size:.1f}")
    return root, [name, f"{root.nodes:,}", *seconds, f"{opened:.2f}", str(boxes)]


def opened_browser(folder: str) -> Any:
    """Return a headless Chromium with a window as large as a notebook's."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"):
        options.add_argument(flag)
    # Without these paths Selenium asks the network for a browser.
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    options.binary_location = chromium or ""
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_window_size(1440, 1080)
    return browser


def keep(browser: Any, name: str) -> None:
    """Store a screenshot in few colours."""
    shot = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    shot.quantize(COLOURS, dither=Image.Dither.NONE).save(PLACE / name, optimize=True)


def shots(browser: Any, name: str) -> Iterator[str]:
    """Store and yield the screenshots of the open page of a graph."""
    if name == "training step of ResNet-50":
        keep(browser, "graph-resnet50.png")
        yield "graph-resnet50.png"
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", DARK)
        browser.find_element("id", "search").send_keys("blocks.4.conv2.weight\n")
        keep(browser, "graph-resnet50-dark.png")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        yield "graph-resnet50-dark.png"
    elif name == "12,500 layers with gradients":
        keep(browser, "graph-100000.png")
        yield "graph-100000.png"


def main() -> None:
    """Measure, print and, when asked, record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help=f"into {PLACE.name}/")
    record, rows, pictures = parser.parse_args().record, [], []
    with tempfile.TemporaryDirectory() as folder:
        browser = opened_browser(f"{folder}/profile")
        for name in GRAPHS:
            rows.append(measured(browser, name, Path(folder) / "graph.html")[1])
            pictures += [(name, shot) for shot in shots(browser, name)] if record else []
        version = browser.capabilities["browserVersion"]
        browser.quit()
    text = (
        f"# Pages of graphs\n\n`benchmarks/graphs.py --record`: {'; '.join(machine().values())}; "
        f"Chromium {version}, headless. One run of each.\n\n{table(HEADS, rows)}\n"
    )
    print(text)
    if record:
        images = "\n".join(f"![{name}]({shot})\n" for name, shot in pictures)
        PLACE.joinpath("graphs.md").write_text(f"{text}\n{images}")


if __name__ == "__main__":
    main()

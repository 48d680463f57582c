"""docs/serving.md says what is there, all of it, with the right numbers."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.metrics import CALLS, GAUGES, HISTOGRAMS, LANE_CALLS
from triplane.edge.serving.wire import METHODS

PATH = Path(__file__).parents[3] / "docs" / "serving.md"
PAGE = PATH.read_text()


def number(text):
    if text.endswith(" MiB"):
        return int(text.removesuffix(" MiB")) << 20
    return 2 ** int(text[2:]) if text.startswith("2^") else int(text)


def test_the_page_lists_every_limit_with_its_default():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
    listed = {
        name: number(value)
        for names, values in rows
        for name, value in zip(re.findall(r"\w+", names), values.split(", "), strict=False)
        if name in {field.name for field in fields(ServingLimits)}
    }
    assert listed == {
        field.name: getattr(ServingLimits(), field.name) for field in fields(ServingLimits)
    }


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_the_page_names_every_call(method):
    assert method in PAGE


@pytest.mark.parametrize("name", [f"{CALLS}_total", LANE_CALLS])
def test_the_page_names_the_metrics_with_labels_of_their_own(name):
    assert f"`{name}`" in PAGE


def test_the_page_lists_every_metric_of_a_version():
    """TRIPLANE_ACCEPT=1 writes the table."""
    begin, end = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
    head, _, rest = PAGE.partition(begin)
    _, _, tail = rest.partition(end)
    lines = [f"| `{row.name}` | histogram | {row.help} |" for row in HISTOGRAMS]
    lines += [f"| `{row.name}` | gauge | {row.help} |" for row in GAUGES]
    table = "\n".join(["| name | kind | meaning |", "|---|---|---|", *lines])
    page = head + begin + table + "\n" + end + tail
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        PATH.write_text(page)
    assert PATH.read_text() == page, "run this test with TRIPLANE_ACCEPT=1"

"""docs/serving.md says what is there, all of it, with the right numbers."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from tests.support.pages import check_table

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.metrics import CALLS, GAUGES, HISTOGRAMS, LANE_CALLS
from triplane.edge.serving.wire import METHODS

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


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
    kinds = {"histogram": HISTOGRAMS, "gauge": GAUGES}
    rows = [(f"`{row.name}`", kind, row.help) for kind, rows in kinds.items() for row in rows]
    check_table("serving.md", "metrics", ("name", "kind", "meaning"), rows)

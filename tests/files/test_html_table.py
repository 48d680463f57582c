"""Tables for notebooks: escaped, bounded, without colours or references of their own."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from triplane.unified_ir.files.html_table import MAX_COLUMNS, MAX_ROWS, html_table

HOSTILE = [
    "<script>alert(1)</script>", "</td></table><img src=x onerror=alert(1)>", "a & b", "'\"`",
    "\u202egnp.exe", "line\nbreak\x00\x1b[31m", "&lt;b&gt;", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_texts_from_outside_stay_texts_wherever_they_stand(hostile: str) -> None:
    drawn = html_table(hostile, [hostile], [[hostile]], count=1, notes=[hostile])
    root = ET.fromstring(drawn)
    assert {e.tag for e in root.iter()} == {"div", "p", "b", "table", "tr", "th", "td"}
    assert {name for e in root.iter() for name in e.attrib} <= {"style"}
    texts = [e.text for e in root.iter() if e.text]
    plain = "".join(c if c.isprintable() else " " for c in hostile)
    assert texts == [plain] * 4
    drawn.encode()


def test_a_table_of_any_size_is_bounded_and_counts_what_it_leaves_out() -> None:
    heads = [f"column {k}" for k in range(100)]
    rows = (["&" * 10_000] * 100 for _ in range(1_000_000))
    drawn = html_table("&" * 10_000, heads, rows, count=1_000_000, notes=["&" * 10_000] * 100)
    assert len(drawn) < 100_000
    assert drawn.count("<tr>") == 1 + MAX_ROWS
    assert drawn.count("<th") == MAX_COLUMNS + 1
    assert f"and {1_000_000 - MAX_ROWS:,} more" in drawn


def test_a_table_sets_no_colour_and_refers_to_nothing() -> None:
    drawn = html_table("t", ["name", "loss"], [["1a", "1.5"], ["b", ""], ["c", "nan"]], count=3)
    plain = drawn.replace("color:inherit", "")
    assert not re.search(r"color|background|#[0-9a-f]{3}|http|url\(|<style|<script", plain)
    assert "<td style='text-align:left'>1a</td><td>1.5</td>" in drawn, "numbers stand to the right"
    assert "<th style='text-align:left'>name</th><th>loss</th>" in drawn
    assert "more" not in drawn

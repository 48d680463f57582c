"""Rows as lines: texts to the left, numbers to the right."""

import pytest

from triplane.unified_ir.files.text_table import aligned

ROWS = [("name", "size"), ("a", "1,000"), ("longer", "2")]


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (None, ["name    size", "a       1,000", "longer  2"]),
        (1, ["name     size", "a       1,000", "longer      2"]),
        (0, ["  name   size", "     a  1,000", "longer      2"]),
    ],
)
def test_columns_are_as_wide_as_their_widest_cells(texts, lines):
    assert aligned(ROWS, texts=texts) == lines


def test_no_rows_are_no_lines():
    assert aligned([]) == []

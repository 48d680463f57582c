"""Advice about shapes that only have their axes in another order."""

import pytest

from triplane.unified_ir.files.samples import transpose_hint


@pytest.mark.parametrize(
    ("shape", "expected", "axes"),
    [
        ((5, 8, 8, 3), ("N", 3, 8, 8), "(0, 3, 1, 2)"),
        ((5, 8, 9, 3), ("N", 3, "H", "W"), "(0, 3, 1, 2)"),
        ((5, 64, 2), (None, 2, None), "(0, 2, 1)"),
        ((5, 4, 6, 7, 1), ("N", 1, 4, 6, 7), "(0, 4, 1, 2, 3)"),
        ((5, 9, 8, 3), ("N", 3, 8, 8), None),  # moving the axis is not enough
        ((5, 3, 8, 3), ("N", 3, 8, 8), None),
        ((5, 8, 8, 3), ("N", "C", 8, 8), None),
        ((5, 8, 3), ("N", 3, 8, 8), None),
        ((5, 3), ("N", 4), None),
        ((), (), None),
    ],
)
def test_channels_that_come_last_are_recognized(shape, expected, axes):
    hint = transpose_hint(shape, expected)
    assert hint.endswith(f"x.transpose{axes}") if axes else hint == ""

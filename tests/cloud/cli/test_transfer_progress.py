"""Progress of a transfer on a real terminal: one line, whatever the file is called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.support.screens import screen

PROGRAM = """
from triplane.cloud.cli.progress import reported
from triplane.unified_ir.cli.shell import open_output

with reported(open_output(False), "uploading a-rather-[long]-name-of-a-model-v12.bundle") as show:
    for tenth in range(11):
        show(tenth * 123_456_789, 1_234_567_890)
"""


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_transfer_is_one_line_that_keeps_its_numbers(columns: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "NO_COLOR"}}
    with screen(columns) as shown:
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdin=shown.stream,
            stdout=shown.stream,
            stderr=shown.stream,
            env=environment | {"TERM": "xterm"},
            check=True,
        )
    drawings = shown.drawings()
    assert max(map(len, drawings)) <= columns
    assert all(d.startswith("uploading a-") for d in drawings), "nothing spills into a second line"
    assert "1.2/1.2 GB" in drawings[-1]

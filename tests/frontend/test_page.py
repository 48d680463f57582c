"""The page for users says what is true: its code runs, top to bottom."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "writing-models.md"


@pytest.mark.slow
def test_the_code_on_the_page_runs(tmp_path):
    page = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (table,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 11
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "reference against ascend" in done.stdout
    assert table in done.stdout, "the summary that the page shows is the one that it prints"

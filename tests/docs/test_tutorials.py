"""Each tutorial runs as one program in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.pages import script_of


@pytest.mark.long
@pytest.mark.parametrize("page", ["series", "text", "photos"])
def test_a_tutorial_runs_in_an_empty_folder(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(script_of(f"tutorials/{page}.md"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = tmp_path / "empty"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

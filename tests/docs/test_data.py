"""The tables of docs/data.md are those of the product; TRIPLANE_ACCEPT=1 writes them."""

import inspect
import os
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from tests.support.pages import check_table, script_of

from triplane.unified_ir.data.registry import SOURCES, STEPS


def signature(kind):
    """Return the fields of a source or step, those with defaults as name=default."""
    parts = [f.name if f.default is MISSING else f"{f.name}={f.default!r}" for f in fields(kind)]
    return ", ".join(parts)


@pytest.mark.parametrize(("name", "table"), [("sources", SOURCES), ("steps", STEPS)])
def test_the_page_lists_all(name, table):
    rows = [
        (f"`{key}`", f"`{signature(kind)}`" if fields(kind) else "",
         (inspect.getdoc(kind) or "").partition("\n")[0].replace("|", "\\|"))
        for key, kind in table.items()
    ]  # fmt: skip
    check_table("data.md", name, ("in JSON", "fields", "what it is"), rows)


@pytest.mark.slow
def test_the_page_runs_in_an_empty_folder(tmp_path):
    script = tmp_path / "page.py"
    script.write_text(script_of("data.md"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

"""The how-tos of docs/extending work: each is applied to a copy of the packages, then run there.

The first line of a block says where it goes: `# FILE` at the end of that file, `# FILE, above NAME`
in front of the statement that defines NAME, `# FILE, in NAME` behind the last row of that table,
`# FILE, in place of NAME` where that statement was.
The blocks without such a line then run in order, as one script.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path for path in sorted((ROOT / "docs" / "extending").glob("*.md")) if path.stem != "README"
]
BLOCK = re.compile(
    r"```(?:python|toml)\n(?:# (\S+\.\w+)(?:, (above|in place of|in) ([^\n]+))?\n)?(.*?)```",
    re.DOTALL,
)
PACKAGES = ("proto", "unified_ir", "edge")


def blocks(page):
    """(file, above or in, name, code) of each block; the first three are empty in a script."""
    return BLOCK.findall(page.read_text())


def statement(text, name):
    """The top-level assignment of a module that defines `name`."""
    for found in ast.parse(text).body:
        match found:
            case (
                ast.Assign(targets=[ast.Name(id=target)])
                | ast.AnnAssign(target=ast.Name(id=target))
            ) if target == name:
                return found
    raise AssertionError(f"no table {name}")


def lines_of(text, where, name):
    """The lines of the module that a block takes the place of: how many before, up to which."""
    table = statement(text, name)
    if where == "above":
        return table.lineno - 1, table.lineno - 1
    if where == "in place of":
        return table.lineno - 1, table.end_lineno
    literals = (n for n in ast.walk(table.value) if isinstance(n, (ast.Tuple, ast.List)))
    last = max(n.elts[-1].end_lineno or 0 for n in literals if n.elts)
    return last, last


def add(path, where, name, code):
    """Who has followed the page in this repository has the code already."""
    text = path.read_text() if path.exists() else ""
    if code.strip() in text:
        return
    lines = text.splitlines(keepends=True)
    begin, end = lines_of(text, where, name) if where else (len(lines), len(lines))
    path.write_text("".join([*lines[:begin], code, *lines[end:]]))


def add_entry_point(folder, header, line):
    """As an installed package has it."""
    info = folder / "example-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: example\nVersion: 0\n")
    group = header.split('"')[1]
    (info / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}")


def follow(page, folder):
    """Leaves the packages as they are after following the page in `folder`."""
    for package in PACKAGES:
        # With compiled files, which stand for all that a page leaves as it is; but not those that
        # another worker is about to rename.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ROOT / package, folder / "triplane" / package, ignore=unfinished)
    for file, where, name, code in blocks(page):
        if file == "pyproject.toml":
            add_entry_point(folder, name, code)
        elif file:
            add(folder / "triplane" / file, where, name, code)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_following_a_page_gives_what_it_promises(page, tmp_path):
    follow(page, tmp_path / "site")
    script = tmp_path / "page.py"
    script.write_text("\n".join(code for file, _, _, code in blocks(page) if not file))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_each_line_of_the_checks_is_a_command(page):
    _, _, checks = page.read_text().partition("## Checks\n")
    lines = [line for line in checks.splitlines() if line.startswith("    ")]
    assert lines, "the page ends with the commands that check it"
    for line in lines:
        assert re.match(r"    (make|TRIPLANE_ACCEPT=1|\.venv(-peers)?/bin/\S+) ", line), line

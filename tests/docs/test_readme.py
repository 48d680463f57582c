"""The README's code runs, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.slow
def test_the_fifteen_lines_train_export_convert_and_predict(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code += "\nimport numpy as np\nnp.save('answers.npy', runtime.Bundle.load('digits.bundle')"
    code += ".predict(x=held_out.x)['logits'].argmax(1) == held_out.y)\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "answers.npy").mean() > 0.9


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """The places of a page that a link may lead to: headings as GitHub names them, and ids."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    named = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return {*named, *re.findall(r'<a id="([^"]+)">', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_to_a_place_of_a_page_leads_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    assert [
        link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)
    ] == []


def test_every_page_is_listed_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {
        (index.parent / link).resolve()
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", index.read_text())
    }
    elsewhere = {  # in the index of their folder
        path
        for path in PAGES
        if path.parent.name in {"decisions", "reference"} and path.stem != "README"
    }
    assert set(PAGES) - elsewhere - {index} <= listed


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = re.findall(r"\| \[(\d{4})\]\((\S+)\) \| .+ \|", (folder / "README.md").read_text())
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert rows == [(name[:4], name) for name in records]


def test_every_module_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:unified_ir|proto|edge)/[\w/]+(?:\.\w+)?/?)`", text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []

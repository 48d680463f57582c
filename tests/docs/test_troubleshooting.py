"""docs/troubleshooting.md quotes messages that the product has."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("proto", "unified_ir", "cloud", "edge", "device")
QUOTED = re.findall(
    r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
)


@functools.cache
def texts() -> tuple[str, ...]:
    """Return every string of the product's code, with "..." for what a message fills in."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return tuple(text for node in nodes if (text := written(node)))


def written(node: ast.AST) -> str:
    """Return what a string or an f-string says; otherwise nothing."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(written(part) or "..." for part in parts)
    return ""


def test_the_page_quotes_messages():
    assert len(QUOTED) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_product(message):
    pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), message

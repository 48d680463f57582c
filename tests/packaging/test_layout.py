"""Tests share helpers through modules of their own, `conftest.py` and `tests/support`."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_test_module_imports_another_one():
    offenders = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for name in imported(ast.parse(path.read_bytes()))
        if any(part.startswith("test_") for part in name.split(".")[:-1])
    ]
    assert offenders == [], "move what both use to a helper beside them or to tests/support"

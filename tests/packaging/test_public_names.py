"""The public surface is a list under test: what a package exports is what `public_names.txt` says.

A change of the surface is a change of that file, seen in review. To accept one on purpose:
TRIPLANE_ACCEPT=1 python -m pytest tests/packaging/test_public_names.py
"""

import ast
import importlib
import os
from pathlib import Path

import pytest

NAMESPACE = Path(__file__).parents[2] / ".ci" / "namespace"
LIST = Path(__file__).with_name("public_names.txt")


def packages():
    for package in sorted((NAMESPACE / "triplane").iterdir()):
        for path in sorted(package.glob("**/__init__.py")):
            yield ".".join(path.parent.relative_to(NAMESPACE).parts)


def reexported(path):
    """Names that a package states once, as `from x import name as name`."""
    imports = (n for n in ast.parse(path.read_bytes()).body if isinstance(n, ast.ImportFrom))
    return [a.asname for n in imports for a in n.names if a.asname == a.name]


def surface():
    """One line per package: its name, then what it exports, in order of the alphabet."""
    for package in packages():
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or reexported(Path(str(module.__file__)))
        if names:
            yield " ".join([f"{package}:", *sorted(names)])


def test_packages_export_the_documented_names():
    found = "\n".join(sorted(surface())) + "\n"
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        LIST.write_text(found)
    assert found.splitlines() == LIST.read_text().splitlines()


@pytest.mark.parametrize("package", list(packages()))
def test_every_exported_name_exists_once(package):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []

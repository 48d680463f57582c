"""The public surface is a list under test: what a package exports is what `public_names.txt` says.

A change of the surface is a change of that file, seen in review. To accept one on purpose:
TRIPLANE_ACCEPT=1 python -m pytest tests/packaging/test_public_names.py
"""

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


def surface():
    """One line per package: its name, then what it exports, in order of the alphabet."""
    for package in packages():
        names = getattr(importlib.import_module(package), "__all__", None)
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

"""Imports form no cycle, and which package depends on which is a list under test.

Imports inside functions count like those at the top of a module. Imports for type checkers alone
may refer back between modules of one package, but never between packages. A new dependency is a
change of `import_graph.txt`, seen in review. To accept one on purpose:
TRIPLANE_ACCEPT=1 python -m pytest tests/packaging/test_import_graph.py
"""

import os
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

LIST = Path(__file__).with_name("import_graph.txt")
TIERS = tuple(f"triplane.{name}" for name in ("proto", "unified_ir", "cloud", "edge", "device"))

FLAT = ("triplane.proto", "triplane.device")


def imports(*, for_types: bool):
    """Every hand-written module with the modules of ours that it imports."""
    graph = grimp.build_graph(*TIERS, exclude_type_checking_imports=not for_types, cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def package_of(module: str) -> str:
    """`triplane.cloud.fleet` for `triplane.cloud.fleet.rollout`; flat tiers are one package."""
    return ".".join(module.split(".")[: 2 if module.startswith(FLAT) else 3])


def between_packages():
    edges: dict[str, set[str]] = {}
    for module, imported in imports(for_types=True).items():
        package = package_of(module)
        below = {package_of(name) for name in imported} - {package}
        edges.setdefault(package, set()).update(below)
    return edges


def cycle_of(edges):
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def packages():
    return between_packages()


def test_no_module_imports_itself_by_way_of_others():
    assert cycle_of(imports(for_types=False)) == []


def test_no_package_depends_on_itself_by_way_of_others(packages):
    assert cycle_of(packages) == []


def test_packages_depend_on_what_the_list_says(packages):
    lines = [f"{package}: {' '.join(sorted(on))}".rstrip() for package, on in packages.items()]
    text = "\n".join(sorted(lines)).replace("triplane.", "") + "\n"
    sys.stdout.write(text)
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        LIST.write_text(text)
    assert text.splitlines() == LIST.read_text().splitlines()


def test_a_cycle_is_found():
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []

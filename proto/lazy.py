"""Public names of a package that are imported when they are first used (PEP 562).

A package states each public name once, in the block that type checkers read:

    if TYPE_CHECKING:
        from triplane.unified_ir.runtime.plan import Plan as Plan

    __getattr__, __dir__, __all__ = lazy_names(__name__)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    The names are those that its `if TYPE_CHECKING:` block imports.
    """
    modules = _imports(package)
    names = sorted(modules)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:  # a package below this one
            return import_module(f"{package}.{name}")
        return getattr(import_module(modules[name]), name)

    return get, lambda: names, names


def _imports(package: str) -> dict[str, str]:
    """Return each public name with the module that the block imports it from."""
    spec = find_spec(package)
    source = spec.loader.get_source(package) if spec and spec.loader else None  # type: ignore[attr-defined]
    block = (
        statement
        for node in ast.parse(source or "").body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
    )
    return {alias.name: str(statement.module) for statement in block for alias in statement.names}

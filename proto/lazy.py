"""Public names of a package, each stated once in the statement that imports it.

A package that imports its public names when they are first used (PEP 562) states them in the block
that type checkers read. Besides that block it imports names from `typing`, `__future__` and this
module only:

    if TYPE_CHECKING:
        from triplane.unified_ir.runtime.plan import Plan as Plan

    __getattr__, __dir__, __all__ = lazy_names(__name__)
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

OWN_IMPORTS: Final = frozenset({__name__, "__future__", "typing"})
"""Modules that a package imports for itself, not to export their names."""


def public_names(namespace: dict[str, Any]) -> list[str]:
    """Return `__all__` of a package that imports its public names at once, from its `globals()`.

    These are all names but modules and names that begin with an underscore. The package imports
    what it does not export under such a name: `from x import y as _y`.
    """
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    )


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
    """Return each public name with the module that the block imports it from.

    The block is compiled but never run, so it is read from the package's code: applications that
    bundle an interpreter often ship no source.
    """
    spec = find_spec(package)
    get_code = getattr(spec.loader if spec else None, "get_code", None)
    code = get_code(package) if get_code else None
    if code is None:
        raise ImportError(f"cannot read the code of {package}, which names what it exports")
    modules: dict[str, str] = {}
    module = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM" and module not in OWN_IMPORTS:
            modules[instruction.argval] = module
    return modules

"""The operator table: every row by (domain, name). Suites, engines and docs iterate it."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from importlib import import_module
from pkgutil import walk_packages
from types import MappingProxyType, ModuleType
from typing import Final

from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ops import rows
from triplane.unified_ir.ops.row import Op, Table


def _modules() -> list[ModuleType]:
    """Import every module of the families, in order of their names."""
    packages = walk_packages(rows.__path__, f"{rows.__name__}.")
    return [import_module(name) for name in sorted(info.name for info in packages)]


def _collect(modules: Sequence[ModuleType]) -> dict[tuple[str, str], Op]:
    table: dict[tuple[str, str], Op] = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Op):
                # Other modules may import a row, so one object can appear more than once.
                known = table.setdefault((value.domain, value.name), value)
                assert known is value, f"two rows for {value}"
    return table


TABLE: Final[Table] = MappingProxyType(_collect(_modules()))


def row_of(node: Node) -> Op:
    """Return the row of a node's operator."""
    return TABLE[node.op.domain, node.op.name]


def _named(domain: str, name: str) -> Op:
    return TABLE[domain, name]


# A cell may hold an operator, such as its activation. A copy of the cell holds the same row.
copyreg.pickle(Op, lambda row: (_named, (row.domain, row.name)))

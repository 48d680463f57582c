"""Building blocks of generated syntax; `at` gives each node its position in the user's source."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Final, TypeVar

Node = TypeVar("Node", bound=ast.AST)
FLOW: Final = "_triplane_flow"
"""The free variable of rewritten code that holds `frontend.flow`."""


def at(node: Node, like: ast.AST) -> Node:
    """Return `node` with the position of the start of `like`, for itself and its parts.

    The end is set to the start too: Python attributes a call of an attribute that spans several
    lines to its last line, which is not where the statement is.
    """
    ast.copy_location(node, like)
    node.end_lineno, node.end_col_offset = node.lineno, node.col_offset  # type: ignore[attr-defined]
    return ast.fix_missing_locations(node)


def flow(name: str) -> ast.expr:
    """Return a name of `frontend.flow`."""
    return ast.Attribute(value=load(FLOW), attr=name, ctx=ast.Load())


def invoke(name: str, *args: ast.expr) -> ast.expr:
    """Return a call of a function of `frontend.flow`."""
    return ast.Call(func=flow(name), args=list(args), keywords=[])


def load(name: str) -> ast.expr:
    """Return the node that reads a variable."""
    return ast.Name(id=name, ctx=ast.Load())


def const(value: Any) -> ast.expr:
    """Return a constant."""
    return ast.Constant(value=value)


def pair(what: str, line: int) -> ast.expr:
    """Return a pair of a description and its line."""
    return ast.Tuple([const(what), const(line)], ast.Load())


def no_args() -> ast.arguments:
    """Return an empty parameter list, a new one each time, since callers add to it."""
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def thunk(node: ast.expr) -> ast.expr:
    """Return `lambda: node`."""
    return ast.Lambda(args=no_args(), body=node)


def binding_only(names: Sequence[str]) -> ast.stmt:
    """Return a statement that makes names local without giving them a value."""
    targets: list[ast.expr] = [ast.Name(n, ast.Store()) for n in names]
    body: list[ast.stmt] = [ast.Assign(targets=targets, value=const(None))]
    return ast.If(test=const(False), body=body, orelse=[])


def delete_unbound(name: str) -> ast.stmt:
    """Return `if NAME is UNBOUND: del NAME`."""
    test = ast.Compare(left=load(name), ops=[ast.Is()], comparators=[flow("UNBOUND")])
    return ast.If(test=test, body=[ast.Delete(targets=[ast.Name(name, ast.Del())])], orelse=[])

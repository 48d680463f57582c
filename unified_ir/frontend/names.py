"""The names that statements bind, and how they leave their block: the analysis behind `rewrite`.

Everything here looks at one function's own scope: nested functions, classes and the variables of
comprehensions have scopes of their own and are not entered.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final


class Rest(ast.Return):
    """`return rest()`: control continues with the statements after an `if`, which bind names."""

    assigns: list[str]


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOPS: Final = (ast.While, ast.For, ast.AsyncFor)
YIELDS: Final = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


def own(node: ast.AST, *, names: bool = True) -> Iterator[ast.AST]:
    """Yield `node` and the nodes below it in its scope; within comprehensions, no plain names."""
    if names or not isinstance(node, ast.Name):
        yield node
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return
    inside = names and not isinstance(node, COMPREHENSIONS)
    for child in ast.iter_child_nodes(node):
        # PEP 572: `:=` inside a comprehension binds in the enclosing function.
        if isinstance(node, ast.NamedExpr) and child is node.target:
            yield child
        else:
            yield from own(child, names=inside)


def own_of(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of `own` for several statements."""
    for statement in statements:
        yield from own(statement)


def assigned(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the names that the statements may bind or delete, in order of appearance."""
    return list(dict.fromkeys(name for node in own_of(statements) for name in _bound_by(node)))


def _bound_by(node: ast.AST) -> list[str]:
    if isinstance(node, Rest):
        return node.assigns
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(a.asname or a.name).split(".")[0] for a in node.names]
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return [node.name] if node.name else []
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    return []


def declared(statements: Sequence[ast.stmt], kind: type[ast.Global | ast.Nonlocal]) -> set[str]:
    """Return the names declared `global` or `nonlocal`."""
    return {n for node in own_of(statements) if isinstance(node, kind) for n in node.names}


def escapes(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Return how the statements may leave: a subset of return, break, continue."""
    return frozenset().union(*map(_escapes_of, statements))


def _escapes_of(node: ast.AST) -> frozenset[str]:
    if isinstance(node, ast.Return):
        return frozenset({"return"})
    if isinstance(node, ast.Break):
        return frozenset({"break"})
    if isinstance(node, ast.Continue):
        return frozenset({"continue"})
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.expr)):
        return frozenset()
    if isinstance(node, LOOPS):
        # `break` and `continue` in the body belong to this loop, those in its `else` to an outer
        # one.
        return (escapes(node.body) & {"return"}) | escapes(node.orelse)
    return frozenset().union(*(_escapes_of(child) for child in ast.iter_child_nodes(node)))


def ends(statements: Sequence[ast.stmt]) -> bool:
    """Return whether the statement after these is certainly unreachable."""
    return any(_ends(s) for s in statements)


def _ends(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Return, ast.Break, ast.Continue, ast.Raise)):
        return True
    if isinstance(node, ast.If):
        return ends(node.body) and ends(node.orelse)
    if isinstance(node, ast.While):
        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        return forever and "break" not in escapes(node.body)
    if isinstance(node, (ast.With, ast.AsyncWith)):  # which may suppress an exception
        return ends(node.body) and not any(isinstance(n, ast.Raise) for n in own_of(node.body))
    return False


def has_yield(node: ast.AST) -> bool:
    """Return whether the scope of a function or statement suspends."""
    inner = node.body if isinstance(node, FUNCTIONS) else node
    parts = inner if isinstance(inner, list) else [inner]
    return any(isinstance(n, YIELDS) for part in parts for n in own(part))


def has_control_flow(node: ast.AST) -> bool:
    """Return whether anything in a function, nested ones included, could depend on a tensor."""
    kinds = (ast.If, ast.While, ast.For, ast.BoolOp, ast.IfExp, ast.Assert, ast.Match, ast.Not)
    return any(
        isinstance(n, kinds)
        or (isinstance(n, ast.Compare) and len(n.ops) > 1)
        or (isinstance(n, ast.comprehension) and bool(n.ifs))
        for n in ast.walk(node)
    )

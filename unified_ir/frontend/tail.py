"""Turn tail calls into a loop: `return f(a, b)` inside `f` jumps back to its start."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from triplane.unified_ir.frontend.names import ends
from triplane.unified_ir.frontend.nodes import at, const


def tail_loop(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return the body as a loop in which `return f(a, b)` assigns the parameters and continues.

    Only calls that pass every parameter are replaced, outside of loops, `with` and `try`; without
    such a call the body is returned unchanged.
    """
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    if node.args.vararg or node.args.kwarg or node.args.kwonlyargs or not names:
        return node.body
    jumps = _Jumps(node.name, names)
    body = jumps.block(node.body)
    if not jumps.has_jump:
        return node.body
    # if b == 0:                  while True:
    #     return a                    if b == 0:
    # return gcd(b, a % b)   ->           return a
    #                                 a, b = b, a % b; continue
    end = [] if ends(body) else [at(ast.Return(value=None), node)]
    loop = ast.While(test=const(True), body=[*body, *end], orelse=[])
    return [at(loop, node.body[0])]


class _Jumps:
    """Replaces tail calls by jumps."""

    def __init__(self, name: str, params: Sequence[str]) -> None:
        self.name, self.params, self.has_jump = name, params, False

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        replaced: list[ast.stmt] = []
        for s in statements:
            # Not within other statements: `continue` in a loop would continue that loop, and
            # leaving a `with` or `try` must first run its exit.
            if isinstance(s, ast.If):
                s.body, s.orelse = self.block(s.body), self.block(s.orelse)
            replaced += self._jump(s) if isinstance(s, ast.Return) else [s]
        return replaced

    def _jump(self, s: ast.Return) -> list[ast.stmt]:
        arguments = self._arguments(s.value)
        if arguments is None:
            return [s]
        self.has_jump = True
        # One assignment of a tuple, because the new values are computed from the old ones.
        targets = ast.Tuple([ast.Name(p, ast.Store()) for p in arguments], ast.Store())
        values = ast.Tuple(list(arguments.values()), ast.Load())
        again = ast.Assign(targets=[targets], value=values)
        return [at(again, s), at(ast.Continue(), s)]

    def _arguments(self, value: ast.expr | None) -> dict[str, ast.expr] | None:
        """Return the arguments of a call of the function itself, if it passes every parameter."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
            return None
        plain = not any(isinstance(a, ast.Starred) for a in value.args)
        if value.func.id != self.name or not plain or len(value.args) > len(self.params):
            return None
        arguments = dict(zip(self.params, value.args, strict=False))
        arguments |= {k.arg: k.value for k in value.keywords if k.arg is not None}
        return arguments if arguments.keys() == set(self.params) else None

"""Rewrite a function's syntax: control flow becomes calls that decide while tracing.

Statements turn into nested functions, so that a branch or a trip can be recorded on its own:

    if c:              def then(): nonlocal y; y = a
        y = a     ->   def else_(): nonlocal y; y = b
    else:              flow.if_(c, then, else_, VariableAccess(("y",), (lambda: y,), set_y))
        y = b

Where a branch returns, breaks or continues, the statements after it move into the branches that
continue (into a function `rest` where both do), and the value of each branch says what happened:
the result itself in a function's own body, a `LoopExit` in the body of a loop. Every node keeps the
line of the user's source. Statements that cannot become a function (around `yield`, or leaving
through `with`, `try` or `match`) stay Python, with the condition wrapped in `flow.plain`, which
refuses tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from triplane.unified_ir.frontend.names import (
    LOOPS,
    Rest,
    assigned,
    declared,
    ends,
    escapes,
    has_yield,
    own_of,
)
from triplane.unified_ir.frontend.nodes import (
    at,
    binding_only,
    const,
    delete_unbound,
    flow,
    invoke,
    load,
    no_args,
    pair,
    thunk,
)
from triplane.unified_ir.frontend.tail import tail_loop

_ITERATORS: Final = frozenset({"range", "enumerate", "zip"})


@dataclass(frozen=True, slots=True)
class BlockKind:
    """The block a statement is in: how `return`, `break` and `continue` are written there."""

    in_loop: bool = False
    """In the body of a rewritten loop: leaving it is a value of type `LoopExit`."""
    kept: bool = False
    """Below `with`, `try`, `match` or in a generator: statements after it cannot move inside."""
    plain_loop: bool = False
    """In a loop that stays Python: `break` and `continue` stay as they are."""


def rewrite_function(
    node: ast.FunctionDef | ast.Lambda, class_name: str | None, *, has_class: bool, tail: bool
) -> None:
    """Rewrite `node` in place. `tail`: a call of itself in tail position becomes a jump back."""
    first = next(iter([*node.args.posonlyargs, *node.args.args]), None)
    receiver = first.arg if has_class and first is not None else None
    rewriter = _Rewriter(class_name, receiver)
    if isinstance(node, ast.Lambda):
        node.body = rewriter.expression(node.body)
    else:
        rewriter.function(node, tail=tail)


class _Scope:
    """Names of one function: its own and those of outer scopes."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.globals = declared(node.body, ast.Global)
        self.nonlocals = declared(node.body, ast.Nonlocal)
        self.hoisted: dict[str, None] = {}

    def is_local(self, name: str) -> bool:
        return name not in self.globals and name not in self.nonlocals


class _Rewriter(ast.NodeTransformer):
    """Rewrites expressions through `visit` and statements through `block`."""

    def __init__(self, class_name: str | None, receiver: str | None) -> None:
        self.class_name = class_name
        self.receiver = receiver
        self.scope: _Scope | None = None
        self.count = 0

    # Functions

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, *, tail: bool = False) -> None:
        outer, self.scope = self.scope, _Scope(node)
        suspends = isinstance(node, ast.AsyncFunctionDef) or has_yield(node)
        body = tail_loop(node) if tail and not suspends else node.body
        statements = self.block(body, BlockKind(kept=suspends))
        statements = [s for s in statements if not isinstance(s, (ast.Global, ast.Nonlocal))]
        # The nested functions declare these names `nonlocal`, which Python accepts only if the
        # enclosing function binds them itself: `binding_only` does so without giving them a value.
        hoisted = [n for n in self.scope.hoisted if self.scope.is_local(n)]
        head = [at(binding_only(hoisted), node.body[0])] if hoisted else []
        for kind, names in ((ast.Global, self.scope.globals), (ast.Nonlocal, self.scope.nonlocals)):
            if names:
                head.insert(0, at(kind(names=sorted(names)), node.body[0]))
        docstring = statements[:1] if ast.get_docstring(node, clean=False) is not None else []
        node.body = [*docstring, *head, *statements[len(docstring) :]]
        self.scope = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        self._visit_defaults(node.args)
        self.function(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self.function(node)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._visit_defaults(node.args)
        node.body = self.expression(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def _visit_defaults(self, args: ast.arguments) -> None:
        args.defaults = [self.visit(d) for d in args.defaults]
        args.kw_defaults = [None if d is None else self.visit(d) for d in args.kw_defaults]

    # Statements

    def block(self, statements: Sequence[ast.stmt], level: BlockKind) -> list[ast.stmt]:
        rewritten: list[ast.stmt] = []
        todo = list(statements)
        while todo:
            s = todo.pop(0)
            if isinstance(s, LOOPS) and s.orelse and not isinstance(s, ast.AsyncFor):
                todo[:0] = self._without_else(s)
                continue
            # An `if` or loop that may leave the block swallows the statements after it, so the
            # block ends with it; `todo` holds what is left.
            leaving = escapes([s])
            if has_yield(s) or isinstance(s, ast.AsyncFor):
                rewritten += self._kept(s, level)
            elif isinstance(s, ast.If) and leaving and not level.kept:
                return [*rewritten, *self._leaving_if(s, todo, level)]
            elif isinstance(s, ast.If) and not leaving:
                rewritten += self._if(s)
            elif isinstance(s, (ast.While, ast.For)) and not leaving:
                definitions, call = self._loop(s)
                rewritten += [*definitions, at(ast.Expr(call), s)]
            elif isinstance(s, (ast.While, ast.For)) and not level.kept:
                return [*rewritten, *self._returning_loop(s, todo, level)]
            else:
                rewritten += self._kept(s, level)
        return rewritten or [ast.Pass()]

    def _kept(self, s: ast.stmt, level: BlockKind) -> list[ast.stmt]:
        """Keep a statement as it is, but rewrite its parts; conditions in it refuse tensors."""
        if isinstance(s, Rest):
            return [s]
        if isinstance(s, (ast.Return, ast.Break, ast.Continue)):
            return [at(self._leave(s, level), s)]
        if isinstance(s, ast.AnnAssign):
            return self._annotated(s)
        if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return [self.visit(s)]
        condition = self._keep_condition(s)
        inner = replace(level, kept=True, plain_loop=level.plain_loop or isinstance(s, LOOPS))
        for name, value in ast.iter_fields(s):
            if _is_block(value):
                setattr(s, name, self.block(value, inner))
            elif name in {"handlers", "cases"}:
                for part in value:
                    self._part(part, inner)
            elif name != condition:
                setattr(s, name, self._visited(value))
        return [s]

    def _keep_condition(self, s: ast.stmt) -> str:
        """Rewrite a statement's condition so that it refuses tensors; return its field."""
        if isinstance(s, ast.For):
            iterable = self._iterable(s.iter)
            s.iter = at(invoke("plain_iterable", iterable, const(_why(s))), s.iter)
            return "iter"
        if isinstance(s, (ast.If, ast.While, ast.Assert)):
            s.test = self._plain(s.test, "an assert" if isinstance(s, ast.Assert) else _why(s))
            return "test"
        return ""

    def _part(self, part: Any, level: BlockKind) -> None:
        """Rewrite an exception handler or a case of a match."""
        if isinstance(part, ast.ExceptHandler) and part.type is not None:
            part.type = self.visit(part.type)
        if isinstance(part, ast.match_case) and part.guard is not None:
            part.guard = self._plain(part.guard, "the guard of a case")
        part.body = self.block(part.body, level)

    def _visited(self, value: Any) -> Any:
        if isinstance(value, ast.AST):
            return self.visit(value)
        if isinstance(value, list):
            return [self.visit(v) if isinstance(v, ast.AST) else v for v in value]
        return value

    def _annotated(self, s: ast.AnnAssign) -> list[ast.stmt]:
        """Drop the annotation: a name that is nonlocal in a branch may not have one."""
        if s.value is None:
            return [at(ast.Pass(), s)]
        target: Any = self.visit(s.target)
        return [at(ast.Assign(targets=[target], value=self.expression(s.value)), s)]

    def _leave(self, s: ast.Return | ast.Break | ast.Continue, level: BlockKind) -> ast.stmt:
        if isinstance(s, ast.Return):
            value = None if s.value is None else self.expression(s.value)
            if not level.in_loop:
                return ast.Return(value=value)
            return ast.Return(value=invoke("returned", value or const(None)))
        if level.plain_loop:
            return s
        return ast.Return(value=flow("BREAK" if isinstance(s, ast.Break) else "NEXT"))

    def _if(self, s: ast.If) -> list[ast.stmt]:
        names = assigned([*s.body, *s.orelse])
        setter, state = self._state(names, [*s.body, *s.orelse], s)
        then = self._def("then", self.block(s.body, BlockKind()), names, s)
        other = self._def("otherwise", self.block(s.orelse, BlockKind()), names, s)
        call = invoke("if_", self.expression(s.test), load(then.name), load(other.name), state)
        return [then, other, *setter, at(ast.Expr(call), s)]

    def _leaving_if(self, s: ast.If, rest: Sequence[ast.stmt], level: BlockKind) -> list[ast.stmt]:
        """Rewrite an `if` that may leave its block; the rest of the block moves into it."""
        # if c: return a       def then(): return a
        # b = f()         ->   def otherwise(): nonlocal b; b = f(); return b
        # return b             return flow.return_if(c, then, otherwise, ...)
        body, orelse = list(s.body), list(s.orelse)
        names = assigned([*body, *orelse, *rest])
        setter, state = self._state(names, [*body, *orelse], s)
        generated: list[ast.stmt] = []
        if rest and not ends(body) and not ends(orelse):
            after = self._def("rest", self.block(rest, level), names, s)
            generated.append(after)
            for branch in (body, orelse):
                go_on = at(Rest(value=ast.Call(load(after.name), [], [])), s)
                go_on.assigns = assigned(rest)
                branch.append(go_on)
        elif rest:
            (orelse if ends(body) else body).extend(rest)
        test = self.expression(s.test)
        then = self._def("then", self.block(body, level), names, s)
        other = self._def("otherwise", self.block(orelse, level), names, s)
        entry = "leave_loop_if" if level.in_loop else "return_if"
        call = invoke(entry, test, load(then.name), load(other.name), state)
        return [*generated, then, other, *setter, at(ast.Return(call), s)]

    def _loop(self, s: ast.While | ast.For) -> tuple[list[ast.stmt], ast.expr]:
        """Return definitions, and the call that runs the loop and gives its `LoopExit`."""
        if isinstance(s, ast.While) and _binds(s.test):
            s = _tested_inside(s)
        inside: list[ast.stmt] = list(s.body)
        item = self._fresh("item")
        if isinstance(s, ast.For):
            # The target may be a tuple or an attribute, which a parameter cannot be: the trip
            # receives one item and unpacks it.
            inside.insert(0, at(ast.Assign(targets=[s.target], value=load(item)), s.target))
        tested: list[ast.stmt] = [at(ast.Expr(s.test), s)] if isinstance(s, ast.While) else []
        names = assigned([*inside, *tested])
        setter, state = self._state(names, inside, s)
        body = self._def("body", self.block(inside, BlockKind(in_loop=True)), names, s)
        if isinstance(s, ast.For):
            body.args.args.append(at(ast.arg(arg=item), s))
            return [body, *setter], invoke("for_", self._iterable(s.iter), load(body.name), state)
        value = at(ast.Return(self.expression(s.test)), s.test)
        test = self._def("test", [value], assigned(tested), s)
        return [test, body, *setter], invoke("while_", load(test.name), load(body.name), state)

    def _returning_loop(
        self, s: ast.While | ast.For, rest: Sequence[ast.stmt], level: BlockKind
    ) -> list[ast.stmt]:
        """Rewrite a loop that may return; the statements after it become a function."""
        names = assigned([s, *rest])
        # `while True` without `break` ends only by `return`. Without this flag the value would be
        # merged with the None that the end of the function returns, and be refused.
        always = const(isinstance(s, ast.While) and ends([s]))
        setter, state = self._state(names, [], s)
        definitions, call = self._loop(s)
        after = self._def("rest", self.block(rest, level), names, s)
        left = self._fresh("exit")
        run = at(ast.Assign(targets=[ast.Name(left, ast.Store())], value=call), s)
        entry = "leave_outer_loop" if level.in_loop else "return_from_loop"
        leave = ast.Return(invoke(entry, load(left), load(after.name), state, always))
        return [*definitions, run, after, *setter, at(leave, s)]

    def _without_else(self, s: ast.While | ast.For) -> list[ast.stmt]:
        """Replace the `else` of a loop by an `if` after it on a flag that `break` sets."""
        orelse, s.orelse = s.orelse, []
        if "break" not in escapes(s.body):
            return [s, *orelse]
        flag = self._fresh("broken")
        s.body = _flag_breaks(s.body, flag)
        start = ast.Assign(targets=[ast.Name(flag, ast.Store())], value=const(False))
        check = ast.If(test=ast.UnaryOp(ast.Not(), load(flag)), body=orelse, orelse=[])
        return [at(start, s), s, at(check, s)]

    # Pieces of generated code

    def _fresh(self, stem: str) -> str:
        self.count += 1
        return f"_{stem}_{self.count}"

    def _def(
        self, stem: str, body: list[ast.stmt], names: Sequence[str], like: ast.stmt
    ) -> ast.FunctionDef:
        """Return a function for a piece of the user's code, which assigns in the user's scope."""
        head = self._declarations(names)
        definition = ast.FunctionDef(
            name=self._fresh(stem), args=no_args(), body=[*head, *body], decorator_list=[]
        )
        setattr(definition, "type_params", [])  # noqa: B010 - a field since Python 3.12, unknown before
        return at(definition, like)

    def _declarations(self, names: Sequence[str]) -> list[ast.stmt]:
        assert self.scope is not None
        outside = [n for n in names if n in self.scope.globals]
        mine = [n for n in names if n not in self.scope.globals]
        self.scope.hoisted.update(dict.fromkeys(mine))
        declarations: list[ast.stmt] = [ast.Global(names=outside)] if outside else []
        return [*declarations, ast.Nonlocal(names=mine)] if mine else declarations

    def _state(
        self, names: Sequence[str], inside: Sequence[ast.stmt], like: ast.stmt
    ) -> tuple[list[ast.stmt], ast.expr]:
        """Return a setter for the names that the statements assign, and the access that uses it."""
        assert self.scope is not None
        mine = [n for n in names if self.scope.is_local(n)]
        setter: list[ast.stmt] = []
        write: ast.expr = const(None)
        if mine:
            value = self._fresh("values")
            targets = ast.Tuple([ast.Name(n, ast.Store()) for n in mine], ast.Store())
            body: list[ast.stmt] = [ast.Assign(targets=[targets], value=load(value))]
            # A variable without a value must raise NameError when it is read, as in Python.
            body += [delete_unbound(n) for n in mine]
            definition = self._def("set", body, mine, like)
            definition.args.args.append(ast.arg(arg=value))
            setter, write = [at(definition, like)], load(definition.name)
        reads = ast.Tuple([thunk(load(n)) for n in mine], ast.Load())
        names_node = ast.Tuple([const(n) for n in mine], ast.Load())
        return setter, at(
            invoke("VariableAccess", names_node, reads, write, self._odd(inside)), like
        )

    def _odd(self, inside: Sequence[ast.stmt]) -> ast.expr:
        """List what a tensor cannot decide: (what, line) or (what, line, owner, attribute)."""
        assert self.scope is not None
        pairs: list[ast.expr] = []
        for node in own_of(inside):
            line = getattr(node, "lineno", 0)
            if isinstance(node, (ast.Try, ast.TryStar, ast.With)):
                kind = "with" if isinstance(node, ast.With) else "try"
                pairs.append(pair(f"a `{kind}` statement", line))
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                pairs.append(pair(f"an assignment to `{ast.unparse(node)}`", line))
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                pairs.append(self._odd_attribute(node))
        outside = [n for n in assigned(inside) if not self.scope.is_local(n)]
        line = inside[0].lineno if inside else 0
        pairs += [pair(f"an assignment to the global or nonlocal `{n}`", line) for n in outside]
        return ast.Tuple(pairs, ast.Load())

    def _odd_attribute(self, node: ast.Attribute) -> ast.expr:
        what = f"an assignment to `{ast.unparse(node)}`"
        if not _is_path(node.value):
            return pair(what, node.lineno)
        # A copy: the rewriter changes nodes in place, and the original is still part of its
        # statement.
        reloaded = ast.parse(ast.unparse(node.value), mode="eval").body
        owner = thunk(self.expression(reloaded))
        return ast.Tuple(
            [const(what), const(node.lineno), owner, const(self._mangled(node.attr))], ast.Load()
        )

    # Expressions

    def expression(self, node: ast.expr) -> ast.expr:
        rewritten: ast.expr = self.visit(node)
        return rewritten

    def _plain(self, test: ast.expr, why: str) -> ast.expr:
        return at(invoke("plain", self.expression(test), const(why)), test)

    def _iterable(self, node: ast.expr) -> ast.expr:
        """Rewrite the iterable of a `for`, so that `range`, `enumerate`, `zip` accept tensors."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return self.expression(node)
        name = node.func
        self.generic_visit(node)
        if name.id in _ITERATORS:
            node.func = at(invoke("over", name), name)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if _binds(node):
            return self.generic_visit(node)
        parts = [thunk(self.expression(v)) for v in node.values]
        return at(invoke("and_" if isinstance(node.op, ast.And) else "or_", *parts), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if not isinstance(node.op, ast.Not):
            return self.generic_visit(node)
        return at(invoke("not_", self.expression(node.operand)), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if _binds(node):
            node.test = self._plain(node.test, "a conditional expression around `:=`")
            node.body, node.orelse = self.expression(node.body), self.expression(node.orelse)
            return node
        # Each side is evaluated at most once, and only if the condition selects it: hence thunks.
        then, other = self.expression(node.body), self.expression(node.orelse)
        call = invoke("if_expression", self.expression(node.test), thunk(then), thunk(other))
        return at(call, node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) == 1 or _binds(node):
            return self.generic_visit(node)
        names = ast.Tuple([const(type(op).__name__) for op in node.ops], ast.Load())
        rights = [thunk(self.expression(c)) for c in node.comparators]
        return at(invoke("chain", self.expression(node.left), names, *rights), node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        why = "the filter of a comprehension"
        node.ifs = [at(invoke("plain", test, const(why)), test) for test in node.ifs]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        # `super()` without arguments finds the class and the receiver in the frame of the method,
        # but the call may now stand in a nested function, so both are passed.
        bare_super = isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args
        if bare_super and self.receiver is not None:
            node.args = [at(load("__class__"), node), at(load(self.receiver), node)]
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._mangled(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._mangled(node.attr)
        return self.generic_visit(node)

    def _mangled(self, name: str) -> str:
        """Mangle a private name, as Python does only in a class body."""
        private = name.startswith("__") and not name.endswith("__")
        if not private or self.class_name is None:
            return name
        return f"_{self.class_name.lstrip('_')}{name}"


def _flag_breaks(statements: Sequence[ast.stmt], flag: str) -> list[ast.stmt]:
    flagged: list[ast.stmt] = []
    for s in statements:
        if isinstance(s, ast.Break):
            set_flag = ast.Assign(targets=[ast.Name(flag, ast.Store())], value=const(True))
            flagged.append(at(set_flag, s))
        elif not isinstance(s, (*LOOPS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for name, value in ast.iter_fields(s):
                if _is_block(value):
                    setattr(s, name, _flag_breaks(value, flag))
            for part in [*getattr(s, "handlers", []), *getattr(s, "cases", [])]:
                part.body = _flag_breaks(part.body, flag)
        flagged.append(s)
    return flagged


def _tested_inside(s: ast.While) -> ast.While:
    """`while test: body` as `while True: if not test: break; body`; keeps names the test binds."""
    stop = ast.If(test=ast.UnaryOp(ast.Not(), s.test), body=[at(ast.Break(), s)], orelse=[])
    return at(ast.While(test=const(True), body=[at(stop, s.test), *s.body], orelse=[]), s)


def _why(s: ast.stmt) -> str:
    kind = f"a{'n' if isinstance(s, ast.If) else ''} `{type(s).__name__.lower()}`"
    if has_yield(s):
        return f"{kind} around `yield` or `await`"
    return f"{kind} that leaves through `with`, `try`, `match` or a generator"


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def _is_path(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _binds(node: ast.expr) -> bool:
    # In a thunk, `:=` would bind a variable of the lambda, and `yield` would make it a generator.
    return any(isinstance(n, (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await))
               for n in ast.walk(node))  # fmt: skip

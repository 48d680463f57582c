"""Python `if`, `while` and `for` over tensors become graph control flow.

`rewritten(f)` is a version of `f` whose conditions are examined while it is traced. Where a tensor
of a graph being recorded decides, control flow becomes `Cond`, `Loop` and `Scan` nodes; otherwise,
and in eager mode, where a tensor has a value, it runs as plain Python. Tracebacks keep the user's
file and line numbers. A function without control flow or source, or of the standard library, numpy
or this package, is returned unchanged.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
from collections.abc import Callable
from threading import Lock
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

from triplane.unified_ir.frontend import flow
from triplane.unified_ir.frontend.names import has_control_flow
from triplane.unified_ir.frontend.nodes import FLOW, no_args
from triplane.unified_ir.frontend.source import belongs_to_user, contents, source_of
from triplane.unified_ir.frontend.syntax import rewrite_function
from triplane.unified_ir.frontend.variables import explain, reasons

_FUTURE: Final = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)
_INNER: Final = "_triplane_function"
"""Name of the function while it is compiled; its own name keeps referring to the outer variable."""
# By code object: every closure made by one `def` shares it, so each is rewritten only once. Code
# objects are equal also where their files differ, and only one of these may have a source. None:
# there is nothing to rewrite.
_codes: dict[tuple[CodeType, str, bool], CodeType | None] = {}
_lock: Final = Lock()


def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its tensor-dependent control flow made explicit; see the module."""
    if isinstance(function, MethodType):
        inner = rewritten(function.__func__)
        return function if inner is function.__func__ else MethodType(inner, function.__self__)
    if not isinstance(function, FunctionType):
        return function
    if FLOW in function.__code__.co_freevars or not belongs_to_user(function):
        return function
    own, tail = function.__code__, _calls_itself(function)
    key = (own, own.co_filename, tail)
    with _lock:
        if key not in _codes:
            _codes[key] = _code(function, tail=tail)
    code = _codes[key]
    return function if code is None else _explaining(_with_code(function, code))


def _with_code(function: FunctionType, code: CodeType) -> Callable[..., Any]:
    """Return the same function, closure and defaults included, with other code."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    # `flow` is a free variable, not a global: the user's module must not be changed.
    cells[FLOW] = CellType(flow)
    compiled = FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    compiled.__kwdefaults__ = function.__kwdefaults__
    return functools.wraps(function)(compiled)


def _explaining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Explain why a variable has no value, where a branch or loop left it without one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with reasons():
            try:
                return function(*args, **kwargs)
            except NameError as error:
                explain(error)
                raise

    return call


def _calls_itself(function: FunctionType) -> bool:
    """Return whether the function's name refers to the function, directly or under a decorator."""
    name, code = function.__name__, function.__code__
    if name in code.co_freevars:
        candidate = contents((function.__closure__ or ())[code.co_freevars.index(name)])
    else:
        candidate = function.__globals__.get(name) if name in code.co_names else None
    while candidate is not None and candidate is not function:
        candidate = getattr(candidate, "__wrapped__", None)
    return candidate is function


def _code(function: FunctionType, *, tail: bool) -> CodeType | None:
    source = source_of(function)
    if source is None or not has_control_flow(source.node):
        return None
    node = copy.deepcopy(source.node)
    if isinstance(node, ast.AsyncFunctionDef):
        return None
    free = function.__code__.co_freevars
    rewrite_function(node, source.class_name, has_class="__class__" in free, tail=tail)
    # Only a function nested in another one can have free variables, so it is compiled inside a
    # factory that has them as parameters; the factory itself is never called.
    tree = _factory(node, [*free, FLOW])
    # Compile under the `__future__` imports of the user's file, not under those of this one.
    flags = function.__code__.co_flags & _FUTURE
    module = compile(tree, source.filename, "exec", flags=flags, dont_inherit=True)
    own = function.__code__
    code = _inner(_inner(module, "factory"), "<lambda>" if own.co_name == "<lambda>" else _INNER)
    return code.replace(co_name=own.co_name, co_qualname=own.co_qualname)


def _inner(code: CodeType, name: str) -> CodeType:
    """Return the code of the function that `code` defines under that name."""
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _factory(node: ast.FunctionDef | ast.Lambda, free: list[str]) -> ast.Module:
    """Return `def factory(FREE...): def f(...): ...`, which gives the code its free variables."""
    _strip(node)
    inner: ast.stmt = ast.Return(node) if isinstance(node, ast.Lambda) else node
    args, body = no_args(), [ast.copy_location(inner, node)]
    args.args = [ast.arg(arg=name) for name in free]
    outer = ast.FunctionDef(name="factory", args=args, body=body, decorator_list=[])
    outer.type_params = []  # type: ignore[attr-defined,unused-ignore] # a field since Python 3.12
    ast.fix_missing_locations(ast.copy_location(outer, node))
    return ast.Module(body=[outer], type_ignores=[])


def _strip(node: ast.FunctionDef | ast.Lambda) -> None:
    """Remove decorators, defaults and annotations: the function object has its own."""
    args = node.args
    args.defaults = []
    args.kw_defaults = [None] * len(args.kwonlyargs)
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    if isinstance(node, ast.FunctionDef):
        node.decorator_list, node.returns, node.name = [], None, _INNER

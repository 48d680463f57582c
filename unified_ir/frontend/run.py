"""Calling cells and functions with arrays: traced once per signature, or recorded eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import Program, engine
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.trace import Traceable, Traced, traced
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.ops.evaluate import run_node
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.trees import leaves, rebuild

Mode = Literal["graph", "eager"]
_mode: ContextVar[tuple[str, str]] = ContextVar("triplane_mode", default=("graph", "onnx"))
_CACHE_SIZE: Final = 64
"""Compiled signatures kept per cell or function; the oldest goes first."""
_compiled: WeakKeyDictionary[Any, dict[Any, tuple[Traced, Program]]] = WeakKeyDictionary()


def set_mode(mode: Mode, engine: str = "onnx") -> None:
    """How calls with arrays run from here on: "graph" on an engine, or "eager" on numpy.

    In eager mode every value carries its array while it is recorded, so a debugger shows numbers
    and Python control flow simply runs.
    """
    if mode not in ("graph", "eager"):
        raise InvalidInput(f"a mode is 'graph' or 'eager', got {mode!r}")
    _mode.set((mode, engine))


@contextmanager
def mode(mode: Mode, engine: str = "onnx") -> Iterator[None]:
    """As `set_mode`, for the block."""
    before = _mode.get()
    set_mode(mode, engine)
    try:
        yield
    finally:
        _mode.set(before)


def run(target: Traceable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a cell or function on arrays; assigned buffers are written back."""
    how, engine_name = _mode.get()
    specs, arrays = _specs(args), _arrays(args, kwargs)
    named = {k: rebuild(v, _specs(leaves(v))) for k, v in kwargs.items()}
    if how == "eager":
        done = traced(target, specs, named, run=run_node, arrays=arrays)
        assert done.arrays is not None
        values = [done.arrays[v] for v in done.function.results]
    else:
        done, program = _program(target, specs, named, engine_name)
        state = [p.array for p in _in_order(done)]
        values = list(program(*arrays, *state))
    by_name = dict(zip(done.function.result_names, values, strict=True))
    for path, parameter in done.state.items():
        if path in by_name:
            parameter.array = by_name[path]
    return rebuild(done.results, [by_name[n] for n in leaves(done.results)])


def _in_order(done: Traced) -> list[Any]:
    return [done.state[p.name] for p in done.function.params if p.name in done.state]


def _program(
    target: Traceable, specs: Sequence[Any], named: Mapping[str, Any], engine_name: str
) -> tuple[Traced, Program]:
    owner = getattr(target, "__self__", target)
    cache = _compiled.setdefault(owner, {})
    key = (
        getattr(target, "__name__", ""), engine_name, str(specs), str(sorted(named.items())),
        _state_key(owner),
    )  # fmt: skip
    if key not in cache:
        done = traced(target, specs, named)
        if len(cache) >= _CACHE_SIZE:
            cache.pop(next(iter(cache)))
        cache[key] = (done, engine(engine_name).compile(done.function))
    return cache[key]


def _state_key(owner: Any) -> Any:
    """What about a cell changes its graph besides its inputs: training mode and state types."""
    if not isinstance(owner, Cell):
        return None
    modes = tuple(cell.__dict__["training"] for _, cell in owner.cells())
    return modes, tuple((k, id(p), str(p.type)) for k, p in owner.parameters().items())


def _host(x: Any) -> Array | None:
    """An argument that is data: an array, or a list of numbers."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float32) if x.dtype == np.float64 else x
    return None


def _specs(args: Sequence[Any]) -> list[Any]:
    return [
        rebuild(a, [type_of(h) if (h := _host(x)) is not None else x for x in leaves(a)])
        for a in args
    ]


def _arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Array]:
    found = [_host(x) for a in (*args, *kwargs.values()) for x in leaves(a)]
    return [a for a in found if a is not None]


def graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: calls with arrays trace the function and run it; calls in a trace record it.

    >>> from triplane.unified_ir import graph
    >>> @graph
    ... def relu_or_double(x):
    ...     if x.sum() > 0:
    ...         y = x * 2.0
    ...     else:
    ...         y = x * 0.0
    ...     return y
    >>> relu_or_double(np.array([1.0, 2.0], np.float32))
    array([2., 4.], dtype=float32)
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recording():
            return rewritten(function)(*args, **kwargs)
        return run(function, args, kwargs)

    return call

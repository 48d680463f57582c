"""Calling cells and functions with arrays: traced once per signature, or recorded eagerly.

Arrays and numpy scalars are data. Every other argument (Python numbers, strings, None, cells)
belongs to the signature, so a new value causes a new trace: pass an array for a value that varies.
The settings of `mode` hold for the current thread or task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import BoundArguments
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice, suggestion
from triplane.unified_ir.engines import ENGINES, engine
from triplane.unified_ir.engines.finite import finite, first_nonfinite
from triplane.unified_ir.frontend.binding import Parameter
from triplane.unified_ir.frontend.guards import PLAIN, TraceGuard
from triplane.unified_ir.frontend.programs import Compiled, ObjectIdentity, programs_of
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.trace import Traceable, Traced, bind, entered, record
from triplane.unified_ir.frontend.traced_call import at_users_line
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ops.evaluate import run_node
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild

Mode = Literal["graph", "eager"]
Floats = Literal["float32", "float64"]


@dataclass(frozen=True, slots=True)
class _Setting:
    """Settings of calls with arrays."""

    mode: Mode = "graph"
    engine: str = "onnx"
    floats: Floats = "float32"
    finite: bool = False


_DEFAULT: Final = _Setting()
_setting: ContextVar[_Setting] = ContextVar("triplane_mode", default=_DEFAULT)


def set_mode(
    mode: Mode, engine: str = "onnx", *, floats: Floats = "float32", finite: bool = False
) -> None:
    """Choose how calls with arrays run from now on: "graph" on an engine, or "eager" on numpy.

    In eager mode every value carries its array while it is recorded, so a debugger shows numbers
    and Python control flow simply runs. `floats`: the dtype to which a call converts arrays of
    float64, numpy's default: "float32", or "float64" to compute in double precision (for gradient
    checks).
    `finite`: a call that returns NaN or infinity raises an error that names the first node that
    computes it, and writes no buffer back.
    """
    check_choice("mode", mode, get_args(Mode))
    check_choice("floats", floats, get_args(Floats))
    if engine not in ENGINES:
        known = f"{', '.join(ENGINES)}{suggestion(engine, ENGINES)}"
        raise InvalidInput(f"no engine {engine!r}; there are {known}")
    _setting.set(_Setting(mode, engine, floats, finite))


def current_floats() -> Floats:
    """The dtype that float64 arrays become at a call."""
    return _setting.get().floats


@contextmanager
def mode(
    mode: Mode, engine: str = "onnx", *, floats: Floats = "float32", finite: bool = False
) -> Iterator[None]:
    """Choose how calls with arrays run within the block; see `set_mode`."""
    before = _setting.get()
    set_mode(mode, engine, floats=floats, finite=finite)
    try:
        yield
    finally:
        _setting.set(before)


def run(
    target: Traceable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    replacing: Mapping[Parameter, Array] = MappingProxyType({}),
) -> Any:
    """Return the results of a cell or function on arrays, and write assigned state back.

    replacing: arrays to use in place of those that parameters hold.
    """
    setting = _setting.get()
    if setting.mode == "eager":
        return _run_eagerly(target, args, kwargs, setting, replacing)
    programs = programs_of(target)
    if kwargs:
        args, kwargs = programs.ordered(args, kwargs)
    arrays: list[Array] = []
    objects: list[Any] = []
    parts = [_key_of(x, setting.floats, arrays, objects) for x in args]
    parts += [(k, _key_of(v, setting.floats, arrays, objects)) for k, v in kwargs.items()]
    # `floats` is not part of the key: it shows in the dtypes of the arrays.
    key = (setting.engine, len(args), *parts)
    compiled = programs.find(key)
    if compiled is None:
        # The guard is made before the trace, so that `keep` notices a trace that changes what it
        # reads.
        guard = TraceGuard([target, *objects])
        compiled = _compiled(target, args, kwargs, setting, guard)
        programs.keep(key, compiled)
    if replacing:
        refuse_lost(target, [p for _, p in compiled.assigned if p in replacing])
    values = compiled.program(*arrays, *[replacing.get(p, p.array) for p in compiled.state])
    if setting.finite:
        _check_finite(compiled.traced, [*arrays, *state_arrays(compiled.traced, replacing)], values)
    # Only now, after every check: a call that fails leaves the buffers as they were.
    for i, parameter in compiled.assigned:
        parameter.array = values[i]
    return values[0] if compiled.single else _rebuilt(compiled.traced, values)


def _run_eagerly(
    target: Traceable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    setting: _Setting,
    replacing: Mapping[Parameter, Array],
) -> Any:
    arguments, inputs = host_arguments(target, args, kwargs, setting.floats)
    traced = record(target, arguments, run=run_node, arrays=inputs, replacing=replacing)
    assert traced.arrays is not None
    refuse_lost(target, [traced.state[k] for k in traced.assigned if traced.state[k] in replacing])
    results = [traced.arrays[v] for v in traced.function.results]
    if setting.finite:
        _check_finite(traced, [*inputs, *state_arrays(traced, replacing)], results)
    for path, value in zip(traced.function.result_names, results, strict=True):
        if path in traced.assigned:
            traced.state[path].array = value
    return _rebuilt(traced, results)


def refuse_lost(target: Any, lost: Sequence[Parameter]) -> None:
    """Refuse the assignment of state whose new value nobody would receive."""
    if lost:
        path = next(k for k, p in target.parameters().items() if p in lost)
        raise InvalidInput(
            f"{type(target).__name__} assigns its state {path!r}, but the call was given "
            "a value for it, and the new one would be lost; leave it out of the mapping, so that "
            f"the cell keeps it (trainable_state() has no buffers), or call eval()"
            f"{at_users_line()}"
        )


def _check_finite(traced: Traced, arrays: Sequence[Array], values: Sequence[Array]) -> None:
    if all(finite(v) for v in values):
        return
    cause = first_nonfinite(
        traced.function, dict(zip(traced.function.param_names, arrays, strict=True))
    )
    raise InvalidInput(
        f"{traced.function.name} returned NaN or infinity: "
        f"{cause or 'only this engine does; compare(f, *args) finds the node'}"
    )


def _rebuilt(traced: Traced, values: Sequence[Array]) -> Any:
    """Return the results in the function's own tree."""
    by_name = dict(zip(traced.function.result_names, values, strict=True))
    return rebuild(traced.results, [by_name[n] for n in leaves(traced.results)])


def _compiled(
    target: Traceable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    setting: _Setting,
    guard: TraceGuard,
) -> Compiled:
    arguments, _ = host_arguments(target, args, kwargs, setting.floats)
    traced = record(target, arguments)
    names = traced.function.result_names
    return Compiled(
        traced,
        engine(setting.engine).compile(traced.function),
        guard,
        tuple(traced.state[p.name] for p in traced.function.params if p.name in traced.state),
        tuple((names.index(path), traced.state[path]) for path in traced.assigned),
        single=bool(names) and traced.results == names[0],
    )


def _key_of(x: Any, floats: Floats, arrays: list[Array], objects: list[Any]) -> Any:
    """Return the part of an argument that a trace depends on; collect its arrays and objects."""
    if isinstance(x, (np.ndarray, np.generic)):
        host = _host(x, floats)
        arrays.append(host)
        return host.dtype, host.shape
    if isinstance(x, PLAIN):
        return type(x), repr(x)
    if isinstance(x, (tuple, list)):
        return type(x), *(_key_of(v, floats, arrays, objects) for v in x)
    if isinstance(x, dict):
        return dict, *((k, _key_of(x[k], floats, arrays, objects)) for k in sorted(x))
    objects.append(x)
    return ObjectIdentity(x)


def host_arguments(
    target: Traceable, args: Sequence[Any], kwargs: Mapping[str, Any], floats: Floats
) -> tuple[BoundArguments, list[Array]]:
    """Return the arguments with arrays replaced by their types, and the arrays in order."""
    seen = [rebuild(a, [_host(x, floats) for x in leaves(a)]) for a in args]
    named = {k: rebuild(v, [_host(x, floats) for x in leaves(v)]) for k, v in kwargs.items()}
    return bind(target, seen, named)


def state_arrays(
    traced: Traced, replacing: Mapping[Parameter, Array] = MappingProxyType({})
) -> list[Array]:
    """Return the arrays of the state of a traced function, in the order of its parameters."""
    used = [traced.state[p.name] for p in traced.function.params if p.name in traced.state]
    return [replacing.get(p, p.array) for p in used]


def _host(x: Any, floats: Floats) -> Any:
    """Return an argument as recorded: arrays and numpy scalars have a supported type."""
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if isinstance(x, np.ndarray):
        return x.astype(floats) if x.dtype == np.float64 else x
    if hasattr(x, "__array__") and not isinstance(x, (type, Tensor)):
        # It would be a constant of the trace, and its own operators would compute with it.
        kind = f"{type(x).__module__}.{type(x).__name__}"
        raise InvalidInput(
            f"an argument is a {kind}, which is no array of numpy; pass numpy.asarray(...) of it"
            f"{at_users_line()}"
        )
    return x


def with_arrays_as_tensors(tree: Any) -> Any:
    """Return an argument of a call that is being recorded, with constants for its arrays."""
    flat = leaves(tree)
    if not any(isinstance(x, np.ndarray) for x in flat):
        return tree
    floats = current_floats()
    return rebuild(
        tree, [as_tensor(_host(x, floats)) if isinstance(x, np.ndarray) else x for x in flat]
    )


def graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: calls with arrays trace the function and run it; calls in a trace record it.

    Python `if`, `while`, `for` over tensors become part of the graph.

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
        if not recording():
            return run(function, args, kwargs)
        with entered(function):
            return rewritten(function)(*args, **kwargs)

    return call

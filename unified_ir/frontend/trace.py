"""Tracing: a cell or Python function becomes an IR function.

Parameters of the function are the inputs, then the state the cell used, by path; results are what
`construct` returned, then assigned buffers under their own paths, then summaries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.cell import Binding, Cell, Parameter, bound
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.ir.graph import Array, Function, Value
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.build import Build, RunNode
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild
from triplane.unified_ir.passes.clean import drop_dead

Traceable = Cell | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function, the tree its results came in, and the parameters it uses and assigns."""

    function: Function
    results: Any
    """The returned tree, its leaves replaced by result names."""
    state: Mapping[str, Parameter]
    arrays: Mapping[Value, Array] | None
    """In eager mode, the array of every value."""


def trace(target: Traceable, *specs: Any, name: str | None = None, **named: Any) -> Function:
    """The IR function of a cell or of a Python function.

    `specs` are trees of `TensorSpec`, one per positional argument (arrays stand for their own
    static type); other values pass through as Python constants.
    """
    return traced(target, specs, named, name=name).function


def traced(
    target: Traceable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str | None = None,
    run: RunNode | None = None,
    arrays: Sequence[Array] = (),
) -> Traced:
    """As `trace`, with everything that is known afterwards; `run` records in eager mode."""
    function = target.construct if isinstance(target, Cell) else target
    build = Build(TABLE, name or _name(target), run=run)
    binding = Binding()
    bound_args = _bind_arguments(function, args, kwargs)
    given = iter(arrays)
    with build, bound(binding):
        inputs = {
            k: _as_params(build, k, v, given if run is not None else None)
            for k, v in bound_args.items()
        }
        state = _state_of(target)
        for path, parameter in state.items():
            array = parameter.array if run is not None else None
            binding.tensors[parameter] = build.param(path, parameter.type, array)
        made = _call(target, function, inputs)
    return _finish(build, binding, state, made)


def _call(target: Traceable, function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    positional, keywords = _split(function, inputs)
    if isinstance(target, Cell):
        return target(*positional, **keywords)
    return rewritten(function)(*positional, **keywords)


def _split(
    function: Callable[..., Any], inputs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    signature = inspect.signature(function).parameters
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for key, value in inputs.items():
        if key in signature and signature[key].kind is not inspect.Parameter.KEYWORD_ONLY:
            positional.append(value)
        elif "*" in key:
            positional.append(value)
        else:
            keywords[key] = value
    return positional, keywords


def _bind_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by parameter name; extra positional ones as `NAME*0`, `NAME*1`."""
    try:
        found = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidInput(f"{_name(function)}: {error}") from None
    named: dict[str, Any] = {}
    for key, value in found.arguments.items():
        kind = found.signature.parameters[key].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{key}*{i}": v for i, v in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[key] = value
    return named


def _as_params(build: Build, name: str, tree: Any, arrays: Any) -> Any:
    """Each `TensorType` leaf of an argument as a parameter; other leaves stay as they are."""
    specs = leaves(tree)
    many = sum(isinstance(s, TensorType) for s in specs) > 1
    made = []
    for i, spec in enumerate(specs):
        if not isinstance(spec, TensorType):
            made.append(spec)
            continue
        label = f"{name}.{i}" if many else name.replace("*", "")
        made.append(build.param(label, spec, next(arrays) if arrays is not None else None))
    return rebuild(tree, made)


def _state_of(target: Traceable) -> dict[str, Parameter]:
    """State of a cell, or of the cells a method or closure holds."""
    if isinstance(target, Cell):
        return target.parameters()
    found: dict[str, Parameter] = {}
    for label, cell in _cells_of(target):
        for path, parameter in cell.parameters().items():
            if parameter not in found.values():
                found[f"{label}.{path}" if label else path] = parameter
    return found


def _cells_of(target: Callable[..., Any]) -> list[tuple[str, Cell]]:
    owner = getattr(target, "__self__", None)
    if isinstance(owner, Cell):
        return [("", owner)]
    closure = inspect.getclosurevars(inspect.unwrap(target)) if inspect.isfunction(target) else None
    if closure is None:
        return []
    held = {**closure.globals, **closure.nonlocals}
    return [(k, v) for k, v in held.items() if isinstance(v, Cell)]


def _finish(
    build: Build, binding: Binding, state: Mapping[str, Parameter], made: Any
) -> Traced:
    with build:
        results = [as_tensor(x) for x in leaves(made)]
    names = _result_names(made, len(results))
    named: dict[str, Tensor] = dict(zip(names, results, strict=True))
    for path, parameter in state.items():
        if parameter in binding.assigned:
            named[path] = binding.assigned[parameter]
    clash = sorted(named.keys() & build.effects.keys())
    if clash:
        raise InvalidInput(f"{clash[0]!r} is both a result and a summary")
    function = drop_dead(build.finish({**named, **build.effects}))
    function, used = _drop_unused_state(function, state)
    return Traced(function, rebuild(made, names), used, build.arrays)


def _drop_unused_state(
    function: Function, state: Mapping[str, Parameter]
) -> tuple[Function, dict[str, Parameter]]:
    read = {v for node in function.nodes for v in node.inputs} | set(function.results)
    params = tuple(p for p in function.params if p.name not in state or p in read)
    kept = {p.name for p in params} | set(function.result_names)
    slim = Function(
        function.name, params, function.results, function.result_names, function.nodes
    )
    return slim, {k: v for k, v in state.items() if k in kept}


def _result_names(made: Any, count: int) -> list[str]:
    """A dict names its results; a single tensor is `y`, a tuple `y0`, `y1`, ..."""
    if isinstance(made, dict) and all(isinstance(k, str) for k in made):
        names = []
        for key in sorted(made):
            inner = leaves(made[key])
            names += [key] if len(inner) == 1 else [f"{key}.{i}" for i in range(len(inner))]
        return names
    return ["y"] if count == 1 else [f"y{i}" for i in range(count)]


def _name(target: Any) -> str:
    if isinstance(target, Cell):
        return type(target).__name__
    return getattr(target, "__name__", type(target).__name__).strip("<>")

"""Tracing: record a call of a cell or Python function as an IR function.

The parameters of the IR function are the inputs, then the state that the call used, named by path.
Its results are the returned values, then the assigned buffers under their own paths, then the
summaries. Python values among the arguments are constants of the trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import BoundArguments
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import (
    Binding,
    Parameter,
    StateTree,
    bound,
    current_or_none,
    holding,
    replaced,
)
from triplane.unified_ir.frontend.plain_arrays import warn_of_plain_arrays
from triplane.unified_ir.frontend.reachable import state_of, state_trees_of
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.ir.graph import Array, Function, Value
from triplane.unified_ir.ir.types import TensorType, type_of
from triplane.unified_ir.ops.build import Build, RunNode
from triplane.unified_ir.ops.recorder import recorder, stack
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild
from triplane.unified_ir.passes.clean import drop_dead

Traceable = StateTree | Callable[..., Any]
MAX_LEVELS: Final = 16
"""Maximum number of nested graphs that one function may open by calling itself."""
_calls: ContextVar[tuple[tuple[Any, int], ...]] = ContextVar("triplane_calls", default=())


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function, the tree of its results, and the parameters it uses and assigns."""

    function: Function
    results: Any
    """The returned tree, with leaves replaced by result names."""
    state: Mapping[str, Parameter]
    assigned: frozenset[str]
    """Paths of the state whose new value is a result."""
    arrays: Mapping[Value, Array] | None
    """In eager mode, the array of every value."""


def entered(function: Any, owner: Any = None) -> AbstractContextManager[None]:
    """Mark the block as the recording of one call of `function` (of the cell `owner`).

    A function that calls itself under a condition that a tensor decides would be recorded
    endlessly, since both sides of such a condition are recorded. Each level adds a graph, so the
    levels are counted in graphs; Python's own limit applies to recursion over Python values.
    """
    key = (function, id(owner))
    depth = len(stack.get())
    calls = _calls.get()
    # The set of distinct depths: a recursion over Python values (a tree, a list) stays within one
    # graph and adds only one level, however deep it is.
    levels = {d for k, d in calls if k == key} | {depth}
    if len(levels) > MAX_LEVELS:
        name = getattr(function, "__qualname__", str(function))
        raise InvalidInput(
            f"{name} calls itself where a tensor decides whether it does, and recording it would "
            f"never end (limit {MAX_LEVELS} levels); write a `while` loop, make the call the whole "
            "`return` of a @graph function (it becomes a loop), or run in mode('eager')"
        )
    return holding(_calls, (*calls, (key, depth)))


def within(cell: Any) -> AbstractContextManager[None]:
    """Give the nodes recorded within the block the cell's path as their scope."""
    binding, build = current_or_none(), recorder()
    path = None if binding is None else binding.paths.get(cell)
    return replaced(build, scope=path) if path is not None else nullcontext()


def trace(target: Traceable, *specs: Any, name: str | None = None, **named: Any) -> Function:
    """Return the IR function of a cell or of a Python function.

    `specs` are trees of `TensorSpec`, one per positional argument (an array stands for its own
    type); other values are Python constants. A single result is called `y`, the items of a tuple
    `y0`, `y1`, ... (`result`, `result0` where an input has that name), those of a dict by their
    keys.
    """
    return traced(target, specs, named, name=name).function


def bind(
    target: Traceable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[BoundArguments, list[Array]]:
    """Return arguments by name, arrays replaced by their types, and the arrays in order."""
    function = target.construct if isinstance(target, StateTree) else target
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidInput(f"{name_of(target)}: {error}") from None
    arrays: list[Array] = []
    for label, key, tree in _labelled(bound):
        flat = leaves(tree)
        arrays += [x for x in flat if isinstance(x, np.ndarray)]
        typed = rebuild(tree, [type_of(x) if isinstance(x, np.ndarray) else x for x in flat])
        _put(bound, label, key, typed)
    return bound, arrays


def _put(arguments: BoundArguments, label: str, key: str | None, tree: Any) -> None:
    (arguments.arguments if key is None else arguments.arguments[key])[label] = tree


def traced(
    target: Traceable, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str | None = None
) -> Traced:
    """Trace like `trace`, and return also the trees and parameters of the function."""
    return record(target, bind(target, args, kwargs)[0], name=name)


def record(
    target: Traceable,
    arguments: BoundArguments,
    *,
    name: str | None = None,
    run: RunNode | None = None,
    arrays: Sequence[Array] = (),
    replacing: Mapping[Parameter, Array] = MappingProxyType({}),
) -> Traced:
    """Record one call. With `run` (eager mode), also compute it on `arrays`, in argument order.

    replacing: arrays to compute with in place of those that parameters hold.
    """
    build = Build(TABLE, name or name_of(target), run=run)
    binding = Binding(build)
    state = state_of(target, arguments.arguments)
    binding.paths = _paths(target, arguments.arguments)
    warn_of_plain_arrays(binding.paths)
    with build, bound(binding):
        _add_inputs(build, arguments, iter(arrays), state)
        for path, parameter in state.items():
            array = None if run is None else replacing.get(parameter, parameter.array)
            binding.tensors[parameter] = build.param(path, parameter.type, array)
        returned = _call(target, arguments)
        results = [_result(x, target) for x in leaves(returned)]
    return _finish(build, binding, state, returned, results)


def _call(target: Traceable, arguments: BoundArguments) -> Any:
    if isinstance(target, StateTree):
        return target(*arguments.args, **arguments.kwargs)
    with entered(target):
        return rewritten(target)(*arguments.args, **arguments.kwargs)


def _paths(target: Traceable, arguments: Mapping[str, Any]) -> dict[Any, str]:
    """Return the first path of every cell in reach, which is the scope of its nodes."""
    paths: dict[Any, str] = {}
    for label, owner in state_trees_of(target, arguments):
        for path, cell in owner.cells(label):
            paths.setdefault(cell, path)
    return paths


def _add_inputs(
    build: Build, arguments: BoundArguments, arrays: Iterator[Array], state: Mapping[str, Parameter]
) -> None:
    """Replace each `TensorType` among the arguments by a parameter."""
    for label, key, tree in _labelled(arguments):
        _put(arguments, label, key, _as_params(build, label, tree, arrays))
    clash = sorted({p.name for p in build.params} & state.keys())
    if clash:
        raise InvalidInput(
            f"{clash[0]!r} is both an input and a state tensor of {build.name}; rename one"
        )


def _labelled(arguments: BoundArguments) -> list[tuple[str, str | None, Any]]:
    """Return (label, name of the keyword collection it belongs to, tree) of each argument."""
    parts: list[tuple[str, str | None, Any]] = []
    for name, tree in list(arguments.arguments.items()):
        if arguments.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            # `_put` writes into this dict, so it must not be the caller's own.
            arguments.arguments[name] = dict(tree)
            parts += [(k, name, v) for k, v in tree.items()]
        else:
            parts.append((name, None, tree))
    return parts


def _as_params(build: Build, label: str, tree: Any, arrays: Iterator[Array]) -> Any:
    """Return a tree with each `TensorType` leaf as a parameter and other leaves unchanged."""
    specs = leaves(tree)
    many = sum(isinstance(s, TensorType) for s in specs) > 1
    params = []
    for i, spec in enumerate(specs):
        if isinstance(spec, TensorType):
            array = None if build.arrays is None else next(arrays)
            params.append(build.param(f"{label}.{i}" if many else label, spec, array))
        else:
            params.append(spec)
    return rebuild(tree, params)


def _result(x: Any, target: Traceable) -> Tensor:
    if isinstance(x, Tensor) or hasattr(x, "__tensor__"):
        return as_tensor(x)
    if isinstance(x, StateTree):
        raise InvalidInput(
            f"{name_of(target)} returned the cell {type(x).__name__}, which keeps its new state by "
            "itself; return tensors, numbers and arrays only, in tuples, lists and dicts"
        )
    if not isinstance(x, (bool, int, float, np.ndarray, np.generic)):
        raise InvalidInput(
            f"{name_of(target)} returned a {type(x).__name__}, {x!r}; results are tensors, numbers "
            "and arrays, in tuples, lists and dicts"
        )
    return as_tensor(np.asarray(x) if isinstance(x, np.generic) else x)


def _finish(
    build: Build,
    binding: Binding,
    state: Mapping[str, Parameter],
    returned: Any,
    results: Sequence[Tensor],
) -> Traced:
    names = _result_names(returned, len(results), {p.name for p in build.params})
    named: dict[str, Tensor] = dict(zip(names, results, strict=True))
    # In the order of the state, not of the assignments, so that the signature of the function does
    # not depend on the order of statements in `construct`.
    assigned = {path: binding.assigned[p] for path, p in state.items() if p in binding.assigned}
    for other, what in ((state, "a state tensor"), (build.effects, "a summary")):
        clash = sorted(named.keys() & other.keys())
        if clash:
            raise InvalidInput(f"{clash[0]!r} is both a result and {what}; rename the result")
    function = drop_dead(build.finish({**named, **assigned, **build.effects}))
    read = function.reads()
    # Inputs stay even if nothing reads them, because the caller passes them; state that the call
    # did not use is not part of the signature.
    function = function.with_(params=(p for p in build.params if p.name not in state or p in read))
    present = {*function.param_names, *function.result_names}
    used = {k: p for k, p in state.items() if k in present}
    return Traced(function, rebuild(returned, names), used, frozenset(assigned), build.arrays)


def _result_names(returned: Any, count: int, taken: set[str]) -> list[str]:
    """Return the names: keys of a dict, `y` for a single tensor, `y0`, `y1`, ... for a tuple."""
    if isinstance(returned, dict) and all(isinstance(k, str) for k in returned):
        names = []
        # Sorted, because `leaves` visits the values of a dict in the order of its sorted keys.
        for key in sorted(returned):
            inner = leaves(returned[key])
            names += [key] if len(inner) == 1 else [f"{key}.{i}" for i in range(len(inner))]
        return names
    for stem in ("y", "result", "output"):
        names = [stem] if count == 1 else [f"{stem}{i}" for i in range(count)]
        if not taken & set(names):
            break
    return names


def name_of(target: Any) -> str:
    """Return the name of a traced function."""
    if isinstance(target, StateTree):
        return type(target).__name__
    return str(getattr(target, "__name__", type(target).__name__)).strip("<>")

"""A call recorded as a function of its own, from which transforms derive other functions.

Tensors among the arguments become parameters, and other tensors that the call reads become further
operands. Buffers that the call assigns become extra results; the enclosing trace assigns them when
it has replayed the function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import (
    Parameter,
    StateTree,
    container_within,
    current,
    current_or_none,
)
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.variables import collecting
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.source import user_location
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A recorded call; `function` takes `operands` and returns the value's leaves, then buffers."""

    function: Function
    operands: list[Tensor]
    value: Any
    """The returned tree; its leaves stand for the first results."""
    assigned: list[Parameter]
    trees: list[Any]
    """The arguments, with numbers and arrays that are operands replaced by tensors.

    A cell whose parameters are operands is a dict of their tensors by path.
    """

    def positions(self, k: int) -> range:
        """Return the positions of the tensors of argument `k` among the operands."""
        counts = [sum(isinstance(x, Tensor) for x in leaves(t)) for t in self.trees]
        return range(sum(counts[:k]), sum(counts[: k + 1]))

    def finish(self, results: Sequence[Tensor]) -> Any:
        """Return the call's value built from results of the function, and assign the buffers."""
        count = len(results) - len(self.assigned)
        binding = current_or_none()
        if binding is not None:
            binding.assigned.update(zip(self.assigned, results[count:], strict=True))
        return rebuild(self.value, list(results[:count]))


def record_call(
    f: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    numbers: Sequence[int] = (),
    types: Mapping[int, Sequence[TensorType]] | None = None,
) -> TracedCall:
    """Record `f(*args, **kwargs)` as a function of its own.

    In the arguments whose indices are in `numbers`, Python numbers and the trainable parameters of
    cells are operands too. `types` overrides the types of an argument's tensors, for example with
    those of one slice of it; the graph then has no values.
    """
    outer = recorder()
    opened = [_with_parameters(a) if i in numbers else a for i, a in enumerate(args)]
    trees = [with_tensors(a, numbers=i in numbers) for i, a in enumerate(opened)]
    own = [[x for x in leaves(a) if isinstance(x, Tensor)] for a in trees]
    flat = [x for tensors in own for x in tensors]
    # Overridden types (one slice of a batch, say) do not match the arrays at hand, so nothing can
    # be computed while recording, even in eager mode.
    run = outer.run if types is None else None
    inner = Build(outer.table, name_of_callable(f), run=run, sizes=outer.sizes)
    inner.scope = outer.scope
    wanted = [t for i, xs in enumerate(own) for t in (types or {}).get(i, [x.type for x in xs])]
    with inner, _isolated_buffers() as buffers, collecting():
        params = [
            inner.param(f"x{i}", t, None if inner.arrays is None else x.build.arrays[x.value])  # type: ignore[index]
            for i, (x, t) in enumerate(zip(flat, wanted, strict=True))
        ]
        rest = iter(params)
        inputs = [
            rebuild(t, [next(rest) if isinstance(x, Tensor) else x for x in leaves(t)])
            for t in trees
        ]
        tensors: dict[Parameter, Tensor] = {}
        inputs = [
            _with_cells(a, x, tensors) if i in numbers else x
            for i, (a, x) in enumerate(zip(args, inputs, strict=True))
        ]
        # Tensors in `kwargs` are not replaced: they are captured from the outer graph like a
        # closure's.
        with nullcontext() if not tensors else current().substituted(tensors):
            value = rewritten(f)(*inputs, **kwargs)
        results = [as_tensor(y) for y in leaves(value)]
    named = {f"y{i}": y for i, y in enumerate([*results, *buffers.values()])}
    function = inner.finish(named)
    # Captured tensors come last; `TracedCall.positions` counts on the arguments coming first.
    return TracedCall(function, [*flat, *inner.captured], value, list(buffers), trees)


def _with_parameters(tree: Any) -> Any:
    """Return the argument with each cell replaced by its trainable parameters by path."""
    return rebuild(tree, [_trainable(x) if isinstance(x, StateTree) else x for x in leaves(tree)])


def _trainable(cell: StateTree) -> dict[str, Parameter]:
    parameters = {path: p for path, p in cell.parameters().items() if p.trainable}
    if not parameters:
        inside = next((c for _, owner in cell.cells() if (c := container_within(owner))), "")
        raise InvalidInput(
            f"a gradient with respect to {type(cell).__name__} needs a trainable parameter, and it "
            f"has none; {inside or 'unfreeze() some'}{at_users_line()}"
        )
    return parameters


def _with_cells(tree: Any, opened: Any, tensors: dict[Parameter, Tensor]) -> Any:
    """Return the argument with the cells of `tree`; add the tensors of their parameters."""
    rest, values = iter(leaves(opened)), []
    for leaf in leaves(tree):
        if not isinstance(leaf, StateTree):
            values.append(next(rest))
            continue
        values.append(leaf)
        for path, parameter in sorted(_trainable(leaf).items()):
            if parameter in tensors:
                raise InvalidInput(
                    f"two arguments that are differentiated share the parameter {path!r} of "
                    f"{type(leaf).__name__}; pass the cell once{at_users_line()}"
                )
            tensors[parameter] = next(rest)
    return rebuild(tree, values)


@contextmanager
def _isolated_buffers() -> Iterator[dict[Parameter, Tensor]]:
    """Collect the buffers assigned within the block, and remove them from the binding again."""
    binding, buffers = current_or_none(), dict[Parameter, Tensor]()
    before = {} if binding is None else dict(binding.assigned)
    try:
        yield buffers
    finally:
        if binding is not None:
            # Compared by identity: a buffer that the block did not assign still has the tensor it
            # had.
            buffers.update({p: t for p, t in binding.assigned.items() if before.get(p) is not t})
            binding.assigned = before


def with_tensors(tree: Any, *, numbers: bool = False) -> Any:
    """Return the argument with arrays, and numbers if asked, as tensors of the current graph."""
    converted = []
    for x in leaves(tree):
        is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
        is_tensor = isinstance(x, (Tensor, np.ndarray, np.generic)) or hasattr(x, "__tensor__")
        converted.append(as_tensor(x) if is_tensor or (numbers and is_number) else x)
    return rebuild(tree, converted)


def at_users_line() -> str:
    """Return the location of the user's call, to end a message with."""
    place = user_location()
    return f" (at {place})" if place else ""


def name_of_callable(f: Any) -> str:
    """Return the name of a function or cell for messages."""
    if not callable(f):
        raise InvalidInput(f"{f!r} is not callable; give a function or a cell")
    return str(getattr(f, "__name__", type(f).__name__))

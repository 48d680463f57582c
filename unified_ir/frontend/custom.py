"""User-defined gradients, for functions (`custom_vjp`) and for cells (`Cell.bprop`).

`bprop` receives the inputs, then the result `y` and the cotangent `g` of its floating-point leaves
(one tensor where there is one leaf). It returns one cotangent per input: a tree like the input, or
None where no gradient passes. It is recorded as operators, so it can be differentiated again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter, StateTree, current, replaced
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.run import graph
from triplane.unified_ir.ops.rows.control.custom_gradients import custom_gradient
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild

Bprop = Callable[..., Any]


def custom_vjp(bprop: Bprop) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function is differentiated by `bprop(*inputs, y=y, g=g)`.

    The function must take everything it uses as arguments; arguments that are not tensors stay
    constants, and `bprop` receives them too.

    >>> import numpy as np
    >>> from triplane.unified_ir import grad, ops
    >>> @custom_vjp(lambda x, y, g: g)
    ... def rounded(x):
    ...     return ops.round_(x)
    >>> grad(lambda x: (rounded(x) * 3.0).sum())(np.array([0.2, 1.7], np.float32))
    array([3., 3.], dtype=float32)
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(function).bind(*args, **kwargs)
            name = str(getattr(function, "__name__", type(function).__name__))
            return _record_custom(rewritten(function), rewritten(bprop), bound.args, name)

        return graph(call)

    return decorated


def construct_with_bprop(cell: StateTree, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record a cell's `construct`, differentiated by its `bprop`.

    Buffers may be read in both methods. A trained parameter is refused, since `bprop` has no way to
    return its gradient: pass it to a `custom_vjp` function. Assigning a buffer is refused.
    """
    name = type(cell).__name__
    state = cell.parameters()
    trained = [path for path, p in state.items() if p.trainable]
    if trained:
        raise InvalidInput(
            f"{name} defines bprop and owns the trained parameters {trained}, for which bprop "
            "returns no gradient; write a custom_vjp function that takes them as arguments"
        )
    bound = inspect.signature(cell.construct).bind(*args, **kwargs)
    construct = rewritten(type(cell).construct)
    bprop = rewritten(type(cell).bprop)  # type: ignore[attr-defined]
    used = list(state.values())

    def forward(tensors: Sequence[Tensor], *inputs: Any) -> Any:
        with _standing_for(used, tensors, name):
            return construct(cell, *inputs)

    def back(tensors: Sequence[Tensor], *inputs: Any, y: Any, g: Any) -> Any:
        with _standing_for(used, tensors, name):
            cotangents = bprop(cell, *inputs, y=y, g=g)
        return (None, *_per_input(cotangents, len(inputs), name))

    # State is passed as an operand: both methods are recorded as closed functions, which cannot
    # read tensors of the trace around them.
    values = [current().read(p) for p in used]
    return _record_custom(forward, back, (values, *bound.args), name)


def _standing_for(
    parameters: Sequence[Parameter], tensors: Sequence[Tensor], name: str
) -> AbstractContextManager[None]:
    """Make the parameters read as these tensors within the block, and refuse to assign them."""
    binding, new = current(), dict(zip(parameters, tensors, strict=True))
    return replaced(
        binding,
        tensors=binding.tensors | new,
        # `read` prefers an assigned value, which would hide the operand.
        assigned={k: v for k, v in binding.assigned.items() if k not in new},
        frozen=f"in {name}, whose bprop could not see that; assign it in the enclosing cell",
    )


def _record_custom(f: Callable[..., Any], bprop: Bprop, args: Sequence[Any], name: str) -> Any:
    """Record `f(*args)` as one node; tensors are operands, other leaves are constants."""
    flat = leaves(tuple(args))
    at = [i for i, x in enumerate(flat) if isinstance(x, Tensor) or hasattr(x, "dtype")]

    def tree(tensors: Sequence[Tensor]) -> Any:
        filled = list(flat)
        for i, t in zip(at, tensors, strict=True):
            filled[i] = t
        return rebuild(tuple(args), filled)

    def forward(*tensors: Tensor) -> Any:
        return f(*tree(tensors))

    def back(*rest: Any) -> Any:
        *tensors, y, g = rest
        inputs = tree(tensors)
        gs = _per_input(bprop(*inputs, y=y, g=g), len(inputs), name)
        pairs = zip(inputs, gs, strict=True)
        return tuple(c for x, g_x in pairs for c in _cotangents(x, g_x, name))

    return custom_gradient(forward, back, *(as_tensor(flat[i]) for i in at))


def _per_input(cotangents: Any, count: int, name: str) -> tuple[Any, ...]:
    items = cotangents if isinstance(cotangents, tuple) else (cotangents,)
    if len(items) != count:
        raise InvalidInput(
            f"bprop of {name} must return one cotangent per input ({count}), got {len(items)}; "
            "return None where no gradient passes"
        )
    return items


def _cotangents(x: Any, g: Any, name: str) -> list[Tensor]:
    """Return cotangents of the floating-point leaves of one input, zeros for None."""
    wanted = [t for t in leaves(x) if isinstance(t, Tensor)]
    if g is None:
        return [zeros(t.shape, t.dtype) for t in wanted if t.dtype.is_float]
    parts = leaves(g)
    if len(parts) != len(wanted):
        raise InvalidInput(
            f"bprop of {name} returned {len(parts)} cotangents for {len(wanted)} input tensors"
        )
    pairs = zip(wanted, parts, strict=True)
    return [as_tensor(c, t.dtype) for t, c in pairs if t.dtype.is_float]

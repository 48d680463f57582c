"""`grad`, `vjp`, `jvp` and similar transforms of Python functions, cells and IR functions.

Each takes a function and returns one. It records the function as a graph of its own
(`frontend.traced_call`), so transforms nest in any order, in loops and branches, in graph and in
eager mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import autodiff
from triplane.unified_ir.autodiff.forward import pushforward
from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.frontend.programs import derived_once
from triplane.unified_ir.frontend.run import graph
from triplane.unified_ir.frontend.traced_call import (
    TracedCall,
    at_users_line,
    name_of_callable,
    record_call,
)
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import ShapeError, TypeMismatch
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.rows.control.custom_gradients import checkpointed
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, names_of_leaves, rebuild

Pull = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


@dataclass(frozen=True, slots=True)
class _Pullback:
    """A recorded call: its value, the differentiated arguments, and the pullback of cotangents."""

    value: Any
    trees: list[Any]
    wanted: list[Tensor]
    pull: Pull

    def gradients(self, gs: Sequence[Tensor | None]) -> list[Any]:
        """Return cotangents in the trees of their arguments, zeros where nothing depends on one."""
        pairs = zip(self.wanted, self.pull(gs), strict=True)
        grads = iter([zeros(p.shape, p.dtype) if g is None else g for p, g in pairs])
        return [rebuild(tree, [next(grads) for _ in leaves(tree)]) for tree in self.trees]


@derived_once
def value_and_grad(f: Any, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Any:
    """Return a function that returns (f(*args), gradient with respect to `argnums`).

    `f`: a Python function or cell that returns a scalar, or an IR function (then see
    `autodiff.value_and_grad`). The gradient has the tree of the argument; with several `argnums` it
    is a tuple. For a cell it is a dict: the gradients of its trainable parameters by path, zeros
    where the result does not depend on one. Keyword arguments are passed on and not differentiated.
    With `has_aux`, `f` returns (scalar, other results): that pair is the value, and the other
    results are not differentiated.
    """
    if isinstance(f, Function):
        return autodiff.value_and_grad(f)
    name = name_of_callable(f)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        linear = _linearized(f, args, kwargs, numbers)
        scalar = _scalar(linear.value, name, has_aux=has_aux)
        one = recorder().as_operand(np.ones((), scalar.dtype.numpy))
        # The other results of `has_aux` have no cotangent, so the backward pass does not visit
        # them.
        grads = linear.gradients([one, *(None for _ in leaves(linear.value)[1:])])
        return linear.value, grads[0] if isinstance(argnums, int) else tuple(grads)

    return graph(both)


def _scalar(value: Any, name: str, *, has_aux: bool) -> Tensor:
    """Return the one result that is differentiated."""
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
        raise InvalidInput(
            f"with has_aux, {name} must return a pair (scalar, other results), got a "
            f"{type(value).__name__}{at_users_line()}"
        )
    results = leaves(value[0] if has_aux else value)
    if len(results) != 1 or results[0].shape != ():
        more = "" if has_aux or len(results) < 2 else ", or pass has_aux=True for (scalar, others)"
        raise ShapeError(
            f"a gradient is of a scalar, but {name} gives {[y.type for y in results]}; reduce it"
            f"{more}{at_users_line()}"
        )
    scalar: Tensor = results[0]
    return scalar


@derived_once
def grad(f: Any, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Any:
    """Return a function that returns the gradient; with `has_aux`, (gradient, other results)."""
    if isinstance(f, Function):
        return autodiff.grad(f)
    both = value_and_grad(f, argnums, has_aux=has_aux)

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return graph(gradient)


@derived_once
def vjp(f: Any) -> Any:
    """Return a function like `f` with one more argument, the cotangent of its result.

    It returns (f(*args), tuple of the cotangents of the arguments).
    """
    if isinstance(f, Function):
        return autodiff.vjp(f)

    def pulled(*args: Any, **kwargs: Any) -> Any:
        *inputs, cotangent = args
        linear = _linearized(f, inputs, kwargs, range(len(inputs)))
        return linear.value, tuple(linear.gradients(_cotangent(f, cotangent, linear.value)))

    return _named_as(f, pulled)


@derived_once
def jvp(f: Any) -> Any:
    """Return a function like `f` with one more argument, the tangents of its inputs.

    It returns (f(*args), tangent of the result). The tangents are a tuple with one tree per
    argument, or None for an argument that is held constant; for a single argument the tree itself
    is passed. The result's tangent is a tree like the result, with zeros where it does not depend
    on the arguments that vary or is not a floating-point tensor.

    >>> import numpy as np
    >>> jvp(lambda x: x * x)(np.float32(3.0), np.float32(0.5))
    (array(9., dtype=float32), array(3., dtype=float32))
    """
    if isinstance(f, Function):
        return autodiff.jvp(f)
    name = name_of_callable(f)

    def pushed(*args: Any, **kwargs: Any) -> Any:
        *inputs, last = args
        tangents = (last,) if len(inputs) == 1 else last
        if not isinstance(tangents, tuple) or len(tangents) != len(inputs):
            raise InvalidInput(
                f"the last argument must be a tuple with one tangent for each of the "
                f"{len(inputs)} other arguments of {name}{at_users_line()}"
            )
        moved = [k for k, t in enumerate(tangents) if t is not None]
        # Only arguments that vary are operands; a Python number among the others stays a constant.
        recorded = record_call(f, inputs, kwargs, numbers=moved)
        at = [i for k in moved for i in recorded.positions(k)]
        _check_float([recorded.operands[i] for i in at], name)
        ts = _alike(f"a tangent of {name}", [tangents[k] for k in moved], recorded, at)
        for k in moved:
            _check_names(f"the tangent of argument {k} of {name}", tangents[k], recorded.trees[k])
        results, push = pushforward(recorded.function, recorded.operands, at)
        out = push(ts)
        value = recorded.finish(results)
        pairs = zip(leaves(value), out, strict=False)
        return value, rebuild(
            value, [zeros(y.shape, y.dtype) if t is None else t for y, t in pairs]
        )

    return _named_as(f, pushed)


@derived_once
def hessian_vector_product(f: Any, argnums: int | Sequence[int] = 0) -> Any:
    """Return a function of the arguments of `f` and a tree v like `argnums`, which returns H v.

    The Hessian H is symmetric, so H v = H^T v is the pullback of v through the gradient. It costs
    one more backward pass, and H is never formed.

    >>> import numpy as np
    >>> hessian_vector_product(lambda x: (x**3.0).sum())(np.float32([1, 2]), np.float32([1, 10]))
    array([  6., 120.], dtype=float32)
    """
    slope = grad(f, argnums)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def product(*args: Any, **kwargs: Any) -> Any:
        *inputs, vector = args
        linear = _linearized(slope, inputs, kwargs, numbers)
        products = linear.gradients(_cotangent(f, vector, linear.value))
        return products[0] if isinstance(argnums, int) else tuple(products)

    return _named_as(f, product)


def checkpoint(f: Any) -> Any:
    """Recompute the inside of `f` in the backward pass instead of keeping it in memory.

    The numbers are the same for less memory: only the operands of `f` are kept from the forward to
    the backward pass; the tensors between them and its results are computed again there.
    """
    name_of_callable(f)

    def call(*args: Any, **kwargs: Any) -> Any:
        recorded = record_call(f, args, kwargs)
        return recorded.finish(checkpointed(recorded.function, recorded.operands))

    return _named_as(f, call)


def _named_as(f: Any, call: Callable[..., Any]) -> Any:
    """Return `call` under the name of `f`."""
    call.__name__ = name_of_callable(f)
    return graph(call)


def _linearized(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[int]
) -> _Pullback:
    """Record `f` as a function of its own, and replay it here with its pullback."""
    for k in numbers:
        if not 0 <= k < len(args):
            raise InvalidInput(
                f"{name_of_callable(f)} was called with {len(args)} positional arguments, so there "
                f"is no argument {k} to differentiate{at_users_line()}"
            )
    recorded = record_call(f, args, kwargs, numbers=numbers)
    at = [i for k in numbers for i in recorded.positions(k)]
    wanted = [recorded.operands[i] for i in at]
    _check_float(wanted, name_of_callable(f))
    outputs, pull = record_vjp(recorded.function, recorded.operands, at)

    def of_results(gs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        # Buffers are results too, but no gradient flows through an assignment.
        return pull([*gs, *(None for _ in recorded.assigned)])

    trees = [recorded.trees[k] for k in numbers]
    return _Pullback(recorded.finish(outputs), trees, wanted, of_results)


def _cotangent(f: Any, cotangents: Any, value: Any) -> list[Tensor]:
    """Return the leaves of cotangents that must be like `value`."""
    gs, types = [as_tensor(g) for g in leaves(cotangents)], [y.type for y in leaves(value)]
    if [g.type for g in gs] != types:
        raise ShapeError(
            f"the cotangent must match the result of {name_of_callable(f)}, {types}; got "
            f"{[g.type for g in gs]}{at_users_line()}"
        )
    _check_names(f"the cotangent of {name_of_callable(f)}", cotangents, value)
    return gs


def _check_names(what: str, tree: Any, like: Any) -> None:
    """Refuse other keys of dicts: leaves are paired in order, so values would change places."""
    names, expected = names_of_leaves(tree), names_of_leaves(like)
    if names != expected:
        seen, keys = (", ".join(".".join(map(str, n)) for n in ns) for ns in (names, expected))
        raise InvalidInput(f"{what} needs the names {keys}; got {seen}{at_users_line()}")


def _alike(
    what: str, trees: Sequence[Any], recorded: TracedCall, at: Sequence[int]
) -> list[Tensor]:
    """Return tensors like the operands at these positions."""
    wanted = [recorded.operands[i] for i in at]
    flat = [x for t in trees for x in leaves(t)]
    tensors = [
        as_tensor(x, w.dtype if isinstance(x, (int, float)) else None)
        for x, w in zip(flat, wanted, strict=False)
    ]
    types = [w.type for w in wanted]
    if len(flat) != len(wanted) or [m.type for m in tensors] != types:
        raise ShapeError(
            f"{what} must match its argument, {types}; got {[m.type for m in tensors]}"
            f"{at_users_line()}"
        )
    return tensors


def _check_float(tensors: Sequence[Tensor], name: str) -> None:
    for t in tensors:
        if not t.dtype.is_float:
            raise TypeMismatch(
                f"gradients are with respect to floating-point tensors, but an argument of "
                f"{name} is {t.type}; cast it or choose other argnums{at_users_line()}"
            )

"""`grad`, `value_and_grad` and `vjp` of Python functions, cells and IR functions alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import autodiff
from triplane.unified_ir.autodiff.reverse import linearize
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.run import graph
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild

Pulled = tuple[Any, list[Tensor], Callable[[Sequence[Tensor | None]], list[Tensor | None]]]


def value_and_grad(f: Any, argnums: int | Sequence[int] = 0) -> Any:
    """`f` gives a scalar; the result gives (f(*args), gradient with respect to `argnums`).

    `f`: Python function, cell, or IR function (then see `autodiff.value_and_grad`). The gradient
    has the tree of the argument; with several `argnums` it is a tuple.
    """
    if isinstance(f, Function):
        return autodiff.value_and_grad(f)
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def both(*args: Any) -> Any:
        value, params, pull = _linearized(f, args, wanted)
        (scalar,) = leaves(value)
        if scalar.shape != ():
            raise ShapeError(
                f"a gradient is of a scalar, but {_name(f)} gives {scalar.type}; reduce it"
            )
        one = recorder().admit(np.ones((), scalar.dtype.numpy))
        grads = _fill(args, wanted, params, pull([one]))
        return value, grads[0] if isinstance(argnums, int) else tuple(grads)

    return graph(both)


def grad(f: Any, argnums: int | Sequence[int] = 0) -> Any:
    """As `value_and_grad`, the gradient alone."""
    if isinstance(f, Function):
        return autodiff.grad(f)
    both = value_and_grad(f, argnums)

    @functools.wraps(f)
    def gradient(*args: Any) -> Any:
        return both(*args)[1]

    return graph(gradient)


def vjp(f: Any) -> Any:
    """`f` with a last argument, the cotangent of its result: gives (f(*args), cotangents)."""
    if isinstance(f, Function):
        return autodiff.vjp(f)

    @functools.wraps(f)
    def pulled(*args: Any) -> Any:
        *inputs, cotangent = args
        wanted = tuple(range(len(inputs)))
        value, params, pull = _linearized(f, inputs, wanted)
        gs = [as_tensor(g) for g in leaves(cotangent)]
        if [g.type for g in gs] != [y.type for y in leaves(value)]:
            raise ShapeError(f"the cotangent is shaped like the result of {_name(f)}")
        return value, tuple(_fill(inputs, wanted, params, pull(gs)))

    pulled.__dict__.pop("__wrapped__", None)
    return graph(pulled)


def _linearized(f: Any, args: Sequence[Any], wanted: Sequence[int]) -> Pulled:
    """`f` recorded apart, then replayed here with its pullback."""
    outer = recorder()
    flat = [as_tensor(x) for a in args for x in leaves(a)]
    inner = Build(outer.table, _name(f), run=getattr(outer, "run", None))
    with inner:
        params = [
            inner.param(f"x{i}", x.type, None if outer.arrays is None else outer.arrays[x.value])
            for i, x in enumerate(flat)
        ]
        tree = rebuild(tuple(args), params)
        value = f(*tree) if not hasattr(f, "__code__") else rewritten(f)(*tree)
        results = [as_tensor(y) for y in leaves(value)]
    function = inner.finish({f"y{i}": y for i, y in enumerate(results)})
    starts = np.cumsum([0, *(len(leaves(a)) for a in args)])
    positions = [i for k in wanted for i in range(starts[k], starts[k + 1])]
    outputs, pull = linearize(function, [*flat, *inner.captured], positions)
    return rebuild(value, outputs), [flat[i] for i in positions], pull


def _fill(
    args: Sequence[Any],
    wanted: Sequence[int],
    params: Sequence[Tensor],
    found: Sequence[Tensor | None],
) -> list[Any]:
    """Cotangents in the trees of their arguments; zeros where nothing depends on the argument."""
    grads = iter(
        zeros(p.shape, p.dtype) if g is None else g for p, g in zip(params, found, strict=True)
    )
    return [rebuild(args[k], [next(grads) for _ in leaves(args[k])]) for k in wanted]


def _name(f: Any) -> str:
    name = getattr(f, "__name__", type(f).__name__)
    if not callable(f):
        raise InvalidInput(f"{name} is not callable; give a function or a cell")
    return str(name)

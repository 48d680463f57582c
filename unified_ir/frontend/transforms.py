"""`grad`, `value_and_grad` and `vjp` of Python functions, cells and IR functions alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import autodiff
from triplane.unified_ir.autodiff.reverse import linearize
from triplane.unified_ir.frontend.binding import Parameter, current_or_none
from triplane.unified_ir.frontend.memory import collecting
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.run import graph
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import ShapeError, TypeMismatch
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild

Pull = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


@dataclass(frozen=True, slots=True)
class _Linear:
    """A recorded call: its value, the tensors differentiated, and the map of cotangents back."""

    value: Any
    wanted: list[Tensor]
    pull: Pull


def value_and_grad(f: Any, argnums: int | Sequence[int] = 0) -> Any:
    """`f` gives a scalar; the result gives (f(*args), gradient with respect to `argnums`).

    `f`: Python function, cell, or IR function (then see `autodiff.value_and_grad`). The gradient
    has the tree of the argument; with several `argnums` it is a tuple. Keyword arguments are passed
    on and not differentiated.
    """
    if isinstance(f, Function):
        return autodiff.value_and_grad(f)
    name = _name(f)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        linear = _linearized(f, args, kwargs, numbers)
        found = leaves(linear.value)
        if len(found) != 1 or found[0].shape != ():
            raise ShapeError(
                f"a gradient is of a scalar, but {name} gives {[y.type for y in found]}; reduce it"
            )
        one = recorder().admit(np.ones((), found[0].dtype.numpy))
        grads = _fill(args, numbers, linear, linear.pull([one]))
        return linear.value, grads[0] if isinstance(argnums, int) else tuple(grads)

    return graph(both)


def grad(f: Any, argnums: int | Sequence[int] = 0) -> Any:
    """As `value_and_grad`, the gradient alone."""
    if isinstance(f, Function):
        return autodiff.grad(f)
    both = value_and_grad(f, argnums)

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return both(*args, **kwargs)[1]

    return graph(gradient)


def vjp(f: Any) -> Any:
    """`f` with a last argument, the cotangent of its result: gives (f(*args), cotangents)."""
    if isinstance(f, Function):
        return autodiff.vjp(f)

    def pulled(*args: Any, **kwargs: Any) -> Any:
        *inputs, cotangent = args
        numbers = tuple(range(len(inputs)))
        linear = _linearized(f, inputs, kwargs, numbers)
        gs = [as_tensor(g) for g in leaves(cotangent)]
        types = [y.type for y in leaves(linear.value)]
        if [g.type for g in gs] != types:
            raise ShapeError(
                f"the cotangent is shaped like the result of {_name(f)}, {types}; got "
                f"{[g.type for g in gs]}"
            )
        return linear.value, tuple(_fill(inputs, numbers, linear, linear.pull(gs)))

    pulled.__name__ = _name(f)
    pulled.__dict__["reaches"] = f
    return graph(pulled)


def _linearized(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[int]
) -> _Linear:
    """`f` recorded apart, then replayed here with its pullback.

    Tensors among the arguments, and numbers that are differentiated, become parameters; buffers
    that `f` assigns are extra results.
    """
    outer = recorder()
    _check_numbers(f, args, numbers)
    trees = [_with_tensors(a, numbers=i in numbers) for i, a in enumerate(args)]
    flat = [x for a in trees for x in leaves(a) if isinstance(x, Tensor)]
    inner = Build(outer.table, _name(f), run=getattr(outer, "run", None))
    inner.scope = getattr(outer, "scope", "")
    with inner, _kept_apart() as buffers, collecting():
        params = [
            inner.param(f"x{i}", x.type, None if outer.arrays is None else outer.arrays[x.value])
            for i, x in enumerate(flat)
        ]
        value = rewritten(f)(*_replaced(trees, params), **kwargs)
        results = [as_tensor(y) for y in leaves(value)]
    assigned = list(buffers)
    named = {f"y{i}": y for i, y in enumerate([*results, *buffers.values()])}
    function = inner.finish(named)
    at = [i for k in numbers for i in _positions(trees, k)]
    _check_float([flat[i] for i in at], f)
    outputs, pull = linearize(function, [*flat, *inner.captured], at)
    _hand_on(assigned, outputs[len(results) :])

    def of_results(gs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return pull([*gs, *(None for _ in assigned)])

    return _Linear(rebuild(value, outputs[: len(results)]), [flat[i] for i in at], of_results)


class _kept_apart:  # noqa: N801 - reads as the context it is
    """Gives the buffers assigned meanwhile, and takes them out of the binding again."""

    def __enter__(self) -> dict[Parameter, Tensor]:
        self._binding = current_or_none()
        self._before = {} if self._binding is None else dict(self._binding.assigned)
        self._found: dict[Parameter, Tensor] = {}
        return self._found

    def __exit__(self, *_: object) -> None:
        if self._binding is None:
            return
        for parameter, tensor in self._binding.assigned.items():
            if self._before.get(parameter) is not tensor:
                self._found[parameter] = tensor
        self._binding.assigned = self._before


def _hand_on(assigned: Sequence[Parameter], tensors: Sequence[Tensor]) -> None:
    binding = current_or_none()
    if binding is not None:
        binding.assigned.update(zip(assigned, tensors, strict=True))


def _with_tensors(tree: Any, *, numbers: bool) -> Any:
    """The argument with arrays, and numbers if asked, as tensors of the graph being recorded."""
    made = []
    for x in leaves(tree):
        is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
        is_tensor = isinstance(x, (Tensor, np.ndarray, np.generic)) or hasattr(x, "__tensor__")
        made.append(as_tensor(x) if is_tensor or (numbers and is_number) else x)
    return rebuild(tree, made)


def _replaced(trees: Sequence[Any], params: Sequence[Tensor]) -> list[Any]:
    rest = iter(params)
    return [
        rebuild(t, [next(rest) if isinstance(x, Tensor) else x for x in leaves(t)]) for t in trees
    ]


def _positions(trees: Sequence[Any], k: int) -> range:
    """Where the tensors of argument `k` stand among all tensors."""
    counts = [sum(isinstance(x, Tensor) for x in leaves(t)) for t in trees]
    return range(sum(counts[:k]), sum(counts[: k + 1]))


def _check_numbers(f: Any, args: Sequence[Any], numbers: Sequence[int]) -> None:
    for k in numbers:
        if not 0 <= k < len(args):
            raise InvalidInput(
                f"{_name(f)} was called with {len(args)} positional arguments, so there is no "
                f"argument {k} to differentiate"
            )


def _check_float(tensors: Sequence[Tensor], f: Any) -> None:
    for t in tensors:
        if not t.dtype.is_float:
            raise TypeMismatch(
                f"gradients are with respect to floating-point tensors, but an argument of "
                f"{_name(f)} is {t.type}; cast it or choose other argnums"
            )


def _fill(
    args: Sequence[Any], numbers: Sequence[int], linear: _Linear, found: Sequence[Tensor | None]
) -> list[Any]:
    """Cotangents in the trees of their arguments; zeros where nothing depends on the argument."""
    pairs = zip(linear.wanted, found, strict=True)
    grads = iter([zeros(p.shape, p.dtype) if g is None else g for p, g in pairs])
    return [rebuild(args[k], [next(grads) for _ in leaves(args[k])]) for k in numbers]


def _name(f: Any) -> str:
    if not callable(f):
        raise InvalidInput(f"{f!r} is not callable; give a function or a cell")
    return str(getattr(f, "__name__", type(f).__name__))

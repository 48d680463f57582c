"""`value_and_grad`, `grad`, `vjp` and `jvp` as transforms of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff.forward import pushforward
from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.simplify import cheaper_gradients

GRAD = "grad."
"""Prefix of the name of a gradient result: the gradient for `w` is the result `grad.w`."""

TANGENT = "tangent."
"""Prefix of the names of tangents, both of parameters and of results."""


def value_and_grad(
    function: Function, wrt: Sequence[str] | None = None, *, of: str | None = None
) -> Function:
    """Return a function with the same parameters and results, and one more result per gradient.

    `wrt` names floating-point parameters (all of them by default); the gradient for `w` is the
    result `grad.w`, zero if nothing depends on `w`. `of` names the scalar result to differentiate
    (the first by default).
    """
    target = function.result_names[0] if of is None else of
    if function.result(target).type.shape != ():
        raise ShapeError(
            f"a gradient needs a scalar, but {target!r} is {function.result(target).type}; "
            "reduce it, or use vjp with a cotangent"
        )
    one = np.ones((), function.result(target).type.dtype.numpy)
    return _with_gradients(
        function,
        wrt,
        "grad",
        lambda build, name, _: build.constant(one) if name == target else None,
    )


def grad(
    function: Function, wrt: Sequence[str] | None = None, *, of: str | None = None
) -> Function:
    """Like `value_and_grad`, with the gradients as the only results."""
    both, n = value_and_grad(function, wrt, of=of), len(function.results)
    # Without the other results, forward nodes that only they need are dropped.
    return clean(both.with_(results=both.results[n:], result_names=both.result_names[n:]))


def vjp(function: Function, wrt: Sequence[str] | None = None) -> Function:
    """Add a parameter `cotangent.RESULT` per floating-point result, and all gradients."""

    def cotangent(build: Build, name: str, type_: TensorType) -> Tensor | None:
        return build.param(f"cotangent.{name}", type_) if type_.dtype.is_float else None

    return _with_gradients(function, wrt, "vjp", cotangent)


def jvp(function: Function, wrt: Sequence[str] | None = None) -> Function:
    """Add a parameter `tangent.NAME` per wanted one, and a tangent per floating-point result.

    The tangent of the result `y` is the result `tangent.y`, zero if no wanted parameter reaches it.
    """
    names = _wanted(function, wrt)
    build = Build(TABLE, f"{function.name}.jvp")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        tangents = [build.param(TANGENT + n, function.param(n).type) for n in names]
        results, push = pushforward(function, params, [function.param_index(n) for n in names])
        named = dict(zip(function.result_names, results, strict=True))
        for name, y, t in zip(function.result_names, results, push(tangents), strict=True):
            if y.dtype.is_float:
                named[TANGENT + name] = zeros(y.shape, y.dtype) if t is None else t
    return clean(build.finish(named))


def _wanted(function: Function, wrt: Sequence[str] | None) -> list[str]:
    if wrt is None:
        return [p.name for p in function.params if p.type.dtype.is_float]
    for name in wrt:
        if not function.param(name).type.dtype.is_float:
            raise InvalidInput(
                f"{name!r} is {function.param(name).type}; gradients are for floating-point "
                "parameters"
            )
    return list(wrt)


def _with_gradients(
    function: Function,
    wrt: Sequence[str] | None,
    suffix: str,
    cotangent: Callable[[Build, str, TensorType], Tensor | None],
) -> Function:
    """Add the gradients for `wrt`, pulled back from the cotangent of each named result."""
    function = cheaper_gradients(function)
    names = _wanted(function, wrt)
    build = Build(TABLE, f"{function.name}.{suffix}")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        results, pull = record_vjp(function, params, [function.param_index(n) for n in names])
        named = dict(zip(function.result_names, results, strict=True))
        gs = [cotangent(build, name, y.type) for name, y in named.items()]
        for name, g in zip(names, pull(gs), strict=True):
            if GRAD + name in function.result_names:
                raise InvalidInput(
                    f"{GRAD + name!r} is already a result of {function.name!r}; rename it, so that "
                    "the gradient does not replace it"
                )
            like = params[function.param_index(name)]
            named[GRAD + name] = zeros(like.shape, like.dtype) if g is None else g
    return clean(build.finish(named))

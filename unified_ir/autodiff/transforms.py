"""`value_and_grad`, `grad`, `vjp` and `jvp` as transforms of functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff.forward import pushforward
from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.simplify import cheaper_gradients

GRAD = "grad."
"""Prefix of the name of a gradient result: the gradient for `w` is the result `grad.w`."""

TANGENT = "tangent."
"""Prefix of the names of tangents, of parameters and of results."""


def value_and_grad(
    function: Function, wrt: Sequence[str] | None = None, *, of: str | None = None
) -> Function:
    """A function with the same parameters; results: the original ones, then `grad.NAME` each.

    `wrt` names floating-point parameters (all of them by default); `of` names the scalar result
    to differentiate (the first by default). A parameter the result does not depend on has
    gradient zero.
    """
    function = cheaper_gradients(function)
    names = _wanted(function, wrt)
    target = function.result_names[0] if of is None else of
    if function.result(target).type.shape != ():
        raise ShapeError(
            f"a gradient is of a scalar, but {target!r} is {function.result(target).type}; "
            "reduce it, or use vjp with a cotangent"
        )
    build = Build(TABLE, f"{function.name}.grad")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        results, pull = record_vjp(function, params, [function.param_index(n) for n in names])
        index = function.result_names.index(target)
        one = build.constant(np.ones((), results[index].dtype.numpy))
        gradients = pull([one if i == index else None for i in range(len(results))])
        named = dict(zip(function.result_names, results, strict=True))
        named |= _named_grads(names, gradients, params, function)
    return clean(build.finish(named))


def grad(
    function: Function, wrt: Sequence[str] | None = None, *, of: str | None = None
) -> Function:
    """As `value_and_grad`, with the gradients as the only results."""
    both = value_and_grad(function, wrt, of=of)
    keep = [i for i, n in enumerate(both.result_names) if i >= len(function.results)]
    return clean(
        both.with_(
            results=(both.results[i] for i in keep),
            result_names=(both.result_names[i] for i in keep),
        )
    )


def vjp(function: Function, wrt: Sequence[str] | None = None) -> Function:
    """Adds a parameter `cotangent.RESULT` per floating-point result; gives results and grads."""
    function = cheaper_gradients(function)
    names = _wanted(function, wrt)
    build = Build(TABLE, f"{function.name}.vjp")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        gs: list[Tensor | None] = [
            build.param(f"cotangent.{n}", r.type) if r.type.dtype.is_float else None
            for n, r in zip(function.result_names, function.results, strict=True)
        ]
        results, pull = record_vjp(function, params, [function.param_index(n) for n in names])
        named = dict(zip(function.result_names, results, strict=True))
        named |= _named_grads(names, pull(gs), params, function)
    return clean(build.finish(named))


def jvp(function: Function, wrt: Sequence[str] | None = None) -> Function:
    """Adds a parameter `tangent.NAME` per wanted one; each floating-point result gets a tangent.

    The tangent of the result `y` is the result `tangent.y`, zeros where nothing wanted reaches it.
    """
    names = _wanted(function, wrt)
    build = Build(TABLE, f"{function.name}.jvp")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        tangents = [build.param(TANGENT + n, function.param(n).type) for n in names]
        wanted = [function.param_names.index(n) for n in names]
        results, push = pushforward(function, params, wanted)
        named = dict(zip(function.result_names, results, strict=True))
        moved = zip(function.result_names, results, push(tangents), strict=True)
        for name, y, t in moved:
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


def _named_grads(
    names: Sequence[str],
    gradients: Sequence[Tensor | None],
    params: Sequence[Tensor],
    function: Function,
) -> dict[str, Tensor]:
    grads = {}
    taken = frozenset(function.result_names)
    for name, g in zip(names, gradients, strict=True):
        if GRAD + name in taken:
            raise InvalidInput(
                f"{GRAD + name!r} is a result of {function.name!r} already; rename it, so that the "
                "gradient does not replace it"
            )
        like = params[function.param_index(name)]
        grads[GRAD + name] = zeros(like.shape, like.dtype) if g is None else g
    return grads

"""The graphs that devices run, derived from a module's loss.

With state w, loss L, rate a (`hyper.lr`), and D the gradient with respect to w:

    inner step       w' = w - a D L(support, w)
    batch gradient   g = D L(batch, w)
    FedProx          g = D L(batch, w) + mu (w - anchor)
    meta-gradient    g = D L(query, w_K(w)),  w_K after K inner steps, through all of them
    first order      g = D L(query, v) at v = w_K
    Meta-SGD         the meta-gradient with one rate per weight, also with respect to the rates

Every gradient function takes the state and the batch that it reads. It returns the loss, its
metrics, newly assigned state, and `grad.PATH` of each trained parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import GRAD, value_and_grad
from triplane.unified_ir.federated.algorithms.hyper import ANCHOR, LR, PROXIMAL, RATE
from triplane.unified_ir.federated.algorithms.objective import LOSS, Objective, renamed
from triplane.unified_ir.ir import Function, Role, TensorType, Value
from triplane.unified_ir.ops import stop_gradient
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes import clean

SUPPORT: Final = "support"
QUERY: Final = "query"
SHOWN: Final = 3
"""Number of tensors that a message names."""

Rates = Callable[[str], Tensor]
"""The rate of an inner step by the path of a parameter."""


def batch_gradient(of: Objective, _: int) -> Function:
    """Return D L(batch, w)."""
    return of.gradient


def proximal_gradient(of: Objective, _: int) -> Function:
    """Return D L(batch, w) + mu (w - anchor), without the second term where w is personal.

    Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2.
    """
    with Build(TABLE, "proximal_gradient") as build:
        state, batch = _params(build, of.reads), _params(build, of.batch)
        results, grads = of.differentiate(batch, state)
        weight = build.param(PROXIMAL, scalar_of(of))
        # A personal tensor has no shared starting point from which it could be kept close.
        for path in shared_trained(of):
            anchor = build.param(ANCHOR + path, state[path].type)
            grads[path] += (state[path] - anchor) * weight.cast(anchor.dtype)
    return clean(build.finish({**results, **{GRAD + path: g for path, g in grads.items()}}))


def meta_gradient(of: Objective, steps: int) -> Function:
    """Return D L(query, w_K(w)), exact through all inner steps: Finn et al. 2017, algorithm 1."""
    return value_and_grad(_episode(of, steps, "meta_gradient"), of.trained, of=LOSS)


def first_order_gradient(of: Objective, steps: int) -> Function:
    """Return the meta-gradient with inner gradients as constants: Finn et al. 2017, section 5.2."""
    episode = _episode(of, steps, "first_order_gradient", exact=False)
    return value_and_grad(episode, of.trained, of=LOSS)


def learned_rate_gradient(of: Objective, steps: int) -> Function:
    """Return the meta-gradient, of the rates `rate.PATH` too: Li et al. 2017 (Meta-SGD), eq. 3."""
    episode = _episode(of, steps, "learned_rate_gradient", own_rates=True)
    wanted = [*of.trained, *(RATE + path for path in of.trained)]
    return value_and_grad(episode, wanted, of=LOSS)


def descent(gradient: Function, rate: str, name: str) -> Function:
    """Return one step against `gradient` at the rate that is the state `rate`."""
    with Build(TABLE, name) as build:
        params = _params(build, gradient.params)
        results = inline(gradient, list(params.values()))
        by_name = dict(zip(gradient.result_names, results, strict=True))
        moving = [path for path in params if GRAD + path in by_name]
        lr = build.param(rate, TensorType(by_name[LOSS].dtype, ()))
        grads = {path: by_name.pop(GRAD + path) for path in moving}
        moved = {path: params[path] - g * lr.cast(g.dtype) for path, g in grads.items()}
    return clean(build.finish({**by_name, **moved}))


def plain_adapt(of: Objective) -> Function:
    """Return one inner step on a batch, at the rate `hyper.lr`."""
    return descent(of.gradient, LR, "adapt")


def learned_rate_adapt(of: Objective) -> Function:
    """Return one inner step on a batch, at the rates `rate.PATH`."""
    with Build(TABLE, "adapt") as build:
        state, batch = _params(build, of.reads), _params(build, of.batch)
        rates = _own_rates(build, of)
        results, grads = of.differentiate(batch, state)
        moved = {path: state[path] - grads[path] * rates(path) for path in of.trained}
    return clean(build.finish({**results, **moved}))


def shared_trained(of: Objective) -> tuple[str, ...]:
    """Return the trained parameters that leave the device."""
    return tuple(p for p in of.trained if of.state[p].role is Role.PARAMETER)


def scalar_of(of: Objective) -> TensorType:
    """Return the type of a rate."""
    return TensorType(of.loss.results[0].type.dtype, ())


def _episode(
    of: Objective, steps: int, name: str, *, exact: bool = True, own_rates: bool = False
) -> Function:
    """Return the loss and metrics on a query after inner steps on a support set.

    The function takes the query, the support set and the state.
    """
    _refuse_statistics(of)
    with Build(TABLE, name) as build:
        state = _params(build, of.reads)
        support = _part(build, of, SUPPORT)
        query = _part(build, of, QUERY)
        rates = _own_rates(build, of) if own_rates else _one_rate(build, of)
        for _ in range(steps):
            results, grads = of.differentiate(support, state)
            if not exact:
                # w_K = w - a sum_k g_k with constant g_k, so dw_K / dw is the identity and no
                # second derivative is computed.
                grads = {path: stop_gradient(g) for path, g in grads.items()}
            # Random keys advance, so each inner step draws another dropout mask.
            keys = {name: results[name] for name in of.assigned}
            moved = {path: state[path] - grads[path] * rates(path) for path in of.trained}
            state = {**state, **keys, **moved}
        measures = of.measure(query, state)
    return clean(build.finish(measures))


def _refuse_statistics(of: Objective) -> None:
    if odd := [name for name in of.assigned if of.state[name].role is not Role.KEY]:
        more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        raise InvalidInput(
            f"the loss assigns {len(odd)} tensor{'s' if len(odd) > 1 else ''} "
            f"({', '.join(map(repr, odd[:SHOWN]))}{more}), such as statistics of a batch, but a "
            "meta-step has no single batch to which they could belong; create batch normalization "
            "with track_running_stats=False, use another normalization such as GroupNorm, or an "
            "algorithm that learns from batches"
        )


def _params(build: Build, values: Iterable[Value]) -> dict[str, Tensor]:
    return {v.name: build.param(v.name, v.type) for v in values}


def _part(build: Build, of: Objective, part: str) -> dict[str, Tensor]:
    return {name: build.param(v.name, v.type) for name, v in renamed(of.batch, part).items()}


def _one_rate(build: Build, of: Objective) -> Rates:
    lr = build.param(LR, scalar_of(of))
    return lambda path: lr.cast(of.loss.param(path).type.dtype)


def _own_rates(build: Build, of: Objective) -> Rates:
    own = {p: build.param(RATE + p, of.loss.param(p).type) for p in of.trained}
    return own.__getitem__

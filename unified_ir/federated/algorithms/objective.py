"""The objective of all algorithms: a module's `loss` function and the parameters it trains.

`loss` maps a batch and state to the loss (first result), metrics, and the new value of every state
tensor it assigns (running statistics, random keys).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import GRAD, value_and_grad
from triplane.unified_ir.ir import Function, Module, Role, StateTensor, Value, symbol
from triplane.unified_ir.ir.dims import Dim, substitute, symbols
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.tensor import Tensor

LOSS: Final = "loss"
NEEDED: Final = ("loss", "evaluate", "predict")
TRAINED_ROLES: Final = (Role.PARAMETER, Role.PERSONAL)
FROZEN: Final = "frozen"
"""Key of the module's meta with the JSON list of parameters that training does not change."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Objective:
    """A module's loss. trained: paths that it is differentiated by. assigned: state it assigns."""

    module: Module
    loss: Function
    trained: tuple[str, ...]
    assigned: tuple[str, ...]

    @property
    def state(self) -> Mapping[str, StateTensor]:
        """All state of the module."""
        return self.module.state

    @property
    def batch(self) -> tuple[Value, ...]:
        """The inputs of one batch."""
        return tuple(p for p in self.loss.params if p.name not in self.state)

    @property
    def reads(self) -> tuple[Value, ...]:
        """State that the loss reads."""
        return tuple(p for p in self.loss.params if p.name in self.state)

    @property
    def measures(self) -> tuple[str, ...]:
        """Loss first, then metrics and summaries."""
        return tuple(n for n in self.loss.result_names if n not in self.state)

    @cached_property
    def gradient(self) -> Function:
        """The function `loss` with the result `grad.PATH` for each trained parameter."""
        return value_and_grad(self.loss, self.trained, of=LOSS)

    def measure(self, batch: Tensors, state: Tensors) -> dict[str, Tensor]:
        """Record a call of `loss` and return its results."""
        return _call(self.loss, {**state, **batch})

    def differentiate(
        self, batch: Tensors, state: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Record a call of `gradient`; return (results, gradients by path)."""
        results = _call(self.gradient, {**state, **batch})
        return results, {path: results.pop(GRAD + path) for path in self.trained}


def objective_of(module: Module) -> Objective:
    """Return a module's objective; InvalidInput if an entry or trained parameter is missing."""
    if missing := [name for name in NEEDED if name not in module.entries]:
        raise InvalidInput(
            f"devices need the entries {', '.join(NEEDED)}, but the module has "
            f"{', '.join(module.entries)}; export it with {', '.join(missing)}"
        )
    loss = module.entry(LOSS)
    if loss.result_names[:1] != (LOSS,) or loss.results[0].type.shape != ():
        raise InvalidInput(f"the first result of entry 'loss' must be a scalar 'loss', got {loss}")
    frozen = _frozen(module)
    trained = tuple(
        p.name
        for p in loss.params
        if p.name in module.state
        and module.state[p.name].role in TRAINED_ROLES
        and p.name not in frozen
        and p.type.dtype.is_float
    )
    if not trained:
        raise InvalidInput("the module's loss depends on no parameter that may be trained")
    return Objective(module, loss, trained, module.assigned(LOSS))


def renamed(values: Sequence[Value], part: str) -> dict[str, Value]:
    """Return the batch inputs of one part of an episode, for example `support.x`.

    They have symbolic sizes of their own, since support and query differ in their number of rows.
    """

    def own(dim: Dim) -> Dim:
        return substitute(dim, {s: symbol(f"{part}_{s}") for s in symbols(dim)})

    types = {v.name: v.type.with_shape(map(own, v.type.shape)) for v in values}
    return {name: Value(type_, f"{part}.{name}") for name, type_ in types.items()}


def _call(function: Function, inputs: Tensors) -> dict[str, Tensor]:
    results = inline(function, [inputs[n] for n in function.param_names])
    return dict(zip(function.result_names, results, strict=True))


def _frozen(module: Module) -> frozenset[str]:
    try:
        names = json.loads(module.meta.get(FROZEN, "[]"))
    except ValueError as error:
        raise InvalidInput(f"the module's list of frozen parameters is not JSON: {error}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"the frozen parameters must be a list of names, got {names!r:.80}")
    return frozenset(names)

"""What an optimizer is: state to start from, and one update written in operators.

Its state is tensors with names of their own beside the parameters: `optimizer.SLOT.PATH` for each
slot and parameter PATH, and, where updates depend on their number, `optimizer.step`, an int64
scalar that counts them. The description itself holds no arrays: one optimizer trains any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import TensorType, int64, type_of
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.schedules import Constant, Schedule

STEP: Final = "optimizer.step"
"""State: the number of updates done, int64 scalar."""

Rule = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""(parameter, its gradient, its slots) -> the next parameter and slots."""


def slot_name(slot: str, path: str) -> str:
    """The state name of a parameter's slot."""
    return f"optimizer.{slot}.{path}"


@dataclass(frozen=True)
class Optimizer:
    """A rule that moves each parameter by its gradient and its slots.

    lr: a number, or a schedule of the number of updates done before this one.
    """

    lr: float | Schedule

    slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        lr: Any = self.lr
        is_number = isinstance(lr, Real) and not isinstance(lr, bool)
        if not isinstance(lr, Schedule) and not (is_number and 0 <= lr < math.inf):
            raise InvalidInput(f"a learning rate is a schedule or finite and >= 0, got {lr!r}")

    def used_slots(self) -> tuple[str, ...]:
        """Slots this optimizer keeps; each is shaped like its parameter and starts at 0."""
        return self.slots

    def counts(self) -> bool:
        """Whether an update depends on how many came before, so that `optimizer.step` is kept."""
        return isinstance(self.lr, Schedule) and not isinstance(self.lr, Constant)

    def state_types(self, params: Mapping[str, TensorType]) -> dict[str, TensorType]:
        """Types of the state kept for parameters by path."""
        types = {STEP: TensorType(int64, ())} if self.counts() else {}
        for slot in self.used_slots():
            types |= {slot_name(slot, path): type_ for path, type_ in params.items()}
        return types

    def init(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """Starting state for parameters by path: zeros."""
        types = self.state_types({path: type_of(p) for path, p in params.items()})
        return {name: np.zeros(t.concrete({}), t.dtype.numpy) for name, t in types.items()}

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Next parameters and next state, recorded in the graph under construction."""
        step = state.get(STEP)
        rule = self.rule(step)
        moved: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {} if step is None else {STEP: step + 1}
        for path, param in params.items():
            slots = {s: state[slot_name(s, path)] for s in self.used_slots()}
            moved[path], after = rule(param, grads[path], slots)
            kept |= {slot_name(s, path): x for s, x in after.items()}
        return moved, kept

    def rule(self, step: Tensor | None) -> Rule:
        """The update of one parameter; scalars that depend on `step` are computed here, once."""
        raise NotImplementedError

    def rate(self, step: Tensor | None) -> Tensor | float:
        """The learning rate of this update; a plain number where it never changes."""
        if isinstance(self.lr, Constant):
            return float(self.lr.value)
        if isinstance(self.lr, Schedule):
            assert step is not None
            return self.lr(step)
        return float(self.lr)


def check_range(owner: str, name: str, value: float, low: float, high: float) -> None:
    """low <= value < high, with the names in the error."""
    if not low <= value < high:
        raise InvalidInput(f"{owner} needs {name} in [{low:g}, {high:g}), got {value}")

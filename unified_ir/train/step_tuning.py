"""Tuning a training step to this machine: the fastest operator forms, a memory budget.

Neither changes the mathematics, but both change rounding: leave them off where a run must repeat
bit for bit on another machine or with another batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import Engine
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.passes.recompute import RecomputationPlan

if TYPE_CHECKING:
    from triplane.unified_ir.engines.tuning import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTuning:
    """How a training step is tuned.

    tune: measure the forms of operators that have several, and use the fastest.
    memory_budget_bytes: limit for tensors alive at once, for the first batch of the training; state
    and the batch itself are not counted.
    """

    tune: bool = False
    memory_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tune, bool):
            raise InvalidInput(f"tune must be True or False, got {self.tune!r}")
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 1:
            raise InvalidInput(f"memory_budget_bytes must be >= 1, got {self.memory_budget_bytes}")

    def tuned_step(
        self, function: Function, sizes: Mapping[str, int], engine: Engine
    ) -> tuple[Function, Tuning | None, RecomputationPlan | None]:
        """Return the function tuned for these sizes of its symbols, and what tuning did."""
        if not self.tune and self.memory_budget_bytes is None:
            return function, None, None
        from triplane.unified_ir.engines.footprint import within
        from triplane.unified_ir.engines.onnx import OnnxEngine
        from triplane.unified_ir.engines.tuning import tuned

        if not isinstance(engine, OnnxEngine):
            raise InvalidInput(
                f"tune and memory_budget_bytes need onnxruntime; the engine is {engine.name!r}"
            )
        if engine.devices is not None:
            raise InvalidInput(
                f"tune and memory_budget_bytes measure a CPU; the device is {engine.devices!r}"
            )
        if not sizes:
            raise InvalidInput(
                "tune and memory_budget_bytes need a batch to measure with; call fit, or prepare "
                "with arrays in place of TensorSpecs"
            )
        tuning, plan = None, None
        if self.tune:
            function, tuning = tuned(function, sizes, options=engine.options)
        if self.memory_budget_bytes is not None:
            budget = self.memory_budget_bytes
            function, plan = within(function, budget, sizes, options=engine.options)
        return function, tuning, plan


def sizes_of(types: Sequence[TensorType], batch: Sequence[Array]) -> dict[str, int]:
    """Return the size that each symbol of these types has in a batch."""
    return {
        str(dim): size
        for t, array in zip(types, batch, strict=True)
        for dim, size in zip(t.shape, array.shape, strict=True)
        if is_symbol(dim)
    }

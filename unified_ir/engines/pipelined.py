"""A training step in the parts that a pipeline needs, and the engines that run it as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from triplane.unified_ir.engines.protocol import Program
from triplane.unified_ir.ir.graph import Function

GRADIENT_NORM: Final = "optimizer.gradient_norm"
"""Parameter of an update: the norm of all gradients together, float32 scalar."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineStep:
    """A training step, whole and in two halves.

    function: the whole step, which says what the pipeline must compute. forward: a batch and
    parameters -> `loss` and other measures. update: state, `grad.PATH` of each of the `trained`,
    and GRADIENT_NORM if it needs that -> new state. counts: measures that are added over
    microbatches; others are means. divisors: for a mean that is not over samples, the name of the
    count that it is over. sizes: of the first batch, by symbol.
    """

    function: Function
    forward: Function
    update: Function
    loss: str
    trained: tuple[str, ...]
    counts: frozenset[str]
    divisors: Mapping[str, str]
    sizes: Mapping[str, int]


@runtime_checkable
class PipelineEngine(Protocol):
    """An engine that can run a training step as a pipeline; it does if `stages` is a number."""

    stages: int | None

    def compile_pipeline(self, step: PipelineStep, *, donate: Collection[str]) -> Program:
        """Compile a training step as a pipeline; see `Engine.compile`."""
        ...

"""A pipeline as a record for programs, and as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from triplane.unified_ir.files.text_table import aligned
from triplane.unified_ir.passes.sharding.planner import MARGIN
from triplane.unified_ir.passes.sharding.report import bytes_text, time_text
from triplane.unified_ir.passes.sharding.stages import BACKWARD, Stage, StagePlan

WIDTH: Final = 80
LAYERS: Final = 30
"""Columns for the layers of a stage."""


def stage_record(plan: StagePlan) -> dict[str, Any]:
    """Return the plan as a record ready for JSON."""
    return {
        "function": plan.function.name,
        "microbatches": plan.microbatches,
        "sizes": dict(plan.sizes),
        "topology": {"source": plan.topology.source, **plan.topology.json()},
        "seconds": plan.seconds,
        "bubble": plan.bubble,
        "shared_parameters": list(plan.shared),
        "margin": MARGIN,
        "stages": [
            {
                "nodes": [stage.first, stage.end],
                "layers": list(stage.layers),
                "forward_seconds": stage.forward_s,
                "seconds": stage.seconds,
                "parameter_bytes": stage.parameter_bytes,
                "memory_bytes": stage.memory_bytes,
                "sent_bytes": stage.sent_bytes,
            }
            for stage in plan.stages
        ],
        "schedule": plan.schedule(),
    }


def stage_table(plan: StagePlan) -> Iterator[str]:
    """Yield the lines of the stages and of the schedule, at most 80 columns wide."""
    sizes = ", ".join(f"{k}={n}" for k, n in plan.sizes.items())
    yield (
        f"{plan.function.name} in {len(plan.stages)} stages, {plan.microbatches} microbatches "
        f"({sizes or 'fixed sizes'} in each)"
    )
    yield plan.topology.source
    yield ""
    head = ("stage", "layers", "parameters", "memory", "forward", "sends")
    yield from aligned([head, *(_row(i, stage) for i, stage in enumerate(plan.stages, 1))], texts=2)
    yield ""
    yield from _schedule(plan)
    yield ""
    yield from _totals(plan)


def _row(number: int, stage: Stage) -> tuple[str, ...]:
    return (
        str(number),
        layers_text(stage.layers),
        bytes_text(stage.parameter_bytes),
        bytes_text(stage.memory_bytes),
        time_text(stage.forward_s),
        bytes_text(stage.sent_bytes),
    )


def layers_text(layers: tuple[str, ...]) -> str:
    """Return the first and the last layer of a stage, of long names their last parts."""
    ends = dict.fromkeys((layers[0], layers[-1]))
    most = LAYERS if len(ends) == 1 else (LAYERS - 4) // 2
    return " .. ".join(_last_parts(name, most) for name in ends)


def _last_parts(name: str, most: int) -> str:
    while len(name) > most and "." in name:
        name = name.partition(".")[2]
    return name[-most:]


def _schedule(plan: StagePlan) -> Iterator[str]:
    rows = plan.schedule()
    cell = max(len(c) for row in rows for c in row) + 1
    head = f"stage {len(rows)} "
    shown = (WIDTH - len(head) - 3) // cell
    for s, row in enumerate(rows, 1):
        cells = "".join((c or ".").ljust(cell) for c in row[:shown])
        more = "..." if len(row) > shown else ""
        yield f"{f'stage {s}':{len(head)}}{cells}{more}".rstrip()


def _totals(plan: StagePlan) -> Iterator[str]:
    stages, count = len(plan.stages), plan.microbatches
    backward = f", a backward pass (B) as {BACKWARD} forward passes" if plan.trains else ""
    yield f"predicted time   {time_text(plan.seconds)} for a batch{backward}"
    yield (
        f"bubble           {plan.bubble:.1%} of the time a device waits: (S-1)/(M+S-1) = "
        f"{stages - 1}/{count + stages - 1}"
    )
    most = max(stage.memory_bytes for stage in plan.stages)
    yield f"memory           {bytes_text(most)} on each device, that of the largest stage"
    if plan.shared:
        names = ", ".join(plan.shared[:4]) + (", ..." if len(plan.shared) > 4 else "")
        yield f"read by several  {names}: a copy in each stage"

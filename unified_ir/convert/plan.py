"""From a module to a plan: each entry as a graph whose weights stay inputs, so that it can learn.

A plan has the name, type and role of personal state, never its trained values. A device starts it
at the value `start.NAME` of the model file, or at zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert.checks import check_runnable
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.meta import labels_of
from triplane.unified_ir.ir.module import with_assigned_state
from triplane.unified_ir.onnx import OnnxTarget, emit, serialize
from triplane.unified_ir.runtime import Limits, PlanSpec, write_plan

PLAN_ENTRIES: Final = ("local_update", "evaluate", "predict", "adapt")
"""Entries that a device may run."""
LEARNING: Final = ("local_update", "adapt")


def export_plan(
    module: Module,
    path: str | Path,
    *,
    limits: Limits | None = None,
    entries: Sequence[str] | None = None,
    steps: Mapping[str, int] | None = None,
    opset: int = 21,
    model_digest: str = "",
) -> str:
    """Write a plan whole or not at all and return its root digest.

    entries: by default those of `PLAN_ENTRIES` that the module has, one of which must learn.
    steps: default number of steps by entry.
    """
    chosen = plan_entries(module, entries)
    functions = {name: with_assigned_state(module.entry(name), module.state) for name in chosen}
    used = {p.name for f in functions.values() for p in f.params} & module.state.keys()
    target = OnnxTarget(opset)
    spec = PlanSpec(
        entries={name: serialize(emit(f, target=target)) for name, f in functions.items()},
        # `initial`, not the current array: personal state that was trained must not leave the
        # device.
        state={name: module.initial(name) for name in sorted(used)},
        roles={name: str(module.state[name].role) for name in sorted(used)},
        steps=steps or {},
        limits=limits or Limits(),
        labels=labels_of(module.meta),
        parent=model_digest,
    )
    return write_plan(Path(path), spec, check=check_runnable)


def plan_entries(module: Module, entries: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the entries that a plan would have; InvalidInput if none of them learns."""
    if entries is not None:
        unknown = [name for name in entries if name not in PLAN_ENTRIES]
        if unknown or not entries:
            raise InvalidInput(f"a plan has some of {', '.join(PLAN_ENTRIES)}, got {list(entries)}")
        return tuple(entries)
    present = tuple(name for name in PLAN_ENTRIES if name in module.entries)
    if not set(present) & set(LEARNING):
        raise InvalidInput(
            f"a device learns with one of {', '.join(LEARNING)}, but the module has "
            f"{', '.join(module.entries)}; export it with one of them"
        )
    return present

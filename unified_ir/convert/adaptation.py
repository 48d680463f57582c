"""The graph with which a node adapts a start point: `adapt.onnx` of a bundle.

A module that was trained to be adapted has an entry `adapt`, and `meta["adapt_steps"]` says how
often a node runs it. The served graph then keeps its weights under the names of the state, not
folded and in float32, because the steps change them. All other state of the entry, such as learned
rates, becomes constant.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import Module
from triplane.unified_ir.onnx import OnnxTarget, emit, serialize
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.runtime.description import MAX_ADAPT_STEPS

ADAPT: Final = "adapt"
STEPS_KEY: Final = "adapt_steps"
LOSS: Final = "loss"


def adapt_steps(module: Module) -> int:
    """Return the number of steps of adaptation; 0 if the module is served as it is."""
    text = module.meta.get(STEPS_KEY, "0")
    if not text.isdecimal() or len(text) > 9 or int(text) > MAX_ADAPT_STEPS:
        raise InvalidInput(
            f"{STEPS_KEY!r} must be 0 to {MAX_ADAPT_STEPS}, at most 9 digits, got {text[:40]!r}"
        )
    steps = int(text)
    if steps and ADAPT not in module.entries:
        raise InvalidInput(f"the module asks for {steps} steps of adaptation but has no {ADAPT!r}")
    return steps


def adapt_graph(module: Module, weights: Collection[str], target: OnnxTarget) -> bytes:
    """Return the ONNX of one step: from weights and a batch to `loss` and `NAME:next` of weights.

    weights: names of the served graph's weights. InvalidInput: the step changes none of them,
    or changes other state, which a bundle cannot keep.
    """
    function = module.entry(ADAPT)
    changed = [name for name in module.assigned(ADAPT) if name in weights]
    lost = sorted(set(module.assigned(ADAPT)) - set(changed))
    if not changed or lost:
        raise InvalidInput(
            f"entry {ADAPT!r} changes {', '.join(lost) or 'nothing'}, which the served graph does "
            "not use; a bundle keeps weights and no other state"
        )
    with Build(TABLE, ADAPT) as build:
        params = [
            build.constant(module.state[p.name].array)
            if p.name in module.state and p.name not in weights
            else build.param(p.name, p.type)
            for p in function.params
        ]
        results = dict(zip(function.result_names, inline(function, params), strict=True))
    kept = {name: tensor for name, tensor in results.items() if name in {*changed, LOSS}}
    return serialize(emit(clean(build.finish(kept)), target=target))

"""Comparisons of a converted graph with the original, and checks of the files written from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.convert.report import Accuracy
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.quantize import Frozen, Samples, batches
from triplane.unified_ir.runtime import Bundle, Plan, Session

MAX_ERROR: Final = 1e-3
"""Largest difference between onnxruntime and the reference, relative to the largest output."""


def first(frozen: Frozen, samples: Samples, count: int) -> dict[str, Array]:
    """Return the first `count` samples, or one static batch."""
    sizes = (p.type.shape[0] for p in frozen.inputs)
    # A graph with a fixed batch size takes exactly that many.
    count = next((d for d in sizes if isinstance(d, int)), count)
    return {name: x[:count] for name, x in samples.items()}


def check_against_reference(module: Module, entry: str, session: Session, samples: Samples) -> None:
    """Compare the float graph on onnxruntime with the module, interpreted node by node.

    InvalidInput: the module's results on these samples are not finite. Conflict: the two differ,
    which is a fault of the conversion.
    """
    function = module.entry(entry)
    arrays = {**{name: t.array for name, t in module.state.items()}, **samples}
    args = [arrays[p.name] for p in function.params]
    expected = dict(zip(function.result_names, run_function(TABLE, function, args), strict=True))
    for name, y in session.run(samples).items():
        check_finite({name: expected[name]})
        _compare(name, y, expected[name])


def check_finite(results: Mapping[str, Array]) -> None:
    """Raise InvalidInput if a result holds NaN or infinity."""
    for name, y in results.items():
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise InvalidInput(
                f"result {name!r} is not finite on the first samples; look at the model or the "
                "samples before converting"
            )


def _compare(name: str, y: Array, expected: Array) -> None:
    if y.shape != expected.shape or y.dtype != expected.dtype:
        raise Conflict(
            f"result {name!r} is {y.dtype}{y.shape} after conversion and "
            f"{expected.dtype}{expected.shape} before; please report this"
        )
    if not y.size:
        return
    error = np.abs(y.astype(np.float64) - expected).max()
    # Relative to the largest output: small ones are often differences of large numbers, whose
    # rounding error they inherit.
    scale = max(1.0, float(np.abs(expected.astype(np.float64)).max()))
    if error > MAX_ERROR * scale:
        raise Conflict(
            f"result {name!r} differs by {error:.3g} from the reference on the first samples, "
            f"allowed {MAX_ERROR * scale:.3g}; please report this"
        )


def measure_accuracy(
    frozen: Frozen, before: Session, after: Session, samples: Samples, y: Array
) -> Accuracy:
    """Compare two sessions on labelled samples, batch by batch.

    The first result must be (N, classes) floating point, y within 0..classes-1.
    """
    name, type_ = frozen.function.result_names[0], frozen.function.results[0].type
    classes = type_.shape[-1] if type_.rank == 2 else None
    if not isinstance(classes, int) or not type_.dtype.is_float:
        raise InvalidInput(f"accuracy needs a result (N, classes) of scores, {name!r} is {type_}")
    if y.min() < 0 or y.max() >= classes:
        raise InvalidInput(
            f"{name!r} scores classes 0..{classes - 1}, but labels are {y.min()}..{y.max()}"
        )
    old, new = (
        np.concatenate([s.run(b, (name,))[name].argmax(-1) for b in batches(frozen, samples)])
        for s in (before, after)
    )
    return Accuracy(
        samples=len(y),
        before=float((old == y).mean()),
        after=float((new == y).mean()),
        agreement=float((old == new).mean()),
    )


def check_served(path: Path) -> None:
    """Read a bundle as a node does: every byte, the graph in a session, the golden outputs."""
    Bundle.load(path).check_goldens()


def check_runnable(path: Path) -> None:
    """Read a plan as a device does: every byte, and each entry in a session."""
    plan = Plan.load(path)
    for entry in plan.entries:
        plan.signature(entry)

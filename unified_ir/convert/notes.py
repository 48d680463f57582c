"""Notes of the report: sentences about what a conversion did and did not do.

A note informs and never decides. A note that cannot be computed becomes a sentence that says so,
and the conversion continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from triplane.unified_ir.convert.residency import PRODUCTS, product_nodes
from triplane.unified_ir.convert.targets import Target, instruction_note
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ops.build import all_contents, expansion
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.quantize import Frozen, Range, Scheme

_logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Converted:
    """The conversion that the notes are about.

    scheme: that of int8, None in float32. ranges: those of the int8 tensors. operators: the
    operators of the int8 graph that ai.onnx does not define.
    """

    module: Module
    entry: str
    target: Target
    frozen: Frozen
    scheme: Scheme | None
    ranges: Sequence[Range] = ()
    operators: Sequence[str] = ()


Note = Callable[[Converted], Iterable[str]]


def notes(converted: Converted) -> tuple[str, ...]:
    """Return the notes of a conversion, in order."""
    texts: list[str] = []
    for note in (*(INT8 if converted.scheme is not None else ()), forgotten_state):
        what = f"the note on {note.__name__.replace('_', ' ')}"
        computed, failed = attempt(what, partial(list[str], note(converted)))
        texts += computed or failed
    return tuple(texts)


def attempt(what: str, compute: Callable[[], T]) -> tuple[T | None, list[str]]:
    """Return what `compute` returns, or None with a note that says why it is missing."""
    try:
        return compute(), []
    # Broad on purpose: a report informs, and no fault in it may stop a conversion that succeeded.
    except Exception as error:
        _logger.exception("part of a report failed", extra={"part": what})
        return None, [f"{what} could not be computed: {type(error).__name__}: {error}"]


def scheme_of_int8(converted: Converted) -> Iterator[str]:
    """Integer types, and this machine's instructions for them."""
    row, about = converted.scheme, instruction_note(converted.target)
    assert row is not None
    yield f"scheme {row.name}: {row.weight_bits}-bit weights, one scale per channel; {about}"


def products_in_regions(converted: Converted) -> Iterator[str]:
    """Products inside loops and branches, which no pass reaches."""
    function = converted.frozen.function
    everywhere = sum(node.op.name in PRODUCTS for node in function.walk())
    count = everywhere - len(product_nodes(function))
    if count:
        yield f"{count} products inside loops or branches stay in float"


def products_in_operators(converted: Converted) -> Iterator[str]:
    """Operators that run as a whole, such as GRU, and contain products."""
    function = converted.frozen.function
    contents = all_contents(TABLE, function)
    names = set()
    for node in function.nodes:
        if node.regions or node.op.name in PRODUCTS:
            continue
        body = expansion(TABLE, node, contents)
        if body is not None and any(n.op.name in PRODUCTS for n in body.walk()):
            names.add(node.op.name)
    if names:
        yield f"products inside {', '.join(sorted(names))} stay in float"


def operators_of_the_runtime(converted: Converted) -> Iterator[str]:
    """Operators that ONNX does not define, and their effect on calls of several rows."""
    if converted.operators:
        yield (
            f"the graph uses {', '.join(converted.operators)}, which the runtime of "
            f"{converted.target.name} has in addition to ai.onnx; it rounds all rows of a call by "
            "one range, so rows influence each other's rounding and a server does not merge calls"
        )


def samples_left_out(converted: Converted) -> Iterator[str]:
    """Samples that are too wide, and are left out of the ranges of tensors."""
    wide = [range_ for range_ in converted.ranges if range_.left_out]
    if wide:
        samples = sorted({i for range_ in wide for i in range_.left_out})
        shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        yield (
            f"calibration samples {shown} (counted from 0) are much wider than the others in "
            f"{len(wide)} of {len(converted.ranges)} tensors, whose ranges leave them out"
        )


def other_machine(converted: Converted) -> Iterator[str]:
    """Measurements that were made on a machine of another kind than the target."""
    if not converted.target.is_here:
        yield "kernels and times above are those of this machine, not of the target"


def forgotten_state(converted: Converted) -> Iterator[str]:
    """State that the entry assigns and a bundle does not keep."""
    entry = converted.entry
    if count := len(converted.module.assigned(entry)):
        yield f"{entry!r} assigns {count} state tensors; a bundle keeps no state, a plan does"


INT8: Final[tuple[Note, ...]] = (
    scheme_of_int8,
    products_in_regions,
    products_in_operators,
    operators_of_the_runtime,
    samples_left_out,
    other_machine,
)
"""Notes of a conversion to int8; `forgotten_state` is in every report."""

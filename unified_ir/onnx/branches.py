"""If, Loop and Scan of ONNX as nodes with closed regions, which capture outer values they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ValueInfoProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.types import OptionalType, TensorType, bool_, int64, is_plain
from triplane.unified_ir.onnx.scope import Scope
from triplane.unified_ir.onnx.structure import Site, Structure
from triplane.unified_ir.ops.arrays import moveaxis
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.row import OPEN, Op
from triplane.unified_ir.ops.rows.control.conditional import cond_node
from triplane.unified_ir.ops.rows.control.looping import LoopCarry, loop_row
from triplane.unified_ir.ops.rows.control.scanning import scan_row
from triplane.unified_ir.ops.rows.data.sequences import element_types, sequence_map_row
from triplane.unified_ir.ops.rows.movement.indexing import arange
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, dims_of, emit

MAX_WIDENINGS: Final = 8
"""How often a loop's body is recorded again because its carry has a wider type."""


def _recorded(
    site: Site, name: str, types: Sequence[TensorType], body: GraphProto, label: str = "body"
) -> tuple[Build, list[Tensor]]:
    """Record an inner graph on parameters of these types; return it unfinished, and its outputs."""
    build = Build(site.build.table, name)
    with build:
        params = [build.param(f"x{i}", t) for i, t in enumerate(types)]
        return build, site.importer.inner(body, params, site.frame, build, label)


def _applied(
    site: Site,
    row: Op,
    operands: Sequence[Tensor | None],
    inner: tuple[Build, Sequence[Tensor]],
    **attrs: Any,
) -> Sequence[Tensor]:
    """Apply a row to a region and its operands, captured values included."""
    build, results = inner
    outputs = len(results) - (row is loop_row)  # whether to go on is no output of a loop
    region = build.finish({f"y{i}": r for i, r in enumerate(results)})
    operands = (*operands, *build.captured)
    return site.build.apply(row, operands, attrs, regions=(region,), outputs=outputs)


def _if(site: Site) -> Sequence[Tensor]:
    """Import an If; if the condition is known, only the branch it selects."""
    predicate = site.present(0)
    branches = [site.graph("then_branch"), site.graph("else_branch")]
    if any(b.input for b in branches):
        raise InvalidInput("its branches take inputs; a branch has none")
    # Exporters write an If on constants around code of another rank, which could not be imported at
    # all.
    known = site.importer.contents.of(predicate)
    if known is not None and known.size == 1 and isinstance(known.flat[0], (bool, np.bool_)):
        chosen = branches[0 if known.flat[0] else 1]
        return site.importer.inner(chosen, [], site.frame, site.build)
    sides = [_recorded(site, n, [], b, n) for n, b in zip(("then", "else"), branches, strict=True)]
    builds, results = [build for build, _ in sides], [outputs for _, outputs in sides]
    if len(results[0]) != len(results[1]):
        raise InvalidInput(f"its branches give {len(results[0])} and {len(results[1])} values")
    for i, pair in enumerate(zip(*results, strict=True)):
        results[0][i], results[1][i] = _of_one_rank(pair, builds)
    return cond_node(_scalar(predicate), [], builds, results)


def _of_one_rank(pair: tuple[Tensor, Tensor], builds: Sequence[Build]) -> list[Tensor]:
    """Return the values of two branches, a single number as a vector if the other one is a vector.

    ONNX lets a value's rank depend on the branch taken; for operators that broadcast it, a single
    number means the same either way.
    """
    single = all(is_plain(x.type) and x.type.size == 1 for x in pair)
    if not single or {pair[0].rank, pair[1].rank} != {0, 1}:
        return list(pair)
    ranked = []
    for x, build in zip(pair, builds, strict=True):
        with build:
            ranked.append(x.reshape(1) if x.rank == 0 else x)
    return ranked


def _scalar(x: Tensor) -> Tensor:
    return x.reshape(()) if x.rank else x


def _check_body(body: GraphProto, inputs: int, carried: int, extra: int) -> None:
    if len(body.input) != inputs or len(body.output) < carried + extra:
        raise InvalidInput(
            f"its body takes {len(body.input)} and returns {len(body.output)} values; "
            f"{inputs} are passed to it and {carried} are carried"
        )


def _loop(site: Site) -> Sequence[Tensor]:
    body = site.graph("body")
    first = site.inputs[0] if site.inputs else None
    trips = None if first is None else _scalar(first)
    trips_operand = site.inputs[1] if len(site.inputs) > 1 else None
    go = as_tensor(np.array(True)) if trips_operand is None else _scalar(trips_operand)
    carry = [site.present(i) for i in range(2, len(site.inputs))]
    n = len(carry)
    _check_body(body, n + 2, n, 1)
    build, results, entry = _trip(site, body, LoopCarry(tuple(x.type for x in carry)))
    attrs: dict[str, Any] = {"num_carry": n, OPEN: entry.free or None}
    if len(results) > n + 1:
        attrs["trips"] = str(site.importer.symbols.fresh(f"trips_{site.node.name}"))
    outputs = _applied(site, loop_row, (trips, go, *carry), (build, results), **attrs)
    return [
        emit("OptionalGetElement", x)
        if isinstance(x.type, OptionalType) and not info.type.HasField("optional_type")
        else x
        for x, info in zip(outputs, body.output[1:], strict=True)
    ]


def _trip(site: Site, body: GraphProto, entry: LoopCarry) -> tuple[Build, list[Tensor], LoopCarry]:
    """Record a loop's body until the types of its carry are those of its results."""
    importer = site.importer
    # Types only widen from one recording to the next; the bound is for a body whose types never
    # settle.
    for _ in range(MAX_WIDENINGS):
        before = importer.weights.scopes
        types = [TensorType(int64, ()), TensorType(bool_, ()), *entry.types]
        build, results = _recorded(site, "loop", types, body)
        with build:
            results[0] = _scalar(results[0])
            kept = [*entry.types, *[None] * (len(results) - len(entry.types) - 1)]
            results[1:] = map(_as_declared, results[1:], body.output[1:], kept)
            results[1 : len(entry.types) + 1] = map(_as_carried, results[1:], entry.types)
        after = [r.type for r in results[1 : len(entry.types) + 1]]
        function = build.finish({f"y{i}": r for i, r in enumerate(results)})
        wider = entry.joined(after, function, lambda: str(importer.symbols.fresh("carried")))
        if wider == entry:
            return build, results, entry
        # Weights that the discarded recording was the first to read would otherwise remain in the
        # state.
        importer.weights.back_to(before)
        entry = wider
    raise InvalidInput(f"its carry changes its type from trip to trip: {list(entry.types)}")


def _as_carried(tensor: Tensor, wanted: TensorType) -> Tensor:
    """Return the value as an optional if the loop began with one."""
    if isinstance(wanted, OptionalType) and not isinstance(tensor.type, OptionalType):
        return emit("Optional", tensor)
    return tensor


def _as_declared(tensor: Tensor, info: ValueInfoProto, param: TensorType | None) -> Tensor:
    """Return a result of a trip, its unknown sizes being those that the body declares.

    For a carried value, only if that was also the size before: a carry may grow.
    """
    declared = info.type.tensor_type.shape.dim
    if not is_plain(tensor.type) or len(declared) != tensor.rank:
        return tensor
    before = tensor.shape if param is None or param.rank != tensor.rank else param.shape
    return assume_shape(
        tensor,
        [
            s.dim_value
            if is_symbol(d) and s.dim_value and (param is None or p == s.dim_value)
            else d
            for d, p, s in zip(tensor.shape, before, declared, strict=True)
        ],
    )


@dataclass(frozen=True, slots=True)
class _Ways:
    """Directions of a scan's inputs and outputs: 0 forward, 1 backward."""

    inputs: Sequence[int]
    outputs: Sequence[int]

    @property
    def reverse(self) -> bool:
        """Whether all of them go backward."""
        return all(self.inputs) and all(self.outputs)


def _scan(site: Site) -> Sequence[Tensor]:
    attrs, body = site.attrs(), site.graph("body")
    m = int(attrs["num_scan_inputs"])
    old = site.frame.opsets[""] < 9
    if old and site.inputs[0] is not None:
        raise InvalidInput("sequence_lens of Scan-8 is not supported; export with opset 9")
    operands = [site.present(i) for i in range(1 if old else 0, len(site.inputs))]
    n = len(operands) - m
    if not 0 < m <= len(operands):
        raise InvalidInput(f"num_scan_inputs is {m}, there are {len(operands)} operands")
    _check_body(body, n + m, n, 0)
    k = len(body.output) - n
    forward, back = (0,) * m, (0,) * k
    if old:
        return _batched(site, body, operands, n, _Ways(attrs.get("directions", forward), back))
    axes = attrs.get("scan_input_axes", forward)
    xs = [_moved(x, int(axis), 0) for x, axis in zip(operands[n:], axes, strict=True)]
    ways = _Ways(
        attrs.get("scan_input_directions", forward), attrs.get("scan_output_directions", back)
    )
    outputs = _scanned(site, body, operands[:n], xs, ways)
    out = attrs.get("scan_output_axes", back)
    ys = [_moved(y, 0, int(axis)) for y, axis in zip(outputs[n:], out, strict=True)]
    return [*outputs[:n], *ys]


def _scanned(
    site: Site, body: GraphProto, carry: Sequence[Tensor], xs: Sequence[Tensor], ways: _Ways
) -> list[Tensor]:
    """Scan `body` along the first axes."""
    # The IR's Scan has one direction for all; where directions are mixed, the backward ones are
    # reversed before and after it.
    if not ways.reverse:
        xs = [_flipped(x) if way else x for x, way in zip(xs, ways.inputs, strict=True)]
    types = [*(x.type for x in carry), *(x.type.with_shape(x.shape[1:]) for x in xs)]
    inner = _recorded(site, "scan", types, body)
    attrs = {"num_carry": len(carry), "num_scanned": len(xs), "reverse": int(ways.reverse)}
    outputs = _applied(site, scan_row, (*carry, *xs), inner, **attrs)
    if ways.reverse:
        return list(outputs)
    n = len(carry)
    ys = [_flipped(y) if way else y for y, way in zip(outputs[n:], ways.outputs, strict=True)]
    return [*outputs[:n], *ys]


def _batched(
    site: Site, body: GraphProto, operands: Sequence[Tensor], n: int, ways: _Ways
) -> list[Tensor]:
    """Import Scan-8, in which axis 0 is the batch: a scan over the batch of scans over axis 1."""
    build = Build(site.build.table, "batch")
    with build:
        params = [
            build.param(f"x{i}", x.type.with_shape(x.shape[1:])) for i, x in enumerate(operands)
        ]
        outer = site.frame.scope
        scope = Scope(build, site.importer.weights, outer.uses, outer, outer.prefix)
        inside = replace(site, frame=replace(site.frame, scope=scope))
        results = _scanned(inside, body, params[:n], params[n:], ways)
    attrs = {"num_carry": 0, "num_scanned": len(operands), "reverse": 0}
    return list(_applied(site, scan_row, operands, (build, results), **attrs))


def _flipped(x: Tensor) -> Tensor:
    """Reverse `x` along its first axis, whatever its size."""
    size = x.shape[0]
    last = dims_of([size - 1]).reshape(())
    return emit("Gather", x, last - arange(size), axis=0)


def _moved(x: Tensor, source: int, target: int) -> Tensor:
    """Move an axis to or from the front."""
    return moveaxis(x, source, target) if (source + target) % max(x.rank, 1) else x


def _map(site: Site) -> Sequence[Tensor]:
    body = site.graph("body")
    operands = [site.present(i) for i in range(len(site.inputs))]
    _check_body(body, len(operands), 0, 1)
    before = site.importer.weights.scopes
    try:
        inner = _recorded(site, "map", element_types(operands), body)
    except InvalidInput:  # elements that a body combines have equal sizes, whatever the types say
        site.importer.weights.back_to(before)
        inner = _recorded(site, "map", element_types(operands, alike=True), body)
    return _applied(site, sequence_map_row, operands, inner)


BRANCHES: Final[Mapping[str, Structure]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _map,
}
"""Operators with inner graphs."""

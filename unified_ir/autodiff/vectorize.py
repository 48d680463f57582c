"""Batching of functions: each node by its row's rule, its body, or a scan over the new axis.

A scan is correct for every row and every region: it applies the node to one slice after the other.
Branches and loops that take a different course in each slice are scanned by design: computing both
branches and selecting would let the branch not taken fail, or spoil a gradient by 0 * inf.

Types change with the new axis, so nodes are recorded again (`Replay`, decision 0056).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Function, Node
from triplane.unified_ir.ir.types import is_plain
from triplane.unified_ir.ops.batching import (
    BatchedCall,
    NeedsScan,
    RaggedResult,
    elementwise,
    with_axis,
)
from triplane.unified_ir.ops.build import Build, body_function, region
from triplane.unified_ir.ops.inline import Replay, inline, introduced_sizes
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import OPEN
from triplane.unified_ir.ops.rows.arithmetic.elementwise import broadcast_bool, broadcast_same
from triplane.unified_ir.ops.rows.control.scanning import scan
from triplane.unified_ir.ops.tensor import Tensor

Flags = Sequence[bool]
_DEFAULTS: Final[Mapping[Any, Any]] = {broadcast_same: elementwise, broadcast_bool: elementwise}
"""Batching rules that follow from the inference rule of a row."""


def vectorize(
    function: Function, args: Sequence[Tensor], batched: Flags, size: Dim
) -> tuple[list[Tensor], list[bool]]:
    """Record `function` on each slice of the batched arguments; return results and their flags.

    `args`: tensors of the graph being recorded; those that `batched` marks have one more first
    axis, of `size`, than the function's parameters. A result that no batched argument reaches is
    not batched.
    """
    try:
        return _by_node(function, args, batched, size)
    except RaggedResult:
        # A data-dependent size inside the function is fine in a scan, as each slice has its own; in
        # a result, slices would have different shapes and could not be stacked.
        opened = {name for node in function.nodes for name in introduced_sizes(node)}
        if any(opened & r.type.symbols for r in function.results):
            raise
        results = _by_scan(partial(inline, function), args, batched)
        return results, [True] * len(results)


def _by_node(
    function: Function, args: Sequence[Tensor], batched: Flags, size: Dim
) -> tuple[list[Tensor], list[bool]]:
    replay = _BatchedReplay(function, args, batched, size)
    for node in function.nodes:
        replay.run(node)
    return replay.results(), [replay.batched.get(r, False) for r in function.results]


class _BatchedReplay(Replay):
    """Replays a function's nodes on batches of the operands that they were recorded for."""

    def __init__(
        self, function: Function, args: Sequence[Tensor], batched: Flags, size: Dim
    ) -> None:
        self.size = size
        self.batched = dict(zip(function.params, batched, strict=True))
        slices = [_Slice(x) if b else x for x, b in zip(args, batched, strict=True)]
        super().__init__(function, slices)  # type: ignore[arg-type]
        # `Replay` has matched the types of slices with those of parameters, which gives the sizes
        # of symbols; the values that nodes read are the whole batches.
        self.values.update(zip(function.params, args, strict=True))

    def run(self, node: Node) -> tuple[Tensor, ...]:
        """See `Replay.run`."""
        if not any(self.batched.get(v, False) for v in node.inputs if v is not None):
            return super().run(node)
        with self.build.at(node.meta):
            outputs = tuple(self._batched(node))
        self.define(node, outputs)
        self.batched.update(dict.fromkeys(node.outputs, True))
        return outputs

    def _batched(self, node: Node) -> Sequence[Tensor]:
        row = self.build.table[node.op.domain, node.op.name]
        inputs, attrs = self.inputs(node), self.attrs(node)
        flags = [v is not None and self.batched.get(v, False) for v in node.inputs]
        types = tuple(v.type.with_sizes(self.sizes) for v in node.outputs)
        regions = self.regions(node)
        call = BatchedCall(
            row, tuple(inputs), tuple(flags), attrs, regions, types, self.size, _region
        )
        if node.attrs.get(OPEN):
            raise _ragged(node)
        try:
            rule = row.batch or _DEFAULTS.get(row.infer)
            if rule is not None:
                return rule(call)
            # A row with a gradient rule of its own is scanned instead: through its body, a later
            # gradient would follow the rules of other rows.
            if row.body is not None and row.vjp is None:
                return self._through_body(call)
        except NeedsScan:
            pass
        return self._scanned(call, node)

    def _through_body(self, call: BatchedCall) -> list[Tensor]:
        types = tuple(
            None if x is None else x.type.with_shape(x.shape[1:]) if b else x.type
            for x, b in zip(call.inputs, call.batched, strict=True)
        )
        known = [None if x is None else self.build.known(x) for x in call.inputs]
        body = body_function(self.build.table, call.row, types, call.attrs, len(call.types), known)
        present = [(x, b) for x, b in zip(call.inputs, call.batched, strict=True) if x is not None]
        outputs, flags = _by_node(body, [x for x, _ in present], [b for _, b in present], self.size)
        # All results are batched from here on, so those that did not depend on the batch are
        # repeated.
        return [y if b else with_axis(y, self.size) for y, b in zip(outputs, flags, strict=True)]

    def _scanned(self, call: BatchedCall, node: Node) -> list[Tensor]:
        if introduced_sizes(node) or not all(map(is_plain, call.types)):
            raise _ragged(node)

        def once(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            rest = iter(inputs)
            operands = [None if x is None else next(rest) for x in call.inputs]
            return recorder().apply(
                call.row, operands, call.attrs, regions=call.regions, outputs=len(call.types)
            )

        present = [(x, b) for x, b in zip(call.inputs, call.batched, strict=True) if x is not None]
        return _by_scan(once, [x for x, _ in present], [b for _, b in present])


def _ragged(node: Node) -> RaggedResult:
    return RaggedResult(
        f"{node.op.name} (at {node.meta.location}) gives results whose size depends on values, so "
        "those for the slices of a batch differ in size and cannot be stacked; do not return them "
        "from the function passed to vmap"
    )


class _Slice:
    """Has the type of one slice of a batched argument, for `Replay`, which matches shapes."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.shape, self.rank = x.dtype, x.shape[1:], x.rank - 1
        self.type = x.type.with_shape(self.shape)


def _by_scan(f: Any, args: Sequence[Tensor], batched: Flags) -> list[Tensor]:
    """Apply `f` to one slice after the other."""

    def step(_: Any, slices: Any) -> tuple[Any, list[Tensor]]:
        # `scan` cuts the batched operands; the others are the same in each step.
        rest = iter(slices)
        operands = [next(rest) if b else x for x, b in zip(args, batched, strict=True)]
        return (), list(f(operands))

    _, ys = scan(step, (), [x for x, b in zip(args, batched, strict=True) if b])
    return list(ys)


def _region(
    function: Function, batched: Flags, size: Dim, wanted: Flags
) -> tuple[Build, list[Tensor], list[bool]]:
    """Return a region on batches, unfinished, its results, and which of them are batched."""
    types = [
        p.type.with_shape((size, *p.type.shape)) if b else p.type
        for p, b in zip(function.params, batched, strict=True)
    ]
    flags: list[bool] = []

    def record(params: list[Tensor]) -> list[Tensor]:
        results, batched_results = _by_node(function, params, batched, size)
        flags.extend(f or w for f, w in zip(batched_results, wanted, strict=True))
        return [
            with_axis(y, size) if w and not f else y
            for y, f, w in zip(results, batched_results, wanted, strict=True)
        ]

    build, results = region(function.name, types, record)
    return build, results, flags

"""Passes that move work from every inference to the conversion: constants, batch normalization.

Each keeps the function's meaning up to float rounding; shapes and names of inputs and results stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.unified_ir.ir.graph import Array, Node, Value
from triplane.unified_ir.ops.build import note_contents
from triplane.unified_ir.ops.evaluate import run_node
from triplane.unified_ir.ops.row import Known
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.passes.frozen import Frozen, FrozenBuilder

MAX_GROWTH_BYTES: Final = 64 << 10
"""A folded result may be larger than its operands by this; a broadcast stays in the graph."""
FOLDED: Final = (".folded", ".normed", ".shift")
"""Suffixes that a new weight adds to the name of the tensor it was computed from."""


def fold(frozen: Frozen) -> Frozen:
    """Fold constants, then batch normalization, since weights may be computed from the state."""
    return fold_batch_norm(fold_constants(frozen))


def fold_constants(frozen: Frozen) -> Frozen:
    """Replace nodes that depend only on weights and constants by new weights."""
    known = frozen.known()
    contents: dict[Value, Known] = {}
    stems = {p: p.name for p in frozen.function.params}
    folded: dict[Node, list[Array]] = {}
    for node in frozen.function.nodes:
        note_contents(row_of(node), node, contents)
        results = None if node.op.name == "Constant" else _evaluated(node, known, contents)
        if results is not None:
            folded[node] = results
            known.update(zip(node.outputs, results, strict=True))
            # A transposed `head.weight` keeps its name, with a suffix.
            stem = next((stems[v] for v in node.inputs if v in stems), "constant")
            stems.update(dict.fromkeys(node.outputs, stem))
    # Of a chain of folded nodes only the last result is stored.
    read = {v for n in frozen.function.nodes if n not in folded for v in n.inputs}
    read.update(frozen.function.results)
    with FrozenBuilder(frozen) as builder:
        for node in frozen.function.nodes:
            if node not in folded:
                builder.keep(node)
                continue
            for value, array in zip(node.outputs, folded[node], strict=True):
                if value in read:
                    builder.put(value, builder.hold(f"{stems[value]}.folded", array))
        return builder.finish()


def _evaluated(
    node: Node, known: Mapping[Value, Array], contents: Mapping[Value, Known]
) -> list[Array] | None:
    if node.regions or not node.inputs or not node.outputs[0].type.dtype.is_float:
        return None
    is_constant = all(v is None or v in known for v in node.inputs)
    if not is_constant or row_of(node).nondeterministic:
        return None
    operands = [None if v is None else known[v] for v in node.inputs]
    seen = [None if v is None else contents.get(v) for v in node.inputs]
    results = [np.asarray(y) for y in run_node(TABLE, node, operands, {}, seen)]
    before = sum(x.nbytes for x in operands if x is not None)
    after = sum(y.nbytes for y in results)
    return results if after <= before + MAX_GROWTH_BYTES else None


@dataclass(frozen=True, slots=True, eq=False)
class _Folded:
    norm: Node
    weight: Array
    bias: Array


def fold_batch_norm(frozen: Frozen) -> Frozen:
    """Move normalization by stored statistics into the weights of a Conv or Gemm right before it.

    gamma (W x + b - mean) / sqrt(var + eps) + beta = (a W) x + a (b - mean) + beta, per output
    channel with a = gamma / sqrt(var + eps). Computed in float64, rounded once.
    """
    folded = _foldable(frozen)
    norms = {f.norm for f in folded.values()}
    with FrozenBuilder(frozen) as builder:
        for node in frozen.function.nodes:
            if node in folded:
                _put_product(builder, node, folded[node])
            elif node not in norms:
                builder.keep(node)
        return builder.finish()


def _put_product(builder: FrozenBuilder, node: Node, f: _Folded) -> None:
    x, w = node.inputs[:2]
    assert x is not None
    assert w is not None
    stem = w.name or "folded"
    operands = [builder[x], builder.hold(f"{stem}.normed", f.weight)]
    builder.replace(node, [*operands, builder.hold(f"{stem}.shift", f.bias)])
    builder.put(f.norm.outputs[0], builder[node.outputs[0]])


def _foldable(frozen: Frozen) -> dict[Node, _Folded]:
    known, counted = frozen.known(), frozen.function.reads()
    producer = frozen.function.producers()
    foldable: dict[Node, _Folded] = {}
    for norm in frozen.function.nodes:
        if norm.op.name != "BatchNormalization" or norm.attrs.get("training_mode"):
            continue
        node = producer.get(norm.inputs[0])  # type: ignore[arg-type]
        if node is not None and (folded := _fold_into(node, norm, known, counted)) is not None:
            foldable[node] = folded
    return foldable


def _fold_into(
    node: Node, norm: Node, known: Mapping[Value, Array], counted: Counter[Value]
) -> _Folded | None:
    vectors = [known.get(v) for v in norm.inputs[1:] if v is not None]
    w = known.get(node.inputs[1]) if len(node.inputs) > 1 else None  # type: ignore[arg-type]
    axis = _channel_axis(node)
    if axis is None or w is None or any(v is None for v in vectors):
        return None
    bias: Array | None = np.zeros(w.shape[axis])
    if len(node.inputs) > 2:
        bias = known.get(node.inputs[2])  # type: ignore[arg-type]
    # Another reader of the product needs it without the normalization.
    if bias is None or bias.size != w.shape[axis] or counted[node.outputs[0]] != 1:
        return None
    gamma, beta, mean, var = (np.asarray(v, np.float64) for v in vectors)
    epsilon = norm.attrs.get("epsilon", 1e-5)
    a = gamma / np.sqrt(var + epsilon)  # type: ignore[operator]
    along = a.reshape([-1 if i == axis else 1 for i in range(w.ndim)])
    # In float64 even for float32 weights, since `bias - mean` may cancel.
    shift = a * (bias.reshape(-1) - mean) + beta
    return _Folded(norm, (w * along).astype(w.dtype), shift.astype(w.dtype))


def _channel_axis(node: Node) -> int | None:
    """Return the weight's axis of output channels; None where the fold does not apply."""
    if node.op.name == "Conv":
        return 0
    plain = node.attrs.get("alpha", 1.0) == 1.0 and node.attrs.get("beta", 1.0) == 1.0
    if node.op.name == "Gemm" and plain:
        return 0 if node.attrs.get("transB") else 1
    return None

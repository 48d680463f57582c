"""From float to Q/DQ form: each site rounded once, each weight stored in integers.

The result is an ordinary function: DequantizeLinear feeds the float operator and QuantizeLinear
follows it, which onnxruntime fuses into one integer kernel. Where it does not fuse them, the graph
means the same and runs slower; `convert.residency` reports that. The weights of an LSTM also come
from DequantizeLinear; emission writes both as one operator if the target has it (decision 0043).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from triplane.unified_ir.ir.graph import Array, Node, Value
from triplane.unified_ir.ops.row import IntegerForm
from triplane.unified_ir.ops.rows.arithmetic.quant import dequantize_linear, quantize_linear
from triplane.unified_ir.ops.table import row_of
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes.frozen import Frozen, FrozenBuilder
from triplane.unified_ir.quantize.scheme import (
    Quantizer,
    Range,
    Scheme,
    activation_quantizer,
    quantize_gates,
    quantize_weight,
)
from triplane.unified_ir.quantize.sites import Gates, Sites, WeightProduct, first_input


def insert(
    frozen: Frozen,
    sites: Sites,
    ranges: Mapping[Value, Range],
    row: Scheme,
    *,
    watch: Sequence[Value] = (),
) -> Frozen:
    """Return the function in integers; `ranges` has the range of each of `sites.roots`.

    The watched values, as this function computes them, are further float results `watched/0`,
    `watched/1`...
    """
    return _Inserter(frozen, sites, ranges, row).run(watch)


def site_ranges(sites: Sites, seen: Mapping[Value, Range]) -> dict[Value, Range]:
    """Return the observed ranges, limited by the clamps that were dropped."""
    ranges = dict(seen)
    for value, top in sites.clamps.items():
        # The clamp is done by saturation: 0 becomes the smallest integer of the range, `top` the
        # largest.
        ranges[value] = Range(0.0, min(max(seen[value].high, 0.0), top))
    return ranges


class _Inserter:
    def __init__(
        self, frozen: Frozen, sites: Sites, ranges: Mapping[Value, Range], row: Scheme
    ) -> None:
        self.frozen = frozen
        self.sites = sites
        self.row = row
        self.known = frozen.known()
        self.quantizers = {v: activation_quantizer(r, row) for v, r in ranges.items()}
        self.integers: dict[Value, Tensor] = {}
        self.builder = FrozenBuilder(frozen)

    def run(self, watch: Sequence[Value]) -> Frozen:
        with self.builder:
            for param in self.frozen.inputs:
                self.round(param)
            for node in self.frozen.function.nodes:
                self.node(node)
                for value in node.outputs:
                    self.round(value)
            return self.builder.finish(
                {f"watched/{i}": self.builder[v] for i, v in enumerate(watch)}
            )

    def node(self, node: Node) -> None:
        """Put one node into the new function."""
        product = self.sites.products.get(node)
        if node in self.sites.dropped:
            (y, *_), x = node.outputs, first_input(node)
            self.builder.put(y, self.builder[x])
            self.integers[y] = self.integers[x]
        elif node in self.sites.scaled:
            self.scale(node.outputs[0], *self.sites.scaled[node])
        elif product is not None:
            self.product(node, product)
        elif node in self.sites.gates:
            self.recurrent(node, self.sites.gates[node])
        elif row_of(node).integer_form is IntegerForm.MIX and node.outputs[0] in self.sites.root:
            rank = node.outputs[0].type.rank
            self.builder.replace(node, [self.operand(v, rank) for v in node.inputs])
        else:
            self.builder.keep(node)

    def scale(self, y: Value, x: Value, factor: float) -> None:
        """Compute y = factor x as the integers of x, read with another scale."""
        old = self.quantizers[self.sites.root[x]]
        self.quantizers[y] = Quantizer(np.array(old.scale * factor, np.float32), old.zero)
        self.integers[y] = self.integers[x]
        self.read(y, y)

    def round(self, value: Value) -> None:
        """Round a value that is part of a site; later nodes read the rounded value."""
        root = self.sites.root.get(value)
        if root is None or value in self.integers:
            return
        quantizer = self.quantizers[root]
        self.integers[value] = quantize_linear(self.builder[value], quantizer.scale, quantizer.zero)
        self.read(value, root)

    def read(self, value: Value, root: Value) -> None:
        """Let later nodes read the integers of a value."""
        quantizer = self.quantizers[root]
        dequantized = dequantize_linear(self.integers[value], quantizer.scale, quantizer.zero)
        self.builder.put(value, dequantized)

    def operand(self, value: Value | None, rank: int) -> Tensor | None:
        """Return an operand of a node such as a sum; a constant is rounded for this reader only.

        A scalar gets the rank of the result. Otherwise onnxruntime gives it one where it changes
        the layout, by a node between the scalar and its reader, which then stays in float.
        """
        if value is None or value not in self.known:
            return None if value is None else self.builder[value]
        array, x = self.known[value], self.builder[value]
        if array.ndim == 0:
            x = self.builder.hold(value.name or "constant", array.reshape((1,) * rank))
        seen = Range(float(array.min()), float(array.max()))
        quantizer = activation_quantizer(seen, self.row)
        q = quantize_linear(x, quantizer.scale, quantizer.zero)
        return dequantize_linear(q, quantizer.scale, quantizer.zero)

    def product(self, node: Node, product: WeightProduct) -> None:
        """Put a product with its weight and bias in integers."""
        x, w, *rest = node.inputs
        assert x is not None
        assert w is not None
        x_scale = self.quantizers[self.sites.root[x]].scale
        weight = quantize_weight(
            product.weight, product.axis, self.row, x_scale=x_scale, bias=product.bias
        )
        operands = [self.builder[x], self.stored(w, weight.q, weight.scale, product.axis)]
        if weight.bias is not None:
            assert rest[0] is not None
            operands.append(self.stored(rest[0], weight.bias, weight.bias_scale, 0))
        self.builder.replace(node, operands)

    def recurrent(self, node: Node, gates: Gates) -> None:
        """Put an LSTM with its weights in integers; bias, lengths and states stay as they are."""
        x, w, r, *rest = node.inputs
        assert x is not None
        assert w is not None
        assert r is not None
        weights = [self.stored_gates(w, gates[0]), self.stored_gates(r, gates[1])]
        others = [None if v is None else self.builder[v] for v in rest]
        self.builder.replace(node, [self.builder[x], *weights, *others])

    def stored_gates(self, value: Value, array: Array) -> Tensor:
        """Store (D, 4 H, K) as int8 (D, K, 4 H), the order of the integer kernel; read it as float.

        A scale for each row of the gates is one for each block of K numbers along the middle axis.
        """
        q, scale = quantize_gates(array, self.row)
        transposed = np.ascontiguousarray(q.transpose(0, 2, 1))
        weight = self.builder.weight(f"{value.name or 'constant'}.{q.dtype}", transposed)
        blocks = scale[:, np.newaxis]
        zero = np.zeros(blocks.shape, q.dtype)
        gates = dequantize_linear(weight, blocks, zero, axis=1, block_size=array.shape[2])
        return gates.transpose(0, 2, 1)

    def stored(self, value: Value, q: Array, scale: Array, axis: int) -> Tensor:
        """Store an array in integers and read it as float.

        The zero point is written out: without it onnxruntime leaves a Gemm in float.
        """
        name = f"{value.name or 'constant'}.{q.dtype}"
        zero = np.zeros(scale.shape, q.dtype)
        return dequantize_linear(self.builder.weight(name, q), scale, zero, axis=axis)

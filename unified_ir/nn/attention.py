"""Attention over sequences x: (N, T, size), and positions for it; PyTorch's names and masks.

In a boolean mask, true excludes a key, as in PyTorch's layers; in `ops` and ONNX it includes the
key. A query for which every key is excluded gets 0, where PyTorch gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import ShapeError, bool_
from triplane.unified_ir.nn.dense import Dense
from triplane.unified_ir.nn.init import GlorotUniform
from triplane.unified_ir.nn.random import Dropout, generator
from triplane.unified_ir.nn.sizes import check_axis, positive
from triplane.unified_ir.nn.state import State
from triplane.unified_ir.ops.rows.movement.shapes import split_row
from triplane.unified_ir.ops.rows.recurrence.attention import (
    WEIGHTS,
    attention,
    heads_apart,
    heads_together,
    rotary_embedding,
)
from triplane.unified_ir.ops.tensor import as_tensor

Positions = Callable[[ops.Tensor], ops.Tensor]
"""Transforms queries and keys (N, heads, T, D) by their position, such as `Rotary`."""


class MultiheadAttention(Cell):
    """Attention of several heads (Vaswani et al. 2017).

    in_proj_weight: (size + 2 kv_size, size), the rows of queries, keys and values, with
    in_proj_bias; out_proj: a `Dense`. kv_size = size kv_heads / heads: with fewer heads of keys and
    values than of queries, several heads of queries share one (grouped-query attention, Ainslie et
    al. 2023). In training, each attention weight is dropped with probability `p_drop`. positions:
    transforms queries and keys, such as `Rotary`.
    """

    in_proj_weight: State
    in_proj_bias: State

    def __init__(
        self,
        size: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        p_drop: float = 0.0,
        bias: bool = True,
        positions: Positions | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        positive("MultiheadAttention", size=size, heads=heads, kv_heads=kv_heads)
        if size % heads or heads % kv_heads:
            raise InvalidInput(
                f"MultiheadAttention needs heads that divide size, and kv_heads that divide heads; "
                f"got size {size}, {heads} heads and {kv_heads} heads of keys"
            )
        self.size, self.heads, self.kv_heads = size, heads, kv_heads
        self.kv_size = size // heads * kv_heads
        source = generator(rng)
        rows = size + 2 * self.kv_size
        self.in_proj_weight = Parameter(GlorotUniform()((rows, size), source))
        self.in_proj_bias = Parameter(np.zeros(rows, np.float32)) if bias else None
        self.out_proj = Dense(size, size, bias=bias, rng=source)
        if bias:
            # As in PyTorch, which starts this bias at 0 unlike that of other linear layers.
            self.out_proj.bias.array[:] = 0.0
        self.dropout = Dropout(p_drop, rng=rng) if p_drop else None
        self.positions = positions

    def construct(
        self,
        query: ops.Tensor,
        key: ops.Tensor | None = None,
        value: ops.Tensor | None = None,
        *,
        attn_mask: ops.Tensor | None = None,
        key_padding_mask: ops.Tensor | None = None,
        causal: bool = False,
    ) -> ops.Tensor:
        """query: (N, T, size); key: (N, S, size), by default query; value: by default key.

        attn_mask: (T, S), (N heads, T, S) or broadcastable to (N, heads, T, S); bool (true excludes
        a key) or numbers that are added to the scores. key_padding_mask: (N, S) bool, true where a
        key is padding. causal: a query sees keys up to its own position. -> (N, T, size).
        """
        q, k, v = self._projected(query, key, value)
        # (N, T, heads D) -> (N, heads, T, D)
        q, k, v = heads_apart(q, self.heads), *(heads_apart(x, self.kv_heads) for x in (k, v))
        if self.positions is not None:
            q, k = self.positions(q), self.positions(k)
        operands = q, k, v, _mask(attn_mask, key_padding_mask, q)
        mode = {"is_causal": int(causal)}
        if self.dropout is None or not self.training:
            y = attention(*operands, **mode)
        else:  # the fourth output is (N, heads, T, S): the weight of each key for each query
            # ONNX's Attention has no dropout, so the weights are taken out and applied to the
            # values here.
            mode["qk_matmul_output_mode"] = WEIGHTS
            *_, weights = attention.all_outputs(*operands, outputs=4, **mode)
            y = _shared(self.dropout(weights), v)
        return self.out_proj(heads_together(y))

    def _projected(
        self, query: ops.Tensor, key: ops.Tensor | None, value: ops.Tensor | None
    ) -> list[ops.Tensor]:
        """Return queries, keys and values; one product where they have the same source."""
        name = f"MultiheadAttention({self.size}, {self.heads})"
        for x in (query, key, value):
            if x is not None:
                check_axis(name, f"(N, T, {self.size})", x, -1, self.size, [3])
        sizes = np.array([self.size, self.kv_size, self.kv_size])
        if key is None and value is None:
            # Self-attention: one product of (size + 2 kv_size) rows instead of three.
            mixed = ops.linear(query, self.in_proj_weight, self.in_proj_bias)
            return list(split_row.all_outputs(mixed, sizes, outputs=3, axis=-1))
        key = query if key is None else key
        value = key if value is None else value
        weights = split_row.all_outputs(self.in_proj_weight, sizes, outputs=3, axis=0)
        biases: tuple[ops.Tensor | None, ...] = (None, None, None)
        if self.in_proj_bias is not None:
            biases = split_row.all_outputs(self.in_proj_bias, sizes, outputs=3, axis=0)
        triples = zip((query, key, value), weights, biases, strict=True)
        return [ops.linear(x, w, b) for x, w, b in triples]


def _shared(weights: ops.Tensor, v: ops.Tensor) -> ops.Tensor:
    """Return weights @ v, where a head of v may serve several heads of the weights."""
    n, heads, t, s = weights.shape
    grouped = weights.reshape((n, v.shape[1], heads // v.shape[1], t, s))
    return (grouped @ ops.unsqueeze(v, 2)).reshape((n, heads, t, v.shape[3]))


def _mask(
    attn_mask: ops.Tensor | None, key_padding_mask: ops.Tensor | None, q: ops.Tensor
) -> ops.Tensor | None:
    """Return PyTorch's masks in ONNX's form: true includes a key, or numbers to add."""
    counts = None
    if key_padding_mask is not None:
        key_padding_mask = as_tensor(key_padding_mask)
        if key_padding_mask.dtype != bool_:
            raise ShapeError(
                f"key_padding_mask is bool (N, S), true at padding, got {key_padding_mask.type}"
            )
        counts = ops.unsqueeze(ops.logical_not(key_padding_mask), 1, 2)
    if attn_mask is None:
        return counts
    attn_mask = as_tensor(attn_mask)
    if attn_mask.rank == 3:
        # PyTorch's (N heads, T, S); heads vary faster than samples
        attn_mask = attn_mask.reshape((*q.shape[:2], *attn_mask.shape[1:]))
    if attn_mask.dtype == bool_:
        allowed = ops.logical_not(attn_mask)
        return allowed if counts is None else ops.logical_and(allowed, counts)
    if counts is None:
        return attn_mask
    # softmax(-inf) = 0, so an excluded key gets no weight whatever number the mask adds.
    return ops.where(counts, attn_mask, ops.constant(-np.inf, attn_mask.dtype))


class PositionalEncoding(Cell):
    """Adds sin(t / 10000^(2j / size)) at 2j and the cosine at 2j + 1 (Vaswani et al. 2017).

    length: the longest sequence. In training, `p_drop` of the sums is dropped.
    """

    def __init__(
        self, size: int, length: int, *, p_drop: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        positive("PositionalEncoding", size=size, length=length)
        angles = _angles(size, length, 10_000.0)
        table = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(length, -1)
        # A plain array, not a buffer: it is computed from the sizes, so it becomes a constant of
        # the graph and takes no part in the state. The slice drops the last cosine of an odd size.
        self.table = table[:, :size].astype(np.float32)
        self.dropout = Dropout(p_drop, rng=rng) if p_drop else None

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, T, size), T <= length -> the same shape."""
        length, size = self.table.shape
        name = f"PositionalEncoding({size}, {length})"
        check_axis(name, f"(N, T, {size})", x, -1, size, [3])
        y = x + ops.constant(self.table, x.dtype)[: _within(name, x.shape[1], length)]
        return y if self.dropout is None else self.dropout(y)


class Rotary(Cell):
    """Rotates pairs of each head by the angle t / base^(2j / head_size) (Su et al. 2021).

    length: the longest sequence. Pairs are (j, j + head_size / 2).
    """

    def __init__(self, head_size: int, length: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        positive("Rotary", head_size=head_size, length=length)
        if head_size % 2:
            raise InvalidInput(f"Rotary rotates pairs and needs an even head_size, got {head_size}")
        angles = _angles(head_size, length, base)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, heads, T, head_size), T <= length -> the same shape."""
        length, half = self.cos.shape
        name = f"Rotary({2 * half}, {length})"
        check_axis(name, f"(N, heads, T, {2 * half})", x, -1, 2 * half, [4])
        # Pairs (j, j + D/2), the layout of Llama, are those of ONNX's RotaryEmbedding with
        # interleaved=0.
        n, t = x.shape[0], _within(name, x.shape[2], length)
        caches = (ops.constant(c, x.dtype) for c in (self.cos, self.sin))
        return rotary_embedding(x, *caches, ops.expand(ops.unsqueeze(ops.arange(t), 0), (n, t)))


def _angles(size: int, length: int, base: float) -> Array:
    """Return (length, half the size, rounded up): t / base^(2j / size), in float64."""
    # In float64, because the error of an angle grows with the position t; the tables are rounded
    # once.
    rates = np.exp(-math.log(base) * np.arange(0, size, 2) / size)
    return np.asarray(np.arange(length)[:, None] * rates)


def _within(name: str, t: Dim, length: int) -> Dim:
    """Return the length of a sequence; raise ShapeError if it is known to exceed the table."""
    if isinstance(t, int) and t > length:
        raise ShapeError(f"{name} has {length} positions, got a sequence of {t}; make it longer")
    return t

"""Transformer layers (Vaswani et al. 2017) over x: (N, T, size), with PyTorch's names and order.

Masks are those of `nn.attention`: in a boolean mask, true excludes a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, CellList
from triplane.unified_ir.nn.attention import MultiheadAttention
from triplane.unified_ir.nn.dense import Dense
from triplane.unified_ir.nn.norm import LayerNorm
from triplane.unified_ir.nn.random import Dropout

Mask = ops.Tensor | None
Activation = Callable[[ops.Tensor], ops.Tensor]


class _Layer(Cell):
    """Residual blocks, each with a normalization before or after it, and a network per position."""

    attends_memory: ClassVar[bool] = False

    def __init__(
        self,
        size: int,
        heads: int,
        feedforward: int = 2048,
        *,
        p_drop: float = 0.1,
        activation: Activation = ops.relu,
        norm_first: bool = False,
        epsilon: float = 1e-5,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        if not callable(activation):
            raise InvalidInput(
                f"activation must be a function of a tensor, such as ops.gelu, got {activation!r}"
            )
        self.norm_first, self.activation = norm_first, activation
        # Attributes have PyTorch's names, so that the keys of its state dicts match.
        self.self_attn = MultiheadAttention(size, heads, p_drop=p_drop, rng=rng)
        self.linear1 = Dense(size, feedforward, rng=rng)
        self.linear2 = Dense(feedforward, size, rng=rng)
        self.norm1 = LayerNorm(size, epsilon=epsilon)
        self.norm2 = LayerNorm(size, epsilon=epsilon)
        self.dropout = Dropout(p_drop, rng=rng)
        self.dropout1 = Dropout(p_drop, rng=rng)
        self.dropout2 = Dropout(p_drop, rng=rng)
        if self.attends_memory:
            self.multihead_attn = MultiheadAttention(size, heads, p_drop=p_drop, rng=rng)
            self.norm3 = LayerNorm(size, epsilon=epsilon)
            self.dropout3 = Dropout(p_drop, rng=rng)

    def _forward(self, x: ops.Tensor) -> ops.Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _around(
        self, x: ops.Tensor, norm: Cell, dropout: Cell, block: Callable[[ops.Tensor], ops.Tensor]
    ) -> ops.Tensor:
        """Return x + block(norm(x)), or norm(x + block(x))."""
        if self.norm_first:
            return x + dropout(block(norm(x)))
        return norm(x + dropout(block(x)))

    def _self_attended(self, x: ops.Tensor, **masks: Any) -> ops.Tensor:
        return self._around(x, self.norm1, self.dropout1, partial(self.self_attn, **masks))


class TransformerEncoderLayer(_Layer):
    """Self-attention, then a network per position.

    feedforward: width of that network. norm_first: normalize the input of each block instead of
    the sum after it.
    """

    def construct(
        self,
        x: ops.Tensor,
        attn_mask: Mask = None,
        key_padding_mask: Mask = None,
        *,
        causal: bool = False,
    ) -> ops.Tensor:
        """x: (N, T, size), masks as those of `MultiheadAttention` -> (N, T, size)."""
        x = self._self_attended(
            x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, causal=causal
        )
        return self._around(x, self.norm2, self.dropout2, self._forward)


class TransformerDecoderLayer(_Layer):
    """Self-attention, attention to a memory, then a network per position."""

    attends_memory = True

    def construct(
        self,
        x: ops.Tensor,
        memory: ops.Tensor,
        attn_mask: Mask = None,
        key_padding_mask: Mask = None,
        memory_mask: Mask = None,
        memory_key_padding_mask: Mask = None,
        *,
        causal: bool = False,
    ) -> ops.Tensor:
        """x: (N, T, size), memory: (N, S, size); `causal` concerns only x -> (N, T, size)."""

        def attend_memory(v: ops.Tensor) -> ops.Tensor:
            masks = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask}
            return self.multihead_attn(v, memory, **masks)

        x = self._self_attended(
            x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, causal=causal
        )
        x = self._around(x, self.norm2, self.dropout2, attend_memory)
        return self._around(x, self.norm3, self.dropout3, self._forward)


class _Stack(Cell):
    """Layers one after another, and a normalization after the last."""

    def __init__(self, layers: Sequence[Cell], *, norm: Cell | None = None) -> None:
        super().__init__()
        self.layers = CellList(layers)
        self.norm = norm

    def _normalized(self, x: ops.Tensor) -> ops.Tensor:
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_Stack):
    """Encoder layers one after another; all take the same masks.

    >>> from triplane.unified_ir import nn
    >>> layers = [nn.TransformerEncoderLayer(8, 2, feedforward=16) for _ in range(2)]
    >>> nn.TransformerEncoder(layers, norm=nn.LayerNorm(8))(np.zeros((1, 3, 8), np.float32)).shape
    (1, 3, 8)
    """

    def construct(
        self,
        x: ops.Tensor,
        attn_mask: Mask = None,
        key_padding_mask: Mask = None,
        *,
        causal: bool = False,
    ) -> ops.Tensor:
        """See `TransformerEncoderLayer`."""
        for layer in self.layers:
            x = layer(x, attn_mask, key_padding_mask, causal=causal)
        return self._normalized(x)


class TransformerDecoder(_Stack):
    """Decoder layers one after another; all take the same memory and masks."""

    def construct(
        self,
        x: ops.Tensor,
        memory: ops.Tensor,
        attn_mask: Mask = None,
        key_padding_mask: Mask = None,
        memory_mask: Mask = None,
        memory_key_padding_mask: Mask = None,
        *,
        causal: bool = False,
    ) -> ops.Tensor:
        """See `TransformerDecoderLayer`."""
        masks = (attn_mask, key_padding_mask, memory_mask, memory_key_padding_mask)
        for layer in self.layers:
            x = layer(x, memory, *masks, causal=causal)
        return self._normalized(x)

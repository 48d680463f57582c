"""Golden attention layers by PyTorch: tests/golden/attention/NAME.npz.

`python -m benchmarks.oracles.attention FOLDER`, in the peers' interpreter, writes per case in
float64: operands `x.NAME`, weights `w.PATH`, the result `y`, a random cotangent `v`, and gradients
of sum(v y), `g.NAME` of operands and `h.PATH` of weights. A case's seed is made of its name.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, np.dtype[Any]]
SIZE, HEADS = 8, 2
N, T, S = 3, 4, 5


def _padded(length: int) -> Array:
    """Sequences that end before the longest does."""
    return np.arange(length) >= np.array([[length], [length - 1], [2]])


def _options(*, norm_first: bool = False, activation: str = "relu") -> dict[str, Any]:
    return {
        "dim_feedforward": 16, "dropout": 0.0, "batch_first": True,
        "norm_first": norm_first, "activation": activation,
    }  # fmt: skip


def _attended(*keys: str) -> Callable[..., Any]:
    def forward(layer: Any, q: Any, k: Any, **masks: Any) -> Any:
        given = {name: masks[name] for name in keys}
        return layer(q, k, k, need_weights=False, **given)[0]

    return forward


def _encoder(*, norm_first: bool, activation: str) -> nn.Module:
    made = nn.TransformerEncoderLayer(
        SIZE, HEADS, **_options(norm_first=norm_first, activation=activation)
    )
    return nn.TransformerEncoder(
        made, 2, nn.LayerNorm(SIZE) if norm_first else None, enable_nested_tensor=False
    )


def _decoder(*, norm_first: bool) -> nn.Module:
    made = nn.TransformerDecoderLayer(SIZE, HEADS, **_options(norm_first=norm_first))
    return nn.TransformerDecoder(made, 2)


def _encoded(layer: Any, x: Any, padding: Any) -> Any:
    return layer(x, src_key_padding_mask=padding)


def _encoded_causally(layer: Any, x: Any) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return layer(x, mask=mask, is_causal=True)


def _decoded(layer: Any, x: Any, memory: Any, padding: Any, memory_padding: Any) -> Any:
    mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
    return layer(
        x, memory, tgt_mask=mask, tgt_key_padding_mask=padding,
        memory_key_padding_mask=memory_padding,
    )  # fmt: skip


def _floats(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Array]:
    return {k: rng.standard_normal(s) for k, s in shapes.items()}


_BOOLS: Final = np.array([[i == j or (i + j) % 3 == 1 for j in range(S)] for i in range(T)])
_PAIR: Final = {"q": (N, T, SIZE), "k": (N, S, SIZE)}

# fmt: off
CASES: Final[Mapping[str, tuple[Callable[[], nn.Module], Callable[..., Any], Any, Any]]] = {
    "multihead_added_mask": (
        lambda: nn.MultiheadAttention(SIZE, HEADS, batch_first=True), _attended("attn_mask"),
        {**_PAIR, "attn_mask": (T, S)}, {}),
    "multihead_bool_masks": (
        lambda: nn.MultiheadAttention(SIZE, HEADS, batch_first=True),
        _attended("attn_mask", "key_padding_mask"), _PAIR,
        {"attn_mask": ~_BOOLS, "key_padding_mask": _padded(S)}),
    "encoder": (lambda: _encoder(norm_first=False, activation="relu"), _encoded,
                {"x": (N, T, SIZE)}, {"padding": _padded(T)}),
    "encoder_norm_first": (lambda: _encoder(norm_first=True, activation="gelu"), _encoded_causally,
                           {"x": (N, T, SIZE)}, {}),
    "decoder": (
        lambda: _decoder(norm_first=False), _decoded, {"x": (N, T, SIZE), "memory": (N, S, SIZE)},
        {"padding": _padded(T), "memory_padding": _padded(S)}),
    "decoder_norm_first": (
        lambda: _decoder(norm_first=True), _decoded, {"x": (N, T, SIZE), "memory": (N, S, SIZE)},
        {"padding": _padded(T), "memory_padding": _padded(S)}),
}
# fmt: on


def evaluate(name: str) -> dict[str, Array]:
    """Everything one golden file holds."""
    make, forward, shapes, fixed = CASES[name]
    seed = zlib.crc32(name.encode())
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layer = make().double()
    weights = dict(layer.named_parameters())
    with torch.no_grad():  # all biases begin at zero, and all layers of a stack alike
        for w in weights.values():
            w.copy_(torch.from_numpy(0.4 * rng.standard_normal(w.shape)))
    drawn = _floats(rng, **shapes)
    operands = {k: torch.from_numpy(a).requires_grad_() for k, a in drawn.items()}
    y = forward(layer, **operands, **{k: torch.from_numpy(a) for k, a in fixed.items()})
    v = torch.from_numpy(rng.standard_normal(y.shape))
    gradients = torch.autograd.grad((v * y).sum(), [*operands.values(), *weights.values()])
    g, h = gradients[: len(operands)], gradients[len(operands) :]
    return {
        **{f"x.{k}": a for k, a in (drawn | fixed).items()},
        **{f"w.{k}": w.numpy(force=True) for k, w in weights.items()},
        "y": y.numpy(force=True), "v": v.numpy(),
        **{f"g.{k}": a.numpy() for k, a in zip(operands, g, strict=True)},
        **{f"h.{k}": a.numpy() for k, a in zip(weights, h, strict=True)},
    }  # fmt: skip


def write(folder: Path) -> None:
    """All cases."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        np.savez_compressed(folder / f"{name}.npz", **evaluate(name))


if __name__ == "__main__":
    write(Path(sys.argv[1]))

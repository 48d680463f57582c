"""The networks in JAX as one writes them by hand: functions of weights and a batch.

`logits` gives what a training step needs: the logits, and the running statistics of batch
normalization after the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import networks
from jax import lax, nn
from jax import numpy as jnp

Weights = Mapping[str, Any]
Statistics = dict[str, Any]
EPSILON: Final = 1e-5
KEPT: Final = 0.9
"""Share of a running statistic that stays in each step."""


def logits(
    network: networks.Network, w: Weights, running: Statistics, x: Any
) -> tuple[Any, Statistics]:
    """x: a batch of `networks.batches` -> (N, classes), the new running statistics."""
    if isinstance(network, networks.ResNet):
        moved = dict(running)
        return _resnet(network, w, moved, x), moved
    return _FORWARD[type(network)](network, w, x), running


def statistics(network: networks.Network) -> Statistics:
    """Running means and variances before the first step."""
    if not isinstance(network, networks.ResNet):
        return {}
    norms = [(k, s) for k, s in networks.shapes(network).items() if k.endswith("norm.weight")]
    found = {}
    for name, shape in norms:
        found[name.replace("weight", "mean")] = jnp.zeros(shape)
        found[name.replace("weight", "variance")] = jnp.ones(shape)
    return found


def _stack(network: networks.Stack, w: Weights, x: Any) -> Any:
    for i, layer in enumerate(network.layers):
        weight, bias = w[f"{i}.weight"], w[f"{i}.bias"]
        if isinstance(layer, networks.Conv):
            x = _conv(x, weight, 1, layer.padding) + bias[:, None, None]
            x = lax.reduce_window(
                nn.relu(x), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
            )
            continue
        x = x.reshape(len(x), -1) @ weight.T + bias
        x = nn.relu(x) if i + 1 < len(network.layers) else x
    return x


def _conv(x: Any, weight: Any, stride: int, padding: int) -> Any:
    return lax.conv_general_dilated(x, weight, (stride, stride), [(padding, padding)] * 2)


def _resnet(network: networks.ResNet, w: Weights, moved: Statistics, x: Any) -> Any:
    def normed(x: Any, name: str, stride: int = 1) -> Any:
        weight = w[f"{name}.weight"]
        return _batch_norm(w, moved, f"{name}_norm", _conv(x, weight, stride, weight.shape[2] // 2))

    x = nn.relu(normed(x, "stem"))
    for i, block in enumerate(network.blocks):
        name = f"blocks.{i}"
        y = nn.relu(normed(x, f"{name}.first", block.stride))
        y = normed(y, f"{name}.second")
        x = nn.relu(y + (normed(x, f"{name}.short", block.stride) if block.changes else x))
    return _dense(w, "head", x.mean((2, 3)))


def _batch_norm(w: Weights, moved: Statistics, name: str, x: Any) -> Any:
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    seen = {"mean": mean, "variance": variance * (x[:, 0].size / (x[:, 0].size - 1))}
    for kind, value in seen.items():
        moved[f"{name}.{kind}"] = KEPT * moved[f"{name}.{kind}"] + (1 - KEPT) * value
    scale = w[f"{name}.weight"] * lax.rsqrt(variance + EPSILON)
    return (x - mean[:, None, None]) * scale[:, None, None] + w[f"{name}.bias"][:, None, None]


def _char_lstm(network: networks.CharLstm, w: Weights, x: Any) -> Any:
    y = w["embedding.weight"][x.T]  # (T, N, embedding)
    for i in range(network.layers):
        y = _lstm(w, f"lstm.{i}", y)
    return _dense(w, "head", y[-1])


def _lstm(w: Weights, name: str, x: Any) -> Any:
    """x: (T, N, inputs) -> (T, N, hidden). The input's product is one for all steps."""
    mixed = x @ w[f"{name}.weight_ih"].T + w[f"{name}.bias"]
    weight = w[f"{name}.weight_hh"].T
    start = jnp.zeros((x.shape[1], weight.shape[0]), x.dtype)

    def step(carry: Any, mixed: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(mixed + h @ weight, 4, axis=-1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (start, start), mixed)[1]


def _transformer(network: networks.Transformer, w: Weights, x: Any) -> Any:
    x = w["embedding.weight"][x]
    for i in range(network.layers):
        name = f"layers.{i}"
        x = x + _attention(network, w, name, _layer_norm(w, f"{name}.norm_1", x))
        up = _dense(w, f"{name}.up", _layer_norm(w, f"{name}.norm_2", x))
        x = x + _dense(w, f"{name}.down", nn.gelu(up, approximate=False))
    return _dense(w, "head", x.mean(1))


def _attention(network: networks.Transformer, w: Weights, name: str, x: Any) -> Any:
    """x: (N, T, width)."""
    n, time, width = x.shape
    qkv = _dense(w, f"{name}.qkv", x).reshape(n, time, 3, network.heads, width // network.heads)
    joined = nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
    return _dense(w, f"{name}.out", joined.reshape(n, time, width))


def _layer_norm(w: Weights, name: str, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + EPSILON) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _dense(w: Weights, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


_FORWARD: Final[Mapping[type, Callable[..., Any]]] = {
    networks.Stack: _stack,
    networks.CharLstm: _char_lstm,
    networks.Transformer: _transformer,
}

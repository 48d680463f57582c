"""JAX's side: the jitted step of a stack of layers. Runs in an interpreter that has JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import networks
from jax import numpy as jnp
from worker import Step, serve

Weights = dict[str, Any]


def logits(network: networks.Stack, held: Weights, x: Any) -> Any:
    """x: (N, C, S, S), or flat -> (N, classes)."""
    for i, layer in enumerate(network.layers):
        w, b = held[f"{i}.weight"], held[f"{i}.bias"]
        if isinstance(layer, networks.Conv):
            pads = [(layer.padding, layer.padding)] * 2
            x = jax.lax.conv_general_dilated(x, w, (1, 1), pads) + b[:, None, None]
            x = jax.lax.reduce_window(
                jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
            )
            continue
        x = x.reshape(len(x), -1) @ w.T + b
        x = jax.nn.relu(x) if i + 1 < len(network.layers) else x
    return x


def side(case: networks.Case) -> tuple[Step, dict[str, str]]:
    """A training step from the case's starting weights."""
    network = case.network
    assert isinstance(network, networks.Stack)
    held = {k: jnp.asarray(v) for k, v in networks.weights(case).items()}
    slots = {k: (jnp.zeros_like(v), jnp.zeros_like(v)) for k, v in held.items()}

    def loss(held: Weights, x: Any, labels: Any) -> Any:
        chosen = jax.nn.log_softmax(logits(network, held, x))
        return -jnp.take_along_axis(chosen, labels[:, None], 1).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(held: Weights, slots: Weights, count: Any, x: Any, labels: Any) -> Any:
        value, g = jax.value_and_grad(loss)(held, x, labels)
        moved = {k: _moved(case, held[k], g[k], slots[k], count) for k in held}
        return value, {k: m[0] for k, m in moved.items()}, {k: m[1] for k, m in moved.items()}

    count = 0

    def step(x: networks.Array, labels: networks.Array) -> float:
        nonlocal held, slots, count
        count += 1
        value, held, slots = update(held, slots, jnp.float32(count), x, labels)
        return float(value)

    return step, {"version": f"JAX {jax.__version__}"}


def _moved(case: networks.Case, w: Any, g: Any, slot: Any, count: Any) -> Any:
    if not case.adam:
        moment = case.momentum * slot[0] + g
        return w - case.lr * moment, (moment, slot[1])
    m, v = 0.9 * slot[0] + 0.1 * g, 0.999 * slot[1] + 0.001 * g * g
    rate = case.lr * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return w - rate * m / (jnp.sqrt(v) + 1e-8 * jnp.sqrt(1 - 0.999**count)), (m, v)


if __name__ == "__main__":
    serve(side)

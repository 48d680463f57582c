"""JAX's side: the jitted step of a network written by hand. Runs where JAX is installed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import networks
import numpy as np
from jax import numpy as jnp
from jax_networks import logits, statistics
from worker import Step, one_processor_per_thread, serve

Weights = dict[str, Any]


def side(case: networks.Case) -> tuple[Step, dict[str, str]]:
    """A training step from the case's starting weights."""
    one_processor_per_thread()
    weights = {k: jnp.asarray(v) for k, v in networks.weights(case).items()}
    state = weights, slots_of(case, weights), statistics(case.network)

    def loss(weights: Weights, running: Weights, x: Any, labels: Any) -> Any:
        given, moved = logits(case.network, weights, running, x)
        chosen = jax.nn.log_softmax(given)
        return -jnp.take_along_axis(chosen, labels[:, None], 1).mean(), moved

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, x: Any, labels: Any) -> Any:
        weights, slots, running = state
        (value, running), g = jax.value_and_grad(loss, has_aux=True)(weights, running, x, labels)
        return value, (*_moved(case, weights, g, slots), running)

    def step(x: networks.Array, labels: networks.Array) -> float:
        nonlocal state
        value, state = update(state, x, labels)
        return float(value)

    return step, {"version": f"JAX {jax.__version__}"}


def slots_of(case: networks.Case, weights: Weights) -> Any:
    """The optimizer's state: nothing, momentum, or Adam's moments and its count of steps."""
    zeros = {k: jnp.zeros_like(w) for k, w in weights.items()}
    if case.adam:
        return zeros, {k: jnp.zeros_like(w) for k, w in weights.items()}, np.float32(0)
    return zeros if case.momentum else None


def _moved(case: networks.Case, weights: Weights, g: Weights, slots: Any) -> Any:
    """The weights and slots after an update."""
    if case.adam:
        return _adam(case, weights, g, slots)
    if case.momentum:
        slots = g = {k: case.momentum * slots[k] + g[k] for k in g}
    return {k: w - case.lr * g[k] for k, w in weights.items()}, slots


def _adam(case: networks.Case, weights: Weights, g: Weights, slots: Any) -> Any:
    first, second, count = slots
    count = count + 1
    first = {k: 0.9 * m + 0.1 * g[k] for k, m in first.items()}
    second = {k: 0.999 * v + 0.001 * g[k] * g[k] for k, v in second.items()}
    scale = jnp.sqrt(1 - 0.999**count)
    rate = case.lr * scale / (1 - 0.9**count)
    moved = {
        k: w - rate * first[k] / (jnp.sqrt(second[k]) + 1e-8 * scale) for k, w in weights.items()
    }
    return moved, (first, second, count)


if __name__ == "__main__":
    serve(side)

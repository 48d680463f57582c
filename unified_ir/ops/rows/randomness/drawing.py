"""Random numbers as ONNX defines them: drawn by the engine, different in every run.

They serve imported models; networks of this package draw from keys instead (`random.py`). A draw
cannot be repeated, so these rows have no gradient, and equal nodes remain separate draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.row import Op, OpCall, OpKind, Types, dtype_attr

Draw = Callable[..., Any]
_row = partial(Op, kind=OpKind.RANDOM, nondeterministic=True)


def _generator(seed: float | None) -> np.random.Generator:
    """Return a generator that is equal for equal seeds, and different each time without one."""
    # ONNX's seed is a float, numpy's an integer; the bits keep different seeds different.
    return np.random.default_rng(None if seed is None else int(np.float32(seed).view(np.uint32)))


def _of_shape(call: OpCall) -> Types:
    shape = tuple(int(d) for d in call.attrs["shape"])
    if min(shape, default=0) < 0:
        raise ShapeError(f"{call.row} takes sizes of 0 or more, got {shape}")
    return (TensorType(dtype_attr(call.attrs["dtype"]), shape),)


def _like(call: OpCall) -> Types:
    wanted = call.attrs["dtype"]
    x = call.type(0)
    return (x if wanted is None else x.with_dtype(dtype_attr(wanted)),)


def _rows(name: str, draw: Draw) -> tuple[Op, Op]:
    def kernel(*, dtype: int, seed: float | None, shape: Any, **of: float) -> Any:
        return draw(_generator(seed), shape, **of).astype(dtype_attr(dtype).numpy)

    def like(x: Any, *, dtype: int | None, seed: float | None, **of: float) -> Any:
        drawn = draw(_generator(seed), x.shape, **of)
        return drawn.astype(x.dtype if dtype is None else dtype_attr(dtype).numpy)

    return (
        _row(name=name, infer=_of_shape, reference=kernel),
        _row(name=f"{name}Like", infer=_like, reference=like),
    )


random_normal_row, random_normal_like_row = _rows(
    "RandomNormal", lambda rng, shape, mean, scale: rng.normal(mean, scale, shape)
)
random_uniform_row, random_uniform_like_row = _rows(
    "RandomUniform", lambda rng, shape, low, high: rng.uniform(low, high, shape)
)


def _bernoulli(x: Any, *, dtype: int | None, seed: float | None) -> Any:
    drawn = _generator(seed).random(x.shape) < x
    return drawn.astype(x.dtype if dtype is None else dtype_attr(dtype).numpy)


def _emit_bernoulli(context: EmissionContext, node: Node) -> None:
    """Compare a uniform number with p: onnxruntime 1.31's Bernoulli has probability 1 - p."""
    (x,) = context.inputs(node)
    seed = {k: v for k, v in node.attrs.items() if k == "seed"}
    below = context.emit("Less", context.emit("RandomUniformLike", x, **seed), x)
    to = node.outputs[0].type.dtype.onnx
    context.add("Cast", [below], context.output_names(node), to=to)


bernoulli_row = _row(name="Bernoulli", emit=_emit_bernoulli, infer=_like, reference=_bernoulli)
"""x: probabilities -> 1 with that probability, else 0."""


def _multinomial_types(call: OpCall) -> Types:
    x = call.type(0)
    if x.rank != 2 or call.attrs["sample_size"] < 1:
        raise ShapeError(f"{call.row} draws 1 or more samples of (B, classes), got {x}")
    return (TensorType(dtype_attr(call.attrs["dtype"]), (x.shape[0], call.attrs["sample_size"])),)


def _multinomial(x: Any, *, dtype: int, sample_size: int, seed: float | None) -> Any:
    """Draw the class into whose share of [0, 1) a uniform number falls."""
    # exp of the differences to the maximum: logits of any size neither overflow nor all vanish.
    weights = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    ends = np.cumsum(weights, 1)
    drawn = _generator(seed).random((len(x), sample_size)) * ends[:, -1:]
    classes = (drawn[:, :, None] >= ends[:, None, :]).sum(2)
    # A product may round up to the last end, which would be one class too many.
    return np.minimum(classes, x.shape[1] - 1).astype(dtype_attr(dtype).numpy)


multinomial_row = _row(name="Multinomial", infer=_multinomial_types, reference=_multinomial)
"""x: (B, classes) unnormalized logarithms of probabilities -> (B, sample_size) classes."""

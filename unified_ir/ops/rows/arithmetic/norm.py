"""Batch normalization and layer normalization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Node
from triplane.unified_ir.ir.types import ShapeError, float32, float64
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import Op, OpCall, OpKind, Types
from triplane.unified_ir.ops.rows.arithmetic.elementwise import as_like, reciprocal, sqrt
from triplane.unified_ir.ops.rows.movement.structure import broadcast_to, size_of, sum_to
from triplane.unified_ir.ops.samples import between, normal, sample
from triplane.unified_ir.ops.tensor import Tensor


def is_untrained(array: Array) -> bool:
    """Return whether all elements are 0 or all are 1, as in new biases, scales, statistics."""
    return bool(array.size) and any(bool((array == start).all()) for start in (0, 1))


def _batch_norm(call: OpCall) -> Types:
    x = call.type(0)
    if x.rank < 2:
        raise ShapeError(f"BatchNormalization takes x: (N, C, ...), got {x}")
    for i in range(1, 5):
        if call.type(i).shape != x.shape[1:2]:
            raise ShapeError(
                f"BatchNormalization of {x} needs {x.with_shape(x.shape[1:2])}, got {call.type(i)}"
            )
    if call.outputs > 1 and not call.attrs["training_mode"]:
        raise InvalidInput("BatchNormalization gives statistics only with training_mode=1")
    return (x, call.type(3), call.type(4))[: call.outputs]


def _batch_norm_kernel(
    x: Any, scale: Any, bias: Any, mean: Any, var: Any, *,
    epsilon: float, momentum: float, training_mode: int,
) -> Any:  # fmt: skip
    """Normalize by the batch in training mode, and blend its mean and biased variance."""
    axes = (0, *range(2, x.ndim))
    shape = (-1, *[1] * (x.ndim - 2))
    used_mean, used_var = (x.mean(axes), x.var(axes)) if training_mode else (mean, var)
    y = (x - used_mean.reshape(shape)) / np.sqrt(used_var.reshape(shape) + epsilon)
    y = y * scale.reshape(shape) + bias.reshape(shape)
    if not training_mode:
        return y
    blend = [momentum * a + (1 - momentum) * b for a, b in ((mean, used_mean), (var, used_var))]
    return y, *blend


def _batch_norm_xla(
    k: XlaContext, x: Any, scale: Any, bias: Any, mean: Any, var: Any, *,
    epsilon: float, momentum: float, training_mode: int,
) -> Any:  # fmt: skip
    axes = (0, *range(2, x.ndim))
    shape = (-1, *[1] * (x.ndim - 2))
    used_mean, used_var = (x.mean(axes), x.var(axes)) if training_mode else (mean, var)
    slope = scale / k.np.sqrt(used_var + epsilon)
    y = (x - used_mean.reshape(shape)) * slope.reshape(shape) + bias.reshape(shape)
    if not training_mode:
        return y
    blend = [momentum * a + (1 - momentum) * b for a, b in ((mean, used_mean), (var, used_var))]
    return (y, *blend)[: len(k.node.outputs)]


def _channels(v: Tensor, rank: int) -> Tensor:
    return v.reshape((v.shape[0], *[1] * (rank - 2)))


def _batch_norm_vjp(  # noqa: PLR0917 - the operator's own operands
    g: Any, y: Any, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
    *, epsilon: float, momentum: float, training_mode: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """In training dx = a g + b x + c per channel; cotangents of the statistics add to it."""
    gs, ys = (g, y) if isinstance(g, tuple) else ((g,), (y,))
    if not training_mode:
        return _inference_vjp(gs[0], x, scale, mean, var, epsilon)
    axes = [0, *range(2, x.rank)]
    count = size_of([x.shape[a] for a in axes], x.dtype)
    batch_mean, batch_var = _batch_statistics(x, ys, axes, momentum)
    rstd = reciprocal(sqrt(batch_var + as_like(epsilon, x)))
    dx: Tensor | None = None
    d_scale = d_bias = None
    # With z = (x - mean) rstd: d_scale = sum(g z), and dx = scale rstd (g - mean(g) - z mean(g z)).
    # As a g + b x + c it takes fewer passes over the planes.
    if gs[0] is not None:
        s1 = gs[0].sum(axes)
        d_scale = rstd * ((gs[0] * x).sum(axes) - batch_mean * s1)
        d_bias = s1
        a = scale * rstd
        b = -(a * rstd * d_scale) / count
        c = -(a * s1) / count - b * batch_mean
        dx = _affine(gs[0], a, c) + _affine(x, b, None)
    dx = _add_statistics(dx, gs, x, batch_mean, count, 1.0 - momentum)
    # new = momentum old + (1 - momentum) batch, so the old statistics get momentum times the
    # cotangent.
    kept = [None if k is None else k * momentum for k in (*gs[1:], None, None)][:2]
    return dx, d_scale, d_bias, *kept


def _batch_statistics(
    x: Tensor, ys: Any, axes: list[int], momentum: float
) -> tuple[Tensor, Tensor]:
    # With momentum 0 the outputs are the batch's statistics themselves.
    if len(ys) == 3 and momentum == 0.0:
        return ys[1], ys[2]
    mean = x.mean(axes, keepdims=True)
    centred = x - mean
    return mean.reshape((x.shape[1],)), (centred * centred).mean(axes)


def _add_statistics(
    dx: Tensor | None, gs: Any, x: Tensor, mean: Tensor, count: Any, share: float
) -> Tensor | None:
    """Add cotangents of the mean and variance outputs: 1/M and 2 (x - mean) / M per element."""
    terms = [] if dx is None else [dx]
    if len(gs) > 1 and gs[1] is not None:
        terms.append(x * 0.0 + _channels(gs[1] * share / count, x.rank))
    if len(gs) > 2 and gs[2] is not None:
        slope = _channels(gs[2] * (2.0 * share) / count, x.rank)
        terms.append((x - _channels(mean, x.rank)) * slope)
    return sum(terms[1:], terms[0]) if terms else None


def _inference_vjp(
    g: Tensor, x: Tensor, scale: Tensor, mean: Tensor, var: Tensor, epsilon: float
) -> tuple[Tensor, ...]:
    axes = [0, *range(2, x.rank)]
    rstd = reciprocal(sqrt(var + as_like(epsilon, x)))
    s1 = g.sum(axes)
    dot = (g * (x - _channels(mean, x.rank))).sum(axes)
    # y = (x - mean) rstd scale + bias, rstd = (var + eps)^(-1/2): dy/dmean = -rstd scale and
    # dy/dvar = -(x - mean) scale rstd^3 / 2.
    d_mean = -(s1 * scale * rstd)
    d_var = -0.5 * dot * scale * rstd * rstd * rstd
    return _affine(g, scale * rstd, None), dot * rstd, s1, d_mean, d_var


def _affine(x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Compute x scale + shift per channel; scale, shift: (C,).

    BatchNormalization by a mean of 0 and a variance of 1 does this in one pass; broadcasting
    products over small planes take up to ten times as long.
    """
    channels = scale.shape[0]
    if not isinstance(channels, int):
        y = x * _channels(scale, x.rank)
        return y if shift is None else y + _channels(shift, x.rank)
    zeros = x.build.as_operand(np.zeros(channels), x.dtype)
    ones = x.build.as_operand(np.ones(channels), x.dtype)
    shift = zeros if shift is None else shift
    return batch_norm_row(x, scale, shift, zeros, ones, epsilon=0.0)


_vectors = (between(0.5, 2, 3), normal(3), normal(3), between(0.5, 2, 3))


def _emit_batch_norm(context: EmissionContext, node: Node) -> None:
    """Give each node in training mode its own mean and variance: onnxruntime writes into them.

    Each scratch vector is the scale times a different constant, so that neither sharing of
    constants nor elimination of common subexpressions makes two nodes write to one buffer. The
    blend with the running statistics is emitted as operators.
    """
    if not node.attrs.get("training_mode"):
        context.plain(node)
        return
    dtype = node.inputs[1].type.dtype.numpy  # type: ignore[union-attr]
    normalize = _by_moments if context.target.device == "cuda" else _in_training_mode
    names = normalize(context, node)
    momentum = node.attrs.get("momentum", 0.9)
    if momentum != 0.0:
        pairs = zip(context.inputs(node)[3:], names[1:], strict=True)
        names[1:] = [_blend(context, old, new, momentum, dtype) for old, new in pairs]
    for value, name in zip(node.outputs, names, strict=False):
        context.names[value] = name


def _in_training_mode(context: EmissionContext, node: Node) -> list[str]:
    """Emit onnxruntime's own training mode; return the names of result, mean and variance."""
    x, scale, bias, *_ = context.inputs(node)
    dtype = node.inputs[1].type.dtype.numpy  # type: ignore[union-attr]
    scratch = []
    for k in (1, 2):
        factor = np.array(2 * len(context.nodes) + k, dtype)
        scratch.append(context.emit("Mul", scale, context.constant(factor)))
    names = [context.fresh() for _ in range(3)]
    attrs = {"training_mode": 1, "momentum": 0.0, "epsilon": node.attrs.get("epsilon", 1e-5)}
    context.add("BatchNormalization", [x, scale, bias, *scratch], list(names), **attrs)
    return names


def _by_moments(context: EmissionContext, node: Node) -> list[str]:
    """Emit the moments as means, and the normalization as in inference.

    onnxruntime 1.31 has no CUDA kernel for the training mode of opset 14.
    """
    x, scale, bias, *_ = context.inputs(node)
    mean = _channel_mean(context, node, x)
    centred = context.emit("Sub", x, mean)
    moments = [mean, _channel_mean(context, node, context.emit("Mul", centred, centred))]
    per_channel = context.constant(np.array([-1]))
    flat = [context.emit("Reshape", name, per_channel) for name in moments]
    epsilon = node.attrs.get("epsilon", 1e-5)
    return [context.emit("BatchNormalization", x, scale, bias, *flat, epsilon=epsilon), *flat]


def _channel_mean(context: EmissionContext, node: Node, x: str) -> str:
    """Emit the mean of each channel, of the shape (1, C, 1, ...)."""
    axes = [0, *range(2, node.inputs[0].type.rank)]  # type: ignore[union-attr]
    if context.target.opset < 18:
        return context.emit("ReduceMean", x, axes=axes, keepdims=1)
    return context.emit("ReduceMean", x, context.constant(np.array(axes)), keepdims=1)


def _blend(context: EmissionContext, old: str, new: str, momentum: Any, dtype: Any) -> str:
    kept = context.emit("Mul", old, context.constant(np.array(momentum, dtype)))
    added = context.emit("Mul", new, context.constant(np.array(1 - momentum, dtype)))
    return context.emit("Add", kept, added)


batch_norm_row = Op(
    name="BatchNormalization",
    kind=OpKind.NORMALIZATION,
    weights=(1, 2),
    buffers=(3, 4),
    emit=_emit_batch_norm,
    infer=_batch_norm,
    reference=_batch_norm_kernel,
    xla=_batch_norm_xla,
    vjp=_batch_norm_vjp,
    samples=(
        sample(normal(4, 3, 2, 2), *_vectors),
        sample(normal(4, 3), *_vectors),
        sample(
            normal(4, 3, 2, 2), *_vectors, outputs=3, training_mode=1, momentum=0.0,
            smooth=(0, 1, 2),
        ),
        sample(normal(5, 3, 2), *_vectors, outputs=3, training_mode=1, momentum=0.25),
    ),
)  # fmt: skip


def widened(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is narrower: statistics in half precision overflow."""
    return x.cast(float32) if x.dtype.numpy.itemsize < 4 else x


def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *,
    axis: int, epsilon: float, stash_type: int,
) -> list[Tensor]:  # fmt: skip
    """y = (x - mean) / sqrt(var + eps) * scale + bias over the axes from `axis` on (Ba 2016)."""
    axes = [*range(axis % x.rank, x.rank)]
    wide = widened(x)
    mean = wide.mean(axes, keepdims=True)
    centred = wide - mean
    var = (centred * centred).mean(axes, keepdims=True)
    rstd = reciprocal(sqrt(var + as_like(epsilon, wide)))
    y = (centred * rstd).cast(x.dtype) * scale
    return [y if bias is None else y + bias, mean, rstd]


def _layer_norm_vjp_with_residuals(
    inputs: Sequence[Any], attrs: Mapping[str, Any], regions: Any, outputs: int, *, vjp_of: Any
) -> Any:
    """Keep the node's statistics, so that the gradient does not compute them again."""
    ys = layer_norm_row.all_outputs(*inputs, outputs=3, **attrs)
    x, scale, bias = (*inputs, None)[:3]
    _, mean, rstd = ys

    def pull(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        axes = [*range(attrs.get("axis", -1) % x.rank, x.rank)]
        count = size_of([x.shape[a] for a in axes], rstd.dtype)
        y_hat = (widened(x) - mean) * rstd
        g, g_mean, g_rstd = (*gs, None, None)[:3]
        terms, d_scale, d_bias = [], None, None
        if g is not None:
            # h = g scale: dx = rstd (h - mean(h) - y_hat mean(h y_hat)).
            inner = widened(g * scale)
            along = (inner * y_hat).mean(axes, keepdims=True)
            terms.append(rstd * (inner - inner.mean(axes, keepdims=True) - y_hat * along))
            d_scale = sum_to(g * y_hat.cast(g.dtype), scale)
            d_bias = None if bias is None else sum_to(g, bias)
        if g_mean is not None:
            # dmean/dx_i = 1 / M
            terms.append(broadcast_to(g_mean / count, x.shape))
        if g_rstd is not None:
            # drstd/dx_i = -rstd^2 y_hat_i / M
            terms.append(-(y_hat * (g_rstd * rstd * rstd / count)))
        dx = sum(terms[1:], terms[0]).cast(x.dtype) if terms else None
        return [dx, d_scale, d_bias][: len(inputs)]

    return ys[:outputs], pull


def in_single(node: Node, opset: int) -> bool:
    """Exclude float64: ONNX's operator computes statistics in float32 for any operand."""
    return node.outputs[0].type.dtype != float64


layer_norm_row = Op(
    name="LayerNormalization",
    kind=OpKind.NORMALIZATION,
    weights=(1, 2),
    body=_layer_norm,
    vjp_with_residuals=_layer_norm_vjp_with_residuals,
    native=in_single,
    samples=(
        sample(normal(2, 3, 4), between(0.5, 2, 4), normal(4)),
        sample(normal(2, 3, 4), between(0.5, 2, 3, 4), axis=1),
        sample(normal(2, 3, 4), between(0.5, 2, 4), normal(4), outputs=3, epsilon=0.1),
    ),
)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Layer normalization over the last axis; x: (..., D), scale and bias: (D,)."""
    return layer_norm_row(x, scale, bias, epsilon=epsilon)


def batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5
) -> Tensor:
    """Normalize x: (N, C, ...) by statistics: (x - mean) / sqrt(var + epsilon) scale + bias.

    mean, var, scale, bias: (C,). `nn.BatchNorm2d` maintains running statistics.
    """
    return batch_norm_row(x, scale, bias, mean, var, epsilon=epsilon)


def batch_norm_training(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize x: (N, C, ...) by its own mean and biased variance, (C,), and return all three."""
    y, mean, var = batch_norm_row.all_outputs(
        x, scale, bias, scale, bias, outputs=3, training_mode=1, momentum=0.0, epsilon=epsilon
    )
    return y, mean, var

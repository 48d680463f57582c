"""Normalization within each sample: groups, instances, vectors, neighbouring channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, product
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.row import Op, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    abs_,
    as_like,
    power,
    reciprocal,
    sqrt,
)
from triplane.unified_ir.ops.rows.arithmetic.norm import in_single, layer_norm_row, widened
from triplane.unified_ir.ops.rows.movement.structure import ones, where
from triplane.unified_ir.ops.rows.windows.mean_pool import average_pool_row
from triplane.unified_ir.ops.samples import apart, between, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, root


def _per_channel(y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    shape = (y.shape[1], *[1] * (y.rank - 2))
    return y * scale.reshape(shape) + bias.reshape(shape)


def _standardized(x: Tensor, groups: Dim, epsilon: float) -> Tensor:
    """Normalize each group of channels and their planes, by LayerNormalization."""
    if x.rank < 3:
        raise ShapeError(f"a normalization of planes takes x: (N, C, ...), got {x.type}")
    size = product(list(x.shape[1:])) // groups
    # Groups are consecutive channels, so a group and its planes are one contiguous row.
    flat = x.reshape((x.shape[0], groups, size))
    return layer_norm_row(flat, ones((size,), x.dtype), epsilon=epsilon).reshape(x.shape)


def _group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float, stash_type: int
) -> Tensor:
    channels = x.shape[1] if x.rank > 1 else 0
    if num_groups < 1 or not isinstance(channels, int) or channels % num_groups:
        raise ShapeError(f"GroupNormalization of {x.type} needs groups that divide its channels")
    return _per_channel(_standardized(x, num_groups, epsilon), scale, bias)


def _group_kernel(
    x: Any, scale: Any, bias: Any, *, num_groups: int, epsilon: float, stash_type: int
) -> Any:
    flat = x.reshape(x.shape[0], num_groups, -1)
    away = flat - flat.mean(-1, keepdims=True)
    y = (away / np.sqrt((away * away).mean(-1, keepdims=True) + epsilon)).reshape(x.shape)
    shape = (-1, *[1] * (x.ndim - 2))
    return (y * scale.reshape(shape) + bias.reshape(shape)).astype(x.dtype)


group_norm_row = Op(
    name="GroupNormalization",
    kind=OpKind.NORMALIZATION,
    weights=(1, 2),
    reference=_group_kernel,
    body=_group_norm,
    native=lambda node, opset: False,
    samples=(
        sample(normal(2, 4, 3, 2), between(0.5, 2, 4), normal(4), num_groups=2),
        sample(normal(2, 3, 4), between(0.5, 2, 3), normal(3), num_groups=1, epsilon=0.1),
    ),
)
"""Its body is emitted: opset 18 scales by group, onnxruntime's form of later opsets cancels."""

instance_norm_row = Op(
    name="InstanceNormalization",
    kind=OpKind.NORMALIZATION,
    weights=(1, 2),
    body=lambda x, scale, bias, *, epsilon: _per_channel(
        _standardized(x, x.shape[1], epsilon), scale, bias
    ),
    samples=(
        sample(normal(2, 3, 4, 2), between(0.5, 2, 3), normal(3)),
        sample(normal(2, 3, 5), between(0.5, 2, 3), normal(3), epsilon=0.1),
    ),
)


def _rms_norm(x: Tensor, scale: Tensor, *, axis: int, epsilon: float, stash_type: int) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * scale over `axis` and the axes after it (Zhang 2019)."""
    wide = widened(x)
    square = (wide * wide).mean([*range(axis % x.rank, x.rank)], keepdims=True)
    return (wide * reciprocal(sqrt(square + as_like(epsilon, wide)))).cast(x.dtype) * scale


rms_norm_row = Op(
    name="RMSNormalization",
    kind=OpKind.NORMALIZATION,
    weights=(1,),
    body=_rms_norm,
    native=in_single,
    samples=(
        sample(normal(2, 3, 4), between(0.5, 2, 4)),
        sample(normal(2, 3, 4), between(0.5, 2, 3, 4), axis=1, epsilon=0.1),
    ),
)


def _lp_normalization(x: Tensor, *, axis: int, p: int) -> Tensor:
    """x / ||x||_p along `axis`; a vector of zeros is divided by 1."""
    if p not in (1, 2):
        raise InvalidInput(f"LpNormalization needs p = 1 or 2, got {p}")
    total = (abs_(x) if p == 1 else x * x).sum([axis], keepdims=True)
    safe = where(total == 0.0, 1.0, total)
    return x / (safe if p == 1 else sqrt(safe))


lp_normalization = Op(
    name="LpNormalization",
    kind=OpKind.NORMALIZATION,
    body=_lp_normalization,
    samples=(
        sample(normal(2, 3, 4)),
        sample(apart(2, 3, 4), axis=1, p=1),
        sample(lambda rng: rng.standard_normal((2, 3)) * [[1.0], [0.0]], smooth=()),
    ),
)


def _mean_variance(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """(x - mean) / (sqrt(var) + 1e-9) over `axes`."""
    centred = x - x.mean(axes, keepdims=True)
    deviation = root((centred * centred).mean(axes, keepdims=True))
    return centred / (deviation + as_like(1e-9, x))


mean_variance_normalization = Op(
    name="MeanVarianceNormalization",
    kind=OpKind.NORMALIZATION,
    body=_mean_variance,
    samples=(sample(normal(2, 3, 2, 2)), sample(normal(2, 3, 4), axes=(1, 2))),
)


def _lrn(x: Tensor, *, alpha: float, beta: float, bias: float, size: int) -> Tensor:
    """x / (bias + alpha / size * sum of squares of `size` neighbouring channels)^beta."""
    if x.rank < 2 or size < 1:
        raise ShapeError(f"LRN takes x: (N, C, ...) and a size of at least 1, got {x.type}, {size}")
    n, c, *spatial = x.shape
    planes = (x * x).reshape((n, 1, c, product(spatial)))
    before = (size - 1) // 2
    mean = average_pool_row(
        planes, kernel_shape=(size, 1), pads=(before, 0, size - 1 - before, 0), count_include_pad=1
    )
    base = mean.reshape(x.shape) * alpha + as_like(bias, x)
    return x / power(base, as_like(beta, x))


def _lrn_native(node: Node, opset: int) -> bool:
    """Exclude what onnxruntime's kernel lacks: it takes only images and centred windows."""
    return int(node.attrs["size"]) % 2 == 1 and node.outputs[0].type.rank == 4  # type: ignore[arg-type]


lrn = Op(
    name="LRN",
    kind=OpKind.NORMALIZATION,
    body=_lrn,
    native=_lrn_native,
    samples=(
        sample(normal(2, 5, 2, 3), size=3, alpha=0.5),
        sample(normal(2, 5, 4), size=4, alpha=0.2, beta=0.5, bias=2.0),
    ),
)


def group_norm(
    x: Tensor, groups: int, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5
) -> Tensor:
    """Normalize `groups` groups of channels of x: (N, C, ...); scale, bias: (C,) (Wu 2018)."""
    return group_norm_row(x, scale, bias, num_groups=groups, epsilon=epsilon)


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalize each channel of each sample of x: (N, C, ...); scale, bias: (C,) (Ulyanov 2016)."""
    return instance_norm_row(x, scale, bias, epsilon=epsilon)


def rms_norm(x: Tensor, scale: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Divide x: (..., *scale.shape) by its root mean square over the axes of `scale`; scale it."""
    return rms_norm_row(x, scale, axis=-scale.rank, epsilon=epsilon)


def local_response_norm(
    x: Tensor, size: int, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    """Divide x: (N, C, ...) by (bias + alpha * mean square of `size` channels around)^beta."""
    return lrn(x, size=size, alpha=alpha, beta=beta, bias=bias)

"""Normalization layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.ir.dims import Dim, product
from triplane.unified_ir.nn.sizes import check_axis, positive
from triplane.unified_ir.nn.state import Buffer, State
from triplane.unified_ir.ops.rows.arithmetic.norm import batch_norm_row
from triplane.unified_ir.ops.tensor import dims_of


class _Affine(Cell):
    """A weight of ones and a bias of zeros."""

    weight: State
    bias: State

    def __init__(self, *shape: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = Parameter(np.ones(shape, np.float32))
        self.bias = Parameter(np.zeros(shape, np.float32))

    def _check_plane(self, x: ops.Tensor, takes: str, ranks: Sequence[int]) -> None:
        """Check x against shapes such as "(N, C, H, W)", where C stands for the channels."""
        channels = self.weight.shape[0]
        name = f"{type(self).__name__}({channels})"
        check_axis(name, takes.replace("C", str(channels)), x, 1, channels, ranks)


class _BatchNorm(_Affine):
    """weight, bias, running_mean, running_var: (C,), as PyTorch names them.

    y = (x - mean) / sqrt(var + epsilon) weight + bias per channel (Ioffe and Szegedy 2015). In
    training mean and var are the batch's, var biased, and the running statistics move towards them:
    r <- (1 - momentum) r + momentum s, with the unbiased variance (times M / (M - 1) over M
    elements per channel, unchanged for M = 1). In evaluation they are the running statistics.
    track_running_stats: without them, mean and var are the batch's in evaluation too, so the result
    for a sample depends on the others of its batch.
    """

    ranks: ClassVar[tuple[int, ...]]
    shapes: ClassVar[str]
    running_mean: State
    running_var: State

    def __init__(
        self,
        channels: int,
        *,
        momentum: float = 0.1,
        epsilon: float = 1e-5,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(*positive(type(self).__name__, channels=channels), epsilon=epsilon)
        if not 0.0 <= momentum <= 1.0:
            raise InvalidInput(f"momentum must be in [0, 1], got {momentum}")
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        tracked = track_running_stats
        self.running_mean = Buffer(np.zeros(channels, np.float32)) if tracked else None
        self.running_var = Buffer(np.ones(channels, np.float32)) if tracked else None

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, ...) -> the same shape."""
        self._check_plane(x, self.shapes, self.ranks)
        if not self.track_running_stats:
            return self._by_batch(x)
        mean, var = self.running_mean, self.running_var
        if not self.training:
            return batch_norm_row(x, self.weight, self.bias, mean, var, epsilon=self.epsilon)
        y, self.running_mean, self.running_var = batch_norm_step(
            x, self.weight, self.bias, mean, var, momentum=self.momentum, epsilon=self.epsilon
        )
        return y

    def _by_batch(self, x: ops.Tensor) -> ops.Tensor:
        """Return x normalized by its own statistics in both modes."""
        if self.training:
            channels, dtype = self.weight.shape[0], self.weight.dtype.numpy
            stats = np.zeros(channels, dtype), np.ones(channels, dtype)
            return batch_norm_row.all_outputs(
                x, self.weight, self.bias, *stats,
                outputs=3, training_mode=1, momentum=0.0, epsilon=self.epsilon,
            )[0]  # fmt: skip
        # In operators: other runtimes refuse the node in training mode.
        axes, own = [0, *range(2, x.rank)], (-1, *[1] * (x.rank - 2))
        centred = x - x.mean(axes, keepdims=True)
        var = (centred * centred).mean(axes, keepdims=True)
        y = centred / ops.sqrt(var + self.epsilon)
        return y * self.weight.reshape(own) + self.bias.reshape(own)


def batch_norm_step(
    x: ops.Tensor,
    weight: ops.Tensor,
    bias: ops.Tensor,
    mean: ops.Tensor,
    var: ops.Tensor,
    *,
    momentum: float,
    epsilon: float,
) -> tuple[ops.Tensor, ops.Tensor, ops.Tensor]:
    """Return x: (N, C, ...) normalized by its own statistics, and the next running statistics."""
    # ONNX's running statistics are m r + (1 - m) s with the biased variance. With m = 0 the node
    # gives the statistics s of the batch, and the running ones are computed here with the unbiased
    # variance, as PyTorch does.
    y, batch_mean, batch_var = batch_norm_row.all_outputs(
        x, weight, bias, mean, var,
        outputs=3, training_mode=1, momentum=0.0, epsilon=epsilon,
    )  # fmt: skip
    kept = 1.0 - momentum
    count = product([x.shape[0], *x.shape[2:]])
    moved = mean * kept + batch_mean * momentum
    return y, moved, var * kept + batch_var * _unbiased(count, momentum)


def _unbiased(count: Dim, momentum: float) -> ops.Tensor | float:
    """Return momentum M / (M - 1), or momentum for M = 1, where no variance is estimated."""
    if isinstance(count, int):
        return momentum * count / max(count - 1, 1)
    # A symbolic batch: M is known only when the graph runs.
    m = dims_of([count]).reshape(()).cast("float32")
    return m * momentum / ops.maximum(m - 1.0, 1.0)


class BatchNorm1d(_BatchNorm):
    """Batch normalization of x: (N, C) or (N, C, L); see `BatchNorm2d`."""

    ranks = (2, 3)
    shapes = "(N, C) or (N, C, L)"


class BatchNorm2d(_BatchNorm):
    """Batch normalization of x: (N, C, H, W); weight, bias, running_mean, running_var: (C,).

    y = (x - mean) / sqrt(var + epsilon) weight + bias per channel (Ioffe and Szegedy 2015). In
    training mean and var are the batch's, var biased, and the running statistics move towards them:
    r <- (1 - momentum) r + momentum s, with the unbiased variance (times M / (M - 1) over M
    elements per channel, unchanged for M = 1). In evaluation they are the running statistics.
    track_running_stats: without them, mean and var are the batch's in evaluation too, so the result
    for a sample depends on the others of its batch.
    """

    ranks = (4,)
    shapes = "(N, C, H, W)"


class BatchNorm3d(_BatchNorm):
    """Batch normalization of x: (N, C, D, H, W); see `BatchNorm2d`."""

    ranks = (5,)
    shapes = "(N, C, D, H, W)"


class GroupNorm(_Affine):
    """Normalizes each of `groups` consecutive groups of channels of a sample (Wu and He 2018).

    weight, bias: (C,). The variance is the biased one over the channels of a group and their plane.
    """

    def __init__(self, groups: int, channels: int, *, epsilon: float = 1e-5) -> None:
        positive("GroupNorm", groups=groups, channels=channels)
        if channels % groups:
            raise InvalidInput(
                f"GroupNorm needs groups to divide channels, got {groups}, {channels}"
            )
        super().__init__(channels, epsilon=epsilon)
        self.groups = groups

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, ...), at least 3 axes -> the same shape."""
        channels = self.weight.shape[0]
        check_axis(f"GroupNorm({self.groups}, {channels})", f"(N, {channels}, ...)", x, 1, channels)
        return ops.group_norm(x, self.groups, self.weight, self.bias, epsilon=self.epsilon)


class _InstanceNorm(_Affine):
    """weight, bias: (C,); as PyTorch's with affine=True and without running statistics."""

    rank: ClassVar[int]
    shape: ClassVar[str]

    def __init__(self, channels: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(*positive(type(self).__name__, channels=channels), epsilon=epsilon)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, ...) -> the same shape."""
        self._check_plane(x, self.shape, [self.rank])
        return ops.instance_norm(x, self.weight, self.bias, epsilon=self.epsilon)


class InstanceNorm1d(_InstanceNorm):
    """Instance normalization of x: (N, C, L); see `InstanceNorm2d`."""

    rank, shape = 3, "(N, C, L)"


class InstanceNorm2d(_InstanceNorm):
    """Normalizes each channel of each sample of x: (N, C, H, W) (Ulyanov 2016).

    weight, bias: (C,); as PyTorch's with affine=True and without running statistics.
    """

    rank, shape = 4, "(N, C, H, W)"


class InstanceNorm3d(_InstanceNorm):
    """Instance normalization of x: (N, C, D, H, W); see `InstanceNorm2d`."""

    rank, shape = 5, "(N, C, D, H, W)"


class RMSNorm(Cell):
    """Divides the last axes by their root mean square (Zhang and Sennrich 2019); weight: sizes."""

    weight: State

    def __init__(self, *sizes: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        shape = positive("RMSNorm", **{f"sizes[{i}]": n for i, n in enumerate(sizes)})
        if not shape:
            raise InvalidInput("RMSNorm takes at least one size")
        self.epsilon = epsilon
        self.weight = Parameter(np.ones(shape, np.float32))

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (..., *sizes) -> the same shape."""
        sizes = self.weight.shape
        for i, size in enumerate(sizes):
            takes = f"(..., {', '.join(map(str, sizes))})"
            check_axis("RMSNorm", takes, x, i - len(sizes), size)
        return ops.rms_norm(x, self.weight, epsilon=self.epsilon)


class LayerNorm(_Affine):
    """Normalizes the last axis (Ba et al. 2016); weight, bias: (size,)."""

    def __init__(self, size: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(*positive("LayerNorm", size=size), epsilon=epsilon)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (..., size) -> the same shape."""
        return ops.layer_norm(x, self.weight, self.bias, epsilon=self.epsilon)

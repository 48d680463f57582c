"""Convolution and pooling layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.nn.init import WEIGHT, Initializer, bias_of
from triplane.unified_ir.nn.random import generator
from triplane.unified_ir.nn.sizes import check_axis, check_rank, positive
from triplane.unified_ir.nn.state import State

Sizes = int | Sequence[int]
_AXES: Final = {1: "L", 2: "H, W"}


class _Conv(Cell):
    """weight: (outputs, inputs / groups, *kernel), bias: (outputs,).

    `padding`: an amount for every side, one per axis, "same" (ceil(size / stride) positions, an
    odd element goes after) or "valid". Weight and bias start uniform within 1 / sqrt(fan_in).
    """

    axes: ClassVar[int]
    weight: State
    bias: State

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: Sizes,
        *,
        stride: Sizes = 1,
        padding: str | Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        init: Initializer = WEIGHT,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        positive(name, inputs=inputs, outputs=outputs, groups=groups)
        if inputs % groups or outputs % groups:
            raise InvalidInput(
                f"{name} needs groups to divide inputs and outputs, got {groups} groups for "
                f"{inputs} and {outputs} channels"
            )
        taps = self._taps(kernel)
        shape = (outputs, inputs // groups, *taps)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.inputs, self.groups = inputs, groups
        self.weight = Parameter(init(shape, generator(rng)))
        self.bias = Parameter(bias_of(shape)(shape[:1], generator(rng))) if bias else None

    def _taps(self, kernel: Sizes) -> tuple[int, ...]:
        taps = (kernel,) * self.axes if isinstance(kernel, int) else tuple(kernel)
        if len(taps) != self.axes:
            raise InvalidInput(
                f"{type(self).__name__} takes a kernel of {self.axes} sizes, got {kernel}"
            )
        return positive(type(self).__name__, **{f"kernel[{i}]": k for i, k in enumerate(taps)})

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs, *S) -> (N, outputs, *T)."""
        name = f"{type(self).__name__}({self.inputs}, {self.weight.shape[0]}, ...)"
        takes = f"(N, {self.inputs}, {_AXES[self.axes]})"
        check_rank(name, takes, x, self.axes + 2)
        check_axis(name, takes, x, 1, self.inputs)
        return ops.conv(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )


class Conv1d(_Conv):
    """Convolution over x: (N, C, L); see `Conv2d` for the arguments."""

    axes = 1


class Conv2d(_Conv):
    """Convolution over x: (N, C, H, W); weight: (outputs, inputs / groups, kh, kw).

    `padding`: an amount for every side, one per axis, "same" (ceil(size / stride) positions, an
    odd element goes after) or "valid". Weight and bias start uniform within 1 / sqrt(fan_in).
    """

    axes = 2


class _Pool2d(Cell):
    def __init__(self, kernel: Sizes, *, stride: Sizes | None = None, padding: Sizes = 0) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding


class MaxPool2d(_Pool2d):
    """Maximum of each window; the stride defaults to the window."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W)."""
        return ops.max_pool(x, self.kernel, stride=self.stride, padding=self.padding)


class AvgPool2d(_Pool2d):
    """Mean of each window over what lies inside x; the stride defaults to the window."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W)."""
        return ops.avg_pool(x, self.kernel, stride=self.stride, padding=self.padding)

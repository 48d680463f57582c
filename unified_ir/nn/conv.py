"""Convolution layers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.nn.init import WEIGHT, Initializer, bias_of
from triplane.unified_ir.nn.random import generator
from triplane.unified_ir.nn.sizes import AXES, Sizes, check_axis, options_of, positive, shape_error
from triplane.unified_ir.nn.state import State
from triplane.unified_ir.ops.rows.windows.convolution import PADDINGS


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
        stride: Sizes = 1,
        padding: str | Sizes = 0,
        *,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        init: Initializer = WEIGHT,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        _check_groups(name, inputs, outputs, groups)
        if isinstance(padding, str):
            check_choice(f"padding of {name} that is no number", padding, PADDINGS)
        shape = (outputs, inputs // groups, *_taps(name, self.axes, kernel))
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.inputs, self.groups = inputs, groups
        self.weight = Parameter(init(shape, generator(rng)))
        self.bias = Parameter(bias_of(shape)(shape[:1], generator(rng))) if bias else None

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs, *S) -> (N, outputs, *T)."""
        name = f"{type(self).__name__}({self.inputs}, {self.weight.shape[0]}, ...)"
        _check_plane(name, self.axes, self.inputs, x)
        options = options_of(self, "stride", "padding", "dilation", "groups")
        return ops.conv(x, self.weight, self.bias, **options)


class Conv1d(_Conv):
    """Convolution over x: (N, C, L); see `Conv2d` for the arguments."""

    axes = 1


class Conv2d(_Conv):
    """Convolution over x: (N, C, H, W); weight: (outputs, inputs / groups, kh, kw).

    `padding`: an amount for every side, one per axis, "same" (ceil(size / stride) positions, an
    odd element goes after) or "valid". Weight and bias start uniform within 1 / sqrt(fan_in).
    """

    axes = 2


class Conv3d(_Conv):
    """Convolution over x: (N, C, D, H, W); see `Conv2d` for the arguments."""

    axes = 3


class _ConvTranspose(Cell):
    """weight: (inputs, outputs / groups, *kernel), bias: (outputs,), as PyTorch lays them out."""

    axes: ClassVar[int]
    weight: State
    bias: State

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        *,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        init: Initializer = WEIGHT,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        _check_groups(name, inputs, outputs, groups)
        shape = (inputs, outputs // groups, *_taps(name, self.axes, kernel))
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.output_padding, self.inputs, self.groups = output_padding, inputs, groups
        self.weight = Parameter(init(shape, generator(rng)))
        # `bias_of` reads the fan from axis 1 of the weight, here outputs / groups. That is not the
        # true fan_in of a transposed convolution, but it is what PyTorch does.
        self.bias = Parameter(bias_of(shape)((outputs,), generator(rng))) if bias else None

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs, *S) -> (N, outputs, *T)."""
        _check_plane(type(self).__name__, self.axes, self.inputs, x)
        options = options_of(self, "stride", "padding", "output_padding", "dilation", "groups")
        return ops.conv_transpose(x, self.weight, self.bias, **options)


def _check_groups(name: str, inputs: int, outputs: int, groups: int) -> None:
    positive(name, inputs=inputs, outputs=outputs, groups=groups)
    if inputs % groups or outputs % groups:
        raise InvalidInput(
            f"{name} needs groups to divide inputs and outputs, got {groups} groups for {inputs} "
            f"and {outputs} channels"
        )


def _taps(name: str, axes: int, kernel: Sizes) -> tuple[int, ...]:
    taps = (kernel,) * axes if isinstance(kernel, int) else tuple(kernel)
    if len(taps) != axes:
        raise InvalidInput(f"{name} takes a kernel with {axes} sizes, got {kernel}")
    return positive(name, **{f"kernel[{i}]": k for i, k in enumerate(taps)})


def _check_plane(layer: str, axes: int, inputs: int, x: ops.Tensor) -> None:
    takes = f"(N, {inputs}, {AXES[axes]})"
    if axes > 1 and x.rank == axes + 1 and x.shape[1] == inputs:
        flatter = layer.partition("(")[0].replace(f"{axes}d", f"{axes - 1}d")
        hint = f"; {flatter} takes x: (N, {inputs}, {AXES[axes - 1]})"
        raise shape_error(layer, takes, x, hint)
    check_axis(layer, takes, x, 1, inputs, [axes + 2])


class ConvTranspose1d(_ConvTranspose):
    """The adjoint of `Conv1d` over x: (N, C, L); see `ConvTranspose2d`."""

    axes = 1


class ConvTranspose2d(_ConvTranspose):
    """The adjoint of `Conv2d` over x: (N, C, H, W); weight: (inputs, outputs / groups, kh, kw).

    Sizes become (S - 1) stride - 2 padding + dilation (kernel - 1) + 1 + output_padding. Weight
    and bias start uniform within 1 / sqrt(outputs / groups * kh * kw), as in PyTorch.
    """

    axes = 2


class ConvTranspose3d(_ConvTranspose):
    """The adjoint of `Conv3d` over x: (N, C, D, H, W); see `ConvTranspose2d`."""

    axes = 3

"""Pooling and resizing layers: no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.nn.sizes import AXES, Sizes, check_rank, options_of
from triplane.unified_ir.ops.rows.movement.resizing import MODES


class _Windowed(Cell):
    """A cell over x: (N, C, *S) with a fixed number of spatial axes."""

    axes: ClassVar[int]

    def checked(self, x: ops.Tensor) -> ops.Tensor:
        """Return `x`; refuse another rank with the layer's name."""
        check_rank(type(self).__name__, f"(N, C, {AXES[self.axes]})", x, self.axes + 2)
        return x


class _MaxPool(_Windowed):
    def __init__(
        self,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        *,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.dilation, self.ceil_mode = dilation, ceil_mode

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, *S) -> (N, C, *T)."""
        options = options_of(self, "stride", "padding", "dilation", "ceil_mode")
        return ops.max_pool(self.checked(x), self.kernel, **options)


class MaxPool1d(_MaxPool):
    """Maximum of each window of x: (N, C, L); the stride defaults to the window."""

    axes = 1


class MaxPool2d(_MaxPool):
    """Maximum of each window of x: (N, C, H, W); the stride defaults to the window."""

    axes = 2


class MaxPool3d(_MaxPool):
    """Maximum of each window of x: (N, C, D, H, W); the stride defaults to the window."""

    axes = 3


class _AvgPool(_Windowed):
    def __init__(
        self,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        *,
        ceil_mode: bool = False,
        count_include_pad: bool = False,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, *S) -> (N, C, *T)."""
        options = options_of(self, "stride", "padding", "ceil_mode", "count_include_pad")
        return ops.avg_pool(self.checked(x), self.kernel, **options)


class AvgPool1d(_AvgPool):
    """Mean of each window of x: (N, C, L); see `AvgPool2d`."""

    axes = 1


class AvgPool2d(_AvgPool):
    """Mean of each window of x: (N, C, H, W), without padding; the stride defaults to the window.

    With `count_include_pad`, the default of PyTorch, padding counts as zeros.
    """

    axes = 2


class AvgPool3d(_AvgPool):
    """Mean of each window of x: (N, C, D, H, W); see `AvgPool2d`."""

    axes = 3


class _AdaptiveAvgPool(_Windowed):
    def __init__(self, size: int | Sequence[int | None]) -> None:
        super().__init__()
        self.size = size

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, *S) -> (N, C, *size)."""
        return ops.adaptive_avg_pool(self.checked(x), self.size)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Means of x: (N, C, L) to a given size; see `AdaptiveAvgPool2d`."""

    axes = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Means of x: (N, C, H, W) to a given size; output o covers oS//T to ceil((o+1)S/T)."""

    axes = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """Means of x: (N, C, D, H, W) to a given size; see `AdaptiveAvgPool2d`."""

    axes = 3


class Upsample(Cell):
    """x: (N, C, *S) resized to `size`, or by `scale`; modes as of `ops.resize`."""

    def __init__(
        self,
        size: Sequence[int] | None = None,
        *,
        scale: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        super().__init__()
        if (size is None) == (scale is None):
            raise InvalidInput(f"Upsample takes size or scale, got {size=} and {scale=}")
        check_choice("Upsample's mode", mode, MODES)
        self.size, self.scale = size, scale
        self.mode, self.align_corners = mode, align_corners

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, *S) -> (N, C, *T)."""
        return ops.resize(x, self.size, **options_of(self, "scale", "mode", "align_corners"))

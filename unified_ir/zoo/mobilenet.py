"""MobileNetV2 (Sandler et al. 2018): inverted residuals with linear bottlenecks."""

from __future__ import annotations

from typing import Final

from triplane.unified_ir import nn, ops

STAGES: Final = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
    (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""Table 2: expansion, channels, repeats, stride of the first."""
DIVISOR: Final = 8
LEAST_KEPT: Final = 0.9


def _channels(wanted: float) -> int:
    """Return the nearest multiple of 8 that is at least nine tenths of `wanted`."""
    rounded = max(DIVISOR, int(wanted + DIVISOR / 2) // DIVISOR * DIVISOR)
    # As in the reference implementation of MobileNet (make_divisible).
    return rounded if rounded >= LEAST_KEPT * wanted else rounded + DIVISOR


class _Normed(nn.Cell):
    """Convolution, normalization and, unless linear, min(max(x, 0), 6)."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int,
        *, stride: int = 1, groups: int = 1, linear: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(
            inputs, outputs, kernel,
            stride=stride, padding=kernel // 2, groups=groups, bias=False, init=nn.KaimingNormal(),
        )  # fmt: skip
        self.norm, self.linear = nn.BatchNorm2d(outputs), linear

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W)."""
        x = self.norm(self.conv(x))
        return x if self.linear else ops.relu6(x)


class InvertedResidual(nn.Cell):
    """Expansion, a convolution for each channel, projection to fewer channels; figure 3b."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        first = [_Normed(inputs, wide, 1)] if expansion > 1 else []
        self.path = nn.Sequential(
            *first,
            _Normed(wide, wide, 3, stride=stride, groups=wide),
            _Normed(wide, outputs, 1, linear=True),
        )
        # A shortcut only where the shape is kept.
        self.adds = stride == 1 and inputs == outputs

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        return x + self.path(x) if self.adds else self.path(x)


class MobileNetV2(nn.Cell):
    """For 224x224 images: 3,504,872 parameters at width 1 and 1,000 classes."""

    def __init__(
        self, classes: int = 1000, *, width: float = 1.0, channels: int = 3, p_drop: float = 0.2
    ) -> None:
        super().__init__()
        inputs = _channels(32 * width)
        layers: list[nn.Cell] = [_Normed(channels, inputs, 3, stride=2)]
        for expansion, outputs, repeats, stride in STAGES:
            for i in range(repeats):
                layers.append(
                    InvertedResidual(
                        inputs, _channels(outputs * width),
                        stride=1 if i else stride, expansion=expansion,
                    )
                )  # fmt: skip
                inputs = _channels(outputs * width)
        # Section 4: below width 1 the last layer is not made thinner.
        last = _channels(1280 * max(1.0, width))
        self.features = nn.Sequential(*layers, _Normed(inputs, last, 1))
        self.drop, self.head = nn.Dropout(p_drop), nn.Dense(last, classes)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W) -> (N, classes)."""
        return self.head(self.drop(self.features(x).mean((2, 3))))

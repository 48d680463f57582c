"""Residual networks (He et al. 2016), with strides where torchvision has them."""

from __future__ import annotations

from collections.abc import Sequence

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops

# He et al. 2015, as the paper prescribes
WEIGHT = nn.KaimingNormal()


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, since normalization follows; stride 1 keeps the size."""
    return nn.Conv2d(
        inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False, init=WEIGHT
    )


class _Shortcut(nn.Cell):
    """x itself, or a 1x1 convolution with normalization where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.changes = stride != 1 or inputs != outputs
        if self.changes:
            self.conv, self.norm = _conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W)."""
        return self.norm(self.conv(x)) if self.changes else x


class BasicBlock(nn.Cell):
    """Two 3x3 convolutions around a sum; figure 5, left."""

    expansion = 1

    def __init__(self, inputs: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _Shortcut(inputs, width, stride)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W) -> (N, width, H / stride, W / stride)."""
        y = ops.relu(self.norm1(self.conv1(x)))
        return ops.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Cell):
    """1x1, 3x3 and 1x1 convolutions around a sum; figure 5, right. The stride is the 3x3's."""

    expansion = 4

    def __init__(self, inputs: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1, self.norm1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.shortcut = _Shortcut(inputs, outputs, stride)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W) -> (N, 4 width, H / stride, W / stride)."""
        y = ops.relu(self.norm1(self.conv1(x)))
        y = ops.relu(self.norm2(self.conv2(y)))
        return ops.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Cell):
    """A stem, stages of residual blocks, the mean over the image, and a dense layer.

    blocks: number in each stage; every stage after the first halves the image and doubles the
    width. stem: "large" for photographs (7x7, stride 2, pooling), "small" for 32x32 (3x3).
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        blocks: Sequence[int],
        *,
        width: int = 64,
        stem: str = "large",
        classes: int = 1000,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if stem not in {"large", "small"}:
            raise InvalidInput(f"a stem is 'large' or 'small', got {stem!r}")
        self.pools = stem == "large"
        self.conv = _conv(channels, width, *((7, 2) if self.pools else (3, 1)))
        self.norm = nn.BatchNorm2d(width)
        cells, inputs = [], width
        for stage, count in enumerate(blocks):
            for i in range(count):
                # Only the first block of a stage halves the image, and not in the first stage.
                stride = 2 if stage and not i else 1
                cells.append(block(inputs, width << stage, stride=stride))
                inputs = block.expansion * (width << stage)
        self.blocks = nn.CellList(cells)
        self.head = nn.Dense(inputs, classes)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, H, W) -> (N, classes)."""
        x = ops.relu(self.norm(self.conv(x)))
        if self.pools:
            x = ops.max_pool(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def resnet8(classes: int = 10, *, channels: int = 3) -> ResNet:
    """One basic block at each width of 16, 32 and 64, for 32x32 images: 78,042 parameters."""
    return ResNet(BasicBlock, (1, 1, 1), width=16, stem="small", classes=classes, channels=channels)


def resnet18(classes: int = 1000, *, channels: int = 3) -> ResNet:
    """Table 1, 18 layers, for 224x224 images: 11,689,512 parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, channels=channels)


def resnet50(classes: int = 1000, *, channels: int = 3) -> ResNet:
    """Table 1, 50 layers, for 224x224 images: 25,557,032 parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, channels=channels)

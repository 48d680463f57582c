"""The demo's model: a small convolutional network for 8x8 grey images of digits."""

from triplane.unified_ir import nn, ops


class Digits(nn.Cell):
    """x: (N, 1, 8, 8) in 0..1 -> logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding="same")
        self.deep = nn.Conv2d(16, 32, 3, padding="same")
        self.head = nn.Dense(32 * 4 * 4, 10)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """Two convolutions, one pooling, one dense layer."""
        x = ops.relu(self.conv(x))
        x = ops.max_pool(ops.relu(self.deep(x)), 2)
        logits: ops.Tensor = self.head(ops.flatten(x))
        return logits

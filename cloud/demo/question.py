"""The demo's second model: "is this one of my five digits?", where each device has its own five."""

from triplane.unified_ir import nn, ops


class Question(nn.Cell):
    """x: (N, 1, 8, 8) in 0..1 -> logits (N, 2) of no and yes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Dense(64, 64)
        self.head = nn.Dense(64, 2)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """Two layers: small enough to learn from a few dozen digits."""
        logits: ops.Tensor = self.head(ops.relu(self.hidden(ops.flatten(x))))
        return logits

"""Plain convolutional networks for small images."""

from __future__ import annotations

from triplane.unified_ir import nn, ops


class LeNet(nn.Cell):
    """LeNet-5 with maxima and ReLU for 28x28 images (LeCun et al. 1998): 61,706 parameters."""

    def __init__(self, classes: int = 10, *, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        # 28 -> pool 14 -> conv 10 -> pool 5
        self.fc1, self.fc2 = nn.Dense(16 * 5 * 5, 120), nn.Dense(120, 84)
        self.head = nn.Dense(84, classes)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, 28, 28) -> (N, classes)."""
        x = ops.max_pool(ops.relu(self.conv1(x)), 2)
        x = ops.flatten(ops.max_pool(ops.relu(self.conv2(x)), 2))
        return self.head(ops.relu(self.fc2(ops.relu(self.fc1(x)))))


class LeafCnn(nn.Cell):
    """The network of the LEAF benchmark's FEMNIST (Caldas et al. 2018): 6,603,710 parameters."""

    def __init__(self, classes: int = 62, *, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        # 28 -> pool 14 -> pool 7; both convolutions keep the size
        self.fc, self.head = nn.Dense(64 * 7 * 7, 2048), nn.Dense(2048, classes)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, C, 28, 28) -> (N, classes)."""
        x = ops.max_pool(ops.relu(self.conv1(x)), 2)
        x = ops.flatten(ops.max_pool(ops.relu(self.conv2(x)), 2))
        return self.head(ops.relu(self.fc(x)))

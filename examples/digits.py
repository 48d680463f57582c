"""Train a small convolutional network on handwritten digits in seconds.

Run it: python examples/digits.py
"""

from __future__ import annotations

from triplane.unified_ir import data, nn, ops, optim, train


class Digits(nn.Cell):
    """Convolution, pooling and one fully connected layer; x: (N, 1, 8, 8) -> logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding="same")
        self.head = nn.Dense(16 * 4 * 4, 10)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 1, 8, 8) in 0..1 -> (N, 10)."""
        x = ops.max_pool(ops.relu(self.conv(x)), 2)
        return self.head(ops.flatten(x))


def main() -> None:
    """Train on 1437 digits and measure the accuracy on 360 others."""
    training, held_out = data.digits().split()
    trainer = train.Trainer(
        Digits(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(1e-2), engine="onnx"
    )
    history = trainer.fit(training, epochs=15, validation=held_out)
    print(f"accuracy on held-out digits: {history.last['validation.accuracy']:.3f}")


if __name__ == "__main__":
    main()

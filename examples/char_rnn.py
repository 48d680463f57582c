"""Train a recurrent network to write a text, letter by letter.

Run it: python examples/char_rnn.py
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from triplane.unified_ir import nn, ops, optim, train

TEXT = (
    "the quick brown fox jumps over the lazy dog while the five boxing wizards look on and the "
    "jovial sphinx of black quartz judges their vow. "
) * 8
LETTERS = sorted(set(TEXT))
LENGTH = 24


class Writer(nn.Cell):
    """An embedding, an LSTM and a linear layer; ids: (N, T) -> logits (N, T, letters)."""

    def __init__(self, letters: int, hidden: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, 16)
        self.memory = nn.LSTM(16, hidden)
        self.head = nn.Dense(hidden, letters)

    def construct(self, ids: ops.Tensor) -> ops.Tensor:
        """ids: (N, T) int64 -> (N, T, letters)."""
        states, _ = self.memory(self.table(ids))
        return self.head(states)


def windows(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every window of LENGTH letters, and the same windows one letter later."""
    ids = np.array([LETTERS.index(c) for c in text])
    views = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1)
    return views[:, :-1].copy(), views[:, 1:].copy()


def continued(trainer: train.Trainer, start: str, count: int) -> str:
    """Return `start`, continued by the `count` most likely letters."""
    written = start
    for _ in range(count):
        ids = np.array([[LETTERS.index(c) for c in written[-LENGTH:]]])
        written += LETTERS[trainer.predict(ids)[0, -1].argmax()]
    return written


def main() -> None:
    """Train until the text is known, then write some of it."""
    trainer = train.Trainer(
        Writer(len(LETTERS)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.AdamW(optim.Warmup(20, optim.Cosine(1e-2, 200))),
        clip_norm=1.0,
    )
    history = trainer.fit(windows(TEXT), epochs=6)
    sys.stdout.write(f"letters predicted: {history.last['accuracy']:.3f}\n")
    sys.stdout.write(continued(trainer, TEXT[:LENGTH], 60) + "\n")


if __name__ == "__main__":
    main()

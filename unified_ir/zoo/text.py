"""Networks for sequences of symbols."""

from __future__ import annotations

from triplane.unified_ir import nn, ops


class CharLstm(nn.Cell):
    """The next character after a text, as LEAF's Shakespeare has it (Caldas et al. 2018).

    Characters embedded in 8 numbers, two layers of LSTM with 256 units, a dense layer on the last
    state: 817,872 parameters. PyTorch, which has two biases for each gate, counts 2,048 more.
    """

    def __init__(
        self, vocabulary: int = 80, *, embedding: int = 8, hidden: int = 256, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.CellList(
            [nn.LSTM(hidden if i else embedding, hidden) for i in range(layers)]
        )
        self.head = nn.Dense(hidden, vocabulary)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, T) integers below `vocabulary` -> (N, vocabulary)."""
        x = self.embedding(x)
        for layer in self.lstm:
            x, _ = layer(x)
        y: ops.Tensor = self.head(x[:, -1])
        return y

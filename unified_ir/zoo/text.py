"""Networks for sequences of symbols."""

from __future__ import annotations

from typing import Any

from triplane.unified_ir import nn, ops


class CharLstm(nn.Cell):
    """Predicts the next character of a text, as LEAF's Shakespeare task (Caldas et al. 2018).

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
        return self.head(x[:, -1])


class _Words(nn.Cell):
    """Embedded words and positions, through encoder layers with normalization first."""

    def __init__(
        self, vocabulary: int, length: int, *, width: int, heads: int, layers: int, p_drop: float
    ) -> None:
        super().__init__()
        # Times `scale` below, elements have variance 1, of the order of the positional encoding's.
        self.embedding = nn.Embedding(vocabulary, width, init=nn.Normal(width**-0.5))
        self.places = nn.PositionalEncoding(width, length, p_drop=p_drop)
        # Vaswani et al., section 3.4: embeddings are multiplied by sqrt(width).
        self.scale = width**0.5
        self.layers = nn.TransformerEncoder(
            [
                nn.TransformerEncoderLayer(
                    width, heads,
                    feedforward=4 * width, p_drop=p_drop, activation=ops.gelu, norm_first=True,
                )
                for _ in range(layers)
            ],
            norm=nn.LayerNorm(width),
        )  # fmt: skip

    def construct(self, x: ops.Tensor, *, causal: bool) -> ops.Tensor:
        """x: (N, T) integers -> (N, T, width)."""
        return self.layers(self.places(self.embedding(x) * self.scale), causal=causal)


class TextEncoder(nn.Cell):
    """The class of a text: a Transformer's encoder, the mean over words, a dense layer.

    Vaswani et al. 2017, section 3.1, with normalization first (Xiong et al. 2020): 104,322
    parameters for 64 words and 2 classes.
    """

    def __init__(
        self,
        vocabulary: int = 64,
        classes: int = 2,
        *,
        length: int = 256,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        p_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.words = _Words(
            vocabulary, length, width=width, heads=heads, layers=layers, p_drop=p_drop
        )
        self.head = nn.Dense(width, classes)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, T) integers below `vocabulary`, T <= length -> (N, classes)."""
        return self.head(self.words(x, causal=False).mean((1,)))


class TextDecoder(TextEncoder):
    """The next word at every position of a text: a decoder alone (Radford et al. 2018).

    No word sees a later one. 108,352 parameters for 64 words. Options are those of `TextEncoder`.
    """

    def __init__(self, vocabulary: int = 64, **options: Any) -> None:
        super().__init__(vocabulary, vocabulary, **options)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, T) integers below `vocabulary`, T <= length -> (N, T, vocabulary)."""
        return self.head(self.words(x, causal=True))

"""Recurrent layers: one step as a cell, whole sequences as ONNX's LSTM, GRU and RNN.

Sequences are x: (N, T, inputs). The gates are stacked in the rows of a weight, in PyTorch's order.
One bias takes the place of PyTorch's two, which are only ever added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.nn.init import Uniform
from triplane.unified_ir.nn.random import Dropout, generator
from triplane.unified_ir.nn.sizes import check_axis, positive
from triplane.unified_ir.nn.state import State
from triplane.unified_ir.ops.row import Op
from triplane.unified_ir.ops.rows.recurrence import recurrent

Carry = tuple[ops.Tensor, ...]
REVERSE: Final = "_reverse"
"""Suffix of the weights of the backward direction, as in PyTorch."""


class _Step(Cell):
    """Weights of `gates` stacked gates, initially uniform within 1 / sqrt(hidden)."""

    gates: ClassVar[int] = 1
    weight_ih: State
    weight_hh: State
    bias: State

    def __init__(self, inputs: int, hidden: int, *, rng: np.random.Generator | None = None) -> None:
        super().__init__()
        positive(type(self).__name__, inputs=inputs, hidden=hidden)
        self.inputs, self.hidden = inputs, hidden
        draw, source = Uniform(1.0 / math.sqrt(hidden)), generator(rng)
        rows = self.gates * hidden
        self.weight_ih = Parameter(draw((rows, inputs), source))
        self.weight_hh = Parameter(draw((rows, hidden), source))
        self.bias = Parameter(draw((rows,), source))

    def _mixed(self, x: ops.Tensor) -> ops.Tensor:
        """Return x weight_ih^T + bias: (N, gates hidden)."""
        name, takes = f"{type(self).__name__}({self.inputs}, {self.hidden})", f"(N, {self.inputs})"
        check_axis(name, takes, x, -1, self.inputs, [2])
        return ops.linear(x, self.weight_ih, self.bias)

    def _gate(self, stacked: ops.Tensor, i: int) -> ops.Tensor:
        return stacked[:, i * self.hidden : (i + 1) * self.hidden]


class RNNCell(_Step):
    """One step of a simple recurrent net (Elman 1990): h' = tanh(W_ih x + W_hh h + b)."""

    def construct(self, x: ops.Tensor, h: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs), h: (N, hidden) -> (N, hidden)."""
        return ops.tanh(ops.gemm(h, self.weight_hh, self._mixed(x), transB=1))


class LSTMCell(_Step):
    """One step of a long short-term memory (Hochreiter and Schmidhuber 1997); gates i, f, g, o.

    c' = f c + i g, h' = o tanh(c').
    """

    gates = 4

    def construct(self, x: ops.Tensor, h: ops.Tensor, c: ops.Tensor) -> Carry:
        """x: (N, inputs), h and c: (N, hidden) -> the next h and c."""
        stacked = ops.gemm(h, self.weight_hh, self._mixed(x), transB=1)
        i, f, g, o = (self._gate(stacked, k) for k in range(4))
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(c), c


class GRUCell(_Step):
    """One step of a gated recurrent unit (Cho et al. 2014), gates r, z, n as cuDNN has them.

    n = tanh(mixed_n + r (h weight_n^T + bias_n)), h' = (1 - z) n + z h.
    """

    gates = 3
    bias_n: State

    def __init__(self, inputs: int, hidden: int, *, rng: np.random.Generator | None = None) -> None:
        super().__init__(inputs, hidden, rng=rng)
        self.bias_n = Parameter(Uniform(1.0 / math.sqrt(hidden))((hidden,), generator(rng)))

    def construct(self, x: ops.Tensor, h: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs), h: (N, hidden) -> (N, hidden)."""
        mixed, w = self._mixed(x), self.weight_hh
        r_z = ops.gemm(h, w[: 2 * self.hidden], mixed[:, : 2 * self.hidden], transB=1)
        gates = ops.sigmoid(r_z)
        r, z = self._gate(gates, 0), self._gate(gates, 1)
        inner = ops.gemm(h, w[2 * self.hidden :], self.bias_n, transB=1)
        n = ops.tanh(self._gate(mixed, 2) + r * inner)
        # (1 - z) n + z h with one product less
        return n + z * (h - n)


class _Layers(Cell):
    """Layers over a sequence, each in one or two directions.

    `weight_ih`, `weight_hh` and `bias` of the first layer; those of layer k end in `_lk`, those
    that go backwards in `_reverse`: weight_hh, weight_hh_reverse, weight_hh_l1, ...
    """

    row: ClassVar[Op]
    gates: ClassVar[int] = 1
    order: ClassVar[tuple[int, ...]] = (0,)
    """For each gate in ONNX's order, its position in PyTorch's order."""
    options: ClassVar[dict[str, int]] = {}

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        p_drop: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        positive(type(self).__name__, inputs=inputs, hidden=hidden, num_layers=num_layers)
        if p_drop and num_layers == 1:
            raise InvalidInput(
                f"{type(self).__name__} drops elements between layers, and there is only one "
                "layer; put a Dropout after it"
            )
        self.inputs, self.hidden, self.num_layers = inputs, hidden, num_layers
        self.endings = ("", REVERSE) if bidirectional else ("",)
        for k in range(num_layers):
            for ending in self.endings:
                taken = inputs if k == 0 else hidden * len(self.endings)
                self._draw(f"_l{k}{ending}" if k else ending, taken, generator(rng))
        self.dropout = Dropout(p_drop, rng=rng) if p_drop else None

    def _draw(self, ending: str, inputs: int, source: np.random.Generator) -> None:
        """Create one direction's weights, uniform within 1 / sqrt(hidden)."""
        draw, rows = Uniform(1.0 / math.sqrt(self.hidden)), self.gates * self.hidden
        setattr(self, f"weight_ih{ending}", Parameter(draw((rows, inputs), source)))
        setattr(self, f"weight_hh{ending}", Parameter(draw((rows, self.hidden), source)))
        setattr(self, f"bias{ending}", Parameter(draw((rows,), source)))

    def _sequence(
        self, x: ops.Tensor, state: Sequence[ops.Tensor | None], lengths: ops.Tensor | None
    ) -> tuple[ops.Tensor, Carry]:
        """Return all outputs (N, T, directions hidden) and the last state, in its public form."""
        name = f"{type(self).__name__}({self.inputs}, {self.hidden})"
        check_axis(name, f"(N, T, {self.inputs})", x, -1, self.inputs, [3])
        starts = [self._inwards(name, s) for s in state]
        lens = None if lengths is None else ops.cast(lengths, "int32")
        y = x.transpose(1, 0, 2)
        lasts = []
        for k in range(self.num_layers):
            if k and self.dropout is not None:
                y = self.dropout(y)
            ys, *last = self._layer(k, y, starts, lens)
            # (T, directions, N, hidden) -> (T, N, directions hidden)
            y = ys.transpose(0, 2, 1, 3) if len(self.endings) > 1 else ys
            y = y.reshape((*x.shape[1::-1], len(self.endings) * self.hidden))
            lasts.append(last)
        joined = (ops.concat(list(s)) if len(s) > 1 else s[0] for s in zip(*lasts, strict=True))
        return y.transpose(1, 0, 2), tuple(self._outwards(s) for s in joined)

    def _layer(
        self, k: int, x: ops.Tensor, starts: Sequence[ops.Tensor | None], lens: ops.Tensor | None
    ) -> Carry:
        """x: (T, N, inputs) -> all outputs (T, directions, N, hidden), last states."""
        count = len(self.endings)
        endings = [f"_l{k}{e}" if k else e for e in self.endings]
        w, r = (
            ops.stack([self._ordered(getattr(self, f"{kind}{e}")) for e in endings])
            for kind in ("weight_ih", "weight_hh")
        )
        b = ops.stack([self._biases(e) for e in endings])
        states = [None if s is None else s[k * count : (k + 1) * count] for s in starts]
        return self.row.all_outputs(
            x, w, r, b, lens, *states,
            outputs=1 + len(states), hidden_size=self.hidden,
            direction="bidirectional" if count > 1 else "forward", **self.options,
        )  # fmt: skip

    def _biases(self, ending: str) -> ops.Tensor:
        """Return ONNX's two biases; the second, of the product with the state, is zero."""
        bias = self._ordered(getattr(self, f"bias{ending}"))
        return ops.concat([bias, ops.zeros(bias.shape, bias.dtype)])

    def _ordered(self, stacked: ops.Tensor) -> ops.Tensor:
        """Return the rows of PyTorch's gates in ONNX's order."""
        if len(self.order) == 1:
            return stacked
        # The gradient of a permutation is its inverse. A rule of its own, because the gradient of
        # Gather in general is a scatter.
        back = tuple(int(k) for k in np.argsort(self.order))
        return ops.custom_gradient(
            lambda x: _blocks(x, self.order), lambda _, __, g: _blocks(g, back), stacked
        )

    def _inwards(self, name: str, state: ops.Tensor | None) -> ops.Tensor | None:
        """Return a state as (layers directions, N, hidden); refuse other shapes.

        One layer in one direction has the state (N, hidden).
        """
        if state is None:
            return None
        count = self.num_layers * len(self.endings)
        wanted = (count,) if count > 1 else ()
        if state.rank != len(wanted) + 2 or state.shape[: len(wanted)] != wanted:
            shown = f"({count}, N, {self.hidden})" if count > 1 else f"(N, {self.hidden})"
            raise ShapeError(f"{name} takes a state {shown}, got {state.type}")
        # ONNX's states always have the leading axis; see `_outwards` for the way back.
        return state if count > 1 else ops.unsqueeze(state, 0)

    def _outwards(self, state: ops.Tensor) -> ops.Tensor:
        return state if state.shape[0] != 1 else state.reshape(state.shape[1:])


def _blocks(x: ops.Tensor, order: Sequence[int]) -> ops.Tensor:
    """Return equal blocks of rows in another order; the gradient is the inverse order."""
    rows = x.shape[0] // len(order)
    stacked = x.reshape((len(order), rows, *x.shape[1:]))
    return ops.gather(stacked, np.array(order)).reshape(x.shape)


class _OneState(_Layers):
    """Layers whose state is one tensor."""

    def construct(
        self, x: ops.Tensor, h: ops.Tensor | None = None, lengths: ops.Tensor | None = None
    ) -> tuple[ops.Tensor, ops.Tensor]:
        """x: (N, T, inputs), h: a state or zeros, lengths: (N,) ints -> see `LSTM`."""
        ys, (last,) = self._sequence(x, (h,), lengths)
        return ys, last


class RNN(_OneState):
    """A simple recurrent net over sequences (Elman 1990); returns (all outputs, last state)."""

    row = recurrent.rnn


class LSTM(_Layers):
    """A long short-term memory over sequences (Hochreiter and Schmidhuber 1997).

    Returns (all outputs, (last h, last c)): (N, T, directions hidden), and states that are
    (N, hidden) for one layer in one direction, else (layers directions, N, hidden) as in PyTorch.
    `lengths` gives the end of each sequence: outputs after it are 0, the last state is the state
    there, and a backward direction begins there. In training, `p_drop` of the elements between
    layers is dropped.
    """

    row = recurrent.lstm
    gates = 4
    # PyTorch: i, f, g, o; ONNX: i, o, f, c (its name for g)
    order = (0, 3, 1, 2)

    def construct(
        self, x: ops.Tensor, state: Carry | None = None, lengths: ops.Tensor | None = None
    ) -> tuple[ops.Tensor, Carry]:
        """x: (N, T, inputs), state: (h, c) or zeros, lengths: (N,) ints in 1..T."""
        return self._sequence(x, state or (None, None), lengths)


class GRU(_OneState):
    """A gated recurrent unit over sequences (Cho et al. 2014); returns (all outputs, last state).

    Gates r, z, n as cuDNN has them: the reset gate multiplies the product with the state, which
    has the bias `bias_n`.
    """

    row = recurrent.gru
    gates = 3
    # PyTorch: r, z, n; ONNX: z, r, h
    order = (1, 0, 2)
    options: ClassVar[dict[str, int]] = {"linear_before_reset": 1}

    def _draw(self, ending: str, inputs: int, source: np.random.Generator) -> None:
        super()._draw(ending, inputs, source)
        draw = Uniform(1.0 / math.sqrt(self.hidden))
        setattr(self, f"bias_n{ending}", Parameter(draw((self.hidden,), source)))

    def _biases(self, ending: str) -> ops.Tensor:
        bias = self._ordered(getattr(self, f"bias{ending}"))
        inner = getattr(self, f"bias_n{ending}")
        return ops.concat([bias, ops.zeros((2 * self.hidden,), bias.dtype), inner])

"""Recurrent layers: one step as a cell, a whole sequence as a scan.

Sequences are x: (N, T, inputs). The product of all inputs with their weight is taken at once,
before the scan; inside it only the product with the state remains. Gates lie one after another in
the rows of a weight, in PyTorch's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.nn.init import Uniform
from triplane.unified_ir.nn.random import generator
from triplane.unified_ir.nn.sizes import check_axis, check_rank, positive
from triplane.unified_ir.nn.state import State

Carry = tuple[ops.Tensor, ...]


class _Gated(Cell):
    """Weights of `gates` stacked gates; all start uniform within 1 / sqrt(hidden)."""

    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1
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

    def advance(self, mixed: ops.Tensor, state: Carry) -> Carry:
        """The next state; mixed: (N, gates hidden) = x weight_ih^T + bias."""
        raise NotImplementedError

    def one_step(self, x: ops.Tensor, state: Sequence[ops.Tensor]) -> Carry:
        """x: (N, inputs), state: (N, hidden) each -> the next state."""
        self._check(x, f"(N, {self.inputs})", 2)
        return self.advance(ops.linear(x, self.weight_ih, self.bias), tuple(state))

    def sequence(
        self, x: ops.Tensor, state: Sequence[ops.Tensor] | None
    ) -> tuple[ops.Tensor, Carry]:
        """x: (N, T, inputs) -> (N, T, hidden) of the first state tensor, and the last state."""
        self._check(x, f"(N, T, {self.inputs})", 3)
        mixed = ops.linear(x, self.weight_ih, self.bias).transpose(1, 0, 2)
        start = tuple(state) if state is not None else self.zero_state(x)
        last, ys = ops.scan(self._scanned, start, mixed)
        return ys.transpose(1, 0, 2), last

    def zero_state(self, x: ops.Tensor) -> Carry:
        """Zeros for the batch of x."""
        return tuple(ops.zeros((x.shape[0], self.hidden), x.dtype) for _ in range(self.states))

    def _scanned(self, state: Carry, mixed: ops.Tensor) -> tuple[Carry, ops.Tensor]:
        after = self.advance(mixed, state)
        return after, after[0]

    def _check(self, x: ops.Tensor, takes: str, rank: int) -> None:
        name = f"{type(self).__name__}({self.inputs}, {self.hidden})"
        check_rank(name, takes, x, rank)
        check_axis(name, takes, x, -1, self.inputs)

    def _gate(self, stacked: ops.Tensor, i: int) -> ops.Tensor:
        return stacked[:, i * self.hidden : (i + 1) * self.hidden]


class _RNN(_Gated):
    def advance(self, mixed: ops.Tensor, state: Carry) -> Carry:
        """h' = tanh(mixed + h weight_hh^T)."""
        return (ops.tanh(ops.gemm(state[0], self.weight_hh, mixed, transB=1)),)


class _LSTM(_Gated):
    gates = 4
    states = 2

    def advance(self, mixed: ops.Tensor, state: Carry) -> Carry:
        """c' = f c + i g, h' = o tanh(c')."""
        h, c = state
        stacked = ops.gemm(h, self.weight_hh, mixed, transB=1)
        i, f, g, o = (self._gate(stacked, k) for k in range(4))
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(c), c


class _GRU(_Gated):
    gates = 3
    bias_n: State

    def __init__(self, inputs: int, hidden: int, *, rng: np.random.Generator | None = None) -> None:
        super().__init__(inputs, hidden, rng=rng)
        draw = Uniform(1.0 / math.sqrt(hidden))
        self.bias_n = Parameter(draw((hidden,), generator(rng)))

    def advance(self, mixed: ops.Tensor, state: Carry) -> Carry:
        """n = tanh(mixed_n + r (h weight_n^T + bias_n)), h' = (1 - z) n + z h."""
        (h,) = state
        w = self.weight_hh
        r_z = ops.gemm(h, w[: 2 * self.hidden], mixed[:, : 2 * self.hidden], transB=1)
        gates = ops.sigmoid(r_z)
        r, z = self._gate(gates, 0), self._gate(gates, 1)
        inner = ops.gemm(h, w[2 * self.hidden :], self.bias_n, transB=1)
        n = ops.tanh(self._gate(mixed, 2) + r * inner)
        return (n + z * (h - n),)


class RNNCell(_RNN):
    """One step of a simple recurrent net (Elman 1990): h' = tanh(W_ih x + W_hh h + b)."""

    def construct(self, x: ops.Tensor, h: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs), h: (N, hidden) -> (N, hidden)."""
        return self.one_step(x, (h,))[0]


class RNN(_RNN):
    """A simple recurrent net over a sequence; gives (all states, last state)."""

    def construct(
        self, x: ops.Tensor, h: ops.Tensor | None = None
    ) -> tuple[ops.Tensor, ops.Tensor]:
        """x: (N, T, inputs), h: (N, hidden) or zeros -> (N, T, hidden), (N, hidden)."""
        ys, (last,) = self.sequence(x, None if h is None else (h,))
        return ys, last


class LSTMCell(_LSTM):
    """One step of a long short-term memory (Hochreiter and Schmidhuber 1997); gates i, f, g, o."""

    def construct(self, x: ops.Tensor, h: ops.Tensor, c: ops.Tensor) -> Carry:
        """x: (N, inputs), h and c: (N, hidden) -> the next h and c."""
        return self.one_step(x, (h, c))


class LSTM(_LSTM):
    """A long short-term memory over a sequence; gives (all h, (last h, last c))."""

    def construct(self, x: ops.Tensor, state: Carry | None = None) -> tuple[ops.Tensor, Carry]:
        """x: (N, T, inputs), state: (h, c), each (N, hidden), or zeros."""
        return self.sequence(x, state)


class GRUCell(_GRU):
    """One step of a gated recurrent unit (Cho et al. 2014), gates r, z, n as cuDNN has them."""

    def construct(self, x: ops.Tensor, h: ops.Tensor) -> ops.Tensor:
        """x: (N, inputs), h: (N, hidden) -> (N, hidden)."""
        return self.one_step(x, (h,))[0]


class GRU(_GRU):
    """A gated recurrent unit over a sequence; gives (all states, last state)."""

    def construct(
        self, x: ops.Tensor, h: ops.Tensor | None = None
    ) -> tuple[ops.Tensor, ops.Tensor]:
        """x: (N, T, inputs), h: (N, hidden) or zeros -> (N, T, hidden), (N, hidden)."""
        ys, (last,) = self.sequence(x, None if h is None else (h,))
        return ys, last

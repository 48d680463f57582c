"""Recurrences over a sequence whose gradient is taken by gates, in one walk back.

Each row is one direction of a recurrent layer after its inputs were multiplied by their weight. The
forward walk keeps the gates. The parts of the gradient that do not depend on the cotangent are then
computed for the whole sequence at once, a step back is a few small operators, and the gradient of
the recurrent weight is one product over all steps. Cotangents are operators again, so every order
exists.

gates: (T, N, k H), r: (k H, H), states: (N, H), mask: bool (T, N, 1) or absent. Where the mask is
false a step keeps the state and gives 0; `reverse` walks from the last step to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import ShapeError, TensorType, bool_
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, MakeArray, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import relu, sigmoid, step, tanh
from triplane.unified_ir.ops.rows.arithmetic.matrix import gemm
from triplane.unified_ir.ops.rows.control.scanning import scan
from triplane.unified_ir.ops.rows.movement.shapes import split_row
from triplane.unified_ir.ops.rows.movement.structure import concat, sum_to, unsqueeze, where, zeros
from triplane.unified_ir.ops.samples import bools, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, dims_of

State = tuple[Tensor, ...]
Pullback = Callable[[Sequence[Tensor | None]], list[Tensor | None]]


@dataclass(frozen=True)
class Recurrence:
    """One kind of recurrence.

    `advance(gates, state, weights)` gives the next state and the values that the way back needs;
    `slopes(kept, before, after)` turns those and the states, of all steps, into factors;
    `back(cotangents of the state, factors)` gives those of the state before, None where they come
    through the product with r alone, then that of the product, then that of the gates;
    `weight_cotangents(cotangents of all products, weights)` gives those of the weights beside r.
    """

    gates: int
    weights: int
    states: int
    advance: Callable[[Tensor, State, State], tuple[State, State]]
    slopes: Callable[[State, State, State], State]
    back: Callable[[State, State], tuple[Sequence[Tensor | None], Tensor, Tensor]]
    weight_cotangents: Callable[[Tensor, State], list[Tensor]] = lambda inner, weights: []

    def types(self, call: OpCall) -> tuple[TensorType, ...]:
        """Infer the types of the results of all steps, and of the last states."""
        gates, r = call.type(0), call.type(1)
        hidden = r.shape[-1]
        wide = self.gates * hidden
        if gates.rank != 3 or r.rank != 2 or not r.shape[0] == gates.shape[2] == wide:
            raise ShapeError(
                f"{call.row} takes gates (T, N, {self.gates} H) and r ({self.gates} H, "
                f"H), got {gates} and {r}"
            )
        first = 1 + self.weights
        states = [call.type(first + k) for k in range(self.states)]
        wrong = [s for s in states if s.shape != (gates.shape[1], hidden)]
        mask = call.type(first + self.states) if call.has(first + self.states) else None
        if mask and mask != TensorType(bool_, (*gates.shape[:2], 1)):
            wrong.append(mask)
        if wrong or (self.weights > 1 and call.type(2).shape != (hidden,)):
            raise ShapeError(
                f"{call.row} takes states (N, H), a mask bool (T, N, 1) and a bias (H), got "
                f"{[str(t) for t in call.types]}"
            )
        y = gates.with_shape((*gates.shape[:2], hidden))
        return (y, *states)[: call.outputs]


def _columns(x: Tensor, *parts: int) -> tuple[Tensor, ...]:
    """Split the last axis into parts of that many gates each."""
    size = x.shape[-1] // sum(parts)
    sizes = dims_of([k * size for k in parts])
    return split_row.all_outputs(x, sizes, outputs=len(parts), axis=-1)


def _lstm_step(gates: Tensor, state: State, weights: State) -> tuple[State, State]:
    """c' = f c + i g, h' = o tanh(c'); gates i, o, f, g."""
    h, c = state
    stacked = gemm(h, weights[0], gates, transB=1)
    # i, o and f share one sigmoid over three quarters of the row instead of three over a quarter
    # each.
    first, last = _columns(stacked, 3, 1)
    squashed, g = sigmoid(first), tanh(last)
    i, o, f = _columns(squashed, 1, 1, 1)
    c = f * c + i * g
    bent = tanh(c)
    return (o * bent, c), (squashed, g, bent)


def _lstm_slopes(kept: State, _: State, after: State) -> State:
    """Return the slopes of i, o, f, g and c', and f itself; f c is computed as c' - i g."""
    (squashed, g, bent), (h, c) = kept, after
    i, o, f = _columns(squashed, 1, 1, 1)
    fresh = i * g
    old = c - fresh
    # With c' = f c + i g and h = o tanh(c'), times the slope of each squashing function: g i (1 -
    # i), tanh(c') o (1 - o), c f (1 - f), i (1 - g^2), and dh/dc' = o (1 - tanh(c')^2).
    return (fresh - fresh * i, h - h * o, old - old * f, i - fresh * g, o - h * bent, f)


def _lstm_back(gs: State, slopes: State) -> tuple[Sequence[Tensor | None], Tensor, Tensor]:
    """Pull back: the output's cotangent reaches c' through tanh; all gates but o only affect c'."""
    g_h, g_c = gs
    by_i, by_o, by_f, by_g, through, f = slopes
    g_c = g_c + g_h * through
    g_gates = concat([g_c * by_i, g_h * by_o, g_c * by_f, g_c * by_g], axis=1)
    return (None, g_c * f), g_gates, g_gates


def _gru_step(gates: Tensor, state: State, weights: State) -> tuple[State, State]:
    """n = tanh(x_n + r q), q = R_n h + b, h' = n + z (h - n); gates z, r, n."""
    (h,) = state
    r, bias = weights
    (own, own_n), (product, product_n) = (_columns(x, 2, 1) for x in (gates, gemm(h, r, transB=1)))
    squashed = sigmoid(own + product)
    z, reset = _columns(squashed, 1, 1)
    q = product_n + bias
    n = tanh(own_n + reset * q)
    return (n + z * (h - n),), (squashed, q, n)


def _gru_slopes(kept: State, before: State, _: State) -> State:
    squashed, q, n = kept
    z, reset = _columns(squashed, 1, 1)
    # dh'/dn = 1 - z, dh'/dz = h - n, and n passes through tanh: 1 - n^2.
    by_n = (1.0 - z) * (1.0 - n * n)
    return ((before[0] - n) * (z - z * z), by_n, q * (reset - reset * reset), reset, z)


def _gru_back(gs: State, slopes: State) -> tuple[Sequence[Tensor | None], Tensor, Tensor]:
    (g,) = gs
    by_z, by_n, by_r, reset, z = slopes
    g_z, g_n = g * by_z, g * by_n
    g_r = g_n * by_r
    # The gates n and R_n h + b differ by the factor r, so the product and the input get two
    # cotangents.
    inner = concat([g_z, g_r, g_n * reset], axis=1)
    return (g * z,), inner, concat([g_z, g_r, g_n], axis=1)


def _gru_weight_cotangents(inner: Tensor, weights: State) -> list[Tensor]:
    bias = weights[1]
    return [sum_to(inner[:, 2 * bias.shape[0] :], bias)]


def _simple(squash: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Recurrence:
    """h' = squash(x + R h), whose slope is a function of its result."""

    def advance(gates: Tensor, state: State, weights: State) -> tuple[State, State]:
        h = squash(gemm(state[0], weights[0], gates, transB=1))
        return (h,), ()

    def back(gs: State, slopes: State) -> tuple[Sequence[Tensor | None], Tensor, Tensor]:
        g = gs[0] * slopes[0]
        return (None,), g, g

    return Recurrence(1, 1, 1, advance, lambda _, __, after: (slope(after[0]),), back)


LSTM: Final = Recurrence(4, 1, 2, _lstm_step, _lstm_slopes, _lstm_back)
GRU: Final = Recurrence(3, 2, 1, _gru_step, _gru_slopes, _gru_back, _gru_weight_cotangents)
TANH: Final = _simple(tanh, lambda y: 1.0 - y * y)
RELU: Final = _simple(relu, step)


@dataclass(frozen=True)
class _Call:
    """The operands of one recurrence, by role."""

    recurrence: Recurrence
    gates: Tensor
    weights: State
    states: State
    mask: Tensor | None
    reverse: bool

    def forward(self, *, keep: bool) -> tuple[State, State]:
        """Return the last state; then, stacked, results and with `keep` states and kept values."""

        def one(before: State, xs: tuple[Tensor, Tensor | None]) -> tuple[State, State]:
            gates, mask = xs
            after, kept = self.recurrence.advance(gates, before, self.weights)
            y = after[0]
            if mask is not None:
                y = where(mask, y, 0.0)
                pairs = zip(after, before, strict=True)
                after = tuple(where(mask, a, b) for a, b in pairs)
            # without a mask the results are the states of the first kind
            return after, (y, *after[mask is None :], *kept) if keep else (y,)

        return scan(one, self.states, (self.gates, self.mask), reverse=self.reverse)

    def before(self, stacked: Sequence[Tensor]) -> State:
        """Return the state that each step started from."""
        pairs = zip(self.states, stacked, strict=True)
        if self.reverse:
            return tuple(concat([xs[1:], unsqueeze(start, 0)]) for start, xs in pairs)
        return tuple(concat([unsqueeze(start, 0), xs[:-1]]) for start, xs in pairs)

    def pulled(self, gs: Sequence[Tensor | None], after: State, kept: State) -> list[Tensor]:
        """Return cotangents of gates, weights and states; gs: those of results and last states."""
        before = self.before(after)
        starts = tuple(
            zeros(x.shape, x.dtype) if g is None else g
            for x, g in zip(self.states, gs[1:], strict=True)
        )
        first, (inner, *outer) = scan(
            self._step_back,
            starts,
            (self.recurrence.slopes(kept, before, after), gs[0], self.mask),
            reverse=not self.reverse,
        )
        flat = inner.reshape((-1, inner.shape[-1]))
        h = before[0].reshape((-1, before[0].shape[-1]))
        # sum_t inner_t^T h_{t-1} as one product over all steps and samples.
        g_r = gemm(flat, h, transA=1)
        g_weights = self.recurrence.weight_cotangents(flat, self.weights)
        return [outer[0] if outer else inner, g_r, *g_weights, *first]

    def _step_back(
        self, gs: State, xs: tuple[State, Tensor | None, Tensor | None]
    ) -> tuple[State, State]:
        slopes, g_y, mask = xs
        if mask is None:
            entering, passing = gs, None
        else:
            # A masked step copied its state, so the cotangent passes by it unchanged.
            entering = tuple(where(mask, g, 0.0) for g in gs)
            passing = tuple(where(mask, 0.0, g) for g in gs)
        if g_y is not None:
            g_y = g_y if mask is None else where(mask, g_y, 0.0)
            entering = (entering[0] + g_y, *entering[1:])
        kept, inner, outer = self.recurrence.back(entering, slopes)
        through = gemm(inner, self.weights[0], kept[0])
        cotangents = (through, *kept[1:])
        if passing is not None:
            cotangents = tuple(a + b for a, b in zip(cotangents, passing, strict=True))
        return cotangents, (inner,) if inner is outer else (inner, outer)  # type: ignore[return-value]


def _call(recurrence: Recurrence, inputs: Sequence[Tensor | None], reverse: int) -> _Call:
    first, last = 1 + recurrence.weights, 1 + recurrence.weights + recurrence.states
    gates, weights, states = inputs[0], tuple(inputs[1:first]), tuple(inputs[first:last])
    mask = inputs[last] if len(inputs) > last else None
    return _Call(recurrence, gates, weights, states, mask, bool(reverse))  # type: ignore[arg-type]


def _row(name: str, recurrence: Recurrence, operands: str, computes: str, *makers: MakeArray) -> Op:
    def body(*inputs: Tensor | None, reverse: int) -> list[Tensor]:
        last, (ys,) = _call(recurrence, inputs, reverse).forward(keep=False)
        return [ys, *last]

    def vjp_with_residuals(
        inputs: Sequence[Tensor | None], attrs: Mapping[str, Any], regions: Sequence[Function],
        outputs: int, vjp_of: Any,
    ) -> tuple[Sequence[Tensor], Pullback]:  # fmt: skip
        call = _call(recurrence, inputs, attrs.get("reverse", 0))
        last, (y, *rest) = call.forward(keep=True)
        states = tuple([*([y] if call.mask is None else ()), *rest][: recurrence.states])
        kept = tuple(rest[recurrence.states - (call.mask is None) :])

        def pull(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
            padded = [*gs, *[None] * (1 + recurrence.states - len(gs))]
            return [*call.pulled(padded, states, kept), None][: len(inputs)]

        return [y, *last][:outputs], pull

    outputs = 1 + recurrence.states
    return Op(
        name=name,
        computes=computes,
        kind=OpKind.RECURRENT,
        domain=DOMAIN,
        operands=(*operands, "P?"),
        attrs={"reverse": AttrSpec("INT", 0)},
        infer=recurrence.types,
        body=body,
        vjp_with_residuals=vjp_with_residuals,
        samples=(
            sample(*makers, outputs=outputs),
            sample(*makers, bools(4, 2, 1), outputs=outputs, reverse=1),
        ),
    )


# fmt: off
lstm_recurrence = _row(
    "LSTMSweep", LSTM, "TTTT",
    "all h, the last h, the last c: gates (i, o, f, g) + h r^T, i, o, f by sigmoid and g by tanh, "
    "c <- f c + i g, h <- o tanh(c)",
    normal(4, 2, 12), normal(12, 3), normal(2, 3), normal(2, 3),
)
"""Operands: gates; r; h; c; mask, if any."""
gru_recurrence = _row(
    "GRUSweep", GRU, "TTTT",
    "all h, the last h: gates (z, s, n) and (p_z, p_s, p_n) = h r^T, z <- sigmoid(z + p_z), "
    "s <- sigmoid(s + p_s), n <- tanh(n + s (p_n + b)), h <- n + z (h - n)",
    normal(4, 2, 9), normal(9, 3), normal(3), normal(2, 3),
)
"""Operands: gates; r; bias b of h's product; h; mask, if any."""
tanh_recurrence = _row(
    "TanhSweep", TANH, "TTT", "all h, the last h: h <- tanh(gates + h r^T)",
    normal(4, 2, 3), normal(3, 3), normal(2, 3),
)
"""Operands: gates; r; h; mask, if any."""
relu_recurrence = _row(
    "ReluSweep", RELU, "TTT", "all h, the last h: h <- max(gates + h r^T, 0)",
    normal(4, 2, 3), normal(3, 3), normal(2, 3),
)
"""Operands: gates; r; h; mask, if any."""
# fmt: on

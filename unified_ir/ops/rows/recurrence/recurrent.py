"""LSTM, GRU and RNN as ONNX defines them: both directions, lengths, any activations.

All inputs are multiplied by their weight at once, before the walk over time. With the default
activations, and nothing clipped or coupled, a direction is a row of `recurrences`, whose gradient
is taken by gates; anything else is a plain scan. A runtime has the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType, int64
from triplane.unified_ir.ops.emission import DYNAMIC_LSTM, EmissionContext
from triplane.unified_ir.ops.row import IntegerForm, MakeArray, Op, OpCall, OpKind, Sample
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    abs_,
    clip,
    exp,
    leaky_relu,
    minimum,
    relu,
    sigmoid,
    softplus,
    tanh,
)
from triplane.unified_ir.ops.rows.arithmetic.likelihood import NO_LABEL
from triplane.unified_ir.ops.rows.arithmetic.matrix import gemm
from triplane.unified_ir.ops.rows.control.scanning import scan
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather
from triplane.unified_ir.ops.rows.movement.structure import concat, stack, unsqueeze, where, zeros
from triplane.unified_ir.ops.rows.recurrence import recurrences
from triplane.unified_ir.ops.samples import fixed, normal, sample
from triplane.unified_ir.ops.tensor import Tensor

Squash = Callable[[Tensor], Tensor]
State = tuple[Tensor, ...]

DIRECTIONS: Final[Mapping[str, tuple[bool, ...]]] = {
    "forward": (False,),
    "reverse": (True,),
    "bidirectional": (False, True),
}
"""Whether each direction of a layer walks backwards."""


@dataclass(frozen=True, slots=True)
class Activation:
    """f(x, alpha, beta), which of the two it takes, and their defaults, None without."""

    f: Callable[[Tensor, float, float], Tensor]
    takes: str = ""
    alpha: float | None = None
    beta: float | None = None


# fmt: off
ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "sigmoid": Activation(lambda x, a, b: sigmoid(x)),
    "tanh": Activation(lambda x, a, b: tanh(x)),
    "relu": Activation(lambda x, a, b: relu(x)),
    "softsign": Activation(lambda x, a, b: x / (1.0 + abs_(x))),
    "softplus": Activation(lambda x, a, b: softplus(x)),
    "leakyrelu": Activation(lambda x, a, b: leaky_relu(x, alpha=a), "a", 0.01),
    "thresholdedrelu": Activation(lambda x, a, b: where(x > a, x, 0.0), "a", 1.0),
    "elu": Activation(
        lambda x, a, b: where(x > 0.0, x, a * (exp(minimum(x, 0.0)) - 1.0)), "a", 1.0),
    "hardsigmoid": Activation(lambda x, a, b: clip(a * x + b, 0.0, 1.0), "ab", 0.2, 0.5),
    "affine": Activation(lambda x, a, b: a * x + b, "ab"),
    "scaledtanh": Activation(lambda x, a, b: a * tanh(b * x), "ab"),
}
# fmt: on
"""By name in small letters; ONNX's names do not distinguish case."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction: its activations by name and as functions, and how it walks."""

    names: tuple[str, ...]
    squash: tuple[Squash, ...]
    reverse: bool


def _ways(row: str, usual: Sequence[str], attrs: Mapping[str, Any]) -> list[_Way]:
    direction = attrs["direction"]
    if direction not in DIRECTIONS:
        raise InvalidInput(
            f"the direction of {row} must be one of {', '.join(DIRECTIONS)}; got {direction!r}"
        )
    backwards, k = DIRECTIONS[direction], len(usual)
    names = _activations(attrs) or list(usual) * len(backwards)
    unknown = [n for n in names if n not in ACTIVATIONS]
    if unknown or len(names) < k * len(backwards):
        raise InvalidInput(
            f"{row} needs {k * len(backwards)} activations of {', '.join(ACTIVATIONS)}; "
            f"got {attrs.get('activations')}"
        )
    names = names[: k * len(backwards)]
    numbers = _numbers(row, names, attrs)
    squash = [_squash(n, *pair) for n, pair in zip(names, numbers, strict=True)]
    return [
        _Way(tuple(names[i : i + k]), tuple(squash[i : i + k]), backward)
        for i, backward in zip(range(0, len(names), k), backwards, strict=True)
    ]


def _activations(attrs: Mapping[str, Any]) -> list[str]:
    return [n.lower() for n in attrs.get("activations") or ()]


def _squash(name: str, alpha: float | None, beta: float | None) -> Squash:
    return lambda x: ACTIVATIONS[name].f(x, alpha or 0.0, beta or 0.0)


def _numbers(
    row: str, names: Sequence[str], attrs: Mapping[str, Any]
) -> list[tuple[float | None, float | None]]:
    """Return alpha and beta of each activation, None if it takes none.

    The numbers in the attributes go, in order, to those activations that take one; others have
    their defaults.
    """
    alphas, betas = (iter(attrs.get(f"activation_{a}") or ()) for a in ("alpha", "beta"))
    pairs = []
    for name in names:
        activation = ACTIVATIONS[name]
        alpha = next(alphas, activation.alpha) if "a" in activation.takes else None
        beta = next(betas, activation.beta) if "b" in activation.takes else None
        if (alpha, beta).count(None) > 2 - len(activation.takes):
            raise InvalidInput(f"{row}: {name} has no default alpha and beta; give both")
        pairs.append((alpha, beta))
    return pairs


def numbers_of(row: str, attrs: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return `activation_alpha` and `activation_beta` with a number per activation."""
    pairs = _numbers(row, _activations(attrs), attrs)
    return {
        "activation_alpha": tuple(a for a, _ in pairs if a is not None),
        "activation_beta": tuple(b for _, b in pairs if b is not None),
    }


def _clipped(limit: float | None) -> Squash:
    return (lambda x: clip(x, -limit, limit)) if limit else lambda x: x


@dataclass(frozen=True, slots=True)
class _Direction:
    """One direction's operands: mixed inputs (T, N, k H), r: (k H, H), bias of its product."""

    way: _Way
    mixed: Tensor
    r: Tensor
    bias: Tensor | None
    peepholes: Tensor | None
    states: State
    mask: Tensor | None
    attrs: Mapping[str, Any]

    @property
    def hidden(self) -> Any:
        return self.r.shape[1]

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Return gates first..last-1 of the last axis."""
        return x[..., first * self.hidden : last * self.hidden]

    def scanned(self, one: Callable[[Tensor, State], State]) -> tuple[Tensor, ...]:
        """Return all h and the last states of a plain scan; masked steps keep the state, give 0."""

        def step(before: State, xs: tuple[Tensor, Tensor | None]) -> tuple[State, Tensor]:
            mixed, mask = xs
            after = one(mixed, before)
            if mask is None:
                return after, after[0]
            held = (where(mask, a, b) for a, b in zip(after, before, strict=True))
            return tuple(held), where(mask, after[0], 0.0)

        last, ys = scan(step, self.states, (self.mixed, self.mask), reverse=self.way.reverse)
        return (ys, *last)

    def swept(self, row: Op, *weights: Tensor) -> tuple[Tensor, ...]:
        """Do the same by a row whose gradient is taken by gates."""
        operands = (self.mixed, self.r, *weights, *self.states, self.mask)
        outputs = 1 + len(self.states)
        return row.all_outputs(*operands, outputs=outputs, reverse=int(self.way.reverse))


def _simple(walk: _Direction) -> tuple[Tensor, ...]:
    """h' = f(W x + R h + b)."""
    row = {"tanh": recurrences.tanh_recurrence, "relu": recurrences.relu_recurrence}.get(
        walk.way.names[0]
    )
    if row is not None and not walk.attrs["clip"]:
        return walk.swept(row)
    (f,), limit = walk.way.squash, _clipped(walk.attrs["clip"])
    return walk.scanned(lambda x, s: (f(limit(gemm(s[0], walk.r, x, transB=1))),))


def _gru(walk: _Direction) -> tuple[Tensor, ...]:
    """h' = (1 - z) n + z h, with the reset gate on the product or on the state (Cho 2014)."""
    attrs, way, bias = walk.attrs, walk.way, walk.bias
    after = bool(attrs["linear_before_reset"])
    if after and bias is None:
        bias = zeros((walk.hidden,), walk.r.dtype)
    if after and way.names == ("sigmoid", "tanh") and not attrs["clip"]:
        assert bias is not None
        return walk.swept(recurrences.gru_recurrence, bias)
    (f, g), limit = way.squash, _clipped(attrs["clip"])
    split = 2 * walk.hidden

    def one(x: Tensor, state: State) -> State:
        (h,) = state
        # z and r need only the first 2 H rows of the recurrent weight.
        gates = f(limit(gemm(h, walk.r[:split], walk.part(x, 0, 2), transB=1)))
        z, reset = walk.part(gates, 0, 1), walk.part(gates, 1, 2)
        if after:
            inner = reset * gemm(h, walk.r[split:], bias, transB=1)
        else:
            # Before the product (ONNX's default): n = g(x_n + R_n (r h) + b), as in Cho et al.
            # 2014. After it: n = g(x_n + r (R_n h + b)), as in cuDNN and PyTorch.
            inner = gemm(reset * h, walk.r[split:], bias, transB=1)
        n = g(limit(walk.part(x, 2, 3) + inner))
        return (n + z * (h - n),)

    return walk.scanned(one)


def _lstm(walk: _Direction) -> tuple[Tensor, ...]:
    """c' = f c + i g, h' = o h(c'); peepholes let gates see c (Gers and Schmidhuber 2000)."""
    attrs, way = walk.attrs, walk.way
    usual = way.names == ("sigmoid", "tanh", "tanh") and not attrs["input_forget"]
    if usual and not attrs["clip"] and walk.peepholes is None:
        return walk.swept(recurrences.lstm_recurrence)
    (f, g, h_of), limit = way.squash, _clipped(attrs["clip"])
    peeps = walk.peepholes

    def seen(k: int, x: Tensor, c: Tensor) -> Tensor:
        gate = walk.part(x, k, k + 1)
        return f(limit(gate if peeps is None else gate + walk.part(peeps, k, k + 1) * c))

    def one(x: Tensor, state: State) -> State:
        h, c = state
        stacked = gemm(h, walk.r, x, transB=1)
        i = seen(0, stacked, c)
        # Coupled gates (input_forget): f = 1 - i.
        forget = 1.0 - i if attrs["input_forget"] else seen(2, stacked, c)
        c = forget * c + i * g(limit(walk.part(stacked, 3, 4)))
        return (seen(1, stacked, c) * h_of(c), c)

    return walk.scanned(one)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties in which the three rows differ."""

    name: str
    gates: int
    states: int
    usual: tuple[str, ...]
    walk: Callable[[_Direction], tuple[Tensor, ...]]

    def body(self, *inputs: Tensor | None, **attrs: Any) -> list[Tensor]:
        """Return Y, then the last states; every direction by itself."""
        padded: list[Any] = [*inputs, *[None] * (8 - len(inputs))]
        x, w, r, b, lens, *starts, peepholes = padded
        batch_first = bool(attrs["layout"])
        if batch_first:
            x = x.transpose(1, 0, 2)
        mask = None if lens is None else _inside(lens, x)
        results = []
        for d, way in enumerate(_ways(self.name, self.usual, attrs)):
            r_d: Any = _at(r, d)
            mixed, bias = _mixed(self, x, _at(w, d), _at(b, d), attrs)
            states = tuple(
                _start(s, d, x, r_d, batch_first=batch_first) for s in starts[: self.states]
            )
            peeps = _at(peepholes, d)
            results.append(self.walk(_Direction(way, mixed, r_d, bias, peeps, states, mask, attrs)))
        ys, *lasts = zip(*results, strict=True)
        if batch_first:
            y = stack([y.transpose(1, 0, 2) for y in ys], axis=2)
            return [y, *(stack(s, axis=1) for s in lasts)]
        return [stack(ys, axis=1), *(stack(s) for s in lasts)]

    def types(self, call: OpCall) -> tuple[TensorType, ...]:
        """Infer the types of Y and of the last states."""
        x, w, r = (call.type(i) for i in range(3))
        d = len(_ways(self.name, self.usual, call.attrs))
        if x.rank != 3 or w.rank != 3 or r.rank != 3:
            raise ShapeError(f"{call.row} takes X, W and R of three axes, got {x}, {w} and {r}")
        h, k = r.shape[2], self.gates * r.shape[2]
        t, n = (x.shape[1], x.shape[0]) if call.attrs["layout"] else x.shape[:2]
        turned = (lambda *s: (s[1], s[0], *s[2:])) if call.attrs["layout"] else lambda *s: s
        state = turned(d, n, h)
        y = (n, t, d, h) if call.attrs["layout"] else (t, d, n, h)
        weights = [(d, k, x.shape[2]), (d, k, h), (d, 2 * k)]
        for i, shape in enumerate([*weights, (n,), state, state, (d, 3 * h)], 1):
            if call.has(i) and call.type(i).shape != shape:
                raise ShapeError(
                    f"{call.row} of X {x} in {d} directions with {h} units takes operand {i} of "
                    f"shape ({', '.join(map(str, shape))}), got {call.type(i)}"
                )
        hidden_size = call.attrs.get("hidden_size")
        if hidden_size is not None and hidden_size != h:
            raise ShapeError(f"{call.row} has hidden_size {hidden_size}, but R {r} has {h} units")
        return (x.with_shape(y), *[x.with_shape(state)] * self.states)[: call.outputs]

    def row(self, *samples: Sample, **columns: Any) -> Op:
        """Build the row of this kind; the other columns are in `columns`."""
        return Op(
            name=self.name,
            kind=OpKind.RECURRENT,
            emit=_emit_recurrent,
            infer=self.types,
            body=self.body,
            samples=samples,
            **columns,
        )


def _at(x: Any, d: int) -> Any:
    """Return x[d], or None; a single direction is only reshaped, which copies nothing."""
    if x is None:
        return None
    return x.reshape(x.shape[1:]) if x.shape[0] == 1 else x[d]


def _start(s: Tensor | None, d: int, x: Tensor, r: Tensor, *, batch_first: bool) -> Any:
    if s is None:
        return zeros((x.shape[1], r.shape[1]), x.dtype)
    return _at(s.transpose(1, 0, 2) if batch_first else s, d)


def _inside(lens: Tensor, x: Tensor) -> Tensor:
    """Return bool (T, N, 1): whether step t is within the length of sequence n.

    It is read from a table of all lengths, so that a length below 0 or above T is refused when the
    graph runs, as the operator itself refuses it.
    """
    steps = x.shape[0]
    table = unsqueeze(arange(steps), 0) < unsqueeze(arange(steps + 1), 1)
    lens = lens.cast(int64)
    # A negative length would count from the end of the table.
    rows = gather(table, where(lens < 0, NO_LABEL, lens))
    return unsqueeze(rows.transpose(1, 0), 2)


def _mixed(
    kind: _Kind, x: Tensor, w: Tensor, b: Tensor | None, attrs: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Return W x + bias for all steps at once, and the bias that must stay with the product R h."""
    bias = inner = None
    if b is not None:
        size = w.shape[0]
        own, recurrent = b[:size], b[size:]
        bias = own + recurrent
        # The reset gate multiplies R_n h + b_n, so that part of the bias cannot join the input's.
        if attrs.get("linear_before_reset"):
            split = 2 * (size // kind.gates)
            bias, inner = concat([bias[:split], own[split:]]), recurrent[split:]
    flat = gemm(x.reshape((-1, x.shape[2])), w, bias, transB=1)
    return flat.reshape((*x.shape[:2], w.shape[0])), inner


def _operands(
    gates: int, *, directions: int = 1, states: int = 0, lens: bool = False, layout: int = 0
) -> tuple[MakeArray | None, ...]:
    """Make X of 4 steps of 3 sequences of 2 numbers, for 2 units; lengths 2, 4, 0."""
    d, h = directions, 2
    x = (3, 4, 2) if layout else (4, 3, 2)
    state = (3, d, h) if layout else (d, 3, h)
    lengths = fixed([2, 4, 0], "int32") if lens else None
    shapes = [(d, gates * h, 2), (d, gates * h, h), (d, 2 * gates * h)]
    return (normal(*x), *(normal(*s) for s in shapes), lengths, *[normal(*state)] * states)


def _emit_recurrent(context: EmissionContext, node: Node) -> None:
    """Emit the operator as onnxruntime 1.31 needs it.

    Batch-first operands are transposed around it, because onnxruntime refuses layout 1. It gives
    zeros as the last state of a sequence without steps, whose state is the initial one, and has
    other default numbers of activations than ONNX, so all are written out.
    """
    written = {**node.attrs, **numbers_of(node.op.name, node.attrs)}
    plain: dict[str, Any] = {k: v for k, v in written.items() if v != ()}
    turned = bool(plain.pop("layout", 0))
    names = [*context.inputs(node), *[""] * 7]
    if not turned and (not names[4] or not any(names[5:7])):
        _recurrent_kernel(context, node, names, context.output_names(node), plain)
        return
    if turned:
        for i in (0, 5, 6):
            if names[i]:
                names[i] = context.emit("Transpose", names[i], perm=[1, 0, 2])
    results = [context.fresh() for _ in node.outputs]
    _recurrent_kernel(context, node, names, results, plain)
    finals = [results[0], *_kept_states(context, names, results[1:])]
    perms = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
    for name, final, perm in zip(finals, context.output_names(node), perms, strict=False):
        attrs = {"perm": perm} if turned else {}
        context.add("Transpose" if turned else "Identity", [name], [final], **attrs)


def _recurrent_kernel(
    context: EmissionContext,
    node: Node,
    names: list[str],
    results: list[str],
    attrs: Mapping[str, Any],
) -> None:
    """Emit the operator, or an LSTM on int8 weights if it has them and the target supports it."""
    domain, _, integer = DYNAMIC_LSTM.rpartition(".")
    if node.op.name == "LSTM" and DYNAMIC_LSTM in context.target.operators:
        w, r = (_gates_in_int8(context, name) for name in names[1:3])
        if w is not None and r is not None:
            inputs = [names[0], w[0], r[0], *names[3:8], *w[1:], *r[1:]]
            context.add(integer, inputs, results, domain=domain, **attrs)
            return
    context.add(node.op.name, names[: len(node.inputs)], results, **attrs)


def _gates_in_int8(context: EmissionContext, name: str) -> tuple[str, str, str] | None:
    """Return integers, scales and zero points of weights that `quantize.insert` quantized."""
    turned = context.producer(name, "Transpose")
    read = turned and context.producer(turned[0][0], "DequantizeLinear")
    # Exactly the nodes that `quantize.insert` writes; anything else stays in float.
    if not turned or not read or len(read[0]) != 3 or turned[1] != {"perm": [0, 2, 1]}:
        return None
    weights, *parts = read[0]
    scale, zero = map(context.held, parts)
    if scale is None or zero is None or zero.dtype != np.int8 or zero.any() or scale.ndim != 3:
        return None
    if read[1].get("axis", 1) != 1 or scale.shape[1] != 1:
        return None
    # one scale for each direction, where all of its rows have the same, takes a faster path
    rows = slice(None) if np.ptp(scale, axis=2).any() else 0
    return weights, context.constant(scale[:, 0, rows]), context.constant(zero[:, 0, rows])


def _kept_states(
    context: EmissionContext, names: Sequence[str], states: Sequence[str]
) -> list[str]:
    """Return the last states; of a sequence without steps, the initial ones."""
    lens, starts = names[4], names[5:7]
    if not lens:
        return list(states)
    zero = context.constant(np.array(0, np.int32))
    walked = context.emit("Greater", lens, zero)
    walked = context.emit("Unsqueeze", walked, context.constant(np.array([0, 2])))
    pairs = zip(states, starts, strict=False)
    return [context.emit("Where", walked, s, first) if first else s for s, first in pairs]


rnn = _Kind("RNN", 1, 1, ("tanh",), _simple).row(
    sample(*_operands(1)[:3], hidden_size=2, outputs=2),
    sample(
        *_operands(1, directions=2, states=1, lens=True), hidden_size=2, outputs=2,
        direction="bidirectional", activations=("Relu", "Affine"), activation_alpha=(0.7,),
        activation_beta=(0.1,),
    ),
    sample(
        *_operands(1, layout=1, states=1), hidden_size=2, outputs=2, layout=1,
        direction="reverse", activations=("Softsign",), clip=5.0,
    ),
    weights=(1, 2, 3),
    buffers=(5,),
)  # fmt: skip
"""Elman 1990; X, W, R, B?, sequence_lens?, initial_h? -> Y, Y_h."""

gru = _Kind("GRU", 3, 1, ("sigmoid", "tanh"), _gru).row(
    sample(*_operands(3), hidden_size=2, outputs=2),
    sample(*_operands(3)[:3], hidden_size=2, linear_before_reset=1),
    sample(
        *_operands(3, directions=2, states=1, lens=True), hidden_size=2, outputs=2,
        direction="bidirectional", linear_before_reset=1,
    ),
    sample(
        *_operands(3, layout=1, states=1), hidden_size=2, outputs=2, layout=1, clip=5.0,
        direction="reverse", activations=("HardSigmoid", "ScaledTanh"),
        activation_alpha=(0.25, 1.2), activation_beta=(0.5, 0.8), linear_before_reset=1,
    ),
    weights=(1, 2, 3),
    buffers=(5,),
)  # fmt: skip
"""Cho et al. 2014; gates z, r, h; X, W, R, B?, sequence_lens?, initial_h? -> Y, Y_h."""

lstm = _Kind("LSTM", 4, 2, ("sigmoid", "tanh", "tanh"), _lstm).row(
    sample(*_operands(4)[:3], hidden_size=2, outputs=3),
    sample(
        *_operands(4, directions=2, states=2, lens=True), hidden_size=2, outputs=3,
        direction="bidirectional",
    ),
    sample(
        *_operands(4, states=2), normal(1, 6), hidden_size=2, outputs=3, clip=5.0,
        direction="reverse",
    ),
    sample(
        *_operands(4, layout=1, states=2), hidden_size=2, outputs=3, layout=1, input_forget=1,
        activations=("Sigmoid", "Softsign", "LeakyRelu"),
    ),
    weights=(1, 2, 3, 7),
    buffers=(5, 6),
    integer_form=IntegerForm.RECURRENT,
)  # fmt: skip
"""Hochreiter and Schmidhuber 1997; gates i, o, f, c; X, W, R, B?, sequence_lens?, initial_h?,
initial_c?, P? -> Y, Y_h, Y_c."""

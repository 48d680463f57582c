"""Recurrent layers against their equations, step by step in float64."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, mode, nn, trace

N, T, I, H = 3, 5, 4, 6
RNG = np.random.default_rng(5)
X = RNG.standard_normal((N, T, I)).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rnn(p, x, state):
    return (np.tanh(x @ p["weight_ih"].T + p["bias"] + state[0] @ p["weight_hh"].T),)


def lstm(p, x, state):
    h, c = state
    gates = x @ p["weight_ih"].T + p["bias"] + h @ p["weight_hh"].T
    i, f, g, o = np.split(gates, 4, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def gru(p, x, state):
    (h,) = state
    r_x, z_x, n_x = np.split(x @ p["weight_ih"].T + p["bias"], 3, axis=1)
    r_h, z_h, n_h = np.split(h @ p["weight_hh"].T, 3, axis=1)
    r, z = sigmoid(r_x + r_h), sigmoid(z_x + z_h)
    n = np.tanh(n_x + r * (n_h + p["bias_n"]))
    return ((1 - z) * n + z * h,)


CASES = {"RNN": (nn.RNN, nn.RNNCell, rnn, 1), "LSTM": (nn.LSTM, nn.LSTMCell, lstm, 2)}
CASES["GRU"] = (nn.GRU, nn.GRUCell, gru, 1)


def expected(step, cell, start):
    p = {k: v.array.astype(np.float64) for k, v in cell.parameters().items()}
    state, ys = start, []
    for t in range(T):
        state = step(p, X[:, t].astype(np.float64), state)
        ys.append(state[0])
    return np.stack(ys, axis=1), state


@pytest.mark.parametrize("how", ["graph", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_a_sequence_follows_the_equations(name, how):
    layer, _, step, states = CASES[name]
    cell = layer(I, H)
    with mode(how):
        ys, last = cell(X)
    wanted, final = expected(step, cell, tuple(np.zeros((N, H)) for _ in range(states)))
    np.testing.assert_allclose(ys, wanted, rtol=1e-4, atol=1e-6)
    for got, want in zip(last if isinstance(last, tuple) else (last,), final, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_single_step_is_a_sequence_of_one_from_a_given_state(name):
    layer, single, _, states = CASES[name]
    cell, whole = single(I, H), layer(I, H)
    whole.load({k: p.array for k, p in cell.parameters().items()})
    start = tuple(RNG.standard_normal((N, H)).astype(np.float32) for _ in range(states))
    one = cell(X[:, 0], *start)
    _, last = whole(X[:, :1], start if states > 1 else start[0])
    for a, b in zip(np.atleast_3d(one), np.atleast_3d(last), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_batch_and_length_may_both_be_symbols(name):
    function = trace(CASES[name][0](I, H), TensorSpec(("N", "T", I)))
    assert str(function.results[0].type) == f"float32[N,T,{H}]"


def walked(step, p, x, ending, length, states):
    """One direction over one sequence (T, I) of `length` steps: outputs, and the last state."""
    found = {k: p[k + ending] for k in ("weight_ih", "weight_hh", "bias")}
    if f"bias_n{ending}" in p:
        found["bias_n"] = p[f"bias_n{ending}"]
    state, ys = tuple(np.zeros((1, H)) for _ in range(states)), np.zeros((len(x), H))
    for t in range(length)[:: -1 if ending.endswith("_reverse") else 1]:
        state = step(found, x[t : t + 1], state)
        ys[t] = state[0][0]
    return ys, [s[0] for s in state]


def deep(step, cell, x, lengths, states):
    """Two layers in both directions, sequence by sequence; (N, T, 2 H), (4, N, H) each."""
    p = {k: v.array.astype(np.float64) for k, v in cell.parameters().items()}
    outputs, lasts = [], []
    for sequence, length in zip(x.astype(np.float64), lengths, strict=True):
        y, ends = sequence, []
        for k in ("", "_l1"):
            both = [walked(step, p, y, k + e, length, states) for e in ("", "_reverse")]
            y = np.concatenate([ys for ys, _ in both], axis=1)
            ends += [end for _, end in both]
        outputs.append(y)
        lasts.append(ends)
    stacked = [np.stack([[end[s] for end in ends] for ends in lasts], 1) for s in range(states)]
    return np.stack(outputs), stacked


@pytest.mark.parametrize("training", [False, True], ids=["operator", "recorded gradient"])
@pytest.mark.parametrize("name", CASES)
def test_layers_in_both_directions_end_where_the_lengths_say(name, training):
    layer, _, step, states = CASES[name]
    cell = layer(I, H, num_layers=2, bidirectional=True)
    lengths = np.array([T, 2, 3])
    wanted, ends = deep(step, cell, X, lengths, states)

    def loss(x):
        ys, last = cell(x, None, lengths)
        last = last if isinstance(last, tuple) else (last,)
        return sum(((y * y).sum() for y in last), (ys * ys).sum()), (ys, last)

    if training:  # forward of the gradient is another graph than the operator's
        g = grad(lambda x: loss(x)[0])(X)
        h = 1e-2 * np.sign(RNG.standard_normal(X.shape)).astype(np.float32)
        slope = (float(graph(loss)(X + h)[0]) - float(graph(loss)(X - h)[0])) / 2
        np.testing.assert_allclose((g * h).sum(), slope, rtol=2e-2, atol=2e-4)
        assert not g[1, 2:].any(), "nothing beyond a length has an effect"
        return
    ys, last = graph(loss)(X)[1]
    np.testing.assert_allclose(ys, wanted, rtol=1e-4, atol=1e-6)
    for got, want in zip(last, ends, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_elements_between_layers_are_dropped_in_training_alone():
    cell = nn.LSTM(I, H, num_layers=2, p_drop=0.5)
    cell.train()
    one, two = cell(X)[0], cell(X)[0]
    assert not np.array_equal(one, two)
    cell.eval()
    np.testing.assert_array_equal(cell(X)[0], cell(X)[0])
    with pytest.raises(InvalidInput, match="between layers"):
        nn.LSTM(I, H, p_drop=0.5)


def test_a_state_of_another_form_is_refused():
    cell = nn.GRU(I, H, bidirectional=True)
    with pytest.raises(InvalidInput, match=r"takes a state \(2, N, 6\), got"):
        cell(X, np.zeros((N, H), np.float32))


@pytest.mark.parametrize("how", ["graph", "eager"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [-1, T + 1])
def test_a_length_beyond_the_sequence_is_refused(name, length, how):
    cell = CASES[name][0](I, H)
    with mode(how), pytest.raises((InvalidInput, IndexError)):
        cell(X, None, np.array([T, 2, length]))
    if how == "graph":
        with pytest.raises(InvalidInput):
            grad(lambda x: cell(x, None, np.array([T, 2, length]))[0].sum())(X)

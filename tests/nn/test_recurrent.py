"""Recurrent layers against their equations, step by step in float64."""

import numpy as np
import pytest

from triplane.unified_ir import TensorSpec, mode, nn, trace

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

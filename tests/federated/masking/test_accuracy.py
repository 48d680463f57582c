"""Learning from encoded sums is as good as learning from exact means."""

import numpy as np
import pytest

from triplane.unified_ir import data
from triplane.unified_ir.federated.masking import EncodedSection, UpdateEncoding, range_for

DEVICES, ROUNDS, CAP, HIDDEN = 20, 40, 100, 64
SIZES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
ENTRIES = sum(int(np.prod(s)) for s in SIZES)


def parts(w):
    ends = np.cumsum([int(np.prod(s)) for s in SIZES])[:-1]
    return [p.reshape(s) for p, s in zip(np.split(w, ends), SIZES, strict=True)]


def logits(w, x):
    w1, b1, w2, b2 = parts(w)
    hidden = np.maximum(x @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def gradient(w, x, y):
    _, _, w2, _ = parts(w)
    hidden, z = logits(w, x)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w2.T) * (hidden > 0)
    pieces = (x.T @ back, back.sum(axis=0), hidden.T @ p, p.sum(axis=0))
    return np.concatenate([piece.reshape(-1) for piece in pieces])


def update_of(w, x, y):
    """Five steps of gradient descent, clipped to a norm of 1."""
    end = w.copy()
    for _ in range(5):
        end -= 0.3 * gradient(end, x, y)
    change = end - w
    return (change / max(1.0, np.linalg.norm(change))).astype(np.float32)


def accuracy_after_rounds(shards, held_out, mean):
    w = np.random.default_rng(0).normal(0, 0.1, ENTRIES)
    for number in range(ROUNDS):
        updates = [update_of(w, x, y) for x, y in shards]
        w = w + mean(number, updates, [len(y) for _, y in shards])
    x, y = held_out
    return float(np.mean(logits(w, x)[1].argmax(axis=1) == y))


def encoded_mean(number, updates, examples):
    section = EncodedSection(ENTRIES, range=range_for(1.0, ENTRIES))
    encoding = UpdateEncoding((section,), CAP, seed=number)
    encoded = [encoding.encode([u], n) for u, n in zip(updates, examples, strict=True)]
    sums = [np.array(v, np.uint64).sum(axis=0) for v in zip(*encoded, strict=True)]
    return encoding.decode(sums, len(updates), cohort=len(updates))[0][0]


def exact_mean(_number, updates, examples):
    return np.average(updates, axis=0, weights=examples)


@pytest.mark.long
def test_eight_bits_cost_less_than_a_point_of_accuracy():
    x, y = data.digits().x.reshape(1797, 64), data.digits().y
    order = np.random.default_rng(1).permutation(len(y))
    x, y = x[order], y[order]
    # Devices have 40 to 100 samples.
    ends = np.cumsum(np.linspace(40, 100, DEVICES).astype(int))
    shards = list(zip(np.split(x, ends)[:-1], np.split(y, ends)[:-1], strict=True))
    held_out = x[ends[-1] :], y[ends[-1] :]
    exact = accuracy_after_rounds(shards, held_out, exact_mean)
    encoded = accuracy_after_rounds(shards, held_out, encoded_mean)
    assert exact > 0.9
    assert encoded > exact - 0.01

"""The random numbers of rows: a stream that never changes, whatever the block and the types."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triplane.unified_ir.data.randomness import RowDraws

WORDS = st.integers(0, 2**64 - 1)
ROWS = st.lists(st.integers(0, 2**63 - 1), max_size=5)


def splitmix(state: int) -> int:
    """The word after a state: Steele, Lea, Flood 2014, as in Java's SplittableRandom."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_words_are_those_of_every_version():
    words = RowDraws(7, 3, 1, np.array([0, 5, 2**40])).words(2)
    assert [f"{word:x}" for word in words.ravel().tolist()] == [
        "1e0e72b3f6ba80fc", "a6aa12998d9bdff4", "db8b4252d253f9f8",
        "a05ec4a1db26ad58", "66dfaa09728c1f3a", "72f02b19fc5ce9eb",
    ]  # fmt: skip


@given(seed=WORDS, epoch=WORDS, step=WORDS, rows=ROWS)
def test_words_are_splitmix_from_a_hash_of_the_place(seed, epoch, step, rows):
    key = splitmix(splitmix(splitmix(seed) ^ epoch) ^ step)
    states = [splitmix(key ^ row) for row in rows]
    golden = 0x9E3779B97F4A7C15
    expected = [[splitmix((s + k * golden) % 2**64) for k in range(3)] for s in states]
    assert RowDraws(seed, epoch, step, np.array(rows, np.int64)).words(3).tolist() == expected


def test_seeds_of_numpy_are_those_of_python():
    rows = np.arange(4)
    numpy = RowDraws(np.int64(7), np.int64(3), 1, rows)  # type: ignore[arg-type]
    assert np.array_equal(numpy.words(2), RowDraws(7, 3, 1, rows).words(2))

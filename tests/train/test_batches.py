"""Batches: every sample once, in an order of (seed, epoch), from any batch on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data
from triplane.unified_ir.train.batches import BatchSource, in_order

sizes = st.integers(1, 40)


def arrays(n):
    return np.arange(n, dtype=np.float32)[:, None], np.arange(n)


@given(sizes, st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_an_epoch_holds_every_sample_once(n, size, seed, epoch):
    source = BatchSource(arrays(n), size, seed)
    found = list(source.epoch(epoch))
    assert len(found) == source.count
    assert all(len(y) == size for _, y in found[:-1])
    labels = np.concatenate([y for _, y in found])
    assert np.array_equal(np.sort(labels), np.arange(n))
    assert all(np.array_equal(x[:, 0], y) for x, y in found)


@given(sizes, st.integers(1, 9), st.integers(0, 9))
def test_an_epoch_may_start_at_any_batch(n, size, first):
    source = BatchSource(arrays(n), size, 3)
    whole = list(source.epoch(7))
    if first > len(whole):
        with pytest.raises(InvalidInput, match="has fewer"):
            list(source.epoch(7, first=first))
        return
    rest = list(source.epoch(7, first=first))
    assert [y.tolist() for _, y in rest] == [y.tolist() for _, y in whole[first:]]


def test_arrays_and_datasets_have_one_order():
    rng = np.random.default_rng(0)
    held = data.arrays(rng.random((23, 2, 2)).astype(np.float32), np.arange(23) % 3)
    for epoch in range(3):
        a = BatchSource(held, 5, 9).epoch(epoch)
        b = BatchSource((held.x, held.y), 5, 9).epoch(epoch)
        assert all(np.array_equal(p[0], q[0]) for p, q in zip(a, b, strict=True))


def test_epochs_and_seeds_differ():
    orders = {
        tuple(np.concatenate([y for _, y in BatchSource(arrays(30), 7, seed).epoch(epoch)]))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_evaluation_keeps_the_datas_order():
    x, y = arrays(10)
    for given_data in ((x, y), data.arrays(x, y)):
        assert np.array_equal(np.concatenate([b[-1] for b in in_order(given_data, 4)]), y)


def test_looking_at_the_first_batch_uses_nothing_up():
    source = BatchSource(iter([arrays(3), arrays(2)]), 1, 0)
    assert len(source.peek()[1]) == 3
    assert [len(y) for _, y in source.epoch(0)] == [3, 2]
    assert not source.repeats()


def test_wide_floats_become_single():
    (batch,) = BatchSource((np.zeros((2, 3)), np.zeros(2)), 9, 0).epoch(0)
    assert [a.dtype for a in batch] == [np.float32, np.float32]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_are_64_bits(seed):
    with pytest.raises(InvalidInput, match="a seed must be in"):
        BatchSource(arrays(3), 1, seed)


def test_a_batch_without_rows_is_passed_over():
    given_data = [arrays(3), arrays(0), arrays(2), arrays(0)]
    assert [len(y) for _, y in BatchSource(given_data, 1, 0).epoch(0)] == [3, 2]
    assert [len(b[-1]) for b in in_order(given_data, 4)] == [3, 2]


def test_a_column_of_texts_is_refused_by_name():
    texts = data.arrays({"text": np.array(["a b", "c"], object), "y": np.arange(2)})
    with pytest.raises(InvalidInput, match="column 'text' holds text, but a model takes numbers"):
        BatchSource(texts.roles("text", "y"), 2, 0)


def one_shot(n=10):
    return ({"x": np.full(3, k, np.float32), "y": k % 2} for k in range(n))


def test_a_dataset_of_an_iterator_is_read_once_and_loses_no_sample():
    source = BatchSource(data.generated(one_shot()).named(("even", "odd")), 4, 0)
    assert source.peek()[1].tolist() == [0, 1, 0, 1]
    assert [x[:, 0].tolist() for x, _ in source.epoch(0)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert source.labels == ("even", "odd")
    assert not source.repeats()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: data.generated(one_shot()), r"one_shot\.<locals>\.<genexpr>"),
        (lambda: iter([arrays(3), arrays(2)]), "list_iterator"),
    ],
)
def test_what_is_read_once_is_refused_by_name_where_it_must_be_read_again(make, name):
    source = BatchSource(make(), 4, 0)
    source.peek()
    with pytest.raises(InvalidInput, match=rf"and {name} can be read once only"):
        source.refuse_once()

from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import Ragged
from triplane.unified_ir.data.sources.iterables import IterableSource

N = 700


def squares():
    for k in range(N):
        yield {"x": np.full((2,), k, np.float32), "y": k * k, "name": f"n{k}"}


def read(feed, start=0) -> dict[str, list[Any]]:
    blocks = list(feed.blocks(start))
    return {name: [v for b in blocks for v in b[name].tolist()] for name in feed.schema}


def test_a_generator_function_is_read_from_any_sample_on_and_again():
    feed = IterableSource(squares, "squares").open()
    assert not feed.once
    assert {k: str(f) for k, f in feed.schema.items()} == {
        "x": "float32[2]", "y": "int64", "name": "text"
    }  # fmt: skip
    for start in (0, 1, 256, 300, N - 1, N):
        columns = read(feed, start)
        assert columns["y"] == [k * k for k in range(start, N)]
        assert columns["name"] == [f"n{k}" for k in range(start, N)]
        assert columns["x"] == [[k, k] for k in range(start, N)]


def test_tuples_have_the_columns_that_are_named():
    feed = IterableSource([(1.5, 0), (2.5, 1)], "pairs").open()
    assert read(feed) == {"x": [1.5, 2.5], "y": [0, 1]}
    feed = IterableSource([("a", b"b", 3)], "triples", names=("s", "t", "u")).open()
    assert read(feed) == {"s": ["a"], "t": [b"b"], "u": [3]}
    with pytest.raises(InvalidInput, match=r"triples: .*tuple of x, y; sample 0 is a tuple of 3"):
        IterableSource([(1, 2, 3)], "triples").open()
    with pytest.raises(InvalidInput, match="sample 0 is a float"):
        IterableSource([1.5], "numbers").open()  # type: ignore[list-item]


def test_an_iterator_is_marked_and_read_once():
    feed = IterableSource(squares(), "squares").open()
    assert feed.once
    assert read(feed, 3)["y"] == [k * k for k in range(3, N)]
    with pytest.raises(InvalidInput, match="squares is an iterator, which can be read once; state"):
        next(feed.blocks(0))


def test_ragged_columns_are_stated():
    samples = [{"x": np.arange(2)}] * 300 + [{"x": np.arange(3)}]
    with pytest.raises(
        InvalidInput, match=r"column 'x' differ in their first axis.*ragged=\('x',\)"
    ):
        list(IterableSource(samples, "s").open().blocks(0))
    feed = IterableSource(samples, "s", ragged=("x",)).open()
    assert str(feed.schema["x"]) == "int64[*]"
    blocks = list(feed.blocks(0))
    assert len(blocks) == 2
    for block in blocks:
        assert isinstance(block["x"], Ragged)
    assert blocks[1]["x"][-1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"x": 1}, {"x": 1.5}),
        ({"x": 1}, {"y": 1}),
        ({"x": 1}, {"x": 1, "y": 1}),
        ({"x": 1}, {"x": "a"}),
        ({"x": "a"}, {"x": 1}),
        ({"x": "a"}, {"x": b"a"}),
        ({"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}),
        ({"x": np.zeros(2)}, {"x": np.zeros(3)}),
        ({"x": 1}, {"x": [object()]}),
    ],
)
@pytest.mark.parametrize("n", [1, 256])
def test_samples_that_differ_are_refused_by_number(first, later, n):
    feed = IterableSource([first] * n + [later], "mixed").open()
    with pytest.raises(InvalidInput, match=r"mixed: .*samples (0\.\.1|from 256|256)"):
        list(feed.blocks(0))


def test_what_has_no_samples_says_so():
    with pytest.raises(InvalidInput, match="nothing returns no sample"):
        IterableSource(list, "nothing").open()
    with pytest.raises(InvalidInput, match="number must return an iterable, got int"):
        IterableSource(lambda: 5, "number").open()  # type: ignore[arg-type, return-value]


def test_errors_of_the_samples_code_pass():
    def broken():
        yield {"x": 1}
        raise KeyError("mine")

    feed = IterableSource(broken, "broken").open()
    with pytest.raises(KeyError, match="mine"):
        list(feed.blocks(0))

"""What holds for each step of the table: honest schemas, any blocks, JSON, hostile fields."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import arrays, columns
from triplane.unified_ir.data.columns import Ragged, schema_of
from triplane.unified_ir.data.kinds import is_table
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.transforms import TRANSFORMS, Augmentation

N = 13
RNG = np.random.default_rng(1)
SERIES = Ragged.of([RNG.integers(0, 5, n).astype(np.int16) for n in RNG.integers(0, 6, N)])
BLOCK: columns.Columns = {
    "image": RNG.integers(0, 256, (N, 3, 9, 8)).astype(np.uint8),
    "float": RNG.random((N, 3, 9, 8), dtype=np.float32),
    "class": RNG.integers(0, 5, N),
    "age": RNG.random(N),
    "vector": RNG.normal(size=(N, 4)),
    "series": SERIES,
    "wave": RNG.normal(size=(N, 2, 30)).astype(np.float32),
    "text": np.array(["a b", "", "bb", "ab a b"] * 3 + ["b"], object),
    "label": np.array(["dog", "cat", "cow"] * 4 + ["cat"], object),
}  # fmt: skip
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "select": [{"columns": ["class", "series", "label"]}],
    "drop": [{"columns": ["image", "series"]}],
    "rename": [{"column": "series", "into": "s"}],
    "stack": [{"columns": ["class", "age"], "into": "v"},
              {"columns": ["image", "float"], "into": "float"}],
    "concatenate": [{"columns": ["vector", "age"], "into": "v"}],
    "scale": [{"column": "image"}, {"column": "image", "top": 16}],
    "normalize": [{"column": "image", "mean": [1, 2.5, 3], "std": 9},
                  {"column": "series", "mean": 0.5, "std": 0.25},
                  {"column": "float", "mean": 0.5, "std": 0.25}],
    "cast": [{"column": "vector", "dtype": "int8"}, {"column": "series", "dtype": "float16"}],
    "clip": [{"column": "series", "low": 1, "high": 3}, {"column": "vector", "high": 0.5}],
    "reshape": [{"column": "image", "shape": [-1, 4]}],
    "transpose": [{"column": "image", "axes": [1, 2, 0]}],
    "pad": [{"column": "series", "length": 6, "fill": 7, "lengths": "n"},
            {"column": "series", "length": 2, "cut": True}],
    "center_crop": [{"column": "image", "size": [4, 5]}],
    "resize": [{"column": "image", "size": [4, 13]}, {"column": "float", "size": [18, 5]}],
    "one_hot": [{"column": "class", "classes": 5}, {"column": "series", "classes": 6}],
    "lookup": [{"column": "label", "values": ["cat", "cow"], "unknown": 2},
               {"column": "series", "values": [4, 3, 2], "unknown": -1}],
    "tokenize": [{"column": "text", "vocabulary": ["a", "b"], "unknown": 2},
                 {"column": "text", "vocabulary": ["a", "b"], "unit": "words", "unknown": 2}],
    "flip": [{"column": "image", "axis": -2}, {"column": "wave", "probability": 0.9}],
    "shift": [{"column": "float", "most": 2, "fill": 0.5}, {"column": "wave", "most": 3}],
    "rotate": [{"column": "image", "degrees": 20}, {"column": "float", "degrees": 180, "fill": 1}],
    "random_crop": [{"column": "image", "size": [9, 7], "padding": 1}],
    "erase": [{"column": "float", "size": [4, 4], "fill": 1}],
    "noise": [{"column": "image", "scale": 0.2}, {"column": "wave", "scale": 1, "low": None}],
    "jitter": [{"column": "image", "brightness": 0.2, "contrast": 0.5},
               {"column": "float", "contrast": 0.5}],
}  # fmt: skip
CASES = [(name, fields) for name, several in EXAMPLES.items() for fields in several]
cases = pytest.mark.parametrize(("name", "fields"), CASES)


def from_json(value):
    return tuple(map(from_json, value)) if isinstance(value, list) else value


def step_of(name, fields):
    return TRANSFORMS[name](**{key: from_json(value) for key, value in fields.items()})


def draws(rows):
    return RowDraws(seed=7, epoch=3, step=1, rows=np.asarray(rows, np.int64))


def same(a, b):
    assert a.keys() == b.keys()
    for name, column in a.items():
        assert type(column) is type(b[name])
        if isinstance(column, Ragged):
            assert column.offsets.tolist() == b[name].offsets.tolist()
            column, other = column.values, b[name].values
        else:
            other = b[name]
        assert column.dtype == other.dtype
        np.testing.assert_array_equal(column, other)


def test_each_step_has_an_example():
    assert list(EXAMPLES) == list(TRANSFORMS)


@cases
def test_the_schema_tells_what_apply_returns(name, fields):
    step = step_of(name, fields)
    schema = step.schema(schema_of(BLOCK))
    after = step.apply(BLOCK, draws(np.arange(N)))
    assert list(after) == list(schema)
    assert schema_of(after) == dict(schema)


@cases
def test_columns_that_are_not_named_pass(name, fields):
    step = step_of(name, fields)
    after = step.apply(BLOCK, draws(np.arange(N)))
    named = {fields.get("column"), fields.get("into"), *fields.get("columns", ())}
    for column in after.keys() & BLOCK.keys() - named:
        assert after[column] is BLOCK[column]


@cases
@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, N - 1)), order=st.permutations(range(N)))
def test_a_sample_does_not_depend_on_its_block(name, fields, cuts, order):
    step = step_of(name, fields)
    rows = np.array(order)
    whole = step.apply(BLOCK, draws(np.arange(N)))
    parts = [
        step.apply(columns.take(BLOCK, part), draws(part)) for part in np.split(rows, sorted(cuts))
    ]
    same(columns.joined(parts), columns.take(whole, rows))


@cases
def test_an_empty_block_passes(name, fields):
    step = step_of(name, fields)
    none = np.zeros(0, np.int64)
    after = step.apply(columns.take(BLOCK, none), draws(none))
    assert columns.count(after) == 0
    assert [type(column) for column in after.values()] == [
        type(column) for column in step.apply(BLOCK, draws(np.arange(N))).values()
    ]


@cases
def test_a_step_does_not_write_into_its_input(name, fields):
    block = {
        key: Ragged(column.values.copy(), column.offsets.copy())
        if isinstance(column, Ragged)
        else column.copy()
        for key, column in BLOCK.items()
    }
    step_of(name, fields).apply(block, draws(np.arange(N)))
    same(block, BLOCK)


@cases
def test_fields_survive_json(name, fields):
    step = step_of(name, fields)
    stored = json.loads(json.dumps(dataclasses.asdict(step)))
    assert step_of(name, stored) == step


@cases
def test_the_docstring_says_what_is_computed(name, fields):
    first = (TRANSFORMS[name].__doc__ or "").splitlines()[0]
    assert first.endswith(".")
    assert not first.startswith(f"{TRANSFORMS[name].__name__}(")


@cases
def test_a_dataset_reads_each_column_like_the_whole_sample(name, fields):
    dataset = arrays(BLOCK).then(step_of(name, fields))
    view = dataset.view()
    assert is_table(view)
    whole = view.take(np.arange(N))
    same({column: dataset.column(column) for column in dataset.schema}, whole)


HOSTILE = [
    None, True, -1, 0, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), "", "x", "\0", "int64", "object", "O", "text", "a" * 5000, (),
    (None,), (True,), (0,), (1, 2), (-1, -1), (10**30,), ("x",), ("x", "x"), ("x", 1), ((),),
    ((1,),), (0.5, float("nan")), ("",), (2, 2, 2, 2, 2, 2, 2, 2, 2), [1], ["x"], {"a": 1}, b"x",
]  # fmt: skip


@cases
def test_hostile_fields_are_refused_or_harmless(name, fields):
    refusals = 0
    for field in dataclasses.fields(TRANSFORMS[name]):
        for value in HOSTILE:
            try:
                step = TRANSFORMS[name](
                    **{key: from_json(v) for key, v in fields.items()} | {field.name: value}
                )
                schema = step.schema(schema_of(BLOCK))
                after = step.apply(BLOCK, draws(np.arange(N)))
            except InvalidInput as error:
                assert str(error).startswith(f"{TRANSFORMS[name].__name__}: ")
                assert len(str(error)) < 700
                refusals += 1
            else:
                assert schema_of(after) == dict(schema)
    assert refusals > len(HOSTILE) // 2


@cases
def test_columns_of_another_kind_are_refused_or_computed(name, fields):
    """Each column in the place of the first: an honest result, or InvalidInput."""
    key = "column" if "column" in fields else "columns"
    for column in BLOCK:
        other = column if key == "column" else [column, *fields[key][1:]]
        try:
            step = step_of(name, fields | {key: other})
            schema = step.schema(schema_of(BLOCK))
            after = step.apply(BLOCK, draws(np.arange(N)))
        except InvalidInput as error:
            assert str(error).startswith(f"{TRANSFORMS[name].__name__}: ")
            continue
        assert schema_of(after) == dict(schema)


def test_random_steps_are_those_after_the_line():
    names = [name for name, step in TRANSFORMS.items() if issubclass(step, Augmentation)]
    assert names == ["flip", "shift", "rotate", "random_crop", "erase", "noise", "jitter"]
    assert all(step_of(name, EXAMPLES[name][0]).is_random for name in names)

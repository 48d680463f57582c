"""Each step that treats samples by themselves, against numpy or plain Python."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import Field, Ragged, schema_of
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.transforms import (
    Cast,
    CenterCrop,
    Clip,
    Concatenate,
    Drop,
    Lookup,
    Normalize,
    OneHot,
    Pad,
    Rename,
    Reshape,
    Resize,
    Scale,
    Select,
    Stack,
    Tokenize,
    Transpose,
)

RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (6, 3, 8, 10)).astype(np.uint8)
SERIES = Ragged.of([np.arange(n, dtype=np.int32) for n in (3, 0, 5, 1)])
WORDS = np.array(["red fish", "blue", "", "fish  fish"], object)


def applied(step, block, rows=None):
    """The block after a step whose schema was checked first."""
    step.schema(schema_of(block))
    n = len(next(iter(block.values())))
    return step.apply(block, RowDraws(0, 0, 0, np.arange(n) if rows is None else rows))


def of(step, column):
    return applied(step, {"x": column})["x"]


def refused(step, column, match, rows=None):
    with pytest.raises(InvalidInput, match=match):
        applied(step, {"x": column}, rows)


def same(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def test_scale_divides_bytes_in_float32():
    every = np.arange(256, dtype=np.uint8)
    same(of(Scale("x"), every), every.astype(np.float32) / np.float32(255))
    same(of(Scale("x", 16), every), every.astype(np.float32) / np.float32(16))


def test_scale_takes_bytes_only():
    refused(Scale("x"), np.zeros(2, np.int16), r"Scale: column 'x' must hold uint8, got int16")


def test_normalize_by_one_mean_or_one_for_each_channel():
    x = IMAGES.astype(np.float32)
    same(of(Normalize("x", 7, 3.0), IMAGES), (x - np.float32(7)) / np.float32(3))
    mean, std = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    y = of(Normalize("x", mean, std), IMAGES)
    for k in range(3):
        same(y[:, k], (x[:, k] - np.float32(mean[k])) / np.float32(std[k]))
    same(of(Normalize("x", mean, 2.0), IMAGES)[:, 1], (x[:, 1] - 2) / np.float32(2))


def test_normalize_of_series_that_differ_in_length():
    y = of(Normalize("x", 1.0, 2.0), SERIES)
    same(y[2], (np.arange(5, dtype=np.float32) - 1) / 2)
    refused(Normalize("x", (1.0, 2.0), 1.0), SERIES, "mean has 2 values, one for each channel")


def test_normalize_refuses_another_number_of_channels():
    refused(Normalize("x", 0.0, (1.0, 1.0)), IMAGES, r"std has 2 values.*uint8\[3, 8, 10\]")
    refused(Normalize("x", 0.0, (1.0,)), np.zeros(4), "std has 1 values")


@pytest.mark.parametrize("std", [0, -1.0, float("nan"), 1e-40])
def test_normalize_divides_by_positive_numbers_of_float32(std):
    with pytest.raises(InvalidInput, match="Normalize: std must be a number in"):
        Normalize("x", 0.0, std)


@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (np.array([1.9, -1.9]), "int8", [1, -1]),
        (np.array([255.9, -0.9]), "uint8", [255, 0]),
        (np.array([2.0**63 - 1024]), "int64", [2**63 - 1024]),
        (np.array([True, False]), "float16", [1, 0]),
        (np.array([0.0, 0.5]), "bool", [False, True]),
        (np.array([2**40, 3]), "float32", [2**40, 3]),
        (np.array([1e300]), "float32", [np.inf]),
    ],
)
def test_cast_converts(x, dtype, expected):
    same(of(Cast("x", dtype), x), np.array(expected, dtype))


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (np.array([0.0, 128.0]), "int8"),
        (np.array([0.0, -1.0]), "uint8"),
        (np.array([0.0, np.nan]), "int64"),
        (np.array([0.0, 2.0**63]), "int64"),
        (np.array([0.0, np.inf], np.float16), "int64"),
        (np.array([0, -1]), "uint64"),
        (np.array([0, 2**63], np.uint64), "int64"),
    ],
)
def test_cast_names_the_row_of_a_value_that_a_type_cannot_hold(x, dtype):
    refused(Cast("x", dtype), x, f"{dtype} cannot hold .*row 41 of column 'x'", np.array([40, 41]))


def test_clip_keeps_the_type():
    same(of(Clip("x", 3, 200), IMAGES), np.minimum(np.maximum(IMAGES, 3), 200))
    same(of(Clip("x", low=1), SERIES)[0], np.array([1, 1, 2], np.int32))
    x = np.array([-np.inf, 0.5, np.nan])
    same(of(Clip("x", high=0.25), x), np.array([-np.inf, 0.25, np.nan]))


@pytest.mark.parametrize("low", [-1, 0.5])
def test_clip_takes_bounds_of_the_type(low):
    refused(Clip("x", low), IMAGES, f"low must be a value of uint8, the column's type, got {low}")


def test_reshape_computes_one_size():
    same(of(Reshape("x", (-1, 10)), IMAGES), IMAGES.reshape(6, 24, 10))
    same(of(Reshape("x", (1,)), np.arange(3)), np.arange(3)[:, None])
    same(of(Reshape("x", ()), np.arange(3)[:, None]), np.arange(3))
    same(of(Reshape("x", (-1,)), IMAGES[:0]), np.zeros((0, 240), np.uint8))


@pytest.mark.parametrize("shape", [(7, -1), (241,), (0, -1), ()])
def test_reshape_keeps_the_number_of_elements(shape):
    refused(Reshape("x", shape), IMAGES, r"uint8\[3, 8, 10\], 240 elements")


def test_transpose_moves_channels():
    y = of(Transpose("x", (1, 2, 0)), IMAGES)
    assert y.flags.c_contiguous
    for i, j, c in np.ndindex(8, 10, 3):
        assert (y[:, i, j, c] == IMAGES[:, c, i, j]).all()
    refused(Transpose("x", (1, 0)), IMAGES, "must have 2 axes per sample")


def test_pad_reports_the_lengths():
    y = applied(Pad("x", 6, fill=-1, lengths="n"), {"x": SERIES})
    same(y["n"], np.array([3, 0, 5, 1]))
    assert y["x"].dtype == np.int32
    assert y["x"].tolist() == [
        [0, 1, 2, -1, -1, -1], [-1] * 6, [0, 1, 2, 3, 4, -1], [0, -1, -1, -1, -1, -1],
    ]  # fmt: skip


def test_pad_cuts_where_it_is_asked_to():
    y = applied(Pad("x", 2, lengths="n", cut=True), {"x": SERIES})
    assert y["x"].tolist() == [[0, 1], [0, 0], [0, 1], [0, 0]]
    assert y["n"].tolist() == [2, 0, 2, 1]
    for length in (3, 4):
        refused(Pad("x", length), SERIES, "row 12 of column 'x' has length 5", np.arange(10, 14))


def test_pad_of_samples_of_one_length():
    x = np.arange(12.0).reshape(2, 3, 2)
    same(of(Pad("x", 4, 9), x), np.pad(x, ((0, 0), (0, 1), (0, 0)), constant_values=9))
    same(of(Pad("x", 2, cut=True), x), x[:, :2])
    refused(Pad("x", 2), x, r"column 'x' is float64\[3, 2\], longer than 2")


def test_pad_fills_with_a_value_of_the_type():
    refused(Pad("x", 9, fill=0.5), SERIES, "fill must be a value of int32")


def test_center_crop_keeps_the_middle():
    same(of(CenterCrop("x", (3, 4)), IMAGES), IMAGES[:, :, 2:5, 3:7])
    refused(CenterCrop("x", (9, 4)), IMAGES, r"smaller than \(9, 4\)")


def test_resize_keeps_constant_images():
    x = np.full((2, 1, 9, 7), 77, np.uint8)
    same(of(Resize("x", (4, 20)), x), np.full((2, 1, 4, 20), 77, np.uint8))
    refused(Resize("x", (4, 20)), x.astype(np.int32), "uint8 or float32, got int32")


def test_columns_are_selected_dropped_and_renamed():
    block = {"a": np.arange(2), "b": np.arange(2.0), "c": WORDS[:2]}
    assert list(applied(Select(("c", "a")), block)) == ["c", "a"]
    assert list(applied(Drop(("b", "a")), block)) == ["c"]
    assert list(applied(Rename("b", "z"), block)) == ["a", "z", "c"]
    assert applied(Rename("b", "z"), block)["z"] is block["b"]


@pytest.mark.parametrize("step", [Select(("a", "q")), Drop(("q",)), Rename("q", "b"), Scale("q")])
def test_a_missing_column_is_named_with_those_that_exist(step):
    with pytest.raises(InvalidInput, match=r"no column 'q' in its input, which has \['a', 'b'\]"):
        step.schema({"a": Field("int64"), "b": Field("text")})


def test_a_column_is_not_written_over():
    schema = {"a": Field("int64"), "b": Field("int64"), "r": Field("int64", (None,))}
    for step in (Rename("a", "b"), Stack(("a",), "b"), Pad("r", 3, lengths="b")):
        with pytest.raises(InvalidInput, match="already has a column 'b'"):
            step.schema(schema)
    assert list(Stack(("a", "b"), "b").schema(schema)) == ["r", "b"]
    with pytest.raises(InvalidInput, match="at least one column must remain"):
        Drop(("a", "b", "r")).schema(schema)


def test_stack_makes_vectors_of_the_common_type():
    block = {"a": np.arange(4), "t": WORDS, "b": np.arange(4, dtype=np.float32) / 2}
    y = applied(Stack(("b", "a"), "v"), block)
    assert list(y) == ["t", "v"]
    same(y["v"], np.array([[0.0, 0], [0.5, 1], [1, 2], [1.5, 3]]))
    same(applied(Stack(("x", "y"), "z"), {"x": IMAGES, "y": IMAGES})["z"][:, 1], IMAGES)


def test_concatenate_joins_vectors_and_numbers():
    block = {"a": np.arange(2), "b": np.arange(6).reshape(2, 3)}
    y = applied(Concatenate(("b", "a"), "v"), block)["v"]
    assert y.tolist() == [[0, 1, 2, 0], [3, 4, 5, 1]]


def test_columns_that_do_not_fit_are_not_joined():
    schema = {"a": Field("int64"), "b": Field("int64", (3,)), "c": Field("int64", (3, 2))}
    with pytest.raises(InvalidInput, match=r"one shape, got 'a' \[\], 'b' \[3\]"):
        Stack(("a", "b"), "v").schema(schema)
    with pytest.raises(InvalidInput, match=r"agree in all axes but the first"):
        Concatenate(("b", "c"), "v").schema(schema)
    with pytest.raises(InvalidInput, match=r"must hold booleans or integers or floating"):
        Stack(("t",), "v").schema({"t": Field("text")})


def test_one_hot_is_a_row_of_the_identity():
    x = RNG.integers(0, 4, (5, 2)).astype(np.uint8)
    same(of(OneHot("x", 4), x), np.eye(4, dtype=np.float32)[x])
    same(of(OneHot("x", 9, "bool"), SERIES)[2], np.eye(9, dtype=bool)[:5])


@pytest.mark.parametrize("wrong", [-1, 4])
def test_one_hot_names_the_row_of_another_class(wrong):
    x = np.array([[0, 1], [3, wrong]])
    refused(OneHot("x", 4), x, rf"0\.\.3, got {wrong} in row 8", np.array([7, 8]))
    refused(OneHot("x", 4), SERIES, "got 4 in row 2")
    # The first value of a sample belongs to that sample, and not to the empty one before it.
    refused(OneHot("x", 4), Ragged.of([SERIES[1], SERIES[2][4:], SERIES[0]]), "got 4 in row 1")


def test_lookup_finds_texts_and_integers():
    names = np.array(["b", "a", "b"], object)
    same(of(Lookup("x", ("a", "b")), names), np.array([1, 0, 1]))
    x = np.array([[7, -3], [100, 7]], np.int16)
    same(of(Lookup("x", (100, 7, -3)), x), np.array([[1, 2], [0, 1]]))
    same(of(Lookup("x", (3, 2, 1, 0, 4)), SERIES)[2], np.array([3, 2, 1, 0, 4]))


def test_lookup_of_values_that_are_not_listed():
    names = np.array(["b", "q", "b"], object)
    same(of(Lookup("x", ("a", "b"), unknown=9), names), np.array([1, 9, 1]))
    same(of(Lookup("x", (5,), unknown=-1), np.array([5, 4, 6])), np.array([0, -1, -1]))
    refused(Lookup("x", ("a", "b")), names, r"values does not list 'q', in row 1 of column 'x'")
    refused(Lookup("x", (0, 1, 2)), SERIES, r"does not list '3', in row 2")


def test_lookup_takes_what_it_lists():
    refused(Lookup("x", ("a",)), np.arange(2), "must hold text, like values, got int64")
    refused(Lookup("x", (1,)), WORDS, "must hold integers, got text")
    refused(Lookup("x", (1,)), np.zeros(2, np.uint64), "Cast it to int64")


def test_tokenize_splits_words():
    y = of(Tokenize("x", ("fish", "red", "blue"), "words"), WORDS)
    assert [y[k].tolist() for k in range(4)] == [[1, 0], [2], [], [0, 0]]


def test_tokenize_splits_characters():
    x = np.array(["ab", "", "ä\U0001f600b"], object)
    y = of(Tokenize("x", ("b", "\U0001f600", "a", "ä")), x)
    assert [y[k].tolist() for k in range(3)] == [[2, 0], [], [3, 1, 0]]
    assert y.values.dtype == np.int64


def test_tokens_that_are_not_listed():
    y = of(Tokenize("x", ("fish",), "words", unknown=1), WORDS)
    assert [y[k].tolist() for k in range(4)] == [[1, 0], [1], [], [0, 0]]
    refused(Tokenize("x", ("fish", "red"), "words"), WORDS, "not list 'blue', in row 1 of")
    refused(Tokenize("x", ("b",)), np.array(["bb", "b\ud800"], object), "in row 1")


def test_a_step_may_not_make_samples_of_any_size():
    for step, field in (
        (OneHot("x", 1_000_000), Field("int64", (100,))),
        (Pad("x", 1 << 24), Field("float64", (None, 8))),
        (Resize("x", (8192, 8192)), Field("uint8", (3, 4, 4))),
        (Cast("x", "float64"), Field("uint8", (1 << 26,))),
    ):
        with pytest.raises(InvalidInput, match="bytes per sample; the limit is"):
            step.schema({"x": field})

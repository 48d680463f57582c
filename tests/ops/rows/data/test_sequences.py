"""Sequences and optionals: types, values, text and bytes, on both engines at several opsets."""

import re
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import graph, mode, ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir import codec, parse, text
from triplane.unified_ir.ir.types import (
    DTYPES,
    OptionalType,
    SequenceType,
    TensorSpec,
    fits,
    joined,
)
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE

X = TensorSpec(("N", 2))
OWN = SequenceType(TensorSpec(("_", 2)))
FLOATS = SequenceType(DTYPES["float32"])
A, B = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([[7, 8]], np.float32)


def recorded(body, **types):
    build = Build(TABLE, "f")
    with build:
        made = body(*(build.param(k, t) for k, t in types.items()))
        named = {f"y{i}": y for i, y in enumerate(made if isinstance(made, tuple) else (made,))}
    return build.finish(named)


def flat(value):
    """Contents as comparable lists, element types kept."""
    if isinstance(value, list):
        return [flat(v) for v in value]
    return None if value is None else (str(value.dtype), value.shape, value.tolist())


def maximum_of(x):
    return x.max(), x * 2.0


# fmt: off
CASES: dict[str, Any] = {  # name: (body, types, arguments, what comes out, its types)
    "construct, at": (lambda x, y: ops.sequence_at(ops.sequence(x, y), 1),
                      {"x": X, "y": TensorSpec(("M", 2))}, (A, B), [B], r"float32\[open_\w+,2\]"),
    "at from the end": (lambda s: ops.sequence_at(s, -2), {"s": OWN}, ([A, B, A],), [B],
                        r"float32\[open_\w+,2\]"),
    "insert": (lambda s, x: ops.sequence_insert(s, x, 1), {"s": OWN, "x": X}, ([B, B], A),
               [[B, A, B]], r"seq\(float32\[_,2\]\)"),
    "insert at the back": (ops.sequence_insert, {"held": FLOATS, "x": X}, ([B], A),
                           [[B, A]], r"seq\(float32\)"),
    "insert into nothing": (lambda x: ops.sequence_insert(ops.empty_sequence(), x), {"x": X},
                            (A,), [[A]], r"seq\(float32\[N,2\]\)"),
    "erase": (lambda s: ops.sequence_erase(s, 0), {"s": OWN}, ([A, B],), [[B]],
              r"seq\(float32\[_,2\]\)"),
    "erase the last": (ops.sequence_erase, {"held": OWN}, ([A, B],), [[A]], r"seq"),
    "length": (ops.sequence_length, {"held": OWN}, ([A, B],), [np.array(2)], r"int64\[\]"),
    "length of nothing": (ops.sequence_length, {"held": OWN}, ([],), [np.array(0)], r"int64\[\]"),
    "split": (lambda x: ops.split_to_sequence(x, 2), {"x": X}, (A,), [[A[:2], A[2:]]],
              r"seq\(float32\[_,2\]\)"),
    "split into lengths": (lambda x: ops.split_to_sequence(x, [1, 1], axis=1), {"x": X}, (A,),
                           [[A[:, :1], A[:, 1:]]], r"seq\(float32\[N,1\]\)"),
    "split into rows": (lambda x: ops.split_to_sequence(x, keepdims=False), {"x": X}, (A,),
                        [list(A)], r"seq\(float32\[2\]\)"),
    "split into one each": (lambda x: ops.split_to_sequence(x, axis=-1), {"x": X}, (A,),
                            [[A[:, :1], A[:, 1:]]], r"seq\(float32\[N,1\]\)"),
    "concat": (ops.concat_from_sequence, {"held": OWN}, ([A, B],), [np.concatenate([A, B])],
               r"float32\[open_\w+,2\]"),
    "concat along the other": (lambda held: ops.concat_from_sequence(held, axis=1),
                               {"held": SequenceType(X)}, ([A, A],), [np.hstack([A, A])],
                               r"float32\[N,open_\w+\]"),
    "stack": (lambda held: ops.stack_from_sequence(held, axis=1), {"held": SequenceType(X)},
              ([A, A],), [np.stack([A, A], 1)], r"float32\[N,open_\w+,2\]"),
    "map": (lambda s: ops.sequence_map(lambda x: x * 2.0, s), {"s": OWN}, ([A, B],),
            [[A * 2, B * 2]], r"seq\(float32\[_,2\]\)"),
    "map to several": (lambda s: ops.sequence_map(maximum_of, s), {"s": OWN}, ([A, B],),
                       [[A.max(), B.max()], [A * 2, B * 2]], r"seq"),
    "map that reads a size": (
        lambda s: ops.sequence_map(lambda x: x + ops.full(x.shape, 1.0, "float32"), s), {"s": OWN},
        ([A, B],), [[A + 1.0, B + 1.0]], r"seq\(float32\[_,2\]\)"),
    "map of two": (lambda s, t: ops.sequence_map(lambda x, y: x + y, s, t),
                   {"s": SequenceType(X), "t": SequenceType(X)},
                   ([A, -A], [A, A]), [[A + A, A - A]], r"seq\(float32\[N,2\]\)"),
    "map that captures": (lambda s, w: ops.sequence_map(lambda x: x @ w, s),
                          {"s": OWN, "w": TensorSpec((2, 3))},
                          ([A, B], np.ones((2, 3), np.float32)),
                          [[A @ np.ones((2, 3), np.float32), B @ np.ones((2, 3), np.float32)]],
                          r"seq\(float32\[_,3\]\)"),
    "open an optional": (ops.optional_get_element, {"held": OptionalType(X)}, (A,), [A],
                         r"float32\[N,2\]"),
    "open what is none": (ops.optional_get_element, {"held": X}, (A,), [A], r"float32\[N,2\]"),
    "ask one that holds": (ops.optional_has_element, {"held": OptionalType(X)}, (A,),
                           [np.array(True)], r"bool\[\]"),
    "ask one that does not": (ops.optional_has_element, {"held": OptionalType(OWN)}, (None,),
                              [np.array(False)], r"bool\[\]"),
    "make one": (ops.optional, {"x": X}, (A,), [A], r"optional\(float32\[N,2\]\)"),
    "make one of a sequence": (ops.optional, {"x": OWN}, ([A, B],), [[A, B]],
                               r"optional\(seq\(float32\[_,2\]\)\)"),
    "make an empty one": (lambda: ops.optional(OptionalType(X).element.with_shape((3, 2))), {}, (),
                          [None], r"optional\(float32\[3,2\]\)"),
    "a position in a vector": (lambda s: ops.sequence_at(s, np.array([1])), {"s": OWN}, ([A, B],),
                               [B], r"float32\[open_\w+,2\]"),
    "identity": (TABLE["", "Identity"], {"x": FLOATS}, ([A],),
                 [[A]], r"seq\(float32\)"),
    "strings": (lambda s: ops.sequence_at(s, 0), {"s": SequenceType(TensorSpec((2,), "string"))},
                ([np.array(["a", "é"], object)],), [np.array(["a", "é"], object)], r"string\[2\]"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_reference_gives_what_is_meant(name):
    body, types, args, wanted, kind = CASES[name]
    function = recorded(body, **types)
    found = ReferenceEngine().compile(function)(*args)
    assert [flat(v) for v in found] == [flat(v) for v in wanted]
    assert re.fullmatch(kind + ".*", str(function.results[0].type)), function.results[0].type


@pytest.mark.parametrize("opset", [17, 21, 26])
@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_agrees(name, opset):
    body, types, args, wanted, _ = CASES[name]
    program = OnnxEngine(target=OnnxTarget(opset)).compile(recorded(body, **types))
    assert [flat(v) for v in program(*args)] == [flat(v) for v in wanted]


@pytest.mark.parametrize("name", CASES)
def test_text_and_bytes_come_back(name):
    body, types, args, wanted, _ = CASES[name]
    function = recorded(body, **types)
    check_function(function)
    written = text.function_text(function)
    assert text.function_text(parse.parse_function(written)) == written
    again = codec.decode_function(codec.encode_function(function))
    assert text.function_text(again) == written
    found = ReferenceEngine().compile(again)(*args)
    assert [flat(v) for v in found] == [flat(v) for v in wanted]


REFUSED = {
    "axes that nothing says": (lambda s: ops.sequence_at(s, 0), FLOATS, "know the axes"),
    "joining what nothing says": (ops.concat_from_sequence, FLOATS, "know the axes"),
    "another element type": (
        lambda s: ops.sequence_insert(s, np.array([1, 2])),
        OWN,
        "int64.2. into seq",
    ),
    "a tensor for a sequence": (ops.sequence_length, X, "does not take float32.N,2. as operand 0"),
    "arithmetic": (lambda s: s + s, OWN, r"Add does not take seq\(float32\[_,2\]\)"),
    "two positions": (lambda s: ops.sequence_at(s, np.array([0, 1])), OWN, "one position"),
    "a sequence of sequences": (ops.sequence, OWN, "does not take seq"),
    "parts that do not add up": (
        lambda x: ops.split_to_sequence(x, [1, 2], axis=1),
        X,
        r"got \[1, 2\], which add up to 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_sequence_is_not_for_is_named(name):
    body, type_, match = REFUSED[name]
    with pytest.raises(InvalidInput, match=match):
        recorded(body, s=type_)


def through_split(x, w):
    parts = ops.split_to_sequence(x, [1, 2])
    joined = ops.concat_from_sequence(ops.sequence_insert(parts, w, 1))
    return ops.assume_shape(joined, (5, 2)) ** 2.0


def through_rows(x, w):
    rows = ops.split_to_sequence(x, keepdims=False)
    stacked = ops.assume_shape(ops.stack_from_sequence(rows, axis=1), (2, 3))
    return stacked * stacked + (w * w).sum()


def through_places(x, w):
    both = ops.sequence(x, w, x * 2.0)
    kept = ops.sequence_erase(both, -2)
    first, last = (ops.assume_shape(ops.sequence_at(kept, i), (3, 2)) for i in (0, -1))
    return first * last * ops.sequence_at(both, 1).sum()


THROUGH = {"split": through_split, "rows": through_rows, "places": through_places}


@pytest.mark.parametrize("name", THROUGH)
def test_gradients_pass_sequences(name):
    """Slopes along random directions, first and second order; onnxruntime as the reference."""
    rng = np.random.default_rng(2)
    types = {"x": TensorSpec((3, 2), "float64"), "w": TensorSpec((2, 2), "float64")}
    weight = {"split": (5, 2), "rows": (2, 3), "places": (3, 2)}[name]
    weights = rng.standard_normal(weight)
    function = recorded(lambda x, w: (THROUGH[name](x, w) * weights).sum(), **types)
    args = [rng.standard_normal((3, 2)), rng.standard_normal((2, 2))]
    first = value_and_grad(function)
    _, *gs = ReferenceEngine().compile(first)(*args)
    for i, g in enumerate(gs):
        direction = rng.standard_normal(g.shape)
        ends = []
        for sign in (1, -1):
            moved = list(args)
            moved[i] = args[i] + sign * 1e-6 * direction
            ends.append(float(ReferenceEngine().compile(function)(*moved)[0]))
        np.testing.assert_allclose((g * direction).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-5)
    found = OnnxEngine().compile(first)(*args)
    for a, b in zip(found[1:], gs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    if name == "places":  # a sequence read twice: its cotangents are added by a map
        return
    squared = recorded(lambda x, w: sum((g * g).sum() for g in inline(first, [x, w])[1:]), **types)
    again = value_and_grad(squared)
    second = ReferenceEngine().compile(again)(*args)
    for a, b in zip(OnnxEngine().compile(again)(*args), second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_a_gradient_stops_by_name_where_there_is_none():
    mapped = recorded(
        lambda x: ops.sequence_at(ops.sequence_map(ops.exp, ops.sequence(x)), 0).sum(), x=X
    )
    with pytest.raises(InvalidInput, match="SequenceMap is not differentiable"):
        value_and_grad(mapped)
    chosen = recorded(
        lambda x: ops.cond(
            x.sum() > 0.0, lambda s: ops.sequence_at(s, 0).sum(), lambda _: 0.0, ops.sequence(x)
        ),
        x=X,
    )
    with pytest.raises(InvalidInput, match="Cond passes on a sequence"):
        value_and_grad(chosen)
    held = recorded(lambda x: ops.optional_get_element(ops.optional(x)).sum(), x=X)
    with pytest.raises(InvalidInput, match="OptionalGetElement is not differentiable"):
        value_and_grad(held)


@pytest.mark.parametrize("engine", [ReferenceEngine(), OnnxEngine()], ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("args", "match"),
    [
        (([A], np.array(7)), "index|range"),
        (([A.astype(np.float64)], np.array(0)), "float"),
        ((A, np.array(0)), "list of arrays"),
        (([], np.array(0)), "index|range"),
    ],
    ids=["position", "element type", "no list", "nothing"],
)
def test_values_that_do_not_fit_are_refused(engine, args, match):
    program = engine.compile(recorded(ops.sequence_at, s=OWN, i=TensorSpec((), "int64")))
    with pytest.raises(InvalidInput, match=match):
        program(*args)


def test_the_reference_holds_elements_to_their_type():
    program = ReferenceEngine().compile(recorded(ops.sequence_length, s=OWN))
    with pytest.raises(InvalidInput, match=r"seq\(float32\[_,2\]\) cannot hold float32\[3\]"):
        program([A, A[:, 0]])


@pytest.mark.parametrize("engine", [ReferenceEngine(), OnnxEngine()], ids=lambda e: e.name)
@pytest.mark.parametrize("split", [0, -1, [4, -1], [1, 1]], ids=str)
def test_lengths_of_parts_that_cannot_be_are_refused_when_they_come(engine, split):
    lengths = np.array(split, np.int64)
    function = recorded(
        ops.split_to_sequence, x=TensorSpec((3, 2)), split=TensorSpec(lengths.shape, "int64")
    )
    with pytest.raises(InvalidInput):
        engine.compile(function)(A, lengths)


def test_an_opened_optional_that_holds_nothing_is_refused():
    function = recorded(ops.optional_get_element, s=OptionalType(X))
    with pytest.raises(InvalidInput, match="holds nothing"):
        ReferenceEngine().compile(function)(None)


NONE = SequenceType(DTYPES["float32"], empty=True)
JOINS = [
    (OWN, OWN, OWN),
    (SequenceType(X), SequenceType(TensorSpec((3, 2))), OWN),
    (NONE, OWN, OWN),
    (OWN, FLOATS, FLOATS),
    (OWN, SequenceType(TensorSpec((2,))), FLOATS),
    (OWN, SequenceType(TensorSpec(("_", 2), "int64")), None),
    (X, TensorSpec((3, 2)), None),
    (OptionalType(NONE), OptionalType(OWN), OptionalType(OWN)),
    (OptionalType(X), X, None),
]


@pytest.mark.parametrize(("a", "b", "both"), JOINS)
def test_types_join_to_the_narrowest_that_holds_both(a, b, both):
    assert joined(a, b) == joined(b, a) == both
    if both is not None:
        assert fits(a, both)
        assert fits(b, both)


def test_sequences_pass_through_eager_mode():
    @graph
    def rows(x):
        return ops.stack_from_sequence(ops.split_to_sequence(x, keepdims=False))

    with mode("eager"):
        assert rows(A).tolist() == A.tolist()
    assert rows(A).tolist() == A.tolist()

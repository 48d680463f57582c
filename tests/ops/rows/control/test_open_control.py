"""Conditions and loops over values whose size or kind only the data decide."""

from itertools import count
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir import codec, parse, text
from triplane.unified_ir.ir.types import (
    OptionalType,
    SequenceType,
    TensorSpec,
    TensorType,
    bool_,
    int64,
)
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.rows.control.looping import LoopCarry, loop_row
from triplane.unified_ir.ops.table import TABLE

NON_ZERO = TABLE["", "NonZero"]
X, FLAG, COUNT = TensorSpec(("N", 2)), TensorSpec((), "bool"), TensorSpec((), "int64")
A = np.arange(6, dtype=np.float32).reshape(3, 2)
TWICE = np.concatenate([A, A])


def recorded(body, *types):
    build = Build(TABLE, "f")
    with build:
        made = body(*(build.param(f"x{i}", t) for i, t in enumerate(types)))
    return build.finish({"y": made})


def doubling(x, n):
    """`x` doubled in length n times, the body recorded until its types stay."""
    entry, numbers = LoopCarry((x.type,)), count()
    while True:
        build = Build(TABLE, "loop")
        with build:
            go, c = [
                build.param(f"p{i}", t)
                for i, t in enumerate((TensorType(int64, ()), TensorType(bool_, ()), *entry.types))
            ][1:]
            twice = ops.concat([c, c])
        body = build.finish({"go": go, "c": twice})
        wider = entry.joined([twice.type], body, lambda: f"carried_{next(numbers)}")
        if wider == entry:
            break
        entry = wider
    attrs = {"num_carry": 1, "open": entry.free}
    return recorder().apply(loop_row, (n, np.array(True), x), attrs, regions=(body,))[0]


def rows_collected(x, n):
    start = ops.empty_sequence()
    return ops.fori_loop(n, lambda i, s: ops.sequence_insert(s, ops.gather(x, i, axis=0)), start)


# fmt: off
CASES: dict[str, Any] = {  # body, types, arguments, what comes out, its type
    "branches of two sizes": (
        lambda p, x: ops.cond(p, lambda x: x[:2], lambda x: ops.concat([x, x]), x),
        (FLAG, X), (np.array(False), A), TWICE, r"float32[open_0_0,2]"),
    "the other branch": (
        lambda p, x: ops.cond(p, lambda x: x[:2], lambda x: ops.concat([x, x]), x),
        (FLAG, X), (np.array(True), A), A[:2], r"float32[open_0_0,2]"),
    "a branch of a size that data decide": (
        lambda p, x: ops.cond(p, NON_ZERO, lambda x: NON_ZERO(-x), x),
        (FLAG, X), (np.array(True), A), np.stack(np.nonzero(A)), r"int64[2,open_0_0]"),
    "branches of sequences": (
        lambda p, x: ops.cond(p, lambda x: ops.sequence(x, x), lambda x: ops.sequence(x[:1]), x),
        (FLAG, X), (np.array(True), A), [A, A], "seq(float32[_,2])"),
    "a loop that collects": (
        rows_collected, (X, COUNT), (A, np.array(3)), list(A), "seq(float32[2])"),
    "a loop that collects nothing": (
        rows_collected, (X, COUNT), (A, np.array(0)), [], "seq(float32[2])"),
    "a carry that grows": (doubling, (X, COUNT), (A, np.array(2)), np.concatenate([TWICE, TWICE]),
                           "float32[carried_0,2]"),
    "a carry that does not": (doubling, (X, COUNT), (A, np.array(0)), A, "float32[carried_0,2]"),
}
# fmt: on


def same(found, wanted):
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))
    return np.array_equal(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_both_engines_give_what_is_meant(name):
    body, types, args, wanted, kind = CASES[name]
    function = recorded(body, *types)
    assert str(function.results[0].type) == kind
    assert same(ReferenceEngine().compile(function)(*args)[0], wanted)
    for opset in (17, 21, 26):
        program = OnnxEngine(target=OnnxTarget(opset)).compile(function)
        assert same(program(*args)[0], wanted), opset


@pytest.mark.parametrize("name", CASES)
def test_text_and_bytes_come_back_and_are_sound(name):
    body, types, args, wanted, _ = CASES[name]
    function = recorded(body, *types)
    check_function(function)
    written = text.function_text(function)
    assert text.function_text(parse.parse_function(written)) == written
    again = codec.decode_function(codec.encode_function(function))
    assert text.function_text(again) == written
    assert same(ReferenceEngine().compile(again)(*args)[0], wanted)


@pytest.mark.parametrize("name", ["branches of two sizes", "a carry that grows"])
def test_a_gradient_that_would_need_one_size_is_refused_by_name(name):
    body, types, _, _, _ = CASES[name]
    function = recorded(lambda *xs: body(*xs).sum(), *types)
    with pytest.raises(InvalidInput, match=r"one size|keep their sizes"):
        value_and_grad(function, ["x1" if types[0] == FLAG else "x0"])


def test_a_loop_over_a_sequence_has_no_gradient_by_name():
    function = recorded(lambda x, n: ops.stack_from_sequence(rows_collected(x, n)).sum(), X, COUNT)
    with pytest.raises(InvalidInput, match="Loop passes on a sequence"):
        value_and_grad(function, ["x0"])


def opened_by_a_loop(n, maybe):
    """A loop whose body takes an optional sequence and gives a sequence."""
    build = Build(TABLE, "loop")
    with build:
        _, go, held = [
            build.param(f"p{i}", t)
            for i, t in enumerate((TensorType(int64, ()), TensorType(bool_, ()), maybe.type))
        ]
        there = ops.cond(
            ops.optional_has_element(held),
            ops.optional_get_element,
            lambda _: ops.sequence(np.zeros((1, 2), np.float32)),
            held,
        )
        after = ops.sequence_insert(there, np.ones((2, 2), np.float32))
    body = build.finish({"go": go, "s": after})
    return recorder().apply(
        loop_row, (n, np.array(True), maybe), {"num_carry": 1}, regions=(body,)
    )[0]


@pytest.mark.parametrize("engine", [ReferenceEngine(), OnnxEngine()], ids=lambda e: e.name)
def test_a_body_may_open_the_optional_it_takes(engine):
    function = recorded(opened_by_a_loop, COUNT, OptionalType(SequenceType(TensorSpec(("_", 2)))))
    assert str(function.results[0].type) == "seq(float32[_,2])"
    check_function(function)
    (found,) = engine.compile(function)(np.array(2), None)
    assert [x.shape for x in found] == [(1, 2), (2, 2), (2, 2)]
    (found,) = engine.compile(function)(np.array(1), [A])
    assert [x.shape for x in found] == [(3, 2), (2, 2)]


def test_an_optional_that_no_trip_opened_is_refused_on_the_reference():
    function = recorded(opened_by_a_loop, COUNT, OptionalType(SequenceType(TensorSpec(("_", 2)))))
    with pytest.raises(InvalidInput, match="is a list of arrays, got None"):
        ReferenceEngine().compile(function)(np.array(0), None)


def test_what_nothing_joins_is_refused():
    with pytest.raises(InvalidInput, match="element types and the number of axes may not"):
        recorded(lambda p, x: ops.cond(p, lambda x: x[0], lambda x: x, x), FLAG, X)
    with pytest.raises(InvalidInput, match="keep shapes"):
        recorded(lambda x, n: ops.fori_loop(n, lambda _, c: ops.concat([c, c]), x), X, COUNT)
    ints = SequenceType(TensorSpec((2,), "int64"))
    with pytest.raises(InvalidInput, match="return one type"):
        recorded(
            lambda p, s: ops.cond(p, lambda s: s, lambda _: ops.empty_sequence(), s), FLAG, ints
        )

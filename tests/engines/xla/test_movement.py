"""Moving, indexing and reducing on XLA, where its own operators mean something else than ONNX's."""

import platform
from typing import Any

import numpy as np
import pytest
from tests.support.xla import agrees

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import DTYPES, type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
UPDATES = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


def recorded(*calls):
    """Calls (row, operands, attributes) as one function; lists and numbers are constants."""
    build, args = Build(TABLE, "f"), []
    results: dict[str, Any] = {}
    with build:
        for i, (name, operands, attrs) in enumerate(calls):
            fed: list[Any] = []
            for k, operand in enumerate(operands):
                if isinstance(operand, np.ndarray):
                    args.append(operand)
                    fed.append(build.param(f"x{i}_{k}", type_of(operand)))
                else:
                    fed.append(None if operand is None else np.asarray(operand))
            ys = build.apply(TABLE["", name], fed, attrs, outputs=1 + (name == "TopK"))
            results |= {f"y{i}_{k}": y for k, y in enumerate(ys)}
    return build.finish(results), args


INDEXED = {
    "Gather": lambda i: [X, np.array([0, i])],
    "GatherElements": lambda i: [X, np.array([[0, i, 1]])],
    "GatherND": lambda i: [X, np.array([[0, 1], [i, 2]])],
    "ScatterND": lambda i: [X, np.array([[i], [0]]), UPDATES[:2]],
    "ScatterElements": lambda i: [X, np.array([[i, 0, 0]]), UPDATES[:1]],
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_outside_is_refused(name):
    function, args = recorded((name, INDEXED[name](-4), {}))
    agrees(function, args)
    program = engine("xla").compile(function)
    for index in (4, -5):
        with pytest.raises(InvalidInput, match=f"{name}.*{index} .*(out of range|out of bounds)"):
            program(*INDEXED[name](index))


def test_a_known_index_outside_is_refused():
    function, args = recorded(("Gather", [X, [1, 4]], {}))
    with pytest.raises(InvalidInput, match="index 4"):
        engine("xla").compile(function)(*args)


def test_the_last_of_several_updates_stays():
    at = np.array([[0], [2], [0], [-4]])
    elements = np.array([[0, 1, 2], [0, -4, 2], [0, 0, 3], [-1, 0, -2]])
    agrees(
        *recorded(
            ("ScatterND", [X, at, UPDATES], {}),
            ("ScatterND", [X, at.tolist(), UPDATES], {}),
            ("ScatterND", [X > 0, at, UPDATES > 0], {}),
            ("ScatterElements", [X, elements, UPDATES], {}),
            ("ScatterElements", [X, elements.tolist(), UPDATES], {}),
            ("ScatterND", [X, np.zeros((2, 0), np.int64), np.stack([UPDATES, X])], {}),
        )
    )


NUMBERS = np.array([[-0.0, 0.0, 1, np.nan, np.inf, -np.inf, 0.0, -1, 2, -0.0]], np.float32)
ENDS = np.array([[-128, 3, 127, 3, 0, 1]], np.int8)
SCALES = [np.float32(s) for s in (1, 1, 2, 2)]
INFINITE = np.array([[[[1, np.inf, 2]]]], np.float32)


def test_order_and_position():
    """-0 equals 0, NaN is the largest number, and integers have no opposite of the smallest."""
    calls: list[Any] = [
        ("TopK", [x, [5]], {"largest": largest})
        for largest in (0, 1)
        for x in (NUMBERS, ENDS, ENDS.view(np.uint8))
    ]
    for last in (0, 1):
        for x in (NUMBERS, ENDS):
            attrs = {"axis": 1, "select_last_index": last}
            calls += [("ArgMax", [x], attrs), ("ArgMin", [x], attrs)]
    calls += [("Hardmax", [NUMBERS], {}), ("CumSum", [NUMBERS, 1], {"exclusive": 1, "reverse": 1})]
    agrees(*recorded(*calls))


def test_element_types():
    """Casts wrap around as in numpy; four bits; bits of bools; int8 indices below depth 300."""
    floats = np.array([0, -1.5, 7.6, 200, -200, 300, 70000], np.float32)
    calls: list[Any] = [
        ("Cast", [floats], {"to": DTYPES[name].onnx})
        for name in (
            "uint8",
            "int8",
            "uint16",
            "uint32",
            "int64",
            "uint64",
            "bool",
            "float8e4m3fn",
            "bfloat16",
        )
    ]
    four = np.array([0, 1, 3, 4, -6, 0.5], np.float32).astype(DTYPES["float4e2m1"].numpy)
    calls += [("Cast", [four], {"to": DTYPES[name].onnx}) for name in ("int8", "int32", "float32")]
    calls.append(("BitCast", [X > 0], {"to": DTYPES["uint8"].onnx}))
    calls.append(("OneHot", [np.array([0, -1, 5], np.int8), 300, X[0, :2]], {}))
    agrees(*recorded(*calls))


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numpy's casts are the processor's")
@pytest.mark.parametrize("to", ["int32", "int64", "int8", "uint16", "uint64"])
def test_floats_that_no_integer_holds_are_cast_as_by_numpy(to):
    """XLA's own conversion takes the nearest integer, and 0 for NaN."""
    with np.errstate(over="ignore"):
        wide = np.array([1e20, -1e20, np.nan, np.inf, 3e9, 2.0**31, -(2.0**31), 7.9, -7.9])
        calls = [
            ("Cast", [wide.astype(kind)], {"to": DTYPES[to].onnx})
            for kind in (np.float16, np.float32, np.float64)
        ]
    agrees(*recorded(*calls))


def test_places():
    """Amounts that remove, slices backwards, copies of infinity, lengths beyond the axis."""
    calls = [("Pad", [X, [-1, 2, 1, -2]], {"mode": mode}) for mode in ("constant", "edge", "wrap")]
    calls += [
        ("Pad", [X, [2, 2, 2, 1]], {"mode": "reflect"}),
        ("Slice", [X, [-1, 2], [-100, -100], [0, 1], [-2, -1]], {}),
        ("Slice", [X, [3], [1], [0], [1]], {}),
        ("Resize", [INFINITE, None, SCALES], {}),
        ("Resize", [INFINITE, None, None, [1, 1, 1, 5]], {"nearest_mode": "ceil"}),
        ("ReverseSequence", [X, np.array([9, 0, 2])], {}),
    ]
    agrees(*recorded(*calls))

"""Control flow on XLA: values, gradients of both orders, and requirements inside regions."""

import numpy as np
import pytest
from tests.support.control_cases import CASES, recorded, squares
from tests.support.xla import agrees

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import TensorType, bool_
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.rows.control.control import numbered
from triplane.unified_ir.ops.rows.control.looping import loop_row
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import emit

UNCOUNTED = {"while", "while that never starts"}
"""Loops whose gradient would stack a carry per trip, of which only the data know the number."""
SHORT = {"scan backward", "for", "for without trips"}


@pytest.mark.parametrize("name", CASES)
def test_values_equal_those_of_reference(name):
    function, args = recorded(name, np.float32)
    agrees(function, args.values())


@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_gradients_of_both_orders_equal_those_of_reference(name):
    function, args = recorded(name, np.float32)
    first = value_and_grad(function)
    if name in UNCOUNTED:
        with pytest.raises(InvalidInput, match=r"xla cannot run triplane\.Loop.* trips of a loop"):
            engine("xla").compile(first)(*args.values())
        return
    agrees(first, args.values())
    agrees(value_and_grad(squares(function)), args.values())


def test_a_count_of_the_data_ends_a_loop():
    build = Build(TABLE, "f")
    with build:
        n, x = build.param("n", TensorSpec((), "int64")), build.param("x", TensorSpec((2,)))
        y = ops.fori_loop(n, lambda i, c: c + i.cast(c.dtype), x)
        function = build.finish({"y": y})
    program = engine("xla").compile(function)
    for count in (-1, 0, 1, 5):
        (y,) = program(np.int64(count), np.zeros(2, np.float32))
        np.testing.assert_array_equal(y, np.full(2, sum(range(count)), np.float32))


def gathered(region):
    """A step that adds to `table` what it looks up at an index, inside of `region`."""
    build = Build(TABLE, "step")
    with build:
        table = build.param("table", TensorSpec((3,)))
        index = build.param("index", TensorSpec((4,), "int64"))
        y = region(table, index)
        return build.finish({"table": table + y, "y": y})


def in_scan(table, index):
    return ops.scan(lambda c, i: (c + ops.gather(table, i), c), ops.constant(0.0), index)[0]


def in_branch(table, index):
    return ops.cond(index[0] >= 0, lambda: ops.gather(table, index).sum(), table.sum)


def in_counted_loop(table, index):
    return ops.fori_loop(4, lambda i, c: c + ops.gather(table, index[i]), ops.constant(0.0))


def in_endless_loop(table, index):
    """The index grows until what is found there is large, which it never is."""

    def body(c):
        i, _ = c
        return i + 1, ops.gather(table, i)

    return ops.while_loop(lambda c: c[1] < 100.0, body, (index[0], ops.constant(0.0)))[1]


def in_branch_of_scan(table, index):
    def step(c, i):
        return ops.cond(i >= 0, lambda: c + ops.gather(table, i), lambda: c), c

    return ops.scan(step, ops.constant(0.0), index)[0]


@pytest.mark.parametrize(
    "region", [in_scan, in_branch, in_counted_loop, in_endless_loop, in_branch_of_scan]
)
def test_what_fails_inside_a_region_leaves_the_state(region):
    function = gathered(region)
    table = np.array([1, 2, 3], np.float32)
    loop = engine("xla").compile(function, donate=["table"]).loop({"table": table})
    right, wrong = np.array([0, 1, 2, 0]), np.array([2, 1, 3, 0])
    if region is not in_endless_loop:
        loop.step(index=right)
        table = table + np.float32(7)
    np.testing.assert_array_equal(loop.state()["table"], table)
    with pytest.raises(InvalidInput, match="Gather"):
        loop.step(index=wrong)
    np.testing.assert_array_equal(loop.state()["table"], table)


def test_a_branch_that_is_not_taken_refuses_nothing():
    program = engine("xla").compile(gathered(in_branch))
    table = np.array([1, 2, 3], np.float32)
    assert program(table, np.array([-1, 9, 9, 9]))[1] == 6


def stacking(*, known, goes_on):
    """A loop that doubles its carry and stacks what each trip begins with."""

    def trip(ts):
        _, go, x = ts
        return [emit("Identity", go) if goes_on else x.sum() < 100.0, x * 2.0, x]

    build = Build(TABLE, "f")
    with build:
        n, x = build.param("n", TensorSpec((), "int64")), build.param("x", TensorSpec((2,)))
        body, results = region("loop", [n.type, TensorType(bool_, ()), x.type], trip)
        operands = [np.array(3) if known else n, np.array(True), x]
        attrs, regions = {"num_carry": 1, "trips": "t"}, (body.finish(numbered(results)),)
        return build.finish(
            numbered(build.apply(loop_row, operands, attrs, regions=regions, outputs=2))
        )


def test_a_loop_stacks_results_where_its_count_is_known():
    args = np.int64(3), np.array([1, 2], np.float32)
    agrees(stacking(known=True, goes_on=True), args)
    for known, goes_on in ((True, False), (False, True)):
        program = engine("xla").compile(stacking(known=known, goes_on=goes_on))
        with pytest.raises(InvalidInput, match=r"xla cannot run triplane\.Loop.* trips of a loop"):
            program(*args)

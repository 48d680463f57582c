# ruff: noqa: SIM108 - the forms under test, as users write them
# mypy: disable-error-code="operator,assignment,attr-defined,union-attr,var-annotated"
"""Control flow over tensors means in a graph what Python means by it, values and gradients."""

import linecache
import sys
import traceback

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, nn, ops, trace
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.ir import Role

from .programs import CASES, PROGRAMS, N, X
from .sides import everywhere, floats, on_side, slope


@pytest.mark.slow
@pytest.mark.parametrize(("name", "call"), CASES)
def test_a_program_gives_one_result_in_every_mode(name, call):
    f, calls = PROGRAMS[name]
    everywhere(f, *calls[call])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "call"), CASES)
def test_a_programs_gradient_is_its_slope_in_every_mode(name, call):
    f, calls = PROGRAMS[name]
    x, *rest = calls[call]
    g = everywhere(grad(f), x, *rest)
    v = floats(0.5, -1.0, 0.25).astype(np.float64)
    want = slope(lambda x: f(x, *rest), x.astype(np.float64), v)
    assert abs((g * v).sum() - want) <= 2e-4 * max(1.0, abs(want))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "if_else",
        "while_tensor",
        "range_of_tensor",
        "over_tensor",
        "over_tensor_with_return",
        pytest.param("nested_loops", marks=pytest.mark.slow),
        pytest.param("halves", marks=pytest.mark.slow),
    ],
)
def test_a_gradient_of_a_gradient_is_the_slope_of_the_gradient(name):
    f, calls = PROGRAMS[name]
    x, *rest = calls[0]
    first = grad(f)
    square = lambda x, *rest: (first(x, *rest) * first(x, *rest)).sum()
    second = everywhere(grad(square), x, *rest)
    v = floats(0.5, -1.0, 0.25).astype(np.float64)
    run = graph(square)
    want = slope(lambda x: run(x, *rest), x.astype(np.float64), v)
    assert abs((second * v).sum() - want) <= 5e-4 * max(1.0, abs(want))


def operators(f, *specs):
    return [n.op.name for n in trace(f, *specs).walk()]


def test_conditions_on_tensors_are_nodes_and_on_values_are_not():
    x, n = TensorSpec((3,)), TensorSpec((), "int64")
    assert "Cond" in operators(PROGRAMS["if_else"][0], x)
    assert "Loop" in operators(PROGRAMS["while_tensor"][0], x)
    assert "Loop" in operators(PROGRAMS["range_of_tensor"][0], x, n)
    assert "Scan" in operators(PROGRAMS["over_tensor"][0], x)
    plain = operators(PROGRAMS["python_conditions_stay_python"][0], x)
    assert not {"Cond", "Loop", "Scan"} & set(plain)
    assert operators(PROGRAMS["range_of_int_unrolls"][0], x).count("Mul") == 3


def test_a_loop_over_a_symbolic_length_runs_at_any_length():
    f = trace(PROGRAMS["over_tensor"][0], TensorSpec(("N",)))
    from triplane.unified_ir.engines import engine

    program = engine("onnx").compile(f)
    for n in (1, 4, 9):
        x = np.arange(n, dtype=np.float32)
        np.testing.assert_allclose(program(x)[0], (x**3).sum())


def test_nodes_keep_the_users_lines():
    f, _ = PROGRAMS["if_else"]
    function = trace(f, TensorSpec((3,)))
    start = f.__wrapped__.__code__.co_firstlineno
    lines = {n.op.name: n.meta.location for n in function.walk()}
    assert all(at is None or at.file.endswith("programs.py") for at in lines.values())
    (cond,) = [n for n in function.nodes if n.op.name == "Cond"]
    assert cond.meta.location.line == start + 2
    (double,) = [n for n in cond.regions[0].nodes if n.op.name == "Mul"]
    assert double.meta.location.line == start + 3


def test_an_exception_in_rewritten_code_shows_the_users_line():
    @graph
    def fails(x):
        if x.rank == 1:
            raise KeyError("here")
        return x

    with pytest.raises(KeyError) as caught:
        fails(X)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__
    assert frames[-1].lineno == fails.__wrapped__.__code__.co_firstlineno + 3


def test_functions_without_control_flow_come_back_unchanged():
    def straight(x):
        return x * 2.0

    assert rewritten(straight) is straight
    assert rewritten(np.linalg.norm) is np.linalg.norm
    assert rewritten(linecache.getlines) is linecache.getlines
    assert rewritten(ops.cross_entropy) is ops.cross_entropy
    assert rewritten(len) is len


def test_a_function_without_source_stays_and_says_so_at_a_tensor():
    space = {}
    exec("def f(x):\n    if x.sum() > 0:\n        return x\n    return -x\n", space)
    assert rewritten(space["f"]) is space["f"]
    with pytest.raises(InvalidInput, match=r"the source of 'f' \(<string>\) cannot be read"):
        graph(space["f"])(X)
    with on_side("eager"):
        np.testing.assert_array_equal(graph(space["f"])(-X), X)


def test_code_is_rewritten_once():
    before = rewritten(PROGRAMS["if_else"][0].__wrapped__)
    after = rewritten(PROGRAMS["if_else"][0].__wrapped__)
    assert before.__wrapped__.__code__ is after.__wrapped__.__code__


class Base(nn.Cell):
    def construct(self, x):
        return x * 2.0


class Derived(Base):
    scale = 3.0

    def __init__(self):
        super().__init__()
        self.__hidden = 1.0

    def __private(self, x):
        return x + self.__hidden

    def construct(self, x, *, offset=1.0):
        """Its own words."""
        if x.sum() > 0:
            y = super().construct(x) + offset
        else:
            y = self.__private(x) * self.scale
        return y


def test_methods_keep_super_private_names_and_keyword_defaults():
    np.testing.assert_array_equal(everywhere(Derived(), X), X * 2 + 1)
    np.testing.assert_array_equal(everywhere(Derived(), -X), (1 - X) * 3)
    np.testing.assert_array_equal(Derived()(X, offset=5.0), X * 2 + 5)


def test_closures_and_globals_are_read_when_they_are_needed():
    factor = 2.0

    @graph
    def scaled(x):
        if x.sum() > 0:
            return x * factor * late()
        return x

    def late():
        return 10.0

    np.testing.assert_array_equal(scaled(X), X * 20)
    factor = 3.0
    np.testing.assert_array_equal(scaled(X), X * 30)


def test_walrus_and_annotations_and_deletes_survive():
    @graph
    def f(x):
        total: float = 0.0
        while (half := total * 0.5) < 2.0:
            extra: object
            extra = x.sum()
            total = total + extra
            del extra
        if (y := x * 2.0).sum() > 0:
            total = total + y.sum()
        return total + half

    assert everywhere(f, X) == 6.0 + 12.0 + 3.0


def test_with_and_try_around_control_flow_keep_their_meaning():
    events = []

    class Watched:
        def __enter__(self):
            events.append("in")

        def __exit__(self, *_):
            events.append("out")

    @graph
    def f(x):
        with Watched():
            try:
                if x.sum() > 0:
                    y = x * 2.0
                else:
                    y = x
            finally:
                events.append("finally")
            return y

    with on_side("eager"):
        np.testing.assert_array_equal(f(X), X * 2)
    assert events == ["in", "finally", "out"]
    np.testing.assert_array_equal(f(X), X * 2)


def test_python_loops_break_continue_and_return_as_python_does():
    @graph
    def f(x, limit):
        seen = []
        for name in ("a", "b", "c", "d"):
            if name == "b":
                continue
            if len(seen) == limit:
                break
            seen.append(name)
        else:
            seen.append("end")
        i = 0
        while True:
            i += 1
            if i > 3:
                return x * float(len(seen)) * i
            assert i < 9, "never"

    np.testing.assert_array_equal(f(X, 9), X * 16)
    np.testing.assert_array_equal(f(X, 1), X * 4)


def test_match_and_comprehensions_stay_python():
    @graph
    def f(x, kind):
        match kind:
            case "sum" if x.rank == 1:
                y = x.sum()
            case ("scale", factor):
                y = x * factor
            case _:
                y = x
        parts = [v for v in (y, None) if v is not None]
        return parts[0] if len(parts) == 1 else None

    assert f(X, "sum") == 6.0
    np.testing.assert_array_equal(f(X, ("scale", 2.0)), X * 2)


class Counting(nn.Cell):
    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(np.zeros((), np.float32), role=Role.BUFFER)

    def construct(self, x):
        if x.sum() > 0:
            self.count = self.count + 1.0
        for v in x:
            if v > 2.5:
                break
            self.count = self.count + v * 0.5
        while self.count < 10.0:
            self.count = self.count * 2.0 + 5.0
        return x * self.count


def test_buffers_assigned_in_branches_and_loops_are_carried():
    for x in (X, -X + 1.0):
        found = []
        for side in ("eager", "onnx", "reference"):
            cell = Counting()
            with on_side(side):
                y = cell(x)
            found.append((y, cell.count.array))
        for y, count in found[1:]:
            np.testing.assert_allclose(y, found[0][0])
            np.testing.assert_allclose(count, found[0][1])


def test_a_buffer_in_a_differentiated_branch_is_written_back():
    cell = Counting()
    value = grad(lambda x: cell(x).sum())(X)
    assert cell.count.array == 10.0  # (1 + (1 + 2) / 2) * 2 + 5
    np.testing.assert_array_equal(value, floats(10.0 + 6.0, 10.0 + 6.0, 10.0))


def test_deep_python_recursion_is_pythons_affair():
    @graph
    def count(x, n):
        if n == 0:
            return x
        return count(x + 1.0, n - 1)

    assert sys.getrecursionlimit() >= 1000
    np.testing.assert_array_equal(count(X, 30), X + 30)


def test_a_tail_call_becomes_one_loop():
    function = trace(PROGRAMS["halves"][0], TensorSpec((3,)), TensorSpec((), "int64"))
    assert "Loop" in [n.op.name for n in function.walk()]
    assert float(PROGRAMS["halves"][0](X, np.int64(100))) == pytest.approx(6.0 * 0.5**100)
    assert int(N) == 3


# fmt: off
LAMBDAS = (lambda v: v * 2.0 if v.sum() > 0 else v), (lambda v: v * 3.0 if v.sum() > 0 else v)
INSIDE = (lambda: graph(lambda v: -v if v.sum() > 0 else v))()  # noqa: PLC3002
AROUND = graph(lambda v: (lambda w: w * 5.0 if w.sum() > 0 else w)(v) if v.sum() < 9 else v)  # noqa: PLC3002
# fmt: on


def test_lambdas_that_share_a_line_are_told_apart():
    for f, want in zip((*map(graph, LAMBDAS), INSIDE, AROUND), (2.0, 3.0, -1.0, 5.0), strict=True):
        np.testing.assert_array_equal(f(X), X * want)

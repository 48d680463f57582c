# ruff: noqa: ARG005, PLW0108 - the forms under test, as users write them
# mypy: disable-error-code="operator,assignment"
"""Calls with arrays: arguments, signatures and caches, precision, modes, threads."""

import threading
import warnings
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import (
    TensorSpec,
    checkpoint,
    grad,
    graph,
    mode,
    nn,
    set_mode,
    trace,
    value_and_grad,
    vjp,
)
from triplane.unified_ir.frontend.programs import MANY_TRACES
from triplane.unified_ir.ir import Role

from .sides import SIDES, everywhere, floats, on_side

X = floats(1.0, 2.0, 3.0)


def counted(f):
    """`f` under @graph, with a count of its traces."""
    traces = Traces()

    def body(*args, **kwargs):
        traces.ticks.release()
        return f(*args, **kwargs)

    return graph(body), traces


class Traces:
    """How often a function was traced, counted where no watch looks: each change is a new trace."""

    def __init__(self):
        self.ticks = threading.Semaphore(0)

    @property
    def made(self):
        return self.ticks._value


def test_arguments_bind_as_in_python_whatever_their_order():
    @graph
    def f(x, scale=2.0, *, shift, **more):
        return x * scale + shift + more.get("extra", 0.0)

    ones = np.ones(3, np.float32)
    for side in SIDES:
        with on_side(side):
            np.testing.assert_array_equal(f(shift=ones, x=X), X * 2 + 1)
            np.testing.assert_array_equal(f(X, shift=X, scale=ones), X + X)
            np.testing.assert_array_equal(f(X, extra=X, shift=ones), X * 3 + 1)
    with pytest.raises(InvalidInput, match=r"f: missing a required .*argument: 'shift'"):
        f(X)


def test_trees_of_arguments_and_results_keep_their_shape():
    @graph
    def f(pair, table):
        return {"sum": pair[0] + pair[1], "rest": [table["b"], (table["a"],)], "none": None}

    found = everywhere_tree(f, (X, X), {"b": X * 2, "a": X * 3})
    np.testing.assert_array_equal(found["sum"], X * 2)
    np.testing.assert_array_equal(found["rest"][0], X * 2)
    np.testing.assert_array_equal(found["rest"][1][0], X * 3)
    assert found["none"] is None


def everywhere_tree(f, *args):
    for side in SIDES:
        with on_side(side):
            found = f(*args)
    return found


def test_results_may_be_inputs_constants_and_repeats():
    def f(x, y):
        return x, 2.0, x, y, y * 1.0

    for side in SIDES:
        with on_side(side):
            found = graph(f)(X, X + 1)
        assert [np.asarray(v).tolist() for v in found[:3]] == [X.tolist(), 2.0, X.tolist()]
    assert trace(f, TensorSpec((3,)), TensorSpec((3,))).result_names == (
        "y0",
        "y1",
        "y2",
        "y3",
        "y4",
    )


def test_an_automatic_result_name_avoids_the_inputs_names():
    assert trace(lambda x, y: x + y, X, X).result_names == ("result",)
    assert trace(lambda x: x + 1.0, X).result_names == ("y",)


def test_other_results_are_refused_by_name():
    with pytest.raises(InvalidInput, match="returned a str, 'three'"):
        graph(lambda x: (x, "three"))(X)


class Kind(Enum):
    A = 1
    B = 2


def test_python_values_are_part_of_the_signature_and_arrays_are_not():
    f, traces = counted(lambda x, k: x * 2.0)
    for k in (1, 1.0, True, 2, "1", None, Kind.A, Kind.B, (1, 2), -0.0, 0.0):
        f(X, k)
        f(X + 1, k)
    assert traces.made == 11
    f(X, np.int64(1)), f(X, np.int64(5)), f(X, np.array(7))
    assert traces.made == 12
    f(X[:2], 1)
    assert traces.made == 13


def test_a_new_value_in_a_closure_is_a_new_trace():
    factor = 2.0
    f, traces = counted(lambda x: x * factor)
    np.testing.assert_array_equal(f(X), X * 2)
    np.testing.assert_array_equal(f(X), X * 2)
    assert traces.made == 1
    factor = 3.0
    np.testing.assert_array_equal(f(X), X * 3)


class Scaled(nn.Cell):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(np.array([factor], np.float32))
        self.seen = nn.Parameter(np.zeros((), np.float32), role=Role.BUFFER)

    def construct(self, x):
        self.seen = self.seen + 1.0
        return x * self.weight * self.factor if self.training else x


def test_a_cells_mode_attributes_and_state_are_seen_by_the_next_call():
    cell = Scaled(2.0)
    np.testing.assert_array_equal(cell(X), X * 4)
    cell.factor = 5.0
    np.testing.assert_array_equal(cell(X), X * 10)
    cell.weight = np.array([1.0])
    np.testing.assert_array_equal(cell(X), X * 5)
    np.testing.assert_array_equal(cell.eval()(X), X)
    assert cell.seen.array == 4.0


def test_a_function_uses_the_cell_its_name_means_now():
    cell = Scaled(2.0)
    f = graph(lambda x: cell(x))
    np.testing.assert_array_equal(f(X), X * 4)
    cell = Scaled(3.0)
    np.testing.assert_array_equal(f(X), X * 9)
    assert cell.seen.array == 1.0


@graph
def through(model, x):
    return inner(model, x)


def inner(model, x):
    return model[0](x) + model[1](x) + GLOBAL(x)


GLOBAL = Scaled(1.0)


def test_cells_are_found_as_arguments_globals_and_through_functions():
    first, second = Scaled(2.0), Scaled(3.0)
    before = float(GLOBAL.seen.array)
    np.testing.assert_array_equal(through([first, second], X), X * 14)
    assert [float(c.seen.array) for c in (first, second, GLOBAL)] == [1.0, 1.0, before + 1]
    names = trace(through, [first, second], TensorSpec(("N",))).param_names
    assert {"x", "model.0.weight", "model.1.weight", "GLOBAL.weight"} <= set(names)


class WithMethod(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(np.array(2.0, np.float32))

    @graph
    def loss(self, x):
        if x.sum() > 0:
            return (x * self.weight).sum()
        return x.sum()


def test_a_method_is_traced_with_its_cells_state():
    assert WithMethod().loss(X) == 12.0
    assert trace(WithMethod().loss, TensorSpec((3,))).param_names == ("x", "weight")


class Twice(nn.Cell):
    def __init__(self):
        super().__init__()
        self.a = Scaled(1.0)
        self.b = self.a
        self.parts = [self.a, Scaled(3.0)]

    def construct(self, x):
        for part in self.parts:
            x = part(x)
        return self.b(self.a(x))


def test_a_shared_cell_has_one_state_under_its_first_path():
    cell = Twice()
    assert list(cell.parameters()) == ["a.weight", "a.seen", "parts.1.weight", "parts.1.seen"]
    cell(X)
    assert cell.a.seen.array == 3.0
    assert cell.parts[1].seen.array == 1.0


def test_nodes_carry_the_path_of_their_cell():
    scopes = {n.meta.scope for n in trace(Twice(), TensorSpec((3,))).walk()}
    assert scopes == {"a", "parts.1"}


def test_a_foreign_cells_state_is_refused_with_a_way_out():
    with pytest.raises(InvalidInput, match="a cell that the trace does not know; make the cell an"):
        graph(lambda x: Scaled(1.0)(x))(X)


class Holder:
    """An object of the user's that owns cells, such as a class around a loop of one's own."""

    def __init__(self, factor):
        self.net, self.others = Scaled(factor), {"teacher": [Scaled(2.0)]}

    @graph
    def step(self, x):
        return self.loss(self.net, x)

    def loss(self, net, x):
        return ((net(x) - self.others["teacher"][0](x)) ** 2.0).sum()


LISTED, HELD = [Scaled(3.0)], Holder(3.0)


@pytest.mark.parametrize("side", SIDES)
def test_a_function_inside_a_function_names_cells(side):
    with on_side(side):
        y = graph(lambda x: checkpoint(lambda v: HELD.net(v) + LISTED[0](v))(x))(X)
    np.testing.assert_allclose(y, 18.0 * X)


def test_a_function_that_is_compiled_at_every_call_warns_once_of_what_changes():
    class Loop:
        def __init__(self):
            self.net, self.losses = Scaled(1.0), []

        @graph
        def step(self, x):
            return self.net(x).sum()

    loop = Loop()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(MANY_TRACES + 5):
            loop.losses.append(float(loop.step(X)))
    (warning,) = seen
    assert "step was compiled 20 times" in str(warning.message)
    assert "losses" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("side", SIDES)
def test_arrays_of_others_and_returned_cells_are_refused_by_name(side):
    class Foreign:
        def __array__(self, dtype=None, copy=None):
            return X

    with on_side(side):
        with pytest.raises(InvalidInput, match=r"is a .*Foreign, .* pass numpy.asarray\(...\)"):
            graph(lambda x: x)(Foreign())
        with pytest.raises(InvalidInput, match="returned the cell Scaled, which keeps its new"):
            graph(lambda cell, x: (cell, cell(x)))(LISTED[0], X)


@pytest.mark.parametrize("engine", [("graph", "onnx"), ("eager", "reference")])
def test_cells_in_containers_and_objects_are_reached(engine):
    hidden, space = [Scaled(3.0)], SimpleNamespace(net=Scaled(3.0))
    functions = [lambda x: hidden[0](x), lambda x: space.net(x), lambda x: LISTED[0](x),
                 lambda x: HELD.net(x)]  # fmt: skip
    with mode(*engine):
        for f in functions:
            np.testing.assert_allclose(graph(f)(X), 9.0 * X)
        for cell in (hidden[0], space.net, LISTED[0], HELD.net):
            assert cell.seen.array > 0.0
        holder = Holder(3.0)
        assert holder.step(X) == pytest.approx((25.0 * X**2).sum())
        holder.net = Scaled(4.0)
        assert holder.step(X) == pytest.approx((144.0 * X**2).sum())
        slope = grad(holder.loss)(holder.net, X)["weight"]
        np.testing.assert_allclose(slope, [(96.0 * X**2).sum()], rtol=1e-6)


def test_an_input_named_like_state_is_refused():
    class Clash(nn.Cell):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(np.zeros(3, np.float32))

        def construct(self, x):
            return x + self.x

    with pytest.raises(InvalidInput, match="'x' is both an input and a state tensor of Clash"):
        Clash()(X)


def test_float64_arrays_become_float32_unless_asked_otherwise():
    f = graph(lambda x: x * 2.0)
    wide = np.array([0.1, 0.2])
    assert f(wide).dtype == np.float32
    assert f(np.float64(0.1)).dtype == np.float32
    with mode("graph", "reference", floats="float64"):
        assert f(wide).dtype == np.float64
    with mode("eager", floats="float64"):
        assert f(wide).dtype == np.float64
    assert nn.Parameter(wide).array.dtype == np.float32
    assert nn.Parameter(wide, dtype="float64").array.dtype == np.float64
    with pytest.raises(
        InvalidInput, match="floats must be one of 'float32', 'float64', got 'float16'"
    ):
        set_mode("graph", floats="float16")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no engine 'nonsense'; there are onnx"):
        set_mode("graph", "nonsense")


def test_eager_tensors_show_numbers_while_they_are_recorded():
    seen = []

    @graph
    def f(x):
        y = x * 2.0
        seen.append((y.numpy(), repr(y), bool(y.sum() > 0)))
        return y

    with mode("eager"):
        f(X)
    assert seen[0][0].tolist() == [2.0, 4.0, 6.0]
    assert "2., 4., 6." in seen[0][1]
    assert seen[0][2] is True


def test_threads_run_and_trace_at_once_each_in_its_mode():
    results, errors = {}, []
    f = graph(lambda x, k: x * float(k) if x.sum() > 0 else x)

    def work(i):
        try:
            with mode("eager") if i % 2 else mode("graph", "reference"):
                results[i] = [f(X, k).tolist() for k in range(6)]
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert all(r == [(X * k).tolist() for k in range(6)] for r in results.values())


def test_transforms_pass_keywords_constants_and_trees_on():
    def f(p, n, *, scale=1.0):
        total = 0.0
        for _ in range(n):
            total = total + (p["w"] * p["b"][0]).sum() * scale
        return total

    p = {"w": X, "b": [X * 2, X]}
    value, g = value_and_grad(f)(p, 2, scale=3.0)
    assert value == 168.0
    np.testing.assert_array_equal(g["w"], X * 12)
    np.testing.assert_array_equal(g["b"][0], X * 6)
    np.testing.assert_array_equal(g["b"][1], X * 0)
    assert float(grad(lambda x: x * x)(3.0)) == 6.0


def test_transforms_refuse_what_has_no_gradient_by_name():
    with pytest.raises(
        InvalidInput, match="floating-point tensors, but an argument of <lambda> is"
    ):
        grad(lambda x: x.sum())(np.array([1, 2]))
    with pytest.raises(
        InvalidInput, match=r"a gradient is of a scalar, but <lambda> gives \[float32"
    ):
        grad(lambda x: x * 2.0)(X)
    with pytest.raises(InvalidInput, match="there is no argument 1 to differentiate"):
        grad(lambda x: x.sum(), argnums=1)(X)
    with pytest.raises(InvalidInput, match="is not callable"):
        grad(3)(X)


def test_vjp_gives_results_and_cotangents_of_every_argument():
    value, (gx, gy) = everywhere_tree(vjp(lambda x, y: (x * y, x + y)), X, X * 2, (X, X))
    np.testing.assert_array_equal(value[0], X * X * 2)
    np.testing.assert_array_equal(gx, X * 2 * X + X)
    np.testing.assert_array_equal(gy, X * X + X)
    with pytest.raises(InvalidInput, match="the cotangent must match the result"):
        vjp(lambda x: x)(X, X[:2])


def test_buffers_assigned_under_a_gradient_are_written_back():
    cell = Scaled(2.0)
    for i, side in enumerate(SIDES):
        with on_side(side):
            np.testing.assert_array_equal(grad(lambda x: cell(x).sum())(X), np.full(3, 4.0))
        assert cell.seen.array == i + 1


def test_a_symbolic_function_inlines_at_fixed_sizes():
    from triplane.unified_ir.ops.build import Build
    from triplane.unified_ir.ops.inline import inline
    from triplane.unified_ir.ops.table import TABLE

    @graph
    def total(x):
        s = x[0] * 0.0
        for row in x:
            s = s + row
        return s

    f = trace(total, TensorSpec(("N", 2)))
    build = Build(TABLE, "fixed")
    with build:
        (y,) = inline(f, [build.param("x", TensorSpec((4, 2)))])
    fixed = build.finish({"y": y})
    assert all("N" not in str(v.type) for n in fixed.walk() for v in n.outputs)
    np.testing.assert_array_equal(everywhere(total, np.ones((4, 2), np.float32)), [4.0, 4.0])

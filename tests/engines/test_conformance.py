"""One suite for every engine: a call, a loop over state, and what each refuses."""

from functools import partial

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir import ops
from triplane.unified_ir.engines import ENGINES, engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.runtime import session
from triplane.unified_ir.runtime.session import DeviceBuffer

F32 = np.float32


def function(params, body):
    """A function of named specs; `body` takes tensors by name and gives results by name."""
    build = Build(TABLE, "f")
    with build:
        made = body(**{k: build.param(k, spec) for k, spec in params.items()})
    return build.finish(made)


def counter():
    """step(w, n, x): w <- w + x, n <- n + 1; gives the old sum of w."""
    specs = {
        "w": TensorSpec((3,)),
        "n": TensorSpec((), "int64"),
        "x": TensorSpec((3,)),
    }
    return function(specs, lambda w, n, x: {"total": w.sum(), "w": w + x, "n": n + 1})


def start():
    return {"w": np.zeros(3, F32), "n": np.zeros((), np.int64)}


@pytest.fixture(params=[*ENGINES, "device buffers"])
def made(request, monkeypatch):
    if request.param in ENGINES:
        return engine(request.param)
    # The buffers that keep a loop's state on a GPU, in memory of the CPU that onnxruntime allocates
    # for them in the same way.
    monkeypatch.setitem(session.BUFFERS, "cpu", partial(DeviceBuffer, device=session._CPU))
    return engine("onnx")


def test_an_unknown_engine_is_named_with_the_known_ones():
    with pytest.raises(NotFound, match="no engine 'tpu'; there are onnx, reference, ascend"):
        engine("tpu")


@pytest.mark.parametrize(
    ("name", "why"),
    [("xla", "JAX chooses, and JAX_PLATFORMS"), ("reference", "CPU"), ("ascend", "CPU")],
)
def test_a_device_is_refused_where_the_engine_has_no_choice(name, why):
    with pytest.raises(
        InvalidInput, match=f"'onnx' takes a device, got 'cuda' with '{name}': .*{why}"
    ):
        engine(name, device="cuda")


def test_an_engine_refuses_a_device_that_onnxruntime_does_not_have():
    assert engine("onnx", device="cpu").name == "onnx"
    with pytest.raises(InvalidInput, match="one of 'cpu', 'cuda'"):
        engine("onnx", device="tpu")
    if "CUDAExecutionProvider" not in session.available_providers():
        with pytest.raises(Unavailable, match="pip install onnxruntime-gpu"):
            engine("onnx", device="cuda")


class TestCall:
    def test_results_come_in_order_with_their_types(self, made):
        f = function(
            {"x": TensorSpec((2, 3)), "i": TensorSpec((2,), "int64")},
            lambda x, i: {
                "sum": x.sum(), "mask": x > 0.0, "next": i + 1, "half": x.cast("float16"),
                "bits": i.cast("uint32"),
            },
        )  # fmt: skip
        x = np.array([[1, -1, 2], [0, 3, -4]], F32)
        total, mask, following, half, bits = made.compile(f)(x, np.array([1, 2]))
        assert (total.dtype, total.shape, float(total)) == (F32, (), 1.0)
        np.testing.assert_array_equal(mask, x > 0)
        assert (following.dtype, list(following)) == (np.int64, [2, 3])
        assert (half.dtype, bits.dtype) == (np.float16, np.uint32)

    def test_a_symbolic_batch_takes_any_size_on_one_program(self, made):
        f = function({"x": TensorSpec(("N", 2))}, lambda x: {"y": x * 2.0, "n": x.sum((1,))})
        program = made.compile(f)
        for n in (1, 5, 2):
            y, sums = program(np.ones((n, 2), F32))
            assert (y.shape, sums.shape) == ((n, 2), (n,))

    @pytest.mark.parametrize(
        "args",
        [
            (np.zeros((2, 2), F32),),
            (np.zeros((2, 2)), np.zeros((2, 2), F32)),
            (np.zeros(2, F32), np.zeros((2, 2), F32)),
            (np.zeros((2, 3), F32), np.zeros((2, 2), F32)),
            (np.zeros((2, 2), F32), np.zeros((3, 2), F32)),
        ],
        ids=["too few", "element type", "rank", "fixed size", "two sizes for one symbol"],
    )
    def test_arguments_that_do_not_fit_are_refused(self, made, args):
        spec = TensorSpec(("N", 2))
        program = made.compile(function({"x": spec, "y": spec}, lambda x, y: {"z": x + y}))
        with pytest.raises(InvalidInput):
            program(*args)

    def test_arrays_of_any_layout_are_read_right_and_left_alone(self, made):
        f = function({"x": TensorSpec((2, 3))}, lambda x: {"y": x * 2.0})
        x = np.asfortranarray(np.arange(6, dtype=F32).reshape(2, 3))[:, ::-1]
        before = x.copy()
        (y,) = made.compile(f)(x)
        np.testing.assert_array_equal(y, before * 2)
        np.testing.assert_array_equal(x, before)

    def test_a_function_without_nodes_and_one_without_parameters_run(self, made):
        f = function({"x": TensorSpec((2,))}, lambda x: {"y": x, "z": x})
        x = np.array([1, 2], F32)
        y, z = made.compile(f)(x)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(z, x)
        constant = function({}, lambda: {"c": ops.constant([1.0, 2.0], "float32")})
        np.testing.assert_array_equal(made.compile(constant)()[0], x)

    def test_a_result_may_be_its_own_parameter(self, made):
        f = function({"w": TensorSpec((2,))}, lambda w: {"w": w})
        np.testing.assert_array_equal(made.compile(f)(np.ones(2, F32))[0], np.ones(2))

    def test_values_outside_an_axis_are_refused(self, made):
        specs = {"x": TensorSpec((3,)), "i": TensorSpec((1,), "int64")}
        program = made.compile(function(specs, lambda x, i: {"y": ops.gather(x, i)}))
        with pytest.raises(InvalidInput, match="failed on these values"):
            program(np.zeros(3, F32), np.array([3]))


class TestLoop:
    def loop(self, made):
        return made.compile(counter(), donate=("w", "n")).loop(start())

    def test_state_advances_and_stays_out_of_the_results(self, made):
        loop = self.loop(made)
        totals = [loop.step(x=np.full(3, k, F32)) for k in range(1, 6)]
        assert [set(t) for t in totals] == [{"total"}] * 5
        assert [float(t["total"]) for t in totals] == [0, 3, 9, 18, 30]
        assert int(loop.state()["n"]) == 5
        np.testing.assert_array_equal(loop.state()["w"], np.full(3, 15))

    def test_results_of_earlier_steps_keep_their_values(self, made):
        f = function(
            {"w": TensorSpec((3,)), "x": TensorSpec((3,))},
            lambda w, x: {"seen": w * 1.0, "w": w + x},
        )
        loop = made.compile(f, donate=("w",)).loop({"w": np.zeros(3, F32)})
        seen = [loop.step(x=np.ones(3, F32))["seen"] for _ in range(4)]
        assert [s[0] for s in seen] == [0, 1, 2, 3]

    def test_state_is_copied_in_and_out(self, made):
        given = start()
        loop = made.compile(counter(), donate=("w", "n")).loop(given)
        given["w"][:] = 99
        loop.state()["w"][:] = 77
        loop.step(x=np.ones(3, F32))
        np.testing.assert_array_equal(loop.state()["w"], np.ones(3))
        assert given["w"][0] == 99

    def test_loading_replaces_what_is_named_and_nothing_else(self, made):
        loop = self.loop(made)
        loop.step(x=np.ones(3, F32))
        replacement = np.full(3, 5, F32)
        loop.load({"w": replacement})
        replacement[:] = 0
        assert float(loop.step(x=np.ones(3, F32))["total"]) == 15
        assert int(loop.state()["n"]) == 2

    @pytest.mark.parametrize(
        "bad",
        [{"v": np.zeros(3, F32)}, {"w": np.zeros(4, F32)}, {"w": np.zeros(3)}],
        ids=["name", "size", "element type"],
    )
    def test_loading_what_does_not_fit_changes_nothing(self, made, bad):
        loop = self.loop(made)
        with pytest.raises(InvalidInput):
            loop.load({"n": np.array(7), **bad})
        assert int(loop.state()["n"]) == 0

    @pytest.mark.parametrize(
        "bad",
        [{}, {"w": np.zeros(3, F32)}, {**start(), "v": np.zeros(1)}, {**start(), "w": np.zeros(3)}],
        ids=["nothing", "too little", "too much", "element type"],
    )
    def test_a_loop_starts_from_exactly_the_donated_state(self, made, bad):
        with pytest.raises(InvalidInput):
            made.compile(counter(), donate=("w", "n")).loop(bad)

    @pytest.mark.parametrize(
        "batch",
        [{}, {"x": np.zeros(4, F32)}, {"x": np.zeros(3, F32), "y": np.zeros(3, F32)}],
        ids=["missing", "size", "unknown"],
    )
    def test_a_refused_step_leaves_the_state(self, made, batch):
        loop = self.loop(made)
        loop.step(x=np.ones(3, F32))
        with pytest.raises(InvalidInput):
            loop.step(**batch)
        np.testing.assert_array_equal(loop.state()["w"], np.ones(3))
        loop.step(x=np.ones(3, F32))
        assert int(loop.state()["n"]) == 2

    def test_a_step_that_fails_midway_leaves_the_state(self, made):
        specs = {"w": TensorSpec((3,)), "i": TensorSpec((1,), "int64")}
        f = function(specs, lambda w, i: {"w": w + 1.0 + ops.gather(w * 0.0, i)})
        loop = made.compile(f, donate=("w",)).loop({"w": np.zeros(3, F32)})
        loop.step(i=np.array([0]))
        with pytest.raises(InvalidInput):
            loop.step(i=np.array([5]))
        np.testing.assert_array_equal(loop.state()["w"], np.ones(3))
        loop.step(i=np.array([2]))
        np.testing.assert_array_equal(loop.state()["w"], np.full(3, 2))

    def test_a_step_that_fails_after_its_state_is_computed_leaves_the_state(self, made):
        specs = {
            "v": TensorSpec((3,)),
            "w": TensorSpec((3,)),
            "u": TensorSpec((3,)),
            "x": TensorSpec((3,)),
            "i": TensorSpec((1,), "int64"),
            "j": TensorSpec((1,), "int64"),
        }

        def body(v, w, u, x, i, j):
            v = ops.gather(x, i) + v
            w = w - v  # follows from new state, and both are decided before the second Gather
            return {"v": v, "w": w, "u": w, "seen": ops.gather(x, j)}

        given = {"v": np.ones(3, F32), "w": np.full(3, 2, F32), "u": np.full(3, 3, F32)}
        loop = made.compile(function(specs, body), donate=("v", "w", "u")).loop(given)
        x, good, bad = np.zeros(3, F32), np.array([2]), np.array([7])
        for batch in ({"i": bad, "j": good}, {"i": good, "j": bad}):
            with pytest.raises(InvalidInput, match="Gather"):
                loop.step(x=x, **batch)
            for name, array in given.items():
                np.testing.assert_array_equal(loop.state()[name], array)
        loop.step(x=x, i=good, j=good)
        assert [float(loop.state()[n][0]) for n in ("v", "w", "u")] == [1, 1, 1]

    def test_donating_what_is_no_parameter_is_refused(self, made):
        with pytest.raises(InvalidInput):
            made.compile(counter(), donate=("missing",))

    def test_state_keeps_its_type(self, made):
        f = function({"w": TensorSpec((3,))}, lambda w: {"w": w.sum()})
        with pytest.raises(InvalidInput, match="must keep its type"):
            made.compile(f, donate=("w",))

    def test_state_that_nothing_replaces_stays(self, made):
        specs = {"w": TensorSpec((2,)), "x": TensorSpec((2,))}
        f = function(specs, lambda w, x: {"y": w * x})
        loop = made.compile(f, donate=("w",)).loop({"w": np.array([2, 3], F32)})
        for _ in range(3):
            np.testing.assert_array_equal(loop.step(x=np.ones(2, F32))["y"], [2, 3])
        np.testing.assert_array_equal(loop.state()["w"], [2, 3])

    def test_exchanged_state_is_exchanged_each_step(self, made):
        """A result that is another state's parameter: no buffer may be read after it is written."""
        specs = {"a": TensorSpec((2,)), "b": TensorSpec((2,)), "x": TensorSpec(())}
        f = function(specs, lambda a, b, x: {"a": b, "b": a, "y": a.sum() * x})
        first, second = np.array([1, 2], F32), np.array([10, 20], F32)
        loop = made.compile(f, donate=("a", "b")).loop({"a": first, "b": second})
        found = [float(loop.step(x=np.array(1, F32))["y"]) for _ in range(5)]
        assert found == [3, 30, 3, 30, 3]
        np.testing.assert_array_equal(loop.state()["a"], second)

    def test_state_read_after_its_update_is_still_the_old_one(self, made):
        """Readers that run late must not see the new value in the same buffer."""
        specs = {"w": TensorSpec((64, 64)), "x": TensorSpec((64, 64))}

        def body(w, x):
            late = ops.log(ops.exp(ops.tanh((w @ w.transpose()) * 0.0 + w)) + 0.0)
            return {"w": w + x, "late": late.sum(), "mixed": (w @ x).sum()}

        f = function(specs, body)
        rng = np.random.default_rng(0)
        w = rng.standard_normal((64, 64)).astype(F32) * 0.01
        x = np.eye(64, dtype=F32) * 0.1
        loop = made.compile(f, donate=("w",)).loop({"w": w})
        for k in range(6):
            found = loop.step(x=x)
            seen = w + k * x
            np.testing.assert_allclose(found["late"], np.tanh(seen).sum(), rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(found["mixed"], 0.1 * seen.sum(), rtol=5e-3, atol=5e-3)

    def test_two_loops_of_one_program_are_apart(self, made):
        program = made.compile(counter(), donate=("w", "n"))
        one, two = program.loop(start()), program.loop(start())
        for _ in range(3):
            one.step(x=np.ones(3, F32))
        two.step(x=np.ones(3, F32))
        assert (int(one.state()["n"]), int(two.state()["n"])) == (3, 1)

    def test_the_batch_size_may_change_between_steps(self, made):
        specs = {"w": TensorSpec((2,)), "x": TensorSpec(("N", 2))}
        f = function(specs, lambda w, x: {"w": w + x.mean((0,)), "y": x @ w})
        loop = made.compile(f, donate=("w",)).loop({"w": np.zeros(2, F32)})
        for k, n in enumerate((4, 1, 7, 4)):
            y = loop.step(x=np.ones((n, 2), F32))["y"]
            np.testing.assert_allclose(y, np.full(n, 2.0 * k))

"""Operators of one's own: everywhere by name, differentiable, kernels held to the body."""

import numpy as np
import pytest
from tests.conformance.checks import agree

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, mode, nn, ops, trace
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.frontend import value_and_grad
from triplane.unified_ir.ir.parse import parse_function
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.onnx import OnnxTarget, emit, import_onnx, serialize
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.rows.control.custom_ops import KERNELS
from triplane.unified_ir.ops.table import TABLE

X = np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def no_kernels_stay():
    before = dict(KERNELS)
    yield
    KERNELS.clear()
    KERNELS.update(before)


@ops.custom("Swoosh", domain="org.example")
def swoosh(x, *, slope=0.1):
    return ops.softplus(x) - slope * x


@ops.custom("CentredAndScale", domain="org.example")
def centred(x):
    scale = ops.abs_(x).max([0], keepdims=True)
    return x / scale - (x / scale).mean([0], keepdims=True), scale.reshape(scale.shape[1:])


def _through(_, *, y, g):
    return g + y * 0.0


@ops.custom("Rounded", domain="org.example.nested", bprop=_through)
def rounded(x):
    return ops.round_(swoosh(x, slope=0.3) * 8.0) / 8.0


def both(x):
    y, scale = centred(x)
    return swoosh(y) + swoosh(x, slope=0.5) + rounded(x) * scale


def plain(x):
    soft = np.logaddexp(x, 0)
    scale = np.abs(x).max(0)
    y = x / scale - (x / scale).mean(0)
    rough = np.round((soft - 0.3 * x) * 8) / 8
    return np.logaddexp(y, 0) - 0.1 * y + soft - 0.5 * x + rough * scale


@pytest.fixture(scope="module")
def traced():
    return trace(both, TensorSpec(("N", 3)))


@pytest.mark.parametrize("name", ["onnx", "reference", "ascend"])
def test_every_engine_computes_the_body(traced, name):
    np.testing.assert_allclose(engine(name).compile(traced)(X)[0], plain(X), rtol=1e-5, atol=1e-6)
    with mode("eager"):
        np.testing.assert_allclose(graph(both)(X), plain(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [17, 21, 26])
def test_a_model_holds_each_body_as_a_local_function_of_its_name(traced, opset):
    model = emit(traced, target=OnnxTarget(opset))
    held = [(f.domain, f.name) for f in model.functions]
    assert held == [
        ("org.example", "CentredAndScale"),
        ("org.example", "Swoosh"),
        ("org.example", "Swoosh_2"),
        ("org.example", "Swoosh_3"),
        ("org.example.nested", "Rounded"),
    ]
    called = [(n.domain, n.op_type) for n in model.graph.node if n.domain]
    assert called == [held[0], held[1], held[2], held[4]]
    program = OnnxEngine(target=OnnxTarget(opset)).compile(traced)
    np.testing.assert_allclose(program(X)[0], plain(X), rtol=1e-5, atol=1e-6)


def test_equal_bodies_are_one_function_also_inside_a_loop():
    def walk(x):
        last, _ = ops.scan(lambda h, v: (swoosh(h + v), ()), swoosh(x[0]), x)
        return last

    function = trace(walk, TensorSpec((4, 3)))
    model = emit(function)
    assert [f.name for f in model.functions] == ["Swoosh"]
    found = engine("onnx").compile(function)(X)
    agree(found, engine("reference").compile(function)(X), "walk")


def test_text_and_an_imported_model_mean_the_same(traced):
    again = parse_function(function_text(traced))
    check_function(again)
    assert function_text(again) == function_text(traced)
    assert "Swoosh" in function_text(traced)
    (imported,) = import_onnx(serialize(emit(traced))).functions.values()
    agree(run_function(TABLE, imported, [X]), run_function(TABLE, traced, [X]), "imported")


def test_a_model_file_carries_it(tmp_path):
    class Net(nn.Cell):
        def construct(self, x):
            return both(x)

    from triplane.unified_ir import load
    from triplane.unified_ir.ir import Module

    function = trace(Net(), TensorSpec(("N", 3)))
    module = Module({"predict": function}, {"predict": "predict"}, {}, {})
    module.save(tmp_path / "a.tpm")
    again = load(tmp_path / "a.tpm").functions["predict"]
    assert function_text(again) == function_text(function)


def test_gradients_go_through_the_body_or_are_its_own():
    slopes = grad(lambda x: swoosh(x, slope=0.5).sum())(X)
    np.testing.assert_allclose(slopes, 1 / (1 + np.exp(-X)) - 0.5, rtol=1e-5)
    bent = grad(lambda x: (grad(lambda v: swoosh(v).sum())(x) * 1.0).sum())(X)
    s = 1 / (1 + np.exp(-X))
    np.testing.assert_allclose(bent, s * (1 - s), rtol=1e-4, atol=1e-6)
    y, g = value_and_grad(lambda x: (rounded(x) * 3.0).sum())(X)
    np.testing.assert_array_equal(g, np.full_like(X, 3.0))
    assert float(y) == pytest.approx(float(graph(lambda x: rounded(x).sum())(X)) * 3)


def test_with_its_own_gradient_it_stays_one_operator_in_training():
    from triplane.unified_ir.autodiff import value_and_grad as transformed

    function = transformed(trace(lambda x: rounded(x).sum(), TensorSpec((4, 3))))
    assert [n.op_type for n in emit(function).graph.node if n.domain] == ["Rounded"]


def kernel_of(engine_name, kernel):
    @ops.custom("Twice", domain="org.example", kernels={engine_name: kernel})
    def twice(x, *, times=2.0):
        return x * times

    return twice


calls: list[float] = []


def _counted(x, times=2.0):
    """The same on arrays and on tensors."""
    calls.append(times)
    return x + x * np.float32(times - 1.0)


@pytest.mark.parametrize("name", ["reference", "onnx", "ascend"])
def test_a_kernel_runs_in_place_of_the_body_on_its_engine_alone(name):
    calls.clear()
    twice = kernel_of(name, _counted)
    function = trace(lambda x: twice(x, times=3.0), TensorSpec(("N", 3)))
    for other in {"reference", "onnx", "ascend"} - {name}:
        engine(other).compile(function)(X)
    assert not calls
    np.testing.assert_allclose(engine(name).compile(function)(X)[0], X * 3, rtol=1e-5)
    assert set(calls) == {3.0}
    assert "Twice" in [n.op_type for n in emit(function).graph.node]


@pytest.mark.parametrize(
    ("name", "kernel", "said"),
    [
        ("reference", lambda x, times=2.0: x * times * 1.001, "largest difference"),
        ("reference", lambda x, times=2.0: x[:1] * times, r"float32\[1, 3\] against"),
        ("reference", lambda x, times=2.0: (x * times, x), "gives 2 results, its body 1"),
        ("onnx", lambda x, times=2.0: x * (times + 0.01), "largest difference"),
        ("onnx", lambda x, times=2.0: (x * times).sum(), "its body"),
    ],
)
def test_a_kernel_that_computes_something_else_is_refused_by_name(name, kernel, said):
    function = trace(kernel_of(name, kernel), TensorSpec(("N", 3)))
    with pytest.raises(InvalidInput, match=f"{name} kernel of org.example.Twice.*{said}"):
        engine(name).compile(function)(X)


@pytest.mark.parametrize(
    "domain", ["", "ai.onnx", "ai.onnx.ml", "com.microsoft", "triplane", "a b"]
)
def test_a_domain_that_is_not_ones_own_is_refused(domain):
    with pytest.raises(InvalidInput, match="domain"):
        ops.custom("Relu", domain=domain)


def test_a_file_cannot_give_an_operator_a_foreign_name(traced):
    text = function_text(traced).replace("org.example.nested", "ai.onnx")
    with pytest.raises(Corrupt, match="is reserved"):
        check_function(parse_function(text))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x: x * OUTSIDE[0], "must take everything it uses as an argument"),
        (lambda x: swoosh(x, slope=[1, {2}]), "options of Swoosh are numbers"),
    ],
)
def test_what_a_model_could_not_hold_is_refused(body, said):
    def use(x):
        OUTSIDE[:] = [x + 1.0]
        return ops.custom("Own", domain="org.example")(body)(x)

    with pytest.raises(InvalidInput, match=said):
        trace(use, TensorSpec((2,)))


OUTSIDE: list[ops.Tensor] = []

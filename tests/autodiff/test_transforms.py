import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import grad, jvp, value_and_grad, vjp
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import as_dtype
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE

F64 = np.float64


def function(specs, body):
    build = Build(TABLE, "f")
    with build:
        made = body(**{k: build.param(k, spec) for k, spec in specs.items()})
    return build.finish(made if isinstance(made, dict) else {"y": made})


def vectors(*names, dtype="float64"):
    return {n: TensorSpec((3,), dtype) for n in names}


def run(f, *args):
    made = engine("reference").compile(f)(*args)
    return dict(zip(f.result_names, made, strict=True))


X, Z = np.array([1.0, 2.0, -3.0]), np.array([0.5, -1.0, 2.0])


def test_gradients_follow_the_results_under_their_parameters_names():
    f = function(vectors("x", "z"), lambda x, z: {"loss": (x * z).sum(), "extra": x + z})
    g = value_and_grad(f)
    assert g.param_names == ("x", "z")
    assert g.result_names == ("loss", "extra", "grad.x", "grad.z")
    found = run(g, X, Z)
    np.testing.assert_array_equal(found["grad.x"], Z)
    np.testing.assert_array_equal(found["grad.z"], X)


def test_only_the_wanted_gradients_are_computed():
    f = function(vectors("x", "z"), lambda x, z: (ops.exp(x) * ops.sin(z)).sum())
    g = grad(f, ["x"])
    assert g.result_names == ("grad.x",)
    assert "Cos" not in {n.op.name for n in g.nodes}


def test_any_scalar_result_may_be_differentiated():
    f = function(vectors("x"), lambda x: {"a": x.sum(), "b": (x * x).sum()})
    np.testing.assert_array_equal(run(grad(f, of="b"), X)["grad.x"], 2 * X)


def test_what_is_used_twice_adds_up():
    f = function(vectors("x"), lambda x: (x * x * x + x).sum())
    np.testing.assert_allclose(run(grad(f), X)["grad.x"], 3 * X * X + 1)


def test_a_parameter_without_influence_has_gradient_zero():
    f = function(vectors("x", "z"), lambda x, z: (x + z * 0.0).sum() * 0.0 + x.sum())
    assert not run(grad(f), X, Z)["grad.z"].any()
    g = function(vectors("x", "z"), lambda x, **_: x.sum())
    np.testing.assert_array_equal(run(grad(g), X, Z)["grad.z"], np.zeros(3))


def test_a_result_that_is_a_parameter_has_gradient_one():
    f = function({"x": TensorSpec((), "float64")}, lambda x: x)
    assert run(grad(f), np.array(3.0))["grad.x"] == 1


def test_no_gradient_passes_a_stop():
    f = function(vectors("x"), lambda x: (ops.stop_gradient(x * x) * x).sum())
    np.testing.assert_array_equal(run(grad(f), X)["grad.x"], X * X)


def test_integers_carry_no_gradient():
    specs = {"x": TensorSpec((3,), "float64"), "i": TensorSpec((2,), "int64")}
    f = function(specs, lambda x, i: (ops.gather(x, i) * i.cast("float64")).sum())
    assert value_and_grad(f).result_names == ("y", "grad.x")
    found = run(grad(f), X, np.array([2, 2]))
    np.testing.assert_array_equal(found["grad.x"], [0, 0, 4])
    with pytest.raises(InvalidInput, match="gradients are for floating-point parameters"):
        grad(f, ["i"])


def test_vjp_pulls_any_cotangents_back():
    f = function(vectors("x"), lambda x: {"a": x * x, "b": x.sum(), "n": (x > 0.0)})
    pulled = vjp(f)
    assert pulled.param_names == ("x", "cotangent.a", "cotangent.b")
    found = run(pulled, X, Z, np.array(10.0))
    np.testing.assert_array_equal(found["grad.x"], 2 * X * Z + 10)


def test_gradients_have_any_order():
    f = function(vectors("x"), lambda x: (x * x * x * x).sum())
    for want in (4 * X**3, 12 * X**2, 24 * X, np.full(3, 24.0), np.zeros(3)):
        g = grad(f)
        np.testing.assert_allclose(run(g, X)["grad.x"], want)
        build = Build(TABLE, "again")
        with build:
            (y,) = inline(g, [build.param("x", TensorSpec((3,), "float64"))])
            f = build.finish({"y": y.sum()})


def test_gradients_keep_symbolic_sizes_and_element_types():
    specs = {"x": TensorSpec(("N", 4), "float32"), "w": TensorSpec((4,), "float16")}
    f = function(specs, lambda x, w: (ops.tanh(x).mean((0,)) * w.cast("float32")).sum())
    g = value_and_grad(f)
    assert [str(r.type) for r in g.results] == ["float32[]", "float32[N,4]", "float16[4]"]


def test_a_vector_is_refused_with_the_way_out():
    f = function(vectors("x"), lambda x: x * x)
    with pytest.raises(InvalidInput, match=r"a gradient needs a scalar.*use vjp with a cotangent"):
        grad(f)


def test_unknown_names_are_refused():
    f = function(vectors("x"), lambda x: x.sum())
    for call in (lambda: grad(f, ["w"]), lambda: grad(f, of="loss")):
        with pytest.raises((InvalidInput, NotFound)):
            call()


def test_a_row_without_gradient_is_named_with_the_users_line():
    f = function(vectors("x"), lambda x: TABLE["", "BitCast"](x, to=as_dtype("float64").onnx).sum())
    with pytest.raises(InvalidInput, match=r"BitCast is not differentiable \(at .*stop_gradient"):
        grad(f)


def test_nodes_of_the_backward_pass_keep_the_place_they_derive_from():
    f = function(vectors("x"), lambda x: ops.sin(x).sum())
    cosine = next(n for n in grad(f).nodes if n.op.name == "Cos")
    sine = next(n for n in f.nodes if n.op.name == "Sin")
    assert cosine.meta.location == sine.meta.location
    assert cosine.meta.scope.startswith("grad")


def test_jvp_pushes_tangents_forward_by_name():
    f = function(
        vectors("x", "z"), lambda x, z: {"a": x * z, "b": z.sum(), "n": x > 0.0, "c": x * 0.0 + 1.0}
    )
    pushed = jvp(f, ["x"])
    assert pushed.param_names == ("x", "z", "tangent.x")
    assert pushed.result_names == ("a", "b", "n", "c", "tangent.a", "tangent.b", "tangent.c")
    found = run(pushed, X, Z, np.ones(3))
    np.testing.assert_array_equal(found["tangent.a"], Z)
    assert (float(found["tangent.b"]), found["tangent.c"].tolist()) == (0, [0, 0, 0])
    with pytest.raises(InvalidInput, match="gradients are for floating-point"):
        jvp(function({"i": TensorSpec((2,), "int64")}, lambda i: i * 2), ["i"])

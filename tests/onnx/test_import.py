"""What becomes of an ONNX model: weights, sizes, branches, loops, functions, files beside it."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx.networks import Writer, info, resnet
from tests.support.onnx_models import BRANCHES, LOOP, SCAN, agree, emitted, original, text_model

from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir import TensorSpec, import_onnx, load, nn, ops, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.text import function_text, module_text
from triplane.unified_ir.onnx import emit

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("body", "names", "feeds"),
    [
        (BRANCHES, {"w", "else.w"}, {"x": X, "c": np.array(True)}),
        (BRANCHES, {"w", "else.w"}, {"x": X, "c": np.array(False)}),
        (LOOP, {"scale"}, {"x": X, "n": np.array(3)}),
        (SCAN, {"bias"}, {"h": X[0], "xs": X}),
    ],
)
def test_weights_inside_bodies_are_state_with_gradients(body, names, feeds):
    module = agree(text_model(body), **feeds)
    assert module.state.keys() == names
    assert {str(t.role) for t in module.state.values()} == {"parameter"}
    cell = nn.Imported(module)

    def loss(*xs):
        made = cell(*xs)
        return (made[-1] if isinstance(made, tuple) else made).sum()

    arrays = [np.asarray(feeds[n]) for n in cell.inputs]
    function = trace(loss, *(TensorSpec(a.shape, a.dtype) for a in arrays))
    state = {f"cell.{n}": t.array.astype(np.float32) for n, t in module.state.items()}
    given = {f"xs.{i}": a for i, a in enumerate(arrays)} | state
    run = engine("reference").compile
    gradients = run(value_and_grad(function, sorted(state)))
    found = gradients(*(given[p] for p in gradients.function.param_names))[1:]
    for name, g in zip(sorted(state), found, strict=True):
        near = [
            run(function)(*((given | {name: state[name] + h})[p] for p in function.param_names))[0]
            for h in (-0.01, 0.01)
        ]
        np.testing.assert_allclose(g.sum(), (near[1] - near[0]) / 0.02, rtol=2e-2, atol=1e-2)
    assert any(g.any() for g in found), "some weight has a gradient"


def test_sizes_computed_from_shapes_stay_symbols():
    model = text_model("""
    agraph (float[N,3,H,W] x) => (float[N,M] y, float[A,B,C,D] z) {
      shape = Shape(x)
      zero = Constant <value = int64[1] {0}> ()
      n = Gather(shape, zero)
      rest = Constant <value = int64[1] {-1}> ()
      to = Concat <axis = 0> (n, rest)
      y = Reshape(x, to)
      two = Constant <value = int64 {2}> ()
      h = Shape <start = 2, end = 4> (x)
      half = Div(h, two)
      lead = Shape <end = 2> (x)
      sizes = Concat <axis = 0> (lead, half)
      starts = Constant <value = int64[4] {0, 0, 0, 0}> ()
      z = Slice(x, starts, sizes)
    }""")
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 6)).astype(np.float32)
    function = agree(model, x=x).entry("predict")
    assert str(function.result("y").type) == "float32[N,3*H*W]"
    assert str(function.result("z").type) == "float32[N,3,H//2,W//2]"


def test_a_branch_on_a_known_shape_is_taken_at_import():
    model = text_model("""
    agraph (float[N,1,4] x) => (float[N,4] y) {
      d = Shape <start = 1, end = 2> (x)
      one = Constant <value = int64[1] {1}> ()
      c = Equal(d, one)
      y = If (c) <
        then_branch = a () => (float[N,4] p) { p = Squeeze(x, one) },
        else_branch = b () => (float[N,1,4] q) { q = Identity(x) }
      >
    }""")
    function = agree(model, x=X[:, None]).entry("predict")
    assert "Cond" not in function_text(function)
    assert str(function.result("y").type) == "float32[N,4]"


def test_sizes_that_only_data_decide_stay_open_through_the_network():
    model = text_model("""
    agraph (float[N] x) => (float[K,1] y, int64[1,K] at) {
      at = NonZero(x)
      k = Shape <start = 1> (at)
      one = Constant <value = int64[1] {1}> ()
      to = Concat <axis = 0> (k, one)
      some = Gather(x, at)
      flat = Flatten <axis = 0> (some)
      y = Reshape(flat, to)
    }""")
    module = agree(model, x=np.array([0, 2, 0, 3, 4], np.float32))
    (size,) = module.entry("predict").result("at").type.shape[1:]
    assert str(size).startswith("open_")
    assert module.entry("predict").result("y").type.shape == (size, 1)


def test_a_shape_known_in_part_keeps_what_is_known():
    model = text_model("""
    agraph (float[N,4] x, int64[1] k) => (float[A,2,B] y, float[A,3,4] z) {
      two = Constant <value = int64[1] {2}> ()
      rest = Constant <value = int64[1] {-1}> ()
      to = Concat <axis = 0> (k, two, rest)
      y = Reshape(x, to)
      ends = Constant <value = int64[2] {3, 4}> ()
      wide = Concat <axis = 0> (k, ends)
      z = Expand(x, wide)
    }""")
    module = agree(model, x=X, k=np.array([3]))
    function = module.entry("predict")
    assert function.result("y").type.shape[1] == 2
    assert function.result("z").type.shape[2] == 4
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument):
        emitted(module, x=X[:2], k=np.array([3]))


def test_a_squeeze_of_every_one_takes_symbols_for_other_sizes_and_checks():
    model = text_model("""
    agraph (float[N,1,4] x) => (float[N,4] y) { y = Squeeze(x) }""")
    module = agree(model, x=X[:, None])
    assert str(module.entry("predict").result("y").type) == "float32[N,4]"
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument):
        emitted(module, x=X[:1, None])


def test_local_functions_nest_and_take_attributes_and_defaults():
    functions = """
    <domain: "own", opset_import: ["" : 17]>
    scaled <by: float = 2.0> (a) => (b) {
      k = Constant <value_float: float = @by> ()
      b = Mul(a, k)
    }
    <domain: "own", opset_import: ["" : 17, "own" : 1]>
    twice (a) => (c) {
      b = own.scaled <by = 3.0> (a)
      c = own.scaled (b)
    }"""
    body = "agraph (float[N,4] x) => (float[N,4] y) { y = own.twice(x) }"
    module = agree(text_model(body, functions=functions), x=X)
    (found,) = emitted(module, x=X)
    np.testing.assert_allclose(found, X * 6)


def test_filled_tensors_that_are_read_as_weights_are_state():
    model = text_model("""
    agraph (float[N,3] x) => (float[N,2] y) {
      shape = Constant <value = int64[2] {3, 2}> ()
      w = ConstantOfShape <value = float[1] {0.25}> (shape)
      y = MatMul(x, w)
    }""")
    module = agree(model, x=X[:, :3].copy())
    assert str(module.state["w"].role) == "parameter"
    np.testing.assert_array_equal(module.state["w"].array, np.full((3, 2), 0.25, np.float32))


def test_initializers_listed_as_inputs_are_weights_in_old_models():
    model = resnet()
    model.ir_version = 3
    for tensor in model.graph.initializer:
        info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(info)
    assert [p.name for p in import_onnx(model).inputs("predict")] == ["image"]


def test_an_imported_module_is_saved_and_read_back(tmp_path):
    module = import_onnx(text_model(LOOP))
    module.save(tmp_path / "m.tpm")
    assert module_text(load(tmp_path / "m.tpm")) == module_text(module)


def test_an_operator_of_ones_own_comes_back_by_its_name():
    @ops.custom("Cube", domain="org.example")
    def cube(x):
        return x * x * x

    made = emit(trace(lambda x: cube(x) + 1.0, TensorSpec(("N", 4))))
    function = import_onnx(made).entry("predict")
    assert "Custom" in function_text(function)
    assert "Cube" in function_text(function)


def external(tmp_path, location, **entries):
    """A model whose one weight lies in a file."""
    w = Writer()
    w.weight("w", 4, 2)
    w.add("MatMul", "x", "w", name="y")
    model = w.model([("x", TensorProto.FLOAT, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 2])])
    (tensor,) = model.graph.initializer
    array = numpy_helper.to_array(tensor).copy()
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path, array


def test_weights_in_a_file_beside_the_model_are_read(tmp_path):
    path, array = external(tmp_path, "data/w.bin", offset=8, length=32)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\0" * 8 + array.tobytes())
    np.testing.assert_array_equal(import_onnx(path).state["w"].array, array)


@pytest.mark.parametrize(
    ("location", "entries", "error", "words"),
    [
        ("/etc/passwd", {}, Corrupt, "it must lie beside the model"),
        ("../w.bin", {}, Corrupt, "it must lie beside the model"),
        ("a/../../w.bin", {}, Corrupt, "it must lie beside the model"),
        ("link.bin", {}, Corrupt, "a link out of the folder"),
        ("absent.bin", {}, NotFound, "which is not in"),
        ("", {}, Corrupt, "it must lie beside the model"),
        ("w.bin", {"offset": 8}, Corrupt, "beyond the end of w.bin"),
        ("w.bin", {"length": 8}, Corrupt, "8 external bytes, it takes 32"),
        ("w.bin", {"offset": "-4"}, Corrupt, "a number was expected"),
        ("w.bin", {"offset": "9" * 40}, Corrupt, "a number was expected"),
    ],
)
def test_weights_elsewhere_are_refused_by_name(tmp_path, location, entries, error, words):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(b"\0" * 32)
    (folder / "w.bin").write_bytes(b"\0" * 32)
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    path, _ = external(folder, location, **entries)
    with pytest.raises(error, match=words):
        import_onnx(path)


def test_external_weights_need_the_path_of_the_model(tmp_path):
    path, _ = external(tmp_path, "w.bin")
    with pytest.raises(InvalidInput, match="give import_onnx the path"):
        import_onnx(onnx.load(path, load_external_data=False))


def test_every_engine_runs_what_was_imported():
    module = import_onnx(resnet())
    function = module.entry("predict")
    images = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    given = {n: t.array for n, t in module.state.items()} | {"image": images}
    args = [given[n] for n in function.param_names]
    (wanted,) = original(resnet(), image=images)
    for name in ("onnx", "reference"):
        (found,) = engine(name).compile(function)(*args)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_outer_weight_that_a_widened_loop_reads_first_is_kept():
    """The loop's body is recorded again with more rows; the weight belongs outside of it."""
    table = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    body = Writer()
    body.add("Identity", "go", name="go_on")
    body.add("Concat", "rows", body.add("MatMul", "rows", "w"), name="more", axis=0)
    graph = body.graph([("go_on", TensorProto.BOOL, []), ("more", TensorProto.FLOAT, None)])
    graph.input.append(info("i", TensorProto.INT64, []))
    graph.input.append(info("go", TensorProto.BOOL, []))
    graph.input.append(info("rows", TensorProto.FLOAT, None))
    w = Writer()
    w.constant("w", table)
    w.add("Loop", "n", "", "x", name="y", body=graph)
    inputs = [("n", TensorProto.INT64, []), ("x", TensorProto.FLOAT, [2, 4])]
    model = w.model(inputs, [("y", TensorProto.FLOAT, None)])
    module = import_onnx(model)
    assert module.state.keys() == {"w"}
    x = np.ones((2, 4), np.float32)
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(
        None, {"n": np.array(2), "x": x}
    )
    np.testing.assert_allclose(nn.Imported(module)(np.array(2), x), wanted, rtol=1e-4)

"""Whole models of others: the nine networks that ONNX ships, and what MindSpore's export writes."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from tests.onnx.networks import Writer
from tests.support.onnx_models import agree, text_model

from triplane.unified_ir import import_onnx
from triplane.unified_ir.onnx import EmittedInitializer, emit, serialize

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))
QUICK = {"light_shufflenet", "light_squeezenet"}


def with_random_weights(model, state, rng):
    """The model with numbers in place of its filled tensors, and those numbers by name."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    arrays = {}
    for name, tensor in state.items():
        shape = tensor.array.shape
        fan = max(int(np.prod(shape[1:])), 1)
        drawn = (
            rng.standard_normal(shape) * np.sqrt(2 / fan) if len(shape) > 1 else rng.random(shape)
        )
        arrays[name] = drawn.astype(np.float32)
    kept = [n for n in made.graph.node if n.output[0] not in arrays]
    del made.graph.node[:]
    made.graph.node.extend(kept)
    held = [t for t in made.graph.initializer if t.name not in arrays]
    del made.graph.initializer[:]
    made.graph.initializer.extend(held)
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    made.ir_version = 8
    return made, arrays


def run(model, x):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.deep) for p in LIGHT],
)
def test_a_light_model_gives_what_it_gave_with_any_weights(path):
    model = onnx.load(path)
    module = import_onnx(path)
    rng = np.random.default_rng(0)
    original, arrays = with_random_weights(model, module.state, rng)
    assert arrays, "the filled tensors are weights"
    function = module.entry("predict")
    (image,) = module.inputs("predict")
    x = rng.random(image.type.concrete({})).astype(np.float32)
    held = {n: EmittedInitializer(a) for n, a in arrays.items()}
    found = run(serialize(emit(function, initializers=held)), x)
    wanted = run(original.SerializeToString(), x)
    assert np.ptp(wanted) > 0, "the weights matter"
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def test_there_are_nine_light_models():
    assert len(LIGHT) == 9


def gru():
    """Two directions, PyTorch's gates, sequence first."""
    w = Writer()
    for name, shape in (("W", (2, 12, 3)), ("R", (2, 12, 4)), ("B", (2, 24))):
        w.weight(name, *shape)
    w.constant("h0", np.zeros((2, 2, 4), np.float32))
    w.add(
        "GRU", "x", "W", "R", "B", "", "h0", outputs=["y", "h"],
        hidden_size=4, direction="bidirectional", linear_before_reset=1,
    )  # fmt: skip
    f = TensorProto.FLOAT
    return w.model([("x", f, ["T", 2, 3])], [("y", f, ["T", 2, 2, 4]), ("h", f, [2, 2, 4])], 17)


GROUP_NORM = """
agraph (float[N,4,H,W] x) => (float[N,4,H,W] y)
  <int64[3] grouped = {0, 2, -1}, float[2] one = {1, 1}, float[2] zero = {0, 0},
   float[4,1,1] gamma = {0.5, 1, 1.5, 2}, float[4,1,1] beta = {0, 1, 0, -1}> {
  shape = Shape(x)
  flat = Reshape(x, grouped)
  normal = InstanceNormalization <epsilon = 0.00001> (flat, one, zero)
  back = Reshape(normal, shape)
  scaled = Mul(back, gamma)
  y = Add(scaled, beta)
}"""

HARD_SWISH = """
agraph (float[N,4,H,W] x) => (float[N,4,H,W] y, float[N,4,H,W] z) {
  y = HardSwish(x)
  gate = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x)
  z = Mul(x, gate)
}"""

ADAPTIVE_POOL = """
agraph (float[N,4,8,6] x) => (float[N,4,2,3] y, float[N,4,1,1] z) {
  y = AveragePool <kernel_shape = [4, 2], strides = [4, 2]> (x)
  z = ReduceMean <axes = [2, 3]> (x)
}"""

CONDITION = """
agraph (float[N,4,H,W] x) => (float[N,4,H,W] y) <float limit = {0.0}> {
  total = ReduceSum <keepdims = 0> (x)
  c = Greater(total, limit)
  y = If (c) <then_branch = a () => (float[N,4,H,W] p) { p = Relu(x) },
              else_branch = b () => (float[N,4,H,W] q) { q = Neg(x) }>
}"""

WHILE = """
agraph (float[N,4,H,W] x) => (float[N,4,H,W] y) <float limit = {100.0}> {
  start = ReduceMax <keepdims = 0> (x)
  first = Less(start, limit)
  y = Loop ("", first, x) <body = step (int64 i, bool was, float[N,4,H,W] h)
    => (bool on, float[N,4,H,W] after) {
      after = Add(h, h)
      top = ReduceMax <keepdims = 0> (after)
      on = Less(top, limit)
    }>
}"""

X = np.random.default_rng(1).standard_normal((2, 4, 8, 6)).astype(np.float32)


@pytest.mark.parametrize("text", [GROUP_NORM, HARD_SWISH, ADAPTIVE_POOL, CONDITION, WHILE])
def test_what_mindspore_writes_gives_what_onnxruntime_gives(text):
    agree(text_model(text), x=X)
    agree(text_model(text), x=-X)


def test_a_bidirectional_gru_gives_what_onnxruntime_gives():
    module = agree(gru(), x=np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32))
    assert {"W", "R", "B"} <= module.state.keys()
    assert "h0" not in module.state or str(module.state["h0"].role) == "buffer"

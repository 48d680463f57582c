"""Weights that an exporter wrote twice: found, reported, and one weight again where asked for."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from tests.onnx.networks import Writer, language_model

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import import_onnx, nn, optim, train
from triplane.unified_ir.ir.graph import Role, StateTensor
from triplane.unified_ir.onnx.twins import equal_weights

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
IDS = np.random.default_rng(1).integers(0, 60, (4, 5))


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_written_twice_are_found_also_transposed(transposed):
    module = import_onnx(language_model(transposed))
    assert equal_weights(module.state) == [("wte", "head")]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tie", ["*", ("wte", "head")])
def test_tied_weights_are_one_weight_that_trains_as_one(transposed, tie):
    model = language_model(transposed)
    module = import_onnx(model, tie=[tie] if isinstance(tie, str) else tie)
    assert module.state.keys() == {"wte", "h.weight"}
    assert equal_weights(module.state) == []
    cell = nn.Imported(module)
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"ids": IDS})
    np.testing.assert_allclose(cell(IDS), wanted, rtol=1e-5, atol=1e-6)
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    before = cell.state_dict()["wte"]
    trainer.fit((IDS, IDS), epochs=1, batch_size=4, progress="none")
    unused = np.setdiff1d(np.arange(60), IDS)
    assert (cell.state_dict()["wte"] != before)[unused].any(), "the head moves every row"


def test_what_is_tied_inside_a_branch_is_the_weight_outside():
    w = Writer()
    w.weight("wte", 60, 20)
    table = numpy_helper.to_array(w.held[0])
    branches = []
    for name, array in (("yes", table.T), ("no", -table.T)):
        inner = Writer()
        inner.constant("head", np.ascontiguousarray(array))
        inner.add("MatMul", "x", "head", name=name)
        branches.append(inner.graph([(name, FLOAT, None)]))
    w.add("Gather", "wte", "ids", name="x")
    w.add("If", "c", name="scores", then_branch=branches[0], else_branch=branches[1])
    inputs = [("ids", INT, ["N", "T"]), ("c", TensorProto.BOOL, [])]
    model = w.model(inputs, [("scores", FLOAT, ["N", "T", 60])])
    module = import_onnx(model, tie=["*"])
    assert module.state.keys() == {"wte", "head"}
    session = ort.InferenceSession(model.SerializeToString())
    for c in (True, False):
        (wanted,) = session.run(None, {"ids": IDS, "c": np.array(c)})
        np.testing.assert_allclose(nn.Imported(module)(IDS, np.array(c)), wanted, rtol=1e-5)


@pytest.mark.parametrize("tie", [["h.*"], ["nothing"], ["wte", "h.*"], ["*", "nothing"]])
def test_a_pattern_that_ties_nothing_is_refused(tie):
    words = "tie: .* fits no two equal weights; equal are wte = head"
    with pytest.raises(InvalidInput, match=words):
        import_onnx(language_model(), tie=tie)


def state(*arrays, role=Role.PARAMETER):
    return {f"w{i}": StateTensor(role, np.asarray(a)) for i, a in enumerate(arrays)}


def test_weights_are_equal_only_where_that_says_something():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 40)).astype(np.float32)
    other = x.copy()
    other[20, 20] += 1
    assert equal_weights(state(x, x.copy(), other, x.T.copy())) == [("w0", "w1", "w3")]
    assert equal_weights(state(x, x.astype(np.float64))) == []
    assert equal_weights(state(x.reshape(1600), x)) == []
    assert equal_weights(state(np.ones((40, 40), np.float32), np.ones((40, 40), np.float32))) == []
    assert equal_weights(state(x[:5], x[:5])) == []
    assert equal_weights(state(x, x, role=Role.BUFFER)) == []
    zero, negative = x.copy(), x.copy()
    zero[3, 3], negative[3, 3] = 0.0, -0.0
    assert equal_weights(state(zero, negative)) == []

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


def named_alike_in_branches(*scales):
    """Branches that each hold a weight called `w`, a table times a scale; outputs added up."""
    table = Writer().rng.standard_normal((20, 60)).astype(np.float32)
    branches = []
    for k, scale in enumerate(scales):
        inner = Writer()
        inner.constant("w", table * np.float32(scale))
        product = inner.add("MatMul", "x", "w")
        inner.add("Neg" if k % 2 else "Identity", product, name=f"y{k}")
        branches.append(inner.graph([(f"y{k}", FLOAT, None)]))
    w = Writer()
    made = [
        w.add("If", "c", name=f"if{k}", then_branch=yes, else_branch=no)
        for k, (yes, no) in enumerate(zip(branches[::2], branches[1::2], strict=True))
    ]
    w.add("Sum", *made, name="scores")
    inputs = [("x", FLOAT, ["N", 20]), ("c", TensorProto.BOOL, [])]
    return w.model(inputs, [("scores", FLOAT, ["N", 60])])


@pytest.mark.parametrize(
    ("scales", "tie", "names"),
    [
        ((1, 1), ["*"], {"w"}),
        ((1, 1), ["w", "else.w"], {"w"}),
        ((1, 2, 2, 3), ["*"], {"w", "else.w", "else.w.2"}),
        ((1, 2, 3, 2), ["else.*"], {"w", "else.w", "then.w"}),
    ],
)
def test_equal_weights_named_alike_in_branches_are_tied(scales, tie, names):
    model = named_alike_in_branches(*scales)
    assert len(equal_weights(import_onnx(model).state)) == 1
    module = import_onnx(model, tie=tie)
    assert module.state.keys() == names
    assert equal_weights(module.state) == []
    session = ort.InferenceSession(model.SerializeToString())
    x = np.random.default_rng(2).standard_normal((3, 20)).astype(np.float32)
    for c in (True, False):
        (wanted,) = session.run(None, {"x": x, "c": np.array(c)})
        cell = nn.Imported(module)
        np.testing.assert_allclose(cell(x, np.array(c)), wanted, rtol=1e-4, atol=1e-4)


def test_a_refused_pattern_names_both_of_the_weights_that_are_named_alike():
    with pytest.raises(InvalidInput, match=r"'z\*' matches no two equal weights; .* w = else\.w"):
        import_onnx(named_alike_in_branches(1, 1), tie=["z*"])


def test_a_pattern_chooses_among_weights_named_alike_by_the_names_they_get():
    module = import_onnx(named_alike_in_branches(1, 2), frozen=["else.*"])
    roles = {name: tensor.role for name, tensor in module.state.items()}
    assert roles == {"w": Role.PARAMETER, "else.w": Role.BUFFER}


@pytest.mark.parametrize("tie", [["h.*"], ["nothing"], ["wte", "h.*"], ["*", "nothing"]])
def test_a_pattern_that_ties_nothing_is_refused(tie):
    words = "tie: .* matches no two equal weights; equal are wte = head"
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

"""Which imported arrays are trained: by their use, and as the caller says."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser
from tests.onnx.networks import Writer, resnet

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import import_onnx, nn, optim, train
from triplane.unified_ir.ir.graph import Role
from triplane.unified_ir.onnx.uses import Uses

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def roles(w, inputs, output, **options):
    """Roles by name of a writer's graph."""
    module = import_onnx(w.model(inputs, [(output, FLOAT, None)]), **options)
    return {name: str(t.role) for name, t in module.state.items()}


def axes(w, name, *values):
    return w.constant(name, np.array(values, np.int64))


def rotary(w):
    """Frequencies times positions, their sine and cosine, as Llama's export has them."""
    w.constant("inv_freq", (0.1 ** np.arange(4, dtype=np.float32)).reshape(1, 4, 1))
    positions = w.add("Cast", w.add("Unsqueeze", "ids", axes(w, "one", 1)), to=FLOAT)
    angles = w.add("Transpose", w.add("MatMul", "inv_freq", positions), perm=[0, 2, 1])
    both = w.add("Concat", angles, angles, axis=-1)
    return w.add("Cos", both), w.add("Sin", both)


def test_frequencies_of_a_rotary_position_are_a_buffer_and_the_products_train():
    w = Writer()
    cos, sin = rotary(w)
    x = w.add("MatMul", "x", w.weight("q.weight", 8, 8))
    y = w.add("Add", w.add("Mul", x, cos), w.add("Mul", x, sin))
    made = roles(w, [("x", FLOAT, ["N", "T", 8]), ("ids", INT, ["N", "T"])], y)
    assert made == {"inv_freq": "buffer", "q.weight": "parameter"}


def test_tables_of_sines_are_buffers_and_embeddings_train():
    w = Writer()
    angles = np.outer(np.arange(10), 10000.0 ** (-np.arange(8) / 8)).astype(np.float32)
    w.constant("cos_cached", np.cos(angles))
    w.weight("wte", 30, 8)
    w.weight("wpe", 10, 8)
    x = w.add("Add", w.add("Gather", "wte", "words"), w.add("Gather", "wpe", "ids"))
    x = w.add("MatMul", x, w.weight("q.weight", 8, 8))
    y = w.add("Mul", x, w.add("Gather", "cos_cached", "ids"))
    made = roles(w, [("words", INT, ["N", "T"]), ("ids", INT, ["N", "T"])], y)
    assert made.pop("cos_cached") == "buffer"
    assert set(made.values()) == {"parameter"}


def test_a_table_with_a_second_row_of_zeros_and_ones_is_no_table_of_sines():
    w = Writer()
    table = np.full((10, 8), 0.5, np.float32)
    table[:2] = np.eye(2, 8)
    w.constant("scales", table)
    x = w.add("Gather", w.weight("wte", 30, 8), "words")
    y = w.add("Mul", x, w.add("Gather", "scales", "ids"))
    made = roles(w, [("words", INT, ["N", "T"]), ("ids", INT, ["N", "T"])], y)
    assert made["scales"] == "parameter"


def test_what_normalizes_an_input_is_a_buffer():
    w = Writer()
    mean = w.weight("mean", 1, 3, 1, 1)
    std = w.weight("std", 1, 3, 1, 1, mean=1.0, scale=0.1)
    x = w.add("Div", w.add("Sub", "image", mean), std)
    y = w.conv_bn(x, "stem", 3, 4)
    made = roles(w, [("image", FLOAT, ["N", 3, 8, 8])], y)
    assert made["mean"] == made["std"] == made["stem.bn.running_mean"] == "buffer"
    assert made["stem.conv.weight"] == made["stem.bn.weight"] == "parameter"


def test_a_mask_is_a_buffer_and_the_class_token_and_positions_train():
    w = Writer()
    x = w.add("MatMul", "x", w.weight("embed", 6, 8))
    x = w.add("Concat", w.add("Expand", w.weight("cls", 1, 1, 8), axes(w, "s", 2, 1, 8)), x, axis=1)
    x = w.add("Add", x, w.weight("pos_embed", 1, 5, 8))
    scores = w.add("MatMul", x, w.add("Transpose", x, perm=[0, 2, 1]))
    hidden = np.triu(np.full((1, 5, 5), -3.4e38, np.float32), 1)
    y = w.add("Softmax", w.add("Add", scores, w.constant("mask", hidden)))
    made = roles(w, [("x", FLOAT, [2, 4, 6])], y)
    assert made.pop("mask") == "buffer"
    assert made == dict.fromkeys(("embed", "cls", "pos_embed"), "parameter")


def test_scales_and_biases_behind_a_layer_train_also_through_arithmetic_on_weights():
    w = Writer()
    v, g = w.weight("v", 8, 8), w.weight("g", 8, 1, mean=1.0)
    norm = w.add("Sqrt", w.add("ReduceSum", w.add("Mul", v, v), axes(w, "a", 1), keepdims=1))
    weight = w.add("Mul", g, w.add("Div", v, norm))
    low = w.add("MatMul", w.weight("lora_a", 8, 2), w.weight("lora_b", 2, 8))
    x = w.add("MatMul", "x", w.add("Add", w.add("Transpose", weight, perm=[1, 0]), low))
    x = w.add("Add", x, w.weight("bias", 8))
    y = w.add("Mul", x, w.weight("layer_scale", 8))
    made = roles(w, [("x", FLOAT, ["N", 8])], y)
    assert made == dict.fromkeys(("v", "g", "lora_a", "lora_b", "bias", "layer_scale"), "parameter")


def test_a_constant_behind_no_layer_is_no_state():
    w = Writer()
    w.add("Constant", outputs=["lifted"], value=tensor(np.arange(3, dtype=np.float32)))
    w.add("Constant", outputs=["weight"], value=tensor(np.ones((3, 2), np.float32)))
    w.add("Constant", outputs=["bias"], value=tensor(np.ones(2, np.float32)))
    x = w.add("Add", w.add("MatMul", w.add("Mul", "x", "lifted"), "weight"), "bias")
    y = w.add("Max", x, w.weight("floor", 2))
    made = roles(w, [("x", FLOAT, ["N", 3])], y)
    assert made == {"weight": "parameter", "bias": "parameter", "floor": "parameter"}


def test_small_numbers_that_are_multiplied_train_whatever_reads_them():
    """Tables of a matrix factorization, a token that is tiled, one in place of hidden values."""
    w = Writer()
    u, v = (w.add("Gather", w.weight(n, 9, 8), "ids") for n in ("users", "items"))
    x = w.add("MatMul", w.add("Mul", u, v), w.weight("head", 8, 8))
    tiled = w.add("Tile", w.weight("query", 1, 8), axes(w, "r", 4, 1))
    x = w.add("Add", x, tiled)
    y = w.add("Where", "hidden", w.weight("token", 1, 8), x)
    made = roles(w, [("ids", INT, [4]), ("hidden", onnx.TensorProto.BOOL, [4, 1])], y)
    assert made == dict.fromkeys(("users", "items", "head", "query", "token"), "parameter")


class Counted(dict):
    """A table that counts look-ups."""

    visits = 0

    def get(self, key, default=None):
        self.visits += 1
        return super().get(key, default)


def scales(w, n):
    """Factors of one value after the other: what reads the last is an end of each."""
    x = w.add("MatMul", "x", w.weight("q.weight", 8, 8))
    for i in range(n):
        x = w.add("Mul", x, w.weight(f"scale{i}", 8))
    return w.add("Sin", x)


def products_of_weights(w, n):
    """Arithmetic on weights alone, read by one layer at its end."""
    weight = w.weight("w", 8, 8)
    for i in range(n):
        weight = w.add("Mul", weight, w.weight(f"scale{i}", 8))
    return w.add("MatMul", "x", weight)


def biases_behind_arrangements(w, n):
    """Each value behind the layer is read by a bias of one element."""
    x = w.add("MatMul", "x", w.weight("q.weight", 8, 8))
    for i in range(n):
        w.add("Add", x, w.constant(f"bias{i}", np.full(1, 0.5, np.float32)))
        x = w.add("Identity", x)
    return x


def embeddings(w, n):
    """One table read by many, each scaled by its own factor; all end in one sum."""
    table = w.weight("table", 9, 8)
    rows = [w.add("Mul", w.add("Gather", table, "ids"), w.weight(f"s{i}", 8)) for i in range(n)]
    return w.add("Sum", *rows)


def shared_products(w, n):
    """Arithmetic on weights that many layers read."""
    weight = w.weight("w", 8, 8)
    for i in range(n):
        weight = w.add("Mul", weight, w.weight(f"scale{i}", 8))
        w.add("MatMul", "x", weight)
    return w.add("MatMul", "x", weight)


@pytest.mark.parametrize(
    "network",
    [scales, products_of_weights, biases_behind_arrangements, embeddings, shared_products],
)
def test_the_search_of_uses_grows_with_the_network_and_no_faster(network):
    def visits(n):
        w = Writer()
        network(w, n)
        held = {t.name: onnx.numpy_helper.to_array(t) for t in w.held}
        uses = Uses(w.nodes, held, ["x", "ids"])
        uses.readers, uses.makers = Counted(uses.readers), Counted(uses.makers)
        made = {uses.role(name, array) for name, array in held.items()}
        assert made == {Role.PARAMETER}
        return uses.readers.visits + uses.makers.visits

    few, many = visits(300), visits(600)
    assert few > 0
    assert many <= 2.1 * few


def test_names_that_lead_in_a_circle_end_the_search():
    w = Writer()
    w.weight("w", 8)
    w.add("Mul", "w", "b", outputs=["a"])
    w.add("Identity", "a", outputs=["b"])
    uses = Uses(w.nodes, ["w", "b"], ["x"])
    assert uses.role("w", np.ones(8, np.float32)) is Role.BUFFER


def tensor(array):
    return onnx.numpy_helper.from_array(array)


def test_the_caller_says_what_trains():
    def made(**options):
        w = Writer()
        cos, sin = rotary(w)
        x = w.add("MatMul", "x", w.weight("q.weight", 8, 8))
        y = w.add("Add", w.add("Mul", x, cos), w.add("Mul", x, sin))
        inputs = [("x", FLOAT, ["N", "T", 8]), ("ids", INT, ["N", "T"])]
        return roles(w, inputs, y, **options)

    both = {"inv_freq": "parameter", "q.weight": "buffer"}
    assert made(trainable=["*freq"], frozen=["q.*"]) == both
    assert made(trainable=["*freq"], frozen=["*"]) == both
    with pytest.raises(InvalidInput, match=r"trainable: .* matches 'rope.*'; there are inv_freq"):
        made(trainable=["rope.*"])


def test_no_pattern_makes_parameters_of_running_statistics():
    state = import_onnx(resnet(), trainable=["*"]).state
    statistics = {name for name in state if "running" in name}
    assert statistics
    assert {name for name, t in state.items() if t.role is Role.BUFFER} == statistics


def test_a_pattern_that_fits_running_statistics_alone_is_refused_by_name():
    words = r"trainable: 'stem\.\*running\*' fits only running statistics: stem.bn.running_mean, "
    with pytest.raises(InvalidInput, match=words):
        import_onnx(resnet(), trainable=["*.weight", "stem.*running*"])


NORMALIZED = """
<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
agraph (float[N,2] x) => (float[N,2] y)
  <float[2] scale = {1,2}, float[2] bias = {1,2}, float[2] mean = {1,2}, float[2] var = {1,2}> {
    y = own.outer(x, scale, bias, mean, var)
}
<domain: "own", opset_import: ["" : 17, "own" : 1]>
outer (a, b, c, d, e) => (f) { f = own.inner(e, d, c, b, a) }
<domain: "own", opset_import: ["" : 17]>
inner (v, m, b, s, x) => (y) { y = BatchNormalization(x, s, b, m, v) }
"""


def test_statistics_that_a_local_function_normalizes_by_are_buffers():
    state = import_onnx(parser.parse_model(NORMALIZED), trainable=["*"]).state
    trained = {name for name, t in state.items() if t.role is Role.PARAMETER}
    assert (trained, state.keys() - trained) == ({"scale", "bias"}, {"mean", "var"})


def test_training_changes_parameters_alone():
    cell = nn.Imported(import_onnx(resnet(), frozen=["stem.*"]))
    before = cell.state_dict()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3, 16, 16)).astype(np.float32)
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.fit((x, np.arange(8) % 5), epochs=1, progress="none")
    after = cell.state_dict()
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert "layer1.a.conv.weight" in changed
    assert not any(name.startswith("stem.") or "running" in name for name in changed)


def test_a_weight_of_which_each_layer_reads_a_slice_trains():
    w = Writer()
    w.weight("stacked", 100, 4, 4)
    x = "x"
    for i in range(100):
        bounds = [axes(w, f"{name}{i}", n) for name, n in (("a", i), ("b", i + 1), ("c", 0))]
        layer = w.add("Squeeze", w.add("Slice", "stacked", *bounds), axes(w, f"d{i}", 0))
        x = w.add("MatMul", x, layer)
    assert roles(w, [("x", FLOAT, ["N", 4])], x) == {"stacked": "parameter"}

"""ONNX models made to do harm: each is refused by name, within limits, and never crashes."""

import random
import time

import numpy as np
import pytest
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)
from tests.onnx.networks import resnet
from tests.support.onnx_models import BRANCHES, LOOP, SCAN, text_model

from triplane.proto.errors import Corrupt, InvalidInput, TriplaneError
from triplane.unified_ir import import_onnx

FLOAT = TensorProto.FLOAT
QUICK_S = 5.0


def info(name, shape=("N", 4), dtype=FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def model(*nodes, held=(), inputs=None, outputs=None, opset=17, **more):
    graph = helper.make_graph(
        list(nodes), "g", inputs or [info("x")], outputs or [info("y")], list(held)
    )
    imports = more.pop("imports", [helper.make_opsetid("", opset)])
    return helper.make_model(graph, opset_imports=imports, ir_version=8, **more)


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, name=f"/{op}", **attrs)


RELU = node("Relu", ["x"], ["y"])


def held(name, *shape, dtype=FLOAT, data=b""):
    return TensorProto(name=name, dims=shape, data_type=dtype, raw_data=data)


def function(name, *nodes):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], list(nodes), imports)


def with_functions(*functions, first="f0"):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    call = helper.make_node(first, ["x"], ["y"], domain="own")
    return model(call, functions=list(functions), imports=imports)


def bomb(depth=40):
    """2^40 nodes from 40 functions of two nodes."""
    made = []
    for i in range(depth):
        inner = {"domain": "own"} if i + 1 < depth else {}
        op = f"f{i + 1}" if i + 1 < depth else "Relu"
        pair = [helper.make_node(op, ["a"], ["m"], **inner),
                helper.make_node(op, ["m"], ["b"], **inner)]  # fmt: skip
        made.append(function(f"f{i}", *pair))
    return with_functions(*made)


def chain(depth):
    """Functions that call one another in a row."""
    made = [
        function(f"f{i}", helper.make_node(f"f{i + 1}", ["a"], ["b"], domain="own"))
        for i in range(depth)
    ]
    return with_functions(*made, function(f"f{depth}", helper.make_node("Relu", ["a"], ["b"])))


def nested(depth):
    """Branches inside branches."""
    graph = helper.make_graph([node("Relu", ["x"], ["y"])], "g", [], [info("y")])
    for _ in range(depth):
        branch = node("If", ["c"], ["y"], then_branch=graph, else_branch=graph)
        graph = helper.make_graph([branch], "g", [], [info("y")])
    graph.input.extend([info("x"), info("c", [], TensorProto.BOOL)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def twice_given_attribute():
    made = node("LeakyRelu", ["x"], ["y"], alpha=0.1)
    made.attribute.append(made.attribute[0])
    return model(made)


def graph_for_a_number():
    made = node("LeakyRelu", ["x"], ["y"])
    made.attribute.append(
        AttributeProto(name="alpha", type=AttributeProto.GRAPH, g=GraphProto(name="g"))
    )
    return model(made)


def added(*shape, **more):
    """x + w, with such an initializer w."""
    return model(ADD, held=[held(*shape, **more)])


def array(name, values, dtype="int64"):
    return numpy_helper.from_array(np.array(values, dtype), name)


ADD = node("Add", ["x", "w"], ["y"])
LOOPED = ["", "", "x"]
ABSURD = ["(" * 500, "a b", "N//0", "*"]
EMPTY = helper.make_graph([], "g", [], [])
ITSELF = function("f0", helper.make_node("f0", ["a"], ["b"], domain="own"))
TWICE = [function("f0", helper.make_node("Relu", ["a"], ["b"]))] * 2
STRAY = helper.make_sparse_tensor(array("v", [1, 1], "float32"), array("i", [1, 99]), [4])

# fmt: off
HOSTILE = {
    "a cycle": (lambda: model(node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]),
                              node("Relu", ["b"], ["y"])), "depend on one another"),
    "two nodes give one name": (lambda: model(RELU, node("Sigmoid", ["x"], ["y"])),
                                "two nodes produce the name 'y'"),
    "an input named like a value": (lambda: model(node("Relu", ["x"], ["x"]), RELU),
                                    "depend on one another|given to two values"),
    "an operand nobody gives": (lambda: model(node("Add", ["x", "z"], ["y"])),
                                r"'/Add' .*: no node, input or initializer produces operand 1 'z'"),
    "an output nobody gives": (lambda: model(RELU, outputs=[info("z")]),
                               "no node, input or initializer produces output 'z'"),
    "an output twice": (lambda: model(RELU, outputs=[info("y"), info("y")]), "listed once"),
    "no outputs": (lambda: helper.make_model(helper.make_graph([RELU], "g", [info("x")], []),
                   opset_imports=[helper.make_opsetid("", 17)]), "no outputs"),
    "an operator nobody knows": (lambda: model(node("Explode", ["x"], ["y"])),
                                 r"Explode, opset 17\): no operator of ai.onnx has this name"),
    "a domain not imported": (lambda: model(helper.make_node("F", ["x"], ["y"], domain="evil")),
                              "imports no opset of the domain 'evil'"),
    "an opset of the future": (lambda: model(node("Cast", ["x"], ["y"], to=1), opset=999),
                               "this one has 999"),
    "wrong element types": (lambda: model(node("And", ["x", "x"], ["y"])), "And does not take"),
    "wrong shapes": (lambda: model(node("MatMul", ["x", "w"], ["y"]),
                               held=[held("w", 3, 2, data=bytes(24))]),
                     r"'/MatMul' \(MatMul, opset 17\)"),
    "a wrong declaration": (lambda: model(RELU, outputs=[info("y", dtype=TensorProto.INT64)]),
                            "declared with elements of type 7"),
    "an unknown attribute": (lambda: model(node("Relu", ["x"], ["y"], depth=9)),
                             "no attribute 'depth'"),
    "an attribute twice": (twice_given_attribute, "given twice"),
    "a graph for a number": (graph_for_a_number, "of kind GRAPH"),
    "an attribute of the wrong kind": (lambda: model(node("Transpose", ["x"], ["y"], perm=1.5)),
                                       "INTS"),
    "too many operands": (lambda: model(node("Relu", ["x", "x"], ["y"])), "takes 1 operand, got 2"),
    "a huge initializer of no bytes": (lambda: added("w", 2**40, 2**20),
                                       "bytes, the limit is|bytes, its type takes"),
    "an initializer of too few bytes": (lambda: added("w", 4, data=b"1"),
                                        "has 1 bytes, its type takes 16"),
    "a negative size": (lambda: added("w", -4), "has the invalid shape"),
    "seventeen axes": (lambda: added("w", *[1] * 17, data=bytes(4)),
                       "has the invalid shape"),
    "an element type nobody knows": (lambda: added("w", 4, dtype=99),
                                     "elements of type 99"),
    "an initializer twice": (lambda: model(ADD, held=[held("w", data=bytes(4))] * 2),
                             "is given twice"),
    "a fill beyond memory": (lambda: model(node("ConstantOfShape", ["s"], ["w"]), ADD,
                                           held=[array("s", [2**40, 2**40])]),
                             "broadcast|2.*62|size"),
    "a repeat beyond memory": (lambda: model(node("Expand", ["one", "s"], ["w"]), ADD,
                               held=[array("s", [2**60, 2**60]), array("one", [1], "float32")]),
                               "Add|Expand|size"),
    "a range beyond memory": (lambda: model(node("Range", ["a", "b", "a"], ["y"]),
                              outputs=[info("y", ["M"], 7)],
                              held=[array("a", 1), array("b", 2**62)]), None),
    "a function that calls itself": (lambda: with_functions(ITSELF),
                                     "calls itself"),
    "a function twice": (lambda: with_functions(*TWICE),
                         "defined twice"),
    "functions a hundred deep": (lambda: chain(100), "more than 64 deep"),
    "functions that double forty times": (bomb, "more than 250000 nodes"),
    "branches eight deep": (lambda: nested(8), None),
    "an input of no shape": (lambda: model(RELU, inputs=[info("x", None)]),
                             r"declared without a shape; pass shapes={'x'"),
    "a size of absurd text": (lambda: model(RELU, inputs=[info("x", ABSURD)]), None),
    "a loop without a body": (lambda: model(node("Loop", LOOPED, ["y"])),
                              "graph 'body' is missing"),
    "a scan over nothing": (lambda: model(node("Scan", ["x"], ["y"], num_scan_inputs=9,
                                               body=EMPTY)),
                            "num_scan_inputs is 9"),
    "a body of other arity": (lambda: model(node("Loop", LOOPED, ["y"], body=EMPTY)),
                              "its body takes 0"),
    "a constant of nothing": (lambda: model(node("Constant", [], ["y"])),
                              "a constant must have one value"),
    "a sparse constant": (lambda: model(node("Constant", [], ["y"], sparse_value=STRAY)),
                          "outside its shape"),
}
# fmt: on


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_is_refused_by_name_and_soon(name):
    make, words = HOSTILE[name]
    made = make()
    start = time.process_time()
    if words is None:  # odd but sound
        import_onnx(made)
    else:
        with pytest.raises(TriplaneError, match=words):
            import_onnx(made)
    assert time.process_time() - start < QUICK_S


def test_what_no_output_needs_is_not_looked_at():
    garbage = NodeProto(op_type="Explode", input=["nowhere"], output=["waste"])
    made = model(RELU, garbage, held=[held("junk", 2**40)])
    assert [n.op.name for n in import_onnx(made).entry("predict").nodes] == ["Relu"]


@pytest.mark.parametrize("data", [b"", b"\x08\x07", b"no model", bytes(100), b"\xff" * 100])
def test_bytes_that_are_no_model_are_corrupt(data):
    with pytest.raises(Corrupt, match="not an ONNX model"):
        import_onnx(data)


def test_a_graph_nested_too_deep_for_the_parser_is_corrupt():
    with pytest.raises((Corrupt, InvalidInput)):
        import_onnx(nested_bytes(60))


def nested_bytes(depth):
    """Graphs inside graphs, written byte by byte."""
    graph = GraphProto(name="g").SerializeToString()
    for _ in range(depth):
        attribute = AttributeProto(name="then_branch", type=AttributeProto.GRAPH)
        data = attribute.SerializeToString() + field(6, graph)
        graph = field(1, field(5, data) + NodeProto(op_type="If").SerializeToString())
    imports = ModelProto(opset_import=[helper.make_opsetid("", 17)]).SerializeToString()
    return imports + field(7, graph)


def field(number, data):
    """One length-delimited field."""
    out, n = bytearray([number << 3 | 2]), len(data)
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n]) + data


NOT_TEXT = b"\xff\xfe"


def test_names_that_are_no_text_are_corrupt():
    data = SEEDS[0].replace(b"image", NOT_TEXT + b"age")
    with pytest.raises(Corrupt, match="not UTF-8 text"):
        import_onnx(data)


SEEDS = [
    resnet().SerializeToString(),
    *(text_model(t).SerializeToString() for t in (BRANCHES, LOOP, SCAN)),
]


def mutated(rng, data):
    """One to four bytes changed, cut out, repeated or put in."""
    made = bytearray(data[-3000:] if rng.random() < 0.1 else data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made))
        match rng.randrange(4):
            case 0:
                made[at] = rng.randrange(256)
            case 1:
                made[at] ^= 1 << rng.randrange(8)
            case 2:
                del made[at : at + rng.randint(1, 8)]
            case _:
                made[at:at] = made[at : at + rng.randint(1, 8)]
    return bytes(made)


def search(rounds, seed):
    rng = random.Random(seed)
    small = [s for s in SEEDS if len(s) < 3000] * 3 + SEEDS
    outcomes = {"imported": 0, "refused": 0}
    for _ in range(rounds):
        data = mutated(rng, rng.choice(small))
        try:
            import_onnx(data)
        except TriplaneError:
            outcomes["refused"] += 1
        else:
            outcomes["imported"] += 1
    return outcomes


def test_mutated_models_are_imported_or_refused_by_name():
    outcomes = search(300, seed=7)
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.deep
def test_many_mutated_models_are_imported_or_refused_by_name():
    outcomes = search(20_000, seed=random.randrange(2**32))
    assert min(outcomes.values()) > 100, outcomes

"""`module.pb`: round trips, equal bytes, and refusal of everything else."""

import numpy as np
import pytest
from tests.ir import graphs

from triplane.proto import ir_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.ir import limits
from triplane.unified_ir.ir.arrays import raw
from triplane.unified_ir.ir.codec import decode, decode_function, encode, encode_function
from triplane.unified_ir.ir.graph import (
    NO_META,
    Function,
    Location,
    Meta,
    ModuleContents,
    Node,
    OpId,
    Value,
)
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.ir.types import DTYPES, TensorSpec
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE


def back(function):
    """The function after a round trip, which is sound and has the same text and bytes."""
    data = encode_function(function)
    read = decode_function(data)
    assert encode_function(read) == data
    assert function_text(read) == function_text(function)
    check_function(read)
    return read


def assert_same_bits(function, read, args):
    for a, b in zip(
        run_function(TABLE, function, args), run_function(TABLE, read, args), strict=True
    ):
        assert a.dtype == b.dtype
        assert raw(a) == raw(b)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "samples"), graphs.PARTS_OF_ROWS)
def test_every_sample_of_a_row_comes_back_with_the_same_results(row, samples):
    for sample in samples:
        function, args = graphs.of_sample(row, sample)
        assert_same_bits(function, back(function), args)
        loss = graphs.scalar(function) if row.differentiable and sample.smooth != () else None
        if loss is not None:
            gradient = value_and_grad(loss)
            assert_same_bits(gradient, back(gradient), args)


@pytest.mark.slow
@pytest.mark.parametrize("name", graphs.WITH_REGIONS)
def test_regions_and_their_gradients_come_back_with_the_same_results(name):
    for function in graphs.with_gradients(name):
        assert_same_bits(function, back(function), graphs.arguments(function))


ATTRIBUTES = {
    "b_float": -0.0,
    "c_text": "a\u00e4\n",
    "d_ints": (2**63 - 1, -(2**63)),
    "e_floats": (float("inf"), 1e-310),
    "f_texts": ("", "x"),
    "g_none": (),
    "h_dims": TensorSpec(("N", 3, "(H+1)//2")).shape,
    "i_dtype": DTYPES["bfloat16"],
    "a_int": -1,
}


ANY = OpId("x", "Any", 1)


def one_node(attrs=None, op=ANY, meta=NO_META):
    x = Value(TensorSpec(("N",)), "x")
    y = Value(TensorSpec(("N",)))
    node = Node(op, (x, None), (y,), attrs or {}, (), meta)
    return Function("one", (x,), (y,), ("y",), (node,))


def test_every_kind_of_attribute_comes_back():
    read = decode_function(encode_function(one_node(ATTRIBUTES)))
    assert dict(read.nodes[0].attrs) == ATTRIBUTES
    assert list(read.nodes[0].attrs) == sorted(ATTRIBUTES)
    assert str(read.nodes[0].attrs["b_float"]) == "-0.0"
    assert read.nodes[0].inputs[1] is None


def test_places_come_back():
    for meta in (Meta(), Meta(Location("a/b.py", 3)), Meta(None, "s"), Meta(Location("c", 1), "t")):
        assert decode_function(encode_function(one_node(meta=meta))).nodes[0].meta == meta


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda: one_node({"a": object()}), "a object"),
        (lambda: one_node({"a": (1, "b")}), "a tuple"),
        (lambda: one_node({"a": 2**64}), "cannot"),
        (lambda: one_node({"a": "\ud800"}), "cannot"),
        (lambda: one_node({"": 1}), "name has 1 to"),
        (lambda: one_node(op=OpId("", "a" * 600, 1)), "name has 1 to"),
        (lambda: one_node(meta=Meta(Location("/etc/passwd", 1))), "relative"),
        (lambda: one_node(meta=Meta(Location("../x.py", 1))), "relative"),
        (lambda: one_node(meta=Meta(Location("C:/x.py", 1))), "relative"),
    ],
)
def test_what_files_cannot_hold_is_refused_before_writing(function, match):
    with pytest.raises(InvalidInput, match=match):
        encode_function(function())


def test_a_value_of_another_function_is_refused():
    stranger = Value(TensorSpec((1,)))
    with pytest.raises(InvalidInput, match="closed and in order"):
        encode_function(Function("f", (), (stranger,), ("y",), ()))


def test_big_constants_lie_in_the_weights_once():
    module = graphs.module()
    contents = ModuleContents({**module.functions, "again": module.functions["predict"]})
    data, tensors = encode(contents)
    (name,) = tensors
    assert name.startswith("constant.")
    assert len(data) < tensors[name].data.nbytes + 1500
    read = decode(data, tensors).functions["again"]
    held = [n.attrs["value"] for n in read.nodes if n.op.name == "Constant"]
    assert any(np.shares_memory(a, tensors[name].data) for a in held)


def message():
    data, tensors = encode(ModuleContents(graphs.module().functions))
    return pb.Module.FromString(data), tensors


def nested(depth):
    """A function whose regions nest `depth` deep."""
    x = Value(TensorSpec(()), "x")
    function = Function("f", (x,), (x,), ("y",), ())
    for _ in range(depth):
        x, y = Value(TensorSpec(()), "x"), Value(TensorSpec(()))
        node = Node(OpId("x", "Any", 1), (x,), (y,), {}, (function,))
        function = Function("f", (x,), (y,), ("y",), (node,))
    return function


def _set(path, value):
    def change(m):
        *heads, last = path
        at = m
        for head in heads:
            at = at[head] if isinstance(head, int) else getattr(at, head)
        if isinstance(last, int):
            at[last] = value
        else:
            setattr(at, last, value)

    return change


def _newer(**fields):
    def change(m):
        m.format_version = 2
        m.types.add(**fields)

    return change


def _split(*slices, version=4):
    """Give the first node that has an operand these slices."""

    def change(m):
        m.format_version = version
        node = next(n for n in m.functions[0].function.nodes if n.inputs)
        node.strategy.extend(pb.Slices(axes=s) for s in slices)

    return change


F = ("functions", 0, "function")
BENT = {
    "a newer format": (_set(("format_version",), 5), InvalidInput, "format version 5"),
    "no format": (_set(("format_version",), 0), Corrupt, "no format version"),
    "operator index": (_set((*F, "nodes", 1, "op"), 99), Corrupt, "operator 99 does not exist"),
    "operand ahead": (_set((*F, "nodes", 1, "inputs", 0), 99), Corrupt, "value 98, which"),
    "type index": (_set((*F, "nodes", 0, "outputs", 0), 99), Corrupt, "type 99 does not exist"),
    "result index": (_set((*F, "results", 0), 2**32 - 1), Corrupt, "4294967295 does not exist"),
    "parameter index": (_set((*F, "param_types", 0), 77), Corrupt, "type 77 does not exist"),
    "string index": (_set((*F, "name"), 999), Corrupt, "string 999 does not exist"),
    "place index": (_set((*F, "nodes", 0, "place"), 99), Corrupt, "place 98 does not exist"),
    "lost name": (lambda m: m.functions[0].function.param_names.pop(), Corrupt, "parameter names"),
    "same name": (_set((*F, "param_names", 0), 2), Corrupt, "needs a unique name"),
    "same function": (_set(("functions", 1, "name"), 0), Corrupt, "two functions"),
    "entry index": (lambda m: m.entries.add(name=0, function=9), Corrupt, "function 9 does not"),
    "entries": (lambda m: [m.entries.add() for _ in "ab"], Corrupt, "state tensors are named"),
    "dtype": (lambda m: m.types.add(dtype=99), Corrupt, "unknown element type 99"),
    "a newer form": (lambda m: m.types.add(form=1, dtype=1), Corrupt, "version 1 has no"),
    "a newer dtype": (lambda m: m.types.add(dtype=8), Corrupt, "version 1 has no"),
    "form": (_newer(form=9), Corrupt, "unknown form of type: 9"),
    "a sequence of nothing": (_newer(form=1), Corrupt, "unknown element type 0"),
    "a sequence of itself": (_newer(form=1, element=99), Corrupt, "type 98 does not exist"),
    "a sequence with sizes": (_newer(form=1, dtype=1, shape=[2]), Corrupt, "only an element type"),
    "a sequence of sequences": (
        lambda m: (_newer(form=1, dtype=1)(m), _newer(form=1, element=len(m.types))(m)),
        Corrupt,
        "holds tensors, not",
    ),
    "an optional of nothing": (_newer(form=3), Corrupt, "refers to it"),
    "an optional with sizes": (_newer(form=3, element=1, shape=[2]), Corrupt, "no shape"),
    "a tensor that holds a type": (_newer(dtype=1, element=1), Corrupt, "holds no other type"),
    "no dtype": (lambda m: m.types.add(), Corrupt, "unknown element type 0"),
    "rank": (lambda m: m.types.add(dtype=1, shape=[1] * 17), Corrupt, "17 axes"),
    "size": (lambda m: m.types.add(dtype=1, shape=[2**63 - 1]), Corrupt, "at most"),
    "size index": (lambda m: m.types.add(dtype=1, shape=[-9]), Corrupt, "symbolic size 8 does"),
    "size text": (lambda m: m.dims.append("N//0"), Corrupt, "divided by zero"),
    "size form": (lambda m: m.dims.append("N*2"), Corrupt, "normal form"),
    "no size": (lambda m: m.dims.append("3"), Corrupt, "normal form"),
    "long sizes": (lambda m: m.dims.extend(["N"] * 40_000), Corrupt, "characters"),
    "long string": (lambda m: m.strings.append("x" * 70_000), Corrupt, "at most 65536"),
    "many strings": (lambda m: m.strings.extend([""] * 250_000), Corrupt, "at most 250000"),
    "many types": (lambda m: [m.types.add() for _ in range(50_000)], Corrupt, "at most 50000"),
    "role": (lambda m: m.state.add(name=0, type=0, role=99), Corrupt, "unknown role 99"),
    "no tensor": (lambda m: m.state.add(name=0, type=1, role=1), Corrupt, "have no tensor"),
    "big personal": (
        lambda m: (m.types.add(dtype=1, shape=[2**40]), m.state.add(type=len(m.types) - 1, role=5)),
        Corrupt,
        "at most 4294967295 bytes",
    ),
    "an older strategy": (_split((1, 1), (1, 1), version=3), Corrupt, "with format version 4"),
    "strategy of one": (_split((1, 1)), Corrupt, "2 operands, and the strategy is for 1"),
    "strategy of a vector": (_split((1,), (1, 1)), Corrupt, "has 2 axes"),
    "no slices": (_split((0, 1), (1, 1)), Corrupt, "1 slice or more"),
    "many slices": (_split((4096, 2), (1, 1)), Corrupt, "at most 4096 in all"),
    "properties": (lambda m: [m.meta.add(key=k) for k in "ba"], Corrupt, "sorted by key"),
    "no value": (
        lambda m: m.functions[0].function.nodes[1].attributes.add(name=1),
        Corrupt,
        "no value",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BENT)
def test_a_bent_message_is_refused_by_name(name):
    change, family, match = BENT[name]
    bent, tensors = message()
    change(bent)
    with pytest.raises(family, match=match):
        decode(bent.SerializeToString(), tensors)


def test_the_error_names_function_node_and_operator():
    bent, tensors = message()
    bent.functions[1].function.nodes[2].outputs[0] = 99
    with pytest.raises(Corrupt, match=r"module.pb: function 'step': node 2 \(\S+\): type 99 does"):
        decode(bent.SerializeToString(), tensors)


def test_a_constant_under_another_name_is_refused():
    bent, tensors = message()
    ((name, tensor),) = tensors.items()
    i = list(bent.strings).index(name)
    bent.strings[i] = "constant.0000000000000000"
    with pytest.raises(Corrupt, match="not hold the constant of that digest"):
        decode(bent.SerializeToString(), {bent.strings[i]: tensor})


def test_a_tensor_that_nothing_uses_is_refused():
    sound, tensors = message()
    extra = {**tensors, "stray": next(iter(tensors.values()))}
    with pytest.raises(Corrupt, match="'stray', which nothing uses"):
        decode(sound.SerializeToString(), extra)


def test_unknown_fields_are_refused():
    sound, tensors = message()
    with pytest.raises(Corrupt, match="does not know"):
        decode(sound.SerializeToString() + b"\xf8\x07\x01", tensors)


def test_regions_nest_to_the_limit_and_no_deeper():
    deepest = nested(limits.MAX_REGION_DEPTH)
    assert len(list(decode_function(encode_function(deepest)).walk())) == limits.MAX_REGION_DEPTH
    with pytest.raises(InvalidInput, match="deeper than"):
        encode_function(nested(limits.MAX_REGION_DEPTH + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x3a\x00" * (limits.MAX_MESSAGES + 1), "messages"),
        (b"\x08\x01" * (limits.MAX_FIELDS + 1), "fields"),
        (bytes(limits.MAX_MODULE_BYTES + 1), "at most"),
        (b"\x3a\x80\x80\x80\x80\x08", "not a Module message"),
        (b"\xff" * 100, "not a Module message"),
        (b"\x0b" * 5000, "contains a group"),
        (b"\xab\x06\xac\x06" + b"\x3a\x00" * (limits.MAX_MESSAGES + 1), "contains a group"),
        (b"", "no format version"),
    ],
)
def test_hostile_bytes_are_refused_before_they_take_memory(data, match):
    with pytest.raises(Corrupt, match=match):
        decode(data, {})


@pytest.mark.slow
def test_a_function_of_many_nodes_comes_back():
    x = value = Value(TensorSpec(("N", 16)), "x")
    nodes = []
    for i in range(8_000):
        made = Value(value.type)
        meta = Meta(Location("net.py", i % 500), f"blocks.{i % 50}")
        nodes.append(Node(TABLE["", "Add"].id, (value, x), (made,), {}, (), meta))
        value = made
    assert len(back(Function("f", (x,), (value,), ("y",), tuple(nodes))).nodes) == 8_000


def field(number, data):
    """A length-delimited field on the wire."""
    size = len(data)
    length = bytes([size]) if size < 128 else bytes([size & 0x7F | 0x80, size >> 7])
    return bytes([number << 3 | 2]) + length + data


def test_deep_messages_are_refused_before_protobuf_sees_them():
    function = b""
    for _ in range(60):
        function = field(4, field(5, function))
    with pytest.raises(Corrupt, match="nest deeper"):
        decode(field(7, field(2, function)), {})

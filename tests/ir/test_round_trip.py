"""What is written is what is read: random functions and modules through text, bytes and file."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ir import drawn

from triplane.proto import ir_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.files import container
from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.ir.codec import decode_function, encode_function
from triplane.unified_ir.ir.graph import NO_META, Function, Meta, Node, OpId, Value
from triplane.unified_ir.ir.module import read
from triplane.unified_ir.ir.parse import parse_function
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE

relaxed = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
ANY = OpId("x", "Any", 1)


def of_attributes(attrs, meta=NO_META, type_=None):
    x = Value(type_ or TensorSpec(("N",)), "x")
    node = Node(ANY, (x,), (Value(x.type),), attrs, (), meta)
    return Function("one", (x,), node.outputs, ("y",), (node,))


def with_shape_and_minus_one(shape=(3, 4)):
    """[rows of x, -1], as an exported `view(x.size(0), -1)` computes it."""
    build = Build(TABLE, "predict")
    with build:
        x = build.param("x", TensorSpec(("N", *shape[1:])))
        (sizes,) = build.apply(TABLE["triplane", "Dims"], [], {"dims": (x.shape[0], -1)})
    return build.finish({"sizes": sizes})


@relaxed
@given(drawn.DIMS)
def test_sizes_of_either_sign_come_back_from_bytes_and_text(dims):
    function = of_attributes({"dims": dims})
    for back in (
        decode_function(encode_function(function)),
        parse_function(function_text(function)),
    ):
        drawn.assert_same(function, back)


@pytest.mark.slow
@relaxed
@given(drawn.functions())
def test_a_random_function_comes_back_from_bytes(function):
    data = encode_function(function)
    back = decode_function(data)
    drawn.assert_same(function, back)
    assert encode_function(back) == data


@pytest.mark.slow
@relaxed
@given(drawn.functions())
def test_a_random_function_comes_back_from_text(function):
    text = function_text(function)
    back = parse_function(text, drawn.inner_arrays(function))
    drawn.assert_same(function, back)
    assert function_text(back) == text


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[*HealthCheck],
)
@given(
    drawn.functions(),
    st.dictionaries(
        drawn.NAMES, st.tuples(st.sampled_from([*Role]), drawn.state_arrays()), max_size=3
    ),
    st.dictionaries(drawn.NAMES, drawn.TEXT, max_size=3),
)
def test_a_random_module_comes_back_from_its_file(tmp_path, function, state, meta):
    state = {f"state {n}": StateTensor(role, array) for n, (role, array) in state.items()}
    module = Module({"f": function}, {"go": "f", "again": "f"}, state, meta)
    digest = module.save(tmp_path / "m.tpm")
    back = read(tmp_path / "m.tpm", digest)
    drawn.assert_same(function, back.functions["f"])
    assert dict(back.entries) == dict(module.entries)
    assert dict(back.meta) == meta
    assert {n: t.role for n, t in back.state.items()} == {n: t.role for n, t in state.items()}
    for name in state:
        expected = module.initial(name)
        assert drawn.same_array(back.state[name].array, expected), name
    assert back.save(tmp_path / "again.tpm") == digest


def test_minus_one_beside_a_symbol_is_minus_one_in_the_file(tmp_path):
    function = with_shape_and_minus_one()
    Module({"predict": function}, {"predict": "predict"}, {}).save(tmp_path / "m.tpm")
    x = np.zeros((3, 4), np.float32)
    for f in (function, load(tmp_path / "m.tpm").entry("predict")):
        assert run_function(TABLE, f, [x])[0].tolist() == [3, -1]


def version_of(function):
    return pb.Module.FromString(encode_function(function)).format_version


def test_only_a_negative_constant_beside_a_symbol_takes_the_newest_version():
    n = TensorSpec(("N",)).shape[0]
    assert version_of(of_attributes({"dims": (n, -1)})) == 3
    assert version_of(of_attributes({"dims": (-1, n - 4)})) == 3
    assert version_of(of_attributes({"dims": (n, 3)})) == 1
    assert version_of(of_attributes({"dims": (n - 1, -n)})) == 1
    assert version_of(of_attributes({"ints": (-1, -2)})) == 1


def message_of(function):
    return pb.Module.FromString(encode_function(function))


def test_a_negative_constant_in_a_file_of_before_is_refused():
    n = TensorSpec(("N",)).shape[0]
    message = message_of(of_attributes({"dims": (n, -1)}))
    assert list(message.dims) == ["N", "-1"]
    message.format_version = 2
    with pytest.raises(Corrupt, match="not in normal form"):
        decode_function(message.SerializeToString(deterministic=True))


@pytest.mark.parametrize(
    "text", ["0", "4", "-0", "-01", "+1", " -1", "--1", "-9223372036854775809"]
)
def test_a_number_that_the_table_of_sizes_does_not_hold_is_refused(text):
    n = TensorSpec(("N",)).shape[0]
    message = message_of(of_attributes({"dims": (n, -1)}))
    message.dims[1] = text
    with pytest.raises(Corrupt, match="size"):
        decode_function(message.SerializeToString(deterministic=True))


def test_a_type_takes_no_negative_size():
    function = of_attributes({}, type_=TensorType(TensorSpec(()).dtype, (-1,)))
    with pytest.raises(InvalidInput, match="at least 0"):
        encode_function(function)
    n = TensorSpec(("N",)).shape[0]
    message = message_of(of_attributes({"dims": (n, -1)}))
    message.types[0].shape[0] = -2
    with pytest.raises(Corrupt, match="at least 0"):
        decode_function(message.SerializeToString(deterministic=True))


def test_a_scope_that_looks_like_a_line_is_read_as_a_scope():
    function = of_attributes({}, Meta(None, "dense/BiasAdd:0"))
    assert parse_function(function_text(function)).nodes[0].meta == function.nodes[0].meta


def written_before(function, path):
    """The file that programs before version 3 wrote: a number below zero as it is."""
    Module({"predict": function}, {"predict": "predict"}, {}).save(path)
    file = container.Container(path, kind="model")
    message = pb.Module.FromString(bytes(file.part("module.pb")))
    message.format_version = 1
    texts = list(message.dims)
    kept = [t for t in texts if not t.startswith("-")]
    was = {-1 - i: -1 - kept.index(t) if t in kept else int(t) for i, t in enumerate(texts)}
    nodes = [node for named in message.functions for node in named.function.nodes]
    lists = [t.shape for t in message.types]
    lists += [a.dims.values for node in nodes for a in node.attributes]
    for values in lists:
        values[:] = [was.get(v, v) for v in values]
    del message.dims[:]
    message.dims.extend(kept)
    parts = [
        container.part("module.pb", message.SerializeToString(deterministic=True)),
        container.tensor_part("weights.safetensors", {}),
    ]
    container.write(path, "model", parts)


def flattened():
    """x.reshape(N, -1) by sizes that the graph computes."""
    build = Build(TABLE, "predict")
    with build:
        x = build.param("x", TensorSpec(("N", 2, 3)))
        (sizes,) = build.apply(TABLE["triplane", "Dims"], [], {"dims": (x.shape[0], -1)})
        y = ops.relu(TABLE["", "Reshape"](x, sizes))
    return build.finish({"y": y})


def test_a_file_of_before_whose_types_disagree_is_refused_with_the_way_out(tmp_path):
    written_before(flattened(), tmp_path / "m.tpm")
    with pytest.raises(Corrupt, match=r"m\.tpm: .*import or train the model again"):
        load(tmp_path / "m.tpm")


def test_a_file_of_before_with_a_number_of_no_symbol_is_refused_with_the_way_out(tmp_path):
    build = Build(TABLE, "predict")
    with build:
        x = build.param("x", TensorSpec(("N",)))
        (sizes,) = build.apply(TABLE["triplane", "Dims"], [], {"dims": (x.shape[0], -7)})
    written_before(build.finish({"sizes": sizes}), tmp_path / "m.tpm")
    with pytest.raises(Corrupt, match=r"m\.tpm: .*import or train the model again"):
        load(tmp_path / "m.tpm")

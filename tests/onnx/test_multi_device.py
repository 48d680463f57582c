"""Strategies as ONNX's multi-device annotations: stock tools accept them, import reads them."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, nn, ops, trace
from triplane.unified_ir.onnx.annotated import emit_annotated
from triplane.unified_ir.onnx.emit import emit
from triplane.unified_ir.onnx.importer import import_onnx
from triplane.unified_ir.onnx.target import OnnxTarget
from triplane.unified_ir.ops.inline import with_sizes

X, W = TensorSpec(("N", 8), "float32"), TensorSpec((8, 12), "float32")


def products(split):
    """Two products of the same graph, with strategies or without."""
    first = ops.matmul.shard((4, 1), (1, 1)) if split else ops.matmul
    second = ops.matmul.shard((2, 1), (1, 3)) if split else ops.matmul
    return trace(lambda x, w: second(ops.relu(first(x, w)), ops.transpose(w)[:, :6]), X, W)


def strategies(function):
    return [(n.op.name, n.strategy) for n in function.nodes if n.strategy]


def test_stock_tools_accept_annotations_and_import_reads_them_back():
    function, plain = products(split=True), products(split=False)
    model, same = emit_annotated(function), emit_annotated(plain)
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, same.ir_version) == (11, 10)
    assert not same.configuration
    assert not emit(function).configuration, "sessions and bundles need no annotations"
    (configuration,) = model.configuration
    assert (configuration.name, configuration.num_devices) == ("triplane", 12)
    back = import_onnx(model.SerializeToString()).entry("predict")
    assert strategies(back) == strategies(function)
    assert len(strategies(back)) == 2
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((12, 8)).astype(np.float32),
             "w": rng.standard_normal((8, 12)).astype(np.float32)}  # fmt: skip
    results = [
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, feeds
        )[0]
        for m in (model, same)
    ]
    assert np.array_equal(*results)


class Square(nn.Cell):
    """Its gradient is its own, and so is the split of its product."""

    def construct(self, x):
        return ops.mul.shard((4, 1), (4, 1))(x, x)

    def bprop(self, x, y, g):
        return 2.0 * x * g


@pytest.mark.parametrize("outside", [False, True])
def test_strategies_in_a_cell_with_a_bprop_are_annotated_too(outside):
    def net(x):
        y = ops.relu.shard((2, 1))(x) if outside else ops.relu(x)
        return Square()(y)

    model = emit_annotated(trace(net, TensorSpec(("N", 8))))
    counts = {n.op_type: len(n.device_configurations) for n in model.graph.node}
    assert counts == {"Relu": int(outside), "Mul": 1}
    assert [c.num_devices for c in model.configuration] == [4]


def test_strategies_in_a_loop_are_left_out():
    def net(x):
        return ops.scan(lambda carry, y: (ops.relu.shard((2, 1))(carry), y), x, x)[0]

    assert not emit_annotated(trace(net, TensorSpec((4, 4)))).configuration


def test_files_for_older_runtimes_have_no_annotations():
    model = emit_annotated(products(split=True), target=OnnxTarget(17))
    assert model.ir_version < 11
    assert not any(n.device_configurations for n in model.graph.node)


def test_a_fixed_batch_that_the_slices_do_not_divide_has_no_annotations():
    function = trace(ops.matmul.shard((4, 1), (1, 1)), X, W)
    for n, devices in ((8, [4]), (6, [])):
        model = emit_annotated(with_sizes(function, {"N": n}))
        assert [c.num_devices for c in model.configuration] == devices


def test_devices_hold_the_shards_in_order():
    """Rows in 2 and columns in 3: device 3 i + j has rows i and columns j, on 6 devices."""
    function = trace(ops.matmul.shard((2, 1), (1, 3)), X, W)
    (node,) = emit_annotated(function).graph.node
    (config,) = node.device_configurations
    rows, columns = config.sharding_spec
    groups = [
        {e.key: list(e.value) for e in spec.index_to_device_group_map} for spec in (rows, columns)
    ]
    assert [groups[0][d] for d in rows.device] == [[0, 1, 2], [3, 4, 5]]
    assert [groups[1][d] for d in columns.device] == [[0, 3], [1, 4], [2, 5]]
    (dim,) = rows.sharded_dim
    (part,) = dim.simple_sharding
    assert (dim.axis, part.dim_param, part.num_shards) == (0, "N", 2)
    assert columns.sharded_dim[0].simple_sharding[0].dim_value == 12


def annotated():
    return emit_annotated(trace(ops.matmul.shard((4, 1), (1, 2)), X, W))


def spec_of(model, k=0):
    return model.graph.node[0].device_configurations[0].sharding_spec[k]


def _axis(axis):
    return lambda m: setattr(spec_of(m).sharded_dim[0], "axis", axis)


def _shards(n):
    return lambda m: setattr(spec_of(m).sharded_dim[0].simple_sharding[0], "num_shards", n)


@pytest.mark.parametrize(
    ("bend", "why"),
    [
        (_axis(2), "cuts axis 2, out of range"),
        (_axis(-(2**63)), "out of range"),
        (_shards(0), "into 0 shards"),
        (_shards(-4), "into -4 shards"),
        (lambda m: spec_of(m).sharded_dim.append(spec_of(m).sharded_dim[0]), "twice, of 2 axes"),
        (lambda m: setattr(spec_of(m), "tensor_name", "z"), "no tensor 'z', which is annotated"),
        (lambda m: m.ClearField("configuration"), "is not among those of the model"),
        (
            lambda m: setattr(m.graph.node[0].device_configurations[0], "configuration_id", "q"),
            "configuration 'q' is not among those of the model \\('triplane'\\)",
        ),
    ],
)
def test_annotations_that_break_a_rule_are_refused_by_node(bend, why):
    model = annotated()
    bend(model)
    with pytest.raises(InvalidInput, match=why) as caught:
        import_onnx(model)
    assert "node 'n0' (MatMul, opset 21)" in str(caught.value)


def _fused(model):
    spec_of(model).sharded_dim[0].simple_sharding.add(num_shards=2)


@pytest.mark.parametrize(
    "bend",
    [
        _shards(2**62),
        _shards(8192),
        lambda m: setattr(spec_of(m, 1).sharded_dim[0].simple_sharding[0], "num_shards", 5),
        lambda m: setattr(spec_of(m, 1).sharded_dim[0], "axis", 0),
        _fused,
    ],
    ids=["huge", "many", "uneven", "sums of one operand", "fused"],
)
def test_what_no_strategy_can_say_is_left_out(bend):
    model = annotated()
    bend(model)
    assert not strategies(import_onnx(model).entry("predict"))


def test_negative_axes_and_other_configurations_are_read():
    model = annotated()
    _axis(-2)(model)
    other = model.graph.node[0].device_configurations.add(configuration_id="later")
    other.sharding_spec.add(tensor_name="x")
    model.configuration.add(name="later", num_devices=3)
    assert strategies(import_onnx(model).entry("predict")) == [("MatMul", ((4, 1), (1, 2)))]


def test_a_tensor_that_is_read_twice_may_be_cut_in_two_ways():
    square = TensorSpec((8, 8), "float32")
    function = trace(lambda x: ops.matmul.shard((4, 1), (1, 2))(x, x), square)
    assert strategies(import_onnx(emit_annotated(function)).entry("predict")) == strategies(
        function
    )


def test_too_many_devices_are_not_listed():
    function = trace(ops.matmul.shard((4096, 1), (1, 4)), X, W)
    model = emit_annotated(function)
    assert not model.configuration
    assert not model.graph.node[0].device_configurations

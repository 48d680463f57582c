import numpy as np
import pytest
from onnx import TensorProto, helper

from triplane.edge.serving import probe
from triplane.edge.serving.batching import Merged
from triplane.edge.serving.running import Direct
from triplane.edge.serving.servable import contract_of
from triplane.edge.serving.statistics import Statistics
from triplane.unified_ir.runtime.session import Session

FLOAT = TensorProto.FLOAT


def servable(kit, nodes, shape=("N", 4), out=("N", 4), weights=None):
    data = kit.graph(nodes, [("x", FLOAT, [*shape])], [("y", FLOAT, [*out])], weights or {})
    return kit.SessionServable(Session(data), name="probed")


def independent(kit, nodes, **kw):
    made = servable(kit, nodes, **kw)
    feeds = probe.sample(contract_of(made), probe.SIZES[-1])
    return probe._rows_are_independent(made, feeds)


def test_rows_of_a_plain_layer_are_independent(kit):
    assert independent(kit, [helper.make_node("Softmax", ["x"], ["y"])])


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("softmax over rows", [helper.make_node("Softmax", ["x"], ["y"], axis=0)]),
        (
            "mean over rows",
            [
                helper.make_node("ReduceMean", ["x", "axes"], ["m"], keepdims=1),
                helper.make_node("Sub", ["x", "m"], ["y"]),
            ],
        ),
        (
            "int8 by the range of all rows",
            [
                helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
                helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
            ],
        ),
    ],
)
def test_a_model_that_mixes_rows_is_never_merged(kit, name, nodes):
    weights = {"axes": np.array([0])} if "mean" in name else None
    assert not independent(kit, nodes, weights=weights)
    made = servable(kit, nodes, weights=weights)
    assert probe.merged_rows(made, contract_of(made))[0] == 0


def test_a_fixed_batch_is_never_merged(kit):
    made = servable(kit, [helper.make_node("Neg", ["x"], ["y"])], shape=(2, 4), out=(2, 4))
    assert isinstance(probe.plan(made, contract_of(made), Statistics()), Direct)


def test_an_output_that_is_not_by_row_forbids_merging(kit):
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    made = servable(kit, nodes, out=())
    assert not contract_of(made).mergeable
    assert probe.merged_rows(made, contract_of(made))[0] == 0


def test_a_tiny_model_is_not_worth_a_handoff(kit):
    made = kit.linear()
    assert probe.merged_rows(made, contract_of(made))[0] == 0


@pytest.mark.slow
def test_a_model_bound_by_reading_its_weights_is_merged(kit):
    wide = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    made = servable(kit, nodes, shape=("N", 2048), out=("N", 2048), weights={"w": wide})
    runner = probe.plan(made, contract_of(made), Statistics())
    assert isinstance(runner, Merged)
    assert runner.merged_rows in probe.SIZES


def test_a_model_that_refuses_generated_values_is_served_unmerged(kit):
    nodes = [helper.make_node("Gather", ["table", "i"], ["y"])]
    data = kit.graph(
        nodes,
        [("i", TensorProto.INT64, ["N"])],
        [("y", FLOAT, ["N"])],
        {"table": np.zeros(1, np.float32)},  # index 1 is beyond it
    )
    made = kit.SessionServable(Session(data))
    assert probe.merged_rows(made, contract_of(made))[0] == 0


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        ({1: 1.0, 4: 1.2, 8: 2.1, 16: 4.3}, 8),  # 8 is within 5 % of the best rate, 4 is not
        ({1: 1.0, 4: 1.05, 8: 2.1, 16: 4.2}, 4),  # equal rates: the smallest
        ({1: 1.0, 4: 4.1, 8: 8.0, 16: 16.0}, 0),  # nothing gained
        ({1: 1.0, 4: 3.2, 8: 6.4, 16: 13.0}, 0),  # below the least gain
        ({1: 20e-6, 4: 25e-6, 8: 30e-6, 16: 40e-6}, 0),  # gained less than a handoff costs
        ({1: 1.0, 4: 1.5}, 4),  # time ran out before the larger sizes
    ],
)
def test_the_smallest_size_near_the_best_rate_is_taken_if_it_pays(seconds, size):
    assert probe.best_size(seconds) == size

"""Which tensors share a scale, which nodes compute on integers."""

import math

import pytest
from tests.quantize import nets

from triplane.unified_ir import nn, ops
from triplane.unified_ir.ops.row import IntegerForm
from triplane.unified_ir.ops.rows.movement.shapes import flatten_row
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.quantize import find_sites, freeze

FORMS = {
    row.name: row.integer_form
    for row in TABLE.values()
    if row.integer_form not in {None, IntegerForm.IN_PARTS}
}


class Between(nn.Cell):
    """conv, then something, then conv."""

    def __init__(self, middle, channels=4):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding="same")
        self.last = nn.Conv2d(channels, 2, 1)
        self.middle = middle

    def construct(self, x):
        return self.last(self.middle(self.first(x)))


MIDDLES = {
    "MaxPool": lambda y: ops.max_pool(y, 2),
    "Reshape": lambda y: y.reshape(-1, 4, 4, 16),
    "Transpose": lambda y: y.transpose(0, 1, 3, 2),
    "Unsqueeze": lambda y: ops.squeeze(ops.unsqueeze(y, 2), 2),
    "Squeeze": lambda y: ops.squeeze(ops.unsqueeze(y, 2), 2),
    "Flatten": lambda y: flatten_row(y).reshape(-1, 4, 8, 8),
    "Slice": lambda y: y[:, :, 1:, :],
    "Split": lambda y: ops.concat(ops.split(y, 2, axis=1)[::-1], axis=1),
    "Add": lambda y: y + y.transpose(0, 1, 3, 2),
    "Mul": lambda y: y * y.transpose(0, 1, 3, 2),
    "AveragePool": lambda y: ops.avg_pool(y, 2),
    "GlobalAveragePool": ops.global_average_pool,
    "Concat": lambda y: ops.concat([y, ops.max_pool(y, 3, stride=1, padding=1)], axis=1),
    "Sigmoid": ops.sigmoid,
    "LeakyRelu": lambda y: ops.leaky_relu(y, alpha=0.1),
    "Relu": ops.relu,
    "Clip": lambda y: ops.clip(y, 0.0, 6.0),
}


def sites_around(op, middle=None):
    cell = nets.shaken(Between(middle or MIDDLES[op], channels=8 if op == "Concat" else 4))
    frozen = freeze(nets.module_of(cell, nets.IMAGE), "predict")
    sites = find_sites(frozen)
    (node,) = [node for node in frozen.function.nodes if node.op.name == op]
    return sites, node


@pytest.mark.parametrize(
    "op", [op for op, kind in FORMS.items() if kind in {IntegerForm.COPY, IntegerForm.PART}]
)
def test_what_moves_elements_keeps_their_scale(op):
    sites, node = sites_around(op)
    for y in node.outputs:
        assert sites.root[y] is sites.root[node.inputs[0]]
    assert len(sites.roots) == (4 if op == "Split" else 3)


def test_a_part_that_nothing_in_integers_reads_is_not_rounded():
    sites, node = sites_around("Slice", lambda y: ops.sin(y[:, :, 1:, :]))
    assert node.outputs[0] not in sites.root


def test_a_clamp_of_one_half_leaves_the_other_half_alone():
    def middle(y):
        a, b = ops.split(y, 2, axis=1)
        return ops.concat([ops.relu(a), b], axis=1)

    sites, node = sites_around("Relu", middle)
    assert node not in sites.dropped


def test_a_product_with_a_number_is_the_same_integers_with_another_scale():
    sites, node = sites_around("Mul", lambda y: ops.sigmoid(y * 0.5))
    assert sites.scaled == {node: (node.inputs[0], 0.5)}


@pytest.mark.parametrize("factor", [-0.5, 0.0, 1e30])
def test_a_product_with_another_number_is_rounded(factor):
    sites, node = sites_around("Mul", lambda y: ops.sigmoid(y * factor))
    assert not sites.scaled
    assert sites.root[node.outputs[0]] is node.outputs[0]


def test_a_clamp_goes_into_the_rounding_of_a_product_with_a_number():
    sites, node = sites_around("Mul", lambda y: ops.sigmoid(ops.relu(y * 0.5)))
    assert not sites.scaled
    assert sites.clamps[node.outputs[0]] == math.inf


@pytest.mark.parametrize("op", [op for op, kind in FORMS.items() if kind is IntegerForm.MIX])
def test_what_makes_new_values_gets_a_scale_of_its_own(op):
    sites, node = sites_around(op)
    assert sites.root[node.outputs[0]] is node.outputs[0]
    assert all(v in sites.root for v in node.inputs)


@pytest.mark.parametrize("op", [op for op, kind in FORMS.items() if kind is IntegerForm.CLAMP])
def test_a_clamp_at_zero_vanishes_into_the_product(op):
    sites, node = sites_around(op)
    assert node in sites.dropped
    root = sites.root[node.outputs[0]]
    assert sites.clamps[root] == (6.0 if op == "Clip" else math.inf)


def test_a_softmax_between_products_stays_in_float_and_is_rounded_after():
    sites, node = sites_around("Softmax", lambda y: ops.softmax(y, axis=1))
    assert sites.root[node.outputs[0]] is node.outputs[0]
    assert node.inputs[0] in sites.root


def test_a_clip_not_at_zero_stays():
    sites, node = sites_around("Clip", lambda y: ops.clip(y, -1.0, 1.0))
    assert node not in sites.dropped


@pytest.mark.parametrize("op", FORMS)
def test_every_row_of_the_table_has_a_case_here_or_multiplies_by_weights(op):
    assert op in MIDDLES or FORMS[op] in {IntegerForm.PRODUCT, IntegerForm.RECURRENT}

"""Blocks that repeat: found where they are, wired alike, never two claims on one node."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.unified_ir import nn, ops
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.passes import repeats as module
from triplane.unified_ir.passes.occurrences import repeated
from triplane.unified_ir.passes.repeats import Listing, repeats


def layered(layers, block=60, kinds=12, seed=0):
    """Layers of equal random nodes, each fed by the one before and by parameters of its own."""
    draw = random.Random(seed)
    kinds_of = [(draw.randrange(kinds), draw.randrange(1, 3)) for _ in range(block)]
    wires = [[(draw.random() < 0.7, draw.random()) for _ in range(n - 1)] for _, n in kinds_of]
    labels, inputs, outputs, last = [], [], [], 0
    new = layers * 10 + 10
    for layer in range(layers):
        values = [last]
        for (kind, _), wired in zip(kinds_of, wires, strict=True):
            labels.append(kind)
            inside = [values[int(at * len(values))] for is_in, at in wired if is_in]
            outside = [layer * 10 + 1 + int(at * 9) for is_in, at in wired if not is_in]
            inputs.append([values[-1], *inside, *outside])
            outputs.append([new])
            values.append(new)
            new += 1
        last = values[-1]
    return Listing(labels, inputs, outputs, frozenset([last]))


def chain(labels):
    """Each node takes what the one before it gives."""
    n = len(labels)
    return Listing(labels, [[i] for i in range(n)], [[i + 1] for i in range(n)], frozenset([n]))


def test_runs_with_equal_hashes_and_other_labels_are_no_block(monkeypatch):
    monkeypatch.setattr(module, "_PRIME", 1)  # every hash is 0
    labels = [1, 2, 3, 4, 5] * 3 + [6, 7, 8, 9, 10] * 3
    for block in repeats(chain(labels)):
        assert len({tuple(labels[s : s + block.length]) for s in block.starts}) == 1


def test_layers_are_one_block():
    (block,) = repeats(layered(24))
    assert (block.length, block.starts) == (60, tuple(range(0, 24 * 60, 60)))
    assert block.outputs == ((59, 0),)
    assert block.saved_nodes == 23 * 60 - 24


def test_equal_labels_that_are_wired_otherwise_are_no_block():
    listing = chain("abcdabcd")
    assert [b.starts for b in repeats(listing)] == [(0, 4)]
    inputs = [list(taken) for taken in listing.inputs]
    inputs[6] = [4]  # the second c skips a node
    crossed = Listing(listing.labels, inputs, listing.outputs, listing.results)
    assert repeats(crossed) == ()


def test_one_value_taken_twice_is_not_two_values():
    same = Listing("abcdabcd", [[0, 0], [1], [2], [3], [4, 0], [5], [6], [7]],
                   [[i + 1] for i in range(8)], frozenset([8]))  # fmt: skip
    assert repeats(same) == ()


def test_an_absent_operand_is_not_a_value():
    absent = Listing("abcdabcd", [[0, -1], [1], [2], [3], [4, 0], [5], [6], [7]],
                     [[i + 1] for i in range(8)], frozenset([8]))  # fmt: skip
    assert repeats(absent) == ()


def test_a_node_without_a_label_is_in_no_block():
    labels = [None if c == "X" else c for c in "abXcdabXcdefghefgh"]
    found = repeats(chain(labels))
    assert [(b.length, b.starts) for b in found] == [(4, (10, 14))]


def test_what_one_occurrence_gives_to_the_outside_is_an_output_of_all():
    listing = chain("abcdabcdz")
    inputs = [*listing.inputs[:8], [8, 6]]
    (block,) = repeats(Listing(listing.labels, inputs, listing.outputs, listing.results))
    assert block.outputs == ((1, 0), (3, 0))


@given(st.text("abc", max_size=80), st.randoms(use_true_random=False))
def test_blocks_are_disjoint_equal_and_exactly_wired(labels, draw):
    n = len(labels)
    inputs = [[i - draw.randrange(min(i + 1, 3)), draw.randrange(i + 1)] for i in range(n)]
    listing = Listing(labels, inputs, [[i + 1] for i in range(n)], frozenset([n]))
    seen: set[int] = set()
    for block in repeats(listing):
        first, arguments = block.starts[0], block.arguments[0]
        for start, own in zip(block.starts, block.arguments, strict=True):
            nodes = range(start, start + block.length)
            assert not seen & {*nodes}
            seen |= {*nodes}
            assert labels[start : start + block.length] == labels[first : first + block.length]
            renamed = dict(zip(arguments, own, strict=True))
            renamed |= {first + i + 1: start + i + 1 for i in range(block.length)}
            for i in range(block.length):
                assert [renamed[v] for v in inputs[first + i]] == inputs[start + i]


@pytest.mark.deep
def test_a_million_nodes_take_seconds():
    listing = layered(17000)
    (*blocks,) = repeats(listing)
    assert sum(block.saved_nodes for block in blocks) > 0.99 * len(listing.labels)


class Stack(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(5)])

    def construct(self, x):
        for layer in self.layers:
            h = layer(x)
            x = ops.tanh(h) * ops.sigmoid(h) + x
        return x


def test_a_functions_repeats_are_json_with_nodes_and_edges():
    function = trace(Stack(), TensorSpec(("N", 4)))
    blocks = json.loads(json.dumps(repeated(function)))
    ((name, occurrences),) = blocks.items()
    assert name == "block_0"
    assert len(occurrences) == 5
    shapes = {tuple(op for _, op, _ in each["nodes"]) for each in occurrences}
    assert len(shapes) == 1
    (operators,) = shapes
    assert operators[-4:] == ("Tanh", "Sigmoid", "Mul", "Add")
    for each in occurrences:
        places = [place for place, _, _ in each["nodes"]]
        assert all(a in places and b in places and a < b for a, b in each["edges"])
        assert "test_repeats.py" in each["nodes"][-1][2]

"""Outlines: every computed node once, in its phase and scope; layers that hold every link."""

import re

import pytest
from tests.ir import graphs

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.drawing import outline as outlines
from triplane.unified_ir.cli.drawing.folding import MAX_CHILDREN, OPEN_BOXES
from triplane.unified_ir.cli.drawing.item import LANE, OUT
from triplane.unified_ir.cli.drawing.outline import outline
from triplane.unified_ir.cli.drawing.phases import MAX_DEPTH
from triplane.unified_ir.cli.drawing.placing import lines_of
from triplane.unified_ir.ir.graph import Function, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import TensorSpec

X = TensorSpec((2,))


def chain(scopes, names=("Relu",)):
    """A function of one node after another, in the scopes said."""
    values, nodes = [Value(X, "x")], []
    for i, scope in enumerate(scopes):
        y = Value(X)
        op = OpId("", names[i % len(names)], 14)
        nodes.append(Node(op, (values[-1],), (y,), meta=Meta(None, scope)))
        values.append(y)
    return Function("f", (values[0],), (values[-1],), ("y",), tuple(nodes))


def shape(item):
    """The names in an outline, as nested lists."""
    name = lines_of(item)[0]
    return [name, *map(shape, item.children)] if item.children else name


def visible(item):
    for child in item.children:
        yield child
        if child.opened:
            yield from visible(child)


def named(root, name):
    return next(i for i in root.walk() if i.name == name)


def computed(function):
    derived, places = set(function.params), []
    for i, node in enumerate(function.nodes):
        if derived & set(node.inputs):
            derived.update(node.outputs)
            places.append(i)
    return places


def test_every_computed_node_is_in_the_outline_once(function):
    root = outline(function, graphs.module().state)
    nodes = [i for i in root.atoms() if i.nodes]
    assert sorted(int(i.tip[0].split(":")[0].removeprefix("node ")) for i in nodes) == computed(
        function
    )
    drawn = [i.label for i in root.atoms() if i.kind == "result"]
    state = graphs.module().state
    assert sorted(drawn) == sorted(n for n in function.result_names if n not in state)


def test_bodies_of_nodes_are_boxes_in_them():
    function = graphs.with_gradients("scan")[0]
    root = outline(function)
    scan = next(i for i in root.atoms() if i.label.startswith("Scan"))
    (body,) = scan.children
    (region,) = next(n for n in function.nodes if n.op.name == "Scan").regions
    assert sum(i.nodes > 0 for i in body.atoms()) == len(computed(region))
    assert scan.nodes == 1 + sum(1 for _ in region.walk())


def check_links(root):
    """Every value goes from its node to each reader along links, row by row."""
    by_number = {item.number: item for item in root.walk()}
    reach = {}
    for group in root.walk():
        flat = [what for row in group.layers.rows for what in row]
        rows = [i for i, row in enumerate(group.layers.rows) for _ in row]
        assert {w for w in flat if w >= 0} == {c.number for c in group.children}
        assert all(rows[b] == rows[a] + 1 for a, b in group.layers.links)
        below: dict[int, list[int]] = {}
        for a, b in group.layers.links:
            below.setdefault(a, []).append(b)
        for place, what in enumerate(flat):
            if what == LANE:
                continue
            ahead, ends = list(below.get(place, ())), set()
            while ahead:
                at = ahead.pop()
                ahead += below.get(at, ()) if flat[at] == LANE else ()
                ends |= {flat[at]} - {LANE}
            reach[group, what] = ends
        for a, b in group.layers.back:
            reach[group, flat[a]].add(flat[b])
    for reader in by_number.values():
        for source in reader.sources:
            check_link(source, reader, reach)


def check_link(source, reader, reach):
    above, group = source, source.parent
    ancestors, passed = [], []
    at = reader
    while at.parent is not None:
        ancestors.append((at.parent, at))
        at = at.parent
    shared = dict(ancestors)
    while group not in shared:
        passed.append((group, above.number))
        above, group = group, group.parent
    assert shared[group].number in reach[group, above.number]
    # Links between phases are drawn between the phases alone.
    assert above.is_phase or all(OUT in reach[at] for at in passed)


def test_every_link_is_drawn_row_by_row(function):
    check_links(outline(function, graphs.module().state))


@pytest.mark.parametrize("seed", range(5))
def test_every_link_is_drawn_however_scopes_cross(random_function, seed):
    scopes = ("", "a", "a.b", "b", "b.0", "b.1", "grad.a", "grad.b.0")
    check_links(outline(random_function(120, scopes, seed=seed)))


def test_equal_functions_have_equal_outlines(random_function):
    pictures = []
    for _ in range(2):
        root = outline(random_function(300, ("", "a", "b.0")))
        pictures.append([(lines_of(i), i.layers, i.opened) for i in root.walk()])
    assert pictures[0] == pictures[1]


def test_a_training_step_stands_in_three_phases(tower):
    function, state = tower.entry("train_step"), tower.state
    root = outline(function, state)
    assert [i.name for i in root.children] == ["forward", "backward", "update"]
    assert all(i.opened for i in root.children)
    assert [i.upward for i in root.children] == [False, True, False]
    forward, backward, update = ({i for i in c.atoms() if i.nodes} for c in root.children)
    assert all(" in grad" not in " ".join(i.tip) for i in forward | update)
    learned = {n for n, t in state.items() if t.role == "parameter"}
    new = {n for i in update for line in i.tip for n in re.findall(r"the new (\S+)", line)}
    assert learned <= new
    assert any("the new" in line for i in update for line in i.tip)
    assert not any("the new" in line for i in forward | backward for line in i.tip)


def test_an_update_that_begins_before_the_forward_pass_stands_last(tower):
    function = tower.entry("train_step")
    count = Value(TensorSpec(()), "count")
    ahead = Node(OpId("", "Neg", 13), (count,), (Value(TensorSpec(())),))
    gradient = [n for n in function.nodes if n.meta.scope.startswith("grad")][-1]
    new = Value(gradient.outputs[0].type)
    scaled = Node(OpId("", "Mul", 14), (gradient.outputs[0], ahead.outputs[0]), (new,))
    changed = Function(
        "f",
        (count, *function.params),
        (*function.results, new),
        (*function.result_names, "count"),
        (ahead, *function.nodes, scaled),
    )
    state = {**tower.state, "count": next(iter(tower.state.values()))}
    root = outline(changed, state)
    assert [i.name for i in root.children] == ["forward", "backward", "update"]
    assert any(i.label == "Neg" for i in root.children[2].atoms())


def test_nodes_of_an_optimizer_stand_with_their_parameter(resnet):
    root = outline(resnet.entry("train_step"), resnet.state)
    update = root.children[2]
    names = {i.name for i in update.walk()}
    assert {"conv.weight", "blocks.0", "head"} <= names
    weight = named(update, "conv.weight")
    assert all("conv.weight" in " ".join(i.tip) for i in weight.atoms() if "Sub" in i.label)


def test_a_large_step_opens_as_a_small_picture_with_windows_and_types(resnet):
    root = outline(resnet.entry("train_step"), resnet.state)
    assert root.nodes > 5 * OPEN_BOXES
    boxes = [*visible(root)]
    assert 15 < len(boxes) <= OPEN_BOXES
    assert lines_of(named(root, "conv")) == ["conv", "Conv 3\u00d73, pad 1", "float32[N,16,32,32]"]
    block = named(root, "blocks.1")
    assert block.label.startswith("Conv 3\u00d73, BatchNormalization")
    assert block.detail == "float32[N,32,16,16]"
    strided = next(i for i in block.walk() if i.name == "conv1")
    assert strided.label == "Conv 3\u00d73, stride 2, pad 1"


def test_what_repeats_is_one_box_with_the_number_of_times(tower):
    root = outline(tower.entry("predict"), tower.state)
    x, repeat, y = root.children
    assert (x.kind, y.kind) == ("input", "result")
    assert lines_of(repeat)[0] == "layers.0 \u2026 layers.5 \u00d7 6"
    assert [shape(c)[1:] for c in repeat.children] == [[f"layers.{i}", "Tanh"] for i in range(6)]


def test_equal_scopes_in_a_row_are_one_box_and_unequal_ones_are_not():
    names = ("Relu", "Tanh")
    equal = outline(chain([f"block.{i // 2}" for i in range(6)], names))
    assert shape(equal.children[1])[0] == "block.0 \u2026 block.2 \u00d7 3"
    unequal = outline(
        chain([f"block.{i // 2}" for i in range(6)], (*names, *names, "Tanh", "Relu"))
    )
    assert [i.name for i in unequal.children[1:-1]] == ["block.0 \u2026 block.1", "block.2"]


def test_equal_operators_with_other_wires_do_not_repeat():
    function = chain([f"block.{i // 3}" for i in range(6)], ("Relu", "Tanh", "Add"))
    first, *rest = function.nodes
    last = rest[-1]
    skip = Node(last.op, (last.inputs[0], rest[2].outputs[0]), last.outputs, meta=last.meta)
    changed = function.with_(nodes=[first, *rest[:-1], skip])
    assert [i.name for i in outline(changed).children[1:-1]] == ["block.0", "block.1"]


def test_blocks_without_scopes_repeat_too():
    names = ("Relu", "Tanh", "Exp", "Neg", "Abs")
    root = outline(chain([""] * 50, names))
    repeat = root.children[1]
    assert repeat.times == 10
    assert [c.nodes for c in repeat.children] == [5] * 10


def test_a_scope_of_one_node_is_a_node_with_a_name():
    root = outline(chain(["/layer1/layer1.0/conv1/Conv", "/layer1/layer1.0/act/Relu"]))
    group = root.children[1]
    assert [i.name for i in group.walk() if i.is_node] == ["conv1.Conv", "act.Relu"]


def test_a_scope_that_is_entered_again_has_a_link_back():
    root = outline(chain(["cell", "", "cell"], ("Relu", "Tanh", "Exp")))
    assert len(root.layers.back) == 1


def test_groups_stay_small(random_function):
    root = outline(random_function(1500))
    assert max(len(i.children) for i in root.walk()) == MAX_CHILDREN
    assert len([*visible(root)]) <= OPEN_BOXES


def test_hostile_scopes_have_bounded_depth_and_names_bounded_length():
    scope = ".".join(["a" * 500] * 1000)
    root = outline(chain([scope, scope]))
    depth, item = 0, root.children[1]
    while item.children:
        depth, item = depth + 1, item.children[0]
    assert depth <= MAX_DEPTH + 1
    assert max(len(line) for i in root.walk() for line in (*lines_of(i), *i.tip)) <= 200


def test_too_many_nodes_are_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(outlines, "MAX_NODES", 3)
    with pytest.raises(
        InvalidInput, match="has 4 nodes, and a picture shows at most 3; use --text"
    ):
        outline(chain([""] * 4))


def test_many_inputs_and_results_stand_beside_their_nodes():
    inputs = tuple(Value(X, f"x{i}") for i in range(20))
    outputs = tuple(Value(X) for _ in inputs)
    nodes = tuple(
        Node(OpId("", "Relu", 14), (x,), (y,), meta=Meta(None, f"side{'ab'[i % 2]}"))
        for i, (x, y) in enumerate(zip(inputs, outputs, strict=True))
    )
    root = outline(Function("f", inputs, outputs, tuple(f"y{i}" for i in range(20)), nodes))
    assert [i.name for i in root.children] == ["sidea", "sideb"]


def test_a_function_of_nothing_has_an_outline():
    root = outline(Function("f", (Value(X, "x"),), (), (), ()))
    assert root.children == []

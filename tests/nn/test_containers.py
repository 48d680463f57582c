"""Cells in lists and dicts, and plain arrays and containers that hold what they should not."""

import copy
import pickle
import warnings

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import TensorSpec, mode, nn, ops, optim, trace, train

X = np.ones((4, 3), np.float32)


class Heads(nn.Cell):
    def __init__(self):
        super().__init__()
        self.body = nn.Dense(3, 5)
        self.heads = {"size": nn.Dense(5, 2), "age": nn.Dense(5, 1)}

    def construct(self, x):
        h = ops.tanh(self.body(x))
        return {name: head(h) for name, head in self.heads.items()}


def test_a_dict_of_cells_is_a_cell_dict_with_the_names_in_paths():
    net = Heads()
    assert type(net.heads).__name__ == "CellDict"
    assert list(net.heads) == ["size", "age"]
    names = ["heads.size.weight", "heads.size.bias", "heads.age.weight", "heads.age.bias"]
    assert list(net.state_dict())[2:] == names
    y = net(X)
    h = np.tanh(X @ net.body.weight.array.T + net.body.bias.array)
    for name in ("size", "age"):
        own = net.heads[name]
        np.testing.assert_allclose(
            y[name], h @ own.weight.array.T + own.bias.array, rtol=1e-5, atol=1e-6
        )
    scopes = {n.meta.scope for n in trace(net, TensorSpec(("N", 3))).nodes}
    assert {"heads.size", "heads.age"} <= scopes


def test_a_cell_dict_trains_saves_and_loads():
    def loss(output, target):
        return ((output["age"] - target) ** 2.0).mean() + (output["size"] ** 2.0).mean()

    net = Heads()
    before = net.state_dict()
    trainer = train.Trainer(net, loss=loss, optimizer=optim.SGD(0.1))
    trainer.fit((X, np.ones((4, 1), np.float32)), 1, progress="none")
    after = net.state_dict()
    assert all((before[k] != after[k]).any() for k in before)
    other = Heads()
    other.load(after)
    np.testing.assert_array_equal(other(X)["age"], net(X)["age"])


def test_a_cell_dict_is_a_mapping_of_names_to_cells():
    first, second = nn.ReLU(), nn.Tanh()
    cells = nn.CellDict([("a", first)])
    cells["b"] = second
    cells.update({"c": nn.Dense(1, 1)})
    assert (len(cells), "b" in cells, "d" in cells) == (3, True, False)
    assert (list(cells.keys()), cells.b) == (["a", "b", "c"], second)
    assert list(cells.values())[:2] == [first, second]
    assert dict(cells.items())["a"] is first
    del cells["a"]
    assert list(cells) == ["b", "c"]
    assert list(cells.parameters()) == ["c.weight", "c.bias"]
    for other in (copy.deepcopy(cells), pickle.loads(pickle.dumps(cells))):
        assert list(other.parameters()) == ["c.weight", "c.bias"]


@pytest.mark.parametrize("key", ["a.b", "", 3])
def test_a_key_that_cannot_be_a_part_of_a_path_is_refused(key):
    with pytest.raises(InvalidInput, match="names without a dot"):
        nn.CellDict({key: nn.ReLU()})
    with pytest.raises(InvalidInput, match="holds cells"):
        nn.CellDict({"a": np.ones(3)})  # type: ignore[arg-type]


def test_a_missing_name_is_answered_with_the_nearest():
    cells = nn.CellDict({"encoder": nn.ReLU()})
    with pytest.raises(NotFound, match="there are encoder; did you mean 'encoder'"):
        _ = cells["encodr"]
    with pytest.raises(NotFound, match="no cell 'decoder'"):
        del cells["decoder"]


def test_a_cell_list_grows():
    cells = nn.CellList([nn.Dense(1, 2)])
    cells.append(nn.Dense(2, 3))
    assert list(cells.parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(InvalidInput, match="may only hold cells"):
        cells.append(np.ones(3))  # type: ignore[arg-type]


class Hidden(nn.Cell):
    def __init__(self, wrap, use):
        super().__init__()
        self.plain = []  # so that what is assigned below is found where it is
        self.plain, self.use = wrap(nn.Dense(3, 2)), use

    def construct(self, x):
        return self.use(self.plain)(x)


# fmt: off
HIDDEN = {
    "nested lists": (lambda c: [[c]], lambda p: p[0][0], "list"),
    "numbers as keys": (lambda c: {1: c}, lambda p: p[1], "dict"),
    "pairs": (lambda c: [(c, "relu")], lambda p: p[0][0], "list"),
    "lists in a dict": (lambda c: {"a": [c]}, lambda p: p["a"][0], "dict"),
    "a parameter": (lambda c: [c.weight], lambda p: lambda x: x @ p[0].__tensor__().T, "list"),
}
# fmt: on


@pytest.mark.parametrize("name", HIDDEN)
def test_a_plain_container_that_holds_cells_is_named(name):
    wrap, use, kind = HIDDEN[name]
    with pytest.raises(InvalidInput, match=rf"Hidden\.plain is a plain {kind}.*CellDict"):
        Hidden(wrap, use)(X)


def test_a_list_that_grew_after_its_assignment_is_named():
    class Grown(nn.Cell):
        def __init__(self):
            super().__init__()
            self.blocks = []
            self.blocks.append(nn.Dense(3, 2))

        def construct(self, x):
            return self.blocks[0](x)

    with pytest.raises(InvalidInput, match=r"Grown\.blocks is a plain list.*CellList"):
        Grown()(X)


def with_array(array):
    class Weighted(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = array
            self.unused = np.ones(3)
            self.index = np.arange(2)

        def construct(self, x):
            return self._product(x)[:, self.index]

        def _product(self, x):
            return x @ self.w.T

    return Weighted


def test_a_plain_array_as_weight_is_warned_of_once():
    cell = with_array(np.ones((2, 3)))
    with pytest.warns(UserWarning, match=r"Weighted\.w is a plain array.*nn\.Parameter") as seen:
        assert cell()(X).tolist() == [[3.0, 3.0]] * 4
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cell()(X[:2])
        with mode("eager"):
            cell()(X)


def test_a_constant_that_says_so_is_not_warned_of():
    array = np.ones((2, 3))
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_array(array)()(X).shape == (4, 2)

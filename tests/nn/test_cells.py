"""What every cell can do: be frozen, told as a table, taken apart and put together."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data, nn, ops, optim, train
from triplane.unified_ir.ir import TensorSpec


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Dense(4, 10)

    def construct(self, x):
        return self.head(ops.relu(self.norm(self.conv(x))).mean((2, 3)))


def trained(net):
    loss, optimizer = nn.SoftmaxCrossEntropy(), optim.SGD(0.1)
    before = net.state_dict()
    made = train.Trainer(net, loss=loss, optimizer=optimizer)
    made.fit(data.digits().take(64), epochs=1, progress="none")
    after = net.state_dict()
    return {name for name in before if (before[name] != after[name]).any()}


def test_what_is_frozen_stays_and_what_is_not_learns():
    statistics = {"norm.running_mean", "norm.running_var"}
    learnt = {"head.weight", "head.bias", "norm.weight", "norm.bias"}
    assert trained(Net().freeze("conv.*")) == learnt | statistics
    assert trained(Net().freeze().unfreeze("head.bias")) == {"head.bias"} | statistics


def test_a_pattern_that_fits_nothing_is_told_what_there_is():
    with pytest.raises(InvalidInput, match=r"matches 'cone.*'; there are conv.weight, conv.bias"):
        Net().freeze("cone.*")
    with pytest.raises(InvalidInput, match=r"matches 'norm.running_mean'"):
        Net().freeze("norm.running_mean")


def test_a_state_dict_is_a_copy_that_loads():
    a, b = Net(), Net()
    state = a.state_dict()
    b.load(state)
    state["conv.bias"][:] = 7.0
    assert (a.parameters()["conv.bias"].array != 7.0).all()
    x = data.digits().x[:3]
    np.testing.assert_array_equal(a.eval()(x), b.eval()(x))


def test_a_summary_has_a_line_for_each_part():
    lines = nn.summary(Net(), TensorSpec(("N", 1, 8, 8))).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert table["(whole)"] == ["Net", "float32[N,10]", "98", "8"]
    assert table["conv"] == ["Conv2d", "float32[N,4,8,8]", "40", "0"]
    assert table["norm"] == ["BatchNorm2d", "float32[N,4,8,8]", "8", "8"]
    assert table["head"] == ["Dense", "float32[N,10]", "50", "0"]
    assert lines[-1] == "98 parameters, 98 of them trainable; 8 elements of buffers"


def test_a_row_of_padding_is_zero_and_stays():
    table = nn.Embedding(5, 3, padding=2)
    ids = np.array([[2, 1], [2, 2]])
    assert (table(ids)[ids == 2] == 0).all()

    class Words(nn.Cell):
        def __init__(self):
            super().__init__()
            self.words, self.head = table, nn.Dense(3, 2)

        def construct(self, x):
            return self.head(self.words(x).mean((1,)))

    trainer = train.Trainer(Words(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.1))
    trainer.fit((ids, np.array([0, 1])), epochs=3, progress="none")
    assert (table.parameters()["weight"].array[2] == 0).all()
    with pytest.raises(InvalidInput, match=r"ids 0..4, got 5"):
        nn.Embedding(5, 3, padding=5)


def rng():
    return np.random.Generator(np.random.Philox(3))


def test_a_truncated_normal_keeps_within_its_bounds():
    drawn = nn.TruncatedNormal(0.5, within=1.5)((400, 50), rng())
    assert np.abs(drawn).max() <= 0.75
    assert abs(drawn.mean()) < 0.01
    assert 0.3 < drawn.std() < 0.45


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 2, 3, 1)])
def test_an_orthogonal_weight_keeps_lengths(shape):
    made = nn.Orthogonal(2.0)(shape, rng())
    matrix = made.reshape(shape[0], -1).astype(np.float64)
    small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(small, 4.0 * np.eye(len(small)), atol=1e-5)


def test_eye_is_for_matrices():
    np.testing.assert_array_equal(nn.Eye()((2, 3), rng()), np.eye(2, 3))
    with pytest.raises(InvalidInput, match="matrices"):
        nn.Eye()((2, 3, 4), rng())


def test_state_that_does_not_fit_names_what_is_missing_and_what_is_unexpected():
    state = Net().state_dict()
    state["head.scale"] = state.pop("head.bias")
    with pytest.raises(
        InvalidInput,
        match=r"fit Net\n  missing, 1 of 8: head\.bias\n  unexpected, 1: head\.scale \(for head",
    ):
        Net().load(state)
    with pytest.raises(InvalidInput, match=r"fit Net\n  unexpected, 1: head\.scale$"):
        Net().load(state, strict=False)
    del state["head.scale"]
    with pytest.raises(InvalidInput, match=r"8: head\.bias\n  strict=False loads a part"):
        Net().load(state)
    with pytest.raises(InvalidInput, match=r"unexpected, 10: x0, x1, x2.* and 2 more$"):
        Net().load({f"x{i}": np.zeros(1) for i in range(10)}, strict=False)


class Parts(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.pool = nn.MaxPool2d(2)
        self.rnn = nn.LSTM(16, 8)
        self.layer = nn.LayerNorm(16)

    def construct(self, x):
        y = self.layer(self.drop(self.norm(self.dense(x))))
        states = self.rnn(y.reshape(-1, 2, 16))
        return states[0]


@pytest.mark.parametrize("rows", [4, "N"])
def test_a_summary_tells_what_each_part_gives_and_not_what_its_state_becomes(rows):
    class Nested(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(6, 16)
            self.body = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))
            self.pool = nn.MaxPool2d(2)
            self.layer = nn.LayerNorm(16)
            self.twice = nn.Dropout(0.5)

        def construct(self, x):
            y = self.layer(self.twice(self.body(self.dense(x))))
            return self.twice(y) + x.shape[0]

    lines = nn.summary(Nested(), TensorSpec((rows, 6))).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    gives = f"float32[{rows},16]"
    assert table["(whole)"][1] == gives
    assert table["dense"] == ["Dense", gives, "112", "0"]
    assert table["body"] == ["Sequential", gives, "32", "34"]
    assert table["body.0"] == ["BatchNorm1d", gives, "32", "32"]
    assert table["body.1"] == ["Dropout", gives, "0", "2"]
    assert table["twice"] == ["Dropout", gives, "0", "2"]
    assert table["layer"][1] == gives
    assert table["pool"] == ["MaxPool2d", "0", "0"]


def test_a_summary_is_a_method_that_takes_arrays_or_nothing():
    net = Net()
    assert net.summary(TensorSpec(("N", 1, 8, 8))) == nn.summary(net, TensorSpec(("N", 1, 8, 8)))
    by_array = net.summary(np.zeros((3, 1, 8, 8)))  # float64, as in a call
    assert "float32[3,4,8,8]" in by_array
    without = net.summary()
    assert "float32" not in without
    assert without.splitlines()[-1] == by_array.splitlines()[-1]


@pytest.mark.parametrize("name", ["summary", "load", "train", "construct", "own"])
def test_state_that_an_attribute_of_the_class_would_hide_is_refused(name):
    class Owner(nn.Cell):
        own = None

    for value in (nn.Dense(1, 1), nn.Parameter(np.zeros(1)), [nn.Dense(1, 1)]):
        with pytest.raises(InvalidInput, match=f"Owner has an attribute '{name}' of its class"):
            setattr(Owner(), name, value)


def test_a_summary_shows_the_first_output_of_recurrent_parts():
    lines = nn.summary(Parts(), TensorSpec((4, 6))).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert table["rnn"][1] == "float32[2,2,8]"


def test_a_summary_counts_neither_keys_nor_statistics_as_parameters():
    lines = nn.summary(Parts(), TensorSpec((4, 6))).splitlines()
    assert lines[0].split() == ["path", "cell", "gives", "parameters", "buffers"]
    net = Parts()
    learnt = sum(p.array.size for p in net.parameters().values() if p.trainable)
    assert (
        lines[-1] == f"{learnt:,} parameters, {learnt:,} of them trainable; 34 elements of buffers"
    )


def test_load_takes_a_dict():
    kinds: list[Any] = [nn.Dense(3, 1), "weights.npz", None]
    for state in kinds:
        with pytest.raises(InvalidInput, match=r"load takes a dict of arrays by path, got"):
            nn.Dense(3, 1).load(state)


def test_a_cell_that_holds_an_operator_is_copied_and_pickled():
    class Holds(nn.Cell):
        def __init__(self):
            super().__init__()
            self.activation = ops.tanh

    assert copy.deepcopy(Holds()).activation is ops.tanh
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=ops.gelu, p_drop=0.0)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(other(x), layer(x))


def test_a_summary_of_a_shape_says_what_it_takes():
    with pytest.raises(InvalidInput, match=r"got \(4, 8\): TensorSpec\(\(4, 8\)\)\?"):
        nn.Dense(8, 3).summary((4, 8))


class Owner(nn.Cell):
    part: nn.Cell

    def __init__(self):
        super().__init__()
        self.part = nn.Dense(2, 2)


@pytest.mark.parametrize("value", [lambda o: o, lambda o: [o], nn.Sequential])
def test_a_cell_is_no_part_of_itself(value):
    """Its parameters would have no end: each use would be a RecursionError."""
    owner = Owner()
    with pytest.raises(InvalidInput, match=r"Owner would be a part of itself through 'part'"):
        owner.part = value(owner)
    assert list(owner.parameters()) == ["part.weight", "part.bias"]


def test_a_part_with_an_attribute_for_its_owner_says_to_keep_a_weak_reference():
    class Part(nn.Cell):
        def __init__(self, owner):
            super().__init__()
            self.owner = owner

    owner = Owner()
    with pytest.raises(InvalidInput, match="if a part needs its owner"):
        owner.part = Part(owner)

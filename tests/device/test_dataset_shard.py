"""Columns and classes of a device's data, by the names and numbers of each plan."""

import json
from functools import cache

import numpy as np
import pytest

from triplane.device.dataset_shard import shard_for
from triplane.device.samples import shard_of
from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.federated.algorithms import Hyper, plan_of
from triplane.unified_ir.federated.core.learn import EVALUATE
from triplane.unified_ir.runtime import Plan, TensorInfo


class TwoInputs(nn.Cell):
    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Dense(1, 3), nn.Dense(2, 3)

    def construct(self, near, far):
        return self.near(near) + self.far(far)


class Letters(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Dense(3, 4)

    def construct(self, letters):
        return self.head(self.table(letters))


class Signatures:
    """The part of a plan that `shard_for` uses."""

    entries: tuple[str, ...] = (EVALUATE,)
    labels: tuple[str, ...] = ()

    def __init__(self, names):
        self.names = names

    def signature(self, _entry):
        return [TensorInfo(name, "float32", ("N",)) for name in self.names], []


def plan(folder, cell, dataset):
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.fit(dataset, epochs=1, batch_size=4)
    module = trainer.export(("predict", "evaluate", "loss"))
    plan_of(module, "fedavg", Hyper(lr=0.1), folder / "a.plan")
    return Plan.load(folder / "a.plan")


@cache
def table():
    rng = np.random.default_rng(0)
    columns = {"near": rng.random((12, 1)), "far": rng.random((12, 2)), "does": np.arange(12) % 3}
    columns = {k: x.astype(np.float32) if x.ndim > 1 else x for k, x in columns.items()}
    return data.arrays(columns).roles(("near", "far"), "does").named(("sit", "walk", "run"))


def in_csv(path, header, does):
    rows = [f"{k},{k + 0.25},{k + 0.5},{name}" for k, name in enumerate(does)]
    path.write_text("\n".join([header, *rows]))
    return path


def test_classes_get_the_numbers_of_the_plan_and_columns_its_names(tmp_path):
    """A device that never runs or sits has numbers of its own for what it does."""
    of_model = plan(tmp_path, TwoInputs(), table())
    path = in_csv(tmp_path / "a.csv", "p,q,r,name", ["walk", "run"] * 5)
    own = shard_of(path, x=["p:1", "right=q,r:2"], y=["name"], held_out=0.2)
    assert set(own.train["y"].tolist()) == {0, 1}
    fitted = shard_for(of_model, own)
    names = [tensor.name for tensor in of_model.signature("evaluate")[0]]
    assert list(fitted.train) == list(fitted.held_out) == names
    assert names[:2] == ["near", "far"]
    for part in (fitted.train, fitted.held_out):
        assert (part[names[0]][:, 0] + 0.25 == part[names[1]][:, 0]).all()
        assert (part[names[2]] == 1 + part[names[0]][:, 0].astype(int) % 2).all()
    assert fitted.examples == own.examples


def test_a_column_with_the_name_of_an_input_is_that_input(tmp_path):
    of_model = plan(tmp_path, TwoInputs(), table())
    path = in_csv(tmp_path / "a.csv", "p,q,r,name", ["walk", "run"] * 5)
    own = shard_of(path, x=["far=q,r:2", "near=p:1"], y=["name"], held_out=0)
    fitted = shard_for(of_model, own)
    assert (fitted.train["far"][:, 0] == fitted.train["near"][:, 0] + 0.25).all()


def test_characters_get_the_numbers_of_the_text_that_the_model_learned_from(tmp_path):
    (tmp_path / "all.txt").write_text("abcd" * 20)
    (tmp_path / "own.txt").write_text("bd" * 20)
    of_model = plan(tmp_path, Letters(), data.load(tmp_path / "all.txt", window=4))
    own = shard_of(tmp_path / "own.txt", form={"window": 4}, held_out=0.2)
    fitted = shard_for(of_model, own)
    x, y = fitted.train.values()
    assert (x[0].tolist(), y[0].tolist()) == ([1, 3, 1, 3], [3, 1, 3, 1])
    assert of_model.run("evaluate", fitted.held_out).keys() >= {"loss"}


def test_a_class_that_the_model_does_not_know_is_refused_with_its_classes(tmp_path):
    of_model = plan(tmp_path, TwoInputs(), table())
    path = in_csv(tmp_path / "a.csv", "p,q,r,name", ["walk", "swim"] * 5)
    own = shard_of(path, x=["near=p:1", "far=q,r:2"], y=["name"])
    with pytest.raises(InvalidInput, match=r"a.csv has the class 'swim', but .* sit, walk, run"):
        shard_for(of_model, own)


def test_names_of_classes_need_a_model_or_a_pipeline_that_numbers_them(tmp_path):
    of_model = plan(tmp_path, TwoInputs(), table().named(()))
    path = in_csv(tmp_path / "a.csv", "near,q,r,does", ["sit", "run"] * 5)
    own = shard_of(path, x=["near:1", "far=q,r:2"], y=["does"])
    with pytest.raises(InvalidInput, match=r"a.csv names its classes \('run', 'sit', ...\), but"):
        shard_for(of_model, own)
    pipeline = {
        "format": 1,
        "source": {"kind": "csv", "path": "a.csv"},
        "steps": [
            {"step": "reshape", "column": "near", "shape": [1]},
            {"step": "stack", "columns": ["q", "r"], "into": "far"},
            {"step": "lookup", "column": "does", "values": ["walk", "sit", "run"]},
        ],
        "inputs": ["near", "far"],
        "targets": ["does"],
    }
    (tmp_path / "a.json").write_text(json.dumps(pipeline))
    stated = shard_for(of_model, shard_of(tmp_path / "a.json", held_out=0))
    assert list(stated.train.values())[2].tolist() == [1, 2] * 5


def test_arrays_of_the_application_keep_their_names(tmp_path):
    of_model = plan(tmp_path, TwoInputs(), table())
    own = shard_of({"a": np.zeros((9, 1)), "b": np.zeros((9, 2)), "c": np.zeros(9)})
    assert shard_for(of_model, own) is own


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (["x", "y"], ["z"], {"near": "x", "far": "y", "y": "z"}),
        (["y", "z"], ["x"], {"near": "y", "far": "z", "y": "x"}),
    ],
)
def test_columns_called_x_and_y_keep_their_roles(tmp_path, x, y, expected):
    """Coordinates, for example: the column y is an input, and the model's target is called y."""
    columns = {"x": 0, "y": 1, "z": 2}
    rows = [",".join(columns), *(["0,1,2"] * 10)]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    names = tuple(expected)
    shard = shard_for(Signatures(names), shard_of(tmp_path / "a.csv", x=x, y=y))
    assert {k: int(v[0]) for k, v in shard.train.items()} == {
        name: columns[own] for name, own in expected.items()
    }

# mypy: disable-error-code="union-attr,arg-type"
"""What a push uploads as samples: an .npz as it is, other data as the .npz that the cloud reads."""

import numpy as np
import pytest

from triplane.cloud.cli.sample_files import sample_files
from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.convert.samples import read_labelled, read_samples

NONE = {"x": (), "y": (), "pixels": None, "window": None, "query": None, "size": None}
NAMES = ("run", "sit", "walk")


@pytest.fixture(scope="module")
def module():
    trainer = train.Trainer(
        nn.Dense(2, 3), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1), labels=NAMES
    )
    trainer.prepare(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate"))


def test_a_table_becomes_arrays_by_the_names_of_the_model(module, tmp_path):
    (tmp_path / "a.csv").write_text("ax,ay,does\n1,2,walk\n3,4,run\n5,6,walk\n")
    choice = {**NONE, "x": ("a*",), "y": ("does",)}
    contents = []
    for _ in range(2):
        source = str(tmp_path / "a.csv")
        with sample_files(module, "predict", source, source, choice) as files:
            calibration = read_samples(files.calibration, module.inputs("predict"))
            x, y = read_labelled(files.evaluation, module.inputs("predict"))
            contents.append([path.read_bytes() for path in (files.calibration, files.evaluation)])
            folder = files.calibration.parent
        assert not folder.exists()
    # An interrupted upload continues only if the same samples have the same digest.
    assert contents[0] == contents[1]
    (name,) = [p.name for p in module.inputs("predict")]
    assert calibration[name].tolist() == x[name].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert y.tolist() == [2, 0, 2]


def test_an_input_may_have_the_name_of_an_argument_of_numpy(tmp_path):
    class Net(nn.Cell):
        def construct(self, file):
            return file * 2.0

    trainer = train.Trainer(Net(), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")
    source, module = str(tmp_path / "a.csv"), trainer.export(("predict",))
    with sample_files(module, "predict", source, None, {**NONE, "x": ("a,b",)}) as files:
        x = read_samples(files.calibration, module.inputs("predict"))["file"]
    assert x.tolist() == [[1, 2], [3, 4]]


def test_characters_have_the_numbers_of_the_model(tmp_path):
    (tmp_path / "all.txt").write_text("abcd" * 9)
    (tmp_path / "own.txt").write_text("bd" * 9)
    net = nn.Sequential(nn.Embedding(4, 3), nn.Dense(3, 4))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.fit(data.load(tmp_path / "all.txt", window=4), 1, progress="none")
    module = trainer.export(("predict", "evaluate"))
    source = str(tmp_path / "own.txt")
    with sample_files(module, "predict", source, None, {**NONE, "window": 4}) as files:
        (x,) = read_samples(files.calibration, module.inputs("predict")).values()
        assert files.evaluation is None
    assert x[0].tolist() == [1, 3, 1, 3]


def test_an_npz_is_sent_as_it_is_unless_its_columns_are_chosen(module, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((3, 2), np.float32), y=np.zeros(3, int), z=np.ones((3, 2)))
    with sample_files(module, "predict", str(path), str(path), NONE) as files:
        assert files.calibration == files.evaluation == path
    with sample_files(module, "predict", str(path), None, {**NONE, "x": ("z",)}) as files:
        (x,) = read_samples(files.calibration, module.inputs("predict")).values()
        assert (x == 1).all()


@pytest.mark.parametrize(
    ("source", "family"), [("none.npz", NotFound), ("none.csv", NotFound), ("a.pdf", InvalidInput)]
)
def test_what_cannot_be_read_is_refused_before_the_upload(module, tmp_path, source, family):
    (tmp_path / "a.pdf").write_text("")
    with (
        pytest.raises(family, match=source),
        sample_files(module, "predict", str(tmp_path / source), None, NONE),
    ):
        raise AssertionError


def test_an_input_with_the_name_of_the_classes_is_refused(tmp_path):
    class OfY(nn.Cell):
        def __init__(self):
            super().__init__()
            self.head = nn.Dense(2, 3)

        def construct(self, y):
            return self.head(y)

    trainer = train.Trainer(OfY(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
    (tmp_path / "a.csv").write_text("ax,ay,does\n1,2,2\n3,4,0\n")
    choice = {**NONE, "x": ("a*",), "y": ("does",)}
    with (
        pytest.raises(InvalidInput, match="'y', which is an input"),
        sample_files(trainer.export(("predict",)), "predict", None, f"{tmp_path}/a.csv", choice),
    ):
        raise AssertionError

"""ONNX files of entries: checked, compared, and the same in a runtime that knows only ONNX."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.unified_ir import TensorSpec, export_onnx, import_onnx, nn, ops, optim, train
from triplane.unified_ir.engines import onnx_file
from triplane.unified_ir.ir import Module
from triplane.unified_ir.onnx import serialize

SPECIES = ("ant", "bee", "cat")


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Dense(4, 3)

    def construct(self, x):
        return self.head(ops.relu(self.norm(self.conv(x))).mean([2, 3]))


def samples(n: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((n, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, n)


@pytest.fixture(scope="module")
def trainer() -> train.Trainer:
    nn.seed(1)
    trainer = train.Trainer(
        Net(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01), labels=SPECIES
    )
    trainer.fit(samples(), 1, batch_size=16, progress="none")
    return trainer


@pytest.fixture(scope="module")
def module(trainer: train.Trainer) -> Module:
    return trainer.export(("predict", "evaluate", "train_step", "gradients"))


def test_the_file_computes_what_the_trainer_predicts(
    trainer: train.Trainer, tmp_path: Path
) -> None:
    path = tmp_path / "net.onnx"
    file = trainer.export_onnx(path)
    onnx.checker.check_model(str(path), full_check=True)
    session = ort.InferenceSession(path)
    x, _ = samples(5)
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, trainer.predict(x), rtol=1e-4, atol=1e-5)
    assert session.get_inputs()[0].shape == ["N", 1, 6, 6]
    properties = session.get_modelmeta().custom_metadata_map
    assert json.loads(properties["labels"]) == list(SPECIES)
    assert properties["triplane.entry"] == "predict"
    assert (file.data, file.opset, file.state) == (None, 21, ())
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.parametrize("opset", [17, 20, 26])
def test_opsets_are_declared_as_asked(module: Module, tmp_path: Path, opset: int) -> None:
    path = tmp_path / "net.onnx"
    export_onnx(module, path, opset=opset)
    assert [o.version for o in onnx.load(path).opset_import if not o.domain] == [opset]
    x, _ = samples(4)
    (y,) = ort.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(y, module.predict(x), rtol=1e-4, atol=1e-5)


def test_an_opset_beyond_the_range_is_refused(module: Module, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="opsets 17 to 26, got 12"):
        export_onnx(module, tmp_path / "net.onnx", opset=12)
    assert not list(tmp_path.iterdir())


def test_a_fixed_batch_is_in_inputs_and_outputs(module: Module, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    file = export_onnx(module, path, batch=2)
    assert file.inputs[0].shape == (2, 1, 6, 6)
    assert file.outputs[0].shape == (2, 3)
    assert "N" not in str(onnx.load(path).graph.input)


def test_steps_of_training_repeat_those_of_the_trainer(
    trainer: train.Trainer, module: Module, tmp_path: Path
) -> None:
    path = tmp_path / "step.onnx"
    file = export_onnx(module, path, entry="train_step")
    session = ort.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == ["x", "y"]
    assert {i.name for i in session.get_overridable_initializers()} == set(file.state)
    assert "optimizer.step" in file.state
    x, y = samples()
    feeds, losses = {"x": x, "y": y}, []
    names = [o.name for o in session.get_outputs()]
    for _ in range(3):
        results = dict(zip(names, session.run(None, feeds), strict=True))
        losses.append(float(results["loss"]))
        feeds |= {n.removesuffix(":next"): v for n, v in results.items() if n.endswith(":next")}
    twin = train.Trainer(Net(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01))
    twin.prepare(x, y)
    trainer.save(tmp_path / "run")
    twin.load(tmp_path / "run")
    wanted = [twin.fit((x, y), 1, batch_size=32, progress="none").last["loss"] for _ in range(3)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert losses[2] < losses[0]


def test_every_entry_exports(module: Module, tmp_path: Path) -> None:
    for entry in module.entries:
        file = export_onnx(module, tmp_path / f"{entry}.onnx", entry=entry)
        assert file.difference < 1e-3


def test_weights_beyond_the_limit_are_beside_the_file(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "MAX_INSIDE_BYTES", 100)
    path = tmp_path / "net.onnx"
    for entry in ("predict", "train_step"):
        file = export_onnx(module, path, entry=entry)
        assert file.data == tmp_path / "net.onnx.data"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "net.onnx.data"]
        assert file.size_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())
        onnx.checker.check_model(str(path), full_check=True)
    export_onnx(module, path)
    x, _ = samples(3)
    (y,) = ort.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(y, module.predict(x), rtol=1e-4, atol=1e-5)


def test_a_file_that_computes_something_else_is_not_kept(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"older")
    whole = serialize

    def wrong(model: onnx.ModelProto) -> bytes:
        for tensor in model.graph.initializer:
            if tensor.name == "head.bias":
                array = onnx.numpy_helper.to_array(tensor) + 1
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        return whole(model)

    monkeypatch.setattr(onnx_file, "serialize", wrong)
    with pytest.raises(Conflict, match="'logits' of the exported predict differs"):
        export_onnx(module, path)
    assert path.read_bytes() == b"older"
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


def test_a_place_that_cannot_hold_the_file_is_refused(module: Module, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"could not write .*: No such file"):
        export_onnx(module, tmp_path / "none" / "net.onnx")
    with pytest.raises(InvalidInput, match="cannot become a file"):
        export_onnx(module, tmp_path)


def test_an_unknown_entry_is_refused(module: Module, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no entry 'serve'"):
        export_onnx(module, tmp_path / "net.onnx", entry="serve")


def test_an_imported_model_exports_and_imports_again(module: Module, tmp_path: Path) -> None:
    export_onnx(module, tmp_path / "a.onnx")
    again = import_onnx(tmp_path / "a.onnx")
    assert json.loads(again.meta["labels"]) == list(SPECIES)
    export_onnx(again, tmp_path / "b.onnx")
    x, _ = samples(3)
    np.testing.assert_allclose(again.predict(x), module.predict(x), rtol=1e-4, atol=1e-5)


def test_open_sizes_are_tried_until_the_model_accepts_them(tmp_path: Path) -> None:
    class Deep(nn.Cell):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 2, 50)

        def construct(self, x):
            return self.conv(x).mean([2])

    trainer = train.Trainer(Deep(), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(TensorSpec(("N", 1, "T")), TensorSpec(("N", 2)))
    file = trainer.export_onnx(tmp_path / "deep.onnx")
    assert file.inputs[0].shape == ("N", 1, "T")


def test_personal_state_has_its_initial_value(tmp_path: Path) -> None:
    class Own(nn.Cell):
        def __init__(self):
            super().__init__()
            self.shift = nn.Personal(np.full(2, 3.0))

        def construct(self, x):
            return x + self.shift

    cell = Own()
    trainer = train.Trainer(cell, loss=nn.MSE(), optimizer=optim.SGD(0.1))
    x = np.zeros((2, 2), np.float32)
    trainer.fit((x, x), 2, progress="none")
    assert not np.array_equal(cell.shift.array, [3, 3])
    trainer.export_onnx(tmp_path / "own.onnx")
    (y,) = ort.InferenceSession(tmp_path / "own.onnx").run(None, {"x": x})
    np.testing.assert_array_equal(y, x + 3)

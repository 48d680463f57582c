"""Folders of images and of texts, in every verb that takes a model: its size, its groups."""

import json

import numpy as np
import pytest
from PIL import Image

from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.cli import shell


def run(capsys, *argv):
    code = shell.run([*map(str, argv), "--json"])
    out, error = capsys.readouterr()
    assert code == 0, out + error
    return json.loads(out)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Dark and light photos of two persons, in sizes of their own, and a model of 3 x 8 x 8."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for k in range(24):
        person, kind = "ab"[k % 2], ("dark", "light")[k // 2 % 2]
        pixels = rng.integers(0, 90, (*rng.integers(9, 20, 2), 3)) + 150 * (kind == "light")
        path = folder / "photos" / person / kind
        path.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels.astype(np.uint8))
        (image.convert("L") if k == 5 else image).save(path / f"{k:02}.png")
    nn.seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Dense(192, 2))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.02))
    trainer.fit(data.load(folder / "photos", size=(3, 8, 8)), 2, progress="none")
    trainer.export(("predict", "evaluate", "loss")).save(folder / "m.tpm")
    return folder


def test_images_get_the_size_that_the_model_takes(photos, tmp_path, capsys):
    model, source = photos / "m.tpm", photos / "photos"
    size = ("--size", "3x8x8")
    for verb in (("evaluate", model, "--data", source), ("predict", model, source)):
        assert run(capsys, *verb) == run(capsys, *verb, *size)
    simulated = ("federate", "simulate", model, "--data", source, "--group", "folder",
                 "--algorithm", "fedavg", "--rounds", 1)  # fmt: skip
    scores = [run(capsys, *simulated, *more)["trials"][0]["training"] for more in ((), size)]
    assert scores[0] == scores[1]
    assert [score["device"] for score in scores[0]] == ["a", "b"]
    for raw in ((), ("--raw-inputs",)):
        converted = ("convert", model, "--quantize", "int8", "--calibrate", source, "--evaluate",
                     source, *raw)  # fmt: skip
        accuracies = [run(capsys, *converted, *more)["accuracy"] for more in ((), size)]
        assert accuracies[0] == accuracies[1]
        assert accuracies[0]["samples"] == 24


def test_another_size_than_the_models_is_refused(photos, capsys):
    code = shell.run(["evaluate", str(photos / "m.tpm"), "--data", str(photos / "photos"),
                      "--size", "3x9x9"])  # fmt: skip
    assert code == 2
    assert "images of a folder are resized by --size" in capsys.readouterr().err


def test_texts_are_devices_by_their_file(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name, letters in {"ann": "abcd", "bob": "abd"}.items():
        (tmp_path / f"{name}.txt").write_text("".join(rng.choice(list(letters), 240)))
    nn.seed(2)
    net = nn.Sequential(nn.Embedding(4, 3), nn.Dense(3, 4))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.fit(data.load(tmp_path, window=8), 1, progress="none")
    trainer.export(("predict", "evaluate", "loss")).save(tmp_path / "m.tpm")
    result = run(
        capsys, "federate", "simulate", tmp_path / "m.tpm", "--data", tmp_path, "--window", 8,
        "--group", "file", "--algorithm", "fedavg", "--rounds", 1,
    )  # fmt: skip
    scores = result["trials"][0]["training"]
    assert [score["device"] for score in scores] == ["ann", "bob"]

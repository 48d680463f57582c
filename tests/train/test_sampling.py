"""Entries that draw random numbers: the caller gives the key, in Python and to files."""

from typing import Any

import numpy as np
import onnxruntime
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import load, nn, ops, optim, train
from triplane.unified_ir.convert import convert
from triplane.unified_ir.runtime import Bundle

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
KEY, OTHER = np.array([0, 7], np.uint32), np.array([0, 8], np.uint32)


class Noise(nn.Cell):
    """Adds noise by a key of its own, in training as in evaluation."""

    key: Any

    def __init__(self):
        super().__init__()
        self.key = nn.RandomKey(np.array([1, 2], np.uint32))

    def construct(self, x):
        y = x + ops.random_normal(self.key, x.shape)
        self.key = ops.next_key(self.key)
        return y


class Decoder(nn.Cell):
    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.dense = nn.Dense(4, 4, rng=rng)
        self.first, self.second = Noise(), Noise()
        self.drop = nn.Dropout(0.5, rng=rng)

    def construct(self, x):
        return {"once": self.first(self.drop(self.dense(x))), "twice": self.second(x)}


def first_of(output, _):
    return (output["once"] ** 2.0).mean() + (output["twice"] ** 2.0).mean()


@pytest.fixture(scope="module")
def trainer():
    trainer = train.Trainer(Decoder(), loss=first_of, optimizer=optim.SGD(0.01), metrics={})
    trainer.prepare(X, X)
    return trainer


@pytest.fixture(scope="module")
def module(trainer):
    return trainer.export(("predict", "train_step"), key_input="seed")


def test_the_same_key_gives_the_same_bits_and_another_key_others(module):
    one, same, other = (module.predict(X, seed=k) for k in (KEY, KEY, OTHER))
    for name in one:
        np.testing.assert_array_equal(one[name], same[name])
        assert (one[name] != other[name]).all()


def test_each_random_layer_draws_numbers_of_its_own(module, trainer):
    """Both layers have the same key in the cell."""
    answers = module.predict(X, seed=KEY)
    dense = X @ trainer.state()["dense.weight"].T + trainer.state()["dense.bias"]
    noises = answers["once"] - dense, answers["twice"] - X
    assert (np.abs(noises[0] - noises[1]) > 1e-4).all()


def test_a_key_that_is_missing_or_no_key_is_named(module):
    with pytest.raises(InvalidInput, match="takes the inputs x, seed, got x"):
        module.predict(X)
    with pytest.raises(InvalidInput, match=r"input 'seed' is uint32\[2\], got int64\[2\]"):
        module.predict(X, seed=np.array([0, 7]))


@pytest.mark.slow
def test_files_and_bundles_take_the_key(module, trainer, tmp_path):
    expected = module.predict(X, seed=KEY)
    module.save(tmp_path / "net.tpm")
    convert(tmp_path / "net.tpm", out=tmp_path / "net.bundle")
    trainer.export_onnx(tmp_path / "net.onnx", key_input="seed")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    for answers in (
        load(tmp_path / "net.tpm").predict(X, seed=KEY),
        Bundle.load(tmp_path / "net.bundle").predict(x=X, seed=KEY),
        dict(zip(expected, session.run(list(expected), {"x": X, "seed": KEY}), strict=True)),
    ):
        for name, y in expected.items():
            np.testing.assert_allclose(answers[name], y, rtol=1e-5, atol=1e-6)


def test_a_server_would_draw_the_same_numbers_at_every_call_without_a_key(trainer):
    with pytest.raises(InvalidInput, match=r"draws random numbers with 'first.key', .*key_input="):
        convert(trainer.export(("predict",)))


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("x", ("predict",), "key_input='x' is the name of another tensor"),
        ("once", ("predict",), "key_input='once' is the name of another tensor"),
        ("drop.key", ("predict",), "key_input must be a name such as 'seed', got 'drop.key'"),
        ("", ("predict",), "key_input must be a name such as 'seed', got ''"),
        (7, ("predict",), "key_input must be a name such as 'seed', got 7"),
        ("seed", ("train_step",), "key_input='seed' is an input of predict; export that entry"),
    ],
)
def test_a_name_that_does_not_fit_is_refused(trainer, name, entries, message):
    with pytest.raises(InvalidInput, match=message):
        trainer.export(entries, key_input=name)


def test_a_model_that_draws_nothing_needs_no_key():
    trainer = train.Trainer(nn.Dense(4, 4), loss=nn.MSE(), optimizer=optim.SGD(0.1), metrics={})
    trainer.prepare(X, X)
    with pytest.raises(InvalidInput, match="predict draws no random numbers"):
        trainer.export(("predict",), key_input="seed")

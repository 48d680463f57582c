"""Modules and functions show themselves on one screen, and modules predict."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from tests.ir import graphs

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data, load, nn, optim, train, zoo
from triplane.unified_ir.ir import Module, Role, StateTensor


@pytest.fixture(scope="module")
def resnet() -> Module:
    trainer = train.Trainer(
        zoo.resnet18(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1, momentum=0.9),
        labels=[f"class {k} with a rather long name" for k in range(1000)],
    )  # fmt: skip
    trainer.prepare(np.zeros((1, 3, 64, 64), np.float32), np.zeros(1, np.int64))
    return trainer.export()


def fits_a_screen(text: str) -> bool:
    return len(text.splitlines()) <= 40 and len(text) <= 4000


def test_a_module_of_a_large_network_fits_a_screen(resnet: Module) -> None:
    assert fits_a_screen(repr(resnet))
    assert fits_a_screen(resnet.summary())
    assert all(fits_a_screen(repr(f)) for f in resnet.functions.values())
    assert fits_a_screen(repr(next(iter(resnet.state.values()))))


def test_the_summary_names_entries_state_classes_and_origin(resnet: Module) -> None:
    text = resnet.summary()
    for words in (
        "module of 4 entries, 11,",
        "  predict(x: float32[N,3,64,64]) -> (logits: float32[N,1000])",
        "1000 classes: class 0 with",
        "62 parameter, ",
        "trained with SoftmaxCrossEntropy by SGD(",
    ):
        assert words in text, words


def test_a_module_of_many_entries_and_odd_metadata_fits_a_screen() -> None:
    function = graphs.module().entry("predict")
    module = Module(
        {"f": function.with_()},
        {f"entry {k}": "f" for k in range(200)},
        graphs.module().state,
        {"labels": "[" * 5000, "cell": "a\n" * 5000},
    )
    assert fits_a_screen(repr(module))
    assert "and 188 more entries" in repr(module)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[train.Trainer, Module]:
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 10))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01))
    trainer.prepare(data.digits().x[:1], data.digits().y[:1])
    path = tmp_path_factory.mktemp("model") / "m.tpm"
    trainer.export().save(path)
    return trainer, load(path)


def test_a_loaded_module_predicts_like_the_trainer(digits: tuple[train.Trainer, Module]) -> None:
    trainer, module = digits
    x = np.asarray(data.digits().x[:6])
    wanted = trainer.predict(x)
    np.testing.assert_allclose(module.predict(x), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.predict(x=x.astype(np.float64)), wanted, rtol=1e-5, atol=1e-6)
    y = np.asarray(data.digits().y[:6])
    measures = module.predict(x, y, entry="evaluate")
    assert isinstance(measures, dict)
    assert float(measures["loss"]) == pytest.approx(trainer.evaluate((x, y))["loss"], rel=1e-5)
    assert set(module.functions) == {"predict", "evaluate", "loss", "train_step"}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 8, 8), np.float32), r"'x' is float32\[N,1,8,8\], got float32\[2, 8, 8\]"),
        (np.zeros((2, 1, 8, 9), np.float32), "'x': a value of type .* cannot have shape"),
        (np.zeros((2, 1, 8, 8), np.int64), r"got int64\[2, 1, 8, 8\]"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(
    digits: tuple[train.Trainer, Module], x: np.ndarray, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        digits[1].predict(x)


def test_inputs_are_named_where_one_is_missing_or_unknown(
    digits: tuple[train.Trainer, Module],
) -> None:
    module, x = digits[1], np.zeros((1, 1, 8, 8), np.float32)
    with pytest.raises(InvalidInput, match="takes the inputs x; give each once, got 1 unnamed"):
        module.predict(x, x=x)
    with pytest.raises(InvalidInput, match="takes the inputs x, got z"):
        module.predict(z=x)
    with pytest.raises(InvalidInput, match="'train_step' changes the state"):
        module.predict(x, x[:, 0, 0, 0].astype(np.int64), entry="train_step")


def test_a_compiled_program_ends_with_its_module(digits: tuple[train.Trainer, Module]) -> None:
    function = digits[1].entry("predict")
    state = dict(digits[1].state)
    module = Module({"predict": function}, {"predict": "predict"}, state)
    module.predict(np.zeros((1, 1, 8, 8), np.float32))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_state_tensor_shows_its_type_alone() -> None:
    tensor = StateTensor(Role.BUFFER, np.zeros((30, 30), np.float32))
    assert repr(tensor) == "StateTensor(float32[30,30], role=buffer)"

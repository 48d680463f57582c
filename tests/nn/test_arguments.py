"""Constructors: what they say of arguments that do not fit, and of choices that do not exist."""

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest

from triplane.proto.errors import InvalidInput, TriplaneError
from triplane.unified_ir import nn as layers
from triplane.unified_ir import ops
from triplane.unified_ir import optim as optimizers
from triplane.unified_ir import train as training
from triplane.unified_ir.frontend import run

# The calls below are wrong on purpose, so they are not checked by types.
nn: Any = layers
optim: Any = optimizers
train: Any = training
mode: Any = run.mode

CHECKED = (nn.Cell, optim.Optimizer, optim.Schedule)
PUBLIC = [
    c
    for package in (nn, optim)
    for c in (getattr(package, name) for name in package.__all__)
    if inspect.isclass(c) and issubclass(c, CHECKED) and c is not optim.Schedule
]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda c: c.__name__)
def test_an_unknown_argument_is_named_with_the_public_class_and_its_arguments(cls):
    with pytest.raises(TypeError) as error:
        cls(nonsense=1)
    text = str(error.value)
    assert isinstance(error.value, InvalidInput)
    assert text.startswith(f"{cls.__name__}: there is no argument 'nonsense'")
    assert f"it is called {cls.__name__}(" in text
    assert "test_arguments.py" in text


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda c: c.__name__)
def test_a_missing_argument_is_reported_under_the_public_name(cls):
    try:
        cls()
    except InvalidInput:
        pass
    except TypeError as error:
        assert str(error).startswith(f"{cls.__name__}.__init__() missing")


# fmt: off
ELSEWHERE = {
    "learning_rate": (lambda: optim.Adam(learning_rate=0.1), "here it is lr"),
    "betas":    (lambda: optim.Adam(1e-3, betas=(0.9, 0.99)), "here it is beta1 and beta2"),
    "params":   (lambda: optim.Adam([1], lr=0.1), "the trainer finds the parameters itself"),
    "dict":     (lambda: optim.SGD({}), "first argument of SGD is the learning rate, got a dict"),
    "cell":     (lambda: optim.SGD(nn.Dense(1, 1)), "the learning rate, got a Dense"),
    "T_max":    (lambda: optim.Cosine(1e-3, T_max=10), "here it is steps"),
    "nhead":    (lambda: nn.TransformerEncoderLayer(8, nhead=4), "here it is heads"),
    "typo":     (lambda: nn.Conv2d(1, 2, 3, stide=2), "did you mean 'stride'"),
    "missing":  (lambda: nn.GRU(3), "GRU: missing a required argument: 'hidden'"),
    "too many": (lambda: nn.Dense(3, 4, 5), "Dense: too many positional arguments"),
    "a list":   (lambda: nn.Sequential([nn.ReLU()]), r"at 0; pass the cells themselves: \*cells"),
    "a class":  (lambda: nn.Sequential(nn.ReLU(), nn.Flatten), r"at 1; create it: Flatten\("),
    "function": (lambda: nn.Sequential(ops.relu), "at 0; a function belongs into the construct"),
    "one cell": (lambda: nn.CellList(nn.ReLU()), r"made of a list of cells, got ReLU\(\)"),
    "no dict":  (lambda: nn.CellDict([nn.ReLU()]), "made of a dict of cells by name"),
    "monitor":  (lambda: train.EarlyStop(monitor="loss"), "here it is measure"),
    "patience": (lambda: train.EarlyStop(patience="3"), "whole patience >= 1.*got '3'"),
    "plateau":  (lambda: optim.ReduceOnPlateau(0.1, patience="3"), "patience '3'"),
    "base":     (lambda: optim.ReduceOnPlateau(optim.Constant(0.1)), "start Constant"),
    "epochs":   (lambda: optim.ReduceOnPlateau(0.1, mode="min"), "better; .*count epochs"),
    "callback": (lambda: trainer(callbacks=[train.EarlyStop]), "each callback is the class Early"),
    "callbacks": (lambda: trainer(callbacks=train.EarlyStop()), "callbacks is a list"),
    "metric":   (lambda: trainer(metrics={"f1": train.F1}), r"give an instance: F1\("),
    "activation": (lambda: nn.TransformerEncoderLayer(8, 2, activation="gelu"), "such as ops.gelu"),
    "loss":     (lambda: train.Trainer(nn.Dense(1, 1), loss="mse", optimizer=optim.SGD(1.0)),
                 r"write nn.MSE\(...\)"),
    "optimizer": (lambda: train.Trainer(nn.Dense(1, 1), loss=nn.MSE(), optimizer="adam"),
                  r"write optim.Adam\(...\)"),
}
# fmt: on


@pytest.mark.parametrize(("call", "message"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_the_name_that_other_libraries_use_leads_to_ours(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()


class Inner(layers.Dense):
    pass


class Flexible(layers.Cell):
    def __init__(self, *sizes, **options):
        super().__init__()
        self.sizes, self.options = sizes, options


def test_cells_with_any_signature_are_created_copied_and_pickled():
    assert Flexible(1, 2, key=3).options == {"key": 3}
    for cell in (nn.BatchNorm2d(3), Inner(2, 3)):
        for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
            assert other.state_dict().keys() == cell.state_dict().keys()
    optimizer = optim.Adam(optim.Cosine(0.1, 10))
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    assert inspect.signature(nn.Conv2d).parameters["kernel"].default is inspect.Parameter.empty


def test_arguments_have_the_order_of_pytorch():
    conv = nn.Conv2d(3, 8, 3, 2, 1)
    assert (conv.stride, conv.padding) == (2, 1)
    pool = nn.MaxPool2d(3, 2, 1)
    assert (pool.stride, pool.padding) == (2, 1)
    layer = nn.TransformerEncoderLayer(8, 4, 64)
    assert layer.linear1.weight.type.shape == (64, 8)


def trainer(**options):
    optimizer = options.pop("optimizer", optim.SGD(0.1))
    return train.Trainer(nn.Dense(1, 1), loss=nn.MSE(), optimizer=optimizer, **options)


def export(entry):
    made = trainer()
    made.prepare([[1.0]], [[1.0]])
    made.export((entry,))


def imported(**options):
    made = trainer()
    made.prepare([[1.0]], [[1.0]])
    return nn.Imported(made.export(("predict",)), **options)


# fmt: off
CHOICES = {
    ("Conv1d", "padding"): ("sane", "same"), ("Conv2d", "padding"): ("SAME", "same"),
    ("Conv3d", "padding"): ("vald", "valid"), ("Upsample", "mode"): ("bilinaer", "bilinear"),
    ("Imported", "batch_norm"): ("updatd", "updated"),
    ("Parameter", "role"): ("bufer", "buffer"),
    ("OneCycle", "shape"): ("cosin", "cosine"),
    ("ReduceOnPlateau", "change"): ("relatve", "relative"),
    ("ReduceOnPlateau", "better"): ("largr", "larger"),
    ("EarlyStop", "better"): ("smaler", "smaller"),
    ("Trainer", "engine"): ("onxn", "onnx"), ("Trainer", "precision"): ("flaot16", "float16"),
    ("Trainer", "device"): ("cudaa", "cuda"),
    ("Recipe", "precision"): ("float61", "float16"),
    **{(name, "average"): ("marco", "macro") for name in ("Precision", "Recall", "F1")},
    **{(name, "decay"): ("decupled", "decoupled") for name in (
        "SGD", "Adam", "AdamW", "RMSProp", "Adagrad", "Adadelta", "Adafactor", "LAMB", "Lion")},
}
# fmt: on


def used(made):
    """The name of an engine is looked up when it is used."""
    made.predict([[1.0]])


REQUIRED: dict[str, Any] = {
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), (1, 2, 3)),
    "SGD": (0.1,),
    "OneCycle": (0.1, 100),
    "ReduceOnPlateau": (0.1,),
    "Parameter": ([1.0],),
}
MAKERS: dict[str, Any] = {
    "Trainer": trainer,
    "Imported": imported,
    "Upsample": partial(nn.Upsample, scale=2),
}
FREE = {"entry", "measure", "folder", "path", "pattern", "slot", "message", "cause", "style"}
"""Texts that are names of the user's own; the style of progress has a test beside `Progress`."""


@pytest.mark.parametrize(("name", "option"), CHOICES, ids="-".join)
def test_a_misspelt_choice_is_refused_with_the_nearest_one(name, option):
    wrong, right = CHOICES[name, option]
    package = next(p for p in (nn, optim, train) if hasattr(p, name))
    make = MAKERS.get(name) or partial(getattr(package, name), *REQUIRED.get(name, ()))
    if name == "Recipe":
        make = partial(make, optimizer=optim.SGD(0.1))
    with pytest.raises(TriplaneError, match=f"did you mean '{right}'") as error:
        used(make(**{option: wrong}))
    assert repr(wrong) in str(error.value)


def is_choice(argument):
    kinds = (
        "Literal",
        "Decay",
        "Shape",
        "Average",
        "Precision",
        "Style",
        "Mode",
        "Role",
        "Entry",
        "Better",
    )
    text = str(argument.annotation)
    is_text = isinstance(argument.default, str) or text in ("str", "str | None")
    return is_text or text.startswith("str |") or text.startswith(kinds)


def test_the_table_of_choices_holds_all_of_nn_optim_and_train():
    there = {
        (name, p.name)
        for package in (nn, optim, train)
        for name in package.__all__
        if inspect.isclass(cls := getattr(package, name))
        for p in inspect.signature(cls).parameters.values()
        if is_choice(p) and p.name not in FREE
    }
    assert there == CHOICES.keys()


def test_choices_of_calls_are_checked_too():
    for call, right in (
        (lambda: export("predct"), "predict"),
        (lambda: mode("eagre").__enter__(), "eager"),
        (lambda: mode("graph", floats="float46").__enter__(), "float64"),
        (lambda: mode("graph", "onxn").__enter__(), "onnx"),
        (lambda: trainer(engine="refrence").predict([[1.0]]), "reference"),
    ):
        with pytest.raises(TriplaneError, match=f"did you mean '{right}'"):
            call()

"""Activations of recurrent operators as the runtime has them, and calls that are refused."""

import numpy as np
import pytest
from tests.conformance.checks import agree

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.recurrence.recurrent import ACTIVATIONS
from triplane.unified_ir.ops.table import TABLE

RNG = np.random.default_rng(8)
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
USUAL = {"RNN": 1, "GRU": 2, "LSTM": 3}
SPELLED = {
    "softsign": "Softsign", "leakyrelu": "LeakyRelu", "thresholdedrelu": "ThresholdedRelu",
    "hardsigmoid": "HardSigmoid", "scaledtanh": "ScaledTanh",
}  # fmt: skip


def recorded(name, *, directions=1, **attrs):
    rows = GATES[name] * 2
    shapes = [(4, 3, 2), (directions, rows, 2), (directions, rows, 2), (directions, 2 * rows)]
    arrays = [RNG.standard_normal(s).astype(np.float32) for s in shapes]
    build = Build(TABLE, name)
    with build:
        xs = [build.param(f"x{i}", type_of(a)) for i, a in enumerate(arrays)]
        y, h = TABLE["", name].all_outputs(*xs, outputs=2, hidden_size=2, **attrs)
    return build.finish({"y": y, "h": h}), arrays


@pytest.mark.parametrize("given", [False, True], ids=["its own numbers", "given numbers"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_what_the_runtime_has(activation, given):
    found = ACTIVATIONS[activation]
    numbers = {}
    if given or (found.takes and found.alpha is None):
        numbers = {"activation_alpha": (0.3,) if "a" in found.takes else ()}
        numbers["activation_beta"] = (0.7,) if "b" in found.takes else ()
    name = SPELLED.get(activation, activation.capitalize())
    function, arrays = recorded("RNN", activations=(name,), **numbers)
    wanted = engine("reference").compile(function)(*arrays)
    agree(engine("onnx").compile(function)(*arrays), wanted, activation)


def test_numbers_go_in_order_to_the_activations_that_take_them():
    function, arrays = recorded(
        "LSTM", directions=2, direction="bidirectional",
        activations=("HardSigmoid", "Tanh", "LeakyRelu", "Sigmoid", "Elu", "ScaledTanh"),
        activation_alpha=(0.3, 0.1, 0.8, 1.5), activation_beta=(0.4, 0.6),
    )  # fmt: skip
    wanted = engine("reference").compile(function)(*arrays)
    agree(engine("onnx").compile(function)(*arrays), wanted, "LSTM")


@pytest.mark.parametrize("clip", [0.05, 0.4])
@pytest.mark.parametrize("name", GATES)
def test_clipping_is_what_the_runtime_does(name, clip):
    function, arrays = recorded(name, clip=clip)
    wanted = engine("reference").compile(function)(*arrays)
    agree(engine("onnx").compile(function)(*arrays), wanted, name)


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        ({"direction": "backwards"}, "forward, reverse, bidirectional; got 'backwards'"),
        ({"activations": ("Sigmoid", "Cube", "Tanh")}, "needs 3 activations of sigmoid, .*Cube"),
        ({"activations": ("Sigmoid", "Tanh")}, "needs 3 activations"),
        ({"activations": ("Sigmoid", "Affine", "Tanh")}, "affine has no default alpha and beta"),
        ({"hidden_size": 3}, "hidden_size 3, but R"),
        ({"direction": "bidirectional"}, r"in 2 directions with 2 units takes operand 1"),
    ],
)
def test_a_call_that_means_nothing_is_refused(attrs, said):
    build = Build(TABLE, "f")
    shapes = [(4, 3, 2), (1, 8, 2), (1, 8, 2)]
    with build, pytest.raises(InvalidInput, match=said):
        TABLE["", "LSTM"](*(np.zeros(s, np.float32) for s in shapes), **attrs)

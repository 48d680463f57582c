"""A tiny network around each use of the operator table: a weight of its own, and products."""

import numpy as np
from tests.conformance.uses import Use

from triplane.unified_ir.ir import Module, Role, StateTensor
from triplane.unified_ir.ir.types import TensorType, float32, type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

SAMPLES, FEATURES = 4, 6
ON_AN_EDGE = {"MelWeightMatrix-0"}
"""Uses whose operands must not move: its lowest frequency is 0."""
STRENGTH = 1e-3
"""How much an input moves the row's operands: within the domain of each row."""


def calibration():
    return np.random.default_rng(7).random((SAMPLES, FEATURES), dtype=np.float32)


def float_operands(use: Use) -> list[int]:
    """Numbers of the operands that a network can compute or learn."""
    arrays = use.arrays(np.float32)
    smooth = use.sample.smooth or range(len(arrays))
    return [
        i for i, a in enumerate(arrays)
        if a is not None and a.dtype == np.float32 and a.size and i in smooth
        and not use.is_constant(i, a)
    ]  # fmt: skip


def network(use: Use, place: str) -> Module | None:
    """The row on weights, or on activations; None where these cannot be its operands.

    x: (1, FEATURES) -> Dense -> [the row] -> Dense; what the row gives besides floats is returned.
    """
    arrays, floats = use.arrays(np.float32), float_operands(use)
    if not floats or (place == "activation" and str(use) in ON_AN_EDGE):
        return None
    rng = np.random.default_rng(3)
    state = {}
    build = Build(TABLE, "predict")
    with build:
        x = build.param("x", TensorType(float32, (1, FEATURES)))

        def weight(name, array):
            state[name] = StateTensor(Role.PARAMETER, np.asarray(array, np.float32))
            return build.param(name, type_of(state[name].array))

        def dense(name, h, size, *, bias=0.0, strength=1.0):
            w = rng.standard_normal((FEATURES if h is x else h.shape[1], size)) * strength
            return h @ weight(f"{name}.weight", w) + weight(
                f"{name}.bias", np.zeros(size) + np.ravel(bias)
            )

        operands = list(arrays)
        for i in floats:
            if place == "weight":
                operands[i] = weight(f"own{i}", arrays[i])
            else:
                h = dense(f"into{i}", x, arrays[i].size, bias=arrays[i], strength=STRENGTH)
                operands[i] = h.reshape(arrays[i].shape)
        made = build.apply(use.row, operands, use.sample.attrs, outputs=use.sample.outputs)
        results = {}
        for i, y in enumerate(made):
            if y.dtype == float32 and not y.type.symbols and all(y.shape):
                size = int(np.prod(y.type.concrete({})))
                flat = y.reshape((1, size))
                h = flat + dense(f"beside{i}", x, size)
                results[f"y{i}"] = dense(f"from{i}", h, 3)
            else:
                results[f"y{i}"] = y
        results["logits"] = dense("head", x, 2)
    function = build.finish(results)
    return Module({"predict": function}, {"predict": "predict"}, state, {})

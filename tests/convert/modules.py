"""Modules of which plans are exported."""

import numpy as np

from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec

SPECS = {"x": TensorSpec(("N", 2)), "w": TensorSpec((2,)), "head": TensorSpec((2,))}


def learn(x, w, head):
    return {"loss": (x * w * head).sum(), "w": w - 0.5, "head": head + 1.0, "seen": x.sum()}


def predict(x, w, head):
    return {"y": x * w + head}


def module(**more):
    traced = [trace(f, **SPECS, name=f.__name__) for f in (learn, predict)]
    functions = {f.name: f for f in traced}
    state = {
        "w": StateTensor(Role.PARAMETER, np.ones(2, np.float32)),
        "head": StateTensor(Role.PERSONAL, np.full(2, 7.0, np.float32)),
        **more,
        "seen": StateTensor(Role.BUFFER, np.zeros((), np.float32)),
        "spare": StateTensor(Role.PARAMETER, np.zeros(5, np.float32)),
    }
    entries = {"local_update": "learn", "predict": "predict"}
    return Module(functions, entries, state, {"labels": '["a", "b"]'})

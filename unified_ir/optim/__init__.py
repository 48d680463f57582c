"""Optimizers and schedules: pure descriptions, computed inside the graph of the training step."""

from triplane.unified_ir.optim.adafactor import Adafactor
from triplane.unified_ir.optim.adam import Adam, AdamW
from triplane.unified_ir.optim.adaptive import Adadelta, Adagrad, RMSProp
from triplane.unified_ir.optim.clipping import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)
from triplane.unified_ir.optim.group import Group
from triplane.unified_ir.optim.large_batch import LAMB, Lion
from triplane.unified_ir.optim.optimizer import STEP, Optimizer, slot_name
from triplane.unified_ir.optim.schedules import (
    Chained,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    MultiStep,
    OneCycle,
    Piecewise,
    Polynomial,
    Product,
    Schedule,
    StepDecay,
    Warmup,
)
from triplane.unified_ir.optim.sgd import SGD

__all__ = [
    "LAMB",
    "SGD",
    "STEP",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Chained",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "Group",
    "Lion",
    "MultiStep",
    "OneCycle",
    "Optimizer",
    "Piecewise",
    "Polynomial",
    "Product",
    "RMSProp",
    "Schedule",
    "StepDecay",
    "Warmup",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
    "slot_name",
]

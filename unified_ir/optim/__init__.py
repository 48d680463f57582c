"""Optimizers and schedules: pure descriptions, computed inside the graph of the training step."""

from triplane.unified_ir.optim.adam import Adam, AdamW
from triplane.unified_ir.optim.clipping import clip_by_global_norm, global_norm
from triplane.unified_ir.optim.optimizer import STEP, Optimizer, slot_name
from triplane.unified_ir.optim.schedules import (
    Constant,
    Cosine,
    Exponential,
    Schedule,
    StepDecay,
    Warmup,
)
from triplane.unified_ir.optim.sgd import SGD

__all__ = [
    "SGD",
    "STEP",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "Exponential",
    "Optimizer",
    "Schedule",
    "StepDecay",
    "Warmup",
    "clip_by_global_norm",
    "global_norm",
    "slot_name",
]

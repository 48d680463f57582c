"""Training: one graph per step, callbacks, checkpoints that resume bit for bit, export."""

from triplane.unified_ir.train.callbacks import Callback, EarlyStop, HistoryFile, Record
from triplane.unified_ir.train.checkpoint import Checkpoint
from triplane.unified_ir.train.diagnosis import NonFinite
from triplane.unified_ir.train.history import History, Place
from triplane.unified_ir.train.precision import LossScale
from triplane.unified_ir.train.progress import Progress
from triplane.unified_ir.train.recipe import Recipe
from triplane.unified_ir.train.run import Run
from triplane.unified_ir.train.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStop",
    "History",
    "HistoryFile",
    "LossScale",
    "NonFinite",
    "Place",
    "Progress",
    "Recipe",
    "Record",
    "Run",
    "Trainer",
]

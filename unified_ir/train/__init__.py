"""Training: one graph per step, callbacks, checkpoints that resume bit for bit, export."""

from triplane.unified_ir.train.callbacks import Callback, EarlyStop, HistoryFile, Record
from triplane.unified_ir.train.checkpoint import Checkpoint
from triplane.unified_ir.train.diagnosis import NonFinite
from triplane.unified_ir.train.history import History, Place
from triplane.unified_ir.train.metrics import (
    F1,
    Confusion,
    Perplexity,
    Precision,
    Recall,
    Tally,
    TopK,
    mean_absolute_error,
    mean_squared_error,
)
from triplane.unified_ir.train.precision import LossScale
from triplane.unified_ir.train.progress import Progress
from triplane.unified_ir.train.recipe import Recipe
from triplane.unified_ir.train.run import Run
from triplane.unified_ir.train.tensorboard import TensorBoard
from triplane.unified_ir.train.trainer import Trainer

__all__ = [
    "F1",
    "Callback",
    "Checkpoint",
    "Confusion",
    "EarlyStop",
    "History",
    "HistoryFile",
    "LossScale",
    "NonFinite",
    "Perplexity",
    "Place",
    "Precision",
    "Progress",
    "Recall",
    "Recipe",
    "Record",
    "Run",
    "Tally",
    "TensorBoard",
    "TopK",
    "Trainer",
    "mean_absolute_error",
    "mean_squared_error",
]

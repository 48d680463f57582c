"""Training: one graph per step, callbacks, checkpoints that resume bit for bit, export."""

from triplane.proto.lazy import public_names as _public_names
from triplane.unified_ir.train.callbacks import Callback as Callback
from triplane.unified_ir.train.callbacks import EarlyStop as EarlyStop
from triplane.unified_ir.train.callbacks import HistoryFile as HistoryFile
from triplane.unified_ir.train.callbacks import Record as Record
from triplane.unified_ir.train.checkpoint import Checkpoint as Checkpoint
from triplane.unified_ir.train.fitting import NonFinite as NonFinite
from triplane.unified_ir.train.history import History as History
from triplane.unified_ir.train.history import Place as Place
from triplane.unified_ir.train.metrics import F1 as F1
from triplane.unified_ir.train.metrics import R2 as R2
from triplane.unified_ir.train.metrics import RMSE as RMSE
from triplane.unified_ir.train.metrics import Confusion as Confusion
from triplane.unified_ir.train.metrics import Perplexity as Perplexity
from triplane.unified_ir.train.metrics import Precision as Precision
from triplane.unified_ir.train.metrics import Recall as Recall
from triplane.unified_ir.train.metrics import Tally as Tally
from triplane.unified_ir.train.metrics import TopK as TopK
from triplane.unified_ir.train.metrics import mean_absolute_error as mean_absolute_error
from triplane.unified_ir.train.metrics import mean_squared_error as mean_squared_error
from triplane.unified_ir.train.precision import LossScale as LossScale
from triplane.unified_ir.train.progress import Progress as Progress
from triplane.unified_ir.train.recipe import Recipe as Recipe
from triplane.unified_ir.train.run import Run as Run
from triplane.unified_ir.train.tensorboard import TensorBoard as TensorBoard
from triplane.unified_ir.train.trainer import Trainer as Trainer

__all__ = list(_public_names(globals()))

"""Optimizers and schedules: pure descriptions, computed inside the graph of the training step."""

from triplane.proto.lazy import public_names as _public_names
from triplane.unified_ir.optim.adam import LAMB as LAMB
from triplane.unified_ir.optim.adam import Adam as Adam
from triplane.unified_ir.optim.adam import AdamW as AdamW
from triplane.unified_ir.optim.adam import Lion as Lion
from triplane.unified_ir.optim.adaptive import Adadelta as Adadelta
from triplane.unified_ir.optim.adaptive import Adafactor as Adafactor
from triplane.unified_ir.optim.adaptive import Adagrad as Adagrad
from triplane.unified_ir.optim.adaptive import RMSProp as RMSProp
from triplane.unified_ir.optim.clipping import clip_by_global_norm as clip_by_global_norm
from triplane.unified_ir.optim.clipping import clip_by_norm as clip_by_norm
from triplane.unified_ir.optim.clipping import clip_by_value as clip_by_value
from triplane.unified_ir.optim.clipping import global_norm as global_norm
from triplane.unified_ir.optim.group import Group as Group
from triplane.unified_ir.optim.optimizer import STEP as STEP
from triplane.unified_ir.optim.optimizer import Optimizer as Optimizer
from triplane.unified_ir.optim.optimizer import slot_name as slot_name
from triplane.unified_ir.optim.plateau import ReduceOnPlateau as ReduceOnPlateau
from triplane.unified_ir.optim.schedules import Chained as Chained
from triplane.unified_ir.optim.schedules import Constant as Constant
from triplane.unified_ir.optim.schedules import Cosine as Cosine
from triplane.unified_ir.optim.schedules import CosineRestarts as CosineRestarts
from triplane.unified_ir.optim.schedules import Exponential as Exponential
from triplane.unified_ir.optim.schedules import MultiStep as MultiStep
from triplane.unified_ir.optim.schedules import OneCycle as OneCycle
from triplane.unified_ir.optim.schedules import Piecewise as Piecewise
from triplane.unified_ir.optim.schedules import Polynomial as Polynomial
from triplane.unified_ir.optim.schedules import Product as Product
from triplane.unified_ir.optim.schedules import Schedule as Schedule
from triplane.unified_ir.optim.schedules import StepDecay as StepDecay
from triplane.unified_ir.optim.schedules import Warmup as Warmup
from triplane.unified_ir.optim.sgd import SGD as SGD

__all__ = list(_public_names(globals()))

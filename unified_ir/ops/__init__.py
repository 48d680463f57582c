"""Operators: call them with tensors inside a Cell's construct or a function decorated @graph.

A numpy array given as an operand becomes a constant of the graph.
"""

from types import FunctionType, ModuleType
from typing import Final

from triplane.unified_ir.ops.arrays import *  # noqa: F403 - each of its functions is public
from triplane.unified_ir.ops.ctc import ctc as ctc
from triplane.unified_ir.ops.losses import binary_cross_entropy as binary_cross_entropy
from triplane.unified_ir.ops.losses import cosine_embedding as cosine_embedding
from triplane.unified_ir.ops.losses import cosine_similarity as cosine_similarity
from triplane.unified_ir.ops.losses import cross_entropy as cross_entropy
from triplane.unified_ir.ops.losses import huber as huber
from triplane.unified_ir.ops.losses import kl_divergence as kl_divergence
from triplane.unified_ir.ops.losses import negative_log_likelihood as negative_log_likelihood
from triplane.unified_ir.ops.losses import smooth_l1 as smooth_l1
from triplane.unified_ir.ops.recorder import with_shard as _with_shard
from triplane.unified_ir.ops.rows.arithmetic.activations import celu as celu
from triplane.unified_ir.ops.rows.arithmetic.activations import elu as elu
from triplane.unified_ir.ops.rows.arithmetic.activations import mish as mish
from triplane.unified_ir.ops.rows.arithmetic.activations import prelu as prelu
from triplane.unified_ir.ops.rows.arithmetic.activations import selu as selu
from triplane.unified_ir.ops.rows.arithmetic.activations import shrink as shrink
from triplane.unified_ir.ops.rows.arithmetic.activations import softsign as softsign
from triplane.unified_ir.ops.rows.arithmetic.activations import thresholded_relu as thresholded_relu
from triplane.unified_ir.ops.rows.arithmetic.bits import bit_cast as bit_cast
from triplane.unified_ir.ops.rows.arithmetic.bits import bit_shift as bit_shift
from triplane.unified_ir.ops.rows.arithmetic.bits import bitwise_and as bitwise_and
from triplane.unified_ir.ops.rows.arithmetic.bits import bitwise_not as bitwise_not
from triplane.unified_ir.ops.rows.arithmetic.bits import bitwise_or as bitwise_or
from triplane.unified_ir.ops.rows.arithmetic.bits import bitwise_xor as bitwise_xor
from triplane.unified_ir.ops.rows.arithmetic.elementwise import abs_ as abs_
from triplane.unified_ir.ops.rows.arithmetic.elementwise import acos as acos
from triplane.unified_ir.ops.rows.arithmetic.elementwise import acosh as acosh
from triplane.unified_ir.ops.rows.arithmetic.elementwise import add as add
from triplane.unified_ir.ops.rows.arithmetic.elementwise import asin as asin
from triplane.unified_ir.ops.rows.arithmetic.elementwise import asinh as asinh
from triplane.unified_ir.ops.rows.arithmetic.elementwise import atan as atan
from triplane.unified_ir.ops.rows.arithmetic.elementwise import atanh as atanh
from triplane.unified_ir.ops.rows.arithmetic.elementwise import ceil as ceil
from triplane.unified_ir.ops.rows.arithmetic.elementwise import clip as clip
from triplane.unified_ir.ops.rows.arithmetic.elementwise import cos as cos
from triplane.unified_ir.ops.rows.arithmetic.elementwise import cosh as cosh
from triplane.unified_ir.ops.rows.arithmetic.elementwise import div as div
from triplane.unified_ir.ops.rows.arithmetic.elementwise import equal as equal
from triplane.unified_ir.ops.rows.arithmetic.elementwise import erf as erf
from triplane.unified_ir.ops.rows.arithmetic.elementwise import exp as exp
from triplane.unified_ir.ops.rows.arithmetic.elementwise import floor as floor
from triplane.unified_ir.ops.rows.arithmetic.elementwise import gelu as gelu
from triplane.unified_ir.ops.rows.arithmetic.elementwise import greater as greater
from triplane.unified_ir.ops.rows.arithmetic.elementwise import greater_equal as greater_equal
from triplane.unified_ir.ops.rows.arithmetic.elementwise import hard_sigmoid as hard_sigmoid
from triplane.unified_ir.ops.rows.arithmetic.elementwise import hard_swish as hard_swish
from triplane.unified_ir.ops.rows.arithmetic.elementwise import is_inf as is_inf
from triplane.unified_ir.ops.rows.arithmetic.elementwise import is_nan as is_nan
from triplane.unified_ir.ops.rows.arithmetic.elementwise import leaky_relu as leaky_relu
from triplane.unified_ir.ops.rows.arithmetic.elementwise import less as less
from triplane.unified_ir.ops.rows.arithmetic.elementwise import less_equal as less_equal
from triplane.unified_ir.ops.rows.arithmetic.elementwise import log as log
from triplane.unified_ir.ops.rows.arithmetic.elementwise import logical_and as logical_and
from triplane.unified_ir.ops.rows.arithmetic.elementwise import logical_not as logical_not
from triplane.unified_ir.ops.rows.arithmetic.elementwise import logical_or as logical_or
from triplane.unified_ir.ops.rows.arithmetic.elementwise import logical_xor as logical_xor
from triplane.unified_ir.ops.rows.arithmetic.elementwise import maximum as maximum
from triplane.unified_ir.ops.rows.arithmetic.elementwise import minimum as minimum
from triplane.unified_ir.ops.rows.arithmetic.elementwise import mod as mod
from triplane.unified_ir.ops.rows.arithmetic.elementwise import mul as mul
from triplane.unified_ir.ops.rows.arithmetic.elementwise import neg as neg
from triplane.unified_ir.ops.rows.arithmetic.elementwise import power as power
from triplane.unified_ir.ops.rows.arithmetic.elementwise import reciprocal as reciprocal
from triplane.unified_ir.ops.rows.arithmetic.elementwise import relu as relu
from triplane.unified_ir.ops.rows.arithmetic.elementwise import round_ as round_
from triplane.unified_ir.ops.rows.arithmetic.elementwise import sigmoid as sigmoid
from triplane.unified_ir.ops.rows.arithmetic.elementwise import sign as sign
from triplane.unified_ir.ops.rows.arithmetic.elementwise import sin as sin
from triplane.unified_ir.ops.rows.arithmetic.elementwise import sinh as sinh
from triplane.unified_ir.ops.rows.arithmetic.elementwise import softplus as softplus
from triplane.unified_ir.ops.rows.arithmetic.elementwise import sqrt as sqrt
from triplane.unified_ir.ops.rows.arithmetic.elementwise import sub as sub
from triplane.unified_ir.ops.rows.arithmetic.elementwise import tan as tan
from triplane.unified_ir.ops.rows.arithmetic.elementwise import tanh as tanh
from triplane.unified_ir.ops.rows.arithmetic.equations import det as det
from triplane.unified_ir.ops.rows.arithmetic.equations import einsum as einsum
from triplane.unified_ir.ops.rows.arithmetic.matrix import gemm as gemm
from triplane.unified_ir.ops.rows.arithmetic.matrix import linear as linear
from triplane.unified_ir.ops.rows.arithmetic.matrix import log_softmax as log_softmax
from triplane.unified_ir.ops.rows.arithmetic.matrix import matmul as matmul
from triplane.unified_ir.ops.rows.arithmetic.matrix import softmax as softmax
from triplane.unified_ir.ops.rows.arithmetic.norm import batch_norm as batch_norm
from triplane.unified_ir.ops.rows.arithmetic.norm import batch_norm_training as batch_norm_training
from triplane.unified_ir.ops.rows.arithmetic.norm import layer_norm as layer_norm
from triplane.unified_ir.ops.rows.arithmetic.quant import dequantize_linear as dequantize_linear
from triplane.unified_ir.ops.rows.arithmetic.quant import quantize_linear as quantize_linear
from triplane.unified_ir.ops.rows.arithmetic.reductions import argmax as argmax
from triplane.unified_ir.ops.rows.arithmetic.reductions import argmin as argmin
from triplane.unified_ir.ops.rows.arithmetic.reductions import hardmax as hardmax
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import group_norm as group_norm
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import instance_norm as instance_norm
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import (
    local_response_norm as local_response_norm,
)
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import rms_norm as rms_norm
from triplane.unified_ir.ops.rows.arithmetic.signal import blackman_window as blackman_window
from triplane.unified_ir.ops.rows.arithmetic.signal import dft as dft
from triplane.unified_ir.ops.rows.arithmetic.signal import hamming_window as hamming_window
from triplane.unified_ir.ops.rows.arithmetic.signal import hann_window as hann_window
from triplane.unified_ir.ops.rows.arithmetic.signal import mel_weight_matrix as mel_weight_matrix
from triplane.unified_ir.ops.rows.arithmetic.signal import stft as stft
from triplane.unified_ir.ops.rows.control.conditional import cond as cond
from triplane.unified_ir.ops.rows.control.custom_gradients import custom_gradient as custom_gradient
from triplane.unified_ir.ops.rows.control.custom_ops import CustomOp as CustomOp
from triplane.unified_ir.ops.rows.control.custom_ops import custom as custom
from triplane.unified_ir.ops.rows.control.looping import fori_loop as fori_loop
from triplane.unified_ir.ops.rows.control.looping import while_loop as while_loop
from triplane.unified_ir.ops.rows.control.scanning import scan as scan
from triplane.unified_ir.ops.rows.data.sequences import concat_from_sequence as concat_from_sequence
from triplane.unified_ir.ops.rows.data.sequences import empty_sequence as empty_sequence
from triplane.unified_ir.ops.rows.data.sequences import optional as optional
from triplane.unified_ir.ops.rows.data.sequences import optional_get_element as optional_get_element
from triplane.unified_ir.ops.rows.data.sequences import optional_has_element as optional_has_element
from triplane.unified_ir.ops.rows.data.sequences import sequence as sequence
from triplane.unified_ir.ops.rows.data.sequences import sequence_at as sequence_at
from triplane.unified_ir.ops.rows.data.sequences import sequence_erase as sequence_erase
from triplane.unified_ir.ops.rows.data.sequences import sequence_insert as sequence_insert
from triplane.unified_ir.ops.rows.data.sequences import sequence_length as sequence_length
from triplane.unified_ir.ops.rows.data.sequences import sequence_map as sequence_map
from triplane.unified_ir.ops.rows.data.sequences import split_to_sequence as split_to_sequence
from triplane.unified_ir.ops.rows.data.sequences import stack_from_sequence as stack_from_sequence
from triplane.unified_ir.ops.rows.data.text import regex_full_match as regex_full_match
from triplane.unified_ir.ops.rows.data.text import string_concat as string_concat
from triplane.unified_ir.ops.rows.data.text import string_split as string_split
from triplane.unified_ir.ops.rows.movement.indexing import arange as arange
from triplane.unified_ir.ops.rows.movement.indexing import embedding as embedding
from triplane.unified_ir.ops.rows.movement.indexing import gather as gather
from triplane.unified_ir.ops.rows.movement.indexing import gather_elements as gather_elements
from triplane.unified_ir.ops.rows.movement.indexing import gather_nd as gather_nd
from triplane.unified_ir.ops.rows.movement.indexing import one_hot as one_hot
from triplane.unified_ir.ops.rows.movement.indexing import scatter_elements as scatter_elements
from triplane.unified_ir.ops.rows.movement.indexing import scatter_nd as scatter_nd
from triplane.unified_ir.ops.rows.movement.resizing import resize as resize
from triplane.unified_ir.ops.rows.movement.selection import compress as compress
from triplane.unified_ir.ops.rows.movement.selection import masked_select as masked_select
from triplane.unified_ir.ops.rows.movement.selection import nonzero as nonzero
from triplane.unified_ir.ops.rows.movement.selection import top_k as top_k
from triplane.unified_ir.ops.rows.movement.selection import unique as unique
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape as assume_shape
from triplane.unified_ir.ops.rows.movement.shapes import depth_to_space as depth_to_space
from triplane.unified_ir.ops.rows.movement.shapes import reverse_sequence as reverse_sequence
from triplane.unified_ir.ops.rows.movement.shapes import space_to_depth as space_to_depth
from triplane.unified_ir.ops.rows.movement.structure import cast as cast
from triplane.unified_ir.ops.rows.movement.structure import concat as concat
from triplane.unified_ir.ops.rows.movement.structure import constant as constant
from triplane.unified_ir.ops.rows.movement.structure import expand as expand
from triplane.unified_ir.ops.rows.movement.structure import flatten as flatten
from triplane.unified_ir.ops.rows.movement.structure import full as full
from triplane.unified_ir.ops.rows.movement.structure import ones as ones
from triplane.unified_ir.ops.rows.movement.structure import pad as pad
from triplane.unified_ir.ops.rows.movement.structure import reshape as reshape
from triplane.unified_ir.ops.rows.movement.structure import shape as shape
from triplane.unified_ir.ops.rows.movement.structure import squeeze as squeeze
from triplane.unified_ir.ops.rows.movement.structure import stack as stack
from triplane.unified_ir.ops.rows.movement.structure import stop_gradient as stop_gradient
from triplane.unified_ir.ops.rows.movement.structure import transpose as transpose
from triplane.unified_ir.ops.rows.movement.structure import unsqueeze as unsqueeze
from triplane.unified_ir.ops.rows.movement.structure import where as where
from triplane.unified_ir.ops.rows.movement.structure import zeros as zeros
from triplane.unified_ir.ops.rows.randomness.random import dropout as dropout
from triplane.unified_ir.ops.rows.randomness.random import fold_in as fold_in
from triplane.unified_ir.ops.rows.randomness.random import next_key as next_key
from triplane.unified_ir.ops.rows.randomness.random import random_bits as random_bits
from triplane.unified_ir.ops.rows.randomness.random import random_normal as random_normal
from triplane.unified_ir.ops.rows.randomness.random import random_uniform as random_uniform
from triplane.unified_ir.ops.rows.recurrence.attention import (
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from triplane.unified_ir.ops.rows.windows.convolution import conv as conv
from triplane.unified_ir.ops.rows.windows.convolution import conv_transpose as conv_transpose
from triplane.unified_ir.ops.rows.windows.detection import (
    non_max_suppression as non_max_suppression,
)
from triplane.unified_ir.ops.rows.windows.mean_pool import adaptive_avg_pool as adaptive_avg_pool
from triplane.unified_ir.ops.rows.windows.mean_pool import avg_pool as avg_pool
from triplane.unified_ir.ops.rows.windows.mean_pool import (
    global_average_pool as global_average_pool,
)
from triplane.unified_ir.ops.rows.windows.mean_pool import lp_pool as lp_pool
from triplane.unified_ir.ops.rows.windows.patches import fold as fold
from triplane.unified_ir.ops.rows.windows.patches import unfold as unfold
from triplane.unified_ir.ops.rows.windows.pool import global_max_pool as global_max_pool
from triplane.unified_ir.ops.rows.windows.pool import max_pool as max_pool
from triplane.unified_ir.ops.rows.windows.sampling import affine_grid as affine_grid
from triplane.unified_ir.ops.rows.windows.sampling import grid_sample as grid_sample
from triplane.unified_ir.ops.summaries import histogram_summary as histogram_summary
from triplane.unified_ir.ops.summaries import image_summary as image_summary
from triplane.unified_ir.ops.summaries import scalar_summary as scalar_summary
from triplane.unified_ir.ops.table import TABLE as _TABLE
from triplane.unified_ir.ops.tensor import Tensor as Tensor
from triplane.unified_ir.ops.tensor import taking_arrays as _taking_arrays

_EXPORTED: Final = {row.export: row for row in _TABLE.values() if row.export}
assert not _EXPORTED.keys() & globals().keys(), "a row is exported under a name that is taken"
globals().update(_EXPORTED)
_HELPERS: Final = {"Final", "FunctionType", "ModuleType"}
__all__ = [
    name
    for name, value in globals().items()
    if name not in _HELPERS and not name.startswith("_") and not isinstance(value, ModuleType)
]

# Rows accept numpy arrays and strategies; with this every exported function does, too.
for _name in __all__:
    if isinstance(globals()[_name], FunctionType):
        globals()[_name] = _taking_arrays(globals()[_name])
        globals()[_name].shard = _with_shard(globals()[_name], f"ops.{_name}")

"""Types of the operators; generated from the table, see tests/ops/test_signatures.py."""

from collections.abc import Sequence

from triplane.unified_ir.ir.types import DType
from triplane.unified_ir.ops.tensor import TensorLike
from triplane.unified_ir.ops.arrays import all as all
from triplane.unified_ir.ops.arrays import amax as amax
from triplane.unified_ir.ops.arrays import amin as amin
from triplane.unified_ir.ops.arrays import any as any
from triplane.unified_ir.ops.arrays import argsort as argsort
from triplane.unified_ir.ops.arrays import count_nonzero as count_nonzero
from triplane.unified_ir.ops.arrays import cumprod as cumprod
from triplane.unified_ir.ops.arrays import cumsum as cumsum
from triplane.unified_ir.ops.arrays import diag as diag
from triplane.unified_ir.ops.arrays import diagonal as diagonal
from triplane.unified_ir.ops.arrays import dot as dot
from triplane.unified_ir.ops.arrays import exp2 as exp2
from triplane.unified_ir.ops.arrays import eye as eye
from triplane.unified_ir.ops.arrays import flip as flip
from triplane.unified_ir.ops.arrays import full_like as full_like
from triplane.unified_ir.ops.arrays import is_finite as is_finite
from triplane.unified_ir.ops.arrays import linspace as linspace
from triplane.unified_ir.ops.arrays import log10 as log10
from triplane.unified_ir.ops.arrays import log2 as log2
from triplane.unified_ir.ops.arrays import log_sigmoid as log_sigmoid
from triplane.unified_ir.ops.arrays import logsumexp as logsumexp
from triplane.unified_ir.ops.arrays import masked_fill as masked_fill
from triplane.unified_ir.ops.arrays import mean as mean
from triplane.unified_ir.ops.arrays import meshgrid as meshgrid
from triplane.unified_ir.ops.arrays import moveaxis as moveaxis
from triplane.unified_ir.ops.arrays import ones_like as ones_like
from triplane.unified_ir.ops.arrays import outer as outer
from triplane.unified_ir.ops.arrays import prod as prod
from triplane.unified_ir.ops.arrays import relu6 as relu6
from triplane.unified_ir.ops.arrays import repeat as repeat
from triplane.unified_ir.ops.arrays import roll as roll
from triplane.unified_ir.ops.arrays import rsqrt as rsqrt
from triplane.unified_ir.ops.arrays import silu as silu
from triplane.unified_ir.ops.arrays import sort as sort
from triplane.unified_ir.ops.arrays import split as split
from triplane.unified_ir.ops.arrays import square as square
from triplane.unified_ir.ops.arrays import std as std
from triplane.unified_ir.ops.arrays import sum as sum
from triplane.unified_ir.ops.arrays import swapaxes as swapaxes
from triplane.unified_ir.ops.arrays import tile as tile
from triplane.unified_ir.ops.arrays import trace as trace
from triplane.unified_ir.ops.arrays import tril as tril
from triplane.unified_ir.ops.arrays import triu as triu
from triplane.unified_ir.ops.arrays import unstack as unstack
from triplane.unified_ir.ops.arrays import var as var
from triplane.unified_ir.ops.arrays import vector_norm as vector_norm
from triplane.unified_ir.ops.arrays import zeros_like as zeros_like
from triplane.unified_ir.ops.ctc import ctc as ctc
from triplane.unified_ir.ops.losses import binary_cross_entropy as binary_cross_entropy
from triplane.unified_ir.ops.losses import cosine_embedding as cosine_embedding
from triplane.unified_ir.ops.losses import cosine_similarity as cosine_similarity
from triplane.unified_ir.ops.losses import cross_entropy as cross_entropy
from triplane.unified_ir.ops.losses import huber as huber
from triplane.unified_ir.ops.losses import kl_divergence as kl_divergence
from triplane.unified_ir.ops.losses import negative_log_likelihood as negative_log_likelihood
from triplane.unified_ir.ops.losses import smooth_l1 as smooth_l1
from triplane.unified_ir.ops.rows.arithmetic.equations import einsum as einsum
from triplane.unified_ir.ops.rows.arithmetic.matrix import linear as linear
from triplane.unified_ir.ops.rows.arithmetic.norm import batch_norm as batch_norm
from triplane.unified_ir.ops.rows.arithmetic.norm import batch_norm_training as batch_norm_training
from triplane.unified_ir.ops.rows.arithmetic.norm import layer_norm as layer_norm
from triplane.unified_ir.ops.rows.arithmetic.reductions import argmax as argmax
from triplane.unified_ir.ops.rows.arithmetic.reductions import argmin as argmin
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import group_norm as group_norm
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import instance_norm as instance_norm
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import local_response_norm as local_response_norm
from triplane.unified_ir.ops.rows.arithmetic.sample_norm import rms_norm as rms_norm
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
from triplane.unified_ir.ops.rows.data.sequences import sequence as sequence
from triplane.unified_ir.ops.rows.data.sequences import sequence_map as sequence_map
from triplane.unified_ir.ops.rows.data.sequences import split_to_sequence as split_to_sequence
from triplane.unified_ir.ops.rows.data.sequences import stack_from_sequence as stack_from_sequence
from triplane.unified_ir.ops.rows.movement.indexing import arange as arange
from triplane.unified_ir.ops.rows.movement.indexing import embedding as embedding
from triplane.unified_ir.ops.rows.movement.indexing import one_hot as one_hot
from triplane.unified_ir.ops.rows.movement.resizing import resize as resize
from triplane.unified_ir.ops.rows.movement.selection import compress as compress
from triplane.unified_ir.ops.rows.movement.selection import masked_select as masked_select
from triplane.unified_ir.ops.rows.movement.selection import nonzero as nonzero
from triplane.unified_ir.ops.rows.movement.selection import top_k as top_k
from triplane.unified_ir.ops.rows.movement.selection import unique as unique
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape as assume_shape
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
from triplane.unified_ir.ops.rows.movement.structure import unsqueeze as unsqueeze
from triplane.unified_ir.ops.rows.movement.structure import zeros as zeros
from triplane.unified_ir.ops.rows.randomness.random import dropout as dropout
from triplane.unified_ir.ops.rows.randomness.random import fold_in as fold_in
from triplane.unified_ir.ops.rows.randomness.random import next_key as next_key
from triplane.unified_ir.ops.rows.randomness.random import random_bits as random_bits
from triplane.unified_ir.ops.rows.randomness.random import random_normal as random_normal
from triplane.unified_ir.ops.rows.randomness.random import random_uniform as random_uniform
from triplane.unified_ir.ops.rows.recurrence.attention import scaled_dot_product_attention as scaled_dot_product_attention
from triplane.unified_ir.ops.rows.windows.convolution import conv as conv
from triplane.unified_ir.ops.rows.windows.convolution import conv_transpose as conv_transpose
from triplane.unified_ir.ops.rows.windows.mean_pool import adaptive_avg_pool as adaptive_avg_pool
from triplane.unified_ir.ops.rows.windows.mean_pool import avg_pool as avg_pool
from triplane.unified_ir.ops.rows.windows.mean_pool import lp_pool as lp_pool
from triplane.unified_ir.ops.rows.windows.patches import fold as fold
from triplane.unified_ir.ops.rows.windows.patches import unfold as unfold
from triplane.unified_ir.ops.rows.windows.pool import max_pool as max_pool
from triplane.unified_ir.ops.rows.windows.sampling import affine_grid as affine_grid
from triplane.unified_ir.ops.rows.windows.sampling import grid_sample as grid_sample
from triplane.unified_ir.ops.summaries import histogram_summary as histogram_summary
from triplane.unified_ir.ops.summaries import image_summary as image_summary
from triplane.unified_ir.ops.summaries import scalar_summary as scalar_summary
from triplane.unified_ir.ops.tensor import Tensor as Tensor

def abs_(x: TensorLike, /) -> Tensor: ...
def acos(x: TensorLike, /) -> Tensor: ...
def acosh(x: TensorLike, /) -> Tensor: ...
def add(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def asin(x: TensorLike, /) -> Tensor: ...
def asinh(x: TensorLike, /) -> Tensor: ...
def atan(x: TensorLike, /) -> Tensor: ...
def atanh(x: TensorLike, /) -> Tensor: ...
def bit_cast(x: TensorLike, /, to: int | DType) -> Tensor: ...
def bit_shift(x: TensorLike, y: TensorLike, /, direction: str) -> Tensor: ...
def bitwise_and(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def bitwise_not(x: TensorLike, /) -> Tensor: ...
def bitwise_or(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def bitwise_xor(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def blackman_window(
    size: TensorLike,
    /,
    *,
    output_datatype: int | DType = 1,
    periodic: int = 1,
) -> Tensor: ...
def ceil(x: TensorLike, /) -> Tensor: ...
def celu(x: TensorLike, /, alpha: float = 1.0) -> Tensor: ...
def clip(
    x: TensorLike,
    min: TensorLike | None = None,
    max: TensorLike | None = None,
    /,
) -> Tensor: ...
def cos(x: TensorLike, /) -> Tensor: ...
def cosh(x: TensorLike, /) -> Tensor: ...
def depth_to_space(x: TensorLike, /, *, blocksize: int, mode: str = 'DCR') -> Tensor: ...
def dequantize_linear(
    x: TensorLike,
    x_scale: TensorLike,
    x_zero_point: TensorLike | None = None,
    /,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int | DType = 0,
) -> Tensor: ...
def det(x: TensorLike, /) -> Tensor: ...
def dft(
    x: TensorLike,
    dft_length: TensorLike | None = None,
    axis: TensorLike | None = None,
    /,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor: ...
def div(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def elu(x: TensorLike, /, alpha: float = 1.0) -> Tensor: ...
def equal(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def erf(x: TensorLike, /) -> Tensor: ...
def exp(x: TensorLike, /) -> Tensor: ...
def floor(x: TensorLike, /) -> Tensor: ...
def gather(data: TensorLike, indices: TensorLike, /, axis: int = 0) -> Tensor: ...
def gather_elements(data: TensorLike, indices: TensorLike, /, axis: int = 0) -> Tensor: ...
def gather_nd(data: TensorLike, indices: TensorLike, /, batch_dims: int = 0) -> Tensor: ...
def gelu(x: TensorLike, /, approximate: str = 'none') -> Tensor: ...
def gemm(
    a: TensorLike,
    b: TensorLike,
    c: TensorLike | None = None,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor: ...
def global_average_pool(x: TensorLike, /) -> Tensor: ...
def global_max_pool(x: TensorLike, /) -> Tensor: ...
def greater(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def greater_equal(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def hamming_window(
    size: TensorLike,
    /,
    *,
    output_datatype: int | DType = 1,
    periodic: int = 1,
) -> Tensor: ...
def hann_window(
    size: TensorLike,
    /,
    *,
    output_datatype: int | DType = 1,
    periodic: int = 1,
) -> Tensor: ...
def hard_sigmoid(x: TensorLike, /, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor: ...
def hard_swish(x: TensorLike, /) -> Tensor: ...
def hardmax(x: TensorLike, /, axis: int = -1) -> Tensor: ...
def is_inf(x: TensorLike, /, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor: ...
def is_nan(x: TensorLike, /) -> Tensor: ...
def leaky_relu(x: TensorLike, /, alpha: float = 0.01) -> Tensor: ...
def less(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def less_equal(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def log(x: TensorLike, /) -> Tensor: ...
def log_softmax(x: TensorLike, /, axis: int = -1) -> Tensor: ...
def logical_and(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def logical_not(x: TensorLike, /) -> Tensor: ...
def logical_or(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def logical_xor(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def matmul(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def maximum(*data: TensorLike) -> Tensor: ...
def mel_weight_matrix(
    num_mel_bins: TensorLike,
    dft_length: TensorLike,
    sample_rate: TensorLike,
    lower_edge_hertz: TensorLike,
    upper_edge_hertz: TensorLike,
    /,
    output_datatype: int | DType = 1,
) -> Tensor: ...
def minimum(*data: TensorLike) -> Tensor: ...
def mish(x: TensorLike, /) -> Tensor: ...
def mod(a: TensorLike, b: TensorLike, /, fmod: int = 0) -> Tensor: ...
def mul(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def neg(x: TensorLike, /) -> Tensor: ...
def non_max_suppression(
    boxes: TensorLike,
    scores: TensorLike,
    max_output_boxes_per_class: TensorLike | None = None,
    iou_threshold: TensorLike | None = None,
    score_threshold: TensorLike | None = None,
    /,
    *,
    center_point_box: int = 0,
) -> Tensor: ...
def optional_get_element(x: TensorLike, /) -> Tensor: ...
def optional_has_element(x: TensorLike | None = None, /) -> Tensor: ...
def power(x: TensorLike, y: TensorLike, /) -> Tensor: ...
def prelu(x: TensorLike, slope: TensorLike, /) -> Tensor: ...
def quantize_linear(
    x: TensorLike,
    y_scale: TensorLike,
    y_zero_point: TensorLike | None = None,
    /,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int | DType = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor: ...
def reciprocal(x: TensorLike, /) -> Tensor: ...
def regex_full_match(x: TensorLike, /, pattern: str | None = None) -> Tensor: ...
def relu(x: TensorLike, /) -> Tensor: ...
def reverse_sequence(
    x: TensorLike,
    sequence_lens: TensorLike,
    /,
    *,
    batch_axis: int = 1,
    time_axis: int = 0,
) -> Tensor: ...
def round_(x: TensorLike, /) -> Tensor: ...
def scatter_elements(
    data: TensorLike,
    indices: TensorLike,
    updates: TensorLike,
    /,
    *,
    axis: int = 0,
    reduction: str = 'none',
) -> Tensor: ...
def scatter_nd(
    data: TensorLike,
    indices: TensorLike,
    updates: TensorLike,
    /,
    reduction: str = 'none',
) -> Tensor: ...
def selu(x: TensorLike, /, *, alpha: float = 1.6732632, gamma: float = 1.050701) -> Tensor: ...
def sequence_at(input_sequence: TensorLike, position: TensorLike, /) -> Tensor: ...
def sequence_erase(input_sequence: TensorLike, position: TensorLike | None = None, /) -> Tensor: ...
def sequence_insert(
    input_sequence: TensorLike,
    tensor: TensorLike,
    position: TensorLike | None = None,
    /,
) -> Tensor: ...
def sequence_length(input_sequence: TensorLike, /) -> Tensor: ...
def shrink(x: TensorLike, /, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor: ...
def sigmoid(x: TensorLike, /) -> Tensor: ...
def sign(x: TensorLike, /) -> Tensor: ...
def sin(x: TensorLike, /) -> Tensor: ...
def sinh(x: TensorLike, /) -> Tensor: ...
def softmax(x: TensorLike, /, axis: int = -1) -> Tensor: ...
def softplus(x: TensorLike, /) -> Tensor: ...
def softsign(x: TensorLike, /) -> Tensor: ...
def space_to_depth(x: TensorLike, /, blocksize: int) -> Tensor: ...
def sqrt(x: TensorLike, /) -> Tensor: ...
def stft(
    signal: TensorLike,
    frame_step: TensorLike,
    window: TensorLike | None = None,
    frame_length: TensorLike | None = None,
    /,
    *,
    onesided: int = 1,
) -> Tensor: ...
def stop_gradient(x: TensorLike, /) -> Tensor: ...
def string_concat(x: TensorLike, y: TensorLike, /) -> Tensor: ...
def string_split(
    x: TensorLike,
    /,
    *,
    delimiter: str | None = None,
    maxsplit: int | None = None,
) -> Tensor: ...
def sub(a: TensorLike, b: TensorLike, /) -> Tensor: ...
def tan(x: TensorLike, /) -> Tensor: ...
def tanh(x: TensorLike, /) -> Tensor: ...
def thresholded_relu(x: TensorLike, /, alpha: float = 1.0) -> Tensor: ...
def transpose(data: TensorLike, /, perm: Sequence[int] | None = None) -> Tensor: ...
def where(condition: TensorLike, x: TensorLike, y: TensorLike, /) -> Tensor: ...

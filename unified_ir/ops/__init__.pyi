"""Types of the operators; generated from the table, see tests/ops/test_signatures.py."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import numpy as np

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import DType
from triplane.unified_ir.ops.tensor import Axes, HasTensor, TensorLike

_Operand = Tensor | Array | np.generic | HasTensor
_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)

class _Operator(Protocol[_P, _R]):
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def shard(self, *strategy: Sequence[int]) -> Callable[_P, _R]: ...

def _operator(function: Callable[_P, _R]) -> _Operator[_P, _R]: ...

from triplane.unified_ir.ops.arrays import eye as eye
from triplane.unified_ir.ops.arrays import linspace as linspace
from triplane.unified_ir.ops.rows.control.conditional import cond as cond
from triplane.unified_ir.ops.rows.control.custom_gradients import custom_gradient as custom_gradient
from triplane.unified_ir.ops.rows.control.custom_ops import CustomOp as CustomOp
from triplane.unified_ir.ops.rows.control.custom_ops import custom as custom
from triplane.unified_ir.ops.rows.control.looping import fori_loop as fori_loop
from triplane.unified_ir.ops.rows.control.looping import while_loop as while_loop
from triplane.unified_ir.ops.rows.control.scanning import scan as scan
from triplane.unified_ir.ops.rows.data.sequences import empty_sequence as empty_sequence
from triplane.unified_ir.ops.rows.data.sequences import optional as optional
from triplane.unified_ir.ops.rows.data.sequences import sequence as sequence
from triplane.unified_ir.ops.rows.data.sequences import sequence_map as sequence_map
from triplane.unified_ir.ops.rows.movement.indexing import arange as arange
from triplane.unified_ir.ops.rows.movement.structure import constant as constant
from triplane.unified_ir.ops.rows.movement.structure import full as full
from triplane.unified_ir.ops.rows.movement.structure import ones as ones
from triplane.unified_ir.ops.rows.movement.structure import zeros as zeros
from triplane.unified_ir.ops.tensor import Tensor as Tensor
from triplane.unified_ir.ops.rows.movement.structure import cast as _cast
from triplane.unified_ir.ops.rows.movement.structure import concat as _concat
from triplane.unified_ir.ops.rows.movement.structure import expand as _expand
from triplane.unified_ir.ops.rows.movement.structure import pad as _pad
from triplane.unified_ir.ops.rows.movement.structure import reshape as _reshape
from triplane.unified_ir.ops.rows.movement.structure import stack as _stack
from triplane.unified_ir.ops.rows.windows.convolution import conv as _conv
from triplane.unified_ir.ops.rows.windows.convolution import conv_transpose as _conv_transpose
from triplane.unified_ir.ops.rows.windows.mean_pool import avg_pool as _avg_pool
from triplane.unified_ir.ops.rows.windows.mean_pool import lp_pool as _lp_pool
from triplane.unified_ir.ops.rows.windows.patches import fold as _fold
from triplane.unified_ir.ops.rows.windows.patches import unfold as _unfold
from triplane.unified_ir.ops.rows.windows.pool import max_pool as _max_pool

@_operator
def abs_(x: TensorLike, /) -> Tensor: ...
@_operator
def acos(x: TensorLike, /) -> Tensor: ...
@_operator
def acosh(x: TensorLike, /) -> Tensor: ...
@_operator
def adaptive_avg_pool(x: _Operand, size: int | Sequence[int | None]) -> Tensor: ...
@_operator
def add(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def affine_grid(theta: _Operand, size: Sequence[Dim], *, align_corners: bool = False) -> Tensor: ...
@_operator
def all(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
def amax(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
def amin(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
def any(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
def argmax(x: _Operand, axis: int = -1) -> Tensor: ...
@_operator
def argmin(x: _Operand, axis: int = -1) -> Tensor: ...
@_operator
def argsort(x: _Operand, axis: int = -1, *, descending: bool = False) -> Tensor: ...
@_operator
def asin(x: TensorLike, /) -> Tensor: ...
@_operator
def asinh(x: TensorLike, /) -> Tensor: ...
@_operator
def assume_shape(x: _Operand, shape: Sequence[Dim | str]) -> Tensor: ...
@_operator
def atan(x: TensorLike, /) -> Tensor: ...
@_operator
def atanh(x: TensorLike, /) -> Tensor: ...
@_operator
def batch_norm(
    x: _Operand,
    mean: _Operand,
    var: _Operand,
    scale: _Operand,
    bias: _Operand,
    *,
    epsilon: float = 1e-05,
) -> Tensor: ...
@_operator
def batch_norm_training(
    x: _Operand,
    scale: _Operand,
    bias: _Operand,
    *,
    epsilon: float = 1e-05,
) -> tuple[Tensor, Tensor, Tensor]: ...
@_operator
def binary_cross_entropy(
    logits: _Operand,
    targets: _Operand,
    *,
    positive_weight: Tensor | float | None = None,
) -> Tensor: ...
@_operator
def bit_cast(x: TensorLike, /, to: int | DType) -> Tensor: ...
@_operator
def bit_shift(x: TensorLike, y: TensorLike, /, direction: str) -> Tensor: ...
@_operator
def bitwise_and(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def bitwise_not(x: TensorLike, /) -> Tensor: ...
@_operator
def bitwise_or(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def bitwise_xor(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def blackman_window(
    size: TensorLike,
    /,
    *,
    output_datatype: int | DType = 1,
    periodic: int = 1,
) -> Tensor: ...
@_operator
def ceil(x: TensorLike, /) -> Tensor: ...
@_operator
def celu(x: TensorLike, /, alpha: float = 1.0) -> Tensor: ...
@_operator
def clip(
    x: TensorLike,
    min: TensorLike | None = None,
    max: TensorLike | None = None,
    /,
) -> Tensor: ...
@_operator
def compress(x: _Operand, marks: _Operand, axis: int | None = None) -> Tensor: ...
@_operator
def concat_from_sequence(held: _Operand, *, axis: int = 0) -> Tensor: ...
@_operator
def cos(x: TensorLike, /) -> Tensor: ...
@_operator
def cosh(x: TensorLike, /) -> Tensor: ...
@_operator
def cosine_embedding(
    a: _Operand,
    b: _Operand,
    same: _Operand,
    *,
    margin: float = 0.0,
) -> Tensor: ...
@_operator
def cosine_similarity(
    a: _Operand,
    b: _Operand,
    *,
    axis: int = -1,
    epsilon: float = 1e-08,
) -> Tensor: ...
@_operator
def count_nonzero(x: _Operand, axis: Axes = None) -> Tensor: ...
@_operator
def cross_entropy(
    logits: _Operand,
    labels: _Operand,
    *,
    weight: _Operand | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor: ...
@_operator
def ctc(
    log_p: _Operand,
    labels: _Operand,
    label_lengths: _Operand,
    *,
    input_lengths: _Operand | None = None,
    blank: int = 0,
) -> Tensor: ...
@_operator
def cumprod(
    x: _Operand,
    axis: int,
    *,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor: ...
@_operator
def cumsum(x: _Operand, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor: ...
@_operator
def depth_to_space(x: TensorLike, /, *, blocksize: int, mode: str = 'DCR') -> Tensor: ...
@_operator
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
@_operator
def det(x: TensorLike, /) -> Tensor: ...
@_operator
def dft(
    x: TensorLike,
    dft_length: TensorLike | None = None,
    axis: TensorLike | None = None,
    /,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor: ...
@_operator
def diag(x: _Operand) -> Tensor: ...
@_operator
def diagonal(x: _Operand) -> Tensor: ...
@_operator
def div(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def dot(a: _Operand, b: _Operand) -> Tensor: ...
@_operator
def dropout(x: _Operand, key: _Operand, p_drop: float) -> Tensor: ...
@_operator
def einsum(equation: str, *xs: _Operand) -> Tensor: ...
@_operator
def elu(x: TensorLike, /, alpha: float = 1.0) -> Tensor: ...
@_operator
def embedding(table: _Operand, ids: TensorLike) -> Tensor: ...
@_operator
def equal(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def erf(x: TensorLike, /) -> Tensor: ...
@_operator
def exp(x: TensorLike, /) -> Tensor: ...
@_operator
def exp2(x: _Operand) -> Tensor: ...
@_operator
def flatten(x: _Operand, start: int = 1) -> Tensor: ...
@_operator
def flip(x: _Operand, *axes: int) -> Tensor: ...
@_operator
def floor(x: TensorLike, /) -> Tensor: ...
@_operator
def fold_in(key: _Operand, number: int) -> Tensor: ...
@_operator
def full_like(x: _Operand, value: float) -> Tensor: ...
@_operator
def gather(data: TensorLike, indices: TensorLike, /, axis: int = 0) -> Tensor: ...
@_operator
def gather_elements(data: TensorLike, indices: TensorLike, /, axis: int = 0) -> Tensor: ...
@_operator
def gather_nd(data: TensorLike, indices: TensorLike, /, batch_dims: int = 0) -> Tensor: ...
@_operator
def gelu(x: TensorLike, /, approximate: str = 'none') -> Tensor: ...
@_operator
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
@_operator
def global_average_pool(x: TensorLike, /) -> Tensor: ...
@_operator
def global_max_pool(x: TensorLike, /) -> Tensor: ...
@_operator
def greater(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def greater_equal(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def grid_sample(
    x: _Operand,
    grid: _Operand,
    *,
    mode: str = 'bilinear',
    padding_mode: str = 'zeros',
    align_corners: bool = False,
) -> Tensor: ...
@_operator
def group_norm(
    x: _Operand,
    groups: int,
    scale: _Operand,
    bias: _Operand,
    *,
    epsilon: float = 1e-05,
) -> Tensor: ...
@_operator
def hamming_window(
    size: TensorLike,
    /,
    *,
    output_datatype: int | DType = 1,
    periodic: int = 1,
) -> Tensor: ...
@_operator
def hann_window(
    size: TensorLike,
    /,
    *,
    output_datatype: int | DType = 1,
    periodic: int = 1,
) -> Tensor: ...
@_operator
def hard_sigmoid(x: TensorLike, /, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor: ...
@_operator
def hard_swish(x: TensorLike, /) -> Tensor: ...
@_operator
def hardmax(x: TensorLike, /, axis: int = -1) -> Tensor: ...
@_operator
def histogram_summary(name: str, x: _Operand) -> None: ...
@_operator
def huber(y: _Operand, target: _Operand, *, delta: float = 1.0) -> Tensor: ...
@_operator
def image_summary(name: str, x: _Operand) -> None: ...
@_operator
def instance_norm(
    x: _Operand,
    scale: _Operand,
    bias: _Operand,
    *,
    epsilon: float = 1e-05,
) -> Tensor: ...
@_operator
def is_finite(x: _Operand) -> Tensor: ...
@_operator
def is_inf(x: TensorLike, /, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor: ...
@_operator
def is_nan(x: TensorLike, /) -> Tensor: ...
@_operator
def kl_divergence(log_q: _Operand, p: _Operand) -> Tensor: ...
@_operator
def layer_norm(
    x: _Operand,
    scale: _Operand,
    bias: _Operand,
    *,
    epsilon: float = 1e-05,
) -> Tensor: ...
@_operator
def leaky_relu(x: TensorLike, /, alpha: float = 0.01) -> Tensor: ...
@_operator
def less(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def less_equal(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def linear(x: _Operand, weight: _Operand, bias: _Operand | None = None) -> Tensor: ...
@_operator
def local_response_norm(
    x: _Operand,
    size: int,
    *,
    alpha: float = 0.0001,
    beta: float = 0.75,
    bias: float = 1.0,
) -> Tensor: ...
@_operator
def log(x: TensorLike, /) -> Tensor: ...
@_operator
def log10(x: _Operand) -> Tensor: ...
@_operator
def log2(x: _Operand) -> Tensor: ...
@_operator
def log_sigmoid(x: _Operand) -> Tensor: ...
@_operator
def log_softmax(x: TensorLike, /, axis: int = -1) -> Tensor: ...
@_operator
def logical_and(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def logical_not(x: TensorLike, /) -> Tensor: ...
@_operator
def logical_or(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def logical_xor(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def logsumexp(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
def masked_fill(x: _Operand, mask: TensorLike, value: TensorLike) -> Tensor: ...
@_operator
def masked_select(x: _Operand, mask: _Operand) -> Tensor: ...
@_operator
def matmul(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def maximum(*data: TensorLike) -> Tensor: ...
@_operator
def mean(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
def mel_weight_matrix(
    num_mel_bins: TensorLike,
    dft_length: TensorLike,
    sample_rate: TensorLike,
    lower_edge_hertz: TensorLike,
    upper_edge_hertz: TensorLike,
    /,
    output_datatype: int | DType = 1,
) -> Tensor: ...
@_operator
def meshgrid(*xs: _Operand) -> tuple[Tensor, ...]: ...
@_operator
def minimum(*data: TensorLike) -> Tensor: ...
@_operator
def mish(x: TensorLike, /) -> Tensor: ...
@_operator
def mod(a: TensorLike, b: TensorLike, /, fmod: int = 0) -> Tensor: ...
@_operator
def moveaxis(x: _Operand, source: int, target: int) -> Tensor: ...
@_operator
def mul(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def neg(x: TensorLike, /) -> Tensor: ...
@_operator
def negative_log_likelihood(log_p: _Operand, labels: _Operand) -> Tensor: ...
@_operator
def next_key(key: _Operand) -> Tensor: ...
@_operator
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
@_operator
def nonzero(x: _Operand) -> Tensor: ...
@_operator
def one_hot(labels: _Operand, depth: int, dtype: DType | str = 'float32') -> Tensor: ...
@_operator
def ones_like(x: _Operand) -> Tensor: ...
@_operator
def optional_get_element(x: TensorLike, /) -> Tensor: ...
@_operator
def optional_has_element(x: TensorLike | None = None, /) -> Tensor: ...
@_operator
def outer(a: _Operand, b: _Operand) -> Tensor: ...
@_operator
def power(x: TensorLike, y: TensorLike, /) -> Tensor: ...
@_operator
def prelu(x: TensorLike, slope: TensorLike, /) -> Tensor: ...
@_operator
def prod(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
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
@_operator
def random_bits(key: _Operand, shape: Sequence[Dim] | Dim) -> Tensor: ...
@_operator
def random_normal(key: _Operand, shape: Sequence[Dim] | Dim) -> Tensor: ...
@_operator
def random_uniform(key: _Operand, shape: Sequence[Dim] | Dim) -> Tensor: ...
@_operator
def reciprocal(x: TensorLike, /) -> Tensor: ...
@_operator
def regex_full_match(x: TensorLike, /, pattern: str | None = None) -> Tensor: ...
@_operator
def relu(x: TensorLike, /) -> Tensor: ...
@_operator
def relu6(x: _Operand) -> Tensor: ...
@_operator
def repeat(x: _Operand, times: int, axis: int) -> Tensor: ...
@_operator
def resize(
    x: _Operand,
    size: Sequence[Dim] | None = None,
    *,
    scale: float | Sequence[float] | None = None,
    mode: str = 'nearest',
    align_corners: bool = False,
    antialias: bool = False,
) -> Tensor: ...
@_operator
def reverse_sequence(
    x: TensorLike,
    sequence_lens: TensorLike,
    /,
    *,
    batch_axis: int = 1,
    time_axis: int = 0,
) -> Tensor: ...
@_operator
def rms_norm(x: _Operand, scale: _Operand, *, epsilon: float = 1e-05) -> Tensor: ...
@_operator
def roll(x: _Operand, shift: int, axis: int) -> Tensor: ...
@_operator
def round_(x: TensorLike, /) -> Tensor: ...
@_operator
def rsqrt(x: _Operand) -> Tensor: ...
@_operator
def scalar_summary(name: str, x: _Operand) -> None: ...
@_operator
def scaled_dot_product_attention(
    q: _Operand,
    k: _Operand,
    v: _Operand,
    mask: _Operand | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor: ...
@_operator
def scatter_elements(
    data: TensorLike,
    indices: TensorLike,
    updates: TensorLike,
    /,
    *,
    axis: int = 0,
    reduction: str = 'none',
) -> Tensor: ...
@_operator
def scatter_nd(
    data: TensorLike,
    indices: TensorLike,
    updates: TensorLike,
    /,
    reduction: str = 'none',
) -> Tensor: ...
@_operator
def selu(x: TensorLike, /, *, alpha: float = 1.6732632, gamma: float = 1.050701) -> Tensor: ...
@_operator
def sequence_at(input_sequence: TensorLike, position: TensorLike, /) -> Tensor: ...
@_operator
def sequence_erase(input_sequence: TensorLike, position: TensorLike | None = None, /) -> Tensor: ...
@_operator
def sequence_insert(
    input_sequence: TensorLike,
    tensor: TensorLike,
    position: TensorLike | None = None,
    /,
) -> Tensor: ...
@_operator
def sequence_length(input_sequence: TensorLike, /) -> Tensor: ...
@_operator
def shape(x: _Operand) -> Tensor: ...
@_operator
def shrink(x: TensorLike, /, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor: ...
@_operator
def sigmoid(x: TensorLike, /) -> Tensor: ...
@_operator
def sign(x: TensorLike, /) -> Tensor: ...
@_operator
def silu(x: _Operand) -> Tensor: ...
@_operator
def sin(x: TensorLike, /) -> Tensor: ...
@_operator
def sinh(x: TensorLike, /) -> Tensor: ...
@_operator
def smooth_l1(y: _Operand, target: _Operand, *, beta: float = 1.0) -> Tensor: ...
@_operator
def softmax(x: TensorLike, /, axis: int = -1) -> Tensor: ...
@_operator
def softplus(x: TensorLike, /) -> Tensor: ...
@_operator
def softsign(x: TensorLike, /) -> Tensor: ...
@_operator
def sort(x: _Operand, axis: int = -1, *, descending: bool = False) -> Tensor: ...
@_operator
def space_to_depth(x: TensorLike, /, blocksize: int) -> Tensor: ...
@_operator
def split(x: _Operand, sizes: int | Sequence[Dim], axis: int = 0) -> tuple[Tensor, ...]: ...
@_operator
def split_to_sequence(
    x: _Operand,
    split: TensorLike | Sequence[int] | None = None,
    *,
    axis: int = 0,
    keepdims: bool = True,
) -> Tensor: ...
@_operator
def sqrt(x: TensorLike, /) -> Tensor: ...
@_operator
def square(x: _Operand) -> Tensor: ...
@_operator
def squeeze(x: _Operand, *axes: int) -> Tensor: ...
@_operator
def stack_from_sequence(held: _Operand, *, axis: int = 0) -> Tensor: ...
@_operator
def std(
    x: _Operand,
    axis: Axes = None,
    *,
    correction: int = 0,
    keepdims: bool = False,
) -> Tensor: ...
@_operator
def stft(
    signal: TensorLike,
    frame_step: TensorLike,
    window: TensorLike | None = None,
    frame_length: TensorLike | None = None,
    /,
    *,
    onesided: int = 1,
) -> Tensor: ...
@_operator
def stop_gradient(x: TensorLike, /) -> Tensor: ...
@_operator
def string_concat(x: TensorLike, y: TensorLike, /) -> Tensor: ...
@_operator
def string_split(
    x: TensorLike,
    /,
    *,
    delimiter: str | None = None,
    maxsplit: int | None = None,
) -> Tensor: ...
@_operator
def sub(a: TensorLike, b: TensorLike, /) -> Tensor: ...
@_operator
def sum(x: _Operand, axis: Axes = None, *, keepdims: bool = False) -> Tensor: ...
@_operator
def swapaxes(x: _Operand, a: int, b: int) -> Tensor: ...
@_operator
def tan(x: TensorLike, /) -> Tensor: ...
@_operator
def tanh(x: TensorLike, /) -> Tensor: ...
@_operator
def thresholded_relu(x: TensorLike, /, alpha: float = 1.0) -> Tensor: ...
@_operator
def tile(x: _Operand, repeats: int | Sequence[int]) -> Tensor: ...
@_operator
def top_k(
    x: _Operand,
    k: int,
    axis: int = -1,
    *,
    largest: bool = True,
) -> tuple[Tensor, Tensor]: ...
@_operator
def trace(x: _Operand) -> Tensor: ...
@_operator
def transpose(data: TensorLike, /, perm: Sequence[int] | None = None) -> Tensor: ...
@_operator
def tril(x: _Operand, k: int = 0) -> Tensor: ...
@_operator
def triu(x: _Operand, k: int = 0) -> Tensor: ...
@_operator
def unique(x: _Operand) -> Tensor: ...
@_operator
def unsqueeze(x: _Operand, *axes: int) -> Tensor: ...
@_operator
def unstack(x: _Operand, axis: int = 0) -> tuple[Tensor, ...]: ...
@_operator
def var(
    x: _Operand,
    axis: Axes = None,
    *,
    correction: int = 0,
    keepdims: bool = False,
) -> Tensor: ...
@_operator
def vector_norm(
    x: _Operand,
    order: float = 2,
    axis: Axes = None,
    *,
    keepdims: bool = False,
) -> Tensor: ...
@_operator
def where(condition: TensorLike, x: TensorLike, y: TensorLike, /) -> Tensor: ...
@_operator
def zeros_like(x: _Operand) -> Tensor: ...
cast = _operator(_cast)
concat = _operator(_concat)
expand = _operator(_expand)
pad = _operator(_pad)
reshape = _operator(_reshape)
stack = _operator(_stack)
conv = _operator(_conv)
conv_transpose = _operator(_conv_transpose)
avg_pool = _operator(_avg_pool)
lp_pool = _operator(_lp_pool)
fold = _operator(_fold)
unfold = _operator(_unfold)
max_pool = _operator(_max_pool)

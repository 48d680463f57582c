"""Our side of the golden cases of benchmarks/oracles/ops.py, by name."""

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.ops.losses import weighted_cross_entropy
from triplane.unified_ir.ops.table import TABLE


def row(name, domain=""):
    return TABLE[domain, name]


def _conv(**options):
    return lambda x, w, b=None: ops.conv(x, w, b, **options)


def _max_pool(x, kernel=2, stride=None, padding=0):
    return ops.max_pool(x, kernel, stride=stride, padding=padding)


def _scatter(reduction):
    return lambda x, ids, updates: ops.scatter_elements(
        x, ids, updates, axis=1, reduction=reduction
    )


def _padded(mode):
    return lambda x: row("Pad")(x, np.array([3, 1, 0, 2]), None, np.array([2, 3]), mode=mode)


TILED = {"kernel_shape": (2, 2), "strides": (2, 2)}


def _masked(x):
    return ops.softmax(x + np.array([0, 0, -np.inf, 0, -1e9], x.dtype.numpy))


def _sequence(name, states, **attrs):
    return lambda *xs: row(name).all_outputs(*xs[:4], None, *xs[4:], outputs=1 + states, **attrs)


def _lstm_of_lengths(x, w, r, b, h, c):
    lengths = np.array([4, 2, 1], np.int32)
    return row("LSTM").all_outputs(x, w, r, b, lengths, h, c, outputs=3, direction="bidirectional")


def _cross_entropy_smoothed(x, weight, labels):
    loss, counted = weighted_cross_entropy(x, labels, ops.stop_gradient(weight), -9, 0.2)
    assert counted is not None
    return loss.sum() / ops.stop_gradient(counted).sum()


def _sweep(name, outputs):
    return lambda *xs: row(name, "triplane").all_outputs(*xs, outputs=outputs)


# fmt: off
OURS = {
    "identity": row("Identity"),
    "stop_gradient": lambda x: x * ops.stop_gradient(x),
    "cast": lambda x: x.cast("float32").cast("float64"),
    "add": ops.add, "sub": ops.sub, "mul": ops.mul, "div": ops.div, "neg": ops.neg,
    "abs_at_0": ops.abs_, "exp": ops.exp, "log": ops.log, "sqrt": ops.sqrt,
    "reciprocal": row("Reciprocal"), "tanh": ops.tanh, "sigmoid": ops.sigmoid,
    "softplus": ops.softplus, "relu_at_0": ops.relu,
    "leaky_relu_at_0": lambda x: ops.leaky_relu(x, alpha=0.2),
    "tan": row("Tan"), "asin": row("Asin"), "acos": row("Acos"), "atan": row("Atan"),
    "sinh": row("Sinh"), "cosh": row("Cosh"), "asinh": row("Asinh"), "acosh": row("Acosh"),
    "atanh": row("Atanh"), "fmod": lambda a, b: row("Mod")(a, b, fmod=1),
    "sum_of_three": row("Sum"), "mean_of_three": row("Mean"),
    "elu_at_0": lambda x: row("Elu")(x, alpha=0.5),
    "celu_at_0": lambda x: row("Celu")(x, alpha=0.5), "selu": row("Selu"),
    "prelu_at_0": row("PRelu"), "thresholded_relu": row("ThresholdedRelu"),
    "softsign": row("Softsign"), "mish": row("Mish"), "silu": row("Swish"),
    "swish": lambda x: row("Swish")(x, alpha=0.5),
    "soft_shrink": lambda x: row("Shrink")(x, lambd=0.5, bias=0.5),
    "hard_shrink": lambda x: row("Shrink")(x, lambd=0.5),
    "clip_with_bounds": row("Clip"),
    "sin": ops.sin, "cos": ops.cos, "erf": ops.erf, "sign": ops.sign, "floor": ops.floor,
    "ceil": ops.ceil, "round_at_ties": ops.round_, "pow": ops.power,
    "square_of_negatives": lambda x: x**2.0, "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, approximate="tanh"),
    "hard_sigmoid": lambda x: ops.hard_sigmoid(x, alpha=1 / 6),
    "hard_swish": ops.hard_swish,
    "clip_at_its_bounds": lambda x: ops.clip(x, -1.0, 1.0),
    "clip_at_bounds_given": row("Clip"), "clip_of_crossed_bounds": row("Clip"),
    "clip_of_crossed_numbers": lambda x: ops.clip(x, 2.0, 1.0),
    "clip_from_below_at_its_bound": lambda x: ops.clip(x, 0.0),
    "relu6_at_its_bounds": ops.relu6,
    "hard_sigmoid_at_its_bounds": lambda x: ops.hard_sigmoid(x, alpha=1 / 6),
    "hard_swish_at_its_bounds": ops.hard_swish,
    "soft_shrink_at_its_bounds": lambda x: row("Shrink")(x, lambd=0.5, bias=0.5),
    "hard_shrink_at_its_bounds": lambda x: row("Shrink")(x, lambd=0.5),
    "thresholded_relu_at_its_bound": row("ThresholdedRelu"),
    "selu_at_0": row("Selu"), "softsign_at_0": row("Softsign"),
    "norm_of_order_infinity_of_ties": lambda x: ops.vector_norm(x, np.inf, 1),
    "powers_at_0": lambda x: x**0.0 + x**1.0 + x**2.0,
    "huber_at_its_bounds": lambda x, y: ops.huber(x, y, delta=0.5).mean(),
    "smooth_l1_at_its_bounds": lambda x, y: ops.smooth_l1(x, y, beta=0.5).mean(),
    "cosine_embedding_at_its_margin": lambda a, b, same: ops.cosine_embedding(a, b, same).mean(),
    "maximum_of_ties": ops.maximum, "minimum_of_ties": ops.minimum,
    "where": ops.where,
    "reshape": lambda x: x.reshape(3, 4), "transpose": lambda x: x.transpose(1, 2, 0),
    "expand": lambda x: ops.expand(x, (2, 3, 4)),
    "unsqueeze": lambda x: ops.unsqueeze(x, 0, -1), "squeeze": lambda x: ops.squeeze(x, 0),
    "concat": lambda a, b: ops.concat([a, b], 1), "slice": lambda x: x[1:3, :-1],
    "slice_with_steps": lambda x: x[1:7:3], "pad": lambda x: ops.pad(x, (1, 0, 0, 2)),
    "flip": lambda x: x[::-1],
    "pad_by_value": lambda x, value: row("Pad")(x, np.array([1, 2]), value, np.array([0])),
    "pad_that_crops": lambda x: row("Pad")(x, np.array([-1, 1, 0, -2])),
    "pad_reflect": _padded("reflect"), "pad_edge": _padded("edge"), "pad_wrap": _padded("wrap"),
    "sum": lambda x: x.sum((0, 2), keepdims=True), "mean": lambda x: x.mean((0, 2)),
    "amax_of_ties": lambda x: x.max((0, 2)),
    "amin_of_ties": lambda x: row("ReduceMin")(x, np.array([1]), keepdims=0),
    "norm_l1": lambda x: row("ReduceL1")(x, np.array([1])),
    "norm_l2_at_0": lambda x: row("ReduceL2")(x, np.array([1]), keepdims=0),
    "norm_l2": lambda x: row("ReduceL2")(x, np.array([1]), keepdims=0),
    "sum_of_squares": lambda x: row("ReduceSumSquare")(x, np.array([0]), keepdims=0),
    "log_sum": lambda x: row("ReduceLogSum")(x, np.array([1]), keepdims=0),
    "logsumexp": lambda x: row("ReduceLogSumExp")(x, np.array([0, 2]), keepdims=0),
    "logsumexp_of_infinities": lambda x: row("ReduceLogSumExp")(x, np.array([1]), keepdims=0),
    "prod_with_zeros": lambda x: row("ReduceProd")(x, np.array([1]), keepdims=0),
    "fft": lambda x: ops.dft(x, None, 1), "ifft": lambda x: ops.dft(x, inverse=1),
    "rfft_padded": lambda x: ops.dft(x, 8, onesided=1),
    "irfft": lambda x: ops.dft(x, inverse=1, onesided=1),
    "stft": lambda x, window: ops.stft(x, 4, window),
    "cumsum": lambda x: row("CumSum")(x, 1), "cumprod_with_zeros": lambda x: row("CumProd")(x, 1),
    "hardmax": row("Hardmax"),
    "softmax": lambda x: ops.softmax(x, axis=1), "log_softmax": ops.log_softmax,
    "masked_softmax": _masked, "cross_entropy": ops.cross_entropy,
    "binary_cross_entropy": lambda logits, targets: ops.binary_cross_entropy(
        logits, ops.stop_gradient(targets)),
    "embedding_of_repeated_ids": ops.embedding,
    "gather_along_1": lambda x, ids: ops.gather(x, ids, axis=1),
    "gather_elements": lambda x, ids: ops.gather_elements(x, ids, axis=1),
    "scatter_elements_add": lambda x, updates, ids: ops.scatter_elements(
        x, ids, updates, axis=1, reduction="add"),
    "scatter_elements": lambda x, updates, ids: ops.scatter_elements(x, ids, updates, axis=1),
    "gather_nd": ops.gather_nd,
    "scatter_nd_add": lambda x, updates, ids: ops.scatter_nd(x, ids, updates, reduction="add"),
    "scatter_nd": lambda x, updates, ids: ops.scatter_nd(x, ids, updates),
    "scatter_elements_mul": _scatter("mul"), "scatter_elements_mul_of_zeros": _scatter("mul"),
    "scatter_elements_max_of_ties": lambda x, updates, ids: _scatter("max")(x, ids, updates),
    "scatter_elements_min_of_ties": lambda x, updates, ids: _scatter("min")(x, ids, updates),
    "scatter_nd_mul": lambda x, updates, ids: ops.scatter_nd(x, ids, updates, reduction="mul"),
    "scatter_nd_max_of_ties": lambda x, updates, ids: ops.scatter_nd(
        x, ids, updates, reduction="max"),
    "gather_nd_of_batches": lambda x, ids: ops.gather_nd(x, ids, batch_dims=1),
    "range": lambda start, delta: ops.gather(
        row("Range")(start, start + 6 * delta - 0.01, delta), np.arange(6)),
    "topk": lambda x: ops.top_k(x, 2)[0], "lowk": lambda x: ops.top_k(x, 3, 0, largest=False)[0],
    "masked_select": ops.masked_select, "rows_by_mask": lambda x, mask: ops.compress(x, mask, 0),
    "unique": ops.unique, "flatten": lambda x: row("Flatten")(x, axis=2),
    "tile": lambda x: row("Tile")(x, np.array([3, 2])),
    "split": lambda x: row("Split").all_outputs(x, np.array([1, 3, 2]), outputs=3),
    "split_unevenly": lambda x: row("Split").all_outputs(x, outputs=3, axis=1, num_outputs=3),
    "pixel_shuffle": lambda x: row("DepthToSpace")(x, blocksize=2, mode="CRD"),
    "space_to_depth": lambda x: row("SpaceToDepth")(x, blocksize=2),
    "reverse_sequence": lambda x: row("ReverseSequence")(x, np.array([4, 1, 2])),
    "triu": lambda x: row("Trilu")(x, 1), "tril": lambda x: row("Trilu")(x, -1, upper=0),
    "eye_like": row("EyeLike"), "cast_like": lambda x: row("CastLike")(x, x),
    "one_hot": lambda values, ids: row("OneHot")(ids, 4, values),
    "matmul": ops.matmul, "vector_matmul": ops.matmul,
    "gemm": lambda a, b, c: ops.gemm(a, b, c, alpha=0.5, beta=2.0, transA=1, transB=1),
    "einsum_of_three": lambda *xs: ops.einsum("bi,bj,bk->bij", *xs),
    "einsum_of_a_trace": lambda *xs: ops.einsum("bii,b", *xs),
    "einsum_that_broadcasts": lambda *xs: ops.einsum("...ij,...jk->...ik", *xs),
    "det": row("Det"), "det_of_rank_1": row("Det"),
    "linear": ops.linear,
    "conv": _conv(), "conv_stride_2": _conv(stride=2, padding=1),
    "conv_dilated": _conv(dilation=2), "conv_groups": _conv(groups=2, padding=1),
    "conv_depthwise": _conv(groups=3),
    "conv_asymmetric_pads": lambda x, w: row("Conv")(x, w, pads=(2, 0, 0, 1), strides=(2, 1)),
    "conv_1d": _conv(stride=2, padding=1), "conv_1x1": _conv(),
    "conv_one_channel": _conv(padding=2),
    "conv_transpose": lambda x, w, b: row("ConvTranspose")(
        x, w, b, strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1), group=2),
    "conv_3d": _conv(stride=(1, 2, 1), padding=(1, 0, 1)),
    "conv_same_of_even_kernel": _conv(padding="same"),
    "conv_transpose_1d": lambda x, w: ops.conv_transpose(
        x, w, stride=3, padding=2, output_padding=1, dilation=2),
    "conv_transpose_3d": lambda x, w, b: ops.conv_transpose(
        x, w, b, stride=(2, 1, 2), padding=(0, 1, 0)),
    "conv_grad_weight": lambda x, g: row("ConvGradWeight", "triplane")(
        x, g, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "max_pool": _max_pool, "max_pool_of_ties": _max_pool, "max_pool_of_background": _max_pool,
    "max_pool_odd_of_ties": _max_pool,
    "max_pool_3_stride_2_of_ties": lambda x: _max_pool(x, 3, 2, 1),
    "max_unpool_of_ties": lambda g, x: row("MaxUnpoolFirst", "triplane")(
        g, ops.stop_gradient(x), ops.stop_gradient(_max_pool(x)), **TILED),
    "max_select_of_ties": lambda t, x: row("MaxSelectFirst", "triplane")(
        t, ops.stop_gradient(x), ops.stop_gradient(_max_pool(x)), **TILED),
    "avg_pool": lambda x: ops.avg_pool(x, 2),
    "avg_pool_padded": lambda x: ops.avg_pool(x, 3, stride=2, padding=1),
    "max_pool_1d_of_ties": lambda x: ops.max_pool(x, 3),
    "max_pool_3d_of_ties": lambda x: ops.max_pool(x, 2),
    "max_pool_dilated_of_ties": lambda x: ops.max_pool(x, 3, stride=1, padding=1, dilation=2),
    "max_pool_ceil_of_ties": lambda x: ops.max_pool(x, 3, stride=2, padding=1, ceil_mode=True),
    "global_max_pool_of_ties": ops.global_max_pool,
    "max_unpool": lambda x, ids: row("MaxUnpool")(
        x, ids + np.array([0, 16]).reshape(2, 1, 1, 1), **TILED),
    "avg_pool_ceil": lambda x: ops.avg_pool(x, 3, stride=2, padding=1, ceil_mode=True),
    "avg_pool_counting_pads": lambda x: ops.avg_pool(
        x, 3, stride=2, padding=1, count_include_pad=True),
    "avg_pool_1d": lambda x: ops.avg_pool(x, 3, stride=2),
    "avg_pool_3d": lambda x: ops.avg_pool(x, 2),
    "lp_pool": lambda x: ops.lp_pool(x, 2, 2),
    "lp_pool_of_power_3": lambda x: ops.lp_pool(x, 3, 2, stride=1),
    "global_lp_pool": row("GlobalLpPool"),
    "adaptive_avg_pool": lambda x: ops.adaptive_avg_pool(x, (3, 4)),
    "resize_nearest": lambda x: ops.resize(x, scale=(2, 1.6)),
    "resize_nearest_exact": lambda x: ops.resize(x, (7, 3), mode="nearest-exact"),
    "resize_bilinear": lambda x: ops.resize(x, (7, 3), mode="bilinear"),
    "resize_bilinear_aligned": lambda x: ops.resize(
        x, (6, 8), mode="bilinear", align_corners=True),
    "resize_bilinear_antialiased": lambda x: ops.resize(
        x, (3, 3), mode="bilinear", antialias=True),
    "resize_linear_1d": lambda x: ops.resize(x, (8,), mode="linear"),
    "resize_trilinear": lambda x: ops.resize(x, (3, 3, 5), mode="trilinear"),
    "resize_bicubic": lambda x: ops.resize(x, (7, 3), mode="bicubic"),
    "resize_bicubic_antialiased": lambda x: ops.resize(x, (3, 5), mode="bicubic", antialias=True),
    "grid_sample": ops.grid_sample,
    "grid_sample_border": lambda x, grid: ops.grid_sample(
        x, grid, padding_mode="border", align_corners=True),
    "grid_sample_reflection": lambda x, grid: ops.grid_sample(x, grid, padding_mode="reflection"),
    "grid_sample_nearest": lambda x, grid: ops.grid_sample(
        x, grid, mode="nearest", padding_mode="reflection"),
    "grid_sample_bicubic": lambda x, grid: ops.grid_sample(
        x, grid, mode="bicubic", padding_mode="border"),
    "grid_sample_3d": lambda x, grid: ops.grid_sample(x, grid, align_corners=True),
    "roi_align": lambda x, rois, images: row("RoiAlign")(
        x, rois, images, output_height=2, output_width=3, sampling_ratio=2),
    "max_roi_pool": lambda x, rois: row("MaxRoiPool")(x, rois, pooled_shape=(2, 3)),
    "affine_grid": lambda theta: ops.affine_grid(theta, (2, 3, 4, 5)),
    "affine_grid_3d_aligned": lambda theta: ops.affine_grid(
        theta, (2, 1, 2, 1, 4), align_corners=True),
    "unfold": lambda x: ops.unfold(x, (2, 3), padding=(0, 1), dilation=2),
    "fold": lambda x: ops.fold(x, (5, 5), 2, dilation=2),
    "deform_conv_without_offsets": lambda x, w, offset: row("DeformConv")(
        x, w, ops.stop_gradient(offset)),
    "center_crop_pad": lambda x: row("CenterCropPad")(x, np.array([4, 7]), axes=(1, 2)),
    "global_avg_pool": ops.global_average_pool,
    "batch_norm_training": lambda *xs: row("BatchNormalization").all_outputs(
        *xs, outputs=3, training_mode=1, momentum=0.75),
    "group_norm": lambda x, scale, bias: ops.group_norm(x, 2, scale, bias),
    "instance_norm": ops.instance_norm, "rms_norm": ops.rms_norm,
    "layer_norm_statistics": lambda *xs: row("LayerNormalization").all_outputs(*xs, outputs=3),
    "local_response_norm": lambda x: ops.local_response_norm(x, 3, alpha=0.5),
    "mean_variance_normalization": row("MeanVarianceNormalization"),
    "lp_normalization": lambda x: row("LpNormalization")(x, axis=1),
    "lp_normalization_of_power_1": lambda x: row("LpNormalization")(x, p=1),
    "dropout_at_inference": lambda x: row("Dropout")(x * x),
    "batch_norm_inference": row("BatchNormalization"),
    "layer_norm": ops.layer_norm,
    "attention_of_groups": row("Attention"),
    "attention_causal": lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, causal=True),
    "rotary": row("RotaryEmbedding"),
    "tensor_scatter": lambda cache, update: row("TensorScatter")(
        cache, update, np.array([1, 0])),
    "nll_weighted_with_ignored": lambda x, weight, labels: row("NegativeLogLikelihoodLoss")(
        x, labels, ops.stop_gradient(weight), ignore_index=-1),
    "cross_entropy_weighted": lambda x, weight, labels: row(
        "SoftmaxCrossEntropyLoss").all_outputs(
            x, labels, ops.stop_gradient(weight), outputs=2),
    "cross_entropy_smoothed": _cross_entropy_smoothed,
    "huber": lambda x, y: ops.huber(2.0 * x, y, delta=0.7).mean(),
    "smooth_l1": lambda x, y: ops.smooth_l1(2.0 * x, y, beta=0.7).mean(),
    "kl_divergence": lambda x, p: ops.kl_divergence(
        ops.log_softmax(x), ops.stop_gradient(p)).sum() / 2.0,
    "cosine_embedding": lambda a, b, same: ops.cosine_embedding(a, b, same, margin=0.1).mean(),
    "binary_cross_entropy_weighted": lambda x, weight, y: ops.binary_cross_entropy(
        x, ops.stop_gradient(y), positive_weight=ops.stop_gradient(weight)).mean(),
    "ctc": lambda x, labels: ops.ctc(
        ops.log_softmax(x), labels, ops.constant(np.array([3, 1, 2])),
        input_lengths=ops.constant(np.array([6, 5, 4]))),
    "lstm_of_lengths": _lstm_of_lengths,
    "gru_both_ways": _sequence("GRU", 1, direction="bidirectional", linear_before_reset=1),
    "rnn": _sequence("RNN", 1),
    "lstm_sweep": _sweep("LSTMSweep", 3), "gru_sweep": _sweep("GRUSweep", 2),
    "tanh_sweep": _sweep("TanhSweep", 2), "relu_sweep": _sweep("ReluSweep", 2),
}
# fmt: on

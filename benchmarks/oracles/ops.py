"""PyTorch's values and gradients of operators, as golden files for the conformance suite.

`python -m benchmarks.oracles.ops FOLDER`, in the peers' interpreter, writes one npz per case in
float64: operands `x.NAME`, results `y.I`, random cotangents `v.I` of the floating-point results,
gradients `g.NAME` of sum(v y), directions `u.NAME`, and second-order gradients `h.NAME` of
sum(u g). The same machine and PyTorch give the same bytes; others differ in the last digits.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

Array = np.ndarray[Any, np.dtype[Any]]
Make = Callable[[np.random.Generator], Mapping[str, Array]]


@dataclass(frozen=True)
class Case:
    """Operands and PyTorch's function of them; `second` where a second derivative is compared."""

    make: Make
    function: Callable[..., Any]
    second: bool = True


def normal(**shapes: tuple[int, ...]) -> Make:
    """Standard normal operands."""
    return lambda rng: {k: rng.standard_normal(s) for k, s in shapes.items()}


def positive(**shapes: tuple[int, ...]) -> Make:
    """Operands in 0.5..2."""
    return lambda rng: {k: rng.uniform(0.5, 2, s) for k, s in shapes.items()}


def spread(**shapes: tuple[int, ...]) -> Make:
    """Operands in -1.4..1.4: places on a plane and some way beyond it."""
    return lambda rng: {k: rng.uniform(-1.4, 1.4, s) for k, s in shapes.items()}


def fixed(**values: Any) -> Make:
    """The operands themselves."""
    return lambda _: {k: np.asarray(v) for k, v in values.items()}


def both(*makers: Make) -> Make:
    """Operands of several makers."""

    def make(rng: np.random.Generator) -> dict[str, Array]:
        return {k: v for maker in makers for k, v in maker(rng).items()}

    return make


def coarse(**shapes: tuple[int, ...]) -> Make:
    """Whole numbers from a small range: ties everywhere."""
    return lambda rng: {k: rng.integers(-1, 2, s).astype(float) for k, s in shapes.items()}


def _first_max(x: Any, kernel: Any, **options: Any) -> Any:
    return F.max_pool2d(x, kernel, **options, return_indices=True)[1].flatten(2)


def _unpool(g: Any, x: Any) -> Any:
    index = _first_max(x.detach(), 2)
    return torch.zeros_like(x).flatten(2).scatter_add(2, index, g.flatten(2)).reshape(x.shape)


def _select(t: Any, x: Any) -> Any:
    index = _first_max(x.detach(), 2)
    return t.flatten(2).gather(2, index).reshape(*x.shape[:2], 2, 2)


def _batch_norm_training(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    """Output and blended statistics, 0.75 of the running ones; the variance is the biased one."""
    y = F.batch_norm(x, None, None, scale, bias, training=True)
    batch_var, batch_mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return y, 0.75 * mean + 0.25 * batch_mean, 0.75 * var + 0.25 * batch_var


def _roi_align(x: Any, rois: Any, images: Any) -> Any:
    """Boxes to 2 x 3 bins of 2 x 2 bilinear samples, half pixels aligned, all within the image."""
    found = []
    for box, image in zip(rois, images, strict=True):
        axes = []
        for first, last, bins, size in ((0, 2, 3, x.shape[3]), (1, 3, 2, x.shape[2])):
            start, end = box[first] - 0.5, box[last] - 0.5
            at = start + (torch.arange(2 * bins, dtype=x.dtype) + 0.5) * (end - start) / (2 * bins)
            axes.append(2 * at / (size - 1) - 1)
        columns, lines = axes
        grid = torch.stack(
            [columns.expand(len(lines), -1), lines[:, None].expand(-1, len(columns))], -1
        )
        plane = x[int(image) : int(image) + 1]
        read = F.grid_sample(plane, grid[None], padding_mode="border", align_corners=True)
        found.append(F.avg_pool2d(read, 2))
    return torch.cat(found)


def _max_roi_pool(x: Any, rois: Any) -> Any:
    """Whole boxes, ends included, to 2 x 3 bins."""
    found = []
    for image, x1, y1, x2, y2 in rois.detach().int().tolist():
        height, width = (y2 - y1 + 1) / 2, (x2 - x1 + 1) / 3
        for i in range(2):
            for k in range(3):
                rows = slice(y1 + int(i * height), y1 + int(np.ceil((i + 1) * height)))
                columns = slice(x1 + int(k * width), x1 + int(np.ceil((k + 1) * width)))
                found.append(x[image, :, rows, columns].amax((1, 2)))
    return torch.stack(found, 1).reshape(2, len(rois), 2, 3).transpose(0, 1)


def _blank_corner(rng: np.random.Generator) -> dict[str, Array]:
    """An image with a constant background, as scans have: whole windows tie."""
    x = np.zeros((1, 2, 6, 6))
    x[:, :, 2:5, 1:4] = np.round(rng.standard_normal((1, 2, 3, 3)), 1)
    return {"x": x}


FROM_ONNX = {4: (0, 2, 3, 1), 3: (1, 0, 2), 1: (0,)}
"""PyTorch's gates (i f g o; r z n) among those of ONNX (i o f c; z r h), by their number."""


def _sorted(stacked: Any, gates: int) -> Any:
    return stacked.reshape(gates, -1, *stacked.shape[1:])[list(FROM_ONNX[gates])].flatten(0, 1)


def _weights(gates: int, w: Any, r: Any, b: Any) -> list[Any]:
    """Per direction, as PyTorch's functions take them."""
    found = []
    for d in range(len(w)):
        parts = (w[d], r[d], *b[d].chunk(2))
        found += [_sorted(p, gates) for p in parts]
    return found


def _outputs(y: Any, directions: int) -> Any:
    """(T, N, directions H) -> (T, directions, N, H)."""
    return y.unflatten(2, (directions, -1)).transpose(1, 2)


def _lstm_of_lengths(x: Any, w: Any, r: Any, b: Any, h: Any, c: Any) -> Any:
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]))
    y, h, c = torch.lstm(
        packed.data, packed.batch_sizes, (h, c), _weights(4, w, r, b), True, 1, 0.0, True, True
    )
    y = torch.nn.utils.rnn.pad_packed_sequence(packed._replace(data=y))[0]
    return _outputs(y, 2), h, c


def _gru_both_ways(x: Any, w: Any, r: Any, b: Any, h: Any) -> Any:
    y, h = torch.gru(x, h, _weights(3, w, r, b), True, 1, 0.0, True, True, False)
    return _outputs(y, 2), h


def _rnn(x: Any, w: Any, r: Any, b: Any, h: Any) -> Any:
    y, h = torch.rnn_tanh(x, h, _weights(1, w, r, b), True, 1, 0.0, True, False, False)
    return _outputs(y, 1), h


def _swept(gates: int, mixed: Any, r: Any, bias: Any = None) -> list[Any]:
    """Weights of one direction that takes its inputs as they are."""
    rows = mixed.shape[2]
    inner = torch.zeros(rows, dtype=r.dtype)
    if bias is not None:
        inner = torch.cat([inner[: rows - len(bias)], bias])
    w = torch.eye(rows, dtype=r.dtype)
    return [_sorted(p, gates) for p in (w, r, torch.zeros_like(inner), inner)]


def _lstm_sweep(mixed: Any, r: Any, h: Any, c: Any) -> Any:
    y, h, c = torch.lstm(
        mixed, (h[None], c[None]), _swept(4, mixed, r), True, 1, 0.0, True, False, False
    )
    return y, h[0], c[0]


def _gru_sweep(mixed: Any, r: Any, bias: Any, h: Any) -> Any:
    y, h = torch.gru(mixed, h[None], _swept(3, mixed, r, bias), True, 1, 0.0, True, False, False)
    return y, h[0]


def _simple_sweep(function: Callable[..., Any]) -> Callable[..., Any]:
    def sweep(mixed: Any, r: Any, h: Any) -> Any:
        y, h = function(mixed, h[None], _swept(1, mixed, r), True, 1, 0.0, True, False, False)
        return y, h[0]

    return sweep


def _attention(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """By the kernel that has second derivatives."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True
        )


def _rotary(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _tensor_scatter(cache: Any, update: Any) -> Any:
    rows = [
        c.index_copy(0, torch.arange(2) + s, u)
        for c, s, u in zip(cache, (1, 0), update, strict=True)
    ]
    return torch.stack(rows)


_conv = normal(x=(2, 4, 7, 6), w=(6, 4, 3, 3), b=(6,))
_grouped = normal(x=(2, 4, 7, 6), w=(6, 2, 3, 3))
_labels = fixed(labels=np.array([2, 0, 2, 4]))

# fmt: off
CASES: Final[Mapping[str, Case]] = {
    # arithmetic
    "identity": Case(normal(x=(2, 3)), lambda x: x.clone()),
    "stop_gradient": Case(normal(x=(2, 3)), lambda x: x * x.detach()),
    "cast": Case(normal(x=(2, 3)), lambda x: x.float().double(), second=False),
    "add": Case(normal(a=(2, 1, 3), b=(4, 1)), torch.add),
    "sub": Case(normal(a=(3,), b=(2, 3)), torch.sub),
    "mul": Case(normal(a=(2, 1, 3), b=(4, 1)), torch.mul),
    "div": Case(both(normal(a=(3,)), positive(b=(2, 3))), torch.div),
    "neg": Case(normal(x=(2, 3)), torch.neg),
    "abs_at_0": Case(fixed(x=[-1.5, 0.0, 2.0]), torch.abs),
    "exp": Case(normal(x=(2, 3)), torch.exp),
    "log": Case(positive(x=(2, 3)), torch.log),
    "sqrt": Case(positive(x=(2, 3)), torch.sqrt),
    "reciprocal": Case(positive(x=(2, 3)), torch.reciprocal),
    "tanh": Case(normal(x=(2, 3)), torch.tanh),
    "sigmoid": Case(fixed(x=[-40.0, -1.0, 0.0, 2.0, 40.0]), torch.sigmoid),
    "softplus": Case(fixed(x=[-40.0, -1.0, 0.0, 2.0, 15.0]), F.softplus),
    "relu_at_0": Case(fixed(x=[-1.0, -0.0, 0.0, 2.0]), torch.relu),
    "leaky_relu_at_0": Case(fixed(x=[-1.0, 0.0, 2.0]), lambda x: F.leaky_relu(x, 0.2)),
    "sin": Case(normal(x=(2, 3)), torch.sin),
    "cos": Case(normal(x=(2, 3)), torch.cos),
    "erf": Case(normal(x=(2, 3)), torch.erf),
    "tan": Case(normal(x=(2, 3)), torch.tan),
    "asin": Case(fixed(x=[-0.9, 0.0, 0.5]), torch.asin),
    "acos": Case(fixed(x=[-0.9, 0.0, 0.5]), torch.acos),
    "atan": Case(normal(x=(2, 3)), torch.atan),
    "sinh": Case(normal(x=(2, 3)), torch.sinh),
    "cosh": Case(normal(x=(2, 3)), torch.cosh),
    "asinh": Case(normal(x=(2, 3)), torch.asinh),
    "acosh": Case(fixed(x=[1.1, 2.0, 5.0]), torch.acosh),
    "atanh": Case(fixed(x=[-0.9, 0.0, 0.5]), torch.atanh),
    "fmod": Case(fixed(a=[[5.3, -5.3, 0.7]], b=[[2.0], [-1.5]]), torch.fmod),
    "sum_of_three": Case(normal(a=(2, 3), b=(3,), c=(2, 1)), lambda a, b, c: a + b + c),
    "mean_of_three": Case(normal(a=(2, 3), b=(3,), c=(2, 1)), lambda a, b, c: (a + b + c) / 3),
    "sign": Case(fixed(x=[-1.5, 0.0, 2.0]), torch.sign),
    "floor": Case(fixed(x=[-1.5, 0.0, 2.7]), torch.floor),
    "ceil": Case(fixed(x=[-1.5, 0.0, 2.7]), torch.ceil),
    "round_at_ties": Case(fixed(x=[-1.5, 0.5, 1.5, 2.5, 2.7]), torch.round),
    "pow": Case(both(positive(x=(2, 3)), normal(p=(3,))), torch.pow),
    "square_of_negatives": Case(normal(x=(2, 3)), lambda x: x**2),
    "gelu": Case(normal(x=(2, 3)), F.gelu),
    "gelu_tanh": Case(normal(x=(2, 3)), lambda x: F.gelu(x, approximate="tanh")),
    "elu_at_0": Case(
        fixed(x=[-200.0, -1.0, 0.0, 2.0, 200.0]), lambda x: F.elu(x, 0.5)),
    "celu_at_0": Case(
        fixed(x=[-200.0, -1.0, 0.0, 2.0, 200.0]), lambda x: F.celu(x, 0.5)),
    "selu": Case(fixed(x=[-200.0, -1.0, 2.0, 200.0]), F.selu),
    # PyTorch's double backward takes the slope at 0 from above, its backward from below.
    "prelu_at_0": Case(
        both(fixed(x=[[-1.5, 0.0, 2.0], [0.5, -0.5, -2.0]]), positive(slope=(3,))),
        F.prelu, second=False),
    "thresholded_relu": Case(
        fixed(x=[-1.5, 0.5, 1.0, 2.0]), lambda x: F.threshold(x, 1.0, 0.0)),
    "softsign": Case(fixed(x=[-1.5, 0.5, 2.0]), F.softsign),
    "silu": Case(normal(x=(2, 3)), F.silu),
    "swish": Case(normal(x=(2, 3)), lambda x: x * torch.sigmoid(0.5 * x)),
    "mish": Case(normal(x=(2, 3)), F.mish),
    "soft_shrink": Case(fixed(x=[-1.5, -0.3, 0.2, 2.0]), lambda x: F.softshrink(x, 0.5)),
    "hard_shrink": Case(fixed(x=[-1.5, -0.3, 0.2, 2.0]), lambda x: F.hardshrink(x, 0.5)),
    "hard_sigmoid": Case(fixed(x=[-4.0, -1.0, 0.5, 2.0, 4.0]), F.hardsigmoid, second=False),
    "hard_swish": Case(fixed(x=[-4.0, -1.0, 0.5, 2.0, 4.0]), F.hardswish),
    "clip_at_its_bounds": Case(
        fixed(x=[-2.0, -1.0, 0.3, 1.0, 2.0]), lambda x: torch.clamp(x, -1.0, 1.0)),
    "clip_with_bounds": Case(
        fixed(x=[-2.0, -1.0, 0.3, 1.0, 2.0], low=-1.5, high=1.5), torch.clamp),
    "clip_at_bounds_given": Case(
        fixed(x=[-1.0, 0.3, 1.0], low=-1.0, high=1.0), torch.clamp),
    "clip_of_crossed_bounds": Case(
        fixed(x=[3.0, 1.0, 2.0], low=2.0, high=1.0), torch.clamp),
    "clip_of_crossed_numbers": Case(
        fixed(x=[3.0, 1.0, 2.0]), lambda x: torch.clamp(x, 2.0, 1.0)),
    "clip_from_below_at_its_bound": Case(
        fixed(x=[-1.0, 0.0, 2.0]), lambda x: torch.clamp(x, min=0.0)),
    "relu6_at_its_bounds": Case(fixed(x=[-1.0, 0.0, 2.0, 6.0, 7.0]), F.relu6),
    "hard_sigmoid_at_its_bounds": Case(
        fixed(x=[-3.0, 0.0, 3.0]), F.hardsigmoid, second=False),
    "hard_swish_at_its_bounds": Case(fixed(x=[-3.0, 0.0, 3.0]), F.hardswish),
    "soft_shrink_at_its_bounds": Case(
        fixed(x=[-0.5, 0.0, 0.5]), lambda x: F.softshrink(x, 0.5)),
    "hard_shrink_at_its_bounds": Case(
        fixed(x=[-0.5, 0.0, 0.5]), lambda x: F.hardshrink(x, 0.5)),
    "thresholded_relu_at_its_bound": Case(
        fixed(x=[0.5, 1.0, 1.5]), lambda x: F.threshold(x, 1.0, 0.0)),
    "selu_at_0": Case(fixed(x=[-1.0, 0.0, 2.0]), F.selu),
    "softsign_at_0": Case(fixed(x=[-1.0, 0.0, 2.0]), F.softsign),
    "norm_of_order_infinity_of_ties": Case(
        fixed(x=[[1.0, -1.0, 0.5], [0.0, 0.0, 0.0]]),
        lambda x: torch.linalg.vector_norm(x, torch.inf, 1)),
    "powers_at_0": Case(
        fixed(x=[0.0, 2.0]), lambda x: x**0.0 + x**1.0 + x**2.0),
    "maximum_of_ties": Case(coarse(a=(3, 4), b=(4,)), torch.maximum),
    "minimum_of_ties": Case(coarse(a=(3, 4), b=(4,)), torch.minimum),
    "where": Case(
        both(fixed(p=[[True, False, True], [False, False, True]]), normal(a=(2, 3), b=(3,))),
        torch.where),
    # shape
    "reshape": Case(normal(x=(2, 6)), lambda x: x.reshape(3, 4)),
    "transpose": Case(normal(x=(2, 3, 4)), lambda x: x.permute(1, 2, 0)),
    "expand": Case(normal(x=(3, 1)), lambda x: x.expand(2, 3, 4)),
    "unsqueeze": Case(normal(x=(2, 3)), lambda x: x[None, :, :, None]),
    "squeeze": Case(normal(x=(1, 3, 1)), lambda x: x.squeeze(0)),
    "concat": Case(normal(a=(2, 3), b=(2, 1)), lambda a, b: torch.cat([a, b], 1)),
    "slice": Case(normal(x=(4, 5)), lambda x: x[1:3, :-1]),
    "slice_with_steps": Case(normal(x=(7, 2)), lambda x: x[1:7:3]),
    "pad": Case(normal(x=(2, 3)), lambda x: F.pad(x, (0, 2, 1, 0))),
    "flip": Case(normal(x=(4, 3)), lambda x: x.flip(0)),
    "pad_by_value": Case(
        normal(x=(2, 3), value=()),
        lambda x, value: torch.cat([value.expand(1, 3), x, value.expand(2, 3)])),
    "pad_that_crops": Case(normal(x=(3, 4)), lambda x: F.pad(x, (1, -2, -1, 0))),
    "pad_reflect": Case(normal(x=(1, 2, 4, 3)), lambda x: F.pad(x, (1, 2, 3, 0), "reflect")),
    "pad_edge": Case(normal(x=(1, 2, 4, 3)), lambda x: F.pad(x, (1, 2, 3, 0), "replicate")),
    "pad_wrap": Case(normal(x=(1, 2, 4, 3)), lambda x: F.pad(x, (1, 2, 3, 0), "circular")),
    # reductions
    "sum": Case(normal(x=(2, 3, 4)), lambda x: x.sum((0, 2), keepdim=True)),
    "mean": Case(normal(x=(2, 3, 4)), lambda x: x.mean((0, 2))),
    "amax_of_ties": Case(coarse(x=(3, 4, 3)), lambda x: x.amax((0, 2))),
    "amin_of_ties": Case(coarse(x=(3, 4, 3)), lambda x: x.amin(1)),
    "norm_l1": Case(fixed(x=[[1.5, 0.0, -2.0], [0.5, 0.5, -1.0]]),
                    lambda x: x.norm(1, 1, keepdim=True)),
    "norm_l2_at_0": Case(fixed(x=[[0.0, 0.0], [3.0, -4.0]]), lambda x: x.norm(2, 1), second=False),
    "norm_l2": Case(normal(x=(3, 4)), lambda x: x.norm(2, 1)),
    "sum_of_squares": Case(normal(x=(3, 4)), lambda x: (x * x).sum(0)),
    "log_sum": Case(positive(x=(3, 4)), lambda x: x.sum(1).log()),
    "logsumexp": Case(normal(x=(2, 3, 4)), lambda x: x.logsumexp((0, 2))),
    "logsumexp_of_infinities": Case(
        fixed(x=[[-np.inf, 1.0, 2.0], [500.0, 600.0, 600.0]]),
        lambda x: x.logsumexp(1)),
    "prod_with_zeros": Case(
        fixed(x=[[1.5, 2.0, -2.0], [0.0, 2.0, 3.0], [0.0, 0.0, 3.0]]), lambda x: x.prod(1)),
    "fft": Case(
        normal(x=(2, 5, 3, 2)),
        lambda x: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x), dim=1)),
    ),
    "ifft": Case(
        normal(x=(2, 6, 2)),
        lambda x: torch.view_as_real(torch.fft.ifft(torch.view_as_complex(x), dim=1)),
    ),
    "rfft_padded": Case(
        normal(x=(2, 7, 1)),
        lambda x: torch.view_as_real(torch.fft.rfft(x[..., 0], n=8, dim=1)),
    ),
    "irfft": Case(
        normal(x=(2, 5, 2)),
        lambda x: torch.fft.irfft(torch.view_as_complex(x), dim=1)[..., None],
    ),
    "stft": Case(
        normal(x=(2, 20, 1), window=(8,)),
        lambda x, window: torch.view_as_real(
            torch.stft(x[..., 0], 8, 4, window=window, center=False, return_complex=True)
        ).transpose(1, 2),
    ),
    "cumsum": Case(normal(x=(3, 4)), lambda x: x.cumsum(1)),
    "cumprod_with_zeros": Case(
        fixed(x=[[1.5, 2.0, -2.0], [0.0, 2.0, 3.0], [2.0, 0.0, 0.0]]), lambda x: x.cumprod(1)),
    "hardmax": Case(
        coarse(x=(3, 4)), lambda x: F.one_hot(x.argmax(1), 4).double()),
    "softmax": Case(normal(x=(2, 3, 4)), lambda x: x.softmax(1)),
    "log_softmax": Case(normal(x=(2, 5)), lambda x: x.log_softmax(-1)),
    "masked_softmax": Case(
        normal(x=(2, 5)), lambda x: (x + torch.tensor([0, 0, -torch.inf, 0, -1e9])).softmax(-1)),
    "cross_entropy": Case(
        both(normal(logits=(4, 5)), _labels), lambda logits, labels: F.cross_entropy(
            logits, labels, reduction="none")),
    "binary_cross_entropy": Case(
        both(fixed(logits=[-30.0, -1.0, 0.5, 30.0]), fixed(targets=[0.0, 1.0, 0.25, 1.0])),
        lambda logits, targets: F.binary_cross_entropy_with_logits(
            logits, targets.detach(), reduction="none")),
    # indexing
    "embedding_of_repeated_ids": Case(
        both(normal(table=(5, 3)), fixed(ids=[[1, 4, 1], [1, 0, 4]])),
        lambda table, ids: F.embedding(ids, table)),
    "gather_along_1": Case(
        both(normal(x=(2, 5, 3)), fixed(ids=[4, 4, 0])), lambda x, ids: x[:, ids]),
    "gather_elements": Case(
        both(normal(x=(3, 4)), fixed(ids=[[0, 0], [3, 1], [2, 2]])),
        lambda x, ids: x.gather(1, ids)),
    "scatter_elements_add": Case(
        both(normal(x=(3, 4), updates=(3, 2)), fixed(ids=[[0, 0], [3, 1], [2, 2]])),
        lambda x, updates, ids: x.scatter_add(1, ids, updates)),
    "scatter_elements": Case(
        both(normal(x=(3, 4), updates=(3, 2)), fixed(ids=[[0, 1], [3, 1], [2, 0]])),
        lambda x, updates, ids: x.scatter(1, ids, updates)),
    "gather_nd": Case(
        both(normal(x=(4, 3)), fixed(ids=[[0, 1], [3, 2], [0, 1]])),
        lambda x, ids: x[ids[:, 0], ids[:, 1]]),
    "scatter_nd_add": Case(
        both(normal(x=(5, 2), updates=(3, 2)), fixed(ids=[[1], [3], [1]])),
        lambda x, updates, ids: x.index_add(0, ids[:, 0], updates)),
    "scatter_nd": Case(
        both(normal(x=(5, 2), updates=(2, 2)), fixed(ids=[[1], [3]])),
        lambda x, updates, ids: x.index_copy(0, ids[:, 0], updates)),
    "scatter_elements_mul": Case(
        both(fixed(x=[[1.5, 0.0, 2.0, -1.0], [3.0, 2.0, 0.5, 1.0]], ids=[[1, 1], [3, 3]]),
             normal(updates=(2, 2))),
        lambda x, ids, updates: x.scatter_reduce(1, ids, updates, "prod")),
    "scatter_elements_mul_of_zeros": Case(
        fixed(x=[[1.5, 2.0, 0.0]], ids=[[0, 0, 1, 1, 2]], updates=[[0.0, 2.0, 0.0, 0.0, 3.0]]),
        lambda x, ids, updates: x.scatter_reduce(1, ids, updates, "prod"), second=False),
    "scatter_elements_max_of_ties": Case(
        both(coarse(x=(3, 4), updates=(3, 3)), fixed(ids=[[0, 0, 1], [3, 3, 3], [2, 0, 2]])),
        lambda x, updates, ids: x.scatter_reduce(1, ids, updates, "amax")),
    "scatter_elements_min_of_ties": Case(
        both(coarse(x=(3, 4), updates=(3, 3)), fixed(ids=[[0, 0, 1], [3, 3, 3], [2, 0, 2]])),
        lambda x, updates, ids: x.scatter_reduce(1, ids, updates, "amin")),
    "scatter_nd_mul": Case(
        both(positive(x=(5, 2), updates=(3, 2)), fixed(ids=[[1], [3], [1]])),
        lambda x, updates, ids: x.scatter_reduce(0, ids.expand(3, 2), updates, "prod")),
    "scatter_nd_max_of_ties": Case(
        both(coarse(x=(5, 2), updates=(3, 2)), fixed(ids=[[1], [3], [1]])),
        lambda x, updates, ids: x.scatter_reduce(0, ids.expand(3, 2), updates, "amax")),
    "gather_nd_of_batches": Case(
        both(normal(x=(2, 4, 3)), fixed(ids=[[[1], [3], [1]], [[0], [0], [2]]])),
        lambda x, ids: x[torch.arange(2)[:, None], ids[..., 0]]),
    "range": Case(
        fixed(start=0.5, delta=0.3), lambda start, delta: start + delta * torch.arange(6)),
    # selection
    "topk": Case(normal(x=(3, 5)), lambda x: x.topk(2, 1)[0]),
    "lowk": Case(normal(x=(4, 3)), lambda x: x.topk(3, 0, largest=False)[0]),
    "masked_select": Case(
        both(normal(x=(2, 3)), fixed(mask=[[True, False, True], [False, False, True]])),
        torch.masked_select),
    "rows_by_mask": Case(
        both(normal(x=(3, 2)), fixed(mask=[True, False, True])), lambda x, mask: x[mask]),
    "unique": Case(normal(x=(2, 3)), lambda x: x.flatten().sort()[0]),
    # rearrangement
    "flatten": Case(normal(x=(2, 3, 4)), lambda x: x.reshape(6, 4)),
    "tile": Case(normal(x=(2, 3)), lambda x: x.tile(3, 2)),
    "split": Case(normal(x=(6, 2)), lambda x: x.split([1, 3, 2])),
    "split_unevenly": Case(normal(x=(2, 7)), lambda x: x.split(3, 1)),
    "pixel_shuffle": Case(normal(x=(1, 8, 2, 3)), lambda x: F.pixel_shuffle(x, 2)),
    "space_to_depth": Case(
        normal(x=(2, 2, 4, 6)),
        lambda x: F.pixel_unshuffle(x, 2).unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)),
    "reverse_sequence": Case(
        normal(x=(4, 3)), lambda x: torch.stack(
            [x[:, 0].flip(0), x[:, 1], torch.cat([x[:2, 2].flip(0), x[2:, 2]])], 1)),
    "triu": Case(normal(x=(3, 4)), lambda x: x.triu(1)),
    "tril": Case(normal(x=(2, 4, 3)), lambda x: x.tril(-1)),
    "eye_like": Case(normal(x=(3, 4)), lambda x: torch.eye(*x.shape).double()),
    "one_hot": Case(
        both(normal(values=(2,)), fixed(ids=[0, 2, 1])),
        lambda values, ids: values[F.one_hot(ids, 4)]),
    "cast_like": Case(normal(x=(2, 3)), lambda x: x * 1.0),
    # products
    "matmul": Case(normal(a=(2, 1, 3, 4), b=(5, 4, 2)), torch.matmul),
    "vector_matmul": Case(normal(a=(4,), b=(4, 2)), torch.matmul),
    "gemm": Case(
        normal(a=(4, 3), b=(2, 4), c=(3, 1)), lambda a, b, c: 0.5 * a.T @ b.T + 2.0 * c),
    "linear": Case(normal(x=(3, 4), w=(2, 4), b=(2,)), F.linear),
    "einsum_of_three": Case(
        normal(a=(2, 3), b=(2, 4), c=(2, 5)),
        lambda a, b, c: torch.einsum("bi,bj,bk->bij", a, b, c)),
    "einsum_of_a_trace": Case(
        normal(a=(2, 3, 3), b=(2,)), lambda a, b: torch.einsum("bii,b", a, b)),
    "einsum_that_broadcasts": Case(
        normal(a=(2, 1, 3, 4), b=(5, 4, 2)),
        lambda a, b: torch.einsum("...ij,...jk->...ik", a, b)),
    "det": Case(normal(x=(2, 3, 3)), torch.linalg.det),
    "det_of_rank_1": Case(
        fixed(x=[[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.0, 1.0, 0.0]]), torch.linalg.det),
    "conv": Case(_conv, F.conv2d),
    "conv_stride_2": Case(_conv, lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1)),
    "conv_dilated": Case(_conv, lambda x, w, b: F.conv2d(x, w, b, dilation=2)),
    "conv_groups": Case(_grouped, lambda x, w: F.conv2d(x, w, groups=2, padding=1)),
    "conv_depthwise": Case(
        normal(x=(2, 3, 5, 5), w=(3, 1, 3, 3)), lambda x, w: F.conv2d(x, w, groups=3)),
    "conv_asymmetric_pads": Case(
        normal(x=(2, 3, 5, 6), w=(4, 3, 3, 2)),
        lambda x, w: F.conv2d(F.pad(x, (0, 1, 2, 0)), w, stride=(2, 1))),
    "conv_1d": Case(
        normal(x=(2, 3, 8), w=(4, 3, 3)), lambda x, w: F.conv1d(x, w, stride=2, padding=1)),
    "conv_1x1": Case(normal(x=(2, 3, 4, 4), w=(5, 3, 1, 1)), F.conv2d),
    "conv_one_channel": Case(
        normal(x=(2, 1, 6, 6), w=(4, 1, 5, 5)), lambda x, w: F.conv2d(x, w, padding=2)),
    "conv_transpose": Case(
        normal(x=(2, 4, 3, 3), w=(4, 2, 3, 3), b=(4,)),
        lambda x, w, b: F.conv_transpose2d(
            x, w, b, stride=2, padding=1, output_padding=1, groups=2)),
    "conv_grad_weight": Case(
        normal(x=(2, 3, 6, 6), g=(2, 4, 3, 3)),
        lambda x, g: torch.nn.grad.conv2d_weight(x, (4, 3, 3, 3), g, stride=2, padding=1)),
    "conv_3d": Case(
        normal(x=(1, 2, 4, 5, 3), w=(3, 2, 2, 3, 2), b=(3,)),
        lambda x, w, b: F.conv3d(x, w, b, stride=(1, 2, 1), padding=(1, 0, 1))),
    "conv_same_of_even_kernel": Case(
        normal(x=(2, 3, 5, 6), w=(4, 3, 2, 4)), lambda x, w: F.conv2d(x, w, padding="same")),
    "conv_transpose_1d": Case(
        normal(x=(2, 4, 5), w=(4, 3, 4)),
        lambda x, w: F.conv_transpose1d(x, w, stride=3, padding=2, output_padding=1, dilation=2)),
    "conv_transpose_3d": Case(
        normal(x=(1, 2, 2, 3, 2), w=(2, 2, 2, 3, 2), b=(2,)),
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride=(2, 1, 2), padding=(0, 1, 0))),
    # pools
    "max_pool": Case(normal(x=(2, 3, 4, 6)), lambda x: F.max_pool2d(x, 2)),
    "max_pool_of_ties": Case(coarse(x=(2, 3, 6, 6)), lambda x: F.max_pool2d(x, 2)),
    "max_pool_of_background": Case(_blank_corner, lambda x: F.max_pool2d(x, 2)),
    "max_pool_3_stride_2_of_ties": Case(
        coarse(x=(2, 2, 7, 7)), lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max_pool_odd_of_ties": Case(
        coarse(x=(2, 2, 5, 7)), lambda x: F.max_pool2d(x, 2)),
    "max_unpool_of_ties": Case(both(normal(g=(2, 2, 2, 2)), coarse(x=(2, 2, 4, 4))), _unpool),
    "max_select_of_ties": Case(both(normal(t=(2, 2, 4, 4)), coarse(x=(2, 2, 4, 4))), _select),
    "avg_pool": Case(normal(x=(2, 3, 4, 6)), lambda x: F.avg_pool2d(x, 2)),
    "avg_pool_padded": Case(
        normal(x=(1, 2, 6, 5)),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "max_pool_1d_of_ties": Case(coarse(x=(2, 3, 9)), lambda x: F.max_pool1d(x, 3)),
    "max_pool_3d_of_ties": Case(
        coarse(x=(1, 2, 4, 4, 5)), lambda x: F.max_pool3d(x, 2)),
    "max_pool_dilated_of_ties": Case(
        coarse(x=(1, 2, 7, 8)), lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2)),
    "max_pool_ceil_of_ties": Case(
        coarse(x=(1, 2, 6, 5)), lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "global_max_pool_of_ties": Case(
        coarse(x=(2, 3, 4, 5)), lambda x: F.adaptive_max_pool2d(x, 1)),
    "max_unpool": Case(
        both(normal(x=(2, 1, 2, 2)), fixed(ids=[[[[0, 3], [10, 9]]], [[[0, 3], [8, 15]]]])),
        lambda x, ids: torch.zeros(2, 1, 16, dtype=x.dtype).scatter(
            2, ids.flatten(2), x.flatten(2)).reshape(2, 1, 4, 4)),
    "avg_pool_ceil": Case(
        normal(x=(1, 2, 6, 7)), lambda x: F.avg_pool2d(
            x, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
    "avg_pool_counting_pads": Case(
        normal(x=(1, 2, 6, 5)), lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "avg_pool_1d": Case(normal(x=(2, 3, 7)), lambda x: F.avg_pool1d(x, 3, 2)),
    "avg_pool_3d": Case(normal(x=(1, 2, 4, 4, 5)), lambda x: F.avg_pool3d(x, 2)),
    "lp_pool": Case(normal(x=(2, 3, 6, 6)), lambda x: F.lp_pool2d(x, 2, 2)),
    "lp_pool_of_power_3": Case(positive(x=(2, 3, 5, 6)), lambda x: F.lp_pool2d(x, 3, 2, 1)),
    "global_lp_pool": Case(
        normal(x=(2, 3, 4, 5)), lambda x: torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True)),
    "adaptive_avg_pool": Case(
        normal(x=(2, 3, 7, 6)), lambda x: F.adaptive_avg_pool2d(x, (3, 4))),
    # resizing
    "resize_nearest": Case(
        normal(x=(2, 2, 4, 5)), lambda x: F.interpolate(x, scale_factor=(2, 1.6))),
    "resize_nearest_exact": Case(
        normal(x=(2, 2, 4, 5)), lambda x: F.interpolate(x, (7, 3), mode="nearest-exact")),
    "resize_bilinear": Case(
        normal(x=(2, 2, 4, 5)), lambda x: F.interpolate(x, (7, 3), mode="bilinear")),
    "resize_bilinear_aligned": Case(
        normal(x=(2, 2, 4, 5)),
        lambda x: F.interpolate(x, (6, 8), mode="bilinear", align_corners=True)),
    "resize_bilinear_antialiased": Case(
        normal(x=(2, 2, 6, 7)),
        lambda x: F.interpolate(x, (3, 3), mode="bilinear", antialias=True)),
    "resize_linear_1d": Case(
        normal(x=(2, 2, 5)), lambda x: F.interpolate(x, 8, mode="linear")),
    "resize_trilinear": Case(
        normal(x=(1, 2, 2, 3, 3)), lambda x: F.interpolate(x, (3, 3, 5), mode="trilinear")),
    "resize_bicubic": Case(
        normal(x=(2, 2, 4, 5)), lambda x: F.interpolate(x, (7, 3), mode="bicubic")),
    "resize_bicubic_antialiased": Case(
        normal(x=(2, 2, 8, 7)),
        lambda x: F.interpolate(x, (3, 5), mode="bicubic", antialias=True)),
    # sampling
    "grid_sample": Case(
        both(normal(x=(2, 3, 4, 5)), spread(grid=(2, 3, 2, 2))),
        lambda x, grid: F.grid_sample(x, grid, align_corners=False)),
    "grid_sample_border": Case(
        both(normal(x=(2, 3, 4, 5)), spread(grid=(2, 3, 2, 2))),
        lambda x, grid: F.grid_sample(x, grid, padding_mode="border", align_corners=True)),
    "grid_sample_reflection": Case(
        both(normal(x=(2, 3, 4, 5)), spread(grid=(2, 3, 2, 2))),
        lambda x, grid: F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)),
    "grid_sample_nearest": Case(
        both(normal(x=(2, 3, 4, 5)), spread(grid=(2, 3, 2, 2))),
        lambda x, grid: F.grid_sample(
            x, grid, mode="nearest", padding_mode="reflection", align_corners=False)),
    "grid_sample_bicubic": Case(
        both(normal(x=(2, 3, 4, 5)), spread(grid=(2, 3, 2, 2))),
        lambda x, grid: F.grid_sample(
            x, grid, mode="bicubic", padding_mode="border", align_corners=False)),
    "grid_sample_3d": Case(
        both(normal(x=(1, 2, 3, 2, 4)), spread(grid=(1, 2, 2, 3, 3))),
        lambda x, grid: F.grid_sample(x, grid, align_corners=True)),
    "roi_align": Case(
        both(normal(x=(2, 2, 5, 6)), fixed(
            rois=[[0.8, 0.7, 3.1, 2.9], [1.2, 0.9, 4.6, 3.3], [0.9, 1.3, 2.2, 3.7]],
            images=[0, 1, 1])), _roi_align),
    "max_roi_pool": Case(
        both(normal(x=(2, 2, 5, 6)), fixed(rois=[[0.0, 0, 0, 3, 3], [1, 1, 0, 5, 4]])),
        _max_roi_pool),
    "affine_grid": Case(
        normal(theta=(2, 2, 3)), lambda theta: F.affine_grid(
            theta, [2, 3, 4, 5], align_corners=False)),
    "affine_grid_3d_aligned": Case(
        normal(theta=(2, 3, 4)), lambda theta: F.affine_grid(
            theta, [2, 1, 2, 1, 4], align_corners=True)),
    "unfold": Case(
        normal(x=(2, 3, 5, 6)), lambda x: F.unfold(x, (2, 3), dilation=2, padding=(0, 1))),
    "fold": Case(
        normal(x=(2, 12, 9)), lambda x: F.fold(x, (5, 5), 2, dilation=2)),
    "deform_conv_without_offsets": Case(
        both(normal(x=(1, 2, 5, 4), w=(3, 2, 2, 2)), fixed(offset=np.zeros((1, 8, 4, 3)))),
        lambda x, w, offset: F.conv2d(x, w) + offset.sum() * 0),
    "center_crop_pad": Case(
        normal(x=(2, 7, 4)), lambda x: F.pad(x[:, 1:5], (1, 2))),
    "global_avg_pool": Case(normal(x=(2, 3, 4, 5)), lambda x: F.adaptive_avg_pool2d(x, 1)),
    # normalization
    "batch_norm_training": Case(
        both(normal(x=(4, 3, 2, 2)), positive(scale=(3,)), normal(bias=(3,), mean=(3,)),
             positive(var=(3,))), _batch_norm_training),
    "group_norm": Case(
        both(normal(x=(2, 4, 3, 2)), positive(scale=(4,)), normal(bias=(4,))),
        lambda x, scale, bias: F.group_norm(x, 2, scale, bias)),
    "instance_norm": Case(
        both(normal(x=(2, 3, 4)), positive(scale=(3,)), normal(bias=(3,))),
        lambda x, scale, bias: F.instance_norm(x, weight=scale, bias=bias)),
    "rms_norm": Case(
        both(normal(x=(2, 3, 4)), positive(scale=(3, 4))),
        lambda x, scale: F.rms_norm(x, (3, 4), scale, 1e-5)),
    "layer_norm_statistics": Case(
        both(normal(x=(2, 3, 4)), positive(scale=(4,)), normal(bias=(4,))),
        lambda x, scale, bias: (
            F.layer_norm(x, (4,), scale, bias), x.mean(-1, True),
            (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt())),
    "local_response_norm": Case(
        normal(x=(2, 5, 2, 3)), lambda x: F.local_response_norm(x, 3, alpha=0.5)),
    "mean_variance_normalization": Case(
        normal(x=(2, 3, 2, 2)), lambda x: (x - x.mean((0, 2, 3), True)) / (
            x.var((0, 2, 3), correction=0, keepdim=True).sqrt() + 1e-9)),
    "lp_normalization": Case(normal(x=(2, 3, 4)), lambda x: F.normalize(x, p=2, dim=1)),
    "lp_normalization_of_power_1": Case(
        normal(x=(2, 3, 4)), lambda x: F.normalize(x, p=1, dim=-1)),
    "dropout_at_inference": Case(
        normal(x=(2, 3)), lambda x: F.dropout(x * x, 0.5, training=False)),
    "batch_norm_inference": Case(
        both(normal(x=(4, 3, 2, 2)), positive(scale=(3,)), normal(bias=(3,), mean=(3,)),
             positive(var=(3,))),
        lambda x, scale, bias, mean, var: (x - mean[:, None, None])
        / torch.sqrt(var[:, None, None] + 1e-5) * scale[:, None, None] + bias[:, None, None]),
    "layer_norm": Case(
        both(normal(x=(2, 3, 4)), positive(scale=(4,)), normal(bias=(4,))),
        lambda x, scale, bias: F.layer_norm(x, (4,), scale, bias)),
    # attention
    "attention_of_groups": Case(
        normal(q=(2, 4, 3, 2), k=(2, 2, 5, 2), v=(2, 2, 5, 3), mask=(3, 5)), _attention),
    "attention_causal": Case(
        normal(q=(2, 2, 4, 3), k=(2, 2, 4, 3), v=(2, 2, 4, 3)), _attention),
    "rotary": Case(normal(x=(2, 3, 4, 6), cos=(2, 4, 3), sin=(2, 4, 3)), _rotary),
    "tensor_scatter": Case(normal(cache=(2, 5, 3), update=(2, 2, 3)), _tensor_scatter),
    # losses
    "nll_weighted_with_ignored": Case(
        both(normal(x=(2, 3, 4)), positive(weight=(3,)),
             fixed(labels=np.array([[0, 1, 2, -1], [1, -1, 2, 2]]))),
        lambda x, weight, labels: F.nll_loss(x, labels, weight.detach(), ignore_index=-1)),
    "cross_entropy_weighted": Case(
        both(normal(x=(4, 3)), positive(weight=(3,)), fixed(labels=np.array([2, 0, 1, 0]))),
        lambda x, weight, labels: (
            F.cross_entropy(x, labels, weight.detach()), F.log_softmax(x, 1))),
    "cross_entropy_smoothed": Case(
        both(normal(x=(4, 3)), positive(weight=(3,)), fixed(labels=np.array([2, -9, 1, 0]))),
        lambda x, weight, labels: F.cross_entropy(
            x, labels, weight.detach(), ignore_index=-9, label_smoothing=0.2)),
    "huber": Case(
        normal(x=(3, 4), y=(3, 4)), lambda x, y: F.huber_loss(2 * x, y, delta=0.7)),
    "huber_at_its_bounds": Case(
        fixed(x=[-2.0, -0.5, 0.0, 0.25, 0.5, 2.0], y=[0.0] * 6),
        lambda x, y: F.huber_loss(x, y, delta=0.5)),
    "smooth_l1_at_its_bounds": Case(
        fixed(x=[-2.0, -0.5, 0.0, 0.25, 0.5, 2.0], y=[0.0] * 6),
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.5)),
    "cosine_embedding_at_its_margin": Case(
        fixed(a=[[1.0, 0.0]], b=[[0.0, 2.0]], same=[-1]),
        F.cosine_embedding_loss),
    "smooth_l1": Case(
        normal(x=(3, 4), y=(3, 4)), lambda x, y: F.smooth_l1_loss(2 * x, y, beta=0.7)),
    "kl_divergence": Case(
        both(normal(x=(2, 3)), fixed(p=[[0.2, 0.0, 0.8], [0.5, 0.25, 0.25]])),
        lambda x, p: F.kl_div(F.log_softmax(x, 1), p.detach(), reduction="batchmean")),
    "cosine_embedding": Case(
        both(normal(a=(4, 3), b=(4, 3)), fixed(same=np.array([1, -1, -1, 1]))),
        lambda a, b, same: F.cosine_embedding_loss(a, b, same, margin=0.1)),
    "binary_cross_entropy_weighted": Case(
        both(normal(x=(4, 3)), positive(weight=(3,)), fixed(y=np.eye(4, 3))),
        lambda x, weight, y: F.binary_cross_entropy_with_logits(
            x, y.detach(), pos_weight=weight.detach())),
    "ctc": Case(
        both(normal(x=(3, 6, 4)), fixed(labels=np.array([[1, 2, 2], [3, 1, 1], [2, 2, 3]]))),
        lambda x, labels: F.ctc_loss(
            F.log_softmax(x, 2).transpose(0, 1), labels, torch.tensor([6, 5, 4]),
            torch.tensor([3, 1, 2]), reduction="none"),
        second=False),
    # sequences
    "lstm_of_lengths": Case(
        normal(x=(4, 3, 2), w=(2, 12, 2), r=(2, 12, 3), b=(2, 24), h=(2, 3, 3), c=(2, 3, 3)),
        _lstm_of_lengths),
    "gru_both_ways": Case(
        normal(x=(4, 3, 2), w=(2, 9, 2), r=(2, 9, 3), b=(2, 18), h=(2, 3, 3)), _gru_both_ways),
    "rnn": Case(normal(x=(4, 3, 2), w=(1, 3, 2), r=(1, 3, 3), b=(1, 6), h=(1, 3, 3)), _rnn),
    "lstm_sweep": Case(normal(mixed=(4, 2, 12), r=(12, 3), h=(2, 3), c=(2, 3)), _lstm_sweep),
    "gru_sweep": Case(normal(mixed=(4, 2, 9), r=(9, 3), bias=(3,), h=(2, 3)), _gru_sweep),
    "tanh_sweep": Case(
        normal(mixed=(4, 2, 3), r=(3, 3), h=(2, 3)), _simple_sweep(torch.rnn_tanh)),
    "relu_sweep": Case(
        normal(mixed=(4, 2, 3), r=(3, 3), h=(2, 3)), _simple_sweep(torch.rnn_relu)),
}
# fmt: on


def evaluate(case: Case, seed: int) -> dict[str, Array]:
    """Everything one golden file holds."""
    rng = np.random.default_rng(seed)
    arrays = case.make(rng)
    xs = {k: torch.from_numpy(np.array(a)).requires_grad_(_is_float(a)) for k, a in arrays.items()}
    made = case.function(**xs) if _named(case) else case.function(*xs.values())
    ys = list(made) if isinstance(made, Sequence) else [made]
    found = {f"x.{k}": np.array(a) for k, a in arrays.items()}
    vs = [torch.from_numpy(rng.standard_normal(y.shape)) for y in ys]
    for i, (y, v) in enumerate(zip(ys, vs, strict=True)):
        found |= {f"y.{i}": y.numpy(force=True), f"v.{i}": v.numpy()}
    wanted = {k: x for k, x in xs.items() if x.requires_grad}
    total = sum((y * v).sum() for y, v in zip(ys, vs, strict=True))
    gs = _gradients(total, wanted)
    found |= {f"g.{k}": g.numpy(force=True) for k, g in gs.items()}
    if case.second:
        us = {k: torch.from_numpy(rng.standard_normal(g.shape)) for k, g in gs.items()}
        hs = _gradients(sum((gs[k] * us[k]).sum() for k in gs), wanted)
        found |= {f"u.{k}": u.numpy() for k, u in us.items()}
        found |= {f"h.{k}": h.numpy(force=True) for k, h in hs.items()}
    return found


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f"


def _named(case: Case) -> bool:
    return getattr(case.function, "__name__", "") == "<lambda>"


def _gradients(total: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    if not total.requires_grad:
        return {k: torch.zeros_like(x) for k, x in wanted.items()}
    found = torch.autograd.grad(total, list(wanted.values()), create_graph=True, allow_unused=True)
    return {
        k: torch.zeros_like(x) if g is None else g
        for (k, x), g in zip(wanted.items(), found, strict=True)
    }


def write(folder: Path) -> None:
    """All cases; a case's seed is made of its name, so that a new case leaves the others alone."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        seed = zlib.crc32(name.encode())
        np.savez_compressed(folder / f"{name}.npz", **evaluate(case, seed))


if __name__ == "__main__":
    write(Path(sys.argv[1]))

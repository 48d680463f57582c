"""Attention, rotary positions and key-value caches as ONNX defines them, as bodies in other rows.

Heads lie on axis 1 of (N, heads, S, D), or side by side on the last of (N, S, heads D).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, bool_, float32, int64
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Op, OpKind, dtype_attr
from triplane.unified_ir.ops.rows.arithmetic.elementwise import mod, tanh
from triplane.unified_ir.ops.rows.arithmetic.matrix import matmul, softmax, swap_last
from triplane.unified_ir.ops.rows.arithmetic.norm import widened
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather, scatter_nd
from triplane.unified_ir.ops.rows.movement.structure import (
    concat,
    expand,
    pad_row,
    stack,
    unsqueeze,
    where,
)
from triplane.unified_ir.ops.samples import bools, ints, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, dims_of

NOTHING: Final = -math.inf
"""Added to a score that must not count."""

RAW, CAPPED, BIASED, WEIGHTS = 0, 1, 2, 3
"""Values of `qk_matmul_output_mode`: which scores the fourth output shows."""


def heads_apart(x: Tensor, heads: int) -> Tensor:
    """(N, S, heads D) -> (N, heads, S, D)."""
    n, s, width = x.shape
    if heads < 1 or width % heads != 0:
        raise ShapeError(f"the last axis of {x.type}, {width}, cannot be split into {heads} heads")
    return x.reshape((n, s, heads, width // heads)).transpose(0, 2, 1, 3)


def heads_together(x: Tensor) -> Tensor:
    """(N, heads, S, D) -> (N, S, heads D)."""
    n, heads, s, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape((n, s, heads * d))


def _allowed(
    scores: Tensor, offset: Tensor | Dim, filled: Tensor | None, attrs: dict[str, Any]
) -> list[Tensor]:
    """Return masks by position that must all hold: (S, T), or (N, 1, S, T) if offsets differ."""
    queries, keys = scores.shape[2:]

    # With a cache the S queries are the last of the T positions, so query i is at offset + i.
    def query() -> Tensor:
        own = unsqueeze(arange(queries), 1)
        if isinstance(offset, Tensor):
            return own + offset
        return own if offset == 0 else own + dims_of([offset])

    left, right = attrs["left_window_size"], attrs["right_window_size"]
    masks = []
    if attrs["is_causal"]:
        masks.append(arange(keys) <= query())
    if left >= 0:
        masks.append(arange(keys) >= query() - left)
    if right >= 0:
        masks.append(arange(keys) <= query() + right)
    if filled is not None:
        masks.append(arange(keys) < filled)
    return masks


def _bias(mask: Tensor | None, allowed: Sequence[Tensor], scores: Tensor) -> Any:
    """Return the sum of the masks as numbers added to the scores; None without masks."""
    parts = [_additive(a, scores) for a in allowed]
    if mask is not None:
        parts.append(_widened(_additive(mask, scores), scores.shape[3]))
    return sum(parts[1:], parts[0]) if parts else None


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != bool_:
        return mask
    return where(mask, as_tensor(0.0, like.dtype), as_tensor(NOTHING, like.dtype))


def _widened(bias: Tensor, keys: Dim) -> Tensor:
    """Return the bias of a mask that may end before the keys do; keys beyond its end are masked."""
    missing = keys - bias.shape[-1]
    if missing == 0:
        return bias
    if isinstance(missing, int) and missing < 0:
        raise ShapeError(f"a mask {bias.type} is longer than {keys} keys")
    ends: list[Dim] = [*[0] * (2 * bias.rank - 1), missing]
    return pad_row(bias, dims_of(ends), as_tensor(NOTHING, bias.dtype))


def _weights(
    scores: Tensor, bias: Tensor | None, precision: int | None, *, may_be_empty: bool
) -> Tensor:
    """Return softmax over keys; 0 in rows whose keys are all excluded, without NaN in gradients."""
    wide = scores.dtype if precision is None else dtype_attr(precision)
    if bias is None or not may_be_empty:
        biased = scores if bias is None else scores + bias
        return softmax(biased.cast(wide), axis=-1).cast(scores.dtype)
    # softmax of a row of -inf is NaN. Such rows get finite scores first and are set to 0
    # afterwards, so neither direction computes with NaN.
    # Not by the largest bias: the maximum of numbers that are all -inf is finite on CUDA.
    empty = (bias == NOTHING).cast(float32).min([-1], keepdims=True) == 1.0
    biased = scores + where(empty, as_tensor(0.0, bias.dtype), bias)
    weights = softmax(biased.cast(wide), axis=-1).cast(scores.dtype)
    return where(empty, as_tensor(0.0, weights.dtype), weights)


def _attention(*operands: Tensor | None, **attrs: Any) -> list[Tensor]:
    padded: list[Any] = [*operands, *[None] * (7 - len(operands))]
    q, k, v, mask, past_k, past_v, filled = padded
    if (past_k is None) != (past_v is None) or (past_k is not None and filled is not None):
        raise InvalidInput(
            "Attention takes past keys and values together, and neither with nonpad_kv_seqlen"
        )
    flat = q.rank == 3
    if flat:
        q = heads_apart(q, attrs["q_num_heads"] or 0)
        k, v = (heads_apart(x, attrs["kv_num_heads"] or 0) for x in (k, v))
    _check(q, k, v, attrs)
    offset: Tensor | Dim = 0
    if past_k is not None and past_v is not None:
        offset = past_k.shape[2]
        k, v = concat([past_k, k], 2), concat([past_v, v], 2)
    if filled is not None:
        filled = filled.cast(int64).reshape((-1, 1, 1, 1))
        offset = filled - dims_of([q.shape[2]])
    # ONNX scales both factors by the square root of the scale, which keeps products of half
    # precision in range.
    root = math.sqrt(attrs["scale"] or 1.0 / math.sqrt(_static(q.shape[3])))
    raw = _per_group(q * root, swap_last(k * root))
    cap = attrs["softcap"]
    scores = tanh(raw / cap) * cap if cap else raw
    bias = _bias(mask, _allowed(scores, offset, filled, attrs), scores)
    windowed = max(attrs["left_window_size"], attrs["right_window_size"]) >= 0
    weights = _weights(
        scores,
        bias,
        attrs["softmax_precision"],  # by `is_causal` alone a query sees the first key at least
        may_be_empty=mask is not None or filled is not None or windowed,
    )
    y = _per_group(weights, v)
    mode = attrs["qk_matmul_output_mode"]
    shown = {RAW: raw, CAPPED: scores, BIASED: scores, WEIGHTS: weights}[mode]
    if bias is not None and mode == BIASED:
        shown = scores + bias
    return [heads_together(y) if flat else y, k, v, shown]


def _static(width: Dim) -> int:
    if not isinstance(width, int):
        raise ShapeError(f"Attention needs heads of a fixed size, got {width}; or give `scale`")
    return width


def _check(q: Tensor, k: Tensor, v: Tensor, attrs: dict[str, Any]) -> None:
    shown = f"queries {q.type}, keys {k.type} and values {v.type}"
    if not q.rank == k.rank == v.rank == 4:
        raise ShapeError(f"Attention takes three tensors of four axes, or of three; got {shown}")
    heads, own = q.shape[1], k.shape[1]
    fixed = isinstance(heads, int) and isinstance(own, int)
    if not fixed or heads % own != 0 or own != v.shape[1]:  # type: ignore[operator]
        raise ShapeError(
            "Attention needs as many heads of values as of keys, and of queries a multiple; got "
            f"{shown}"
        )
    if q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2]:
        raise ShapeError(f"Attention needs queries and keys of one size, got {shown}")
    mode = attrs["qk_matmul_output_mode"]
    if mode not in {RAW, CAPPED, BIASED, WEIGHTS}:
        raise InvalidInput(f"qk_matmul_output_mode must be 0 to 3, got {mode}")


def _per_group(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b; each head of b serves a group of a's: (N, G, S, I) @ (N, H, I, T)."""
    n, heads, s, inner = a.shape
    own = b.shape[1]
    if heads == own:
        return matmul(a, b)
    grouped = a.reshape((n, own, heads // own, s, inner))
    return matmul(grouped, unsqueeze(b, 2)).reshape((n, heads, s, b.shape[3]))


def _runs_as_it_is(node: Node, opset: int) -> bool:
    """Return whether the opset defines the operator like this and onnxruntime 1.31 computes it.

    Before 25 a query without keys and the alignment of `is_causal` meant something else. The kernel
    takes no windows, and only masks of 2 or 4 axes that are as long as the keys.
    """
    if opset < 25 or {"left_window_size", "right_window_size"} & node.attrs.keys():
        return False
    inputs = [*node.inputs, None, None]
    keys, mask, past = inputs[1], inputs[3], inputs[4]
    if mask is None or keys is None:
        return True
    shape, total = mask.type.shape, keys.type.shape[-2]
    if past is not None:
        total = total + past.type.shape[2]
    return len(shape) in {2, 4} and shape[-1] == total


def _plain_scores(q: Tensor, k: Tensor, is_causal: int, scale: float) -> Tensor:
    """Return softmax(q k^T scale), of at least float32; 0 at later keys if it is causal."""
    root = math.sqrt(scale)
    raw = matmul(q * root, swap_last(k * root))
    attrs = {"is_causal": is_causal, "left_window_size": -1, "right_window_size": -1}
    bias = _bias(None, _allowed(raw, 0, None, attrs), raw)
    return softmax(widened(raw if bias is None else raw + bias), axis=-1)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: int, scale: float) -> Tensor:
    return matmul(_plain_scores(q, k, is_causal, scale).cast(v.dtype), v)


def _plain_attention_gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *, is_causal: int, scale: float
) -> list[Tensor]:
    """With y = p v, p = softmax(s): dv = p^T g, dp = g v^T, ds = p (dp - sum(dp p))."""
    p = _plain_scores(q, k, is_causal, scale)
    dp = widened(matmul(g, swap_last(v)))
    ds = (p * (dp - (dp * p).sum([-1], keepdims=True)) * scale).cast(q.dtype)
    dv = matmul(swap_last(p.cast(g.dtype)), g)
    return [matmul(ds, k), matmul(swap_last(ds), q), dv]


def _wide(*operands: Any) -> list[Any]:
    """Return at least float32: numpy has no products of bfloat16."""
    return [x.astype(np.promote_types(x.dtype, np.float32)) for x in operands]


def _plain_weights(q: Any, k: Any, is_causal: int, scale: float) -> Any:
    scores = scale * np.einsum("nhsd,nhtd->nhst", q, k)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _plain_attention_kernel(q: Any, k: Any, v: Any, *, is_causal: int, scale: float) -> Any:
    q, k, v = _wide(q, k, v)
    return np.einsum("nhst,nhtd->nhsd", _plain_weights(q, k, is_causal, scale), v)


def _plain_attention_gradient_kernel(
    g: Any, q: Any, k: Any, v: Any, *, is_causal: int, scale: float
) -> tuple[Any, ...]:
    g, q, k, v = _wide(g, q, k, v)
    p = _plain_weights(q, k, is_causal, scale)
    dp = np.einsum("nhsd,nhtd->nhst", g, v)
    ds = scale * (p * dp - p * np.einsum("nhst,nhst->nhs", p, dp)[..., None])
    return (
        np.einsum("nhst,nhtd->nhsd", ds, k),
        np.einsum("nhst,nhsd->nhtd", ds, q),
        np.einsum("nhst,nhsd->nhtd", p, g),
    )


def _plain_attention_xla(
    k: XlaContext, q: Any, key: Any, v: Any, *, is_causal: int, scale: float
) -> Any:
    return k.attention(q, key, v, causal=bool(is_causal), scale=scale)


def _plain_attention_gradient_xla(
    k: XlaContext, g: Any, q: Any, key: Any, v: Any, *, is_causal: int, scale: float
) -> Any:
    return k.attention_gradient(g, q, key, v, causal=bool(is_causal), scale=scale)


_plain_attrs: Final = {
    "is_causal": AttrSpec("INT", 0),
    "scale": AttrSpec("FLOAT", required=True),
}
_plain_qkv = (normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 3))
plain_attention_gradient = Op(
    name="PlainAttentionGradient", kind=OpKind.ATTENTION, domain=DOMAIN,
    computes="the gradients of y = PlainAttention(q, k, v) with respect to q, k and v, from the "
    "cotangent of y and from q, k, v",
    operands=("T", "T", "T", "T"), attrs=_plain_attrs,
    reference=_plain_attention_gradient_kernel,
    body=_plain_attention_gradient, xla=_plain_attention_gradient_xla,
    samples=(
        sample(normal(2, 2, 3, 3), *_plain_qkv, outputs=3, scale=0.5),
        sample(normal(2, 2, 3, 3), *_plain_qkv, outputs=3, is_causal=1, scale=0.7),
    ),
)  # fmt: skip
plain_attention = Op(
    name="PlainAttention", kind=OpKind.ATTENTION, domain=DOMAIN,
    computes="softmax(q k^T scale) v by heads (N, heads, S, D); causal: query i sees keys 0 to i",
    operands=("T", "T", "T"), attrs=_plain_attrs,
    reference=_plain_attention_kernel,
    body=_plain_attention, xla=_plain_attention_xla,
    vjp=lambda g, y, q, k, v, **attrs: plain_attention_gradient.all_outputs(
        g, q, k, v, outputs=3, **attrs
    ),
    samples=(sample(*_plain_qkv, scale=0.5), sample(*_plain_qkv, is_causal=1, scale=0.7)),
)  # fmt: skip
"""Attention as GPUs have it in one kernel, which keeps the scores (S, T) out of memory."""


def _in_one_kernel(node: Node) -> tuple[Op, dict[str, Any]] | None:
    """Return the row and attributes of the same in one kernel, if there is such a kernel."""
    q, k, v, *others = node.inputs
    specs = attention.attr_specs
    special = {
        name
        for name, value in node.attrs.items()
        if name not in {"is_causal", "scale"} and value != specs[name].default
    }
    if q is None or k is None or v is None or any(others) or special or len(node.outputs) > 1:
        return None
    shapes = [x.type.shape for x in (q, k, v)]
    if len(shapes[0]) != 4 or shapes[0][1] != shapes[1][1] or not isinstance(shapes[0][3], int):
        return None
    scale = node.attrs.get("scale") or 1.0 / math.sqrt(shapes[0][3])
    return plain_attention, {"is_causal": node.attrs.get("is_causal", 0), "scale": scale}


_qkv = (normal(2, 4, 3, 2), normal(2, 2, 5, 2), normal(2, 2, 5, 3))
attention = Op(
    name="Attention", kind=OpKind.ATTENTION,
    body=_attention,
    half_form=_in_one_kernel,
    native=_runs_as_it_is,
    samples=(
        sample(normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 3)),
        sample(
            normal(2, 3, 8), normal(2, 5, 4), normal(2, 5, 6), bools(3, 5), q_num_heads=4,
            kv_num_heads=2, softcap=2.0, scale=0.8,
        ),
        sample(
            *_qkv, normal(4, 3, 6), normal(2, 2, 2, 2), normal(2, 2, 2, 3), outputs=4, is_causal=1,
            qk_matmul_output_mode=1,
        ),
        sample(*_qkv, None, None, None, ints(1, 6, 2), is_causal=1),
        sample(*_qkv, is_causal=1, outputs=4, qk_matmul_output_mode=3),
        sample(
            *_qkv, bools(2, 1, 3, 5), left_window_size=1, right_window_size=1, outputs=4,
            qk_matmul_output_mode=3,
        ),
    ),
)  # fmt: skip
"""Vaswani et al. 2017, grouped queries by Ainslie et al. 2023.

Q, K, V, attn_mask?, past_key?, past_value?, nonpad_kv_seqlen? -> Y, present_key, present_value,
qk_matmul_output. A query that may see no key gives 0.
"""


def _rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *,
    interleaved: int, num_heads: int | None, rotary_embedding_dim: int,
) -> Tensor:  # fmt: skip
    """(a, b) -> (a cos - b sin, a sin + b cos) for pairs of each head (Su et al. 2021)."""
    if x.rank == 3:
        apart = heads_apart(x, num_heads or 0)
        attrs = {"interleaved": interleaved, "rotary_embedding_dim": rotary_embedding_dim}
        return heads_together(_rotary(apart, cos, sin, positions, num_heads=None, **attrs))
    turned = rotary_embedding_dim or _static(x.shape[3])
    if positions is not None:
        cos, sin = gather(cos, positions), gather(sin, positions)
    if cos.rank != 3 or cos.shape[2] != turned // 2 or turned % 2:
        raise ShapeError(
            f"RotaryEmbedding of {turned} numbers needs {turned // 2} cosines per position, got "
            f"{cos.type}"
        )
    cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
    first = x[..., :turned]
    if interleaved:
        pairs = first.reshape((*x.shape[:3], turned // 2, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        y = stack([a * cos - b * sin, a * sin + b * cos], axis=4).reshape(first.shape)
    else:
        # Not interleaved: the first half of the turned numbers pairs with the second half.
        a, b = first[..., : turned // 2], first[..., turned // 2 :]
        y = concat([a * cos - b * sin, a * sin + b * cos], axis=3)
    return y if turned == x.shape[3] else concat([y, x[..., turned:]], axis=3)


rotary_embedding = Op(
    name="RotaryEmbedding", kind=OpKind.ATTENTION,
    body=_rotary,
    samples=(
        sample(normal(2, 3, 4, 6), normal(5, 3), normal(5, 3), ints(0, 5, 2, 4)),
        sample(
            normal(2, 4, 12), normal(2, 4, 2), normal(2, 4, 2), num_heads=2, interleaved=1,
            rotary_embedding_dim=4,
        ),
        sample(normal(2, 3, 4, 6), normal(2, 4, 2), normal(2, 4, 2), rotary_embedding_dim=4),
    ),
)  # fmt: skip
"""X, cos_cache, sin_cache, position_ids? -> Y; caches (positions, D / 2), or (N, S, D / 2)."""

MODES: Final = ("linear", "circular")


def _tensor_scatter(
    cache: Tensor, update: Tensor, start: Tensor | None = None, *, axis: int, mode: str
) -> Tensor:
    """Write rows start, start + 1, ... of each sample; if circular, wrap around at the end."""
    axis %= cache.rank
    if mode not in MODES or axis == 0 or update.rank != cache.rank:
        raise InvalidInput(
            f"TensorScatter needs a mode of {' or '.join(MODES)} and an axis after the first, got "
            f"mode {mode!r}, axis {axis}, {cache.type} and {update.type}"
        )
    perm = [0, axis, *(i for i in range(1, cache.rank) if i != axis)]
    n, count = update.shape[0], update.shape[axis]
    rows = unsqueeze(arange(count), 0)
    if start is not None:
        rows = rows + unsqueeze(start, 1)
    if mode == "circular":
        rows = mod(rows, dims_of([cache.shape[axis]]))
    rows = expand(rows, (n, count))
    samples = expand(unsqueeze(arange(n), 1), (n, count))
    index = stack([samples, rows], axis=2)
    scattered = scatter_nd(cache.transpose(*perm), index, update.transpose(*perm))
    return scattered.transpose(*map(int, np.argsort(perm)))


tensor_scatter = Op(
    name="TensorScatter",
    kind=OpKind.INDEXING,
    body=_tensor_scatter,
    samples=(
        sample(normal(2, 3, 5, 2), normal(2, 3, 2, 2), ints(0, 3, 2)),
        sample(normal(2, 4, 3), normal(2, 3, 3), ints(2, 4, 2), mode="circular"),
        sample(normal(2, 3, 4), normal(2, 3, 2), axis=2),
    ),
)
"""past_cache, update, write_indices? -> present_cache."""


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T scale + mask) v; q: (N, heads, S, D), k: (N, kv heads, T, D), v likewise.

    mask: bool, true where a key counts, or numbers to add; up to (N, heads, S, T). causal: a query
    sees the keys up to its own position. A query that may see no key gives 0. scale: 1 / sqrt(D).
    """
    return attention(q, k, v, mask, is_causal=int(causal), scale=scale)

"""Attention layers against PyTorch's values and gradients, and against their equations."""

from typing import Any

import numpy as np
import pytest
from tests.support.golden_files import ROOT, check_generator, needs_peers, parts_of

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, nn, ops, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import type_of

GOLDEN = ROOT / "tests" / "golden" / "attention"
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
SIZE, HEADS, WIDE = 8, 2, 16
RNG = np.random.default_rng(6)


def multihead(cell, q, k, **masks):
    return cell(q, k, **masks)


def encoded(cell, x, padding=None):
    return cell(x, key_padding_mask=padding, causal=padding is None)


def decoded(cell, x, memory, padding, memory_padding):
    masks = {"key_padding_mask": padding, "memory_key_padding_mask": memory_padding}
    return cell(x, memory, causal=True, **masks)


def stack(kind, layer, norm, **options):
    options |= {"feedforward": WIDE, "p_drop": 0.0}
    layers = [layer(SIZE, HEADS, **options) for _ in range(2)]
    return kind(layers, norm=nn.LayerNorm(SIZE) if norm else None)


def encoder(norm, **options):
    return stack(nn.TransformerEncoder, nn.TransformerEncoderLayer, norm, **options)


def decoder(**options):
    return stack(nn.TransformerDecoder, nn.TransformerDecoderLayer, norm=False, **options)


OURS = {
    "multihead_added_mask": (lambda: nn.MultiheadAttention(SIZE, HEADS), multihead),
    "multihead_bool_masks": (lambda: nn.MultiheadAttention(SIZE, HEADS), multihead),
    "encoder": (lambda: encoder(norm=False), encoded),
    "encoder_norm_first": (
        lambda: encoder(norm=True, norm_first=True, activation=ops.gelu),
        encoded,
    ),
    "decoder": (decoder, decoded),
    "decoder_norm_first": (lambda: decoder(norm_first=True), decoded),
}


def held(name):
    """A golden file by part, numbers in float32."""
    return parts_of(GOLDEN / f"{name}.npz", np.float32)


def without_keys(cell):
    return {k: p for k, p in cell.parameters().items() if not k.endswith(".key")}


class Weighted(nn.Cell):
    """The sum of a layer's results times fixed weights, and the results."""

    def __init__(self, cell, call, v, names):
        super().__init__()
        self.cell, self.call, self.v, self.names = cell, call, v, names
        v.flags.writeable = False  # a constant

    def construct(self, xs):
        y = self.call(self.cell, **dict(zip(self.names, xs, strict=True)))
        return (y * self.v).sum(), y


@pytest.mark.parametrize("name", OURS)
def test_a_layer_equals_pytorch_in_values_and_all_gradients(name):
    make, call = OURS[name]
    parts, cell = held(name), make()
    assert without_keys(cell).keys() == parts["w"].keys()
    cell.load(parts["w"], strict=False)
    given = parts["x"]
    whole = Weighted(cell, call, parts["v"][""], list(given))
    function = trace(whole, tuple(type_of(a) for a in given.values()))
    places = dict(zip(given, function.param_names, strict=False))
    wanted = {f"grad.{places[k]}": a for k, a in parts["g"].items()}
    wanted |= {f"grad.cell.{k}": a for k, a in parts["h"].items()}
    both = value_and_grad(function, [k.removeprefix("grad.") for k in wanted])
    state = {f"cell.{k}": p.array for k, p in cell.parameters().items()}
    state |= {places[k]: a for k, a in given.items()}
    found = engine("onnx").compile(both)(*(state[n] for n in both.param_names))
    results = dict(zip(both.result_names, found, strict=True))
    np.testing.assert_allclose(results[function.result_names[1]], parts["y"][""], **CLOSE)
    for key, array in wanted.items():
        np.testing.assert_allclose(results[key], array, err_msg=key, **CLOSE)


def test_every_golden_file_has_its_counterpart():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == OURS.keys()


def test_groups_of_queries_share_a_head_of_keys():
    """As if each head of keys and values were there once per query of its group."""
    few, many = nn.MultiheadAttention(SIZE, 4, kv_heads=2), nn.MultiheadAttention(SIZE, 4)
    state = {k: p.array for k, p in few.parameters().items()}
    w = state["in_proj_weight"]
    pairs = (w[SIZE : SIZE + 4], w[SIZE + 4 :])
    twice = [np.repeat(x.reshape(2, 2, SIZE), 2, axis=0).reshape(SIZE, SIZE) for x in pairs]
    bias = np.zeros(3 * SIZE, np.float32)
    many.load({**state, "in_proj_weight": np.concatenate([w[:SIZE], *twice]), "in_proj_bias": bias})
    x = RNG.standard_normal((2, 5, SIZE)).astype(np.float32)
    np.testing.assert_allclose(few(x), many(x), **CLOSE)


def test_a_query_without_keys_gets_the_bias_alone():
    cell = nn.MultiheadAttention(SIZE, HEADS)
    cell.out_proj.bias.array[:] = np.arange(SIZE)
    x = RNG.standard_normal((2, 3, SIZE)).astype(np.float32)
    padding = np.array([[False, False, True], [True, True, True]])
    y = graph(lambda x: cell(x, key_padding_mask=padding))(x)
    np.testing.assert_array_equal(y[1], np.tile(np.arange(SIZE, dtype=np.float32), (3, 1)))
    assert np.isfinite(grad(lambda x: cell(x, key_padding_mask=padding).sum())(x)).all()


def test_weights_are_dropped_in_training_alone_and_sum_to_one_on_average():
    nn.seed(3)
    cell = nn.MultiheadAttention(SIZE, HEADS, p_drop=0.5)
    x = RNG.standard_normal((2, 6, SIZE)).astype(np.float32)
    calm = cell.eval()(x)
    cell.train()
    noisy = np.stack([cell(x) for _ in range(400)])
    assert not np.array_equal(noisy[0], noisy[1])
    spread = noisy.std(0) / np.sqrt(len(noisy))
    assert (np.abs(noisy.mean(0) - calm) < 5 * spread).all()


@pytest.mark.parametrize("cell", [nn.PositionalEncoding(6, 9), nn.PositionalEncoding(5, 9)])
def test_positions_are_sines_and_cosines_of_them(cell):
    size = cell.table.shape[1]
    t, j = np.arange(7)[:, None], np.arange(size)[None]
    angle = t / 10_000.0 ** ((j - j % 2) / size)
    wanted = np.where(j % 2, np.cos(angle), np.sin(angle))
    np.testing.assert_allclose(cell(np.zeros((2, 7, size), np.float32))[1], wanted, atol=1e-6)


def test_turned_queries_and_keys_meet_by_their_distance_alone():
    rotary = nn.Rotary(6, 20)
    q, k = (RNG.standard_normal(6).astype(np.float32) for _ in range(2))
    places = np.zeros((1, 1, 20, 6), np.float32)
    qs, ks = rotary(places + q)[0, 0], rotary(places + k)[0, 0]
    np.testing.assert_allclose(np.linalg.norm(qs, axis=1), np.linalg.norm(q), rtol=1e-5)
    scores = qs @ ks.T
    for distance in (-3, 0, 5):
        along = np.diagonal(scores, distance)
        np.testing.assert_allclose(along, along[0], rtol=1e-4, atol=1e-5)


def test_batch_and_length_may_both_be_symbols():
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, feedforward=WIDE).eval()
    net = nn.Sequential(nn.PositionalEncoding(SIZE, 50), nn.TransformerEncoder([layer]))
    function = trace(net, TensorSpec(("N", "T", SIZE)))
    assert str(function.results[0].type) == f"float32[N,T,{SIZE}]"
    x = RNG.standard_normal((2, 5, SIZE)).astype(np.float32)
    np.testing.assert_allclose(net(x)[:1], net(x[:1]), **CLOSE)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: nn.MultiheadAttention(8, 3), "needs heads that divide size"),
        (lambda: nn.MultiheadAttention(8, 4, kv_heads=3), "needs heads that divide size"),
        (lambda: nn.Rotary(5, 3), "an even head_size"),
        (lambda: nn.PositionalEncoding(4, 3)(np.zeros((1, 4, 4), np.float32)), "make it longer"),
        (
            lambda: nn.MultiheadAttention(8, 2)(np.zeros((1, 4, 6), np.float32)),
            r"MultiheadAttention\(8, 2\) takes x: \(N, T, 8\)",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(act, said):
    with pytest.raises(InvalidInput, match=said):
        act()


@pytest.mark.deep
@needs_peers
def test_the_generator_reproduces_the_golden_files(tmp_path):
    check_generator("attention", GOLDEN, tmp_path, rtol=1e-10, atol=1e-12)

"""Losses against their formulas in float64, and what they refuse."""

import itertools

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, mode, nn, ops, trace
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.table import TABLE

RNG = np.random.default_rng(4)


def test_softmax_cross_entropy_is_the_mean_over_the_batch():
    logits = (RNG.standard_normal((6, 5)) * 40).astype(np.float32)
    labels = RNG.integers(0, 5, 6)
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(1, keepdims=True)
    expected = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(6), labels]
    np.testing.assert_allclose(nn.SoftmaxCrossEntropy()(logits, labels), expected.mean(), rtol=1e-6)


def test_softmax_cross_entropy_takes_a_label_per_step_of_a_sequence():
    logits = RNG.standard_normal((2, 3, 5)).astype(np.float32)
    labels = RNG.integers(0, 5, (2, 3)).astype(np.int32)
    flat = nn.SoftmaxCrossEntropy()(logits.reshape(6, 5), labels.reshape(6))
    np.testing.assert_allclose(nn.SoftmaxCrossEntropy()(logits, labels), flat, rtol=1e-6)


def test_binary_cross_entropy_is_stable_for_any_logit():
    logits = np.array([-200.0, -1.0, 0.0, 2.0, 200.0], np.float32)
    targets = np.array([1.0, 0.0, 0.5, 1.0, 1.0], np.float32)
    wide = logits.astype(np.float64)
    expected = (np.logaddexp(0, wide) - wide * targets).mean()
    np.testing.assert_allclose(nn.BinaryCrossEntropy()(logits, targets), expected, rtol=1e-6)


def test_mse_is_the_mean_over_all_elements():
    y, t = (RNG.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(nn.MSE()(y, t), ((y - t) ** 2).mean(), rtol=1e-6)


def test_accuracy_counts_hits():
    logits = np.array([[0.0, 1.0], [2.0, 2.0], [1.0, 0.0]], np.float32)
    function = trace(nn.accuracy, TensorSpec(("N", 2)), TensorSpec(("N",), "int64"))
    from triplane.unified_ir.engines import engine

    program = engine("onnx").compile(function)
    assert program(logits, np.array([1, 0, 1]))[0] == np.float32(2 / 3)


@pytest.mark.parametrize(
    ("loss", "y", "target", "said"),
    [
        (nn.MSE(), (4, 1), (4,), "one shape, got float32"),
        (nn.BinaryCrossEntropy(), (4, 1), (4,), "one shape"),
        (nn.SoftmaxCrossEntropy(), (4, 3), (4,), "integer labels"),
    ],
)
def test_targets_that_would_be_averaged_wrongly_are_refused(loss, y, target, said):
    with pytest.raises(ShapeError, match=said):
        trace(loss, TensorSpec(y), TensorSpec(target))


def entropies(logits, labels):
    wide = logits.astype(np.float64)
    return np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, labels[..., None], -1)[..., 0]


@pytest.mark.parametrize("loss", [nn.SoftmaxCrossEntropy, nn.NegativeLogLikelihood])
def test_an_ignored_label_counts_nowhere(loss):
    logits = RNG.standard_normal((4, 3)).astype(np.float32)
    labels = np.array([1, -100, 0, -100])
    counted = labels >= 0
    given = logits if loss is nn.SoftmaxCrossEntropy else logits - logsumexp(logits)
    expected = entropies(logits[counted], labels[counted]).mean()
    made = loss(ignore_index=-100)
    np.testing.assert_allclose(made(given, labels), expected, rtol=1e-5)
    hits = (logits.argmax(1) == labels)[counted].mean()
    (metric,) = made.metrics().values()
    np.testing.assert_allclose(graph(metric)(logits, labels), hits, rtol=1e-6)


def logsumexp(x):
    return np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("engine", ["onnx", "reference"])
@pytest.mark.parametrize("label", [-1, 3, -4, -(2**31), 2**31])
@pytest.mark.parametrize("row", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_a_label_out_of_range_is_refused_and_no_other_class(engine, label, row):
    logits = RNG.standard_normal((2, 3)).astype(np.float32)
    with mode("graph", engine), pytest.raises(Exception, match=r"(?i)out of (bounds|range)"):
        graph(TABLE["", row])(logits, np.array([1, label]))


def test_weights_of_classes_weigh_the_mean():
    logits, labels = RNG.standard_normal((5, 3)).astype(np.float32), np.array([0, 1, 2, 2, 1])
    w = np.array([1.0, 2.0, 5.0])
    expected = (entropies(logits, labels) * w[labels]).sum() / w[labels].sum()
    found = nn.SoftmaxCrossEntropy(weight=w)(logits, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_smoothed_label_is_a_mixture_with_all_classes():
    logits, labels = RNG.standard_normal((4, 3)).astype(np.float32), np.array([0, 1, 2, 2])
    each = np.stack([entropies(logits, np.full(4, k)) for k in range(3)])
    expected = (0.9 * entropies(logits, labels) + 0.1 * each.mean(0)).mean()
    found = nn.SoftmaxCrossEntropy(label_smoothing=0.1)(logits, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_losses_of_numbers_are_their_formulas():
    y, t = ((RNG.standard_normal((4, 3)) * 2).astype(np.float32) for _ in range(2))
    size = np.abs(y - t)
    bent = np.where(size <= 0.5, size**2 / 2, 0.5 * (size - 0.25))
    np.testing.assert_allclose(nn.L1()(y, t), size.mean(), rtol=1e-6)
    np.testing.assert_allclose(nn.Huber(delta=0.5)(y, t), bent.mean(), rtol=1e-6)
    np.testing.assert_allclose(nn.SmoothL1(beta=0.5)(y, t), bent.mean() / 0.5, rtol=1e-6)
    np.testing.assert_allclose(nn.SmoothL1(beta=0.0)(y, t), size.mean(), rtol=1e-6)


def test_a_distribution_that_is_zero_somewhere_has_a_divergence():
    p = np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]], np.float32)
    q = np.array([[0.3, 0.3, 0.4], [0.1, 0.2, 0.7]], np.float32)
    np.testing.assert_allclose(nn.KLDivergence()(np.log(q), p), np.log(0.5 / 0.3) / 2, rtol=1e-5)


def test_pairs_are_near_or_apart_by_their_angle():
    a, b = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)[[0, 2, 2]]
    found = nn.CosineEmbedding(margin=0.25)((a, b), np.array([1, 1, -1]))
    np.testing.assert_allclose(found, (0 + 1 + 0.75) / 3, rtol=1e-6)


def paths_of(labels, steps, classes):
    """Every sequence of classes that means the labels, blank 0."""
    for path in itertools.product(range(classes), repeat=steps):
        joined = [c for c, _ in itertools.groupby(path)]
        if [c for c in joined if c] == labels:
            yield path


def test_ctc_sums_over_every_path_that_means_the_labels():
    x = RNG.standard_normal((3, 5, 3)).astype(np.float32)
    log_p = x - logsumexp(x)
    labels = np.array([[1, 2, -1], [2, 2, 1], [-1, -1, -1]])
    each = []
    for p, row in zip(log_p.astype(np.float64), labels, strict=True):
        found = [p[range(5), path].sum() for path in paths_of([c for c in row if c > 0], 5, 3)]
        each.append(-np.logaddexp.reduce(found) / max(1, (row >= 0).sum()))
    np.testing.assert_allclose(nn.CTC()(log_p, labels), np.mean(each), rtol=1e-5)


def test_ctc_of_a_single_step_is_the_label_there():
    log_p = np.log(np.array([[[0.2, 0.5, 0.3]]], np.float32))
    np.testing.assert_allclose(nn.CTC()(log_p, np.array([[1, -1]])), -np.log(0.5), rtol=1e-5)
    np.testing.assert_allclose(nn.CTC()(log_p, np.array([[1, 2]])), np.inf)


def test_ctc_of_too_few_steps_is_infinite_and_gives_no_gradient():
    log_p = np.full((2, 2, 3), np.log(1 / 3), np.float32)
    labels, lengths = np.array([[1, 1], [1, 2]]), np.array([2, 2])  # a blank must lie between 1, 1
    each = graph(lambda x: ops.ctc(x, ops.constant(labels), ops.constant(lengths)))(log_p)
    np.testing.assert_allclose(each, [np.inf, 2 * np.log(3)], rtol=1e-5)
    g = grad(lambda x: ops.ctc(x, ops.constant(labels), ops.constant(lengths))[1:].sum())(log_p)
    assert np.isfinite(g).all()
    assert not g[0].any()


@pytest.mark.parametrize("label", [0, 3, -2])
def test_ctc_refuses_a_label_that_no_step_can_say(label):
    log_p = np.zeros((1, 4, 3), np.float32)
    with pytest.raises(InvalidInput):
        graph(ops.ctc)(log_p, np.array([[1, label]]), np.array([2]))

"""Losses against their formulas in float64, and what they refuse."""

import numpy as np
import pytest

from triplane.unified_ir import TensorSpec, nn, trace
from triplane.unified_ir.ir.types import ShapeError

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
        (nn.SoftmaxCrossEntropy(), (4, 3), (4,), "whole-number labels"),
    ],
)
def test_targets_that_would_be_averaged_wrongly_are_refused(loss, y, target, said):
    with pytest.raises(ShapeError, match=said):
        trace(loss, TensorSpec(y), TensorSpec(target))

"""Calibration and noise."""

import numpy as np
import pytest
from tests.quantize import nets

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, nn
from triplane.unified_ir.quantize import (
    Range,
    batches,
    find_sites,
    freeze,
    noise,
    observe,
    scheme,
    site_ranges,
)
from triplane.unified_ir.quantize.observe import BATCH, typical_range


def test_ranges_are_the_extremes_over_all_batches():
    frozen = freeze(nets.lenet(), "predict")
    x = nets.images(3 * BATCH + 1)
    x[2 * BATCH] = -7.0
    x[-1] = 9.0
    seen = observe(frozen, frozen.inputs, {"x": x})
    assert list(seen.values()) == [Range(-7.0, 9.0)]


@pytest.mark.slow
def test_the_observed_graph_returns_numbers_not_tensors():
    frozen = freeze(nets.lenet(), "predict")
    values = [node.outputs[0] for node in frozen.function.nodes if node.op.name == "Conv"]
    whole = observe(frozen, values, {"x": nets.images(70)})
    parts = [observe(frozen, values, {"x": nets.images(70)[i : i + 1]}) for i in range(70)]
    for value in values:
        assert whole[value].low == pytest.approx(min(p[value].low for p in parts), rel=1e-5)
        assert whole[value].high == pytest.approx(max(p[value].high for p in parts), rel=1e-5)


class Pair(nn.Cell):
    """Distances of the rows of two inputs, whose numbers of rows are independent."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(6, 4)

    def construct(self, a, b):
        return self.layer(a) @ self.layer(b).transpose(1, 0)


def rows(n):
    return np.random.default_rng(n).standard_normal((n, 6)).astype(np.float32)


def test_inputs_with_different_numbers_of_samples_are_named():
    specs = TensorSpec(("N", 6)), TensorSpec(("M", 6))
    frozen = freeze(nets.module_of(Pair(), *specs), "predict")
    with pytest.raises(InvalidInput, match=r"the same number of samples.* a has 5, b has 4"):
        observe(frozen, frozen.inputs, {"a": rows(5), "b": rows(4)})
    first, second = observe(frozen, frozen.inputs, {"a": rows(5), "b": rows(5)}).values()
    assert first == second


def test_inputs_of_fixed_sizes_are_one_sample_together():
    specs = TensorSpec((5, 6)), TensorSpec((4, 6))
    frozen = freeze(nets.module_of(Pair(), *specs), "predict")
    given = {"a": rows(5), "b": rows(4)}
    first, second = observe(frozen, frozen.inputs, given).values()
    assert (first.high, second.high) == (given["a"].max(), given["b"].max())


def test_a_sample_much_wider_than_all_others_sets_no_range():
    frozen = freeze(nets.lenet(), "predict")
    x = nets.images(200)
    usual = observe(frozen, frozen.inputs, {"x": np.delete(x, 17, 0)})
    x[17] *= 100
    (seen,) = observe(frozen, frozen.inputs, {"x": x}).values()
    (wanted,) = usual.values()
    assert (seen.low, seen.high, seen.left_out) == (wanted.low, wanted.high, (17,))


def test_samples_of_a_batch_that_is_left_out_are_named_one_by_one():
    module = nets.module_of(nn.Dense(4, 2), TensorSpec((4, 4), "float32"))
    frozen = freeze(module, "predict")
    x = np.random.default_rng(0).uniform(-1, 1, (800, 4)).astype(np.float32)
    x[201] *= 100
    (seen,) = observe(frozen, frozen.inputs, {"x": x}).values()
    assert seen.left_out == (200, 201, 202, 203)
    assert seen.high <= 1.0


@pytest.mark.parametrize(
    ("highs", "kept"),
    [
        ([1.0] * 198 + [2.9, 2.9], 2.9),  # not much wider
        ([1.0] * 197 + [9.0] * 3, 9.0),  # more than a hundredth of the samples
        ([1.0] * 98 + [9.0], 9.0),  # too few samples to tell
        ([0.0] * 199 + [9.0], 9.0),  # a tensor that is usually 0
        ([1.0] * 198 + [9.0] * 2, 1.0),
    ],
)
def test_a_range_leaves_out_few_and_wide_samples_alone(highs, kept):
    found = typical_range(np.zeros(len(highs)), np.array(highs))
    assert found.high == kept
    assert len(found.left_out) == sum(h > kept for h in highs)


class Overflows(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def construct(self, x):
        return self.conv(x * 3e38)


def test_a_tensor_that_overflows_is_named_with_its_line():
    frozen = freeze(nets.module_of(nets.shaken(Overflows()), nets.IMAGE), "predict")
    sites = find_sites(frozen)
    with pytest.raises(InvalidInput, match=r"output of (Mul|Conv) \(at .*test_observe.py:\d+"):
        observe(frozen, sites.roots, {"x": nets.images() * 9})


def test_a_static_batch_must_divide_the_samples():
    frozen = freeze(nets.module_of(nets.shaken(nets.LeNet()), TensorSpec((4, 1, 8, 8))), "predict")
    assert [len(b["x"]) for b in batches(frozen, {"x": nets.images(8)})] == [4, 4]
    with pytest.raises(InvalidInput, match="takes 4 samples at once; 6"):
        list(batches(frozen, {"x": nets.images(6)}))


def test_noise_is_that_of_the_tensors_themselves():
    frozen = freeze(nets.module_of(nets.shaken(nets.Digits()), nets.IMAGE), "predict")
    x = nets.images(BATCH + 3)
    sites = find_sites(frozen)
    ranges = site_ranges(sites, observe(frozen, sites.roots, {"x": x}))
    row = scheme("u8s8")
    q = np.clip(np.rint(x / np.float32(ranges[sites.roots[0]].high / 255)), 0, 255)
    rounded = q * np.float32(ranges[sites.roots[0]].high / 255)
    expected = 10 * np.log10((x**2).sum() / ((x - rounded) ** 2).sum())
    levels = noise(frozen, sites, ranges, row, [frozen.inputs[0], *sites.roots[1:]], {"x": x})
    assert levels[0] == pytest.approx(expected, abs=0.1)
    assert all(20 < level < 70 for level in levels if level is not None)


def test_no_noise_is_no_number():
    identity = nets.module_of(nets.shaken(nets.Digits()), nets.IMAGE)
    frozen = freeze(identity, "predict")
    sites = find_sites(frozen)
    x = np.zeros((2, 1, 8, 8), np.float32)
    ranges = site_ranges(sites, observe(frozen, sites.roots, {"x": x}))
    assert noise(frozen, sites, ranges, scheme("u8s8"), frozen.inputs, {"x": x}) == [None]

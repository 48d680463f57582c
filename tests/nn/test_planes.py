"""Layers over lines, planes and volumes against PyTorch's values, gradients and buffers."""

import numpy as np
import onnx
import pytest
from tests.support.golden_files import ROOT, check_generator, needs_peers, parts_of

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, nn, optim, trace, train
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.runtime import Session

GOLDEN = ROOT / "tests" / "golden" / "layers"

# fmt: off
OURS = {
    "conv_3d": lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=(1, 0, 1)),
    "conv_transpose_1d": lambda: nn.ConvTranspose1d(
        2, 3, 3, stride=2, padding=1, output_padding=1),
    "conv_transpose_2d": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2),
    "conv_transpose_3d": lambda: nn.ConvTranspose3d(2, 2, 2, stride=(1, 2, 1), bias=False),
    "max_pool_1d": lambda: nn.MaxPool1d(3, stride=2, ceil_mode=True),
    "max_pool_3d": lambda: nn.MaxPool3d(2),
    "avg_pool_1d": lambda: nn.AvgPool1d(3, stride=2, padding=1, count_include_pad=True),
    "avg_pool_3d": lambda: nn.AvgPool3d(2),
    "adaptive_avg_pool_1d": lambda: nn.AdaptiveAvgPool1d(3),
    "adaptive_avg_pool_2d": lambda: nn.AdaptiveAvgPool2d((None, 2)),
    "adaptive_avg_pool_3d": lambda: nn.AdaptiveAvgPool3d(2),
    "upsample": lambda: nn.Upsample(scale=2, mode="bilinear", align_corners=True),
    "batch_norm_3d": lambda: nn.BatchNorm3d(3),
    "batch_norm_untracked": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "batch_norm_untracked_eval": lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "instance_norm_1d": lambda: nn.InstanceNorm1d(3),
    "instance_norm_2d": lambda: nn.InstanceNorm2d(3),
    "instance_norm_3d": lambda: nn.InstanceNorm3d(3),
    "rms_norm": lambda: nn.RMSNorm(3, 4),
}
# fmt: on


def held(name):
    """A golden file by part, in float32."""
    return parts_of(GOLDEN / f"{name}.npz", np.float32)


class Weighted(nn.Cell):
    """The sum of a layer's result times a cotangent, and the result."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, v):
        y = self.cell(x)
        return (y * v).sum(), y


@pytest.mark.parametrize("name", OURS)
def test_a_layer_equals_pytorch_in_values_gradients_and_buffers(name):
    parts, cell = held(name), OURS[name]()
    cell.load(parts["w"], strict=False)
    x, v = parts["x"][""], parts["v"][""]
    specs = [TensorSpec(("N", *a.shape[1:])) for a in (x, v)]
    function = trace(Weighted(cell), *specs)
    both = value_and_grad(function, ["x", *(f"cell.{k}" for k in parts["h"])])
    state = {f"cell.{k}": p.array for k, p in cell.parameters().items()} | {"x": x, "v": v}
    found = engine("onnx").compile(both)(*(state[n] for n in both.param_names))
    results = dict(zip(both.result_names, found, strict=True))
    wanted = {function.result_names[1]: parts["y"][""], "grad.x": parts["g"][""]}
    wanted |= {f"grad.cell.{k}": a for k, a in parts["h"].items()}
    wanted |= {f"cell.{k}": a for k, a in parts["b"].items()}
    for key, array in wanted.items():
        np.testing.assert_allclose(results[key], array, rtol=1e-4, atol=2e-5, err_msg=key)


def test_every_golden_file_has_its_counterpart():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == OURS.keys()


def test_starting_weights_of_a_transposed_convolution_stay_within_their_bound():
    layer = nn.ConvTranspose2d(3, 8, (2, 3))
    bound = 1 / np.sqrt(8 * 2 * 3)
    assert np.abs(layer.weight.array).max() <= bound
    assert np.abs(layer.bias.array).max() <= bound
    assert np.abs(layer.weight.array).max() > 0.8 * bound


@pytest.mark.parametrize("cell", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.BatchNorm2d(4)])
def test_a_mean_far_from_zero_leaves_a_normalization_exact(cell):
    x = (np.random.default_rng(0).standard_normal((2, 4, 5, 6)) + 1000).astype(np.float32)
    axes = {"GroupNorm": (2, 3, 4), "InstanceNorm2d": (3, 4), "BatchNorm2d": (0, 3, 4)}
    wide = x.astype(np.float64).reshape(2, 2 if isinstance(cell, nn.GroupNorm) else 4, -1, 5, 6)
    over = axes[type(cell).__name__]
    wide -= wide.mean(over, keepdims=True)
    wanted = wide / np.sqrt(wide.var(over, keepdims=True) + 1e-5)
    np.testing.assert_allclose(cell(x), wanted.reshape(x.shape), atol=1e-3)


WRONG = {
    "GroupNorm needs groups": lambda: nn.GroupNorm(3, 4),
    "takes a kernel with 3 sizes": lambda: nn.ConvTranspose3d(1, 1, (2, 2)),
    "size or scale": nn.Upsample,
    "at least one size": nn.RMSNorm,
    "MaxPool3d takes": lambda: trace(nn.MaxPool3d(2), TensorSpec((1, 1, 4, 4))),
    "InstanceNorm2d": lambda: trace(nn.InstanceNorm2d(3), TensorSpec((1, 4, 2, 2))),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_layer_refuses_what_it_cannot_be_by_name(words):
    with pytest.raises(InvalidInput, match=words):
        WRONG[words]()


@pytest.mark.deep
@needs_peers
def test_the_generator_reproduces_the_golden_files(tmp_path):
    check_generator("layers", GOLDEN, tmp_path)


def test_a_batch_norm_without_statistics_exports_and_answers_by_the_batch(tmp_path):
    cell = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Dense(3, 2))
    assert list(cell.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    trainer = train.Trainer(cell, loss=nn.MSE(), optimizer=optim.SGD(0.1))
    x = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    trainer.fit((x, x[:, :2]), 2, progress="none")
    whole, part = trainer.predict(x), trainer.predict(x[:3])
    assert np.abs(whole[:3] - part).max() > 1e-3
    file = trainer.export_onnx(tmp_path / "m.onnx")
    nodes = {n.op_type for n in onnx.load(file.path).graph.node}
    assert "BatchNormalization" not in nodes
    outputs = Session(file.path).run({"x": x})
    np.testing.assert_allclose(outputs["y"], whole, atol=1e-5)

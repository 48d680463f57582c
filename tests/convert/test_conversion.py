"""From a module to a bundle."""

import json
import platform
import subprocess
import sys

import numpy as np
import pytest
from tests.quantize import nets
from tests.support.processors import x64

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import TensorSpec, nn, ops
from triplane.unified_ir.convert import convert
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module, Role, StateTensor
from triplane.unified_ir.runtime import Bundle

pytestmark = pytest.mark.slow  # each test trains, converts or times


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    """(report, bundle) of the digits in int8."""
    module, train, held_out = nets.digits()
    out = tmp_path_factory.mktemp("bundles") / "digits.bundle"
    report = convert(
        module, "ort-x64", quantize="int8", calibration=train.take(200), evaluation=held_out,
        labels=held_out.labels, version="7", out=out,
    )  # fmt: skip
    return report, Bundle.load(out)


def test_int8_keeps_the_accuracy_of_a_network_that_knows_digits(int8):
    report, bundle = int8
    _, _, held_out = nets.digits()
    assert report.accuracy.samples == 360
    assert report.accuracy.before > 0.93
    assert abs(report.accuracy.drop_points) <= 1.0
    right = bundle.predict(x=held_out.x)["logits"].argmax(1) == held_out.y
    assert right.mean() == pytest.approx(report.accuracy.after)


@x64
def test_the_report_tells_kernels_sizes_and_noise(int8):
    report, _ = int8
    assert [(layer.name, layer.kernel) for layer in report.layers] == [
        ("conv", "QLinearConv"),
        ("head", "QGemm"),
    ]
    assert all(layer.snr_db > 25 for layer in report.layers)
    assert report.size.int8_weights < 0.3 * report.size.float32_weights
    assert "test" in report.layers[0].location or "nets.py" in report.layers[0].location


def test_the_report_tells_which_share_of_the_time_runs_on_integers(int8):
    report, _ = int8
    shares = report.record()["time_shares"]
    assert 0 < shares["integer"] <= 1
    total = shares["integer"] + shares["conversions"] + sum(shares["other"].values())
    assert total == pytest.approx(1, abs=0.01)
    assert f"{100 * report.shares.integer:.0f} % of the time on integers" in str(report)


def test_one_damaged_calibration_sample_costs_no_accuracy():
    module, train, held_out = nets.digits()
    x = train.x[:200].copy()
    x[17] *= 100
    report = convert(
        module, quantize="int8", calibration=x, evaluation=held_out, max_accuracy_drop=100
    )
    assert report.accuracy is not None
    assert abs(report.accuracy.drop_points) <= 1.0
    assert "calibration samples 17 (counted from 0) are much wider" in " ".join(report.notes)


def test_the_bundle_says_what_it_is(int8):
    report, bundle = int8
    assert (bundle.name, bundle.version, bundle.target) == ("digits", "7", "ort-x64")
    assert bundle.inputs[0].shape == ("N", 1, 8, 8)
    assert bundle.labels["logits"] == tuple("0123456789")
    assert (bundle.digest, bundle.content_digest) == (report.digest, report.content_digest)
    assert bundle.report == json.loads(json.dumps(report.record()))
    assert bundle.description.constraints.opset == 21
    assert bundle.check_goldens() == 0.0


def test_a_float_bundle_needs_no_samples(tmp_path):
    report = convert(nets.lenet(), out=tmp_path / "a.bundle")
    bundle = Bundle.load(tmp_path / "a.bundle")
    assert report.verdict.startswith("float32 for ort-x64")
    assert bundle.check_goldens() == 0.0
    assert bundle.name == "a"


def test_a_model_file_becomes_the_parent(tmp_path):
    digest = nets.lenet().save(tmp_path / "net.tpm")
    convert(tmp_path / "net.tpm", out=tmp_path / "a.bundle")
    bundle = Bundle.load(tmp_path / "a.bundle")
    assert bundle.description.model_digest == digest
    assert bundle.name == "net"


def test_meta_gives_labels_and_preprocessing(tmp_path):
    steps = [{"input": "x", "name": "divide", "params": {"by": [16]}}]
    names = [f"class {i}" for i in range(10)]
    meta = {"labels": json.dumps(names), "preprocessing": json.dumps(steps)}
    convert(nets.lenet(meta), out=tmp_path / "a.bundle")
    bundle = Bundle.load(tmp_path / "a.bundle")
    assert bundle.labels["logits"] == tuple(names)
    (step,) = bundle.description.preprocessing
    assert (step.input, step.name, step.params) == ("x", "divide", (("by", (16.0,)),))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"labels": '["a"]'}, "10 classes but 1 labels"),
        ({"labels": "{"}, "'labels' must be JSON"),
        ({"labels": "5"}, "'logits' must be a list of names, got '5'"),
        ({"labels": '{"logits": "0123456789"}'}, "'logits' must be a list of names"),
        ({"preprocessing": "[1]"}, "JSON list of objects"),
    ],
)
def test_meta_that_does_not_fit_is_refused(meta, message, tmp_path):
    with pytest.raises(InvalidInput, match=message):
        convert(nets.lenet(meta), out=tmp_path / "a.bundle")
    assert list(tmp_path.iterdir()) == []


def test_arm64_gets_signed_activations_and_no_claim_about_speed(tmp_path):
    x = nets.images()
    report = convert(
        nets.lenet(), "ort-arm64", quantize="int8", calibration=x, max_latency_ratio=0.001,
        out=tmp_path / "a.bundle",
    )  # fmt: skip
    assert "scheme s8s8" in " ".join(report.notes)
    if platform.machine() != "aarch64":
        assert "UNDECIDED" in report.verdict
        assert "could not be checked" in " ".join(report.notes)


def budget(tmp_path, **limits):
    module, train, held_out = nets.digits()
    return convert(
        module, quantize="int8", calibration=train.take(64), evaluation=held_out,
        out=tmp_path / "a.bundle", **limits,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_size_ratio": 0.01}, r"max_size_ratio is 0.01, but int8 takes \d+ bytes of \d+"),
        ({"max_latency_ratio": 0.001}, "max_latency_ratio is 0.001, but int8 takes .* times as"),
    ],
)
@x64
def test_a_stated_budget_refuses_and_nothing_is_written(limits, message, tmp_path):
    with pytest.raises(InvalidInput, match=message) as refused:
        budget(tmp_path, **limits)
    assert "convert without quantize" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def badly_calibrated(tmp_path, **limits):
    module, train, held_out = nets.digits()
    return convert(
        module, quantize="int8", calibration=train.x[:64] * 0.02, evaluation=held_out,
        out=tmp_path / "a.bundle", **limits,
    )  # fmt: skip


def test_a_lost_point_of_accuracy_refuses_by_default(tmp_path):
    with pytest.raises(InvalidInput, match=r"max_accuracy_drop is 1.0 points, but accuracy went"):
        badly_calibrated(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_larger_drop_can_be_allowed(tmp_path):
    report = badly_calibrated(tmp_path, max_accuracy_drop=100.0)
    assert report.accuracy
    assert report.accuracy.drop_points > 1.0


def test_without_a_budget_a_slower_result_is_converted(tmp_path):
    report = budget(tmp_path)
    assert report.path.exists()
    assert report.verdict.split()[0] == "int8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int4"}, "'int8', or None"),
        ({"quantize": "int8"}, "give calibration"),
        ({"max_size_ratio": 0.5}, "they need quantize"),
        ({"max_accuracy_drop": float("nan")}, "max_accuracy_drop must be a number >= 0"),
        ({"entry": "train"}, "no entry 'train'"),
    ],
)
def test_arguments_that_contradict_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        convert(nets.lenet(), **options)


def test_each_stage_is_told_before_its_work():
    module, train, held_out = nets.digits()
    told: list[str] = []
    convert(
        module, "ort-x64", quantize="int8", calibration=train.take(20), evaluation=held_out,
        progress=told.append,
    )  # fmt: skip
    assert told == [
        "checking the graph against the model's meaning",
        "int8: observing ranges on 20 samples",
        "timing float32 and int8 in turn",
        "measuring accuracy on 360 samples",
    ]


@pytest.mark.parametrize(
    "wrong", [{"name": ""}, {"version": ""}, {"version": "1\n"}, {"name": 300 * "x"}]
)
def test_a_name_that_no_server_would_load_is_refused(wrong):
    module, *_ = nets.digits()
    with pytest.raises(InvalidInput, match="1 to 256 printable characters"):
        convert(module, "ort-x64", **wrong)


def test_an_entry_that_assigns_state_says_that_a_bundle_forgets_it():
    specs = {"x": TensorSpec(("N", 2)), "w": TensorSpec((2,))}
    function = trace(lambda x, w: {"y": x * w, "w": w + 1.0}, **specs, name="learn")
    state = {"w": StateTensor(Role.PARAMETER, np.ones(2, np.float32))}
    module = Module({"learn": function}, {"learn": "learn"}, state)
    assert convert(module, "ort-x64", entry="learn").notes == (
        "'learn' assigns 1 state tensors; a bundle keeps no state, a plan does",
    )


def test_an_unknown_target_names_those_that_exist():
    with pytest.raises(NotFound, match=r"no target 'cuda'; .* ort-x64, ort-arm64"):
        convert(nets.lenet(), "cuda")


def test_reduce_range_keeps_weights_in_seven_bits(tmp_path):
    out = tmp_path / "a.bundle"
    convert(nets.lenet(), quantize="int8", calibration=nets.images(), reduce_range=True, out=out)
    stored = [t.data for t in Bundle.load(out).weights.values() if t.dtype == "int8"]
    assert stored
    assert max(np.abs(w.astype(int)).max() for w in stored) == 64


class Blows(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(3, 2)

    def construct(self, x):
        return self.fc(x) / 0.0


def test_a_model_that_gives_no_numbers_is_refused(tmp_path):
    module = nets.module_of(Blows(), TensorSpec(("N", 3)))
    with np.errstate(all="ignore"), pytest.raises(InvalidInput, match="'logits' is not finite"):
        convert(module, out=tmp_path / "a.bundle")
    assert list(tmp_path.iterdir()) == []


class TwoInputs(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.fc = nn.Dense(4, 3)

    def construct(self, words, scale):
        return self.fc(self.table(words).mean([1]) * scale)


def test_several_inputs_and_whole_numbers_convert(tmp_path):
    specs = TensorSpec(("N", 5), "int64"), TensorSpec(("N", 1))
    module = nets.module_of(nets.shaken(TwoInputs()), *specs)
    rng = np.random.default_rng(0)
    x: dict[str, np.ndarray] = {
        "words": rng.integers(0, 7, (40, 5)),
        "scale": rng.random((40, 1), dtype=np.float32),
    }
    report = convert(module, quantize="int8", calibration=x, out=tmp_path / "a.bundle")
    bundle = Bundle.load(tmp_path / "a.bundle")
    assert [i.name for i in bundle.inputs] == ["words", "scale"]
    assert bundle.check_goldens() == 0.0
    assert [layer.op for layer in report.layers] == ["Gemm"]


class Stepping(nn.Cell):
    def __init__(self):
        super().__init__()
        self.step = nn.RNNCell(4, 8)
        self.head = nn.Dense(8, 3)

    def construct(self, x):
        start = ops.zeros((x.shape[0], 8))
        last, _ = ops.scan(lambda h, v: (self.step(v, h), ()), start, x.transpose(1, 0, 2))
        return self.head(last)


class Recurrent(nn.Cell):
    def __init__(self):
        super().__init__()
        self.step = nn.RNN(4, 8)
        self.head = nn.Dense(8, 3)

    def construct(self, x):
        return self.head(self.step(x)[1])


@pytest.mark.parametrize(("cell", "where"), [(Stepping, "loops or branches"), (Recurrent, "RNN")])
def test_products_inside_something_stay_in_float_and_are_told(tmp_path, cell, where):
    module = nets.module_of(nets.shaken(cell()), TensorSpec(("N", 6, 4)))
    x = np.random.default_rng(0).standard_normal((32, 6, 4)).astype(np.float32)
    report = convert(module, quantize="int8", calibration=x, out=tmp_path / "a.bundle")
    assert Bundle.load(tmp_path / "a.bundle").check_goldens() == 0.0
    assert f"products inside {where} stay in float" in " ".join(report.notes)


class NoProduct(nn.Cell):
    def construct(self, x):
        return x * 2.0


def test_int8_of_nothing_to_multiply_is_refused(tmp_path):
    module = nets.module_of(NoProduct(), TensorSpec(("N", 3)))
    x = np.ones((4, 3), np.float32)
    with pytest.raises(InvalidInput, match="here is none outside loops"):
        convert(module, quantize="int8", calibration=x, out=tmp_path / "a.bundle")
    convert(module, out=tmp_path / "a.bundle")


def test_open_sizes_need_samples(tmp_path):
    module = nets.module_of(NoProduct(), TensorSpec(("N", "M")))
    with pytest.raises(InvalidInput, match="sizes M are open"):
        convert(module)
    convert(module, calibration=np.ones((4, 3), np.float32), out=tmp_path / "a.bundle")
    assert Bundle.load(tmp_path / "a.bundle").inputs[0].shape == ("N", "M")


SCRIPT = """
import sys
from tests.quantize import nets
from tests.support.processors import x64
from triplane.unified_ir.convert import convert
made = convert(nets.lenet(), quantize="int8", calibration=nets.images(), name="net",
               out=sys.argv[1])
print(made.content_digest)
"""


def test_the_content_is_the_same_in_every_process(tmp_path):
    found = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / f"{seed}.bundle")],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "77")
    }  # fmt: skip
    assert len(found) == 1

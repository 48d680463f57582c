"""A start point as a bundle: its graph of adaptation, and the bundle that comes out of it."""

from dataclasses import replace

import numpy as np
import pytest

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir import convert, data, nn, ops, optim, runtime, train
from triplane.unified_ir.ir import Role, StateTensor
from triplane.unified_ir.runtime import Plan, adapted_weights, batch_names, write_adapted

STEPS = 3


class Digits(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding="same")
        self.head = nn.Dense(4 * 4 * 4, 10)

    def construct(self, x):
        return self.head(ops.flatten(ops.max_pool(ops.relu(self.conv(x)), 2)))


@pytest.fixture(scope="module")
def module():
    nn.seed(0)
    trainer = train.Trainer(Digits(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.fit(data.digits().take(256), epochs=1, batch_size=32, progress="none")
    made = trainer.export(entries=("predict", "evaluate", "adapt"))
    return replace(made, meta={**made.meta, "adapt_steps": str(STEPS)})


@pytest.fixture(scope="module")
def samples():
    digits = data.digits().select(np.arange(300, 364))
    return {"x": digits.x, "y": digits.y}


@pytest.fixture(scope="module")
def bundle(module, tmp_path_factory):
    path = tmp_path_factory.mktemp("start") / "digits.bundle"
    convert.convert(module, "ort-x64", name="digits", out=path)
    return runtime.Bundle.load(path)


@pytest.mark.slow
def test_bundle_adapts_exactly_as_a_device_with_the_plan_does(module, bundle, samples, tmp_path):
    convert.export_plan(module, tmp_path / "digits.plan")
    plan = Plan.load(tmp_path / "digits.plan")
    plan.adapt([samples], steps=STEPS)
    found = adapted_weights(bundle, samples)
    for name, array in plan.state("parameter").items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert batch_names(bundle) == ("x", "y")


@pytest.mark.slow
def test_adapted_bundle_is_a_bundle_whose_goldens_hold(bundle, samples, tmp_path):
    digest = write_adapted(bundle, adapted_weights(bundle, samples), tmp_path / "mine.bundle")
    mine = runtime.Bundle.load(tmp_path / "mine.bundle", expected_digest=digest)
    mine.check_goldens()
    assert (mine.name, mine.version, mine.digest) != (bundle.name, bundle.version, bundle.digest)
    assert mine.report == {"adapted_from": bundle.digest}
    before, after = (b.predict(x=samples["x"])["logits"] for b in (bundle, mine))
    assert not np.array_equal(before, after)


def test_start_point_is_served_unfolded_under_its_own_names(module, bundle):
    assert set(bundle.weights) == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    assert bundle.description.adapt_steps == STEPS


@pytest.mark.slow
def test_model_that_does_not_ask_for_it_gets_no_graph(module, tmp_path):
    plain = replace(module, meta={k: v for k, v in module.meta.items() if k != "adapt_steps"})
    convert.convert(plain, "ort-x64", name="digits", out=tmp_path / "plain.bundle")
    bundle = runtime.Bundle.load(tmp_path / "plain.bundle")
    assert (bundle.adapt, bundle.description.adapt_steps) == (None, 0)
    with pytest.raises(InvalidInput, match="has no graph of adaptation"):
        adapted_weights(bundle, {})


def test_int8_of_a_start_point_is_refused(module, samples):
    with pytest.raises(InvalidInput, match="3 steps of adaptation, which need its weights"):
        convert.convert(module, "ort-x64", quantize="int8", calibration=samples["x"])


@pytest.mark.parametrize("text", ["-1", "x", "101", "1" * 50, "0" * 9 + "101"])
def test_absurd_number_of_steps_is_refused(module, text):
    with pytest.raises(InvalidInput, match="must be 0 to 100, at most 9 digits"):
        convert.convert(replace(module, meta={**module.meta, "adapt_steps": text}))


def test_steps_without_an_entry_are_refused(module):
    alone = replace(module, entries={"predict": module.entries["predict"]})
    with pytest.raises(InvalidInput, match="has no 'adapt'"):
        convert.convert(alone)


def test_entry_that_changes_what_is_not_served_is_refused(module):
    state = {**module.state, "head.bias": StateTensor(Role.BUFFER, np.zeros(10, np.float32))}
    other = replace(module, state=state)
    served = {"conv.weight", "conv.bias", "head.weight"}
    from triplane.unified_ir.convert.adaptation import adapt_graph
    from triplane.unified_ir.onnx import OnnxTarget

    with pytest.raises(InvalidInput, match=r"changes head\.bias, which the served graph does not"):
        adapt_graph(other, served, OnnxTarget())


def test_samples_of_another_scale_are_refused_instead_of_served(bundle, samples):
    with pytest.raises(Corrupt, match="infinite or not a number"):
        adapted_weights(bundle, {**samples, "x": samples["x"] * np.float32(1e30)})

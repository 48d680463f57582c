"""What a trainer exports: functions that mean what training did, state with roles."""

import json

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import load, nn, optim, train
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.graph import Role
from triplane.unified_ir.ops.check import save
from triplane.unified_ir.runtime import Session

from .models import Noisy, data, trainer

ALL = ("predict", "evaluate", "train_step", "local_update", "adapt", "gradients")


@pytest.fixture(scope="module")
def done():
    made = trainer(labels=("none", "one", "both"))
    made.fit(data(), 2, batch_size=16, progress="none")
    return made


def call(module, entry, **batch):
    function = module.entry(entry)
    given = {**{k: s.array for k, s in module.state.items()}, **batch}
    values = engine("onnx").compile(function)(*(given[n] for n in function.param_names))
    return dict(zip(function.result_names, values, strict=True))


@pytest.mark.slow
def test_predict_and_evaluate_give_what_the_trainer_gives(done):
    module, (x, y) = done.export(ALL), data()
    assert np.array_equal(call(module, "predict", x=x)["logits"], done.predict(x))
    measured = call(module, "evaluate", x=x, y=y)
    assert {k: float(v) for k, v in measured.items()} == pytest.approx(done.evaluate((x, y)))


@pytest.mark.slow
def test_the_exported_step_is_the_step_that_was_trained(done):
    module, (x, y) = done.export(), data()
    results = call(module, "train_step", x=x, y=y)
    next_trainer = trainer()
    next_trainer.prepare(x, y)
    next_trainer.write_back({k: s.array for k, s in module.state.items()})
    next_trainer.fit([(x, y)], 1, progress="none")
    after = next_trainer.state()
    assert all(np.array_equal(results[k], after[k]) for k in after)
    assert list(results)[:2] == ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("given", "named"), [((), []), (("a",), ["a", "1", "2"]), (tuple("abcd"), ["a", "b", "c"])]
)
def test_every_class_has_a_name_where_one_has(given, named):
    made = trainer(labels=given)
    made.prepare(*data())
    assert json.loads(made.export().meta["labels"]) == named


def test_every_state_tensor_has_its_role(done):
    module = done.export()
    roles = {k: s.role for k, s in module.state.items()}
    assert roles["head.weight"] is Role.PARAMETER
    assert roles["norm.running_var"] is Role.BUFFER
    assert roles["drop.key"] is Role.KEY
    assert roles["optimizer.step"] is Role.OPTIMIZER
    assert roles["optimizer.v.head.weight"] is Role.OPTIMIZER
    assert set(module.assigned("train_step")) == set(module.state)


def test_optimizer_state_stays_home_without_the_training_step(done):
    module = done.export(("predict", "local_update"))
    assert not any(s.role is Role.OPTIMIZER for s in module.state.values())
    assert set(module.assigned("local_update")) == set(module.state)
    assert module.assigned("predict") == ()


def test_inputs_are_named_and_of_any_batch(done):
    module = done.export(ALL)
    assert [str(v.type) for v in module.inputs("train_step")] == ["float32[N,4]", "int64[N]"]
    assert [v.name for v in module.inputs("train_step")] == ["x", "y"]
    assert [v.name for v in module.inputs("predict")] == ["x"]


@pytest.mark.slow
def test_the_loss_is_that_of_a_step_and_assigns_what_it_assigns(done):
    module, (x, y) = done.export((*ALL, "loss")), data()
    found, step = (call(module, entry, x=x, y=y) for entry in ("loss", "gradients"))
    assert set(module.assigned("loss")) == {"norm.running_mean", "norm.running_var", "drop.key"}
    for name, value in found.items():
        np.testing.assert_allclose(value, step[name], rtol=1e-6)
    assert "loss" in done.export().entries


def test_frozen_parameters_are_named():
    made = trainer()
    made.cell.parameters()["head.bias"].trainable = False
    made.prepare(*data())
    assert json.loads(made.export(("predict",)).meta["frozen"]) == ["head.bias"]


@pytest.mark.parametrize("entry", ["local_update", "adapt"])
def test_local_updates_are_plain_gradient_descent(done, entry):
    module, (x, y) = done.export(ALL, local_lr=0.5), data()
    updated = call(module, entry, x=x, y=y)
    found = call(module, "gradients", x=x, y=y)
    assert updated["loss"] == found["loss"]
    for path in ("head.weight", "first.bias"):
        expected = module.state[path].array - np.float32(0.5) * found[f"grad.{path}"]
        np.testing.assert_allclose(updated[path], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_local_rate_is_the_optimizers_where_that_is_constant():
    def rate(optimizer):
        made = trainer(optimizer=optimizer)
        made.prepare(*data())
        module = made.export(("local_update", "gradients"))
        x, y = data()
        step = call(module, "local_update", x=x, y=y)["head.bias"] - module.state["head.bias"].array
        return (step / -call(module, "gradients", x=x, y=y)["grad.head.bias"]).mean()

    assert rate(optim.SGD(0.25, momentum=0.9)) == pytest.approx(0.25, rel=1e-4)
    assert rate(optim.SGD(optim.Constant(0.125))) == pytest.approx(0.125, rel=1e-4)
    assert rate(optim.Adam(0.25)) == pytest.approx(0.01, rel=1e-3)


def test_the_module_says_what_it_is(done):
    meta = done.export().meta
    assert json.loads(meta["labels"]) == ["none", "one", "both"]
    assert json.loads(meta["inputs"]) == {"x": "float32[N,4]"}
    assert json.loads(meta["target"]) == {"y": "int64[N]"}
    assert meta["cell"].endswith("models:Noisy")
    assert meta["loss"] == "SoftmaxCrossEntropy"
    assert meta["output"] == "logits"
    assert meta["optimizer"].startswith("Adam(lr=Cosine(")


def test_nodes_carry_the_users_line(done):
    function = done.export(("train_step",)).entry("train_step")
    lines = {str(n.meta.location) for n in function.nodes if n.op.name == "Gemm"}
    assert any(line.rpartition("/")[2].startswith("models.py:") for line in lines)
    assert not any(line.startswith("/") for line in lines)


def test_an_exported_module_is_a_copy(done):
    module = done.export()
    kept = module.state["head.weight"].array.copy()
    done.fit(data(), 1, progress="none")
    assert np.array_equal(module.state["head.weight"].array, kept)


def test_a_model_of_numbers_calls_its_output_y():
    made = train.Trainer(nn.Dense(4, 1), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    made.prepare(np.zeros((5, 4)), np.zeros((5, 1)))
    assert made.export(("predict",)).entry("predict").result_names == ("y",)


def test_unknown_entries_are_refused(done):
    with pytest.raises(InvalidInput, match=r"entries must be among predict.*\['forecast'\]"):
        done.export(("predict", "forecast"))
    with pytest.raises(InvalidInput, match="got none"):
        done.export(())
    with pytest.raises(InvalidInput, match=r"got the text 'net\.tpm'; .*export\(\)\.save\("):
        done.export("net.tpm")


def test_a_cell_whose_names_the_step_uses_is_refused():
    class Odd(nn.Cell):
        def __init__(self):
            super().__init__()
            self.optimizer = Noisy()

        def construct(self, x):
            return self.optimizer(x)

    with pytest.raises(InvalidInput, match=r"state 'optimizer.first.weight' of Odd"):
        trainer(cell=Odd).prepare(*data())


def test_a_fixed_batch_stands_in_every_input_and_result(done, tmp_path):
    trained = done
    module = trained.export(("predict", "evaluate", "train_step"), batch=6)
    path = tmp_path / "m.tpm"
    save(module, path)
    module = load(path)
    for entry in module.entries:
        assert {p.type.shape[0] for p in module.inputs(entry)} == {6}
    assert module.entry("predict").results[0].type.shape[0] == 6
    assert json.loads(module.meta["inputs"])["x"].startswith("float32[6,")
    x = data(6)[0]
    np.testing.assert_array_equal(module.predict(x), trained.predict(x))
    with pytest.raises(InvalidInput, match=r"float32\[6,4\] cannot have shape \(5, 4\)"):
        module.predict(x[:5])
    # The trainer itself takes batches of any size as before.
    assert trained.predict(data(7)[0]).shape == (7, 3)
    assert str(trained.export(("predict",)).inputs("predict")[0].type.shape[0]) == "N"


def test_an_onnx_file_of_a_fixed_batch_refuses_another(done, tmp_path):
    trained = done
    file = trained.export_onnx(tmp_path / "m.onnx", batch=6)
    assert file.inputs[0].shape == (6, 4)
    session = Session(file.path)
    assert session.run({"x": data(6)[0]})["logits"].shape == (6, 3)
    with pytest.raises(InvalidInput, match=r"float32\(6, 4\), got float32\(5, 4\)"):
        session.run({"x": data(5)[0]})


@pytest.mark.parametrize("batch", [0, -1, 2.5, True, "8"])
def test_a_batch_size_is_a_whole_number(done, batch):
    with pytest.raises(InvalidInput, match="batch must be a whole number"):
        done.export(("predict",), batch=batch)

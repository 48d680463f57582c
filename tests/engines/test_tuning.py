"""Tuning: the fastest form that was measured, remembered, and the same results."""

import json

import numpy as np
import pytest

from triplane.unified_ir import nn, ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine, tuning
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import TensorSpec

SIZES = {"N": 4}


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(2)])

    def construct(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return (x * x).mean()


@pytest.fixture(scope="module")
def step():
    net = Net()
    forward = trace(net, TensorSpec(("N", 3, 8, 8)))
    given = {k: p.array for k, p in net.parameters().items()}
    given["x"] = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
    return value_and_grad(forward, [n for n in forward.param_names if n != "x"]), given


def forms(function):
    return [n.attrs.get("form") for n in function.nodes if n.op.name == "ConvGradWeight"]


def test_equal_nodes_are_measured_once_and_remembered(step, tmp_path):
    cache = tmp_path / "deep" / "tuning.json"
    _, first = tuning.tuned(step[0], SIZES, cache=cache)
    assert (first.measured, first.remembered) == (1, 0)
    _, second = tuning.tuned(step[0], SIZES, cache=cache)
    assert (second.measured, second.remembered) == (0, 1)
    _, larger = tuning.tuned(step[0], {"N": 5}, cache=cache)
    assert larger.measured == 1
    ((machine, known),) = json.loads(cache.read_text()).items()
    assert "onnxruntime" in machine
    assert len(known) == 2


@pytest.mark.parametrize("form", ["columns", "transposed"])
def test_every_choice_computes_the_same(step, tmp_path, monkeypatch, form):
    function, given = step
    monkeypatch.setattr(tuning, "_fastest", lambda *_: form)
    made, report = tuning.tuned(function, SIZES, cache=tmp_path / "t.json")
    assert forms(made) == [form, form]
    assert report.changed == {form: 2}
    run = {name: engine(name) for name in ("onnx", "reference")}
    wanted = run["reference"].compile(function)(*(given[n] for n in function.param_names))
    for each in run.values():
        found = each.compile(made)(*(given[n] for n in made.param_names))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"m": 1}', "\x00" * 99, "[" * 10**5, '{"m": {"k": ["x"]}}']
)
def test_a_damaged_memory_is_begun_anew(step, tmp_path, text):
    cache = tmp_path / "t.json"
    cache.write_text(text)
    assert tuning.tuned(step[0], SIZES, cache=cache)[1].measured == 1
    assert tuning.tuned(step[0], SIZES, cache=cache)[1].remembered == 1


def test_a_form_that_does_not_serve_is_not_believed(step, tmp_path):
    cache = tmp_path / "t.json"
    tuning.tuned(step[0], SIZES, cache=cache)
    ((machine, known),) = json.loads(cache.read_text()).items()
    cache.write_text(json.dumps({machine: dict.fromkeys(known, "no such form")}))
    made, report = tuning.tuned(step[0], SIZES, cache=cache)
    assert report.measured == 1
    assert "no such form" not in forms(made)


def test_a_cache_that_cannot_be_written_stops_nothing(step, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert tuning.tuned(step[0], SIZES, cache=tmp_path / "file" / "t.json")[1].measured == 1


def test_the_cache_lies_where_the_system_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_path() == tmp_path / "triplane" / "tuning.json"

"""A recurrent network in int8 on a real server."""

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.quantize import nets

from triplane.edge.serving import probe
from triplane.edge.serving.bundles import open_bundle
from triplane.edge.serving.running import Direct
from triplane.edge.serving.servable import contract_of
from triplane.edge.serving.statistics import Statistics
from triplane.unified_ir import nn, zoo
from triplane.unified_ir.convert import convert
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.runtime import Bundle

pytestmark = pytest.mark.slow  # converting times both forms

RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 40, (32, 24))


class Sensor(nn.Cell):
    """The last state of an LSTM over measurements."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 64)
        self.head = nn.Dense(64, 4)

    def construct(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def converted(cell, spec, samples, folder):
    """The bundle in int8, which has the runtime's LSTM on integers."""
    path = folder / "net.bundle"
    module = nets.module_of(nets.shaken(cell), spec)
    report = convert(module, quantize="int8", calibration=samples, out=path)
    assert "DynamicQuantizeLSTM" in report.residency.integer
    return path


def test_a_character_lstm_in_int8_answers_over_the_wire(tmp_path, serve, connect):
    spec = TensorSpec(("N", 24), "int64")
    path = converted(zoo.CharLstm(40, hidden=64), spec, TEXT, tmp_path)
    client = connect(serve(open_bundle(path), plan=probe.plan))
    x = triton.InferInput("x", [2, 24], "INT64")
    x.set_data_from_numpy(TEXT[:2])
    got = client.infer("net", [x]).as_numpy("logits")
    np.testing.assert_array_equal(got, Bundle.load(path).predict(x=TEXT[:2])["logits"])


@pytest.mark.parametrize("kind", ["letters", "measurements"])
def test_calls_of_an_lstm_in_int8_are_never_merged(kind, tmp_path):
    """One caller's rows would set the range by which another's are rounded."""
    if kind == "letters":
        path = converted(zoo.CharLstm(40), TensorSpec(("N", 24), "int64"), TEXT, tmp_path)
    else:
        samples = RNG.standard_normal((32, 24, 16)).astype(np.float32)
        path = converted(Sensor(), TensorSpec(("N", 24, 16)), samples, tmp_path)
    made = open_bundle(path)
    contract = contract_of(made)
    assert contract.mergeable
    assert not probe._rows_are_independent(made, probe.sample(contract, probe.SIZES[-1]))
    assert isinstance(probe.plan(made, contract, Statistics()), Direct)

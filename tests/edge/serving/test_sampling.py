"""A model that draws random numbers on a real server: each caller gives its key."""

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from triplane.edge.serving import probe
from triplane.edge.serving.bundles import open_bundle
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.convert import convert
from triplane.unified_ir.runtime import Bundle

pytestmark = pytest.mark.slow  # converting times the model

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


class Noise(nn.Cell):
    key: Any

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(np.ones(4, np.float32))
        self.key = nn.RandomKey(np.array([1, 2], np.uint32))

    def construct(self, x):
        y = x + self.scale * ops.random_normal(self.key, x.shape)
        self.key = ops.next_key(self.key)
        return y


def test_a_server_draws_by_the_key_of_each_call(tmp_path, serve, connect):
    path = tmp_path / "noise.bundle"
    trainer = train.Trainer(Noise(), loss=nn.MSE(), optimizer=optim.SGD(0.1), metrics={})
    trainer.prepare(X, X)
    convert(trainer.export(("predict",), key_input="seed"), out=path)
    client = connect(serve(open_bundle(path), plan=probe.plan))

    def answer(number):
        x = triton.InferInput("x", list(X.shape), "FP32")
        x.set_data_from_numpy(X)
        seed = triton.InferInput("seed", [2], "UINT32")
        seed.set_data_from_numpy(np.array([0, number], np.uint32))
        return client.infer("noise", [x, seed]).as_numpy("y")

    np.testing.assert_array_equal(answer(7), answer(7))
    assert (answer(7) != answer(8)).all()
    expected = Bundle.load(path).predict(x=X, seed=np.array([0, 7], np.uint32))["y"]
    np.testing.assert_array_equal(answer(7), expected)

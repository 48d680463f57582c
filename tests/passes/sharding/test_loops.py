"""Factors of scans: those that every step of the region can keep apart."""

import numpy as np
import pytest

from triplane.unified_ir import nn, ops
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.sharding import plan
from triplane.unified_ir.passes.sharding.loops import scan_factors


def scanned(step, carry=(4, 3), xs=(5, 4, 3)):
    """A function of one scan, and that node."""
    build = Build(TABLE, "scanned")
    with build:
        h, x = build.param("h", TensorSpec(carry)), build.param("x", TensorSpec(xs))
        last, ys = ops.scan(step, h, x)
    function = build.finish({"last": last, "ys": ys})
    return function, next(n for n in function.nodes if n.op.name == "Scan")


def shape(value):
    return () if value is None else value.type.shape


def weight(n=3):
    return np.linspace(-1, 1, n * n, dtype=np.float32).reshape(n, n)


def recurrent(h, x):
    h = ops.tanh(h @ weight() + x)
    return h, h * 2.0


def test_a_recurrence_is_cut_by_samples_and_not_by_features():
    function, node = scanned(recurrent)
    factors = scan_factors(node, shape)
    n = factors.operands[0][0]
    assert n
    assert factors.operands[:2] == ((n, ""), ("", n, ""))
    assert factors.outputs == ((n, ""), ("", n, ""))
    assert factors.flops == 5 * 2 * 4 * 3 * 3
    rng = np.random.default_rng(0)
    h, x = (rng.normal(size=s).astype(np.float32) for s in ((4, 3), (5, 4, 3)))
    whole = ReferenceEngine().compile(function)(h, x)
    half, _ = scanned(recurrent, (2, 3), (5, 2, 3))
    parts = [ReferenceEngine().compile(half)(h[i : i + 2], x[:, i : i + 2]) for i in (0, 2)]
    for k, (y, axis) in enumerate(zip(whole, (0, 1), strict=True)):
        result = np.concatenate([p[k] for p in parts], axis)
        np.testing.assert_allclose(result, y, rtol=1e-6)


def test_elementwise_steps_are_cut_by_every_axis_but_that_of_the_steps():
    _, node = scanned(lambda h, x: (h + x, ops.relu(h)))
    factors = scan_factors(node, shape)
    a, b = factors.operands[0]
    assert len({a, b, ""}) == 3
    assert factors.operands[1] == ("", a, b)


@pytest.mark.parametrize(
    "step",
    [
        lambda h, x: (h + x, (h + x).sum(0)),
        lambda h, x: (ops.softmax(h + x, axis=0), x),
    ],
)
def test_what_a_step_combines_stays_whole(step):
    _, node = scanned(step)
    assert scan_factors(node, shape).operands[0][0] == ""


def test_axes_that_exchange_roles_are_one_factor_and_cannot_be_cut():
    # The carry is transposed in every step, so both of its axes are one index.
    _, node = scanned(lambda h, x: (h.transpose(1, 0), x), (3, 3), (5, 3, 3))
    assert scan_factors(node, shape).operands[0] == ("", "")


def test_an_lstm_is_data_parallel():
    from triplane.unified_ir.train import step

    lstm = nn.LSTM(64, 512)
    function = step.predict(lstm, [TensorSpec(("N", 16, 64))], "y")
    made = plan(function, 4, sizes={"N": 4096})
    index = next(i for i, n in enumerate(function.nodes) if n.op.name == "LSTM")
    assert made.strategies()[index][0] == (1, 4, 1)

"""Where a call's time goes: by the user's nodes and lines, inside loops too."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, graph, ops, trace
from triplane.unified_ir.engines import profile
from triplane.unified_ir.engines.profile import _self_times, profiled, sample_inputs

F32 = np.float32


def product(x, w):
    y = ops.relu(x)
    for _ in range(3):
        y = y @ w
    return y.sum()


def looped(x, w):
    for v in x:
        w = w @ w * 0.01 + v.sum()
    return w


def test_the_line_of_the_expensive_product_leads():
    function = trace(product, TensorSpec((256, 256)), TensorSpec((256, 256)))
    args = sample_inputs({p.name: p.type for p in function.params}, {}, default=1)
    found = profiled(function, args, calls=5)
    line = product.__code__.co_firstlineno + 3
    assert found.lines[0].what.endswith(f"test_profile.py:{line}")
    assert found.lines[0].share > 0.5
    assert found.nodes[0].op == "MatMul"
    assert sum(n.runs for n in found.nodes if n.op == "MatMul") == 3
    assert found.total_ms > 0
    for table in (found.nodes, found.ops, found.lines):
        assert sum(s.share for s in table) == pytest.approx(1)
        assert sum(s.ms for s in table) == pytest.approx(found.total_ms)
        assert [s.share for s in table] == sorted((s.share for s in table), reverse=True)


def test_time_inside_a_loop_counts_for_the_nodes_inside(monkeypatch):
    """By the events of the one profile, so that how fast the machine is does not matter."""
    seen = []

    def self_times(events):
        times = _self_times(events)
        seen.append((events, times))
        return times

    monkeypatch.setattr(profile, "_self_times", self_times)
    function = trace(graph(looped), TensorSpec(("T", 4)), TensorSpec((96, 96)))
    args = sample_inputs({p.name: p.type for p in function.params}, {"T": 6}, default=1)
    assert args["x"].shape == (6, 4)
    found = profiled(function, args, calls=5)
    (matmul,) = [n for n in found.nodes if n.op == "MatMul"]
    assert (matmul.runs, matmul.line) == (6, matmul.line)
    assert matmul.line.endswith(f":{looped.__code__.co_firstlineno + 2}")
    ((events, times),) = seen
    kernels = [e for e in events if e["name"].endswith("_kernel_time")]
    loops = [e for e in kernels if e["args"]["op_name"].endswith("Scan")]
    inside = [e for e in kernels if e not in loops and any(is_within(e, loop) for loop in loops)]
    assert len(loops) == 5
    products = [e for e in inside if "MatMul" in e["args"]["op_name"]]  # or one fused with a scale
    assert len(products) == 6 * 5
    own_us = sum(us for _, kind, us in times if kind.endswith("Scan"))
    inside_us = sum(e["dur"] for e in inside)
    rest_us = sum(e["dur"] for e in loops) - inside_us
    assert own_us == pytest.approx(rest_us, abs=len(inside))  # a microsecond of rounding each
    assert inside_us > 0
    assert sum(us for _, kind, us in times if "MatMul" in kind) == sum(e["dur"] for e in products)


def is_within(event, loop):
    """Whether a kernel ran inside of another's time."""
    return loop["ts"] <= event["ts"] and event["ts"] + event["dur"] <= loop["ts"] + loop["dur"]


def test_state_stays_in_the_session():
    function = trace(lambda w, x: {"w": w + x, "y": (w * x).sum()},
                     TensorSpec((64,)), TensorSpec((64,)))  # fmt: skip
    args = {"w": np.ones(64, F32), "x": np.ones(64, F32)}
    found = profiled(function, args, state=["w"], calls=2)
    assert {n.op for n in found.nodes} >= {"Add", "Mul"}


def test_no_calls_are_refused():
    function = trace(lambda x: x + 1.0, TensorSpec((2,)))
    with pytest.raises(InvalidInput, match="at least one call"):
        profiled(function, {"x": np.ones(2, F32)}, calls=0)

"""PyTorch as second opinion: golden values and gradients of first and second order."""

import numpy as np
import pytest
from tests.conformance.checks import agree
from tests.conformance.pytorch_cases import OURS
from tests.conformance.rows import FLAT, INTEGERS, NO_GRADIENT, SLOPED
from tests.conformance.uses import naming
from tests.support.golden_files import PEER, ROOT, check_generator, needs_peers, parts_of

from triplane.unified_ir.autodiff import value_and_grad, vjp
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE

GOLDEN = ROOT / "tests" / "golden" / "ops"
EXACT = {"rtol": 1e-10, "atol": 1e-12}
SINGLE = {"rtol": 5e-5, "atol": 5e-5}
THROUGH_FLOAT32 = {"rtol": 1e-6, "atol": 1e-6}

# slopes or defaults that are float32 numbers
ROUNDED = {"cast", "hard_sigmoid", "hard_sigmoid_at_its_bounds", "selu", "selu_at_0"}
CONTROL = {
    "triplane.Barrier",
    "triplane.Checkpoint",
    "triplane.Cond",
    "triplane.Custom",
    "triplane.CustomGradient",
    "triplane.Loop",
    "triplane.Scan",
    "triplane.Sized",
}


def held(name, dtype=np.float64):
    """A golden file by part: {"x": {...}, "y": {...}, ...}; floating-point arrays in `dtype`."""
    return parts_of(GOLDEN / f"{name}.npz", dtype)


def recorded(name, parts):
    build = Build(TABLE, name)
    with build:
        params = [build.param(k, type_of(x)) for k, x in parts["x"].items()]
        made = OURS[name](*params)
        ys = made if isinstance(made, (tuple, list)) else [made]
    return build.finish({f"y.{i}": y for i, y in enumerate(ys)})


def with_gradients(function, parts):
    """Results, then the gradients of sum(v y) the golden file holds."""
    pulled = vjp(function, list(parts["g"]))
    build = Build(TABLE, f"{function.name}.g")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        cotangents = [parts["v"][r.removeprefix("y.")] for r in function.result_names]
        made = inline(pulled, [*params, *(build.constant(v) for v in cotangents)])
    return build.finish(dict(zip(pulled.result_names, made, strict=True)))


def with_second_order(first, parts):
    """The gradients of sum(u g)."""
    build = Build(TABLE, f"{first.name}.h")
    with build:
        params = [build.param(p.name, p.type) for p in first.params]
        found = dict(zip(first.result_names, inline(first, params), strict=True))
        terms = [(found[f"grad.{k}"] * u).sum() for k, u in parts["u"].items()]
        total = sum(terms[1:], terms[0])
    return value_and_grad(build.finish({"total": total}), list(parts["h"]))


def compare(name, engine_name, dtype, close):
    parts = held(name, dtype)
    args = list(parts["x"].values())
    with naming(f"PyTorch's {name} on {engine_name}"):
        first = with_gradients(recorded(name, parts), parts)
        found = engine(engine_name).compile(first)(*args)
        agree(found, [*parts["y"].values(), *parts["g"].values()], name, close=close)
        if parts["h"]:
            second = with_second_order(first, parts)
            _, *higher = engine(engine_name).compile(second)(*args)
            agree(higher, parts["h"].values(), f"second order of {name}", close=close)


@pytest.mark.parametrize("name", sorted(OURS))
def test_reference_equals_pytorch_in_float64(name):
    close = THROUGH_FLOAT32 if name in ROUNDED else EXACT
    compare(name, "reference", np.float64, close)


@pytest.mark.parametrize(
    "name",
    [
        name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.long)
        for number, name in enumerate(sorted(OURS.keys() - {"cast"}))
    ],
)
def test_onnx_equals_pytorch_in_float32(name):
    compare(name, "onnx", np.float32, SINGLE)


def test_every_golden_file_has_its_counterpart():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == OURS.keys()


@pytest.mark.slow
def test_every_differentiable_row_is_held_to_pytorch():
    used = set()
    for name in OURS:
        function = recorded(name, held(name))
        used |= {str(TABLE[n.op.domain, n.op.name]) for n in function.nodes}
    missing = {str(r) for r in TABLE.values()} - used - NO_GRADIENT - INTEGERS - CONTROL - SLOPED
    assert used >= FLAT
    if not PEER.exists():  # where a golden file cannot be made, a body stands on its rows' files
        missing -= {str(r) for r in TABLE.values() if r.body and not r.vjp}
        if missing:
            pytest.skip(f"no golden file of {', '.join(sorted(missing))}, nor PyTorch to make one")
    assert not missing


@pytest.mark.deep
@needs_peers
def test_the_generator_reproduces_the_golden_files(tmp_path):
    check_generator("ops", GOLDEN, tmp_path)

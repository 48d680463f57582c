"""A small bundle and a small plan, as values and as files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.runtime.graphs import classifier, product, sgd_step, squared_error

from triplane.unified_ir.runtime import (
    BundleSpec,
    Constraints,
    Description,
    Limits,
    PlanSpec,
    Preprocessing,
    TensorInfo,
    Tolerance,
    write_bundle,
    write_plan,
)

WEIGHTS = {
    "w": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
    "b": np.array([0.5, -0.5], np.float32),
}
X = np.array([[1, 0, 0], [0, 1, 1]], np.float32)
Y = X @ WEIGHTS["w"] + WEIGHTS["b"]


def bundle_spec(**changes) -> BundleSpec:
    description = Description(
        name="digits",
        version="1.0",
        target="ort-x64",
        inputs=(TensorInfo("x", "float32", ("N", 3)),),
        outputs=(TensorInfo("y", "float32", ("N", 2)),),
        labels={"y": ("cat", "dog")},
        preprocessing=(Preprocessing("x", "scale", (("factor", (0.0625,)),)),),
        constraints=Constraints(min_version="1.20", opset=21, instructions=("avx2",)),
        tolerance=Tolerance(absolute=1e-5, relative=1e-4),
        model_digest="cd" * 32,
    )
    spec = BundleSpec(
        description=description,
        model=classifier(WEIGHTS),
        weights=WEIGHTS,
        golden_inputs={"x": X},
        golden_outputs={"y": Y},
        report={"latency_ms": 0.25, "nodes": ["MatMul"]},
    )
    return replace(spec, **changes)


def make_bundle(path: Path, **changes) -> str:
    return write_bundle(path, bundle_spec(**changes))


def plan_spec(**changes) -> PlanSpec:
    spec = PlanSpec(
        entries={
            "local_update": sgd_step(),
            "evaluate": squared_error(),
            "predict": product(),
        },
        state={"w": np.zeros((2, 1), np.float32), "seen": np.array([3], np.int64)},
        roles={"w": "parameter", "seen": "personal"},
        steps={"local_update": 5},
        limits=Limits(),
        labels=("value",),
        parent="ef" * 32,
    )
    return replace(spec, **changes)


def make_plan(path: Path, **changes) -> str:
    return write_plan(path, plan_spec(**changes))


def samples(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows of y = x0 - 2 x1."""
    x = np.random.default_rng(seed).normal(size=(rows, 2)).astype(np.float32)
    return {"x": x, "y": x @ np.array([[1], [-2]], np.float32)}

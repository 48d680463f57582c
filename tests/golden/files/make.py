"""Writes one file of each kind in format version 1; `python -m tests.golden.files.make` renews v1.

The graphs are inputs, kept beside the results, so that the bytes depend on our code alone. A change
of the format is a new folder with a new version: v1 stays readable for ever.
"""

from pathlib import Path

import numpy as np

from triplane.unified_ir.files import container
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.runtime import (
    BundleSpec,
    Constraints,
    Description,
    Limits,
    Plan,
    PlanSpec,
    Preprocessing,
    TensorInfo,
    Tolerance,
    write_bundle,
    write_plan,
)

V1 = Path(__file__).parent / "v1"
PARENT = "1f" * 32
WEIGHTS = {
    "w": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
    "b": np.array([0.5, -0.5], np.float32),
}
X = np.array([[1, 0, 0], [0, 1, 1]], np.float32)
Y = np.array([[1.5, 1.5], [8.5, 9.5]], np.float32)
STEP = {
    "x": np.array([[1, 0], [0, 1], [1, 1]], np.float32),
    "y": np.array([[1], [-2], [-1]], np.float32),
}


def every_dtype() -> dict[str, np.ndarray | StoredTensor]:
    """Return one tensor of each dtype that a file holds, of rank 0 to 3, one of them empty."""
    bits = np.array([0, 1, 127, 200], np.uint8)
    return {
        "bool": np.array([True, False]),
        "int8": np.array([-128, 127], np.int8),
        "int16": np.array([[-5], [5]], np.int16),
        "int32": np.array(-(2**31), np.int32),
        "int64": np.array([2**62], np.int64),
        "uint8": np.zeros((0, 3), np.uint8),
        "uint16": np.array([65535], np.uint16),
        "uint32": np.array([2**32 - 1], np.uint32),
        "uint64": np.array([2**64 - 1], np.uint64),
        "float16": np.array([[[0.5, -2.0]]], np.float16),
        "float32": np.array([1e-45, np.inf], np.float32),
        "float64": np.array([np.pi]),
        "bfloat16": StoredTensor("bfloat16", np.array([0x3F80, 0xC000], np.uint16)),
        "float8_e4m3fn": StoredTensor("float8_e4m3fn", bits),
        "float8_e5m2": StoredTensor("float8_e5m2", bits.reshape(2, 2)),
    }


def make(folder: Path, graphs: Path = V1) -> dict[str, str]:
    """Write every golden file into `folder` and return its root digest by name."""
    digests = {"model.tpm": _model(folder / "model.tpm")}
    digests["digits.bundle"] = _bundle(folder / "digits.bundle", graphs)
    digests["digits.plan"] = _plan(folder / "digits.plan", graphs)
    digests["state.checkpoint"] = _state(folder / "state.checkpoint", folder / "digits.plan")
    return digests


def _model(path: Path) -> str:
    roles = {"float32": "parameter", "float64": "personal", "int64": "buffer"}
    parts = [
        container.part("module.pb", bytes(range(256))),
        container.tensor_part("weights.safetensors", every_dtype(), roles),
        container.part("empty", b""),
    ]
    properties = {"made_by": "golden", "größe": "1"}
    return container.write(path, "model", parts, properties=properties, parent=PARENT)


def _bundle(path: Path, graphs: Path) -> str:
    description = Description(
        name="digits",
        version="1.0",
        target="ort-x64",
        inputs=(TensorInfo("x", "float32", ("N", 3)),),
        outputs=(TensorInfo("y", "float32", ("N", 2)),),
        labels={"y": ("cat", "dog")},
        preprocessing=(Preprocessing("x", "scale", (("factor", (0.0625,)),)),),
        constraints=Constraints(
            min_version="1.20",
            opset=21,
            instructions=("avx2",),
            memory_bytes=1 << 20,
            latency_s=0.5,
        ),
        tolerance=Tolerance(absolute=1e-6, relative=1e-5),
        model_digest=PARENT,
    )
    return write_bundle(
        path,
        BundleSpec(
            description=description,
            model=(graphs / "classifier.onnx").read_bytes(),
            weights=WEIGHTS,
            golden_inputs={"x": X},
            golden_outputs={"y": Y},
            report={"latency_ms": 0.25},
            adapt=(graphs / "sgd_step.onnx").read_bytes(),
        ),
    )


def _plan(path: Path, graphs: Path) -> str:
    entries = {"local_update": "sgd_step", "evaluate": "squared_error", "predict": "product"}
    return write_plan(
        path,
        PlanSpec(
            entries={name: (graphs / f"{g}.onnx").read_bytes() for name, g in entries.items()},
            state={"w": np.zeros((2, 1), np.float32), "seen": np.array([3], np.int64)},
            roles={"w": "parameter", "seen": "personal"},
            steps={"local_update": 5},
            limits=Limits(max_steps=100, memory_bytes=1 << 20, time_s=60.0),
            labels=("value",),
            parent=PARENT,
        ),
    )


def _state(path: Path, plan: Path) -> str:
    ready = Plan.load(plan)
    ready.assign({"w": np.array([[1], [-2]], np.float32)})
    return ready.save_state(path)


if __name__ == "__main__":
    for name, digest in make(V1).items():
        print(digest, name)  # noqa: T201 - a script

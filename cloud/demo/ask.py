"""Call the served model with the unmodified tritonclient, one digit a call."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.unified_ir.cli.shell import require
from triplane.unified_ir.ir.graph import Array


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Measurements of a client: accuracy, median and 99th percentile of a call in ms."""

    calls: int
    accuracy: float
    median_ms: float
    p99_ms: float


def ask(address: str, model: str, x: Array, y: Array) -> CallStatistics:
    """Make one call per sample; x: (N, C, H, W), y: (N,)."""
    client_module: Any = require("tritonclient.grpc", extra="dev")
    client = client_module.InferenceServerClient(url=address)
    try:
        metadata = client.get_model_metadata(model)
        name, result = metadata.inputs[0].name, metadata.outputs[0].name
        right, times_ms = 0, []
        for sample, label in zip(x, y, strict=True):
            tensor = client_module.InferInput(name, [1, *sample.shape], "FP32")
            tensor.set_data_from_numpy(sample[None])
            # The tensor is made outside the measured time, which is that of the call alone.
            start = time.perf_counter()
            answer = client.infer(model, [tensor]).as_numpy(result)
            times_ms.append((time.perf_counter() - start) * 1e3)
            right += int(answer.argmax() == label)
    finally:
        client.close()
    median, p99 = np.percentile(times_ms, [50, 99])
    return CallStatistics(len(x), right / len(x), float(median), float(p99))

"""A fine-tuning process: numpy, onnxruntime and our `runtime`, nothing else. Given a plan."""

import sys
import time

BORN = float(sys.argv[2])

import json  # noqa: E402 - the clock starts before the first import
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from triplane.unified_ir.runtime import Plan  # noqa: E402

Plan.load  # noqa: B018 - resolves the lazy import
imported = time.monotonic() - BORN, time.process_time()


def resident() -> int:
    """Resident bytes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


plan = Plan.load(Path(sys.argv[1]))
with np.load(Path(sys.argv[1]).with_suffix(".npz")) as held:
    batches = [{"x": x, "y": y} for x, y in zip(held["x"], held["y"], strict=True)]
names = [tensor.name for tensor in plan.inputs("local_update")]
first = plan.adapt([dict(zip(names, batches[0].values(), strict=True))], steps=1)
stepped = time.monotonic() - BORN, time.process_time()
losses = plan.adapt([dict(zip(names, b.values(), strict=True)) for b in batches[1:]])
done = time.monotonic() - BORN, time.process_time()
heavy = sorted({"onnx", "click", "rich", "grpc", "torch"} & sys.modules.keys())
print(
    json.dumps(
        {"import": imported, "first": stepped, "all": done, "resident": resident(),
         "losses": [*first, *losses], "heavy": heavy}
    )
)  # fmt: skip

"""Fine-tunes a plan on a device: onnxruntime, numpy, protobuf and the runtime, nothing else.

Run as a script: fine_tune.py PLAN SAMPLES.npz STEPS BATCH. The samples hold `x`, `y` to learn from
and `x_test`, `y_test` to judge by. Prints one JSON line.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np

from triplane.unified_ir.runtime.plan import Plan

FOREIGN = ("onnx", "grpc", "click", "rich", "jax", "torch")


def main(plan_file: str, samples_file: str, steps: str, batch: str) -> None:
    """Print the accuracy before and after `steps` SGD steps."""
    plan = Plan.load(Path(plan_file))
    with np.load(samples_file, allow_pickle=False) as samples:
        x, y, x_test, y_test = (samples[k] for k in ("x", "y", "x_test", "y_test"))
    before = accuracy(plan, x_test, y_test)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(int(steps)):
        chosen = rng.permutation(len(x))[: int(batch)]
        losses.append(float(plan.run("local_update", x=x[chosen], y=y[chosen])["loss"]))
    sys.stdout.write(
        json.dumps(
            {
                "before": before,
                "after": accuracy(plan, x_test, y_test),
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                # Proof that the process needed none of the packages that a device lacks.
                "foreign": [name for name in FOREIGN if name in sys.modules],
            }
        )
    )


def accuracy(plan: Plan, x: np.ndarray, y: np.ndarray) -> float:
    """Return the share of samples whose largest logit is the label's."""
    logits = next(iter(plan.predict(x=x).values()))
    return float((logits.argmax(1) == y).mean())


if __name__ == "__main__":
    main(*sys.argv[1:])

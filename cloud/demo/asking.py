"""Twelve devices with one question each, and how well a model answers it when adapted."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from triplane.unified_ir.data.dataset import Dataset
from triplane.unified_ir.federated.algorithms import Hyper, plan_of
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.learn import Shard, Work, evaluate
from triplane.unified_ir.federated.study import DeviceScore, evenly
from triplane.unified_ir.ir import Module
from triplane.unified_ir.runtime import Plan, SessionOptions

DEVICES: Final = 12
LEARNING: Final = 6
INNER_STEPS: Final = 3
SUPPORT: Final = 40
RATES: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Rates tried for adapting FedAvg's model, which was not trained for any."""
LEAST_SAMPLES: Final = 30 * DEVICES


def shards_of(data: Dataset, seed: int = 0) -> dict[str, Shard]:
    """Return each device's part of the data; y says whether a digit is one of its classes."""
    samples: dict[str, Array] = {"x": np.asarray(data.x), "y": np.asarray(data.y)}
    shards = evenly(samples, DEVICES, held_out=0.4, seed=seed)
    return {
        name: _with_question(shard, name, len(data.labels), seed) for name, shard in shards.items()
    }


def _with_question(shard: Shard, device: str, classes: int, seed: int) -> Shard:
    own = Draws(seed, 0, device, "question").permutation(classes)[: max(1, classes // 2)]
    parts = (
        {"x": part["x"], "y": np.isin(part["y"], own).astype(np.int64)}
        for part in (shard.train, shard.held_out)
    )
    return Shard(*parts)


def save(path: Path, shard: Shard) -> Path:
    """Save the samples that a device or node learns from, without those that test it."""
    np.savez(path, x=shard.train["x"], y=shard.train["y"])
    return path


def save_episodes(path: Path, shards: Mapping[str, Shard]) -> Path:
    """Save signed samples: per question a support set to adapt to and a query set to answer."""
    arrays: dict[str, list[Array]] = {}
    for name, shard in shards.items():
        order = Draws(0, 0, name, "episode").permutation(shard.examples)
        size = shard.examples // 2
        for what, rows in (("support", order[:size]), ("query", order[size : 2 * size])):
            for key in ("x", "y"):
                arrays.setdefault(f"{what}.{key}", []).append(shard.train[key][rows])
    # Episodes are stacked in one array, so all have the size of the smallest one.
    least = min(len(part) for part in arrays["query.y"])
    stacked = {name: np.stack([part[:least] for part in parts]) for name, parts in arrays.items()}
    np.savez(path, allow_pickle=False, **stacked)
    return path


def answered(
    module: Module, algorithm: str, rate: float, shards: Mapping[str, Shard], round_: int
) -> tuple[DeviceScore, ...]:
    """Let every device adapt the model to its support set, then answer samples it has not seen."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asked.plan"
        hyper = Hyper(lr=rate, meta_lr=rate, inner_steps=INNER_STEPS)
        plan_of(module, algorithm, hyper, path)
        plan = Plan.load(path, options=SessionOptions(threads=1))
    work = Work(
        run="demo", round=round_, device="", seed=0, steps=1, batch_size=1,
        support=SUPPORT, query=SUPPORT,
    )  # fmt: skip
    scores = []
    for i, (name, shard) in enumerate(sorted(shards.items())):
        score = evaluate(plan, replace(work, device=name), shard, steps=INNER_STEPS)
        scores.append(
            DeviceScore(name, i < LEARNING, round_, score.samples, score.before, score.after)
        )
    return tuple(scores)

"""Exact MAML against FedAvg where no single model serves all devices, by the example itself."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from triplane.unified_ir.federated.study import summary

from .given import there

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "federated_digits.py"
MARGINS = {True: 8.0, False: 4.0}  # points, on training and on unseen devices


@pytest.fixture(scope="module")
def example():
    spec = there(importlib.util.spec_from_file_location("federated_digits", EXAMPLE))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_adaptation_never_sees_what_it_is_scored_on(example):
    for seed in example.SEEDS:
        seen: set[bytes] = set()
        for name, shard in example.shards(seed).items():
            train, held = (
                {x.tobytes() for x in part["x"]} for part in (shard.train, shard.held_out)
            )
            assert shard.examples + shard.held_out_samples in {149, 150}
            assert len(example.question(name, seed)) == 5
            assert not held & train
            assert not seen & (held | train)
            seen |= held | train


def test_questions_differ(example):
    asked = {tuple(example.question(f"device-{k:02}", 0)) for k in range(12)}
    assert len(asked) >= 11


def test_both_algorithms_spend_the_same(example):
    a, b = example.FEDAVG, example.MAML
    for field in ("rounds", "steps", "devices", "support", "compression", "seed"):
        assert getattr(a, field) == getattr(b, field)
    assert a.hyper.inner_steps == b.hyper.inner_steps == 3
    assert len(a.rates) == 6


@pytest.mark.slow
def test_maml_with_adaptation_beats_fedavg_with_adaptation(example, capsys):
    studies = {s.algorithm: s for s in (example.FEDAVG, example.MAML)}
    trials = {k: [example.trial(s, seed) for seed in example.SEEDS] for k, s in studies.items()}
    assert len({made.bytes_up for every in trials.values() for made in every}) == 1
    for seen, margin in MARGINS.items():
        mean = {
            k: 100 * float(np.mean([there(summary(t.final(seen=seen))).after for t in every]))
            for k, every in trials.items()
        }
        assert mean["maml"] - mean["fedavg"] >= margin, mean

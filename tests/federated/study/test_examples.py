"""Exact MAML against FedAvg where no single model serves all devices, by the example itself."""

import importlib.util
from pathlib import Path

import pytest

from .given import there

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "federated_digits.py"
MARGINS = {"training": 8.0, "unseen": 4.0}  # points


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
    example.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    adapted = {(row[0], row[1]): float(row[3]) for row in rows}
    assert len({row[5] for row in rows}) == 1  # bytes
    for group, margin in MARGINS.items():
        assert adapted[group, "maml"] - adapted[group, "fedavg"] >= margin, adapted

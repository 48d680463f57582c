"""MNIST by writer, where the data is at hand."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from triplane.unified_ir.federated.algorithms import ALGORITHMS
from triplane.unified_ir.federated.study import simulate
from triplane.unified_ir.federated.study.source import devices_of

from .given import there

EXAMPLE = Path(__file__).parents[3] / "examples" / "federated_writers.py"
DATA = Path(os.environ.get("TRIPLANE_DATA", "")) / "mnist_by_writer.npz"
MAX_PARAMETERS = 250_000


def example():
    spec = there(importlib.util.spec_from_file_location("federated_writers", EXAMPLE))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_algorithms_are_compared_at_settings_that_were_tried_and_equal_cost():
    found = example()
    assert found.STUDIES.keys() == found.TRIED.keys() <= ALGORITHMS.keys()
    for name, study in found.STUDIES.items():
        assert study.hyper in found.TRIED[name]
        assert len(found.TRIED[name]) >= 4
        assert bool(study.rates) == (not ALGORITHMS[name].episodes)
        for field in ("rounds", "devices", "steps", "support", "query", "compression", "seed"):
            assert getattr(study, field) == getattr(found.BASE, field)
        assert study.batch_size == study.support + study.query


@pytest.mark.deep
@pytest.mark.skipif(not DATA.is_file(), reason="TRIPLANE_DATA holds no mnist_by_writer.npz")
def test_writers_are_devices_and_every_algorithm_of_the_example_begins():
    found = example()
    module = found.model()
    assert sum(tensor.array.size for tensor in module.state.values()) <= MAX_PARAMETERS
    seen, unseen = devices_of(found.source(DATA), module)
    assert (len(seen), len(unseen)) == (539, 295)
    assert not seen.keys() & unseen.keys()
    few = dict(list(seen.items())[:2])
    for study in found.STUDIES.values():
        made = simulate(module, few, replace(study, rounds=1, devices=2, steps=1, rates=()))
        assert made.rounds[0].loss == pytest.approx(2.3, abs=0.1)

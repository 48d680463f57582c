"""MNIST by writer, where the data is at hand."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from triplane.unified_ir.federated.study import simulate
from triplane.unified_ir.federated.study.source import devices_of

from .given import there

EXAMPLE = Path(__file__).parents[3] / "examples" / "federated_writers.py"
DATA = Path(os.environ.get("TRIPLANE_DATA", "")) / "mnist_by_writer.npz"
MAX_PARAMETERS = 250_000


@pytest.mark.deep
@pytest.mark.skipif(not DATA.is_file(), reason="TRIPLANE_DATA holds no mnist_by_writer.npz")
def test_writers_are_devices_and_every_algorithm_of_the_example_begins():
    spec = there(importlib.util.spec_from_file_location("federated_writers", EXAMPLE))
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    module = example.model()
    assert sum(tensor.array.size for tensor in module.state.values()) <= MAX_PARAMETERS
    seen, unseen = devices_of(example.source(DATA), module)
    assert (len(seen), len(unseen)) == (539, 295)
    assert not seen.keys() & unseen.keys()
    few = dict(list(seen.items())[:2])
    for study in example.STUDIES.values():
        made = simulate(module, few, replace(study, rounds=1, devices=2, steps=1, rates=()))
        assert made.rounds[0].loss == pytest.approx(2.3, abs=0.1)

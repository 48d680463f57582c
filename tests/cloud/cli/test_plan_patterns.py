"""The patterns that `triplane cloud policy set-plans` takes from a model file."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triplane.cloud.cli import plan_policies
from triplane.cloud.cli.plan_policies import _parameters
from triplane.cloud.trust.repository import Submitted
from triplane.proto.errors import InvalidInput
from triplane.proto.plan_statement import Least, PlanPolicy, PlanRule


def remote(monkeypatch, names):
    tensors = [SimpleNamespace(name=name, role="parameter") for name in names]
    model = SimpleNamespace(manifest=SimpleNamespace(tensors=tensors))
    monkeypatch.setattr(plan_policies, "Container", lambda *_, **__: model)
    version = SimpleNamespace(blob=b"", size=1)
    return SimpleNamespace(version=lambda _: version, blob=lambda *_: Path("m.tpm"))


def test_the_parameters_of_a_model_may_leave(monkeypatch):
    names, _ = _parameters(remote(monkeypatch, ["0.weight"]), "m@1")
    assert names[0] == "0.weight"


@pytest.mark.parametrize("name", ["*", "s*"])
def test_a_name_in_a_model_is_no_pattern_that_matches_other_tensors(monkeypatch, name):
    with pytest.raises(InvalidInput, match=r"--tensors PATTERN"):
        _parameters(remote(monkeypatch, ["0.weight", name]), "m@1")


def test_a_new_rule_shows_the_bounds_of_the_one_that_it_replaces(monkeypatch):
    """Options that are left out have their defaults again, not what the old rule had."""
    old = PlanPolicy({"m": PlanRule(("fedavg",), ("w",), Least(10, 32, 2))})
    signed = SimpleNamespace(submitted=Submitted(True, 1, 1, 3))
    monkeypatch.setattr(
        plan_policies, "change_plan_policy", lambda _, change, __: (change(old), signed)
    )
    monkeypatch.setattr(plan_policies, "remote_at", contextlib.nullcontext)
    least: Any = {"least_devices": 2, "least_batch": 2, "least_steps": 1}
    cloud: Any = None
    record, text = plan_policies.allow_plans(
        cloud, model="m", algorithms=(), tensors=("w",), masked=0.1, roster=True, keys=Path(),
        **least,
    )  # fmt: skip
    assert "masked against a share of 0.1 colluding devices" in text
    assert "a probability of 1e-06, with a signed roster" in text
    assert json.loads(record["plans"]["m"]["masking"]) == {
        "colluding_share": 0.1, "failure": 1e-6, "roster": 1
    }  # fmt: skip
    assert "algorithms *, at least 2 devices, 2 samples in a step, 1 steps" in text
    assert "before: algorithms fedavg, at least 10 devices, 32 samples in a step, 2 steps" in text

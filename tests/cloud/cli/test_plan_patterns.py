"""The patterns that `triplane cloud policy set-plans` takes from a model file."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from triplane.cloud.cli import plan_policies
from triplane.cloud.cli.plan_policies import _parameters
from triplane.proto.errors import InvalidInput


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

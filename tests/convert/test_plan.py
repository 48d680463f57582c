"""Plans from modules."""

from dataclasses import replace

import numpy as np
import pytest
from tests.convert.modules import module

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert import export_plan
from triplane.unified_ir.ir import Module, Role, StateTensor
from triplane.unified_ir.runtime import Limits, Plan


def loaded(tmp_path):
    digest = export_plan(module(), tmp_path / "a.plan", limits=Limits(max_steps=3))
    return Plan.load(tmp_path / "a.plan", expected_digest=digest)


def test_a_plan_learns_and_predicts(tmp_path):
    plan = loaded(tmp_path)
    x = np.ones((4, 2), np.float32)
    assert plan.predict(x)["y"].tolist() == [[1.0, 1.0]] * 4
    plan.run("local_update", x=x)
    assert plan.predict(x)["y"].tolist() == [[1.5, 1.5]] * 4
    assert plan.state()["seen"] == 8.0


def test_a_plan_says_what_it_holds(tmp_path):
    plan = loaded(tmp_path)
    assert plan.entries == ("local_update", "predict")
    assert plan.roles == {"head": "personal", "seen": "buffer", "w": "parameter"}
    assert plan.limits == Limits(max_steps=3)
    assert plan.labels == ("a", "b")


@pytest.mark.parametrize(
    ("text", "labels"), [('["no", "yes"]', ("no", "yes")), ('{"y": ["no", "yes"]}', ()), ("5", ())]
)
def test_a_plan_has_the_names_of_classes_that_the_metadata_lists(tmp_path, text, labels):
    named = replace(module(), meta={"labels": text})
    export_plan(named, tmp_path / "a.plan")
    assert Plan.load(tmp_path / "a.plan").labels == labels


def test_names_of_classes_that_are_not_json_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="'labels' must be JSON"):
        export_plan(replace(module(), meta={"labels": "no,yes"}), tmp_path / "a.plan")


def test_personal_state_starts_at_zero_so_that_nothing_personal_travels(tmp_path):
    plan = loaded(tmp_path)
    assert plan.state("personal")["head"].tolist() == [0.0, 0.0]


def test_personal_state_starts_where_the_model_says_and_not_at_what_it_learned(tmp_path):
    start = StateTensor(Role.BUFFER, np.array([0.5, -1.0], np.float32))
    export_plan(module(**{"start.head": start}), tmp_path / "a.plan")
    plan = Plan.load(tmp_path / "a.plan")
    assert plan.state("personal")["head"].tolist() == [0.5, -1.0]
    assert "start.head" not in plan.roles


def test_the_same_module_gives_the_same_plan(tmp_path):
    digests = {export_plan(module(), tmp_path / f"{i}.plan") for i in range(2)}
    assert len(digests) == 1


def test_a_module_that_cannot_learn_gives_no_plan(tmp_path):
    made = module()
    only = Module(made.functions, {"predict": "predict"}, made.state, {})
    with pytest.raises(InvalidInput, match="learns with one of local_update, adapt"):
        export_plan(only, tmp_path / "a.plan")
    export_plan(only, tmp_path / "b.plan", entries=("predict",))
    with pytest.raises(InvalidInput, match="some of local_update, evaluate"):
        export_plan(made, tmp_path / "c.plan", entries=("train_step",))
    assert [p.name for p in tmp_path.iterdir()] == ["b.plan"]

from typing import Any

import numpy as np
import pytest
from tests.runtime.graphs import linear, product
from tests.runtime.samples import make_plan, plan_spec, samples

from triplane.proto import files_pb2 as pb
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.unified_ir.files import container
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.runtime import Limits, Plan, TensorInfo


def loaded(tmp_path) -> Plan:
    make_plan(tmp_path / "p")
    return Plan.load(tmp_path / "p")


def test_plan_learns_and_its_other_entries_see_the_current_state(tmp_path):
    plan = loaded(tmp_path)
    held_out = samples(64, 99)
    before = plan.evaluate(held_out)["loss"]
    for i in range(60):
        assert set(plan.run("local_update", samples(16, i))) == {"loss"}
    assert plan.evaluate(**held_out)["loss"] < before / 1000
    np.testing.assert_allclose(plan.predict(held_out["x"])["p"], held_out["y"], atol=0.05)
    np.testing.assert_allclose(plan.predict(x=held_out["x"])["p"], held_out["y"], atol=0.05)
    np.testing.assert_allclose(plan.state()["w"].ravel(), [1, -2], atol=0.05)
    assert plan.steps == 60
    assert plan.spent_s > 0


def test_plan_shows_what_it_holds(tmp_path):
    plan = loaded(tmp_path)
    assert plan.entries == ("evaluate", "local_update", "predict")
    assert plan.roles == {"w": "parameter", "seen": "personal"}
    assert plan.labels == ("value",)
    assert plan.inputs("predict") == (TensorInfo("x", "float32", ("N", 2)),)
    assert set(plan.state("parameter")) == {"w"}
    assert set(plan.state("optimizer", "personal")) == {"seen"}


def test_adapt_repeats_the_batches_and_returns_each_loss(tmp_path):
    plan = loaded(tmp_path)
    batches = [samples(8, 0), samples(8, 1)]
    losses = plan.adapt(batches, steps=7)
    assert len(losses) == 7
    assert losses[-1] < losses[0]
    assert len(plan.adapt(batches)) == 5, "what the plan says"
    no_lists: list[Any] = [[], batches[0]]
    for no_list in no_lists:
        with pytest.raises(InvalidInput, match="at least one batch"):
            plan.adapt(no_list)


def test_adapt_entry_is_preferred_and_shares_the_state(tmp_path):
    entries = plan_spec().entries
    make_plan(tmp_path / "p", entries={**entries, "adapt": entries["local_update"]}, steps={})
    both = Plan.load(tmp_path / "p")
    make_plan(tmp_path / "q")
    one = Plan.load(tmp_path / "q")
    for i in range(6):
        entry = "adapt" if i % 2 else "local_update"
        a, b = both.run(entry, samples(8, i)), one.run("local_update", samples(8, i))
        assert float(a["loss"]) == float(b["loss"])
    assert np.array_equal(both.state()["w"], one.state()["w"])


def test_step_that_raises_leaves_the_state(tmp_path):
    plan = loaded(tmp_path)
    plan.run("local_update", samples(8))
    w = plan.state()["w"]
    with pytest.raises(InvalidInput):
        plan.run("local_update", x=np.zeros((8, 3), np.float32), y=np.zeros((8, 1), np.float32))
    assert np.array_equal(plan.state()["w"], w)
    assert plan.steps == 1


def test_calls_that_do_not_fit_name_what_does(tmp_path):
    plan = loaded(tmp_path)
    with pytest.raises(NotFound, match=r"has entries .* not 'adapt'"):
        plan.run("adapt")
    with pytest.raises(InvalidInput, match=r"evaluate takes exactly \['x', 'y'\], got"):
        plan.run("evaluate", samples(4), z=np.zeros(1))
    with pytest.raises(InvalidInput, match="is state, not batch"):
        plan.run("predict", w=np.zeros((2, 1), np.float32), x=np.zeros((1, 2), np.float32))
    with pytest.raises(InvalidInput, match="pass them by name"):
        plan.predict(np.zeros((1, 2)), np.zeros((1, 2)))
    with pytest.raises(InvalidInput, match=r"predict takes exactly \['x'\], got \[\]"):
        plan.predict()
    with pytest.raises(InvalidInput, match=r"roles are .* not \['weights'\]"):
        plan.state("weights")


def test_saved_state_resumes_bit_for_bit(tmp_path):
    plan = loaded(tmp_path)
    for i in range(5):
        plan.run("local_update", samples(8, i))
    plan.save_state(tmp_path / "s")
    again = Plan.load(tmp_path / "p")
    again.load_state(tmp_path / "s")
    assert (again.steps, again.spent_s) == (plan.steps, plan.spent_s)
    for i in range(5, 9):
        plan.run("local_update", samples(8, i))
        again.run("local_update", samples(8, i))
    assert np.array_equal(plan.state()["w"], again.state()["w"])


def test_state_can_be_loaded_in_the_middle_of_a_run(tmp_path):
    plan = loaded(tmp_path)
    plan.save_state(tmp_path / "s")
    plan.run("local_update", samples(8))
    plan.load_state(tmp_path / "s")
    assert plan.steps == 0
    assert not plan.state()["w"].any()
    plan.run("local_update", samples(8))
    assert plan.state()["w"].any()


def test_state_of_another_plan_and_damaged_state_are_refused(tmp_path):
    plan = loaded(tmp_path)
    make_plan(tmp_path / "q", labels=("other",))
    Plan.load(tmp_path / "q").save_state(tmp_path / "s")
    with pytest.raises(Conflict, match="is of plan"):
        plan.load_state(tmp_path / "s")
    plan.save_state(tmp_path / "s")
    bad = bytearray((tmp_path / "s").read_bytes())
    bad[200] ^= 1
    (tmp_path / "s").write_bytes(bad)
    with pytest.raises(Corrupt):
        plan.load_state(tmp_path / "s")
    part = container.tensor_part("state.safetensors", plan.state())
    for properties in ({}, {"steps": "x", "spent_s": "0"}, {"steps": "0", "spent_s": "nan"}):
        container.write(
            tmp_path / "s", "checkpoint", [part], properties=properties, parent=plan.digest
        )
        with pytest.raises(Corrupt):
            plan.load_state(tmp_path / "s")
    assert plan.steps == 0


def test_assign_replaces_named_tensors_or_none(tmp_path):
    plan = loaded(tmp_path)
    plan.run("local_update", samples(8))
    plan.assign({"w": np.ones((2, 1), np.float32)})
    assert plan.predict(np.ones((1, 2), np.float32))["p"] == 2
    wrong: list[dict[str, Any]] = [
        {"v": np.zeros(1)},
        {"w": [[0.0], [1.0]]},
        {"w": np.zeros((2, 1))},
        {"w": np.zeros((1, 2), np.float32)},
    ]
    for bad in wrong:
        with pytest.raises(InvalidInput, match="state '"):
            plan.assign({"seen": np.array([9]), **bad})
    assert plan.state()["seen"] == [3]


def test_steps_are_limited_over_the_life_of_the_plan(tmp_path):
    make_plan(tmp_path / "p", limits=Limits(max_steps=3))
    plan = Plan.load(tmp_path / "p")
    plan.adapt([samples(4)], steps=2)
    plan.save_state(tmp_path / "s")
    again = Plan.load(tmp_path / "p")
    again.load_state(tmp_path / "s")
    again.run("local_update", samples(4))
    with pytest.raises(Conflict, match="allows 3 steps and took 3"):
        again.run("local_update", samples(4))
    again.evaluate(samples(4))


def test_time_inside_steps_is_limited(tmp_path):
    make_plan(tmp_path / "p", limits=Limits(time_s=2.5))
    ticks = iter(range(100))
    plan = Plan.load(tmp_path / "p", clock=lambda: float(next(ticks)))
    plan.adapt([samples(4)], steps=3)
    with pytest.raises(Conflict, match=r"allows 2\.5 s and took 3\.000 s"):
        plan.run("local_update", samples(4))


def test_state_over_the_memory_limit_is_refused_at_load(tmp_path):
    make_plan(tmp_path / "p", limits=Limits(memory_bytes=31))
    with pytest.raises(InvalidInput, match="allows 31 bytes; its state alone takes 32"):
        Plan.load(tmp_path / "p")


@pytest.mark.parametrize(
    "demand", [{"compression": ("sketch",)}, {"privacy": ("masking",)}, {"privacy": ("noise",)}]
)
def test_demands_this_version_does_not_offer_are_refused_by_name(tmp_path, demand):
    make_plan(tmp_path / "p", **demand)
    ((name,),) = demand.values()
    with pytest.raises(InvalidInput, match=f"this plan demands {name}, which this version does"):
        Plan.load(tmp_path / "p")


@pytest.mark.parametrize(
    "roles", [{"w": "parameter"}, {"w": "parameter", "seen": ""}, {"w": "x", "seen": "key"}]
)
def test_state_without_a_role_is_refused_when_written(tmp_path, roles):
    with pytest.raises(InvalidInput, match="needs one role"):
        make_plan(tmp_path / "p", roles=roles)


def test_state_that_numpy_cannot_hold_is_refused(tmp_path):
    state = {"w": StoredTensor("bfloat16", np.zeros(2, np.uint16))}
    make_plan(tmp_path / "p", state=state, roles={"w": "parameter"})
    with pytest.raises(InvalidInput, match="'w' is bfloat16"):
        Plan.load(tmp_path / "p")


def test_entry_without_a_loss_cannot_adapt(tmp_path):
    make_plan(tmp_path / "p", entries={"adapt": product(), "predict": linear()})
    with pytest.raises(InvalidInput, match="one number named 'loss'"):
        Plan.load(tmp_path / "p").adapt([{"x": np.zeros((1, 2), np.float32)}])


@pytest.mark.parametrize(
    ("message", "parts", "message_text"),
    [
        (
            pb.Plan(entries=[pb.Entry(name="a", part="b.onnx")]),
            ["b.onnx"],
            "entry NAME is the part",
        ),
        (pb.Plan(entries=[pb.Entry(name="a", part="a.onnx")]), [], "requires the parts"),
        (pb.Plan(), ["a.onnx"], "requires the parts"),
        (pb.Plan(limits=pb.Limits(time_s=-1)), [], "a finite number >= 0"),
    ],
)
def test_forged_descriptions_in_a_sound_container_are_refused(
    tmp_path, message, parts, message_text
):
    made = [container.part("plan.pb", message.SerializeToString())]
    made += [container.part(name, b"") for name in parts]
    made.append(container.tensor_part("state.safetensors", {"w": np.zeros(1)}, {"w": "key"}))
    container.write(tmp_path / "p", "plan", made)
    with pytest.raises(Corrupt, match=message_text):
        Plan.load(tmp_path / "p")


def test_forged_state_without_roles_is_refused(tmp_path):
    made = [
        container.part("plan.pb", b""),
        container.tensor_part("state.safetensors", {"w": np.zeros(1)}),
    ]
    container.write(tmp_path / "p", "plan", made)
    with pytest.raises(Corrupt, match="has no role"):
        Plan.load(tmp_path / "p")

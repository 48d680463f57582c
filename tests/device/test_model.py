"""The model a device uses is the best of shared, adapted and what it had, by its own held-out."""

from dataclasses import replace

import numpy as np
import pytest
from tests.federated.core import plans

from triplane.device.model import PERSONAL, SHARED, DeviceModel, ModelChoice
from triplane.proto.disk import OS_DISK
from triplane.proto.errors import Conflict, NotFound
from triplane.unified_ir.federated.core.learn import Shard, evaluate

WORK = replace(plans.WORK, support=0)
RIGHT = np.array([[1.0], [-2.0]], np.float32)
LEADS_THERE = RIGHT.reshape(1, 2)
"""`adapt` of the plan goes towards the mean of x: of such samples, towards the answer."""


def helpful(seed=0, held_out=40):
    """Training samples whose mean is the answer, held-out ones of the same rule."""
    data = plans.shard(n=1, held_out=held_out, seed=seed)
    x = np.repeat(LEADS_THERE, 8, axis=0)
    return Shard({"x": x, "y": x @ RIGHT}, data.held_out)


def judged(folder, plan, shard, *, w, steps=5, blob="aa", **more):
    model = DeviceModel(folder / "model")
    start = {**plans.state(), "w": w}

    def restart():
        plan.assign(start)

    restart()
    options = {"steps": steps, "blob": blob, "restart": restart, **more}
    found = model.judge(plan, plan, WORK, shard, **options)
    return found, model.choice()


def used(folder, plan):
    DeviceModel(folder / "model").load_into(plan)
    return plan.state()["w"]


def test_the_adapted_state_is_kept_where_it_is_better(tmp_path):
    plan = plans.plan(tmp_path)
    found, choice = judged(tmp_path, plan, helpful(), w=np.zeros((2, 1), np.float32), steps=60)
    assert found.after == 1.0 > found.before
    assert (choice.chosen, choice.accuracy, choice.samples) == (PERSONAL, 1.0, 40)
    np.testing.assert_allclose(used(tmp_path, plan), RIGHT, atol=0.1)


def test_the_shared_state_is_kept_where_adaptation_is_worse_or_no_better(tmp_path):
    plan = plans.plan(tmp_path)
    found, choice = judged(tmp_path, plan, plans.shard(held_out=30), w=RIGHT, steps=20)
    assert found.before == 1.0 > found.after
    assert (choice.chosen, choice.accuracy) == (SHARED, 1.0)
    assert used(tmp_path, plan).tolist() == RIGHT.tolist()


def test_an_older_personal_state_stays_while_it_is_better_than_both(tmp_path):
    plan = plans.plan(tmp_path)
    judged(tmp_path, plan, helpful(), w=np.zeros((2, 1), np.float32), steps=60)
    far = np.full((2, 1), 50, np.float32)
    found, choice = judged(tmp_path, plan, helpful(), w=far, steps=1)
    assert max(found.before, found.after) < 1.0
    assert (choice.chosen, choice.accuracy) == (PERSONAL, 1.0)


def test_an_older_personal_state_goes_when_the_shared_one_is_as_good(tmp_path):
    plan = plans.plan(tmp_path)
    judged(tmp_path, plan, helpful(), w=np.zeros((2, 1), np.float32), steps=60)
    _, choice = judged(tmp_path, plan, helpful(), w=RIGHT, steps=1)
    assert choice.chosen == SHARED


def test_what_is_told_to_the_cloud_is_the_mathematics_of_the_core(tmp_path):
    plan, shard = plans.plan(tmp_path), helpful()
    w = np.array([[0.5], [-1.5]], np.float32)
    for _ in range(2):
        found, _ = judged(tmp_path, plan, shard, w=w)
        plan.assign({**plans.state(), "w": w})
        assert found == evaluate(plan, WORK, shard, steps=5)


def test_a_damaged_or_absent_model_is_none(tmp_path):
    model = DeviceModel(tmp_path / "model")
    assert model.choice() is None
    (tmp_path / "model").write_bytes(b"damaged")
    assert model.choice() is None
    assert not (tmp_path / "model").exists()


def test_a_model_with_damaged_tensors_is_replaced_by_the_next_state(tmp_path):
    """Its facts are read without the tensors, so only the comparison with it meets the damage."""
    plan = plans.plan(tmp_path)
    judged(tmp_path, plan, helpful(), w=np.zeros((2, 1), np.float32), steps=60)
    data = bytearray((tmp_path / "model").read_bytes())
    at = data.find(used(tmp_path, plan).tobytes())
    data[at] ^= 1
    (tmp_path / "model").write_bytes(data)
    found, choice = judged(tmp_path, plan, helpful(), w=np.full((2, 1), 50, np.float32), steps=1)
    assert choice.before == found.before < 1.0
    assert used(tmp_path, plan).min() > 10


def test_the_facts_of_a_model_come_back_exactly(tmp_path):
    plan = plans.plan(tmp_path)
    choice = ModelChoice(
        run=WORK.run, round=4, plan="ab" * 32, chosen=SHARED, samples=3, before=1 / 3,
        after=2 / 3, accuracy=2 / 3,
    )  # fmt: skip
    DeviceModel(tmp_path / "model").adopt(plan, choice)
    assert DeviceModel(tmp_path / "model").choice() == choice


def test_what_another_run_left_stays_while_it_is_better_on_the_same_samples(tmp_path):
    plan = plans.plan(tmp_path)
    judged(tmp_path, plan, helpful(), w=np.zeros((2, 1), np.float32), steps=60)
    far = np.full((2, 1), 50, np.float32)
    asked = []

    def other(blob):
        asked.append(blob)
        return plans.plan(tmp_path)

    options = {"steps": 1, "blob": "bb"}
    found, choice = judged(tmp_path, plan, helpful(), w=far, other=other, **options)
    assert max(found.before, found.after) < 1.0
    assert (choice.plan, choice.accuracy, asked) == ("aa", 1.0, ["aa"])
    _, choice = judged(tmp_path, plan, helpful(), w=RIGHT, other=other, **options)
    assert (choice.plan, choice.accuracy) == ("bb", 1.0)


def test_what_another_run_left_goes_when_its_plan_is_not_there_any_more(tmp_path):
    plan = plans.plan(tmp_path)
    judged(tmp_path, plan, helpful(), w=np.zeros((2, 1), np.float32), steps=60)

    def other(blob):
        raise NotFound(f"no plan {blob}")

    far = np.full((2, 1), 50, np.float32)
    _, choice = judged(tmp_path, plan, helpful(), w=far, steps=1, blob="bb", other=other)
    assert (choice.plan, choice.accuracy < 1.0) == ("bb", True)


def test_a_measured_shared_state_stays_while_a_newer_one_is_worse(tmp_path):
    plan = plans.plan(tmp_path)
    judged(tmp_path, plan, plans.shard(held_out=30), w=RIGHT, steps=20)
    far = np.full((2, 1), 50, np.float32)
    _, choice = judged(tmp_path, plan, plans.shard(held_out=30), w=far, steps=1)
    assert (choice.chosen, choice.accuracy) == (SHARED, 1.0)
    assert used(tmp_path, plan).tolist() == RIGHT.tolist()


def unmeasured(number, run="0123456789abcdef"):
    return ModelChoice(run=run, round=number, plan="aa", chosen=SHARED)


def adopted(folder, plan, number, **more):
    state = {**plans.state(), "w": np.full((2, 1), number, np.float32)}
    plan.assign(state)
    DeviceModel(folder / "model").adopt_unmeasured(plan, unmeasured(number, **more), state)


def test_states_that_nobody_measured_follow_each_other_without_a_sync(tmp_path, monkeypatch):
    plan, synced = plans.plan(tmp_path), []
    real = OS_DISK.__class__.sync

    def noted(self, file):
        synced.append(file)
        real(self, file)

    monkeypatch.setattr(OS_DISK.__class__, "sync", noted)
    for number in (1, 2, 3):
        adopted(tmp_path, plan, number)
        assert DeviceModel(tmp_path / "model").choice() == unmeasured(number)
        assert used(tmp_path, plan).tolist() == [[number], [number]]
    assert len(synced) == 1
    adopted(tmp_path, plan, 1, run="fedcba9876543210")
    assert len(synced) == 2
    assert used(tmp_path, plan).tolist() == [[1], [1]]


def test_states_that_follow_fast_are_written_when_no_round_follows(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.device.model.WAIT_S", 1000.0)
    monkeypatch.setattr("triplane.device.model.WRITE_S", 1000.0)
    plan, model = plans.plan(tmp_path), DeviceModel(tmp_path / "model")
    for number in (1, 2, 3):
        state = {**plans.state(), "w": np.full((2, 1), number, np.float32)}
        plan.assign(state)
        model.adopt_unmeasured(plan, unmeasured(number), state)
        assert model.choice() == unmeasured(number)
    plan.assign({**plans.state(), "w": np.full((2, 1), 77, np.float32)})  # learned since
    model.write_waiting()
    assert DeviceModel(tmp_path / "model").choice() == unmeasured(1)
    monkeypatch.setattr("triplane.device.model.WAIT_S", 0.0)
    model.write_waiting()
    assert DeviceModel(tmp_path / "model").choice() == unmeasured(3)
    assert used(tmp_path, plan).tolist() == [[3], [3]]
    model.adopt_unmeasured(plan, unmeasured(4), state)
    model.adopt(plan, measured := replace(unmeasured(4), samples=3, accuracy=0.5))
    model.write_waiting()  # nothing waits any more
    assert DeviceModel(tmp_path / "model").choice() == measured


def test_an_unmeasured_state_is_written_at_once_where_only_the_plan_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.device.model.WRITE_S", 1000.0)
    plan, model = plans.plan(tmp_path), DeviceModel(tmp_path / "model")
    for number in (1, 2):
        model.adopt_unmeasured(plan, unmeasured(number), {})
        assert DeviceModel(tmp_path / "model").choice() == unmeasured(number)


def test_an_unmeasured_state_is_made_durable_once_in_a_while(tmp_path, monkeypatch):
    plan = plans.plan(tmp_path)
    adopted(tmp_path, plan, 1)
    monkeypatch.setattr("triplane.device.model.SYNC_S", 0.0)
    adopted(tmp_path, plan, 2)
    (tmp_path / "model.newest").unlink(missing_ok=True)
    assert DeviceModel(tmp_path / "model").choice() == unmeasured(2)


def test_the_model_before_holds_where_a_power_cut_tore_the_newest_state(tmp_path):
    """Whole by its manifest, with other numbers; and cut short."""
    plan = plans.plan(tmp_path)
    for cut in (False, True):
        adopted(tmp_path, plan, 1)
        adopted(tmp_path, plan, 2)
        newest = tmp_path / "model.newest"
        data = bytearray(newest.read_bytes())
        at = data.index(np.full((2, 1), 2, np.float32).tobytes())
        data[at] ^= 1
        newest.write_bytes(data[: len(data) // 2] if cut else data)
        if not cut:
            with pytest.raises(Conflict, match="damaged the newest state"):
                used(tmp_path, plan)
        assert DeviceModel(tmp_path / "model").choice() == unmeasured(1)
        assert used(tmp_path, plan).tolist() == [[1], [1]]


def test_a_removed_unmeasured_state_that_comes_back_replaces_no_measured_model(tmp_path):
    plan = plans.plan(tmp_path)
    adopted(tmp_path, plan, 1)
    adopted(tmp_path, plan, 9)
    back = (tmp_path / "model.newest").read_bytes()
    _, choice = judged(tmp_path, plan, plans.shard(held_out=30), w=RIGHT)
    (tmp_path / "model.newest").write_bytes(back)
    assert choice.samples == 30
    assert DeviceModel(tmp_path / "model").choice() == choice
    assert used(tmp_path, plan).tolist() == RIGHT.tolist()

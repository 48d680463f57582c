"""A regression on devices: a run against a real cloud, and the model that a device keeps."""

import asyncio
import secrets
from dataclasses import replace

import numpy as np
import pytest
from tests.cloud.federation import given
from tests.cloud.federation.given import ended, start_request
from tests.device.devices import taking_part, token_for
from tests.federated.study.sines import mse, regression, sine
from tests.support.deadlines import within

from triplane.cloud.cli.runs import changes, run_text
from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.journal import Prepared
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.device import FederatedClient
from triplane.device.model import PERSONAL, SHARED, DeviceModel, ModelChoice
from triplane.device.status import _model
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.algorithms import Hyper, plan_of
from triplane.unified_ir.federated.core.learn import Work
from triplane.unified_ir.federated.core.metric import LOSS
from triplane.unified_ir.runtime import Plan

WORK = Work(
    run="0123456789abcdef", round=1, device="ann", seed=7, steps=1, batch_size=8, support=0, query=1
)
LR, INNER_STEPS = 0.3, 3


async def run_of(cloud, folder):
    """A finished run of two devices, and the devices."""
    regression().save(folder / "sine.tpm")
    blob = cloud.blobs.put((folder / "sine.tpm").read_bytes())
    push = Push(model="sine", blob=blob, key=secrets.token_bytes(16))
    await cloud.registry.push(push, by="operator")
    clients = [
        FederatedClient(folder / name, sine(number), population=given.POPULATION)
        for number, name in enumerate(("ann", "bob"))
    ]
    for client, name in zip(clients, ("ann", "bob"), strict=True):
        token = await token_for(cloud, name)
        await asyncio.to_thread(client.enrol, token, cloud.enrol_address)
    request = start_request(
        model="sine", hyperparameters=pb.Hyperparameters(lr=LR, inner_steps=INNER_STEPS)
    )
    async with taking_part(*clients):
        begun = await cloud.federation.begin(request, by="operator")
        return await ended(cloud, begun.id), clients


@pytest.mark.slow
def test_devices_learn_a_regression_and_use_the_model_of_the_lower_loss(tmp_path):
    async def story():
        async with running(given.make_home(tmp_path)) as cloud:
            return await run_of(cloud, tmp_path)

    run, clients = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert run.metric == "loss"
    scores = {member.device: member.score for member in run.members}
    for number, client in enumerate(clients):
        choice, score = client.choice(), scores[client.name]
        assert choice.metric == "loss"
        sent = [LOSS.reported(loss, score.samples) for loss in (choice.before, choice.after)]
        assert sent == [score.before, score.after]
        assert choice.chosen == (PERSONAL if score.after < score.before else SHARED)
        held_out = sine(number).held_out
        predicted = next(iter(client.predict(x=held_out["x"]).values()))
        error = np.mean(np.square(predicted - held_out["y"], dtype=np.float64))
        assert error == pytest.approx(min(choice.before, choice.after), rel=1e-5)
    last = run.rounds[-1]
    assert last.evaluates
    for spread, values in (
        (last.before, [score.before for score in scores.values()]),
        (last.after, [score.after for score in scores.values()]),
    ):
        assert spread.mean == pytest.approx(np.mean(values))
        assert spread.worst == spread.worst_tenth == max(values)
    text = run_text(run) + "\n".join(changes(None, run))
    assert "HELD-OUT LOSS" in text
    assert f"{scores['ann'].after:.4g}" in text
    assert f"held-out loss {last.before.mean:.4g} (worst tenth" in text
    assert "accuracy" not in text.lower()


def plan_at(folder, lr=LR):
    hyper = Hyper(lr=lr, inner_steps=INNER_STEPS)
    plan_of(regression(), "fedavg", hyper, folder / "a.plan")
    return Plan.load(folder / "a.plan")


def judged(folder, plan, weight, *, steps=0, blob="aa", **options):
    """The device's choice after it scored the shared state of this weight."""
    model = DeviceModel(folder / "model")
    start = {"0.weight": np.full((1, 3), weight, np.float32), "0.bias": np.zeros(1, np.float32)}

    def restart():
        plan.assign(start)

    restart()
    model.judge(
        plan, plan, WORK, sine(0), steps=steps, blob=blob, restart=restart, **options
    )  # fmt: skip
    return model.choice()


def loss_at(weight):
    return mse(np.full((1, 3), weight), 0.0, sine(0).held_out)


def test_the_adapted_state_is_kept_where_its_loss_is_lower(tmp_path):
    choice = judged(tmp_path, plan_at(tmp_path), 0.0, steps=3)
    assert choice.chosen == PERSONAL
    assert choice.score == choice.after < choice.before == pytest.approx(loss_at(0.0))


def test_an_older_model_stays_while_its_loss_is_lower(tmp_path):
    plan = plan_at(tmp_path)
    better, worse = sorted((0.0, 9.0), key=loss_at)
    assert judged(tmp_path, plan, worse).score == pytest.approx(loss_at(worse))
    assert judged(tmp_path, plan, better).score == pytest.approx(loss_at(better))
    assert judged(tmp_path, plan, worse).score == pytest.approx(loss_at(better))


def test_the_loss_of_another_run_is_compared_if_it_is_the_same_function(tmp_path):
    plan = plan_at(tmp_path)
    judged(tmp_path, plan, 0.0)
    (tmp_path / "other").mkdir()
    same = plan_at(tmp_path / "other", lr=0.1)
    kept = judged(tmp_path, same, 9.0, blob="bb", other=lambda _: plan_at(tmp_path))
    assert (kept.plan, kept.score) == ("aa", pytest.approx(loss_at(0.0)))


def test_a_loss_is_not_compared_with_the_loss_of_another_function(tmp_path, monkeypatch):
    plan = plan_at(tmp_path)
    judged(tmp_path, plan, 0.0)
    digests = {plan: "other loss"}
    monkeypatch.setattr(Plan, "entry_digest", lambda self, _: digests.get(self, "this loss"))
    kept = judged(tmp_path, plan_at(tmp_path), 9.0, blob="bb", other=lambda _: plan)
    assert (kept.plan, kept.score) == ("bb", pytest.approx(loss_at(9.0)))


def test_a_loss_is_not_compared_with_an_accuracy(tmp_path):
    plan = plan_at(tmp_path)
    plan.assign({"0.weight": np.zeros((1, 3), np.float32)})
    accurate = ModelChoice(
        run="f" * 16, round=1, plan="aa", chosen=SHARED, samples=20, before=0.01, accuracy=0.01
    )
    DeviceModel(tmp_path / "model").adopt(plan, accurate)
    assert judged(tmp_path, plan, 9.0).metric == "loss"


def test_a_choice_stores_the_metric_only_if_it_is_not_accuracy():
    accurate = ModelChoice(run="r", round=1, plan="p", chosen=SHARED, before=0.5, accuracy=0.5)
    lossy = replace(accurate, metric="loss", accuracy=0.0)
    assert accurate.record().keys() ^ lossy.record().keys() == {"accuracy", "metric"}
    assert "metric" not in accurate.record()
    assert accurate.score == lossy.score == 0.5


def test_the_status_of_a_device_names_the_loss():
    choice = ModelChoice(
        run="r", round=1, plan="p", chosen=PERSONAL, samples=20, before=2.5, after=0.125,
        metric="loss",
    )  # fmt: skip
    text = _model(choice)
    assert "loss 0.125 of 20 held-out samples (newest shared 2.5, adapted 0.125)" in text


def test_what_the_cloud_stores_of_a_classifier_has_no_new_field():
    prepared = Prepared(
        plan="aa", plan_digest="bb", state="cc", roles={}, weighting="examples", server="sgd",
        since_s=1.0,
    )  # fmt: skip
    stored = to_json(prepared)
    assert "metric" not in stored
    lossy = replace(prepared, metric="loss")
    assert '"metric":"loss"' in to_json(lossy)
    for value in (prepared, lossy):
        assert from_json(Prepared, to_json(value)) == value

"""A device's own account: charged before an update leaves, exact over kills and hostile clouds."""

import asyncio
import errno
import json
import time
from pathlib import Path

import numpy as np
import pytest
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.privacy_account import NoiseTask, PrivacyAccount, noise_task
from triplane.device.tasks import KINDS, Blob, Task
from triplane.proto import federation_pb2 as pb
from triplane.proto.disk import OsDisk, lock_file
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, Unavailable
from triplane.unified_ir.federated.core.files import like_of, read_update
from triplane.unified_ir.federated.privacy.accountant import NoiseEvent, spending

RUN = "0123456789abcdef"
LIMITED = DeviceSettings(privacy_epsilon=3.0, privacy_delta=1e-6)


def terms(**changes):
    return pb.NoiseTerms(**{"clip": 0.5, "multiplier": 5.0, "separation": 2, "delta": 1e-5,
                            **changes})  # fmt: skip


def asked(*, masked=False, **changes):
    return noise_task(terms(**changes), masked=masked)


def account(folder, settings=LIMITED):
    """As a process that was just started has it."""
    home = DeviceHome(folder)
    home.make()
    return PrivacyAccount(home, settings)


def use(account, round_, run=RUN, name="", noise=None):
    noise = noise or asked(separation=1)
    lease_ = name or f"lease {run} {round_}"
    account.check(run, round_, lease_, noise)
    account.charge(run, round_, lease_, noise)


def test_uses_add_up_over_runs_and_processes_until_the_device_declines(tmp_path):
    used = 0
    while account(tmp_path)._budget().fits(NoiseEvent(5.0)):
        use(account(tmp_path), used + 1, run=f"run {used % 3}")
        used += 1
    with pytest.raises(Conflict, match="above this device's 3"):
        use(account(tmp_path), used + 1)
    assert used > 5
    assert account(tmp_path).spent == pytest.approx(
        spending([NoiseEvent(5.0, used)]).epsilon(1e-6), rel=1e-9
    )
    assert account(tmp_path).spent <= 3.0


def test_a_repeated_charge_is_free_and_a_second_update_under_it_is_declined(tmp_path):
    mine, noise = account(tmp_path), asked()
    use(mine, 4, name="one", noise=noise)
    spent = mine.spent
    mine.charge(RUN, 4, "one", noise)
    assert account(tmp_path).spent == spent
    with pytest.raises(Conflict, match="would be free"):
        account(tmp_path).check(RUN, 4, "one", noise)


def test_a_charge_whose_name_was_not_synced_is_synced_before_the_update_leaves(
    tmp_path, monkeypatch
):
    """An error or a kill after the rename; otherwise a power cut later takes the charge back."""
    mine, real, failing = account(tmp_path), OsDisk.sync_folder, [True]

    def sync_folder(disk, folder):
        if failing[0]:
            raise OSError(errno.EIO, "no sync")
        synced.append(folder)
        real(disk, folder)

    synced: list[Path] = []
    monkeypatch.setattr(OsDisk, "sync_folder", sync_folder)
    for _ in range(2):
        with pytest.raises(Unavailable):
            mine.charge(RUN, 1, "one", noise_task(terms(), masked=False))
    assert (tmp_path / "privacy.json").exists()
    failing[0] = False
    mine.charge(RUN, 1, "one", noise_task(terms(), masked=False))
    assert synced == [tmp_path]


def test_a_use_before_the_separation_is_over_is_declined(tmp_path):
    noise = asked(separation=3)
    use(account(tmp_path), 4, noise=noise)
    with pytest.raises(Conflict, match=r"round 6 .* in round 4, rests until round 7"):
        account(tmp_path).check(RUN, 6, "another", noise)
    unlimited = account(tmp_path, DeviceSettings())
    with pytest.raises(Conflict, match="rests until round 7"):
        unlimited.check(RUN, 5, "another", noise)
    account(tmp_path).check(RUN, 7, "another", noise)


def test_the_limits_are_the_owner_s_present_ones(tmp_path):
    for round_ in range(1, 20):
        use(account(tmp_path, DeviceSettings()), round_)
    with pytest.raises(Conflict, match=r"would spend epsilon .* at delta 1e-06"):
        use(account(tmp_path), 20)
    assert account(tmp_path).spent > 3.0


def test_with_a_limit_a_device_takes_part_in_private_runs_only(tmp_path):
    with pytest.raises(Conflict, match="differential privacy only"):
        account(tmp_path).check(RUN, 1, "one", None)
    account(tmp_path, DeviceSettings()).check(RUN, 1, "one", None)


NEGATIVE = {"gaussian": -1, "concentrated": 0, "round": 1, "lease": ""}
DAMAGED = (
    b"",
    b"{",
    b"[]",
    b"[" * 10_000,
    json.dumps({"epsilon": 3, "delta": 1e-6, "runs": {"r": {}}}).encode(),
    json.dumps({"epsilon": 3, "delta": 1e-6, "runs": {"r": NEGATIVE}}).encode(),
)


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_stops_private_work_and_does_not_forget(tmp_path, text):
    mine = account(tmp_path)
    (tmp_path / "privacy.json").write_bytes(text)
    for act in (mine.check, mine.charge):
        with pytest.raises(Corrupt, match="does not hold what this device has spent"):
            act(RUN, 1, "one", asked())
    assert (tmp_path / "privacy.json").read_bytes() == text


def test_another_process_that_charges_is_waited_for(tmp_path):
    mine = account(tmp_path)
    with lock_file(tmp_path / "privacy.lock"), pytest.raises(Unavailable, match="try again"):
        mine.charge(RUN, 1, "one", asked())
    use(mine, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": 0.0}, "clipping norm"),
        ({"clip": float("nan")}, "clipping norm"),
        ({"multiplier": 1e-9}, "noise multiplier"),
        ({"multiplier": float("inf")}, "noise multiplier"),
        ({"separation": 0}, "separation"),
        ({"separation": 2**31}, "separation"),
        ({"delta": 0.0}, "delta"),
        ({"own_std": 3.0}, "no noise of its own"),
        ({"masked": True}, "no noise of the cloud in masked rounds"),
        ({"masked": True, "own_std": 3.0, "clip_bit": True}, "a clipping bit gets noise"),
        ({"masked": True, "own_std": 3.0, "own_bit_std": 3.0}, "a clipping bit gets noise"),
        ({"clip_bit": True, "own_bit_std": 3.0}, "a clipping bit gets noise"),
        (
            {"masked": True, "own_std": 3.0, "clip_bit": True, "own_bit_std": 0.5},
            "deviation of 1 to",
        ),
        *(
            ({"masked": True, "own_std": x}, "deviation of 1 to")
            for x in (0.5, -3.0, 1e9, float("nan"), float("inf"))
        ),
    ],
)
def test_impossible_terms_are_refused(changes, words):
    assert isinstance(asked(), NoiseTask)
    with pytest.raises(InvalidInput, match=words):
        asked(**changes)


def test_noise_of_the_device_is_a_variance_of_whole_steps_squared():
    variances = (1, 2, 3, 12_345, 2**31 + 1, 2**50 - 1)
    tasks = [asked(masked=True, own_std=v**0.5) for v in variances]
    assert tuple(task.variance for task in tasks) == variances
    assert {task.event.law for task in tasks} == {"concentrated"}
    assert (asked().variance, asked().event.law) == (0, "gaussian")


@pytest.mark.parametrize(
    "settings", [{"privacy_epsilon": -1.0}, {"privacy_epsilon": "4"}, {"privacy_delta": 0.0}]
)
def test_impossible_limits_are_refused(settings):
    with pytest.raises(InvalidInput):
        DeviceSettings(**settings)


def played(tmp_path, tasks, settings=None):
    """The contributions of a device to these tasks, and the changes that it sent."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            if settings:
                (tmp_path / "ann").mkdir()
                (tmp_path / "ann" / "device.json").write_text(json.dumps(settings))
            client = client_at(stage, tmp_path / "ann", plans.shard(held_out=6))
            answers = []
            async with serving(client):
                await stage.offer()
                for number, changes in enumerate(tasks, 1):
                    task = stage.task(number, inline_bytes=1 << 16, **changes)
                    stage.tell(task)
                    told = await stage.contribution(lease(number))
                    answers.append((task, told))
                    settled = pb.Settlement(run=task.run, lease=task.lease, counted=True)
                    await stage.heeded(pb.Work(settled=[settled]))
            return answers

    answers = within(story())
    like = like_of({n: x for n, x in plans.state().items() if n in {"w", "bias"}})
    return [
        read_update(
            tmp_path / "none", like, run=task.run, lease=task.lease.hex(), max_bytes=1 << 16,
            buffers={"bias"}, data=told.update.inline,
        )
        if told.WhichOneof("outcome") == "update" else told.declined
        for task, told in answers
    ]  # fmt: skip


@pytest.mark.long
def test_a_device_clips_its_change_before_it_leaves_and_charges_it(tmp_path):
    plain, small = played(tmp_path, [{}, {"run": "f" * 16, "noise": terms(clip=0.01)}])
    norms = [
        float(np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in c.values())))
        for c in (plain, small)
    ]
    assert norms[0] > 0.02
    assert 0.00999 < norms[1] <= 0.01
    stored = json.loads((tmp_path / "ann" / "privacy.json").read_text())
    assert list(stored["runs"]) == ["f" * 16], "only the private run is charged"
    assert stored["runs"]["f" * 16]["lease"] == lease(2).hex()
    assert stored["runs"]["f" * 16]["gaussian"] == pytest.approx(1 / 25)


def test_noise_with_compression_or_masking_is_declined():
    for changes, words in (
        ({"learn": pb.Learn(compression="int8")}, "not compressed"),
        ({"masking": pb.MaskingStep()}, "no noise of the cloud in masked rounds"),
    ):
        message = pb.Task(**{"learn": pb.Learn(), "noise": terms(), **changes})
        task = Task(kind="learn", lease="00" * 16, plan=Blob(b"", 1), state=Blob(b"", 1),
                    work=plans.WORK, until_s=0.0)  # fmt: skip
        with pytest.raises(InvalidInput, match=words):
            KINDS["learn"](task, message, 1)


@pytest.mark.long
def test_a_lease_that_comes_again_without_its_noise_gets_no_update(tmp_path):
    """What a cloud would do to get an update that is on the disk already past the account."""
    settings = {"population": "labs", "privacy_epsilon": 3.0, "privacy_delta": 1e-5}

    async def story():
        async with staged(tmp_path / "stage") as stage:
            (tmp_path / "ann").mkdir()
            (tmp_path / "ann" / "device.json").write_text(json.dumps(settings))
            client = client_at(stage, tmp_path / "ann", plans.shard(held_out=6))
            async with serving(client):
                await stage.offer()
                # Another process holds the account, so the update is kept and not charged.
                with lock_file(tmp_path / "ann" / "privacy.lock"):
                    stage.tell(stage.task(1, inline_bytes=1 << 16, noise=terms()))
                    await asyncio.to_thread(kept, tmp_path / "ann" / "pending")
                    stage.tell(stage.task(1, inline_bytes=1 << 16))
                    return await stage.contribution(lease(1))

    assert "differential privacy only" in within(story()).declined


def kept(folder):
    """Return once an update is on the disk."""
    while not list(folder.glob("*.update")):
        time.sleep(0.01)


@pytest.mark.long
def test_a_device_declines_with_the_numbers(tmp_path):
    noise = {"noise": terms(multiplier=3.0)}
    settings = {"population": "labs", "privacy_epsilon": 1.5, "privacy_delta": 1e-5}
    tasks = [{**noise, "round": 1}, {**noise, "round": 2}, {**noise, "round": 3}, {"round": 5}]
    sent, early, dear, plain = played(tmp_path, tasks, settings)
    assert isinstance(sent, dict)
    assert "rests until round 3" in early
    assert "would spend epsilon" in dear
    assert "differential privacy only" in plain

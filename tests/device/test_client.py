"""A device in an application: whole runs against a real cloud over mutual TLS."""

import asyncio
import gc
import logging

import numpy as np
import pytest
from tests.cloud.federation.given import ended, shard, start_request
from tests.device.devices import client_of, cloud_of, taking_part, token_for
from tests.support.deadlines import within

from triplane.device import FederatedClient
from triplane.device import client as client_module
from triplane.device.home import DeviceHome
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, Unavailable
from triplane.proto.identity import Token


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "maml"])
def test_two_devices_finish_a_run_and_use_the_better_model(tmp_path, algorithm):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            clients = [
                await client_of(cloud, tmp_path, name, k) for k, name in enumerate(("ann", "bob"))
            ]
            async with taking_part(*clients):
                made = await cloud.federation.begin(
                    start_request(algorithm=algorithm), by="operator"
                )
                return await ended(cloud, made.id), clients

    run, clients = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 2), (2, False, 2), (2, True, 2),
    ]  # fmt: skip
    for client in clients:
        choice = client.choice()
        assert choice.accuracy >= max(choice.before, choice.after)
        held_out = shard(0 if client.name == "ann" else 1).held_out
        logits = client.predict(x=held_out["x"])
        found = next(iter(logits.values())).argmax(1)
        assert np.mean(found == held_out["y"]) == pytest.approx(choice.accuracy)


@pytest.mark.slow
def test_a_client_that_is_stopped_before_it_runs_ends_at_once_and_can_run_again(tmp_path):
    """A thread that was started may not have come to `run` when its owner stops it."""

    async def story():
        async with cloud_of(tmp_path) as cloud:
            client = await client_of(cloud, tmp_path, "ann", 0)
            client.stop()
            await client.serve()
            again = asyncio.create_task(client.serve(begun.set))
            await begun.wait()
            with pytest.raises(Conflict, match="another process works"):
                await client.serve()
            client.stop()
            await again

    begun = asyncio.Event()
    within(story())


@pytest.mark.slow
def test_a_home_that_is_enrolled_keeps_its_identity_when_a_token_is_used_up(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            client = await client_of(cloud, tmp_path, "ann", 0)
            used, fresh = await token_for(cloud, "bob"), await token_for(cloud, "cleo")
            at = cloud.enrol_address
            other = FederatedClient(tmp_path / "bob", shard(1))
            await asyncio.to_thread(other.enrol, used, at)
            with pytest.raises(Conflict, match="stays ann, enrolled before: triplane device run"):
                await asyncio.to_thread(client.enrol, used, at)
            assert client.name == "ann"
            with (
                DeviceHome(tmp_path / "ann").held(),
                pytest.raises(Conflict, match="a process works in"),
            ):
                await asyncio.to_thread(client.enrol, fresh, at)
            assert await asyncio.to_thread(client.enrol, fresh, at) == "cleo"

    within(story())


def test_an_address_where_nobody_enrols_is_named_with_where_it_is_told(tmp_path):
    token = str(Token(b"s" * 32, b"p" * 32))
    with pytest.raises(Unavailable, match=r"no enrolment port answers at 127\.0\.0\.1:1.*8444"):
        FederatedClient(tmp_path / "ann", shard(0)).enrol(token, "127.0.0.1:1")


@pytest.mark.slow
def test_a_stop_in_the_middle_of_a_task_is_no_error(tmp_path, caplog, monkeypatch):
    begun = asyncio.Event()
    caplog.set_level(logging.INFO, "triplane.device.client")

    class Hears(logging.Handler):
        def emit(self, record):
            if record.msg == "task begun":
                begun.set()

    monkeypatch.setattr(client_module.logger, "handlers", [Hears()])

    async def story():
        async with cloud_of(tmp_path) as cloud:
            client = await client_of(cloud, tmp_path, "ann", 0)
            working = asyncio.create_task(client.serve())
            request = start_request(cohort={"devices": 1}, sampling={"steps": 1_000_000})
            await cloud.federation.begin(request, by="operator")
            await begun.wait()
            client.stop()
            await working

    within(story())
    gc.collect()  # an error that nobody took is told when its future goes
    assert not [record for record in caplog.records if record.name == "asyncio" and record.exc_info]


@pytest.mark.slow
@pytest.mark.parametrize("odd", [-1, 3])
def test_labels_that_the_model_has_no_class_for_are_declined_with_the_reason(tmp_path, odd):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            client = await client_of(cloud, tmp_path, "ann", 0)
            client.shard.train["y"][5] = odd
            async with taking_part(client):
                made = await cloud.federation.begin(
                    start_request(cohort={"devices": 1}), by="operator"
                )
                while True:
                    moved = cloud.federation.moved
                    run = await cloud.federation.run(made.id)
                    if run.members and run.members[0].declined == 2:
                        return run
                    await moved.wait()

    run = within(story())
    ((told,),) = (member.why for member in run.members)
    assert "the model tells 3 classes apart, 0 to 2; labels 'y'" in told.reason
    assert (told.count, run.members[0].dropped) == (2, 2)
    assert run.rounds[0].bytes_down > 0

"""A device in an application: whole runs against a real cloud over mutual TLS."""

import numpy as np
import pytest
from tests.cloud.federation.given import ended, shard, start_request
from tests.device.devices import client_of, cloud_of, taking_part, within

from triplane.proto import federation_pb2 as pb


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

"""What a device fetched is fetched again where a power cut tore it."""

import pytest
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

pytestmark = pytest.mark.slow

SHARD = plans.shard(held_out=6)


def test_a_state_that_a_power_cut_tore_is_fetched_again(tmp_path):
    """States are not synced: their name may be there without their bytes."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            client = client_at(stage, tmp_path / "ann", SHARD)
            async with serving(client):
                await stage.offer()
                task = stage.task(1)
                torn = tmp_path / "ann" / "plans" / task.state.sha256.hex()
                torn.write_bytes(bytes(task.state.size))
                stage.tell(task)
                return await stage.contribution(lease(1)), torn.read_bytes()

    told, bytes_then = within(story())
    assert told.WhichOneof("outcome") == "update"
    assert any(bytes_then)

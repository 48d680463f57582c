"""A plan's limits hold on the device: work past them is declined, after a restart too.

The limit of steps is tested in `test_settling`.
"""

import pytest
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.runtime import Limits

SHARD = plans.shard(held_out=6)


def answer(folder, number, limits):
    """What a device, started anew, contributes to a task of a plan with these limits."""

    async def story():
        async with (
            staged(folder / "stage") as stage,
            serving(client_at(stage, folder / "ann", SHARD)),
        ):
            await stage.offer()
            plan, digest = stage.plan(limits=limits)
            stage.tell(stage.task(number, plan=plan, state=stage.state(digest), learn=pb.Learn()))
            return await stage.contribution(lease(number))

    return within(story())


def test_a_restart_does_not_refill_the_time_of_a_plan(tmp_path):
    limits = Limits(time_s=1e-9)
    first, again = (answer(tmp_path, number, limits) for number in (1, 2))
    assert first.WhichOneof("outcome") == "declined"
    assert again.declined == first.declined, "not a single step was taken after the restart"
    assert "the plan allows 1e-09 s and took" in first.declined


@pytest.mark.parametrize("enough", [True, False])
def test_a_plan_that_allows_less_memory_than_its_state_takes_is_declined(tmp_path, enough):
    need = 2 * sum(x.nbytes for x in plans.state().values())
    told = answer(tmp_path, 1, Limits(memory_bytes=need - (not enough)))
    assert told.WhichOneof("outcome") == ("update" if enough else "declined")
    assert enough or f"allows {need - 1} bytes; its state alone takes {need}" in told.declined

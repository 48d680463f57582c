"""What comes out over gRPC is what comes out in one process, bit for bit."""

import asyncio

import numpy as np
import pytest
from tests.cloud.federation.given import (
    devices_of,
    ended,
    living,
    make_home,
    model_bytes,
    registered,
    start_request,
    update_bytes,
    work_of,
)

from triplane.cloud.federation.spec import hyper_of, with_defaults
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.convert.conversion import read_model
from triplane.unified_ir.federated.algorithms import algorithm, module_of, plan_of
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.files import like_of, read_update
from triplane.unified_ir.federated.core.reduce import reduce
from triplane.unified_ir.runtime import Plan

DEADLINE_S = 60.0
NAMES = ("ann", "bob", "cy")

pytestmark = pytest.mark.slow


async def over_the_wire(folder, request):
    """The ended run, its last shared state, and the registered result."""
    async with asyncio.timeout(DEADLINE_S), running(make_home(folder)) as cloud:
        await registered(cloud, folder)
        devices = await devices_of(cloud, folder, NAMES)
        async with living(devices):
            made = await cloud.federation.begin(request, by="operator")
            run = await ended(cloud, made.id)
        version = await cloud.registry.version(run.result)
        module, digest = read_model(cloud.blobs.find(version.blob))
        assert digest == version.model_digest.hex()
        return run, module, devices


def in_one_process(folder, request, run, devices):
    """The module after the same rounds, without a cloud, a stream or a journal."""
    spec = with_defaults(request.spec)
    row, hyper = algorithm(spec.algorithm), hyper_of(spec)
    source = folder / "source.tpm"
    source.write_bytes(model_bytes(folder))
    module, _ = read_model(source)
    made = plan_of(module, row.name, hyper, folder / "local.plan")
    plan, state = Plan.load(folder / "local.plan"), made.state
    slots: dict[str, np.ndarray] = {}
    for number in range(1, spec.rounds + 1):
        updates = []
        for device in sorted(devices, key=lambda d: d.name):
            task = next(
                k.task for k in device.kept if k.task.round == number and k.told.HasField("update")
            )
            plan.assign(state)
            learned = learn.learn(plan, work_of(task, device.name), device.shard)
            path = folder / f"{device.name}-{number}"
            path.write_bytes(update_bytes(task, learned.change))
            change = read_update(
                path, like_of(state), run=run.id, lease=task.lease.hex(), max_bytes=1 << 30
            )
            updates.append((learned.examples, lambda change=change: change))
        state, slots = reduce(
            state, slots, updates, weighting=row.weighting, server=row.server, hyper=hyper
        )
    return module_of(module, row.name, hyper, state)


@pytest.mark.parametrize(
    ("algorithm", "compression"),
    [
        ("fedadam", "int8"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("maml+adam", ""), ("fedprox", ""), ("maml", ""), ("meta-sgd", "top-k"))
        ),
    ],
)
def test_rounds_over_grpc_equal_the_same_rounds_in_one_process(tmp_path, algorithm, compression):
    request = start_request(
        algorithm=algorithm, compression=compression, cohort={"devices": len(NAMES)}
    )
    run, found, devices = asyncio.run(over_the_wire(tmp_path, request))
    assert run.phase == pb.Run.DONE, run.reason
    expected = in_one_process(tmp_path, request, run, devices)
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert tensor.array.tobytes() == found.state[name].array.tobytes(), name
    start, _ = read_model(tmp_path / "source.tpm")
    changed = [n for n in start.state if not np.array_equal(*arrays(n, start, found))]
    assert changed
    assert set(found.entries) >= {"predict", "evaluate", "adapt"}


def arrays(name, *modules):
    return [module.state[name].array for module in modules]

"""What two devices and a cloud make over gRPC is what core makes in one process, bit for bit."""

import asyncio

import numpy as np
import pytest
from tests.cloud.federation import given
from tests.device.devices import client_of, cloud_of, taking_part
from tests.support.deadlines import within

from triplane.cloud.federation.spec import hyper_of, robustness_of, with_defaults
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.convert.conversion import read_model
from triplane.unified_ir.federated.algorithms import algorithm, module_of, plan_of
from triplane.unified_ir.federated.core import spoilt
from triplane.unified_ir.federated.core.compress import Compressor
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.learn import Work, learn
from triplane.unified_ir.federated.core.reduce import reduce
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.runtime import Plan

pytestmark = pytest.mark.slow

NAMES = ("ann", "bob", "cy")
ROUNDS = 4


async def over_the_wire(folder, *requests):
    """Runs one after the other on the same devices; the result of the last."""
    async with cloud_of(folder) as cloud:
        clients = [await client_of(cloud, folder, name, k) for k, name in enumerate(NAMES)]
        async with taking_part(*clients):
            for request in requests:
                made = await cloud.federation.begin(request, by="operator")
                run = await given.ended(cloud, made.id)
                assert run.phase == pb.Run.DONE, run.reason
        version = await cloud.registry.version(run.result)
        module, _ = await asyncio.to_thread(read_model, cloud.blobs.find(version.blob))
        return module


def in_one_process(folder, request):
    """The same rounds by the functions of core alone; remainders stay with their devices."""
    spec = with_defaults(request.spec)
    row, hyper = algorithm(spec.algorithm), hyper_of(spec)
    (folder / "source.tpm").write_bytes(given.model_bytes(folder))
    module, _ = read_model(folder / "source.tpm")
    made = plan_of(module, row.name, hyper, folder / "local.plan")
    plan, state = Plan.load(folder / "local.plan"), made.state
    slots: dict[str, np.ndarray] = {}
    lost: dict[str, dict[str, np.ndarray]] = {name: {} for name in NAMES}
    for number in range(1, spec.rounds + 1):
        updates = []
        for k, name in enumerate(NAMES):
            plan.assign(state)
            learned = learn(plan, work(spec, number, name), given.shard(k))
            compressor = Compressor(spec.compression, keep=spec.keep or 1.0)
            draws = Draws(spec.seed, number, name, "compression")
            sent, lost[name] = compressor.pack(learned.change, lost[name], draws)
            change = compressor.unpack(sent)
            updates.append((learned.examples, lambda change=change: change))
        state, slots = reduce(
            state, slots, updates, weighting=row.weighting, server=row.server, hyper=hyper
        )
    return module_of(module, row.name, hyper, state)


def work(spec, number, name):
    s = spec.sampling
    return Work(
        run="", round=number, device=name, seed=spec.seed, steps=s.steps,
        batch_size=s.batch_size, support=s.support, query=s.query,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        pytest.param("fedadam", "int8", marks=pytest.mark.long),
        ("maml", "top-k"),
        pytest.param("fedprox", "", marks=pytest.mark.long),
    ],
)
def test_rounds_over_grpc_equal_rounds_in_one_process(tmp_path, name, compression):
    request = given.start_request(
        model="tiny@1", algorithm=name, compression=compression, rounds=ROUNDS,
        keep=0.2 if compression == "top-k" else 0.0, cohort={"devices": 3},
    )  # fmt: skip
    over, alone = (
        within(over_the_wire(tmp_path, request), 120),
        in_one_process(tmp_path, request),
    )
    found = {n: t.array.tobytes() for n, t in over.state.items()}
    assert found == {n: t.array.tobytes() for n, t in alone.state.items()}


@pytest.mark.long
@pytest.mark.parametrize("stated", [0, 6])
def test_scaffold_over_grpc_ends_as_its_study_with_variates_that_stay_on_devices(tmp_path, stated):
    request = given.start_request(
        model="tiny@1", algorithm="scaffold", rounds=ROUNDS, cohort={"devices": 3},
        hyperparameters=pb.Hyperparameters(lr=0.3, other={"population_size": stated}),
    )  # fmt: skip
    # A run before it leaves its control variates on the devices.
    before = pb.StartRequest(spec=request.spec, key=bytes(reversed(request.key)))
    over = within(over_the_wire(tmp_path, before, request), 120)
    alone, _ = scaffold_study(tmp_path, request)
    assert {n: t.array.tobytes() for n, t in over.state.items()} == alone


def scaffold_study(folder, request):
    """The tensors of the model that a study of the same run ends with, and its rounds."""
    spec = with_defaults(request.spec)
    (folder / "source.tpm").write_bytes(given.model_bytes(folder))
    module, _ = read_model(folder / "source.tpm")
    s, hyper = spec.sampling, hyper_of(spec)
    options = Study(
        algorithm="scaffold", hyper=hyper, rounds=spec.rounds, seed=spec.seed, steps=s.steps,
        batch_size=s.batch_size, support=s.support, query=s.query, robustness=robustness_of(spec),
    )  # fmt: skip
    trial = simulate(module, {n: given.shard(k) for k, n in enumerate(NAMES)}, options)
    alone = module_of(module, "scaffold", hyper, trial.state)
    return {n: t.array.tobytes() for n, t in alone.state.items()}, trial.rounds


@pytest.mark.long
def test_scaffold_that_returns_over_grpc_ends_as_its_study(tmp_path, monkeypatch):
    """Control variates begin again after the return, on devices and in the shared state."""
    monkeypatch.setattr(spoilt, "PATIENCE", 1)  # at once, and where losses hardly rise
    monkeypatch.setattr(spoilt, "RISE", 0.005)
    request = given.start_request(
        model="tiny@1", algorithm="scaffold", rounds=6, cohort={"devices": 3},
        hyperparameters=pb.Hyperparameters(lr=2.0), robustness=pb.Robustness(norm_bound="off"),
    )  # fmt: skip
    over = within(over_the_wire(tmp_path, request), 120)
    alone, rounds = scaffold_study(tmp_path, request)
    assert [r.number for r in rounds if r.returned] == [4]
    assert {n: t.array.tobytes() for n, t in over.state.items()} == alone

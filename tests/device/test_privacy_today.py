"""What docs/privacy.md says a stolen cloud can do in spite of signed plans, by its own means."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.cloud.federation import given
from tests.device.stage import RUN, client_at, lease, serving, staged
from tests.federated.core import plans
from tests.runtime.graphs import model
from tests.support.deadlines import within

from triplane.proto import federation_pb2 as pb
from triplane.proto.plan_statement import PlanRule
from triplane.proto.signed_fields import AUTO
from triplane.unified_ir.convert.conversion import read_model
from triplane.unified_ir.federated.algorithms import Hyper, plan_of
from triplane.unified_ir.federated.core.files import like_of, most_bytes, read_update, write_state
from triplane.unified_ir.federated.core.learn import Work, learn, score
from triplane.unified_ir.federated.core.metric import LOSS
from triplane.unified_ir.runtime import Plan

SHARD = plans.shard(held_out=6)
STOLEN = {"w": np.zeros((20, 2), np.float32)}


@pytest.mark.slow
def test_a_stolen_cloud_reads_samples_from_a_tensor_named_as_the_policy_allows(tmp_path):
    """Its key signs within the policy, and a name does not say what a tensor holds."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            stage.signer.allow(tiny=PlanRule(("fedavg",), ("w",)))
            async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                await stage.offer()
                plan, digest = stage.plan(
                    sign=False,
                    entries={"local_update": plans.storing("w")},
                    state=STOLEN,
                    roles={"w": "parameter"},
                )
                stage.signer.sign(stage.folder / "made.plan", AUTO)
                path = tmp_path / "zeros.state"
                write_state(path, STOLEN, {"w": "parameter"}, plan=digest)
                task = stage.task(
                    plan=plan, state=stage.put(path), sampling=pb.Sampling(steps=1, batch_size=20)
                )
                stage.tell(task)
                told = await stage.contribution(lease(1))
                return stage.blobs.find(told.update.blob.sha256)

    like = like_of(STOLEN)
    change = read_update(
        within(story()), like, run=RUN, lease=lease(1).hex(), max_bytes=most_bytes(like)
    )
    stolen = {row.tobytes() for row in change["w"]}
    assert stolen == {row.tobytes() for row in SHARD.train["x"]}


@pytest.mark.long
def test_no_signature_covers_the_state_that_a_round_begins_from(tmp_path):
    """People signed the plan, and a stolen cloud chose the numbers."""

    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(client_at(stage, tmp_path / "ann", SHARD)),
        ):
            await stage.offer()
            plan, digest = stage.plan()
            chosen = np.array([[1e6], [-1e6]], np.float32)
            stage.tell(stage.task(plan=plan, state=stage.state(digest, w=chosen)))
            return await stage.contribution(lease(1))

    assert within(story()).WhichOneof("outcome") == "update"


def test_a_score_can_be_a_number_of_a_sample_to_twelve_bits(tmp_path):
    """A graph of a stolen cloud answers with its input, whose other digits stay on the device."""
    nodes = [
        helper.make_node("Gather", ["x", "zero"], ["row"], axis=0),
        helper.make_node("Gather", ["row", "zero"], ["loss"], axis=0),
    ]
    inputs = {"w": (2, 1), "x": ("N", 2), "y": ("N", 1)}
    evaluate = model(nodes, inputs, {"loss": ()}, {"zero": np.array(0, np.int64)})
    entries = {**plans.spec().entries, "evaluate": evaluate}
    answer, number = score(plans.plan(tmp_path, entries=entries), SHARD), SHARD.held_out["x"][0, 0]
    assert answer == number
    told = LOSS.reported(answer, SHARD.held_out_samples)
    assert told == pytest.approx(float(number), rel=2.0**-12)
    assert told != number


def test_a_graph_can_separate_devices_within_a_sum(tmp_path):
    """Each device writes a sample to a row of its own, so that a masked sum has them all."""
    plan = plans.plan(
        tmp_path,
        entries={"local_update": storing_in_a_row_by_key(1000)},
        state={"w": np.zeros((1000, 2), np.float32), "key": np.zeros(2, np.uint32)},
        roles={"w": "parameter", "key": "key"},
    )
    start, total = plan.state(), np.zeros((1000, 2), np.float32)
    shards = {name: plans.shard(n=1, held_out=0, seed=k) for k, name in enumerate("abcde")}
    for name, shard in shards.items():
        plan.assign(start)
        work = Work(
            run=RUN, round=1, device=name, seed=7, steps=1, batch_size=1, support=0, query=0
        )
        total += learn(plan, work, shard).change["w"]
    rows = {row.tobytes() for row in total}
    assert {shard.train["x"][0].tobytes() for shard in shards.values()} <= rows


def storing_in_a_row_by_key(rows):
    """`local_update` that keeps its first sample in the row that the device's own key gives."""
    node = helper.make_node
    nodes = [
        node("ReduceMean", ["y"], ["loss"], keepdims=0),
        node("Gather", ["key", "first"], ["drawn"]),
        node("Cast", ["drawn"], ["whole"], to=TensorProto.INT64),
        node("Mod", ["whole", "rows"], ["row"]),
        node("Gather", ["x", "zero"], ["sample"]),
        node("ScatterND", ["w", "row", "sample"], ["w:next"]),
        node("Identity", ["key"], ["key:next"]),
    ]
    inputs = {"w": (rows, 2), "key": (2,), "x": ("N", 2), "y": ("N", 1)}
    outputs = {"loss": (), "w:next": (rows, 2), "key:next": (2,)}
    constants = {"first": np.array([[0]]), "zero": np.array([0]), "rows": np.array(rows)}
    return model(nodes, inputs, outputs, constants, types=plans.TYPES)


def test_one_step_on_one_sample_of_an_honest_network_tells_the_sample(tmp_path):
    """x_i = dW_ij / db_j, for the gradient of a dense layer is the product of x and that of b."""
    (tmp_path / "source.tpm").write_bytes(given.model_bytes(tmp_path))
    module, _ = read_model(tmp_path / "source.tpm")
    made = plan_of(module, "fedavg", Hyper(lr=0.1), tmp_path / "honest.plan")
    plan = Plan.load(tmp_path / "honest.plan")
    plan.assign(made.state)
    work = Work(run=RUN, round=1, device="ann", seed=7, steps=1, batch_size=1, support=0, query=0)
    shard = given.shard(0)
    change = learn(plan, work, shard).change
    weight = next(x for x in change.values() if given.FEATURES in x.shape)
    bias = next(x for x in change.values() if x.shape == (8,))
    weight = weight.astype(np.float64) if weight.shape[1] == 8 else weight.T.astype(np.float64)
    j = int(np.abs(bias).argmax())
    nearest = np.abs(shard.train["x"] - weight[:, j] / bias[j]).max(axis=1).min()
    assert nearest < 1e-5

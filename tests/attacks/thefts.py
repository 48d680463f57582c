"""What a thief makes with a cloud's folder: bundles, metadata, and ways to send bytes.

Each attack takes the `Lab`, prepares what it needs, and returns the assignment to tell the node.
"""

import asyncio
import io
import itertools
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import onnx
from tests.attacks import forge
from tests.attacks.endless import endless_for
from tests.attacks.stolen_cloud import MODEL, TARGET
from tests.attacks.trust_stage import forge_chain, load, serve, signed_by

from triplane.cloud.trust.keys import KeyFolder
from triplane.proto import fleet_pb2 as pb
from triplane.proto.transfer_pb2 import DownloadChunk
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime import BundleSpec, write_bundle

RELEASED = f"release/{MODEL}@2+{TARGET}.bundle"
ATTEMPTS = itertools.count(1)


def assigned(path, model=MODEL, version=2, **fields):
    given = {"model": model, "version": version, "target_path": path, "rollout": "thief"}
    return pb.Assignment(**given, attempt=next(ATTEMPTS), **fields)


# Bundles as a thief makes them


def next_version(lab):
    lab.version += 1
    return lab.version


def bundle_bytes(
    lab, version, *, model=None, weights=None, goldens=None, name=MODEL, **constraints
):
    """digits@2, but for what is given; a version of its own."""
    second = lab.second
    held = Container(second._file.path, kind="bundle").tensors("goldens.safetensors")
    split = {kind: dict[str, np.ndarray]() for kind in ("input", "output")}
    for key, tensor in held.items():
        kind, _, of = key.partition(".")
        split[kind][of] = np.array(tensor.data)
    target = constraints.pop("target", TARGET)
    spec = BundleSpec(
        description=replace(
            second.description,
            name=name,
            version=str(version),
            target=target,
            constraints=replace(second.description.constraints, **constraints),
        ),
        model=second.model if model is None else model,
        weights=second.weights if weights is None else weights,
        golden_inputs=split["input"],
        golden_outputs=goldens(split["output"]) if goldens else split["output"],
    )
    path = lab.folder / "made.bundle"
    write_bundle(path, spec)
    return path.read_bytes()


def by_auto(lab, data=None, **changes):
    """An assignment of a bundle that the thief made and signed."""
    version = next_version(lab)
    made = bundle_bytes(lab, version, **changes) if data is None else data
    path = lab.by_auto(f"auto/{MODEL}@{version}+{TARGET}.bundle", made)
    return assigned(path, version=version)


def graph_of(lab):
    return onnx.load_from_string(lab.second.model)


def custom_op(lab):
    graph = graph_of(lab)
    graph.graph.node[0].domain = "evil.ops"
    graph.graph.node[0].op_type = "RunShell"
    graph.opset_import.add(domain="evil.ops", version=1)
    return by_auto(lab, model=graph.SerializeToString())


def outside(location):
    """A graph whose first weight is a file of the node."""

    def attack(lab):
        graph = graph_of(lab)
        tensor = graph.graph.initializer[0]
        kept = {name: x for name, x in lab.second.weights.items() if name != tensor.name}
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        tensor.external_data.add(key="location", value=location)
        return by_auto(lab, model=graph.SerializeToString(), weights=kept)

    return attack


def unfolding(lab):
    """A graph of a few bytes that asks for a terabyte when it runs."""
    graph = graph_of(lab)
    (out,) = graph.graph.output
    last = next(node for node in graph.graph.node if out.name in node.output)
    last.output[0] = "small"
    made = onnx.helper.make_node
    shape = onnx.numpy_helper.from_array(np.array([1 << 38], np.int64), "huge")
    graph.graph.initializer.append(shape)
    graph.graph.node.extend(
        [
            made("ConstantOfShape", ["huge"], ["zeros"]),
            made("ReduceSum", ["zeros"], ["zero"], keepdims=0),
            made("Add", ["small", "zero"], [out.name]),
        ]
    )
    return by_auto(lab, model=graph.SerializeToString())


def never_ending(lab):
    """A graph that takes the processor for ever as soon as its goldens are run."""
    x = Container(lab.second._file.path, kind="bundle").tensors("goldens.safetensors")["input.x"]
    return by_auto(lab, model=endless_for(lab.second.model, "logits", len(x.data)))


def deflated(lab):
    """What any unzip program would unfold to a gigabyte."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made,
        made.open("manifest.pb", "w") as member,
    ):
        for _ in range(64):
            member.write(bytes(1 << 20))
    return by_auto(lab, file.getvalue())


def member_outside(lab):
    path = lab.folder / "members.bundle"
    forge.write(path, forge.manifest({"../../etc/cron.d/job": b"x"}, kind="bundle"))
    return by_auto(lab, path.read_bytes())


def wrong_answers(lab):
    """Honest goldens, but other weights than they were made with."""
    weights = {name: -np.array(x.data) for name, x in lab.second.weights.items()}
    return by_auto(lab, weights=weights)


# Metadata as a thief makes it


def unknown_key(lab):
    KeyFolder(lab.folder / "stranger").make("release")
    made = lab.stage.next_targets(
        "release", [lab.entry(f"release/{MODEL}@7+{TARGET}.bundle", b"x")]
    )
    forge_chain(lab.stage, release=signed_by(lab.folder / "stranger", made, "release"))
    return assigned(f"release/{MODEL}@7+{TARGET}.bundle", version=7)


def one_of_two(lab):
    path = f"release/{MODEL}@8+{TARGET}.bundle"
    made = lab.stage.next_targets("release", [lab.entry(path, b"x")])
    forge_chain(lab.stage, release=signed_by(lab.stage.offline, made, "release-1"))
    return assigned(path, version=8)


def rolled_back(lab):
    snapshot, timestamp = load(lab.stage, "snapshot"), load(lab.stage, "timestamp")
    timestamp.signed.version = 1
    serve(lab.stage, snapshot, timestamp)
    return assigned(RELEASED)


def frozen(lab):
    snapshot, timestamp = load(lab.stage, "snapshot"), load(lab.stage, "timestamp")
    timestamp.signed.version += 1
    timestamp.signed.expires = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
    serve(lab.stage, snapshot, timestamp)
    return assigned(RELEASED)


def mixed(lab):
    old = lab.stage.repository.get(f"{load(lab.stage, 'snapshot').signed.version}.snapshot.json")
    lab.republish()
    newest = load(lab.stage, "snapshot").signed.version
    lab.stage.forged[f"{newest}.snapshot.json"] = old
    return assigned(RELEASED)


def fast_forward(lab):
    snapshot, timestamp = load(lab.stage, "snapshot"), load(lab.stage, "timestamp")
    snapshot.signed.version += 1
    timestamp.signed.version = 2_000_000_000
    serve(lab.stage, snapshot, timestamp)
    return assigned(RELEASED)


def endless_metadata(lab):
    lab.stage.forged["timestamp.json"] = b" " * (5 << 20)
    return assigned(RELEASED)


# Bytes as a thief sends them


async def flipped(data, offset):
    assert offset == 0
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    yield DownloadChunk(size=len(data), data=bytes(changed))


async def endless(data, offset):
    while True:
        yield DownloadChunk(size=len(data), data=data)


async def longer(data, offset):
    yield DownloadChunk(size=1 << 40, data=data[offset:])


async def trickling(data, offset):
    for at in range(offset, len(data)):
        yield DownloadChunk(size=len(data), data=data[at : at + 1])
        await asyncio.sleep(0.01)


async def silent(data, offset):
    yield DownloadChunk(size=len(data), data=data[offset : offset + 100])
    await asyncio.sleep(3600)


def sent(manner):
    """What people signed, sent in a manner of the thief's."""

    def attack(lab):
        lab.manner = manner
        return assigned(RELEASED)

    return attack


def told(path, model, version):
    """No bundle at all, only what the document says."""
    return lambda _lab: assigned(path, model, version)


def released_as(version, model=MODEL, **changes):
    """What people signed for other machines or as another model, told to this node as digits."""

    def attack(lab):
        path = f"release/{model}@{version}+{changes.get('target', TARGET)}.bundle"
        lab.released(path, bundle_bytes(lab, version, name=model, **changes))
        return assigned(path, version=version)

    return attack

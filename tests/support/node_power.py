"""A node that is brought from version to version on a disk that forgets."""

import hashlib
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.faults.crash_disk import CrashDisk, PowerCut

from triplane.edge.agent.attempt import AttemptContext
from triplane.edge.agent.journal import Journal
from triplane.edge.agent.reconciler import Reconciler
from triplane.edge.home import NodeHome
from triplane.edge.serving.pointers import read_pointers
from triplane.proto import fleet_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Corrupt
from triplane.proto.signed.policy import Admission
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import Freshness
from triplane.proto.targets import SignedTarget

MODEL = "m"
BAD = 3
VERSIONS = (1, 2, BAD, 4)
STEPS = 40
OUTCOMES = 5  # what one cut may have left, drawn so often


def content(version):
    return f"bundle of version {version} ".encode() * 50


def path_of(version):
    return f"release/{MODEL}@{version}+ort-x64.bundle"


def digest(version):
    return hashlib.sha256(b"root" + content(version)).hexdigest()


class Signed:
    """Signed metadata that lists every version."""

    def refresh(self):
        return Freshness(is_fresh=True, verified_s=1.0)

    def admit(self, path, *, node, committed_version):
        version = int(path.partition("@")[2].partition("+")[0])
        custom = {
            "model": MODEL, "version": version, "target": "ort-x64",
            "content_digest": digest(version), "model_digest": digest(version),
        }  # fmt: skip
        data = content(version)
        return Admission(SignedTarget(path, len(data), hashlib.sha256(data).digest(), custom))


@dataclass
class Server:
    """What serves: by model, the version whose whole bundle was loaded."""

    served: dict[str, str] = field(default_factory=dict)
    ever: list[str] = field(default_factory=list)

    def load(self, model, path, digest_):
        data = Path(path).read_bytes()
        version = next((v for v in VERSIONS if content(v) == data and digest(v) == digest_), None)
        if version is None:
            raise Corrupt(f"{path} is no bundle")
        self.served[model] = str(version)
        self.ever.append(str(version))

    def unload(self, model):
        del self.served[model]

    def versions(self):
        return dict(self.served)

    def calls(self, model):
        return (20, 0)


def trial(path, *, size, golden=None):
    data = Path(path).read_bytes()
    version = next(v for v in VERSIONS if content(v) == data)
    if version == BAD:
        raise AttemptRefused("golden", "answers wrongly")
    return {
        "model": MODEL, "version": version, "target": "ort-x64", "digest": digest(version),
        "content_digest": digest(version), "model_digest": digest(version),
        "latency_limit_s": 0, "memory_limit_bytes": 0, "adapt_steps": 0,
    }  # fmt: skip


def fetch(sha256, size, into, progress):
    """Downloads in two pieces, going on where an earlier try stopped."""
    data = next(content(v) for v in VERSIONS if hashlib.sha256(content(v)).digest() == sha256)
    if into.has(sha256):
        return into.find(sha256)
    with into.receive(sha256, size) as receiving:
        for cut in (size // 2, size):
            if receiving.stored < cut:
                receiving.write(data[receiving.stored : cut])
                receiving.sync()
                progress(receiving.stored, size)
        return receiving.finish()


@dataclass
class Node:
    """One start of the agent on a home, beside a server that has just started too."""

    home: NodeHome
    disk: CrashDisk
    acknowledged: dict[str, object]

    def __post_init__(self):
        self.server = Server()
        for pointer in read_pointers(self.home.models)[0].values():
            self.server.load(pointer.model, self.home.bundles / pointer.sha256, pointer.digest)
        world = AttemptContext(
            node="n", targets=("ort-x64",), home=self.home,
            blobs=BlobFolder(self.home.bundles, self.disk),
            trust=Signed(), seam=self.server, fetch=fetch,
            journal=Journal(self.home.journal, self.disk), incident=lambda _: None, trial=trial,
            disk=self.disk, clock=lambda: 1.0, pause=lambda _: None, probation_s=1e-9,
        )  # fmt: skip
        self.reconciler = Reconciler(world, lambda: None, self.disk)
        self.journal = world.journal

    def bring(self, version):
        """Take the document and work until nothing is due."""
        desired = pb.Desired(number=version)
        desired.assignments.add(
            model=MODEL, version=version, target_path=path_of(version), attempt=version,
            rollout="r", probation_s=1e-9,
        )  # fmt: skip
        self.reconciler.take(desired)
        self.acknowledged["desired"] = version
        for _ in range(STEPS):
            if self.reconciler.step():
                break
        pointer = self.reconciler.pointers.get(MODEL)
        if pointer:
            self.acknowledged["committed"] = pointer.version


def story(home, disk, acknowledged):
    node = Node(home, disk, acknowledged)
    for version in VERSIONS:
        node.bring(version)
    return node


def made_home(root):
    home = NodeHome(root)
    for folder in (home.models, home.bundles / "partial", home.run, home.logs, home.trust):
        folder.mkdir(parents=True)
    return home


def check(root, acknowledged):
    """What must hold after a power cut: then the node goes on to the end of the story."""
    home = NodeHome(root)
    pointers, broken = read_pointers(home.models)
    assert not broken
    disk = CrashDisk(root)
    try:
        go_on(home, disk, pointers, acknowledged)
    finally:
        disk.close()


def go_on(home, disk, pointers, acknowledged):
    node = Node(home, disk, {})
    committed = pointers[MODEL].version if MODEL in pointers else 0
    assert committed >= acknowledged.get("committed", 0)
    assert committed != BAD
    assert node.server.served == ({MODEL: str(committed)} if committed else {})
    assert node.reconciler.desired.number >= acknowledged.get("desired", 0)
    for version in VERSIONS:
        if version >= acknowledged.get("desired", 0):
            node.bring(version)
    assert node.reconciler.pointers[MODEL].version == VERSIONS[-1]
    assert node.server.served == {MODEL: str(VERSIONS[-1])}


def cuts(folder, *, points, seed, unsynced=()):
    """Cut the power at so many points: spread over all operations, some outcomes of each."""
    whole = made_home(folder / "whole")
    disk = CrashDisk(whole.path)
    story(whole, disk, {}).journal.close()
    operations, rng = disk.count, random.Random(seed)
    for cut in range(points // OUTCOMES):
        root = folder / str(cut)
        home = made_home(root)
        acknowledged: dict[str, object] = {}
        disk = CrashDisk(home.path, fail_at=1 + cut % operations, unsynced=unsynced)
        with pytest.raises(PowerCut):
            story(home, disk, acknowledged)
        disk.close()
        for number in range(OUTCOMES):
            after = folder / f"{cut}-{number}"
            disk.outcome(after, rng)
            check(after, acknowledged)
            shutil.rmtree(after)
        shutil.rmtree(root)
    return operations

"""What stays on the disk while a model waits, and what goes."""

import hashlib
import time
from dataclasses import replace

import pytest
from tests.faults.crash_disk import CrashDisk
from tests.support.node_power import BAD, MODEL, Node, Signed, content, fetch, made_home, trial

from triplane.edge.home import NodeHome
from triplane.proto import fleet_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.disk import OS_DISK
from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.proto.signed.policy import Admission
from triplane.proto.targets import Rule

WAITING = "w"
LOOKS = 20
DEADLINE_S = 30.0


def name_of(version):
    return hashlib.sha256(content(version)).hexdigest()


class Ruled(Signed):
    """Signed metadata with a rule, whose golden set is a file of its own."""

    def admit(self, path, *, node, committed_version):
        plain = super().admit(path, node=node, committed_version=committed_version)
        golden = super().admit(f"release/golden@{BAD}+ort-x64.bundle", node=node,
                               committed_version=0)  # fmt: skip
        rule = Rule(share=1.0, golden="golden/m", metric="accuracy", floor=0.0)
        return Admission(plain.target, rule, golden.target)


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node that serves version 1."""
    monkeypatch.setattr("triplane.edge.agent.reconciler.RETRY_S", 0.01)
    monkeypatch.setattr("triplane.edge.agent.reconciler.MAX_RETRY_S", 60.0)
    disk = CrashDisk(made_home(tmp_path / "n").path)
    made = Node(NodeHome(tmp_path / "n"), disk, {})
    made.bring(1)
    yield made
    disk.close()


def assigned(node, versions, *, is_named=True):
    desired = pb.Desired(number=100)
    for model, version in versions.items():
        desired.assignments.add(
            model=model, version=version, target_path=f"release/{model}@{version}+ort-x64.bundle",
            attempt=version, rollout="r", probation_s=1e-9,
            sha256=bytes.fromhex(name_of(version)) if is_named else b"",
        )  # fmt: skip
    node.reconciler.take(desired)


def looked(node):
    for _ in range(LOOKS):
        node.reconciler.step()


def held(node):
    return {path.name for path in node.home.bundles.iterdir() if path.is_file()}


def changed(node, **changes):
    node.reconciler._context = replace(node.reconciler._context, **changes)


def never_whole(sha256, size, into, progress):
    """Downloads of the waiting model stop in the middle."""
    if sha256.hex() != name_of(4):
        return fetch(sha256, size, into, progress)
    with into.receive(sha256, size) as receiving:
        if not receiving.stored:
            receiving.write(content(4)[: size // 2])
    raise Unavailable("the link is down")


def test_model_that_never_succeeds_does_not_keep_old_bundles_of_others(node):
    changed(node, fetch=never_whole)
    assigned(node, {MODEL: 2, WAITING: 4})
    looked(node)
    assert node.reconciler.pointers[MODEL].version == 2
    assert held(node) == {name_of(2)}
    half = node.home.bundles / "partial" / name_of(4)
    assert half.stat().st_size == len(content(4)) // 2


@pytest.mark.parametrize("old", ["none", "file", "folder"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_no_file_in_the_place_of_a_bundle_is_put_aside_and_fetched_again(node, kind, old):
    changed(node, disk=OS_DISK, blobs=BlobFolder(node.home.bundles))
    if old != "none":
        node.home.damaged.mkdir()
        left = node.home.damaged / "of an earlier damage"
        left.mkdir() if old == "folder" else left.touch()
    path = node.home.bundles / name_of(1)
    path.unlink()
    if kind == "folder":
        path.mkdir()
        (path / "inside").touch()
    else:
        path.symlink_to("nowhere")
    node.server.served.clear()
    refusing_what_is_not_whole(node)
    looked(node)
    assert path.read_bytes() == content(1)
    assert not path.is_symlink()
    assert node.server.served == {MODEL: "1"}
    assert [aside.name for aside in node.home.damaged.iterdir()] == [name_of(1)]


def test_a_folder_in_the_place_of_an_unfinished_download_is_put_aside(node):
    changed(node, disk=OS_DISK, blobs=BlobFolder(node.home.bundles))
    (node.home.bundles / "partial" / name_of(2)).mkdir()
    assigned(node, {MODEL: 2})
    looked(node)
    assert node.server.served == {MODEL: "2"}


def refusing_what_is_not_whole(node):
    """Serving that, as the real one, loads files only."""
    load = node.server.load

    def checked(model, path, digest):
        if not path.exists():
            raise NotFound(f"no bundle {path}")
        if not path.is_file():
            raise InvalidInput(f"{path} is not a regular file")
        load(model, path, digest)

    node.server.load = checked


def refusing(node, *models):
    """Serving that is away whenever one of these models is loaded."""
    load = node.server.load

    def away(model, path, digest):
        if model in models:
            raise Unavailable("serving is away")
        load(model, path, digest)

    node.server.load = away
    return load


@pytest.mark.parametrize("is_named", [True, False])
def test_what_a_waiting_model_has_downloaded_stays_until_it_serves(node, is_named):
    changed(node, trust=Ruled(), trial=lambda *a, **k: {**trial(*a, **k), "accuracy": 1.0})
    load = refusing(node, WAITING)
    assigned(node, {MODEL: 2, WAITING: 4}, is_named=is_named)
    looked(node)
    assert held(node) == {name_of(2), name_of(4), name_of(BAD)}
    node.server.load = load
    until_s = time.monotonic() + DEADLINE_S
    node.reconciler._pauses.clear()
    while held(node) != {name_of(2), name_of(4)}:
        assert time.monotonic() < until_s
        node.reconciler.step()
    assert node.server.served == {MODEL: "2", WAITING: "4"}


@pytest.mark.parametrize("is_named", [True, False])
def test_bundle_of_a_model_that_waits_for_metadata_stays(node, is_named):
    class Gone(Signed):
        def admit(self, path, *, node, committed_version):
            if WAITING in path.partition("@")[0].rpartition("/")[2]:
                raise Unavailable("its role's metadata cannot be fetched")
            return super().admit(path, node=node, committed_version=committed_version)

    node.reconciler._context.blobs.put(content(4))
    changed(node, trust=Gone())
    assigned(node, {MODEL: 2, WAITING: 4}, is_named=is_named)
    looked(node)
    assert name_of(4) in held(node)
    assert (name_of(1) in held(node)) == (not is_named), "an older cloud names no content"

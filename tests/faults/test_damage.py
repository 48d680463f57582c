"""Files of a node's home that are damaged while it is down: what serves, what the cloud says."""

import hashlib
import json

import pytest
from tests.faults.damages import DAMAGES, bundle_of, truncate
from tests.faults.fleet import fleet, verb, wait_until, write_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL, OTHER = "eyes", "lenet"  # the damaged model comes first in the order of names
WAIT_S = 120.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A cloud and one node that serves two models; a second version of OTHER is signed."""
    folder = tmp_path_factory.mktemp("f")
    with fleet(folder) as running:
        node = running.add_node("node-a")
        running.publish(write_model(folder / "eyes.tpm", 5), MODEL)
        for seed in (0, 1):
            running.publish(write_model(folder / f"m{seed}.tpm", seed), OTHER)
        running.deploy(f"{MODEL}@1")
        running.deploy(f"{OTHER}@1")
        yield running, node


def model_of(running, model):
    shown = running.ask("fleet", "show", "node-a")
    return next((m for m in shown["report"]["models"] if m["model"] == model), {})


def serves(running, model, version):
    return model_of(running, model).get("committed_version") == version


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_replaced_and_stops_no_other_model(lab, damage):
    running, node = lab
    node.supervisor.stop()
    damage(node, MODEL)
    node.supervisor.start()
    version = 3 - node.committed(OTHER)
    running.deploy(f"{OTHER}@{version}")
    assert node.committed(OTHER) == version
    running.deploy(f"{MODEL}@1")
    wait_until(lambda: serves(running, MODEL, 1), f"{MODEL}@1 to serve again", WAIT_S)
    path = bundle_of(node, MODEL)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    assert "step failed" not in (node.home / "logs" / "agent.log").read_text()


def test_what_cannot_be_fetched_again_is_said_and_stops_no_other_model(lab):
    """The cloud has lost the bundle and the model of which it would make the bundle again."""
    running, node = lab
    blobs, away = running.home / "blobs", running.folder / "away"
    model = blobs / running.ask("registry", "show", f"{MODEL}@1")["blob"]
    (blobs / bundle_of(node, MODEL).name).unlink()
    model.rename(away)
    try:
        node.supervisor.stop()
        truncate(node, MODEL)
        node.supervisor.start()
        version = 3 - node.committed(OTHER)
        running.deploy(f"{OTHER}@{version}")
        told = wait_until(
            lambda: not serves(running, MODEL, 1) and model_of(running, MODEL), "the truth", WAIT_S
        )
        assert "damaged" in told["reason"], told
    finally:
        away.rename(model)
    wait_until(lambda: serves(running, MODEL, 1), f"{MODEL}@1 to serve again", WAIT_S)


def test_a_bundle_that_cloud_and_node_have_lost_is_made_again_and_served(lab):
    running, node = lab
    name = bundle_of(node, MODEL).name
    (running.home / "blobs" / name).unlink()
    node.supervisor.stop()
    truncate(node, MODEL)
    node.supervisor.start()
    running.deploy(f"{MODEL}@1")
    wait_until(lambda: serves(running, MODEL, 1), f"{MODEL}@1 to serve again", WAIT_S)
    for made in (running.home / "blobs" / name, node.home / "bundles" / name):
        assert hashlib.sha256(made.read_bytes()).hexdigest() == name


def test_a_spoiled_clock_file_stops_new_versions_only(lab):
    running, node = lab
    node.supervisor.stop()
    (node.home / "trust" / "latest-time").write_bytes(b"no time")
    node.supervisor.start()
    wait_until(lambda: serves(running, MODEL, 1), f"{MODEL}@1 to serve", WAIT_S)
    version = 3 - node.committed(OTHER)
    refused = running.deploy(f"{OTHER}@{version}", "--node-deadline", "5s", check=False)
    assert "latest-time" in json.dumps(refused)
    (node.home / "trust" / "latest-time").unlink()
    running.ask("rollout", "resume", "last", check=False)
    wait_until(lambda: serves(running, OTHER, version), "the version after all", WAIT_S)


def test_a_node_that_is_enrolled_again_while_it_runs_keeps_its_labels_and_gets_bundles(lab):
    running, node = lab
    assert verb("edge", "status", "--home", node.home)["refusal"] == ""
    running.ask("cloud", "revoke", node.name)
    refused = verb("edge", "status", "--home", node.home, check=False)
    assert "is revoked" in refused["refusal"]
    token = running.ask("cloud", "token", "--role", "node", "--name", node.name)["token"]
    settings = (node.home / "node.json").read_text()
    verb("edge", "enrol", token, "--cloud", f"127.0.0.1:{running.enrol_port}", "--home", node.home)
    assert (node.home / "node.json").read_text() == settings
    assert running.ask("fleet", "show", node.name)["labels"] == {"site": "lab"}
    assert running.publish(write_model(running.folder / "m9.tpm", 9), OTHER) == 3
    running.deploy(f"{OTHER}@3")
    assert node.committed(OTHER) == 3

"""A cloud whose backup is restored: its numbers are used again, for other content."""

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.faults.fleet import RECONNECT, fleet, wait_until, write_model

from triplane.edge.serving.pointers import read_pointers

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL = "lenet"
X = np.ones((1, 1, 8, 8), np.float32)


def answer(port):
    """What the node says to the same input."""
    client = triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=[*RECONNECT.items()])
    try:
        tensor = triton.InferInput("x", X.shape, "FP32")
        tensor.set_data_from_numpy(X)
        found = client.infer(MODEL, [tensor])
        return found.as_numpy(found.get_response().outputs[0].name)
    finally:
        client.close()


def pointer(node):
    return read_pointers(node.home / "models")[0][MODEL]


@pytest.fixture
def lab(tmp_path):
    """A cloud whose backup knows lenet@1 only, and a node that serves lenet@2."""
    with fleet(tmp_path) as running:
        node = running.add_node("node-a")
        running.publish(write_model(tmp_path / "m0.tpm", 0), MODEL)
        running.deploy(f"{MODEL}@1")
        running.back_up()
        running.publish(write_model(tmp_path / "m1.tpm", 1), MODEL)
        running.deploy(f"{MODEL}@2")
        yield running, node, tmp_path


def test_a_number_used_again_for_other_content_is_no_commit_until_it_is_replaced(lab):
    running, node, folder = lab
    old, before = answer(node.port), pointer(node)
    node.supervisor.stop()
    running.restore()
    # The folder of keys has seen a newer list than the cloud has, and signs only when told so.
    with pytest.raises(AssertionError, match="have seen release") as refused:
        running.publish(write_model(folder / "m2.tpm", 2), MODEL)
    running.go_past([str(refused.value)])
    running.ask("sign", f"{MODEL}@2", "--target", "ort-x64", "--keys", running.keys)
    running.deploy(f"{MODEL}@2", "--detach")
    assert running.ask("rollout", "show", "last")["state"] != "done"
    node.supervisor.start()
    wait_until(lambda: running.ask("rollout", "show", "last")["state"] == "done", "the rollout")
    after = pointer(node)
    assert (before.version, after.version) == (2, 2)
    assert before.sha256 != after.sha256
    assert not np.array_equal(answer(node.port), old)
    assert running.ask("cloud", "status")["warnings"] == []


def test_a_restored_cloud_says_that_nodes_are_ahead_and_what_to_do(lab):
    running, node, _ = lab
    running.restore()
    warnings = running.warned_of_nodes_ahead()
    assert any(f"{MODEL}@2, which this cloud did not assign" in text for text in warnings)
    running.go_past(warnings)
    wait_until(lambda: node.committed() == 1, "the node to serve what the cloud knows")
    wait_until(lambda: not running.ask("cloud", "status")["warnings"], "the end of the warnings")

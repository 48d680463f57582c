"""Deploys to real nodes under load, and what is killed in the middle."""

import time

import numpy as np
import pytest
from tests.faults.fleet import Load, fleet, wait_until, write_model

X = np.zeros((1, 1, 8, 8), np.float32)

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A cloud and one node that serves version 1 of two signed versions."""
    folder = tmp_path_factory.mktemp("f")
    with fleet(folder) as running:
        node = running.add_node("node-a")
        for seed in (0, 1):
            running.publish(write_model(folder / f"m{seed}.tpm", seed))
        running.deploy("lenet@1")
        assert node.committed() == 1
        yield running, node


def test_twenty_switches_under_load_fail_no_call(lab):
    running, node = lab
    with Load(node.port, "lenet", X) as load:
        for turn in range(20):
            version = 1 + (turn + node.committed()) % 2
            running.deploy(f"lenet@{version}")
            assert node.committed() == version
    assert load.errors == []
    assert load.answered == load.sent > 500


@pytest.mark.parametrize("victim", ["agent", "supervisor"])
def test_killing_what_does_not_serve_fails_no_call(lab, victim):
    running, node = lab
    before = node.pid("agent")
    with Load(node.port, "lenet", X) as load:
        node.kill(victim)
        if victim == "agent":
            wait_until(lambda: node.pid("agent") not in {None, before}, "another agent")
        version = 3 - node.committed()
        running.deploy(f"lenet@{version}")
        assert node.committed() == version
    assert load.errors == []


def test_killing_the_cloud_in_a_rollout_fails_no_call_and_the_rollout_ends(lab):
    running, node = lab
    version = 3 - node.committed()
    with Load(node.port, "lenet", X) as load:
        running.deploy(f"lenet@{version}", "--detach")
        running.restart_cloud()
        wait_until(lambda: node.committed() == version, "the commit")
        wait_until(
            lambda: running.ask("rollout", "show", "last")["state"] == "done", "the end of it"
        )
    assert load.errors == []


def test_killed_serving_is_back_and_no_call_fails_after_the_first_answer(lab):
    _, node = lab
    with Load(node.port, "lenet", X) as load:
        began_s = time.monotonic()
        node.kill("serving")
        outage = (began_s, time.monotonic())
        wait_until(lambda: load.errors, "a failed call")
        answered = load.answered
        wait_until(lambda: load.answered > answered + 10, "answers again")
    assert load.unexplained([outage]) == []
    assert all("UNAVAILABLE" in text for _, _, text in load.errors), load.errors[:3]


def test_a_failure_after_the_first_answer_is_not_explained_by_the_outage_before_it():
    load = Load(1, "lenet", X)
    load.errors, load.served_s = [(1.0, 1.1, "a"), (3.0, 3.1, "b"), (5.0, 5.1, "c")], [0.5, 4.0]
    assert load.unexplained([(0.9, 1.05)]) == [(5.0, 5.1, "c")]
    assert load.unexplained([(0.9, 1.05), (4.5, 4.6)]) == []
    assert load.unexplained([]) == load.errors

"""The whole loop with real processes: devices learn, the result goes live, a node adapts it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from examples import federated_digits as questions
from tests.faults.fleet import RECONNECT, Load, fleet, verb, wait_until

from triplane.edge.agent.adapting import split
from triplane.unified_ir.federated.core.draws import Draws

MODEL = "question"
ROUNDS = 40
WAIT_S = 120.0
DEVICES = 3


@pytest.fixture(scope="module")
def shards():
    return questions.shards(0)


def write_samples(path, shard):
    """All samples of a shard in one file."""
    x, y = (np.concatenate([shard.train[n], shard.held_out[n]]) for n in ("x", "y"))
    np.savez(path, x=x, y=y)
    return path


def write_episodes(path, shards):
    """Signed episodes: each shard's support and query, for questions that nobody trains on."""
    parts: dict[str, list[Any]] = {f"{s}.{n}": [] for s in ("support", "query") for n in "xy"}
    for name, shard in shards.items():
        order = Draws(1, 0, name, "episode").permutation(shard.examples)
        for what, rows in (("support", order[:40]), ("query", order[40:80])):
            parts[f"{what}.x"].append(shard.train["x"][rows])
            parts[f"{what}.y"].append(shard.train["y"][rows])
    arrays = {name: np.stack(found) for name, found in parts.items()}
    np.savez(path, allow_pickle=False, **arrays)
    return path


class Device:
    """A device process that learns from a file."""

    def __init__(self, cloud, folder, name, shard):
        home, data = folder / name, write_samples(folder / f"{name}.npz", shard)
        token = cloud.ask("cloud", "token", "--role", "device", "--name", name)["token"]
        enrol = (
            "import sys; from triplane.device import FederatedClient as C; "
            "C(sys.argv[1], sys.argv[2], population='askers').enrol(sys.argv[3], sys.argv[4])"
        )
        address = f"127.0.0.1:{cloud.enrol_port}"
        subprocess.run(
            [sys.executable, "-c", enrol, home, data, token, address], check=True, timeout=60
        )
        with (folder / f"{name}.log").open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "triplane.device", home, "--data", data],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.child.stdout
        self.said = json.loads(self.child.stdout.readline())

    def stop(self):
        self.child.terminate()
        self.child.wait(30)
        if self.child.stdout:
            self.child.stdout.close()


def accuracy(port, samples):
    """Share of right answers of the node, asked through the unmodified client."""
    client = triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=[*RECONNECT.items()])
    try:
        right = 0
        for x, y in zip(samples["x"], samples["y"], strict=True):
            tensor = triton.InferInput("x", [1, *x.shape], "FP32")
            tensor.set_data_from_numpy(x[None])
            right += int(client.infer(MODEL, [tensor]).as_numpy("logits").argmax() == y)
        return right / len(samples["y"])
    finally:
        client.close()


@pytest.mark.slow
@pytest.mark.long
def test_what_devices_learn_goes_live_adapted_where_it_serves(tmp_path, shards):
    names = sorted(shards)
    node_shard = shards[names[-1]]
    questions.model(0).save(tmp_path / "question.tpm")
    with fleet(tmp_path) as cloud:
        node = cloud.add_node("camera")
        samples = write_samples(tmp_path / "own.npz", node_shard)
        verb("edge", "samples", MODEL, samples, "--home", node.home)
        first = cloud.publish(tmp_path / "question.tpm", MODEL)
        cloud.deploy(f"{MODEL}@{first}")
        wait_until(lambda: node.committed(MODEL) == first, "the first version", WAIT_S)
        with np.load(samples) as file:
            _, held_out = split(dict(file), f"camera\0{MODEL}")
        before = accuracy(node.port, held_out)
        golden = write_episodes(tmp_path / "episodes.npz", {n: shards[n] for n in names[6:9]})
        cloud.ask(
            "cloud", "policy", "set", MODEL, "--golden", golden, "--floor", "55%",
            "--share", "100%", "--keys", cloud.keys,
        )  # fmt: skip
        cloud.ask("cloud", "policy", "set-plans", MODEL, "--keys", cloud.keys)
        devices = [Device(cloud, tmp_path, name, shards[name]) for name in names[:DEVICES]]
        with ExitStack() as stack:
            load = stack.enter_context(Load(node.port, MODEL, held_out["x"][:1]))
            for device in devices:
                stack.callback(device.stop)
            run = cloud.ask(
                "federate", "run", f"{MODEL}@{first}", "--population", "askers",
                "--algorithm", "maml", "--rounds", ROUNDS, "--devices", DEVICES,
                "--quorum", "1", "--lr", "0.5", "--meta-lr", "0.5", "--steps", "4",
                "--support", "40", "--query", "40", "--release", "auto",
            )  # fmt: skip
            assert run["phase"] == "done", run
            assert run["result"] == f"{MODEL}@{first + 1}"
            wait_until(lambda: node.committed(MODEL) == first + 1, "the adapted result", WAIT_S)
        after = accuracy(node.port, held_out)
        assert after > before + 0.1, (before, after)
        assert load.errors == []
        assert load.answered > 100
        assert '"ADAPTED"' in (node.home / "journal").read_text()

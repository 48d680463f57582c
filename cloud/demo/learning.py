"""The last part of the demo: six devices train a model, which is released and adapted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from triplane.cloud.demo import asking, processes
from triplane.cloud.demo.ask import ask
from triplane.cloud.demo.asking import INNER_STEPS, LEARNING, RATES, answered
from triplane.cloud.demo.fleet import NODES, STEP_S, DemoFleet, until
from triplane.cloud.demo.question import Question
from triplane.cloud.demo.rolling import TARGET, roll_out
from triplane.cloud.demo.stage import DemoStage
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.data.dataset import Dataset, arrays
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import RoundRow, Trial, picture
from triplane.unified_ir.ops.check import load

MODEL: Final = "question"
POPULATION: Final = "askers"
STEPS: Final = 2
RATE: Final = {"fedavg": 0.3, "maml": 0.5}
FLOOR: Final = "55%"
LEAST_COHORT: Final = "3"
"""Fewest devices whose sum the cloud may learn; the signed policy for plans demands it."""
LOST_SHARE: Final = "0.34"
"""Two of six: both devices that are killed may be lost in the same round."""
COLLUDING_SHARE: Final = "0"
"""Six devices cannot hold against two lost and one that colludes with the cloud."""
KILL_AT: Final = 25
BACK_AT: Final = 40
DONE: Final = ("committed", "kept")
PAUSE_S: Final = 1.0
"""Pause between two passes of a client over its samples: about 50 calls a second."""


def learn(stage: DemoStage, fleet: DemoFleet) -> bool:
    """Train by FedAvg and exact MAML on six devices; False if there are too few samples."""
    data = _all(stage)
    if len(data) < asking.LEAST_SAMPLES:
        stage.summary.add(
            "learn", "skipped", f"{len(data)} samples are too few for {asking.DEVICES} devices"
        )
        return False
    shards = asking.shards_of(data)
    names = sorted(shards)
    stage.say(
        f"\n9  Learn together: {LEARNING} device processes, each with a question of its own "
        '("is this one of my five?"); their samples never leave them'
    )
    _first_version(stage, fleet)
    _serve_first(stage, fleet, shards)
    with _devices(stage, fleet, {n: shards[n] for n in names[:LEARNING]}) as devices:
        runs = {"fedavg": _run(stage, fleet, "fedavg")}
        killer = _DeviceKiller(fleet, devices[-2:])
        killer.start()
        clients = [_AskingClient(stage, fleet, node, shards[name]) for node, name in _homes(names)]
        with contextlib.ExitStack() as asked:
            for client in clients:
                asked.enter_context(client)
            runs["maml"] = _run(stage, fleet, "maml", "--release", "auto")
            killer.join()
            until("both nodes done with it", lambda: _both_done(fleet, runs["maml"]))
            kept = _reasons_to_keep(fleet)
    stage.say(f"   {killer.message}")
    _tell_sums(stage, runs)
    _compare(stage, fleet, runs, shards, killer)
    _gone_live(stage, clients, runs["maml"], kept)
    return True


def _all(stage: DemoStage) -> Dataset:
    parts = (stage.train, stage.held_out)
    x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y"))
    return arrays(x, y, labels=stage.train.labels)


def _homes(names: list[str]) -> list[tuple[str, str]]:
    """Return (node, device whose question it answers): the first and last that take no part."""
    return list(zip(NODES, (names[LEARNING], names[-1]), strict=True))


def _first_version(stage: DemoStage, fleet: DemoFleet) -> None:
    """Register the untrained network; sign a policy by which devices run its plans."""
    nn.seed(0)
    trainer = train.Trainer(Question(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, *stage.train.x.shape[1:]), np.float32), np.zeros(1, np.int64))
    trainer.export(("predict", "evaluate", "loss")).save(stage.file("question.tpm"))
    fleet.ask("registry", "push", stage.file("question.tpm"), "--name", MODEL, "--target", TARGET)
    fleet.ask(
        "cloud", "policy", "set-plans", f"{MODEL}@1", "--algorithm", "fedavg", "--algorithm",
        "maml", "--least-devices", LEAST_COHORT, "--least-batch", "20", "--masked",
        COLLUDING_SHARE, "--keys", fleet.offline_keys,
    )  # fmt: skip
    stage.say(
        "   signed offline: devices run plans of this model only, and send updates only in masked "
        f"rounds: the cloud sees sums of at least {LEAST_COHORT} devices only"
    )


def _serve_first(stage: DemoStage, fleet: DemoFleet, shards: dict[str, Shard]) -> None:
    """Let both nodes serve it and hold labelled samples; sign the policy for later releases."""
    names = sorted(shards)
    for node, name in _homes(names):
        own = asking.save(stage.file(f"{node}.npz"), shards[name])
        processes.output("edge", "samples", MODEL, own, "--home", fleet.homes[node], "--json")
    fleet.ask("sign", f"{MODEL}@1", "--target", TARGET, "--keys", fleet.offline_keys)
    roll_out(fleet, f"{MODEL}@1")
    others = {name: shards[name] for name in names[LEARNING + 1 : -1]}
    episodes = asking.save_episodes(stage.file("episodes.npz"), others)
    fleet.ask(
        "cloud", "policy", "set", MODEL, "--golden", episodes, "--floor", FLOOR,
        "--share", "100%", "--keys", fleet.offline_keys,
    )  # fmt: skip


class DeviceProcess(contextlib.ExitStack):
    """A device process, which ends when it is closed; `start` restarts it after a kill."""

    def __init__(self, name: str, home: Path, log: Path) -> None:
        super().__init__()
        self.name, self.home, self._log = name, home, log

    def start(self) -> None:
        """Start the process; return when it is ready."""
        command = ("device", "run", "--home", self.home)
        self._child, _ = self.enter_context(processes.started(*command, log=self._log))

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._child.kill()
        self.close()


@contextlib.contextmanager
def _devices(
    stage: DemoStage, fleet: DemoFleet, shards: dict[str, Shard]
) -> Iterator[list[DeviceProcess]]:
    """Enroll and run devices, each with its own samples."""
    devices = [DeviceProcess(n, stage.file(n), stage.file(f"{n}.log")) for n in shards]

    def begin(device: DeviceProcess) -> None:
        samples = asking.save(stage.file(f"{device.name}.npz"), shards[device.name])
        where = ("--population", POPULATION, "--data", samples)
        fleet.enrol("device", device.name, device.home, *where)
        device.start()

    with contextlib.ExitStack() as running:
        # Registered once: `close` ends whichever process of a device is running then.
        for device in devices:
            running.callback(device.close)
        # At the same time, as six people would: most of it is waiting for processes to start.
        with ThreadPoolExecutor(len(devices)) as pool:
            list(pool.map(begin, devices))
        fleet.ask("cloud", "roster", "add", "--all", "--keys", fleet.offline_keys)
        stage.say(f"   signed offline: masked rounds have no device but these {len(devices)}")
        yield devices


def _run(stage: DemoStage, fleet: DemoFleet, algorithm: str, *more: str) -> dict[str, Any]:
    """Run one algorithm for the demo's rounds, showing its progress; return its record."""
    rate = str(RATE[algorithm])
    stage.say(f"\n   {algorithm}: {stage.rounds} rounds of {LEARNING} devices")
    code = fleet.followed(
        "federate", "run", f"{MODEL}@1", "--population", POPULATION, "--algorithm", algorithm,
        "--rounds", str(stage.rounds), "--devices", str(LEARNING), "--quorum", "0.6",
        "--patience", "2s", "--steps", str(STEPS), "--batch-size", "40", "--support", "40",
        "--query", "40", "--lr", rate, "--meta-lr", rate, "--inner-steps", str(INNER_STEPS),
        "--mask", "--least-cohort", LEAST_COHORT, "--lost-share", LOST_SHARE,
        "--colluding-share", COLLUDING_SHARE, *more,
    )  # fmt: skip
    run: dict[str, Any] = fleet.ask("federate", "show", "last")
    if code or run["phase"] != "done":
        raise processes.ProcessFailed(f"the run ended {run['phase']}: {run.get('reason', '')}")
    return run


class _DeviceKiller(threading.Thread):
    """Kills two devices in the middle of the next run; one of them comes back."""

    def __init__(self, fleet: DemoFleet, victims: list[DeviceProcess]) -> None:
        super().__init__(name="killer", daemon=True)
        self._fleet, self._victims = fleet, victims
        self.killed = self.back = 0
        self.message = ""

    def run(self) -> None:
        """Watch the run until then."""
        # The run may end before the last round that this waits for; the demo goes on without a
        # kill.
        with contextlib.suppress(processes.ProcessFailed, OSError):
            self.killed = self._round(KILL_AT)
            for device in self._victims:
                device.kill()
            self.back = self._round(BACK_AT)
            self._victims[0].start()
            first, second = (device.name for device in self._victims)
            self.message = (
                f"{first} and {second} died by kill -9 in round {self.killed}; {first} came back "
                f"in round {self.back}"
            )

    def _round(self, number: int) -> int:
        """Wait for a round of the current run."""
        while True:
            record = self._fleet.ask("federate", "show", "last")
            at = int(record.get("round", 0))
            if record["spec"]["algorithm"] == "maml" and at >= number:
                return at
            threading.Event().wait(STEP_S)


class _AskingClient:
    """Asks a node its own question repeatedly, with calls that are never retried."""

    def __init__(self, stage: DemoStage, fleet: DemoFleet, node: str, shard: Shard) -> None:
        self.node = node
        self._address = fleet.serving_address(node)
        self._shard = shard
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"client of {node}")
        self.accuracies: list[float] = []
        self.calls, self.error = 0, ""

    def __enter__(self) -> Self:
        self._once()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._once()

    def _ask(self) -> None:
        while not self._stop.wait(PAUSE_S):
            self._once()

    def _once(self) -> None:
        samples = self._shard.held_out
        try:
            answers = ask(self._address, MODEL, samples["x"], samples["y"])
        except Exception as error:  # noqa: BLE001 - whatever a client may raise is a failed call
            self.error = self.error or f"{type(error).__name__}: {error}"
            self._stop.set()
            return
        self.calls += answers.calls
        self.accuracies.append(answers.accuracy)


def _both_done(fleet: DemoFleet, run: dict[str, Any]) -> bool:
    """Return whether each node serves the result, or keeps its version because it is better."""
    version = int(run["result"].rpartition("@")[2])
    models = fleet.models(MODEL).values()
    return all(m.get("version") == version and m.get("state") in DONE for m in models)


def _reasons_to_keep(fleet: DemoFleet) -> dict[str, str]:
    """Return the reasons of nodes that keep the older version, by name."""
    return {
        name: str(m["reason"])
        for name, m in fleet.models(MODEL).items()
        if m.get("state") == "kept"
    }


def _tell_sums(stage: DemoStage, runs: dict[str, Any]) -> None:
    """Say what the cloud has seen of the updates."""
    ended = [r for run in runs.values() for r in run["rounds"] if not r.get("evaluates")]
    sums = [int(r["counted"]) for r in ended if not r.get("given_up")]
    bounds = [float(r["norm_bound"]) for r in ended if r.get("norm_bound")]
    stage.say(
        f"   the cloud has seen {len(sums)} sums, each over {min(sums)} or more devices, and no "
        "single update; a device has seen neither updates nor names of the others"
    )
    stage.summary.add(
        "learn", "masked rounds", f"{len(sums)} sums over {min(sums)} to {max(sums)} devices, "
        f"norm bounds of {min(bounds):.2g} to {max(bounds):.2g}, by masked bits; "
        f"{len(ended) - len(sums)} rounds given up",
        least_sum=min(sums), rounds_given_up=len(ended) - len(sums),
    )  # fmt: skip


def _compare(
    stage: DemoStage,
    fleet: DemoFleet,
    runs: dict[str, Any],
    shards: dict[str, Shard],
    killer: _DeviceKiller,
) -> None:
    """Compare both results on all twelve devices, six of which took no part."""
    stage.say("\n   accuracy in percent, on samples not used for training or adapting:")
    for row in (("six that learned", "", "six others", ""), ("mean", "worst", "mean", "worst")):
        stage.say(" " * 35 + "".join(f"{cell:>18}" for cell in row))
    trials: list[Trial] = []
    means: dict[str, list[float]] = {}
    for name, run in runs.items():
        rate, trial = _trial(stage, fleet, name, run, shards)
        parts = [part for seen in (True, False) if (part := trial.summary(seen=seen))]
        before = [share for part in parts for share in (part.before, part.before_worst_tenth)]
        after = [share for part in parts for share in (part.after, part.after_worst_tenth)]
        for what, shares in ((name, before), (f"{name}, adapted at rate {rate:g}", after)):
            stage.say(f"   {what:32}" + "".join(f"{100 * share:>18.1f}" for share in shares))
        trials.append(trial)
        means[name] = after[::2]
    stage.file("learning.svg").write_text(
        picture(trials, "Twelve devices, a question each: before and after adaptation")
    )
    gain = [100 * (a - b) for a, b in zip(means["maml"], means["fedavg"], strict=True)]
    stage.summary.add(
        "learn", "maml against fedavg", f"adapted {100 * means['maml'][0]:.1f} % against "
        f"{100 * means['fedavg'][0]:.1f} %; on devices that never learned "
        f"{100 * means['maml'][1]:.1f} % against {100 * means['fedavg'][1]:.1f} %",
        learned_accuracy=means, learned_gain_points=gain, killed_devices_at=killer.killed,
    )  # fmt: skip


def _trial(
    stage: DemoStage, fleet: DemoFleet, name: str, run: dict[str, Any], shards: dict[str, Shard]
) -> tuple[float, Trial]:
    """Return the result's scores at the rate that is best for the devices that took part."""
    file = stage.file(f"question-{name}.tpm")
    fleet.ask("registry", "pull", run["result"], "--out", file)
    module, rates = load(file), RATES if name == "fedavg" else (RATE[name],)
    sweep = {rate: answered(module, name, rate, shards, stage.rounds) for rate in rates}
    rounds = [r for r in run["rounds"] if not r.get("evaluates")]
    sent, received = (sum(int(r.get(key, 0)) for r in rounds) for key in ("bytes_up", "bytes_down"))
    last = RoundRow(stage.rounds, LEARNING, 0.0, sent, received, 0.0)
    best = Trial(name, [last], (), sweep, {}).best_rate(seen=True)
    assert best is not None
    return best[0], Trial(name, [last], sweep[best[0]], {}, {})


def _gone_live(
    stage: DemoStage, clients: list[_AskingClient], run: dict[str, Any], kept: dict[str, str]
) -> None:
    """Report what the clients of the nodes measured."""
    stage.say(f"\n10 Live: {run['result']} was released automatically, under the signed policy")
    failed = [f"{c.node}: {c.error}" for c in clients if c.error]
    if failed:
        raise processes.ProcessFailed(f"a call failed while versions changed: {'; '.join(failed)}")
    for client in clients:
        before, after = client.accuracies[0], client.accuracies[-1]
        if client.node in kept:
            stage.say(f"   {client.node} keeps the older version: {kept[client.node]}")
            continue
        stage.say(
            f"   {client.node} adapted it to its own samples and answers its own question: "
            f"accuracy {before:.3f} before, {after:.3f} now; {client.calls} calls, none failed"
        )
    stage.summary.add(
        "live", run["result"], f"{clients[0].node} {clients[0].accuracies[0]:.3f} -> "
        f"{clients[0].accuracies[-1]:.3f} on its own question; "
        f"{sum(c.calls for c in clients)} calls, none failed",
        live_before=[c.accuracies[0] for c in clients],
        live_after=[c.accuracies[-1] for c in clients], live_kept=sorted(kept),
    )  # fmt: skip

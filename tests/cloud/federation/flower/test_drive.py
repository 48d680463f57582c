"""Strategies driven turn by turn as a run's process drives them, without a cloud around."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra [flower]")

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower

from triplane.cloud.federation.flower.adapter import message_of, record_of
from triplane.cloud.federation.flower.drive import Drive, make_strategy
from triplane.cloud.federation.flower.spec import SHIPPED
from triplane.device.flower import app_reply
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir.federated.core.files import read_state, write_state, write_update

logging.getLogger("flwr").setLevel(logging.ERROR)

RUN, DIGEST = "0123456789abcdef", "ab" * 32
STATE: dict[str, np.ndarray[Any, Any]] = {
    "b": np.ones(2, np.float32), "n": np.array([3], np.int64), "w": np.zeros((2, 3), np.float32),
}  # fmt: skip
ROLES = dict.fromkeys(STATE, "parameter")
DEVICES = ("ann", "bea", "cem", "dia", "eli")
ROWS = [row for row in SHIPPED.values() if not row.why_not]
OPTIONS = {"noise_multiplier": 0.1, "clipping_norm": 1.0}


class Turns:
    """A pipe whose other end plays a run: every round that learns, then one that evaluates."""

    def __init__(self, folder, rounds=2, script=None):
        self.folder = folder
        self.script = script or [*((n, False) for n in range(1, rounds + 1)), (rounds, True)]
        self.orders = self._played()
        self.said: list[Any] = []

    def next(self):
        return next(self.orders)

    def answer(self, answer):
        json.dumps(answer)
        self.said.append(answer)

    @property
    def metrics(self):
        return [said["metrics"] for said in self.said if "metrics" in said]

    def _played(self):
        for number, evaluates in self.script:
            nodes = {device: lease(number, device) for device in DEVICES}
            yield {"do": "turn", "number": number, "evaluates": evaluates, "nodes": nodes}
            asked = sorted(self.said[-1]["asked"])
            reply = self.score if evaluates else self.update
            replies = {device: reply(number, device) for device in asked}
            yield {"do": "replies", "replies": replies}

    def score(self, _number, device):
        return {"samples": 4, "before": DEVICES.index(device) / 10, "after": 0.5}

    def update(self, number, device):
        """One that moves every float by a hundredth of the device's place."""
        path = self.folder / f"{number}-{device}"
        by = (DEVICES.index(device) + 1) / 100
        change = {n: np.full_like(x, by) for n, x in STATE.items() if x.dtype.kind == "f"}
        facts = {"run": RUN, "round": number, "lease": lease(number, device)}
        write_update(path, change, compression="", keep=1.0, seed=0, **facts)
        return {
            "path": str(path),
            "lease": lease(number, device),
            "examples": 10,
            "loss": 0.5,
            "norms": None,
        }


def lease(number, device):
    return f"{number:016x}{DEVICES.index(device):016x}"


def order_of(folder, strategy="FedAvg", **changes):
    state = folder / "first.state"
    write_state(state, STATE, ROLES, plan=DIGEST)
    return {
        "run": RUN, "strategy": strategy, "file": "", "attribute": "", "sha256": "",
        "wraps": SHIPPED[strategy.lower()].wraps, "options": {}, "app": False, "rounds": 2,
        "evaluate_every": 0, "quorum": 5, "devices": 5, "proximal": 0.01, "lr": 0.1, "seed": 7,
        "norm_bound": "off", "max_examples": 1 << 40,
        "number": 1, "evaluates": False, "state": str(state), "memory": "", "plan": DIGEST,
        "roles": ROLES, "folder": str(folder), **changes,
    }  # fmt: skip


def drive(order, pipe, strategy=None):
    Drive(strategy or make_strategy(order), order, pipe).run()
    return pipe


def state_of(answer):
    return read_state(Path(answer["state"]), plan=DIGEST)


class AppTurns(Turns):
    """Devices answer with an app of their own, as `device.flower` has it answer."""

    def __init__(self, folder, app):
        super().__init__(folder, script=[(1, False), (2, False)])
        self.app, self.state = app, STATE

    def _played(self):
        for number, evaluates in self.script:
            nodes = {device: lease(number, device) for device in DEVICES}
            yield {"do": "turn", "number": number, "evaluates": evaluates, "nodes": nodes}
            replies = {}
            for device, message in sorted(self.said[-1]["asked"].items()):
                path = self.folder / f"{number}-{device}.reply"
                arrays = {n: x for n, x in self.state.items() if x.dtype.kind == "f"}
                said = Path(message).read_bytes()
                found = app_reply(self.app, said, arrays, b"", run=RUN, device=device)
                path.write_bytes(found.reply)
                facts = {"path": str(path), "device": device, "evaluates": False, "examples": 10}
                yield {"do": "check", **facts}
                assert self.said[-1] == {"examples": 10, "loss": 0.5}
                replies[device] = facts
            yield {"do": "replies", "replies": replies}
            self.state = state_of(self.said[-1])


@pytest.mark.parametrize("row", [row for row in ROWS if row.app], ids=lambda row: row.name)
def test_apps_clip_by_the_mods_that_private_strategies_need(row, tmp_path):
    adaptive = row.name.endswith("AdaptiveClipping")
    app = ClientApp(mods=[adaptiveclipping_mod if adaptive else fixedclipping_mod])

    @app.train()
    def train(message, context):
        arrays = {n: a.numpy() + np.float32(9) for n, a in message.content["arrays"].items()}
        told = MetricRecord({"num-examples": 10, "loss": 0.5})
        records = RecordDict({"arrays": record_of(arrays), "metrics": told})
        return Message(records, reply_to=message)

    options = {"noise_multiplier": 1e-9, **({} if adaptive else {"clipping_norm": 0.1})}
    order = order_of(tmp_path, row.name, app=True, options=options)
    pipe = AppTurns(tmp_path, app)
    with contextlib.suppress(StopIteration):  # after two rounds that learn
        drive(order, pipe)
    moved = state_of(pipe.said[-1])  # twice by a clipped step
    norm = np.sqrt(sum(np.square(moved[n] - STATE[n]).sum() for n in STATE))
    assert norm < 0.2 if adaptive else norm == pytest.approx(0.2, rel=1e-3)
    assert sum("state" in said for said in pipe.said) == 2


class OneReply(AppTurns):
    """The first round as far as the first device's reply."""

    def _played(self):
        nodes = {device: lease(1, device) for device in DEVICES}
        yield {"do": "turn", "number": 1, "evaluates": False, "nodes": nodes}
        said = Path(self.said[-1]["asked"]["ann"]).read_bytes()
        arrays = {n: x for n, x in self.state.items() if x.dtype.kind == "f"}
        path = self.folder / "ann.reply"
        path.write_bytes(app_reply(self.app, said, arrays, b"", run=RUN, device="ann").reply)
        yield {
            "do": "check", "path": str(path), "device": "ann", "evaluates": False, "examples": 10,
        }  # fmt: skip


def plain_app(step, mods=(), **metrics):
    """Adds `step` to every number."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        arrays = {n: a.numpy() + np.float32(step) for n, a in message.content["arrays"].items()}
        told = MetricRecord({"num-examples": 10, "loss": 0.5, **metrics})
        records = RecordDict({"arrays": record_of(arrays), "metrics": told})
        return Message(records, reply_to=message)

    return app


def checked_reply(folder, name, app, **options):
    order = order_of(folder, name, app=True, options={"noise_multiplier": 0.1, **options})
    pipe = OneReply(folder, app)
    with contextlib.suppress(StopIteration):  # after the one reply
        drive(order, pipe)
    return pipe.said[-1]


FIXED = "DifferentialPrivacyClientSideFixedClipping"
ADAPTIVE = "DifferentialPrivacyClientSideAdaptiveClipping"


@pytest.mark.parametrize(
    ("name", "options"),
    [(FIXED, {"clipping_norm": 1.0}), (ADAPTIVE, {})],
    ids=["fixed", "adaptive"],
)
def test_reply_that_was_not_clipped_is_refused_with_the_mod_that_is_missing(
    name, options, tmp_path
):
    answer = checked_reply(tmp_path, name, plain_app(9.0, norm_bit=1), **options)
    assert answer["refused"] == "clipping"
    mod = "fixedclipping_mod" if name == FIXED else "adaptiveclipping_mod"
    assert f"ClientApp(mods=[{mod}])" in answer["text"]
    assert "25.46" in answer["text"], "the norm of what it changed: 9 in each of 8 numbers"


def test_reply_without_the_bit_that_adaptive_clipping_needs_is_refused(tmp_path):
    answer = checked_reply(tmp_path, ADAPTIVE, plain_app(1e-6))
    assert answer["refused"] == "clipping"
    assert "norm_bit" in answer["text"]


def test_reply_within_the_clipping_norm_counts_whoever_clipped_it(tmp_path):
    for k, app in enumerate((plain_app(0.1), plain_app(9.0, [fixedclipping_mod]))):
        folder = tmp_path / str(k)
        folder.mkdir()
        answer = checked_reply(folder, FIXED, app, clipping_norm=1.0)
        assert answer == {"examples": 10, "loss": 0.5}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_strategy_goes_through_a_run_or_says_what_it_needs(row, tmp_path):
    wanted = OPTIONS if row.name.endswith("FixedClipping") else {"noise_multiplier": 0.1}
    order = order_of(tmp_path, row.name, options=wanted if row.wraps else {})
    if row.app:
        with pytest.raises(InvalidInput, match="setting 'clipping_norm', which a plan does not"):
            drive(order, Turns(tmp_path))
        return
    pipe = drive(order, Turns(tmp_path))
    kinds = [sorted(said) for said in pipe.said]
    aggregated = ["memory", "metrics", "scaled", "state"]
    assert kinds == [["asked"], aggregated, ["asked"], aggregated, ["asked"], ["metrics"]]
    assert sorted(pipe.said[0]["asked"]) == list(DEVICES)
    found = state_of(pipe.said[3])
    for name, before in STATE.items():
        assert (found[name].dtype, found[name].shape) == (before.dtype, before.shape)
        assert np.array_equal(found[name], before) == (name == "n")
    assert pipe.metrics[-1]["accuracy"] == pytest.approx(0.2)


def test_a_process_that_takes_over_goes_on_to_the_same_bits(tmp_path):
    order = order_of(tmp_path, "FedAdam")
    whole = drive(order, Turns(tmp_path))
    first = drive({**order, "rounds": 1}, Turns(tmp_path, script=[(1, False), (1, True)]))
    half = {name: Path(first.said[1][name]).rename(tmp_path / f"half.{name}") for name in
            ("state", "memory")}  # fmt: skip
    later = {**order, "number": 2, **{name: str(path) for name, path in half.items()}}
    second = drive(later, Turns(tmp_path, script=[(2, False), (2, True)]))
    for name, array in state_of(second.said[1]).items():
        np.testing.assert_array_equal(array, state_of(whole.said[3])[name])


def test_a_process_may_begin_with_an_evaluation_that_is_due(tmp_path):
    order = order_of(tmp_path, number=1, evaluates=True, evaluate_every=1)
    pipe = drive(order, Turns(tmp_path, script=[(1, True), (2, False), (2, True)]))
    kinds = ["asked", "metrics", "asked", "memory", "asked", "metrics"]
    assert [min(said) for said in pipe.said] == kinds


def test_an_evaluation_that_the_run_skips_is_skipped(tmp_path):
    order = order_of(tmp_path, evaluate_every=1)
    pipe = drive(order, Turns(tmp_path, script=[(1, False), (2, False), (2, True)]))
    assert len(pipe.metrics) == 3


def test_the_same_devices_are_drawn_again(tmp_path):
    order = order_of(tmp_path, options={"fraction_train": 0.4}, quorum=2)
    asked = [drive(order, Turns(tmp_path)).said[0]["asked"] for _ in range(2)]
    assert asked[0] == asked[1]
    assert len(asked[0]) == 2


class Sends(flower.FedAvg):  # type: ignore[misc]
    """Changes the messages of training by a function."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def configure_train(self, server_round, arrays, config, grid):
        return self.change(super().configure_train(server_round, arrays, config, grid))


def other_arrays(messages):
    messages[0].content["arrays"] = record_of({"w": np.zeros(1)})
    return messages


def other_kind(messages):
    return [Message(RecordDict({}), m.metadata.dst_node_id, "query") for m in messages]


class Gives(flower.FedAvg):  # type: ignore[misc]
    """Aggregates to something else."""

    def __init__(self, arrays):
        super().__init__()
        self.arrays = arrays

    def aggregate_train(self, server_round, replies):
        return record_of(self.arrays), None


@pytest.mark.parametrize(
    ("make", "family", "why"),
    [
        (lambda: Sends(other_arrays), InvalidInput, "other arrays than its newest.*--app"),
        (
            lambda: Sends(other_kind),
            InvalidInput,
            "this turn is for 'train', the strategy asks for 'query'",
        ),
        (lambda: Sends(lambda m: [m[0], m[0]]), InvalidInput, "each node of its round once"),
        (lambda: flower.FedAvg(min_available_nodes=6), Unavailable, "more than the 5 devices"),
        (lambda: Gives({"w": np.ones((2, 3))}), InvalidInput, r"differs in \['b'\]"),
        (
            lambda: Gives({"w": np.ones((3, 2)), "b": np.ones(2)}),
            InvalidInput,
            "'w' has shape .2, 3., the strat",
        ),
        (
            lambda: Gives({"w": np.full((2, 3), np.nan), "b": np.ones(2)}),
            InvalidInput,
            "not finite",
        ),
    ],
)
def test_what_a_run_cannot_follow_is_refused_by_name(make, family, why, tmp_path):
    with pytest.raises(family, match=why):
        drive(order_of(tmp_path), Turns(tmp_path), make())


def test_a_message_to_an_app_is_small_and_names_its_lease(tmp_path):
    class Asked(Exception):
        """Seen enough."""

    class Once(Turns):
        def answer(self, answer):
            super().answer(answer)
            raise Asked

    pipe = Once(tmp_path)
    with pytest.raises(Asked):
        drive(order_of(tmp_path, app=True), pipe)
    files = pipe.said[0]["asked"]
    message = message_of(Path(files["bea"]).read_bytes())
    assert message.metadata.message_id == lease(1, "bea")
    assert not message.content["arrays"]
    assert message.content["config"]["server-round"] == 1

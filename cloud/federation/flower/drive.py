"""Drive `Strategy.start` through the rounds of a run, in the strategy's own process.

The strategy asks for nodes and sends messages as usual. Its turns are the turns of the run: in each
turn it waits until the cloud has opened the round, tells the cloud which devices it asks, and waits
for the replies that counted. After each aggregation the new state and the strategy's memory are
written to files, so that another process can continue from there; rounds keep their numbers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np

from triplane.cloud.federation.flower import adapter
from triplane.cloud.federation.flower.memory import recall, remember
from triplane.cloud.federation.flower.replies import (
    Contributed,
    checked,
    common,
    contributed,
    limited_replies,
    numbers,
)
from triplane.cloud.federation.flower.spec import digest_of
from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.unified_ir.federated.core.files import (
    like_of,
    read_state,
    write_state,
)

TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
LOOKS: Final = 2
"""How often a strategy may ask for nodes in a turn; one that asks again is waiting for more."""
KNOWN: Final = frozenset({"server-round"})
"""Configuration keys that a message may carry for a device that follows its plan."""

Array = np.ndarray[Any, Any]


class Pipe(Protocol):
    """See `proto.sandbox.OrderPipe`."""

    def next(self) -> dict[str, Any]:
        """Return the next order."""

    def answer(self, answer: Mapping[str, Any]) -> None:
        """Answer the current order."""


class _Skipped(Exception):
    """The run continued without this evaluation, because no device could take part."""


class Drive:
    """Runs one strategy through its rounds. order: the first order; see `runs.py`."""

    def __init__(self, strategy: Any, order: Mapping[str, Any], pipe: Pipe) -> None:
        self._strategy, self._order, self._pipe = strategy, order, pipe
        self._folder = Path(order["folder"])
        self._state: dict[str, Array] = read_state(Path(order["state"]), plan=order["plan"])
        self._like = like_of(self._state)
        if order["memory"]:
            recall(self._strategy, Path(order["memory"]))
        # `Strategy.start` counts rounds from 1; this process may begin in the middle of a run. An
        # evaluating turn belongs to a round that has been aggregated already.
        self._offset = int(order["number"]) - (not order["evaluates"])
        self._at = (0, False)
        self._nodes: dict[int, str] | None = None
        self._leases: dict[str, str] = {}
        self._looks, self._skips = 0, False
        self._scaled = 0  # updates of the newest turn that were above the norm bound
        self._kept: dict[str, Any] | None = None
        self._scores: dict[str, dict[str, Any]] = {}  # of apps, as their replies came
        self._clipped: dict[str, adapter.Clipping] = {}  # by device: required of its reply
        self._grid = adapter.TurnGrid(self._look, self._turn, run=int(order["run"], 16) >> 1)

    def run(self) -> None:
        """Run all rounds, beginning with the order's."""
        strategy, rounds = self._strategy, int(self._order["rounds"])
        ours = {name: getattr(self, f"_{name}") for name in _HOOKED}
        self._theirs = {name: getattr(strategy, name) for name in _HOOKED}
        # Set on the instance, so that the class stays as it is, also for a strategy that wraps it.
        for name, hook in ours.items():
            setattr(strategy, name, hook)
        arrays = adapter.record_of(self._shared())
        if self._order["evaluates"]:
            # The current turn evaluates what an earlier process aggregated.
            messages = self._configure_evaluate(0, arrays, adapter.no_settings(), self._grid)
            self._aggregate_evaluate(0, self._grid.send_and_receive(messages))
        if self._offset < rounds:
            strategy.start(self._grid, arrays, num_rounds=rounds - self._offset)

    # Hooks: `Strategy.start` calls these methods instead of the strategy's own ones.

    def _configure_train(self, number: int, *rest: Any) -> list[Any]:
        return self._configured(TRAIN, number + self._offset, rest)

    def _configure_evaluate(self, number: int, *rest: Any) -> list[Any]:
        number += self._offset
        every, rounds = self._order["evaluate_every"], self._order["rounds"]
        # The run evaluates only in these rounds, whereas `Strategy.start` evaluates after every
        # one.
        due = number == rounds or (every > 0 and number % every == 0)
        if not due:
            self._at, self._skips = (number, True), True
            return []
        try:
            return self._configured(EVALUATE, number, rest)
        except _Skipped:
            self._skips = True
            return []

    def _configured(self, kind: str, number: int, rest: Sequence[Any]) -> list[Any]:
        self._at, self._nodes, self._looks, self._skips = (number, kind == EVALUATE), None, 0, False
        self._scores = {}
        # Flower's strategies sample nodes with `random`: a turn that another process repeats must
        # draw the same ones.
        random.seed(f"{self._order['seed']}/{number}/{kind}")
        return list(self._theirs[f"configure_{kind}"](number, *rest))

    def _aggregate_train(self, number: int, replies: Iterable[Any]) -> Any:
        arrays, metrics = self._theirs["aggregate_train"](number + self._offset, list(replies))
        if arrays is not None:
            self._state |= self._taken(adapter.named_arrays(arrays))
            arrays = adapter.record_of(self._shared())  # with the dtypes of the model
        state, memory = self._folder / "next.state", self._folder / "next.memory"
        write_state(state, self._state, self._order["roles"], plan=self._order["plan"])
        remember(self._without_hooks(), memory)
        files = {"state": str(state), "memory": str(memory), "scaled": self._scaled}
        self._pipe.answer({**files, "metrics": numbers(metrics)})
        return arrays, metrics

    def _aggregate_evaluate(self, number: int, replies: Iterable[Any]) -> Any:
        if self._skips:
            return None
        metrics = self._theirs["aggregate_evaluate"](number + self._offset, list(replies))
        self._pipe.answer({"metrics": numbers(metrics)})
        return metrics

    def _without_hooks(self) -> Any:
        attributes = vars(self._strategy).items()
        return SimpleNamespace(**{k: v for k, v in attributes if k not in _HOOKED})

    def _taken(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return aggregated arrays as shared tensors. InvalidInput: they do not fit."""
        if odd := sorted(arrays.keys() ^ self._like.keys()):
            raise InvalidInput(
                f"a strategy returns arrays of the names that it received; it differs in {odd[:4]}"
            )
        replies = {}
        for name, (dtype, shape) in self._like.items():
            if arrays[name].shape != shape:
                raise InvalidInput(
                    f"{name!r} has shape {shape}, the strategy made it {arrays[name].shape}"
                )
            replies[name] = arrays[name].astype(dtype)
            if not np.isfinite(replies[name]).all():
                raise InvalidInput(f"the strategy's {name!r} has values that are not finite")
        return replies

    def _shared(self) -> dict[str, Array]:
        return {name: self._state[name] for name in self._like}

    # The grid

    def _look(self) -> list[int]:
        """Return the ids of the devices of the current round, once it is open."""
        self._looks += 1
        nodes = self._opened()
        if self._looks > LOOKS:
            raise Unavailable(
                f"the strategy waits for more than the {len(nodes)} devices of round {self._at[0]};"
                " its minimum numbers of nodes must not exceed those of --devices and --quorum"
            )
        return list(nodes)

    def _opened(self) -> dict[int, str]:
        if self._nodes is None:
            order = self._next("turn")
            turn = order["number"], order["evaluates"]
            if turn != self._at:
                # The order belongs to a later turn; `_next` returns it there.
                self._kept = order
                if self._at[1] and turn > self._at:
                    raise _Skipped
                raise InvalidInput(f"the strategy is at turn {self._at}, the run at {turn}")
            self._leases = order["nodes"]
            self._nodes = {node_of(device): device for device in self._leases}
        return self._nodes

    def _next(self, do: str) -> dict[str, Any]:
        order, self._kept = self._kept or self._pipe.next(), None
        # Replies are checked while the strategy waits for all of them.
        while order["do"] == "check":
            clipping = self._clipped.get(order["device"])
            answer, self._scores[order["device"]] = checked(order, self._like, clipping)
            self._pipe.answer(answer)
            order = self._pipe.next()
        if order["do"] != do:
            raise InvalidInput(f"the strategy waits for {do!r}, the run says {order['do']!r}")
        return order

    def _turn(self, messages: Sequence[Any]) -> list[Any]:
        if self._skips:
            return []
        try:
            nodes = self._opened()
        except _Skipped:
            self._skips = True
            return []
        sent = self._checked(messages, nodes)
        self._clipped = {
            nodes[node]: clipping
            for node, message in sent.items()
            if (clipping := adapter.clipping_of(message, self._strategy)) is not None
        }
        self._pipe.answer({"asked": {nodes[node]: self._file_of(m) for node, m in sent.items()}})
        answers = self._next("replies")["replies"]
        kind = EVALUATE if self._at[1] else TRAIN
        if self._order["app"] and self._at[1]:
            answers = {d: {"metrics": self._scores[d]} for d in answers if d in self._scores}
        parts = self._parts(dict(sorted(answers.items())))
        known = common([metrics for _, metrics in parts.values()])
        replies = []
        for device, (arrays, metrics) in parts.items():
            node = node_of(device)
            to = sent.get(node) or adapter.instruction(node, kind)
            replies.append(adapter.reply_to(to, arrays, {name: metrics[name] for name in known}))
        return replies

    def _parts(self, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Contributed]:
        """Return the contents of the replies, by device."""
        order, like, state = self._order, self._like, self._state
        self._scaled = 0
        if self._at[1] or order["app"]:
            return {device: contributed(x, order, like, state) for device, x in answers.items()}
        parts, self._scaled = limited_replies(answers, order, like, state)
        return parts

    def _file_of(self, message: Any) -> str:
        """Write a message for a device with a ClientApp and return its path; "" for a plan."""
        if not self._order["app"]:
            return ""
        lease = self._leases[self._opened()[message.metadata.dst_node_id]]
        path = self._folder / f"{lease}.message"
        path.write_bytes(adapter.sendable(message, lease, self._shared()))
        return str(path)

    def _checked(self, messages: Sequence[Any], nodes: Mapping[int, str]) -> dict[int, Any]:
        """Return the messages by node. InvalidInput: a message that devices cannot follow."""
        wanted, sent = EVALUATE if self._at[1] else TRAIN, {}
        shared = self._shared()
        seen: set[int] = set()
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            if node in sent or node not in nodes:
                raise InvalidInput(f"a strategy asks each node of its round once, not {node}")
            if kind != wanted:
                raise InvalidInput(f"this turn is for {wanted!r}, the strategy asks for {kind!r}")
            # Strategies usually send one content to all nodes; it is compared only once.
            if not self._order["app"] and id(message.content) not in seen:
                self._check_followed(message, shared)
                seen.add(id(message.content))
            sent[node] = message
        return sent

    def _check_followed(self, message: Any, shared: Mapping[str, Array]) -> None:
        """Raise InvalidInput if a message needs more than a device's plan and the shared state."""
        said = adapter.settings_in(message)
        allowed = set(KNOWN)
        if said.get("proximal-mu") == self._order["proximal"]:
            allowed.add("proximal-mu")
        if odd := sorted(said.keys() - allowed):
            raise InvalidInput(
                f"the strategy sends devices the setting {odd[0]!r}, which a plan does not follow; "
                "it needs devices that answer with a ClientApp (--app)"
            )
        for record in adapter.arrays_in(message).values():
            if not adapter.same_arrays(adapter.named_arrays(record), shared):
                raise InvalidInput(
                    "the strategy sends other arrays than its newest, but a plan starts from those;"
                    " it needs devices that answer with a ClientApp (--app)"
                )


_HOOKED: Final = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


def node_of(device: str) -> int:
    """Return a device's node id in Flower: 63 bits of its name's digest, never 0 or 1."""
    return (int.from_bytes(hashlib.sha256(device.encode()).digest()[:8]) >> 1) | 2


def make_strategy(order: Mapping[str, Any]) -> Any:
    """Make the strategy that an order names. InvalidInput, Conflict, or an operator's own error."""
    if order["file"]:
        return _of_file(Path(order["file"]), order["attribute"], order)
    make = adapter.constructor_of(order["strategy"])
    least = order["quorum"]
    counts = {
        "min_train_nodes": least,
        "min_available_nodes": least,
        # The quorum applies to learning only; one score is better than none.
        "min_evaluate_nodes": 1,
    }
    options = {**_of_devices(order), **order["options"]}
    try:
        if not order["wraps"]:
            return make(**counts, **options)
        options.setdefault("num_sampled_clients", order["devices"])
        return make(adapter.constructor_of("FedAvg")(**counts), **options)
    except TypeError as error:
        raise InvalidInput(
            f"{order['strategy']} does not accept the options {sorted(options)}: {error}"
        ) from error


def _of_devices(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that must equal the hyperparameters of the devices."""
    options_by_class = {
        "FedProx": {"proximal_mu": "proximal"},
        "QFedAvg": {"client_learning_rate": "lr"},
    }
    return {name: order[of] for name, of in options_by_class.get(order["strategy"], {}).items()}


def _of_file(path: Path, attribute: str, order: Mapping[str, Any]) -> Any:
    if digest_of(path).hex() != order["sha256"]:
        raise Conflict(f"{path.name} has changed since the run began; restore that file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    strategy = getattr(module, attribute, None)
    if callable(strategy) and not adapter.is_strategy(strategy):
        strategy = strategy(**order["options"])
    if not adapter.is_strategy(strategy):
        raise InvalidInput(f"{path.name} needs {attribute!r}, a Strategy or a factory of one")
    return strategy

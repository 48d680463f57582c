"""Orders to a strategy's process and its answers, which runs and studies have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from triplane.cloud.federation.flower.spec import options_of, shipped_row, strategy_file
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.files import read_state
from triplane.unified_ir.federated.core.limits import OFF
from triplane.unified_ir.federated.core.reduce import MAX_EXAMPLES


class DeviceResult(Protocol):
    """A device's score in a run or a study."""

    @property
    def samples(self) -> int:
        """Number of samples that were scored."""

    @property
    def before(self) -> float:
        """Score without adaptation."""

    @property
    def after(self) -> float:
        """Score with adaptation."""


def strategy_order(spec: pb.Spec, strategies: Path, *, quorum: int) -> dict[str, Any]:
    """Return the order that constructs a strategy, without a run; see `child`.

    spec: with its strategy filled in. strategies: folder of the operator's own. quorum: least
    number of devices in a round.
    """
    flower, limits = spec.flower, spec.HasField("robustness")
    row = None if flower.sha256 else shipped_row(flower.strategy)
    file, attribute = "", ""
    if row is None:
        path, attribute = strategy_file(flower.strategy, strategies)
        file = str(path)
    return {
        "run": "",
        "strategy": flower.strategy,
        "file": file,
        "attribute": attribute,
        "sha256": flower.sha256.hex(),
        "wraps": row is not None and row.wraps,
        "options": options_of(flower),
        "app": flower.app,
        "rounds": spec.rounds,
        "evaluate_every": spec.evaluate_every,
        "quorum": quorum,
        "devices": spec.cohort.devices,
        "proximal": spec.hyperparameters.proximal,
        "lr": spec.hyperparameters.lr,
        "seed": spec.seed,
        "norm_bound": spec.robustness.norm_bound or OFF,  # absent in runs of earlier releases
        "max_examples": spec.robustness.max_examples if limits else MAX_EXAMPLES,
    }


def asked_files(answer: Mapping[str, Any], devices: Collection[str], quorum: int) -> dict[str, str]:
    """Return the file of the message, or "", by device that the strategy asks in a turn.

    quorum: least number of devices to ask. InvalidInput: too few, or not of this round.
    """
    files = {str(k): str(v) for k, v in sorted(answer["asked"].items())}
    if not files.keys() <= set(devices):
        raise InvalidInput("the strategy asks devices that are not in its round")
    if len(files) < min(quorum, len(devices)):
        way_out = "; give a smaller --quorum" if quorum > 1 else ""
        raise InvalidInput(
            f"the strategy asks {len(files)} of {len(devices)} devices, a round needs "
            f"{quorum} updates{way_out}"
        )
    return files


def score_reply(score: DeviceResult, metric: str) -> dict[str, Any]:
    """Return a device's reply in a turn that evaluates."""
    facts = {"samples": score.samples, "before": score.before, "after": score.after}
    return {**facts, "metric": metric}


def read_next(state: Path, plan: str, names: Collection[str]) -> dict[str, Array]:
    """Return the state that a strategy's process wrote. InvalidInput: it has other tensors."""
    tensors = read_state(state, plan=plan)
    if tensors.keys() != set(names):
        raise InvalidInput("the strategy's process returned other tensors than the run's state")
    return tensors

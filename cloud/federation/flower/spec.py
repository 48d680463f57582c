"""Validation of runs with a Flower strategy, without flwr: the cloud's process never imports it.

A strategy is one that Flower ships, by Flower's name, or one that the operator put into the cloud's
folder of strategies: code never travels. Its file is pinned by SHA-256 when the run begins.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput, NotFound
from triplane.unified_ir.federated.core.limits import OFF
from triplane.unified_ir.federated.core.reduce import MAX_EXAMPLES

VERSION: Final = "1.41."
"""The release of flwr that the adapter follows."""
INSTALL: Final = "pip install 'triplane[flower]'"
MAX_STRATEGY_BYTES: Final = 1 << 20
MAX_OPTIONS: Final = 64
MAX_OPTION_CHARS: Final = 1000
MAX_NAME_CHARS: Final = 200
ATTRIBUTE: Final = "strategy"
"""The attribute of an operator's file that is used unless the run names another."""

_FILE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::([A-Za-z_][A-Za-z0-9_]*))?")
_BY_RUN: Final = (
    "strategy", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes", "weighted_by_key",
    "arrayrecord_key", "configrecord_key",
)  # fmt: skip
"""Arguments of Flower's strategies that --devices, --quorum or the protocol determine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A strategy of flwr. wraps: it wraps another, FedAvg. app: devices need a `ClientApp`.

    algorithm: the default for the devices. why_not: why it cannot run here, or empty.
    """

    name: str
    wraps: bool = False
    app: bool = False
    algorithm: str = "fedavg"
    why_not: str = ""


_XGBOOST: Final = "its arrays are trees of xgboost, not a next version of the model"
# fmt: off
SHIPPED: Final[Mapping[str, Shipped]] = {
    row.name.lower(): row
    for row in (
        Shipped(name="Bulyan"),
        Shipped(name="DifferentialPrivacyClientSideAdaptiveClipping", wraps=True, app=True),
        Shipped(name="DifferentialPrivacyClientSideFixedClipping",    wraps=True, app=True),
        Shipped(name="DifferentialPrivacyServerSideAdaptiveClipping", wraps=True),
        Shipped(name="DifferentialPrivacyServerSideFixedClipping",    wraps=True),
        Shipped(name="FedAdagrad"),
        Shipped(name="FedAdam"),
        Shipped(name="FedAvg"),
        Shipped(name="FedAvgM"),
        Shipped(name="FedMedian"),
        Shipped(name="FedProx", algorithm="fedprox"),
        Shipped(name="FedTrimmedAvg"),
        Shipped(name="FedXgbBagging", why_not=_XGBOOST),
        Shipped(name="FedXgbCyclic",  why_not=_XGBOOST),
        Shipped(name="FedYogi"),
        Shipped(name="Krum"),
        Shipped(name="MultiKrum"),
        Shipped(name="QFedAvg"),
    )
}
# fmt: on


def fill_flower(spec: pb.Spec, folder: Path) -> None:
    """Check a spec's strategy and fill in what follows. InvalidInput, NotFound, Conflict.

    folder: the folder of the operator's strategies.
    """
    flower = spec.flower
    flower.version = installed_version()
    if spec.hyperparameters.server_lr:
        raise InvalidInput(
            f"server_lr applies to our own optimizers, {flower.strategy[:MAX_NAME_CHARS]!r} has "
            "its own; give it as an option of the strategy (--option eta=0.01)"
        )
    if flower.app and spec.compression:
        raise InvalidInput("a ClientApp's reply is not compressed; drop --compression or --app")
    row = shipped_row(flower.strategy)
    if row is None:
        file, attribute = strategy_file(flower.strategy, folder)
        flower.strategy = f"{file.stem}:{attribute}"
        flower.sha256 = digest_of(file)
    else:
        _check_shipped(row, flower)
        flower.strategy, flower.sha256 = row.name, b""
        spec.algorithm = spec.algorithm or row.algorithm
    check_shares(spec.algorithm)
    _limit(spec, row)
    options = options_of(flower)
    if "proximal_mu" in options and spec.algorithm == "fedprox":
        spec.hyperparameters.proximal = spec.hyperparameters.proximal or options["proximal_mu"]


def check_shares(algorithm: str) -> None:
    """Raise InvalidInput for an algorithm with changes that count by a share of the devices."""
    from triplane.unified_ir.federated.algorithms import ALGORITHMS

    row = ALGORITHMS.get(algorithm.partition("+")[0])  # other names are refused elsewhere
    if row is not None and row.by_share:
        raise InvalidInput(
            f"{algorithm} does not run with a strategy of Flower, which would not scale changes of "
            "control variates by the share of the devices that took part; leave the strategy out, "
            "or choose another algorithm"
        )


def _limit(spec: pb.Spec, row: Shipped | None) -> None:
    """Set that there is no norm bound where the strategy cannot have one."""
    if not (spec.flower.app or (row is not None and row.wraps)):
        return
    if spec.robustness.norm_bound not in {"", OFF} or spec.robustness.max_examples:
        raise InvalidInput(
            "a norm bound and a largest weight apply to devices that follow plans, and to no "
            "private strategy: its noise is sized for updates that do not depend on each other; "
            "leave them out"
        )
    spec.robustness.norm_bound, spec.robustness.max_examples = OFF, MAX_EXAMPLES


def installed_version() -> str:
    """Return the version of flwr here. NotFound: it is not installed; Conflict: unsupported."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise NotFound(
            f"Flower is not installed where the cloud runs; there: {INSTALL}, then start it again"
        ) from None
    if not version.startswith(VERSION):
        raise Conflict(f"strategies need flwr {VERSION}*, the cloud has {version}; {INSTALL}")
    return version


def shipped_row(name: str) -> Shipped | None:
    """Return the row of a strategy of flwr by name; upper case, "-" and "_" do not matter."""
    return SHIPPED.get(name.lower().replace("-", "").replace("_", ""))


def strategy_file(name: str, folder: Path) -> tuple[Path, str]:
    """Return file and attribute of an operator's strategy. InvalidInput, NotFound, Conflict."""
    # Identifiers only, so that no name leads out of the folder.
    match = _FILE.fullmatch(name[:MAX_NAME_CHARS])
    if match is None:
        raise InvalidInput(
            "a strategy is one of Flower's by name, or NAME or NAME:ATTRIBUTE of NAME.py in "
            f"{folder}; got {name[:MAX_NAME_CHARS]!r}"
        )
    path = folder / f"{match[1]}.py"
    try:
        facts = path.stat()
    except FileNotFoundError:
        ours = ", ".join(sorted(p.stem for p in folder.glob("*.py"))[:20]) or "nothing"
        raise NotFound(
            f"no strategy {match[1]!r}: Flower ships {', '.join(names())}; {folder} has {ours}"
        ) from None
    _check_owner(path, facts)
    return path, match[2] or ATTRIBUTE


def digest_of(path: Path) -> bytes:
    """Return the SHA-256 of a strategy's file."""
    return hashlib.sha256(path.read_bytes()).digest()


def names() -> list[str]:
    """Return the names of Flower's strategies that can run here."""
    return [row.name for row in SHIPPED.values() if not row.why_not]


def options_of(flower: pb.Flower) -> dict[str, Any]:
    """Return the strategy's arguments. InvalidInput: one is given twice, or not a plain value."""
    if len(flower.options) > MAX_OPTIONS:
        raise InvalidInput(f"a strategy takes at most {MAX_OPTIONS} options")
    options: dict[str, Any] = {}
    for option in flower.options:
        if not option.name.isidentifier() or option.name in options:
            raise InvalidInput(f"an option has a name of its own, got {option.name[:80]!r}")
        options[option.name] = _plain(option)
    return options


def _plain(option: pb.Option) -> Any:
    try:
        # A tuple stands for "not a plain value", because None is a valid one.
        value = json.loads(option.json) if len(option.json) <= MAX_OPTION_CHARS else ()
    except ValueError:
        value = ()
    if isinstance(value, float) and not math.isfinite(value):
        value = ()
    if not isinstance(value, str | int | float | None):
        raise InvalidInput(
            f"option {option.name[:80]} is a number, a string, true, false or null in at most "
            f"{MAX_OPTION_CHARS} characters of JSON, got {option.json[:80]!r}"
        )
    return value


def _check_shipped(row: Shipped, flower: pb.Flower) -> None:
    if row.why_not:
        raise InvalidInput(f"{row.name} cannot run here: {row.why_not}")
    if row.app and not flower.app:
        raise InvalidInput(
            f"{row.name} requires devices to clip their changes, which plans do not do; it needs "
            "devices that answer with a ClientApp (--app) and its mod"
        )
    if taken := sorted(options_of(flower).keys() & set(_BY_RUN)):
        raise InvalidInput(f"{taken[0]} is set by the run itself; use --devices and --quorum")


def _check_owner(path: Path, facts: os.stat_result) -> None:
    """Refuse a file that users other than the cloud's own can change."""
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_STRATEGY_BYTES:
        raise InvalidInput(f"{path} must be a plain file of at most {MAX_STRATEGY_BYTES} bytes")
    # As sshd does: a user who can write this file can run code as the cloud's user.
    if facts.st_uid not in {os.geteuid(), 0} or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Conflict(
            f"users other than the cloud's may write {path}; chown it, and: chmod go-w {path}"
        )

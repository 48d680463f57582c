"""The options of `triplane train`: optimizers, schedules, clipping, losses and metrics by name.

A value with options is written NAME:KEY=VALUE,KEY=VALUE. The module imports nothing heavy until a
function is called.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from triplane.proto.errors import InvalidInput

if TYPE_CHECKING:
    from triplane.unified_ir.data.columns import Field
    from triplane.unified_ir.engines.xla.hosts import Hosts
    from triplane.unified_ir.optim import Optimizer, Schedule

OPTIMIZERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {}),
    "rmsprop": ("RMSProp", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adafactor": ("Adafactor", {}),
    "lamb": ("LAMB", {}),
    "lion": ("Lion", {}),
}
"""Name -> class in `optim` and the options that the name implies."""


@dataclass(frozen=True)
class ScheduleOption:
    """A schedule: its class in `optim` and the values of its fields.

    lr, total: the fields that take --lr and the number of updates of the whole run. options: the
    field for each key and its default; None if a value is required.
    """

    kind: str
    lr: str
    total: str | None
    options: Mapping[str, tuple[str, float | None]]


# fmt: off
SCHEDULES: Final[Mapping[str, ScheduleOption]] = {
    "cosine":      ScheduleOption("Cosine", "high", "steps", {"low": ("low", 0.0)}),
    "polynomial":  ScheduleOption("Polynomial", "high", "steps",
                       {"power": ("power", 1.0), "low": ("low", 0.0)}),
    "one-cycle":   ScheduleOption("OneCycle", "high", "steps", {"rise": ("rise", 0.3)}),
    "step":        ScheduleOption("StepDecay", "start", None,
                       {"every": ("steps", None), "factor": ("factor", 0.1)}),
    "multi-step":  ScheduleOption("MultiStep", "start", None,
                       {"at": ("bounds", None), "factor": ("factor", 0.1)}),
    "exponential": ScheduleOption("Exponential", "start", None,
                       {"factor": ("factor", None), "every": ("steps", 1)}),
    "plateau":     ScheduleOption("ReduceOnPlateau", "start", None,
                       {"patience": ("patience", 10), "factor": ("factor", 0.1),
                        "low": ("low", 0.0)}),
    "restarts":    ScheduleOption("CosineRestarts", "high", None,
                       {"every": ("steps", None), "growth": ("growth", 1), "low": ("low", 0.0)}),
}
# fmt: on

_COUNTS: Final = {"steps", "growth", "patience"}

LOSSES: Final[Mapping[str, tuple[str, str]]] = {
    "cross-entropy": ("SoftmaxCrossEntropy", "classes"),
    "nll": ("NegativeLogLikelihood", "classes"),
    "bce": ("BinaryCrossEntropy", "shares"),
    "mse": ("MSE", "numbers"),
    "l1": ("L1", "numbers"),
    "huber": ("Huber", "numbers"),
    "smooth-l1": ("SmoothL1", "numbers"),
}
"""Name of --loss -> its class in `nn` and its targets: classes, shares (0..1), or numbers."""

METRICS: Final = (
    "accuracy", "top5", "precision", "recall", "f1", "perplexity", "mae", "mse", "rmse", "r2",
)  # fmt: skip
"""Names of --metric: those of `train.metrics.BY_NAME`, which is not imported for a help page."""
DEFAULT_METRICS: Final[Mapping[str, tuple[str, ...]]] = {"numbers": ("mae",)}
"""Metrics without --metric, where the loss has none of its own."""


_OF_XLA: Final = (
    "mesh", "shard", "parallel", "buckets", "stages", "microbatches", "hosts", "deterministic",
)  # fmt: skip
"""Options that only the engine xla has."""


def engine(options: Mapping[str, Any]) -> Any:
    """Return what --engine and the options of several devices describe: a name, or the engine."""
    name, mesh, shard = options["engine"], options["mesh"], options["shard"]
    if options["devices"] is not None and options["parallel"] is None:
        raise InvalidInput(
            "--devices belongs to --parallel auto; a mesh says its own, as --mesh data=2"
        )
    if options["deterministic"] and name != "xla":
        raise InvalidInput(
            f"--deterministic belongs to --engine xla; the engine is {name!r}, which gives the "
            "same bits again on a CPU in any case"
        )
    if options["topology"] is not None and not any(
        options[k] for k in ("parallel", "buckets", "stages")
    ):
        raise InvalidInput("--topology gives the rates of --parallel auto, --buckets or --stages")
    if all(options[k] in (None, (), False) for k in _OF_XLA):
        return name
    if name != "xla":
        raise InvalidInput(
            "--mesh, --shard, --parallel, --buckets and --stages are for --engine xla; the engine "
            f"is {name!r}"
        )
    from triplane.unified_ir.engines.xla.engine import XlaEngine
    from triplane.unified_ir.passes.sharding import read_topology

    counts = _pairs("--mesh", "AXIS=N,..", () if mesh is None else mesh.split(","))
    axes = {k: _devices(k, n) for k, n in counts.items()}
    patterns = {
        pattern: [None if axis in {"", "-"} else axis for axis in over.split(",")]
        for pattern, over in _pairs("--shard", "PATTERN=AXIS,..", shard).items()
    }
    file = options["topology"]
    topology = None if file is None else read_topology(file)
    same = ("parallel", "devices", "deterministic", "buckets", "stages", "microbatches", "hosts")
    chosen = {name: options[name] for name in same}
    return XlaEngine(mesh=axes, shard=patterns, topology=topology, **chosen)


def _devices(axis: str, text: str) -> int:
    """Return the number of devices of an axis of --mesh."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InvalidInput(f"--mesh {axis} is a number of devices, as {axis}=4, got {text[:80]!r}")
    return int(text)


def check_effects(options: Mapping[str, Any]) -> None:
    """Refuse options that would have no effect beside the others."""
    if not options["resume"] and options["checkpoint"] is None:
        raise InvalidInput(
            "--no-resume refuses checkpoints in the folder of --checkpoint; add --checkpoint "
            "FOLDER, or leave it out"
        )
    entries = options["entries"]
    if options["local_lr"] is not None and entries and not {"local_update", "adapt"} & {*entries}:
        raise InvalidInput(
            "--local-lr is the rate of local_update and adapt, and --entry names neither; add "
            "--entry adapt, or leave it out"
        )


def steps_per_launch(text: str) -> int | Literal["auto"]:
    """Parse --steps-per-launch: a whole number, or auto."""
    if text == "auto":
        return "auto"
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise InvalidInput(
            f"--steps-per-launch is a number from 1 to 999999999, or auto; got {text[:80]!r}"
        )
    return int(text)


def hosts(options: Mapping[str, Any]) -> Hosts | None:
    """Return the process that --coordinator, --process or the environment describe, if any."""
    from triplane.unified_ir.engines.xla.hosts import COORDINATOR, hosts_of

    waits = {"--heartbeat": options["heartbeat"], "--meet-within": options["meet_within"]}
    chosen = hosts_of(
        options["coordinator"], options["process"], os.environ,
        heartbeat_s=options["heartbeat"], meet_within_s=options["meet_within"],
    )  # fmt: skip
    alone = next((flag for flag, seconds in waits.items() if seconds is not None), None)
    if chosen is None and alone is not None:
        raise InvalidInput(
            f"{alone} belongs to a run of several processes; add --coordinator HOST:PORT and "
            f"--process I/N (or set {COORDINATOR}), or leave it out"
        )
    if chosen is not None and options["engine"] != "xla":
        raise InvalidInput(
            f"{chosen}: several processes train with --engine xla; the engine is "
            f"{options['engine']!r}"
        )
    return chosen


def _pairs(what: str, form: str, items: Sequence[str]) -> dict[str, str]:
    """Return what comes before and after = in each item."""
    pairs: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or name in pairs:
            wrong = f"{name!r} twice" if equals else repr(item)
            raise InvalidInput(f"{what} is {form}, got {wrong}")
        pairs[name] = value
    return pairs


def optimizer(options: Mapping[str, Any], total: int | None) -> Optimizer:
    """Return the optimizer that --optimizer, --lr, --schedule and the other options describe.

    total: number of updates of the whole run; None if it is not known beforehand.
    """
    from triplane.unified_ir import optim

    kind, fixed = OPTIMIZERS[options["optimizer"]]
    arguments: dict[str, Any] = dict(fixed)
    if options["weight_decay"] is not None:
        arguments["weight_decay"] = options["weight_decay"]
    arguments["groups"] = tuple(optim.Group(p, frozen=True) for p in options["freeze"])
    lr: Any = options["lr"]
    if options["schedule"] is not None:
        lr = schedule(options["schedule"], lr, total)
    if options["warmup"] is not None:
        # Around the schedule, which therefore counts the updates of the warm-up too.
        lr = optim.Warmup(options["warmup"], lr)
    chosen: Optimizer = getattr(optim, kind)(lr, **arguments)
    return chosen


def schedule(text: str, lr: float, total: int | None) -> Schedule:
    """Parse --schedule: NAME:KEY=VALUE,...; unset options have their defaults."""
    from triplane.unified_ir import optim

    name, _, rest = text.partition(":")
    if name not in SCHEDULES:
        raise InvalidInput(f"--schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    row = SCHEDULES[name]
    defaults = dict(row.options.values())
    fields: dict[str, Any] = {f: default for f, default in defaults.items() if default is not None}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in row.options:
            raise InvalidInput(
                f"--schedule {name} has {', '.join(row.options)}, got {key!r}; write "
                f"{name}:{'=..,'.join(row.options)}=.."
            )
        what = f"--schedule {name} {key}"
        if key == "at":
            parsed: Any = tuple(_whole(what, _number(what, part)) for part in value.split("/"))
        else:
            parsed = _number(what, value)
        fields[row.options[key][0]] = parsed
    missing = [k for k, (field, _) in row.options.items() if field not in fields]
    if missing:
        raise InvalidInput(f"--schedule {name} needs {missing[0]}, such as {name}:{missing[0]}=10")
    if row.total is not None and total is None:
        raise InvalidInput(
            f"--schedule {name} spans the whole run, whose length is not known: the data is read "
            "in order; take one that counts updates, such as step"
        )
    whole = {k: _whole(f"--schedule {name}", v) if k in _COUNTS else v for k, v in fields.items()}
    ends = {} if row.total is None else {row.total: total}
    chosen: Schedule = getattr(optim, row.kind)(**{row.lr: lr}, **ends, **whole)
    return chosen


def _whole(what: str, x: float) -> int:
    if not float(x).is_integer():
        raise InvalidInput(f"{what} must be a whole number of updates, got {x:g}")
    return int(x)


def clipping(text: str | None) -> dict[str, Any]:
    """Parse --clip: a limit of the common norm, or norm:, each: or value: and a limit."""
    if text is None:
        return {}
    kind, _, number = text.rpartition(":")
    names = {"": "clip_norm", "norm": "clip_norm", "each": "clip_each", "value": "clip_value"}
    if kind not in names:
        raise InvalidInput(
            f"--clip takes a limit, or norm:LIMIT, each:LIMIT, value:LIMIT; got {text!r}"
        )
    return {names[kind]: _number("--clip", number)}


def early_stop(text: str | None, *, restore_best: bool) -> list[Any]:
    """Parse --early-stop: PATIENCE, or PATIENCE:MEASURE."""
    if text is None and restore_best:
        raise InvalidInput("--restore-best belongs to --early-stop, which names the measure")
    if text is None:
        return []
    from triplane.unified_ir.train import EarlyStop

    patience, _, measure = text.partition(":")
    if not patience.isdecimal():
        raise InvalidInput(
            f"--early-stop takes a number of epochs, then :MEASURE if it is not validation.loss; "
            f"got {text!r}"
        )
    measure = measure or "validation.loss"
    return [EarlyStop(measure, patience=int(patience), restore_best=restore_best)]


def loss(name: str, class_weights: str | None) -> Any:
    """Return the loss of --loss, with the weights of --class-weights."""
    from triplane.unified_ir import nn

    kind, targets = LOSSES[name]
    weight = weights(class_weights)
    if weight is None:
        return getattr(nn, kind)()
    if targets != "classes":
        raise InvalidInput(
            f"--class-weights are for losses of classes, not --loss {name}, whose targets are "
            f"{targets}"
        )
    return getattr(nn, kind)(weight=weight)


def loss_name(stated: str | None, target: Field | None) -> str:
    """Return --loss, or the default for such a target: classes, or real numbers.

    target: None where the data has none, or several.
    """
    if target is None:
        raise InvalidInput("the data has no single target to compare with; name its column: --y")
    is_real = target.dtype.startswith("float")
    if stated is None:
        return "mse" if is_real else "cross-entropy"
    if is_real and LOSSES[stated][1] == "classes":
        raise InvalidInput(
            f"--loss {stated} compares with classes, which are whole numbers or texts, but the "
            f"target holds {target}; choose --loss mse, or another column: --y"
        )
    return stated


def metrics(names: tuple[str, ...], loss: str) -> dict[str, Any] | None:
    """Return the metrics of --metric by name; None stands for those of the loss."""
    targets = LOSSES[loss][1]
    names = names or DEFAULT_METRICS.get(targets, ())
    return metrics_of(names, targets, f"the targets of --loss {loss}") if names else None


def metrics_of(names: Sequence[str], targets: str, what: str) -> dict[str, Any]:
    """Return metrics by name for targets of one kind. what: says whose kind it is, for errors."""
    from triplane.unified_ir.train.metrics import BY_NAME, metric_named

    for name in names:
        if targets not in BY_NAME[name]:
            fitting = ", ".join(k for k, row in BY_NAME.items() if targets in row)
            raise InvalidInput(f"--metric {name} does not measure {targets}, {what}; {fitting} do")
    # Each once, in the order of the command line.
    return {name: metric_named(name, targets) for name in dict.fromkeys(names)}


def weights(text: str | None) -> list[float] | None:
    """Parse --class-weights: numbers >= 0, separated by commas."""
    if text is None:
        return None
    numbers = [_number("--class-weights", part) for part in text.split(",")]
    if not all(0 <= w < math.inf for w in numbers):
        raise InvalidInput(f"--class-weights must be finite and >= 0, got {text}")
    return numbers


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{what} takes a number, got {text!r}") from None

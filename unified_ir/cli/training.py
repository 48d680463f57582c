"""The options of `triplane train`: optimizers, schedules, clipping, metrics by name.

A value with options is written NAME:KEY=VALUE,KEY=VALUE. The module imports nothing heavy until a
function is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import InvalidInput

if TYPE_CHECKING:
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
    "restarts":    ScheduleOption("CosineRestarts", "high", None,
                       {"every": ("steps", None), "growth": ("growth", 1), "low": ("low", 0.0)}),
}
# fmt: on

_COUNTS: Final = {"steps", "growth"}

METRICS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "accuracy": lambda nn, _: nn.accuracy,
    "top5": lambda _, train: train.TopK(5),
    "precision": lambda _, train: train.Precision(),
    "recall": lambda _, train: train.Recall(),
    "f1": lambda _, train: train.F1(),
    "perplexity": lambda _, train: train.Perplexity(),
}
"""Name of --metric -> the metric, of the packages `nn` and `train`, imported when one is named."""


def optimizer(options: Mapping[str, Any], total: int) -> Optimizer:
    """Return the optimizer that --optimizer, --lr, --schedule and the other options describe.

    total: number of updates of the whole run.
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


def schedule(text: str, lr: float, total: int) -> Schedule:
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
    whole = {k: _whole(f"--schedule {name}", v) if k in _COUNTS else v for k, v in fields.items()}
    ends = {} if row.total is None else {row.total: total}
    chosen: Schedule = getattr(optim, row.kind)(**{row.lr: lr}, **ends, **whole)
    return chosen


def _whole(what: str, x: float) -> int:
    if x != int(x):
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


def early_stop(text: str | None) -> list[Any]:
    """Parse --early-stop: PATIENCE, or PATIENCE:MEASURE."""
    if text is None:
        return []
    from triplane.unified_ir.train import EarlyStop

    patience, _, measure = text.partition(":")
    if not patience.isdecimal():
        raise InvalidInput(
            f"--early-stop takes a number of epochs, then :MEASURE if it is not validation.loss; "
            f"got {text!r}"
        )
    return [EarlyStop(measure or "validation.loss", patience=int(patience))]


def metrics(names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the metrics of --metric by name; None stands for those of the loss."""
    if not names:
        return None
    from triplane.unified_ir import nn, train

    # Each once, in the order of the command line.
    return {name: METRICS[name](nn, train) for name in dict.fromkeys(names)}


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

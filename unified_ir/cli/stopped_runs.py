"""Runs of `simulate` that did not finish: their reasons, and the rates that may help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.number_options import flag

if TYPE_CHECKING:
    from triplane.unified_ir.federated.study import Study


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that did not finish. title: of its algorithm; empty if the seed had no devices."""

    title: str
    seed: int
    reason: str
    label: str


def seeds_stopped(stops: Sequence[StoppedRun]) -> dict[str, list[int]]:
    """Return the seeds in which each algorithm stopped, by its title."""
    seeds: dict[str, list[int]] = {}
    for stop in stops:
        if stop.title:
            seeds.setdefault(stop.title, []).append(stop.seed)
    return seeds


def reason(error: InvalidInput, study: Study, *, has_strategy: bool) -> str:
    """Return why a run stopped; if its numbers diverged, with the rates of its algorithm."""
    from triplane.unified_ir.federated.algorithms import algorithm
    from triplane.unified_ir.federated.core.learn import SMALLER_RATE

    if SMALLER_RATE not in str(error):
        return str(error)
    hyper = algorithm(study.algorithm).hyper
    values = {row.name: study.hyper[row.name] for row in reversed(hyper) if row.name.endswith("lr")}
    if has_strategy or values.get("server_lr") == 1:
        values.pop("server_lr", None)  # the strategy has its own; at 1 the cloud takes the mean
    rates = " or ".join(f"{flag(name)} ({value:g})" for name, value in values.items())
    return f"{error}; try a smaller {rates}" if rates else str(error)


def nothing_finished(
    stops: Sequence[StoppedRun], files: Sequence[str], *, several: bool
) -> InvalidInput:
    """Return the error of a study without a result: the first reason, and what is missing.

    files: the options of files that are not written. several: whether there are several seeds.
    """
    first = stops[0]
    name = f"{first.title}, seed {first.seed}" if first.title and several else first.label
    rest = [f"All {len(stops)} runs stopped"] if len(stops) > 1 else []
    if files:
        rest.append(f"{' and '.join(files)} {'were' if len(files) > 1 else 'was'} not written")
    text = f"{name}: {first.reason}"
    return InvalidInput(f"{text}. {'; '.join(rest)}" if rest else text)

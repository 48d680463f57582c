"""Algorithms of `simulate` that cannot learn a model, whatever the seed and the samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from triplane.proto.errors import InvalidInput

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms import Hyper
    from triplane.unified_ir.ir import Module


def left_out(
    module: Module, hypers: Mapping[str, Hyper], named: Collection[str], model: str
) -> dict[str, str]:
    """Return why algorithms that nobody named cannot learn the module, by algorithm.

    hypers: hyperparameters of every algorithm of the study. model: the name of the file.
    InvalidInput: an algorithm that the user named cannot learn it, or none of the study can.
    """
    reasons = _reasons(module, hypers)
    if refused := [name for name in reasons if name in named or len(reasons) == len(hypers)]:
        why = _by_reason({name: reasons[name] for name in refused}, f"cannot learn {model}")
        able = _able(module)
        raise InvalidInput(why + (f". These can: {', '.join(able)}" if able else ""))
    return reasons


def left_out_line(reasons: Mapping[str, str]) -> str:
    """Return one line with what `left_out` returned."""
    return _by_reason(reasons, "left out")


def _by_reason(reasons: Mapping[str, str], what: str) -> str:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return "; ".join(f"{_listed(names)} {what}: {reason}" for reason, names in groups.items())


def _reasons(module: Module, hypers: Mapping[str, Hyper]) -> dict[str, str]:
    from triplane.unified_ir.federated.algorithms import plan_of

    reasons = {}
    with TemporaryDirectory() as folder:
        for name, hyper in hypers.items():
            try:
                plan_of(module, name, hyper, Path(folder) / "study.plan")
            except InvalidInput as error:
                reasons[name] = str(error)
    return reasons


def _able(module: Module) -> list[str]:
    """Return the algorithms of the table that can learn the module."""
    from triplane.unified_ir.federated.algorithms import ALGORITHMS, defaults

    every = {name: defaults(name) for name in ALGORITHMS}
    return sorted(every.keys() - _reasons(module, every).keys(), key=list(every).index)


def _listed(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)

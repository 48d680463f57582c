"""Options of numbers that a table declares: hyperparameters, and numbers of aggregators."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms.hyper import Hyperparameter


def flag(name: str) -> str:
    """Return the option of a parameter: "--meta-lr" of "meta_lr"."""
    return f"--{name.replace('_', '-')}"


def number_option(row: Hyperparameter, default: str, *, low_open: bool) -> click.Option:
    """Return the option of a declared number. default: for the help; the option's own is None."""
    rule, is_whole = row.rule, isinstance(row.default, int)
    bounds: Any = click.IntRange if is_whole else click.FloatRange
    high = None if math.isinf(rule.high) else rule.high
    return click.Option(
        [flag(row.name), row.name],
        type=bounds(rule.low, high, min_open=low_open, max_open=rule.high_open),
        metavar="N" if is_whole else "NUMBER",
        help=f"{row.help}  [default: {default}]",
    )

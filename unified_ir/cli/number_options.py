"""Options of numbers: those that a table declares (hyperparameters, aggregators), and seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms.hyper import Hyperparameter


MAX_SEEDS: Final = 100
MAX_DIGITS: Final = 19


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


def parse_seeds(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | tuple[int, ...] | None:
    """Return a number of seeds, or the seeds of a list with commas; None if not set."""
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < MAX_DIGITS for part in parts):
        message = f"{value[:60]!r} is no number and no list such as 0,1,2"
        raise click.BadParameter(message, ctx, param)
    seeds = tuple(dict.fromkeys(map(int, parts)))
    is_list = len(parts) > 1
    count = len(seeds) if is_list else seeds[0]
    if not 1 <= count <= MAX_SEEDS:
        raise click.BadParameter(f"there are 1 to {MAX_SEEDS} seeds, got {count}", ctx, param)
    return seeds if is_list else count

"""The options that limit devices, of runs and of studies: norm bound, weights, aggregator, returns.

The numbers of aggregators come from their rows. The table is imported only when the options of a
command are needed; see `algorithms`.
"""

from __future__ import annotations

from typing import Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.number_options import number_option

NORM_BOUND: Final = "norm_bound"
MAX_WEIGHT: Final = "max_examples"
AGGREGATOR: Final = "aggregator"
RETURNS: Final = "returns"
KEY: Final = "robustness"
"""Parameter of a command that has the options that were set."""


def limit_options() -> list[click.Parameter]:
    """Return the options; an unset one is None, because the cloud knows the defaults, too."""
    from triplane.unified_ir.federated.algorithms import aggregators as table
    from triplane.unified_ir.federated.core.reduce import MAX_EXAMPLES
    from triplane.unified_ir.federated.core.spoilt import MAX_RETURNS

    names = ", ".join(table.AGGREGATORS)
    return [
        click.Option(
            ["--norm-bound"], metavar="BOUND", callback=_bound,
            help="Largest norm of a device's change: adaptive (twice the round's lower median), "
            "off, or a number; with --mask it follows the median over rounds, and adaptive:START "
            "sets the first one.  [default: adaptive]",
        ),
        click.Option(
            ["--max-examples"], metavar="N", type=click.IntRange(1, MAX_EXAMPLES),
            help="Largest weight of an update.  [default: 3 times the round's lower median]",
        ),
        click.Option(
            ["--aggregator"], metavar="NAME", callback=_aggregator,
            help=f"{names}, or bucketing+ and one of them.  [default: {table.MEAN}]",
        ),
        *map(_number, table.NUMBERS.values()),
        click.Option(
            ["--returns"], metavar="N", type=click.IntRange(0, 1000),
            help="How often to return from a spoilt state to the last good one; then it stops.  "
            f"[default: {MAX_RETURNS}]",
        ),
    ]  # fmt: skip


def limits_set(params: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of a command's parameters; return those that were set.

    They are the arguments of `Robustness`.
    """
    from triplane.unified_ir.federated.algorithms.aggregators import NUMBERS

    numbers = {name: params.pop(name, None) for name in NUMBERS}
    limits = {k: params.pop(k, None) for k in (NORM_BOUND, MAX_WEIGHT, AGGREGATOR, RETURNS)}
    limits["numbers"] = {k: v for k, v in numbers.items() if v is not None} or None
    return {k: v for k, v in limits.items() if v is not None}


def limit_facts(options: dict[str, Any]) -> dict[str, Any]:
    """Return what limits the devices of a study, by option."""
    from triplane.unified_ir.federated.algorithms.aggregators import Robustness
    from triplane.unified_ir.federated.core.limits import ADAPTIVE

    limits = Robustness(**options[KEY])
    bounds = {NORM_BOUND: limits.norm_bound, MAX_WEIGHT: limits.max_examples or ADAPTIVE}
    if options.get("strategy"):  # which combines updates in its own way
        return bounds
    return {
        **bounds,
        AGGREGATOR: limits.aggregator,
        **limits.all_numbers,
        RETURNS: limits.returns,
    }


def round_lines(scaled: int, returned: str) -> list[str]:
    """Return what a person should know of a round: updates above the bound, a return."""
    updates = f"{scaled} update{'s' if scaled > 1 else ''} above the norm bound"
    return [line for line in (updates if scaled else "", returned) if line]


def _number(row: Any) -> click.Option:
    return number_option(row, f"{row.default:g}", low_open=row.rule.low_open)


def _bound(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    from triplane.unified_ir.federated.core.limits import check_norm_bound

    if text is not None:
        _checked(lambda: check_norm_bound(text))
    return text


def _aggregator(_ctx: click.Context, _param: click.Parameter, name: str | None) -> str | None:
    from triplane.unified_ir.federated.algorithms.aggregators import aggregator

    if name is not None:
        _checked(lambda: aggregator(name))
    return name


def _checked(check: Any) -> None:
    try:
        check()
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from error

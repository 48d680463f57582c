"""The options that name a strategy of Flower, and `triplane federate simulate` with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from triplane.cloud.cli.connection import home_option
from triplane.unified_ir.cli.algorithms import AlgorithmCommand
from triplane.unified_ir.cli.simulate import compare, own_server
from triplane.unified_ir.cli.simulate import simulate as plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triplane.unified_ir.cli.simulate import Served

F = TypeVar("F", bound=Callable[..., Any])

SHARE: Final = click.FloatRange(0, 1, min_open=True)

EPILOG: Final = """
\b
--strategy replaces the cloud's own mean and optimizer by a strategy of Flower, as it does in
`triplane federate run`; each --algorithm then decides only what devices do, by default that of the
strategy. It needs triplane[flower]. Your own strategies are files NAME.py in the folder
`strategies` of --home. Results are named STRATEGY over ALGORITHM. Strategies that add noise for
privacy give other bits each time.
  triplane federate simulate digits.tpm --data digits --strategy fedadam --option eta=0.03
"""


def _pairs(
    _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Parse each NAME=VALUE to (name, JSON); a value that is not JSON is a string."""
    pairs = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise click.BadParameter(f"{text!r} is not NAME=VALUE")
        try:
            json.loads(value)
        except ValueError:
            # Words without quotes are the usual case in a shell: --option name=value.
            value = json.dumps(value)
        pairs.append((name, value))
    return pairs


def strategy_options(function: F) -> F:
    """Add `--strategy NAME` and `--option NAME=VALUE`."""
    name = click.option(
        "--strategy", default="", metavar="NAME",
        help="Strategy of Flower: fedavg, fedadam, krum, ..., or NAME[:ATTRIBUTE] of your own "
        "file.",
    )  # fmt: skip
    arguments = click.option(
        "--option", "strategy_options", multiple=True, metavar="NAME=VALUE", callback=_pairs,
        help="Argument of the strategy; repeatable.",
    )  # fmt: skip
    return name(arguments(function))


@click.command(
    plain.name, help=plain.help, short_help=plain.short_help, epilog=f"{plain.epilog}{EPILOG}",
    cls=AlgorithmCommand, params=[*plain.params], from_files=True,
)  # fmt: skip
@strategy_options
@click.option(
    "--quorum", type=SHARE, metavar="SHARE",
    help="Least share of a round's devices that the strategy has to ask, as in a run.  "
    "[default: one device]",
)  # fmt: skip
@home_option
def simulate(
    *, strategy: str, strategy_options: list[tuple[str, str]], home: Path, **options: Any
) -> None:
    """Compare federated algorithms on simulated devices, or one strategy over several of them."""
    if strategy and options["robustness"].keys() & {"aggregator", "numbers", "returns"}:
        raise click.UsageError(
            "--aggregator, its numbers and --returns are of the mean that a strategy replaces; "
            "leave them or --strategy out"
        )
    if strategy:
        _with_strategy(options, strategy, dict(strategy_options), home)
    elif strategy_options or options.pop("quorum") is not None:
        odd = "--option" if strategy_options else "--quorum"
        raise click.UsageError(f"{odd} belongs to a strategy; name one with --strategy")
    else:
        compare(options, own_server)


def _with_strategy(
    options: dict[str, Any], strategy: str, arguments: dict[str, str], home: Path
) -> None:
    from triplane.cloud.federation.flower.study import FlowerServer
    from triplane.cloud.home import Home

    values = {name: json.loads(text) for name, text in arguments.items()}
    server = FlowerServer(
        strategy, values, strategies=Home(home).strategies, quorum=options["quorum"] or 0.0
    )
    source = click.get_current_context().get_parameter_source("algorithms")
    if source is ParameterSource.DEFAULT:
        options["algorithms"] = (server.algorithm,)

    def server_of(algorithm: str, hyper: Mapping[str, float]) -> Served:
        return server, server.hyper(algorithm, hyper)

    options["strategy"] = server.name
    options["strategy_options"] = tuple(f"{name}={text}" for name, text in arguments.items())
    compare(options, server_of)

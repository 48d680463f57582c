"""Options that come from the table of federated algorithms: names and hyperparameters.

Importing the table also imports the operators of the graphs, so it is imported only when the
options of a command are needed, and not when the command is defined.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput, TriplaneError
from triplane.unified_ir.cli.number_options import flag, number_option
from triplane.unified_ir.cli.privacy import EPILOG as PRIVACY_EPILOG
from triplane.unified_ir.cli.privacy import privacy_options, privacy_set
from triplane.unified_ir.cli.robustness import KEY, limit_options, limits_set

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms.hyper import Hyperparameter

NAMES: Final = "ALGORITHM_NAMES"
"""Placeholder in the help of an option for the names of all algorithms."""
SUMMARIES: Final = "ALGORITHM_SUMMARIES"
"""Placeholder in an epilog for one line per algorithm."""
ALGORITHM: Final = "--algorithm"
IN_FILE: Final = ".py:"
"""Part of the name of an algorithm that is in a file."""
FILES: Final = f"{__name__}.files"
"""Key of the context for the files of algorithms."""
AFTER: Final = "query"
"""The option that hyperparameters follow in the help."""


class AlgorithmCommand(click.Command):
    """A command with an option per hyperparameter; those that were set are passed to it as `hyper`.

    It also has the options that limit devices; those that were set are its parameter `robustness`.
    Those of noise and of masking are its parameters `privacy` and `masking`.

    zero_is_unset: refuse 0 in a field of the wire that would make it the default. from_files:
    `--algorithm FILE.py:NAME` registers an algorithm of a file while the command runs, so that its
    hyperparameters are options, too; the command gets its name.
    """

    def __init__(
        self, *args: Any, zero_is_unset: bool = False, from_files: bool = False, **attrs: Any
    ) -> None:
        super().__init__(*args, **attrs)
        self._zero_is_unset = zero_is_unset
        self._from_files = from_files

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return all parameters, made once for each context."""
        # click calls this several times for one command line and compares parameters by identity.
        key = f"{__name__}.params"
        if key not in ctx.meta:
            ctx.meta[key] = self._params(super().get_params(ctx))
        params: list[click.Parameter] = ctx.meta[key]
        return params

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Collect the hyperparameters that were set under the name `hyper`."""
        from triplane.unified_ir.federated.algorithms.table import hyperparameters

        try:
            # Before the options are made, since each hyperparameter of a file is one.
            names = _register(ctx, args) if self._from_files else {}
            rest = super().parse_args(ctx, args)
        except BaseException:
            ctx.close()  # click does so only for a context that it could make
            raise
        if names:
            ctx.params["algorithms"] = tuple(names.get(n, n) for n in ctx.params["algorithms"])
        # Unset ones are left out, since their default depends on the algorithm.
        values = {name: ctx.params.pop(name, None) for name in hyperparameters()}
        ctx.params["hyper"] = {name: v for name, v in values.items() if v is not None}
        ctx.params[KEY] = limits_set(ctx.params)
        ctx.params |= privacy_set(ctx.params)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error in the file of an algorithm names its line."""
        from triplane.unified_ir.cli.python_files import blame_file

        try:
            return super().invoke(ctx)
        except (TriplaneError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            for file in ctx.meta.get(FILES, ()):
                blame_file(error, file)
            raise

    def _params(self, own: list[click.Parameter]) -> list[click.Parameter]:
        from triplane.unified_ir.federated.algorithms.table import ALGORITHMS, hyperparameters

        limits = [*limit_options(), *privacy_options()]
        own = [*own, *limits]
        taken = {name for param in own for name in (param.name, *param.opts)}
        for name in hyperparameters():
            if not taken.isdisjoint({name, flag(name)}):
                raise InvalidInput(
                    f"the hyperparameter {name!r} has the name of an option of this command; "
                    "choose another name"
                )
        params = [_with_names(param, ", ".join(ALGORITHMS)) for param in own[: -len(limits)]]
        at = 1 + next(i for i, param in enumerate(params) if param.name == AFTER)
        params[at:at] = [*map(self._option, hyperparameters().values()), *limits]
        return params

    def _option(self, row: Hyperparameter) -> click.Option:
        low_open = row.rule.low_open or (row.rule.low == 0 and self._unset_by_zero(row.name))
        return number_option(row, _defaults(row), low_open=low_open)

    def _unset_by_zero(self, name: str) -> bool:
        from triplane.proto.hyperparameters import FIELDS

        return self._zero_is_unset and name in FIELDS

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Command`."""
        from triplane.unified_ir.federated.algorithms.table import ALGORITHMS

        lines = "\n".join(f"  {row.name:10} {row.summary}" for row in ALGORITHMS.values())
        epilog = (self.epilog or "").replace(SUMMARIES, lines) + PRIVACY_EPILOG
        click.Command(None, epilog=epilog).format_epilog(ctx, formatter)


def _register(ctx: click.Context, args: list[str]) -> dict[str, str]:
    """Register the algorithms of files for the time of the context; return their names by spec."""
    from triplane.unified_ir.cli.python_files import load_algorithm
    from triplane.unified_ir.federated.algorithms import registered

    names: dict[str, str] = {}
    bases: dict[str, str] = {}
    for option, value in zip(args, [*args[1:], ""], strict=True):
        spec = value if option == ALGORITHM else option.removeprefix(f"{ALGORITHM}=")
        if option.startswith(ALGORITHM) and IN_FILE in spec:
            file, _, name = spec.rpartition(":")
            name, plus, server = name.partition("+")
            base = f"{file}:{name}"
            if base not in bases:
                row = load_algorithm(base)
                ctx.with_resource(registered(row))
                ctx.meta.setdefault(FILES, []).append(file)
                bases[base] = row.name
            names[spec] = f"{bases[base]}{plus}{server}"
    return names


def _with_names(param: click.Parameter, names: str) -> click.Parameter:
    if not isinstance(param, click.Option) or NAMES not in (param.help or ""):
        return param
    # A copy: the option itself is shared by all calls of the command.
    named = copy.copy(param)
    named.help = (param.help or "").replace(NAMES, names)
    return named


def _defaults(row: Hyperparameter) -> str:
    """Return the usual default, and the algorithms that have another."""
    from triplane.unified_ir.federated.algorithms.table import ALGORITHMS

    others = [
        f"{algorithm.name} {own.default:g}"
        for algorithm in ALGORITHMS.values()
        for own in algorithm.hyper
        if own.name == row.name and own.default != row.default
    ]
    return "; ".join([f"{row.default:g}", *others])

"""The command's shell: find verbs, load the one that is called, and turn errors into one line.

A verb is an entry point of the group `triplane.verbs`. Its module imports only click and this
module at the top, so help stays fast. A verb that cannot be imported is listed with the reason and
does not affect the others. Errors are handled in one place, `run`: nothing below it prints errors
or exits.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    MissingExtra,
    NotFound,
    TriplaneError,
    Unavailable,
)
from triplane.unified_ir.cli.help_text import NarrowContext, fit_help
from triplane.unified_ir.files.html_table import printable

if TYPE_CHECKING:  # 25 ms that only the loading of verbs has to pay
    from importlib.metadata import EntryPoint

    _Text = click.ParamType[str]
else:
    _Text = click.ParamType

VERB_GROUP: Final = "triplane.verbs"
TIER_GROUP: Final = "triplane.tiers"
TRACEBACK_VARIABLE: Final = "TRIPLANE_TRACEBACK"
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE: the reader has left, as in `triplane inspect | head`
UNEXPECTED: Final = (
    70  # a bug in triplane (EX_SOFTWARE of sysexits.h); 1 is what `diff` returns for a difference
)

# fmt: off
EXIT_CODES: Final[Mapping[type[Exception], int]] = {
    InvalidInput: 2,  # also what click gives a wrong option
    NotFound:     2,
    Conflict:     3,
    Unavailable:  4,
    Corrupt:      5,
    MissingExtra: 6,
    OSError:      4,
}
# fmt: on

EPILOG: Final = """\
Each verb explains itself: triplane VERB --help

\b
Exit codes: 0 done; 1 the files differ (diff); 2 fix the call; 3 not in this state; 4 not now (port
taken, disk or memory full, cloud unreachable) or an unfinished rollout; 5 damaged file or broken
log; 6 an extra is missing; 7 a process of a training on many hosts was lost; 70 a fault of
triplane; 130 interrupted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A package's part of the command: an entry point of the group `triplane.tiers`.

    verbs: its verbs, each with its rank in the list of `--help`. guide: its paragraphs of `--help`
    by rank. extras: for the name of a module, the extra that installs it.
    """

    verbs: Mapping[str, int]
    guide: Mapping[int, str] = field(default_factory=dict)
    extras: Mapping[str, str] = field(default_factory=dict)


class Verbs(click.Group):
    """The group whose commands are entry points, imported only when named or listed."""

    context_class = NarrowContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs by rank, the order of a model's life; verbs without a rank come last."""
        ranks = {name: rank for tier in _tiers() for name, rank in tier.verbs.items()}
        return sorted(_entry_points(), key=lambda name: (ranks.get(name, math.inf), name))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Put the guides of the tiers before the shell's own epilog."""
        guide = dict(part for tier in _tiers() for part in tier.guide.items())
        self.epilog = "\n\n".join(guide[rank] for rank in sorted(guide)) + f"\n{EPILOG}"
        super().format_epilog(ctx, formatter)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb; if that fails, return a stand-in that reports why."""
        entry = _entry_points().get(cmd_name)
        return None if entry is None else _load(entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, but suggest the nearest verb for an unknown one."""
        if args and not args[0].startswith("-") and args[0] not in _entry_points():
            import difflib

            verbs = self.list_commands(ctx)
            nearest = difflib.get_close_matches(args[0], verbs, n=1)
            guess = f"did you mean {nearest[0]!r}?" if nearest else f"verbs: {', '.join(verbs)}"
            raise click.UsageError(f"unknown verb {args[0]!r}; {guess}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--debug", is_flag=True, help=f"Show tracebacks (also {TRACEBACK_VARIABLE}=1).")
@click.option("--version", is_flag=True, help="Print the version and exit.")
@click.pass_context
def triplane(ctx: click.Context, *, debug: bool, version: bool) -> None:
    """Carry one model through three planes: cloud, edge and device.

    Train it in Python, store it as one file (NAME.tpm), convert that file to a bundle for a
    machine, serve the bundle, and continue training it where it is used.
    """
    if debug:
        os.environ[TRACEBACK_VARIABLE] = "1"  # child processes of a verb show theirs too
    if version:
        from importlib.metadata import version as version_of

        click.echo(f"triplane {version_of('triplane')}")
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; only this function prints errors.

    A verb ends early with `ctx.exit(code)`; its return value is otherwise None.
    """
    as_json = "--json" in argv
    try:
        # Otherwise click itself would print errors and exit, with codes of its own.
        code = triplane.main(list(argv), prog_name="triplane", standalone_mode=False)
        if sys.stdout is not None:  # None where descriptor 1 was closed from the start
            sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error  # click raises Abort from the KeyboardInterrupt
        notes = getattr(cause, "__notes__", ()) if as_json else ()
        failure = _Failure("Interrupted", "; ".join(["interrupted", *notes]), INTERRUPTED)
        _report(failure, error, as_json=as_json)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout at exit and would fail again; from here on it writes into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the process edge
        # Python decodes arguments that are not UTF-8 with lone surrogates, which fail only where
        # they are encoded, far from the command line.
        odd = next((word for word in argv if _SURROGATE.search(word)), None)
        if odd is not None and isinstance(error, UnicodeError):
            error = InvalidInput(f"an argument is not valid UTF-8: {os.fsencode(odd)!r}")
        failure = _failure(error)
        _report(failure, error, as_json=as_json)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module` or raise MissingExtra naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module is installed, but something that it imports is missing: not a matter of our
        # extra.
        if error.name != module.partition(".")[0]:
            raise
        raise _missing(error.name, extra) from error


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Output of a verb: the result on stdout, as text or as one JSON document."""

    as_json: bool

    def note(self, text: str) -> None:
        """Print progress for people on stderr, so that a pipe receives only the result."""
        click.echo(text, err=True)

    def user_code(self) -> AbstractContextManager[Any]:
        """Return a block in which what code of the user prints is kept out of a JSON document."""
        return redirect_stdout(sys.stderr) if self.as_json else nullcontext()

    def result(self, record: Mapping[str, Any], text: str) -> None:
        """Print the verb's result, once: `record` under `--json`, else `text`."""
        click.echo(_json(record) if self.as_json else text)


class OutputFile(click.Path):
    """A file to write; it is refused before any work is done if its folder is not writable."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; a usage error names the folder that is missing or read-only."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"the folder {str(path.parent)!r} does not exist; create it", param, ctx)
        # The folder counts, not the file: files are written beside it and renamed.
        if not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(f"the folder {str(path.parent)!r} is not writable", param, ctx)
        return path


_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Matches a byte of an argument that is not UTF-8; only names of files may contain one."""
OUTPUT_FILE: Final = OutputFile()
COUNT: Final = click.IntRange(1)
NATURAL: Final = click.IntRange(0)
POSITIVE: Final = click.FloatRange(min=0, min_open=True)
NOT_NEGATIVE: Final = click.FloatRange(min=0)
FOLDER: Final = click.Path(file_okay=False, path_type=Path)
MAX_SECRET_CHARS: Final = 4096


class Secret(_Text):
    """A secret: the text itself, @FILE for the first line of a file, or "-" for standard input.

    @FILE and "-" exist because command lines are visible to every user of the machine, and shells
    store them in their history. One line, since `triplane cloud token` explains its token below it.
    """

    name = "secret"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the secret without surrounding white space."""
        text = str(value)
        try:
            if text == "-":
                text = _typed() if sys.stdin.isatty() else sys.stdin.read(MAX_SECRET_CHARS)
            elif text.startswith("@"):
                with Path(text[1:]).open(encoding="utf-8") as file:
                    text = file.read(MAX_SECRET_CHARS)
        except (OSError, UnicodeError, EOFError) as error:
            why = (
                (error.strerror if isinstance(error, OSError) else None) or str(error) or "no input"
            )
            self.fail(f"{text} cannot be read: {why}", param, ctx)
        return text.strip().partition("\n")[0].rstrip()


def _typed() -> str:
    """Read a secret from the terminal without showing it."""
    from getpass import getpass

    return getpass("token (it is not shown): ")


SECRET: Final = Secret()


def check_distinct_files(
    reads: Iterable[str | Path | None], writes: Mapping[str, Path | None]
) -> None:
    """Raise InvalidInput if an output file is also an input, or two options name one file."""
    # Resolved, so that a link or another spelling of the same file is noticed too.
    read = {Path(p).resolve() for p in reads if p is not None and Path(p).is_file()}
    taken: dict[Path, str] = {}
    for option, path in writes.items():
        if path is None:
            continue
        place = path.resolve()
        if place in read:
            raise InvalidInput(f"{option} is {path}, which is an input; name another file")
        if place in taken:
            raise InvalidInput(f"{taken[place]} and {option} are both {path}; name two files")
        taken[place] = option


SUFFIXES: Final[Mapping[str, str]] = {"model file": ".tpm", "bundle": ".bundle", "plan": ".plan"}
"""The usual suffix of each kind of file that a verb writes."""
_OTHERS: Final[Mapping[str, str]] = {
    ".onnx": ", not an ONNX model; `triplane export` writes one",
    ".bundle": ", not a bundle; `triplane convert` makes one",
    ".plan": ", not a plan; `triplane convert --plan` makes one",
    ".tpm": ", not a model file; `triplane train` and `triplane import` write one",
    ".npz": ", not arrays",
    ".npy": ", not an array",
    ".safetensors": ", not a safetensors file; the one inside (any unzip takes it out) holds the "
    "weights",
    ".pt": ", not a PyTorch file",
    ".pth": ", not a PyTorch file",
    ".h5": ", not a Keras file",
    ".json": ", not JSON",
    ".py": ", not Python",
}
"""Suffixes of other kinds of files, with the end of the error message for each."""


def check_suffix(option: str, path: Path | None, kind: str) -> None:
    """Raise InvalidInput if a file of `kind` would have the suffix of another kind of file."""
    suffix = "" if path is None else path.suffix.lower()
    if path is not None and suffix in _OTHERS and suffix != SUFFIXES[kind]:
        better = path.with_suffix(SUFFIXES[kind])
        raise InvalidInput(f"a {kind} is written{_OTHERS[suffix]}. Give {option} {better}")


def option(
    usage: str, help_text: str, kind: Any = None, *, name: str = "", **attrs: Any
) -> click.Option:
    """Return the option for a usage such as "--lr RATE"; the help shows its default.

    name: the name of the parameter, if it is not that of the option.
    """
    flag, _, metavar = usage.partition(" ")
    attrs = {"type": kind, "metavar": metavar or None, "show_default": True, **attrs}
    return click.Option([flag, *filter(None, [name])], help=help_text, **attrs)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result, or the error, as one JSON document."
)


def open_output(as_json: bool) -> CommandOutput:  # noqa: FBT001 - handed on from `json_option`
    """Return the output for the flag that `json_option` parsed."""
    return CommandOutput(as_json)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error as the user sees it; --json prints these fields under their names."""

    family: str
    message: str
    exit_code: int


def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=VERB_GROUP)}


def _tiers() -> list[Tier]:
    from importlib.metadata import entry_points

    tiers = []
    for entry in entry_points(group=TIER_GROUP):
        with suppress(Exception):  # its verbs are still listed, and report why they fail
            tiers.append(entry.load())
    return tiers


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except Exception as error:  # noqa: BLE001 - one broken verb must not hide the others
        return _unavailable(entry.name, error)
    if not isinstance(command, click.Command):
        return _unavailable(entry.name, InvalidInput(f"{entry.value} is not a click command"))
    return fit_help(command)


def _unavailable(name: str, error: Exception) -> click.Command:
    def refuse() -> None:
        raise error

    return click.Command(
        name,
        callback=refuse,
        short_help=f"(unavailable: {_first_line(error)})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _failure(error: Exception) -> _Failure:
    """Describe `error` in one line, with its exit code."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "triplane"
        message = f"{error.format_message()} (see {where} --help)"
        return _Failure("InvalidInput", message, error.exit_code)
    if isinstance(error, click.ClickException):
        return _Failure("InvalidInput", error.format_message(), error.exit_code)
    if isinstance(error, ModuleNotFoundError):
        extras = {name: extra for tier in _tiers() for name, extra in tier.extras.items()}
        if error.name in extras:
            error = _missing(error.name, extras[error.name])
    if isinstance(error, MemoryError):
        reason = str(error) or "an allocation failed"
        error = Unavailable(f"out of memory: {reason}; use smaller sizes, or a larger machine")
    for family, code in EXIT_CODES.items():
        if isinstance(error, family):
            return _Failure(family.__name__, str(error), getattr(error, "exit_code", code))
    if isinstance(error, TriplaneError):
        return _Failure("TriplaneError", str(error), UNEXPECTED)
    message = f"unexpected {_first_line(error)} (a bug in triplane; --debug shows where)"
    return _Failure("Unexpected", message, UNEXPECTED)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    return _failure(error).exit_code if isinstance(error, Exception) else INTERRUPTED


def _report(failure: _Failure, error: BaseException, *, as_json: bool) -> None:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        import traceback

        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    if as_json:
        # Standard output itself may be what failed, as on a full disk.
        with suppress(OSError):
            click.echo(_json({"error": asdict(failure)}))
            return
    # The convention of no-color.org; None lets click find out whether stderr is a terminal.
    color = False if os.environ.get("NO_COLOR") else None
    # One line, whatever the message holds, so that logs and scripts can rely on it.
    line = " ".join(printable(failure.message).split())
    click.secho(f"triplane: {line}", fg="red", err=True, color=color)


def _missing(module: str, extra: str) -> MissingExtra:
    return MissingExtra(
        f"{module} is not installed; it comes with: pip install 'triplane[{extra}]'"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _json(record: Mapping[str, Any]) -> str:
    import json

    # numpy's scalars are the only values in records that JSON does not know.
    return json.dumps(record, indent=2, default=lambda scalar: scalar.item())

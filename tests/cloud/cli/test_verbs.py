"""What holds for every verb of the fleet: light to load, explained, machine-readable."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.cloud.cli.verbs import MODULES, commands

from triplane.edge.cli import edge
from triplane.unified_ir.cli import shell
from triplane.unified_ir.convert.targets import TARGETS

LIGHT = (
    "import sys, {module}; print(sorted({{m.partition('.')[0] for m in sys.modules}} & {heavy}))"
)
HEAVY = {"grpc", "rich", "numpy", "google", "sqlalchemy", "starlette", "cryptography", "tuf"}


ALL = [
    pytest.param(command, id=" ".join((module.command.name, *path)))
    for module in MODULES
    for path, command in commands(module.command)
]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_verb_imports_click_only_until_it_runs(module):
    code = LIGHT.format(module=module.__name__, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def params_of(command):
    """All parameters, those that a table decides too."""
    return command.get_params(click.Context(command))


@pytest.mark.parametrize("command", ALL)
def test_every_verb_speaks_json_and_explains_every_option(command):
    options = [p for p in params_of(command) if isinstance(p, click.Option)]
    assert "--json" in {name for option in options for name in option.opts}
    assert command.help
    assert "triplane " in (command.epilog or "")
    for option in options:
        assert option.help or isinstance(option.type, click.Choice | click.IntRange), option.name


@pytest.mark.parametrize("command", ALL)
def test_a_list_of_verbs_shows_whole_sentences(command):
    """Click cuts what is longer than a line of 80 columns has left."""
    assert not command.get_short_help_str(60).endswith("...")


@pytest.mark.parametrize("command", ALL)
def test_every_verb_that_calls_the_cloud_takes_an_identity(command):
    names = {name for p in params_of(command) for name in p.opts}
    local = {"init", "up", "enrol", "make", "collect", "simulate"}
    makes_one = command.name in {"enrol", "operator"}
    assert ("--identity" in names) == (command.name not in local) or makes_one


def test_an_identity_that_is_not_there_says_how_one_is_made(tmp_path, capsys):
    assert shell.run(["fleet", "ls", "--identity", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "triplane cloud init" in said
    assert "triplane cloud token" in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("deploy", "digits"), "--to"),
        (("deploy", "digits", "--to", "all", "--waves", "150%"), "5%,25%,100%"),
        (("deploy", "digits", "--to", "all", "--node-deadline", "soon"), "90s"),
        (("cloud", "token", "--label", "site"), "site=factory"),
        (("cloud", "init"), "--offline-keys"),
        (("registry", "push", "nowhere.tpm"), "nowhere.tpm"),
        (("registry", "alias", "digits", "stable"), "--remove"),
        (("registry", "alias", "digits", "stable", "3", "--remove"), "--remove"),
        (("fleet", "label", "n", "site"), "KEY=VALUE"),
        (("fleet", "label", "n", "=x"), "KEY=VALUE"),
        (("fleet", "label", "n", "a=1", "a=2"), "each key once"),
    ],
)
def test_a_wrong_call_is_named_before_anything_is_sent(argv, words, capsys):
    assert shell.run(list(argv)) == 2
    assert words in capsys.readouterr().err


ROOT = Path(__file__).resolve().parents[3]
TREE = {"edge": edge} | {module.command.name: module.command for module in MODULES}
EXAMPLE = re.compile(rf"^\s*(triplane (?:{'|'.join(TREE)}) .*)$", re.MULTILINE)


def written():
    """Every command line of the pages for operators and of the verbs' own help."""
    texts = [(ROOT / "docs" / page).read_text() for page in ("deploying.md", "operations.md")]
    texts += [command.epilog or "" for root in TREE.values() for _, command in commands(root)]
    return [line for text in texts for line in EXAMPLE.findall(text.replace("\\\n", " "))]


def examples():
    """The commands, without what the line says about them."""
    return sorted({re.split(r"\s{3,}|  +[a-z]| \| | \(| && ", line)[0] for line in written()})


@pytest.mark.parametrize("line", examples())
def test_every_written_example_names_verbs_and_options_that_there_are(line):
    command, words = None, shlex.split(line)[1:]
    while words and (command is None or isinstance(command, click.Group)):
        command = (TREE if command is None else command.commands)[words.pop(0)]
    assert command is not None
    known = {name for p in params_of(command) for name in (*p.opts, *p.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known | {"--help"}


def test_no_example_pipes_a_server_which_would_hold_the_pipe_open():
    assert [line for line in written() if re.match(r"triplane (edge|cloud) up\b.* \| ", line)] == []


@pytest.mark.parametrize("argv", [["registry", "push"], ["sign"]], ids=" ".join)
def test_the_help_lists_every_target(argv, capsys):
    assert shell.run([*argv, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{row.name} ({row.summary})" in text for row in TARGETS.values())

"""Whole numbers of every verb: the largest and the absurd end in a refusal, none in a crash."""

import click
import pytest
from tests.cloud.cli.verbs import MODULES, answer, commands
from tests.support.cloud_process import running

from triplane.cloud.cli.options import WAVES
from triplane.unified_ir.cli import shell

NEEDED = {
    ("cloud", "init"): ["--home", "{place}/new", "--offline-keys", "{place}/new-keys"],
    ("cloud", "keys", "rotate"): ["--keys", "{place}/keys", "--role", "release"],
    ("deploy",): ["m@1", "--to", "all"],
    ("federate", "run"): ["m@1", "--population", "p"],
    ("registry", "alias"): ["m", "stable"],
}
"""What a verb wants beside the number. There is no such model, so nothing ever begins."""
ABSURD = ("-1", str(10**24), "9" * 5000)
LARGE = (str(2**31), str(2**32), str(2**63), str(2**64))


def counts(command):
    """The options and arguments of a command that are whole numbers, or lists of them."""
    params = command.get_params(click.Context(command))
    return [p for p in params if isinstance(p.type, click.types.IntParamType) or p.type is WAVES]


CASES = [
    pytest.param((module.command.name, *path), parameter, id=" ".join((
        module.command.name, *path, parameter.name or "")))
    for module in MODULES
    for path, command in commands(module.command)
    for parameter in counts(command)
    if command.name != "simulate"
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    answer("cloud", "init", "--home", folder / "home", "--offline-keys", folder / "keys")
    with running(folder / "home"):
        yield folder


def test_the_table_has_every_verb_with_numbers():
    verbs = {case.values[0] for case in CASES}
    assert {("deploy",), ("registry", "alias"), ("federate", "run"), ("audit", "ls")} <= verbs


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "parameter"), CASES)
def test_a_number_of_any_size_is_taken_or_refused_as_a_wrong_call(
    place, verb, parameter, capsys, monkeypatch
):
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(place / "home" / "operator"))
    needed = [text.format(place=place) for text in NEEDED.get(verb, ())]
    for value in (*LARGE, *ABSURD):
        given = [f"{parameter.opts[0]}={value}"]
        if isinstance(parameter, click.Argument):
            given = [value] if value != "-1" else ["--", value]
        code = shell.run([*verb, *needed, *given])
        said = capsys.readouterr().err
        allowed = {2} if value in ABSURD else {0, 2}
        assert code in allowed, f"{value}: {said}"
        assert "unexpected" not in said
        assert "out of range" not in said.lower().replace("is not in the range", "")

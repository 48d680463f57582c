"""Help fits the terminal: every verb, at several widths, with nothing lost."""

import re
import shlex

import click
import pytest

from triplane.unified_ir.cli import shell
from triplane.unified_ir.cli.help_text import narrowed


def commands(command, path=()):
    """Every command of the program, with the words that name it."""
    yield path
    ctx = click.Context(command)
    for name in command.list_commands(ctx) if isinstance(command, click.Group) else ():
        yield from commands(command.get_command(ctx, name), (*path, name))


ALL = tuple(commands(shell.triplane))


@pytest.fixture
def shown(capsys, monkeypatch):
    """The help of a command on a terminal of a given width."""

    def show(path, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert shell.run([*path, "--help"]) == 0, path
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_of_every_command_fits(shown, columns):
    assert len(ALL) > 50
    wide = [
        (path, line)
        for path in ALL
        for line in shown(path, columns).splitlines()
        if len(line) > columns
    ]
    assert wide == []


def test_no_word_is_lost(shown):
    groups = {path[:-1] for path in ALL}  # click shortens their lists of commands
    for path in set(ALL) - groups:
        wide, narrow = (re.sub(r"[\s\\]+", "", shown(path, columns)) for columns in (200, 66))
        assert sorted(wide) == sorted(narrow), path


def test_a_command_that_is_wrapped_can_be_copied():
    command = "triplane data inspect t.csv --x 'a b*:2x64' --y \"a label\" --group person"
    broken = command.replace(" --y", " \\\n      --y")
    text = narrowed(f"\b\nExamples:\n  {broken}", 40)
    rows = text.split("\n")[2:]
    assert len(rows) > 1
    assert all(row.endswith(" \\") for row in rows[:-1])
    assert shlex.split("\n".join(rows).replace("\\\n", " ")) == shlex.split(command)
    assert max(map(len, rows)) <= 40
    assert all(row.startswith("      --") for row in rows[1:])  # an option has its value beside it


def test_columns_and_prose_are_wrapped_apart():
    text = (
        "\b\nA line about --support and others that is long,\nand its end.\n"
        "  maml   a start from which steps lead far"
    )
    assert narrowed(text, 30).split("\n") == [
        "\b",
        "A line about --support and",
        "others that is long, and its",
        "end.",
        "  maml   a start from which",
        "         steps lead far",
    ]  # fmt: skip
    assert narrowed(text, 60) == text

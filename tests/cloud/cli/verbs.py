"""Verbs in this process: a tenth of the time of one of their own."""

import contextlib
import io
import json

import click

from triplane.cloud.cli import audit, cloud, deploy, federate, fleet, registry, rollout, sign
from triplane.unified_ir.cli import shell


def answer(*argv, code=0):
    """What a verb answers under `--json`; the error's record where another code is due."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ended = shell.run([*map(str, argv), "--json"])
    assert ended == code, out.getvalue()
    return json.loads(out.getvalue())


MODULES = (audit, cloud, deploy, federate, fleet, registry, rollout, sign)


def commands(command, path=()):
    """Every command that does something, with its words."""
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))
    else:
        yield path, command

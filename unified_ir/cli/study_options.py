"""Options of `federate simulate` that have an effect only beside others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click
from click.core import ParameterSource

from triplane.proto.errors import InvalidInput

NEEDS: Final = (
    ("keep", "--keep", "compression", "top-k", "--compression top-k"),
    ("alpha", "--alpha", "way", "dirichlet", "--partition dirichlet"),
    ("label_shards", "--label-shards", "way", "labels", "--partition labels"),
)
"""A parameter and its flag, which need a parameter to have a value, as it is written."""
BY_GROUP: Final = {"least": "--least"}
WITHOUT_GROUP: Final = {"way": "--partition", "population": "--population"}


def check_effects(options: Mapping[str, Any]) -> None:
    """Raise InvalidInput for an option on the command line that has no effect beside the others."""
    for name, flag, other, value, text in NEEDS:
        if _is_stated(name) and options[other] != value:
            raise InvalidInput(f"{flag} belongs to {text}; add that, or leave it out")
    for name, flag in BY_GROUP.items():
        if _is_stated(name) and not options["group"]:
            raise InvalidInput(f"{flag} belongs to --group; add --group COLUMN, or leave it out")
    for name, flag in WITHOUT_GROUP.items():
        if _is_stated(name) and options["group"]:
            raise InvalidInput(f"{flag} divides samples without --group; give one of them")


def _is_stated(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE

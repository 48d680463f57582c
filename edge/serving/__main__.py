"""`python -m triplane.edge.serving OPTIONS`: the serving process; OPTIONS is one JSON object.

Its keys are the fields of `Options`, with defaults for those that are missing; `limits` is an
object of fields of `ServingLimits`. People use `triplane edge serve`, which also calls `main`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.options import Options
from triplane.proto.errors import InvalidInput
from triplane.proto.logs import configure_logging, exit_on_error, quiet_grpc, read_options


def main(options: Options) -> None:
    """Log to standard error and serve until a signal. Raises the families."""
    configure_logging(options.log_level)
    quiet_grpc()
    from triplane.edge.serving import process

    process.run(options)


def options_from(values: Mapping[str, Any]) -> Options:
    """Return options from plain values; limits may be strings. InvalidInput names a bad key."""
    limits = values.get("limits", {})
    if not isinstance(limits, dict) or isinstance(values.get("bundles"), str):
        raise InvalidInput(f"limits is an object and bundles a list, got {values!r}")
    for what, cls, keys in (("option", Options, values), ("limit", ServingLimits, limits)):
        names = [field.name for field in fields(cls)]
        for name in keys:
            if name not in names:
                raise InvalidInput(f"no {what} {name!r}; there are {', '.join(names)}")
    try:
        bounds = ServingLimits(**{name: _whole(name, value) for name, value in limits.items()})
        return Options(**{**values, "bundles": tuple(values["bundles"]), "limits": bounds})
    except InvalidInput:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"serving options need bundles, and whole numbers as limits: {error}"
        ) from error


def _whole(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        default = next(field.default for field in fields(ServingLimits) if field.name == name)
        raise InvalidInput(
            f"limit {name} is {value!r}; give a whole number, as {name}={default}"
        ) from error


def parse(argv: Sequence[str]) -> Options:
    """Return the options of a command line of one JSON object. InvalidInput."""
    return options_from(read_options(argv, '{"bundles": ["digits.bundle"]}'))


if __name__ == "__main__":
    exit_on_error("serving", lambda: main(parse(sys.argv[1:])))

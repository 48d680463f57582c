"""Types of option values: shares, durations, waves, labels, digests. Errors name the valid forms.

A value is parsed once, here; the cloud checks whether the values of a request fit together. Each
function also takes a value that it returned, because click parses a value again in some cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from click.types import FuncParamType

from triplane.proto.plan_statement import MAX_LEAST

MOST_WAVES: Final = 100
MAX_COUNT: Final = 999_999_999
"""Largest count in a request, of versions, nodes or rounds; it fits in every field."""
MAX_NUMBER: Final = (1 << 63) - 1
"""Largest integer that a database column of the cloud can hold."""
# fmt: off
UNIT_S: Final = {
    "":    1.0,
    "s":   1.0,
    "min": 60.0,
    "h":   3600.0,
    "d":   86400.0,
}
# fmt: on
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d)?")
_PERCENT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_COUNT: Final = re.compile(r"[1-9][0-9]*")


def share(value: Any) -> float:
    """Parse a percentage such as "95%" to a share between 0 and 1."""
    # A value that this function returned before, see the top of the module.
    if isinstance(value, float):
        return value
    match = _PERCENT.fullmatch(str(value))
    if match is None or float(match[1]) > 100:
        raise click.BadParameter(f"{value!r} is not a percentage from 0% to 100%; write it as 95%")
    return float(match[1]) / 100


def duration(value: Any) -> float:
    """Parse "90", "90s", "10min", "2h" or "7d" to seconds."""
    if isinstance(value, float):
        return value
    match = _DURATION.fullmatch(str(value))
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; write it as 90s, 10min, 2h or 7d")
    return float(match[1]) * UNIT_S[match[2] or ""]


def waves(value: Any) -> tuple[tuple[str, float], ...]:
    """Parse "5%,25%,100%" or "1,10,100%" to pairs ("percent", float) or ("nodes", int)."""
    if isinstance(value, tuple):
        return value
    sizes = tuple(_wave_size(part.strip()) for part in str(value).split(","))
    if len(sizes) > MOST_WAVES:
        raise click.BadParameter(f"there are {len(sizes)} waves; at most {MOST_WAVES} are allowed")
    return sizes


def _wave_size(text: str) -> tuple[str, float]:
    percent = _PERCENT.fullmatch(text)
    if percent is not None and 0 < float(percent[1]) <= 100:
        return "percent", float(percent[1])
    if not _COUNT.fullmatch(text):
        rule = "give shares or counts, such as 5%,25%,100% or 1,10,100%"
        raise click.BadParameter(f"{text!r} is not a wave size; {rule}")
    # Compare lengths first: parsing thousands of digits is slow, and Python limits it.
    if len(text) > len(str(MAX_COUNT)):
        raise click.BadParameter(f"a wave has at most {MAX_COUNT} nodes, not {text[:20]}...")
    return "nodes", int(text)


def label(value: Any) -> tuple[str, str]:
    """Parse a label to set, such as "site=factory", to its key and value."""
    if isinstance(value, tuple):
        return value
    key, equals, text = str(value).partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{value!r} is not a label; write it as site=factory")
    return key, text


def digest(value: Any) -> str:
    """Parse all 64 hexadecimal digits of a SHA-256, in either case, or an empty text."""
    text = str(value).strip().lower()
    if text and not _DIGEST.fullmatch(text):
        rule = "give all 64 hexadecimal digits, as `triplane inspect` prints them"
        raise click.BadParameter(f"{value!r} is not a SHA-256; {rule}")
    return text


SHARE: Final = FuncParamType(share)
DURATION: Final = FuncParamType(duration)
WAVES: Final = FuncParamType(waves)
LABEL: Final = FuncParamType(label)
DIGEST: Final = FuncParamType(digest)
FOLDER: Final = click.Path(exists=True, file_okay=False, path_type=Path)


def keys_option(
    text: str = "The offline folder that `triplane cloud init` wrote.", *, required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--keys DIR`, an existing folder of signing keys."""
    return click.option("--keys", required=required, type=FOLDER, metavar="DIR", help=text)


def least_option(
    unit: str, text: str, default: int | str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--least-UNIT N` of signed plans.

    default: a text describes it and the value is None.
    """
    value = default if isinstance(default, int) else None
    return click.option(
        f"--least-{unit}", type=click.IntRange(1, MAX_LEAST), default=value, metavar="N",
        help=f"{text}  [default: {default}]",
    )  # fmt: skip


def example(command: str) -> str:
    """Return an epilog with an example, which click prints without wrapping it."""
    return f"\b\nExample:\n  triplane {command}"

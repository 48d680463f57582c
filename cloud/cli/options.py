"""Types of option values: shares, durations, waves, labels, digests. Errors name the valid forms.

A value is parsed once here; what the numbers mean together is judged by the cloud.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:  # the class takes an argument since click 8.3, for type checkers
    _Number = click.ParamType[float]
    _Sizes = click.ParamType[tuple[tuple[str, float], ...]]
    _Pair = click.ParamType[tuple[str, str]]
    _Text = click.ParamType[str]
else:
    _Number = _Sizes = _Pair = _Text = click.ParamType

MOST_WAVES: Final = 100
MAX_COUNT: Final = 999_999_999
"""The largest count in a request, of versions, nodes or rounds; every field has room for it."""
MAX_NUMBER: Final = (1 << 63) - 1
"""The largest number that a database of the cloud has room for."""
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


class Share(_Number):
    """A percentage; the value is a share between 0 and 1."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """From "95%"."""
        match = _PERCENT.fullmatch(str(value))
        if isinstance(value, float):
            return value
        if match is None or float(match[1]) > 100:
            self.fail(f"{value!r} is no percentage from 0% to 100%; write it as 95%", param, ctx)
        return float(match[1]) / 100


class DurationType(_Number):
    """A length of time; the value is in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """From "90", "90s", "10min", "2h" or "7d"."""
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no duration; write it as 90s, 10min, 2h or 7d", param, ctx)
        return float(match[1]) * UNIT_S[match[2] or ""]


class Waves(_Sizes):
    """Sizes of waves; the value is a tuple of ("percent", float) and ("nodes", int)."""

    name = "waves"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[str, float], ...]:
        """From "5%,25%,100%" or "1,10,100%"."""
        if isinstance(value, tuple):
            return value
        sizes = tuple(self._size(part.strip(), param, ctx) for part in str(value).split(","))
        if len(sizes) > MOST_WAVES:
            self.fail(f"{len(sizes)} waves; at most {MOST_WAVES}", param, ctx)
        return sizes

    def _size(
        self, text: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        percent = _PERCENT.fullmatch(text)
        if percent is not None and 0 < float(percent[1]) <= 100:
            return "percent", float(percent[1])
        if not _COUNT.fullmatch(text):
            rule = "give shares or counts, as 5%,25%,100% or 1,10,100%"
            self.fail(f"{text!r} is no wave; {rule}", param, ctx)
        if len(text) > len(str(MAX_COUNT)):
            self.fail(f"a wave of {text[:20]}... nodes; at most {MAX_COUNT}", param, ctx)
        return "nodes", int(text)


class Label(_Pair):
    """A label to set: the value is (key, value)."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """From "site=factory"."""
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is no label; write it as site=factory", param, ctx)
        return key, text


class Digest(_Text):
    """A SHA-256; the value is its 64 hexadecimal digits, or empty."""

    name = "digest"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """From 64 hexadecimal digits, of either case; not from a part of them."""
        text = str(value).strip().lower()
        if text and not _DIGEST.fullmatch(text):
            rule = "give all 64 hexadecimal digits, as `triplane inspect` prints them"
            self.fail(f"{value!r} is no SHA-256; {rule}", param, ctx)
        return text


SHARE: Final = Share()
DURATION: Final = DurationType()
WAVES: Final = Waves()
LABEL: Final = Label()
DIGEST: Final = Digest()

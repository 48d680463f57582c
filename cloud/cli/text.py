"""Output of the verbs: messages as records for JSON, tables of aligned text, times as ages.

Text from nodes and models is not trusted: control characters, with which a label could repaint a
terminal, are printed as question marks.
"""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import Message

NOTHING: Final = "-"
GAP: Final = "  "
MAX_WIDTH: Final = 100
"""Longest line of wrapped text, for reading."""
# fmt: off
_AGES: Final = (
    (120.0,    1.0,     "s"),
    (7200.0,   60.0,    "min"),
    (172800.0, 3600.0,  "h"),
    (1e300,    86400.0, "days"),
)
# fmt: on


def plain(value: Any) -> Any:
    """Return a value for JSON, with every message in it as a record."""
    if isinstance(value, Message):
        return record(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def record(message: Message) -> dict[str, Any]:
    """Return the fields of a message: bytes as hex, enums as lower-case names.

    A field of a `oneof` or an `optional` one is left out where it is not set.
    """
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if field.containing_oneof is None or message.HasField(field.name)
    }


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    # A map field is a repeated field of generated messages, which would read as a list of pairs.
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_scalar(item, field) for item in value]
    return _scalar(value, field)


def _scalar(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return record(value)
    if field.enum_type is not None:
        # An unknown number comes from a newer cloud; show it instead of failing.
        known = field.enum_type.values_by_number.get(value)
        return known.name.lower() if known else str(value)
    return value.hex() if isinstance(value, bytes) else value


def enum_text(message: Message, field: str) -> str:
    """Return the lower-case name of an enum field's value, or the number if it is unknown here."""
    return str(_scalar(getattr(message, field), message.DESCRIPTOR.fields_by_name[field]))


def shown(text: str) -> str:
    """Return `text` on one line, without characters that a terminal acts on."""
    return "".join(c if c.isprintable() else "?" for c in text)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Align columns to their widest cells, on as many columns as a terminal has.

    On a narrower terminal the widest columns become lines below each row, "    labels: a=1". The
    first column always stays. width: None for that of the terminal; a pipe or file has no limit.
    """
    limit = _terminal_width() if width is None else width
    cells = [list(headings), *([shown(cell) or NOTHING for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    beside, below = list(range(len(headings))), list[int]()
    while sum(widths[i] + len(GAP) for i in beside) - len(GAP) > limit and len(beside) > 1:
        below.append(max(beside[1:], key=lambda i: widths[i]))
        beside.remove(below[-1])
    lines = [[GAP.join(row[i].ljust(widths[i]) for i in beside).rstrip()] for row in cells]
    for row, own in zip(cells[1:], lines[1:], strict=True):
        for i in sorted(below):
            if row[i] != NOTHING:
                own += _wrapped(f"{headings[i].lower()}: {row[i]}", limit)
    return "\n".join(line for own in lines for line in own)


def _wrapped(text: str, width: float) -> list[str]:
    """Break an indented text between words; a long word, such as a digest, stays whole."""
    return textwrap.wrap(
        text,
        int(min(width, MAX_WIDTH)),
        initial_indent=" " * 4,
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _terminal_width() -> float:
    if sys.stdout is None or not sys.stdout.isatty():
        return math.inf
    return shutil.get_terminal_size().columns


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return one line for each pair of a name and a value, with the values aligned."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {shown(value) or NOTHING}" for name, value in rows)


def age(time_s: float, now_s: float | None = None) -> str:
    """Format an age in its shortest unit; "-" for never."""
    if time_s <= 0:
        return NOTHING
    return f"{duration((time.time() if now_s is None else now_s) - time_s)} ago"


def until(time_s: float, now_s: float | None = None) -> str:
    """Format the time left as "in 5 h"; "expired" if it has passed, "-" if it was never set."""
    if time_s <= 0:
        return NOTHING
    left_s = time_s - (time.time() if now_s is None else now_s)
    return f"in {duration(left_s)}" if left_s > 0 else "expired"


def expiry_text(time_s: float) -> str:
    """Format an expiry time as "expires in 30 days" or "expired"."""
    left = until(time_s)
    return left if left == "expired" else f"expires {left}"


def duration(seconds: float) -> str:
    """Format a length of time as "40 s", "12 min", "5 h" or "3 days"."""
    seconds = max(0.0, seconds)
    unit_s, unit = next((unit, name) for limit, unit, name in _AGES if seconds < limit)
    return f"{round(seconds / unit_s)} {unit}"


def size(n_bytes: int) -> str:
    """Format a size as "312 B", "41.3 KiB", "1.8 MiB" or "2.1 GiB"."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    power = min((n_bytes.bit_length() - 1) // 10, 3)
    return f"{n_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def labels_text(labels: dict[str, str]) -> str:
    """Format labels as "camera=new,site=factory", in the order of their names."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))

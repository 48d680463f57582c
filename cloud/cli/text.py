"""How answers look: messages as plain records, rows as aligned text, times as ages.

What a node or a model says of itself is shown, never obeyed: control characters, with which a
label could repaint a terminal, leave as question marks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from google.protobuf.message import Message

NOTHING: Final = "-"
# fmt: off
_AGES: Final = (
    (120.0,    1.0,     "s"),
    (7200.0,   60.0,    "min"),
    (172800.0, 3600.0,  "h"),
    (1e300,    86400.0, "days"),
)
# fmt: on


def record(message: Message) -> dict[str, Any]:
    """Every field that has a meaning without being set: bytes as hex, enums as lower-case names."""
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if field.containing_oneof is None or message.HasField(field.name)
    }


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_plain(item, field) for item in value]
    return _plain(value, field)


def _plain(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return record(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name.lower() if known else str(value)
    return value.hex() if isinstance(value, bytes) else value


def enum_text(message: Message, field: str) -> str:
    """The name of an enum's value in lower case, or its number where this program is older."""
    return str(_plain(getattr(message, field), message.DESCRIPTOR.fields_by_name[field]))


def shown(text: str) -> str:
    """`text` on one line, without characters that a terminal acts on."""
    return "".join(c if c.isprintable() else "?" for c in text)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the last one runs on."""
    cells = [list(headings), *([shown(cell) or NOTHING for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    widths[-1] = 0
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """One fact a line, its name before it."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {shown(value) or NOTHING}" for name, value in rows)


def age(time_s: float, now_s: float | None = None) -> str:
    """Format an age in its shortest unit; "-" for never."""
    if time_s <= 0:
        return NOTHING
    return f"{duration((time.time() if now_s is None else now_s) - time_s)} ago"


def until(time_s: float, now_s: float | None = None) -> str:
    """How long from now; "expired" where it has passed, "-" where it was never set."""
    if time_s <= 0:
        return NOTHING
    left_s = time_s - (time.time() if now_s is None else now_s)
    return f"in {duration(left_s)}" if left_s > 0 else "expired"


def duration(seconds: float) -> str:
    """As "40 s", "12 min", "5 h" or "3 days"."""
    seconds = max(0.0, seconds)
    unit_s, unit = next((unit, name) for limit, unit, name in _AGES if seconds < limit)
    return f"{round(seconds / unit_s)} {unit}"


def size(n_bytes: int) -> str:
    """As "312 B", "41.3 KiB", "1.8 MiB" or "2.1 GiB"."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    amount, units = float(n_bytes), iter(("KiB", "MiB", "GiB"))
    unit = "B"
    while amount >= 1024 and (next_unit := next(units, None)) is not None:
        amount, unit = amount / 1024, next_unit
    return f"{amount:.1f} {unit}"


def labels_text(labels: dict[str, str]) -> str:
    """As "camera=new,site=factory", in the order of the names."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))

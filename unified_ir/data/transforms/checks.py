"""Checks of steps: their fields, which a JSON file may set to anything, and the columns they take.

A message begins with the step's name and states the rule, the value and what to do.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import MAX_COLUMNS, Field, Schema
from triplane.unified_ir.data.step import RowStep, Step

LARGEST: Final = float(np.finfo(np.float32).max)
SMALLEST: Final = float(np.finfo(np.float32).tiny)
"""Smallest positive divisor: below it, float32 loses digits or is 0."""
MAX_NAME: Final = 1024
"""Characters of a column's name."""
MAX_VALUES: Final = 1_000_000
"""Entries of a tuple among the fields of a step, such as a vocabulary."""
MAX_SAMPLE_BYTES: Final = 256 << 20
"""What a step makes of one sample, where it can be larger than its input."""
DTYPES: Final = (
    "bool",
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
"""Types of numbers that a step can produce."""


def invalid(step: Step, message: str) -> InvalidInput:
    """Return the error that a step refuses something with."""
    return InvalidInput(f"{type(step).__name__}: {message}")


def number(
    step: RowStep, name: str, value: Any, *, low: float = -LARGEST, high: float = LARGEST
) -> None:
    """Require a number in low..high; by default any finite one of float32."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(step, f"{name} must be a number in {low}..{high}, got {reprlib.repr(value)}")


def whole(step: RowStep, name: str, value: Any, *, low: int, high: int) -> None:
    """Require a whole number in low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        shown = reprlib.repr(value)
        raise invalid(step, f"{name} must be a whole number in {low}..{high}, got {shown}")


def flag(step: RowStep, name: str, value: Any) -> None:
    """Require True or False."""
    if not isinstance(value, bool):
        raise invalid(step, f"{name} must be true or false, got {reprlib.repr(value)}")


def one_of(step: RowStep, name: str, value: Any, choices: Collection[str]) -> None:
    """Require one of several words."""
    if not isinstance(value, str) or value not in choices:
        shown = reprlib.repr(value)
        raise invalid(step, f"{name} must be one of {', '.join(choices)}, got {shown}")


def column_name(step: RowStep, name: str, value: Any) -> None:
    """Require the name of a column."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise invalid(
            step,
            f"{name} must be the name of a column, 1..{MAX_NAME} characters, got "
            f"{reprlib.repr(value)}",
        )


def column_names(step: RowStep, name: str, value: Any) -> None:
    """Require a tuple of different names of columns."""
    several(step, name, value, most=MAX_COLUMNS)
    for one in value:
        column_name(step, name, one)
    if len(set(value)) != len(value):
        raise invalid(step, f"{name} must name each column once, got {reprlib.repr(value)}")


def several(step: RowStep, name: str, value: Any, *, least: int = 1, most: int) -> None:
    """Require a tuple of least..most entries."""
    if not isinstance(value, tuple) or not least <= len(value) <= most:
        size = f" with {len(value)}" if isinstance(value, tuple) else ""
        raise invalid(
            step,
            f"{name} must be a tuple (a list in JSON) of {least}..{most} entries, got "
            f"{reprlib.repr(value)}{size}",
        )


def size(step: RowStep, value: Any, *, most: int) -> None:
    """Require a size (height, width) of 1..most each."""
    several(step, "size", value, least=2, most=2)
    for side in value:
        whole(step, "size", side, low=1, high=most)


def representable(step: Step, name: str, value: float, field: Field) -> None:
    """Require a number that the column's type can hold."""
    dtype = np.dtype(field.dtype)
    if dtype.kind == "f":
        holds = abs(value) <= float(np.finfo(dtype).max)
    else:
        holds = float(value).is_integer() and bounds(dtype)[0] <= value <= bounds(dtype)[1]
    if not holds:
        raise invalid(step, f"{name} must be a value of {dtype}, the column's type, got {value}")


def bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and largest value of booleans or integers."""
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def column_of(step: RowStep, schema: Schema, name: str) -> Field:
    """Return what a column holds; InvalidInput lists the columns if there is none of the name."""
    if name not in schema:
        names = reprlib.repr(sorted(schema))
        raise invalid(step, f"no column {name!r} in its input, which has {names}")
    return schema[name]


def new_column(step: Step, schema: Schema, name: str, replaced: Collection[str] = ()) -> None:
    """Refuse to write a column over one that the step does not read."""
    if name in schema and name not in replaced:
        raise invalid(step, f"its input already has a column {name!r}; choose another name")


def numeric(step: RowStep, name: str, field: Field, kinds: str = "biuf") -> None:
    """Require numbers, of some of numpy's kinds: b booleans, i and u integers, f floating point."""
    if not field.is_number or np.dtype(field.dtype).kind not in kinds:
        words = {"b": "booleans", "i": "integers", "f": "floating-point numbers"}
        wanted = " or ".join(word for kind, word in words.items() if kind in kinds)
        raise invalid(step, f"column {name!r} must hold {wanted}, got {field}")


def fixed(step: RowStep, name: str, field: Field, *ranks: int) -> None:
    """Require numbers of one shape for all samples; ranks: allowed numbers of axes, if given."""
    numeric(step, name, field)
    if field.is_ragged:
        raise invalid(step, f"column {name!r} must not differ in size, got {field}; use Pad before")
    if ranks and len(field.shape) not in ranks:
        axes = " or ".join(map(str, ranks))
        raise invalid(
            step, f"column {name!r} must have {axes} axes per sample, got {field}; use Reshape"
        )


def limited(step: RowStep, name: str, field: Field) -> Field:
    """Return the field; InvalidInput if a sample of it is larger than MAX_SAMPLE_BYTES."""
    sizes = [n for n in field.shape if n is not None]
    n_bytes = math.prod(sizes) * np.dtype(field.dtype).itemsize
    if n_bytes > MAX_SAMPLE_BYTES:
        raise invalid(
            step,
            f"column {name!r} would become {field}, {n_bytes} bytes per sample; the limit is "
            f"{MAX_SAMPLE_BYTES}",
        )
    return field

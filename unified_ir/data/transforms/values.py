"""Steps that compute each number from itself: scale, normalize, cast, clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.unified_ir.data.columns import Array, Column, Field
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.transforms import checks
from triplane.unified_ir.data.transforms.single import ColumnStep, mapped, values_of
from triplane.unified_ir.files.pixels import TOP, as_input

MAX_CHANNELS: Final = 65536


@dataclass(frozen=True)
class Scale(ColumnStep):
    """Divide bytes by `top` in float32: 0..top becomes 0..1.

    uint8 becomes float32 by the rule that training, conversion and serving share
    (`files.pixels.as_input`). top: the byte that means 1.0, 1..255.
    """

    top: int = TOP

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.whole(self, "top", self.top, low=1, high=255)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        if field.dtype != "uint8":
            raise checks.invalid(
                self,
                f"column {self.column!r} must hold uint8, got {field}; Normalize scales other "
                "types, by mean 0 and the largest value as std",
            )
        return Field("float32", field.shape)

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        return mapped(column, lambda x: as_input(x, "float32", top=self.top))


@dataclass(frozen=True)
class Normalize(ColumnStep):
    """Compute (x - mean) / std in float32, with one mean and std or one for each channel.

    Numbers of any type become float32 first. Channels are the first axis of a sample; mean and std
    are then tuples of that length, or one of them is a number. std is positive.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def check(self) -> None:
        """See `ColumnStep`."""
        self._check_each("mean", self.mean, low=-checks.LARGEST)
        self._check_each("std", self.std, low=checks.SMALLEST)
        if len({len(v) for v in (self.mean, self.std) if isinstance(v, tuple)}) > 1:
            raise checks.invalid(
                self, f"mean and std must agree in length, got {self.mean} and {self.std}"
            )

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.numeric(self, self.column, field)
        for name, value in (("mean", self.mean), ("std", self.std)):
            if isinstance(value, tuple) and field.shape[:1] != (len(value),):
                raise checks.invalid(
                    self,
                    f"{name} has {len(value)} values, one for each channel, but column "
                    f"{self.column!r} is {field}; give one number, or one for each entry of the "
                    "first axis",
                )
        return Field("float32", field.shape)

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        return mapped(column, self._normalized)

    def constants(self, rank: int) -> tuple[Array, Array]:
        """Return mean and std as float32 that broadcast over samples of that many axes."""
        mean, std = (
            np.array(v, np.float32).reshape(-1, *[1] * (rank - 1)) if isinstance(v, tuple)
            else np.float32(v)
            for v in (self.mean, self.std)
        )  # fmt: skip
        return np.asarray(mean), np.asarray(std)

    def _check_each(self, name: str, value: Any, *, low: float) -> None:
        if isinstance(value, tuple):
            checks.several(self, name, value, most=MAX_CHANNELS)
        for one in value if isinstance(value, tuple) else (value,):
            checks.number(self, name, one, low=low)

    def _normalized(self, x: Array) -> Array:
        mean, std = self.constants(x.ndim - 1)
        y = _cast(x, np.dtype(np.float32), copy=True)
        with np.errstate(over="ignore"):
            y -= mean
            y /= std
        return y


@dataclass(frozen=True)
class Cast(ColumnStep):
    """Convert numbers to another type; fractions are cut off where it is an integer type.

    A value that an integer type cannot hold, NaN included, raises InvalidInput with its row.
    Booleans are 0 and 1; any number but 0 becomes true. Floating point follows IEEE 754.
    """

    dtype: str

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.one_of(self, "dtype", self.dtype, checks.DTYPES)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.numeric(self, self.column, field)
        return checks.limited(self, self.column, Field(self.dtype, field.shape))

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        dtype = np.dtype(self.dtype)
        x = values_of(column)
        if dtype.kind in "iu" and not np.can_cast(x.dtype, dtype) and not _holds(dtype, x):
            k = next(k for k in range(len(column)) if not _holds(dtype, np.asarray(column[k])))
            seen = np.asarray(column[k])
            raise checks.invalid(
                self,
                f"{dtype} cannot hold {seen.min()}..{seen.max()}, the values of row "
                f"{draws.rows[k]} of column {self.column!r}; use Clip before, or a larger type",
            )
        return mapped(column, lambda x: _cast(x, dtype, copy=False))


@dataclass(frozen=True)
class Clip(ColumnStep):
    """Replace numbers below `low` by `low` and above `high` by `high`; None sets no bound."""

    low: float | None = None
    high: float | None = None

    def check(self) -> None:
        """See `ColumnStep`."""
        both = [v for v in (self.low, self.high) if v is not None]
        for value in both:
            checks.number(self, "low and high", value)
        if not both or both != sorted(both):
            raise checks.invalid(
                self, f"low must not exceed high, and one is a number; got {self.low}, {self.high}"
            )

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.numeric(self, self.column, field, "iuf")
        for name, value in (("low", self.low), ("high", self.high)):
            if value is not None:
                checks.representable(self, name, value, field)
        return field

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        kind = values_of(column).dtype.type
        low, high = (None if v is None else kind(v) for v in (self.low, self.high))
        return mapped(column, lambda x: np.clip(x, low, high))


def _cast(x: Array, dtype: np.dtype[Any], *, copy: bool) -> Array:
    # float64 beyond float32 becomes an infinity, as in every other implementation of a cast.
    with np.errstate(over="ignore"):
        return x.astype(dtype, order="C", copy=copy)


def _holds(dtype: np.dtype[Any], x: Array) -> bool:
    """Whether integers of that type hold all of x once fractions are cut off; not NaN."""
    if not x.size:
        return True
    low, high = checks.bounds(dtype)
    smallest, largest = x.min().item(), x.max().item()
    return bool(low - 1 < smallest and largest < high + 1)

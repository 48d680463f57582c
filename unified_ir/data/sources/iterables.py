"""Samples of a Python iterable as a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import (
    BYTES,
    TEXT,
    Column,
    Columns,
    Ragged,
    Schema,
    field_of,
    schema_of,
    stacked,
)
from triplane.unified_ir.data.table import BLOCK

Sample = Mapping[str, Any] | Sequence[Any]
Samples = Iterable[Sample]


@dataclass(frozen=True, eq=False)
class IterableSource:
    """Samples that Python code computes, in order; this source has no JSON form.

    samples: an iterable that starts again for each epoch (a list, or an object with `__iter__`), or
    a function without arguments that returns one, such as a generator function. An iterator can be
    read once only: see `once`. A sample is a dict by column, or a tuple of the columns `names`, of
    arrays, numbers, texts or bytes. ragged: the columns whose samples differ in their first axis.
    name: stands for the source in errors.
    """

    samples: Samples | Callable[[], Samples]
    name: str
    names: tuple[str, ...] = ("x", "y")
    ragged: tuple[str, ...] = ()

    @property
    def once(self) -> bool:
        """Whether the samples are an iterator, which no second epoch or resumed run can read."""
        return hasattr(self.samples, "__next__")

    def open(self) -> IterableFeed:
        """Compute the first sample, for the schema; InvalidInput if there is none."""
        iterator = self.iterator()
        first = next(iterator, None)
        if first is None:
            raise InvalidInput(f"{self.name} returns no sample")
        schema = schema_of(self.block([first], 0))
        # An iterator has no second start, so the sample that was taken is put back.
        return IterableFeed(self, schema, chain([first], iterator) if self.once else None)

    def iterator(self) -> Iterator[Sample]:
        """Return the samples from the first on."""
        samples = self.samples() if callable(self.samples) else self.samples
        if not isinstance(samples, Iterable):
            raise InvalidInput(f"{self.name} must return an iterable, got {type(samples).__name__}")
        return iter(samples)

    def block(self, samples: Sequence[Sample], at: int) -> Columns:
        """Return samples, the first of them number `at`, as columns."""
        try:
            block = stacked([self._by_column(one, at + k) for k, one in enumerate(samples)])
            return {name: self._column(name, column) for name, column in block.items()}
        except InvalidInput as error:
            raise InvalidInput(
                f"{self.name}: among samples {at}..{at + len(samples) - 1}: {error}"
            ) from error

    def _column(self, name: str, column: Column) -> Column:
        if isinstance(column, Ragged):
            if name in self.ragged:
                return column
            raise InvalidInput(
                f"samples of column {name!r} differ in their first axis; pad them, or state "
                f"ragged=({name!r},)"
            )
        if name in self.ragged and column.ndim > 1:
            return Ragged.of(list(column))
        kinds = {type(one) for one in column} if field_of(column).dtype in {TEXT, BYTES} else set()
        if len(kinds) > 1:
            shown = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise InvalidInput(f"column {name!r} holds one type of value, got {shown}")
        return column

    def _by_column(self, sample: Sample, number: int) -> Mapping[str, Any]:
        if isinstance(sample, Mapping):
            return sample
        if not isinstance(sample, tuple | list) or len(sample) != len(self.names):
            size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            raise InvalidInput(
                f"a sample is a dict, or a tuple of {', '.join(self.names)}; sample {number} is a "
                f"{type(sample).__name__}{size}; state names=(...)"
            )
        return dict(zip(self.names, sample, strict=True))


@dataclass(eq=False)
class IterableFeed:
    """The samples of an iterable, in blocks. once: whether they can be read a single time."""

    source: IterableSource
    schema: Schema
    rest: Iterator[Sample] | None = field(default=None, repr=False)

    @property
    def once(self) -> bool:
        """See `IterableSource`."""
        return self.source.once

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`. Raises InvalidInput where samples differ, or are to be read a second time."""
        samples = islice(self._samples(), start, None)
        at = start
        while several := list(islice(samples, BLOCK)):
            block = self.source.block(several, at)
            self._check(block, at)
            yield block
            at += len(several)

    def _samples(self) -> Iterator[Sample]:
        if not self.once:
            return self.source.iterator()
        rest, self.rest = self.rest, None
        if rest is None:
            raise InvalidInput(
                f"{self.source.name} is an iterator, which can be read once; state a function that "
                "returns a new one, such as the generator function itself"
            )
        return rest

    def _check(self, block: Columns, at: int) -> None:
        fields = schema_of(block)
        for name in sorted(self.schema.keys() | fields.keys()):
            seen, expected = fields.get(name), self.schema.get(name)
            if seen != expected:
                raise InvalidInput(
                    f"{self.source.name}: the first sample has {name!r} as {expected}, samples "
                    f"from {at} on have {seen}"
                )

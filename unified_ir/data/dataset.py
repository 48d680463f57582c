"""`Dataset`: a pipeline of samples as a value, from a source through steps to batches.

    photos = data.images("photos", size=(32, 32)).flip("x").shuffle().batch(64)
    trainer.fit(photos, epochs=5)

A dataset is immutable: each method returns another one. Nothing is read before it is needed. The
stream depends on (seed, epoch) alone, whatever the number of workers, so a resumed run sees the
same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns, functions, grouping, ordering
from triplane.unified_ir.data.ahead import Loading
from triplane.unified_ir.data.column_runs import column_runs, names_text, run_text
from triplane.unified_ir.data.columns import Array, Column, Columns, Schema
from triplane.unified_ir.data.grouping import as_arrays
from triplane.unified_ir.data.kinds import is_batches, is_feed, is_table
from triplane.unified_ir.data.opened import Opened, Origin
from triplane.unified_ir.data.sources.iterables import IterableSource
from triplane.unified_ir.data.step import Memo, Step, keeps
from triplane.unified_ir.data.table import ArrayTable, Source
from triplane.unified_ir.data.views import View, blocks_of, whole_column
from triplane.unified_ir.data.zipping import ZipSource
from triplane.unified_ir.files.samples import check_finite, check_labels

if TYPE_CHECKING:
    from triplane.unified_ir.data.profile import DataProfile

DEFAULT_INPUT: Final = "x"
DEFAULT_TARGET: Final = "y"
SHOWN_COLUMNS: Final = 8


class UnknownLength(InvalidInput, TypeError):
    """The length of samples that are read in order; `list` reads them all the same.

    A TypeError, since `list` asks for the length and lets no other error pass.
    """


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A source of samples and the steps that they pass through.

    inputs, targets: the columns that a model takes and is compared with, in the order in which its
    `construct` and the loss take them. labels: the names of the classes of the target, if known.
    notes: what a reader assumed about the samples. loading: how batches are read ahead.
    """

    origin: Origin
    steps: tuple[Step, ...] = ()
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    loading: Loading = field(default_factory=Loading)
    _memo: Memo = field(default_factory=Memo)

    # What it is

    @property
    def schema(self) -> Schema:
        """What each column holds for one sample, after all steps."""
        schema: Schema = self._memo.get(("schema", self.steps), lambda: self.view().schema)
        return schema

    def __len__(self) -> int:
        """Return the number of samples of an epoch; InvalidInput if it is not known beforehand."""
        n = self.samples
        if n is None:
            raise UnknownLength(
                f"the number of samples of {self.origin.name} is not known before they are read"
            )
        return n

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch; None if that is not known before they are read."""
        view = self.view()
        if is_table(view):
            return len(view)
        if is_batches(view):
            n = len(view)
            return (n - 1) * len(view.rows_of(0)) + len(view.rows_of(n - 1)) if n else 0
        return None

    @property
    def is_batched(self) -> bool:
        """Whether a step puts samples together in batches."""
        return any(map(_batches, self.steps))

    @property
    def is_ordered(self) -> bool:
        """Whether a step decides the order of samples, so that training adds no shuffling."""
        kinds = (ordering.Shuffle, ordering.Weighted, ordering.Balanced)
        return any(isinstance(s, kinds) for s in self.steps)

    def __repr__(self) -> str:
        from triplane.unified_ir.data.registry import step_text

        roles = {**dict.fromkeys(self.inputs, "input"), **dict.fromkeys(self.targets, "target")}
        # How many pass a filter takes a pass over all samples, which showing a value must not cost.
        n = None if any(step.is_filter for step in self.steps) else self.samples
        lines = [f"{'?' if n is None else f'{n:,}'} samples of {self.origin.name}"]
        schema = self.schema
        runs = column_runs({name: (kind, roles.get(name)) for name, kind in schema.items()})
        for run in runs[:SHOWN_COLUMNS]:
            count = f"  ({len(run)} columns)" if len(run) > 1 else ""
            kind, role = schema[run[0]], roles.get(run[0], "")
            lines.append(f"  {run_text(run)}: {kind}  {role}".rstrip() + count)
        if hidden := sum(map(len, runs[SHOWN_COLUMNS:])):
            lines.append(f"  and {hidden} more columns")
        lines += [f"  then {step_text(step)}" for step in self.steps]
        if self.labels:
            shown = ", ".join(self.labels[:SHOWN_COLUMNS])
            more = ", ..." if len(self.labels) > SHOWN_COLUMNS else ""
            lines.append(f"  {len(self.labels)} classes: {shown}{more}")
        return "\n".join(lines)

    # Roles

    def roles(
        self, inputs: Sequence[str] | str = DEFAULT_INPUT, targets: Sequence[str] | str = ()
    ) -> Dataset:
        """Return the dataset with these columns as inputs and targets of the model."""
        inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        targets = (targets,) if isinstance(targets, str) else tuple(targets)
        missing = [name for name in (*inputs, *targets) if name not in self.schema]
        if missing:
            raise InvalidInput(
                f"there is no column {missing[0]!r}; there are {names_text(self.schema)}"
            )
        return replace(self, inputs=inputs, targets=targets)

    def named(self, labels: Sequence[str]) -> Dataset:
        """Return the dataset with these names of the classes of its target."""
        return replace(self, labels=tuple(labels))

    # Steps

    def then(self, *steps: Step) -> Dataset:
        """Return the dataset with more steps, such as those of `transforms`.

        Inputs and targets follow columns that a step renames, and end with columns that it drops.
        """
        roles = [self.inputs, self.targets]
        for step in steps:
            roles = [tuple(name for n in names for name in step.names_after(n)) for names in roles]
        return replace(self, steps=(*self.steps, *steps), inputs=roles[0], targets=roles[1])

    def map(
        self, function: Callable[..., Any], *, random: bool = False, ragged: Sequence[str] = ()
    ) -> Dataset:
        """Pass each sample, or after `batch` each batch, through a Python function: dict to dict.

        random: the function also takes a generator that depends on seed, epoch and sample alone.
        ragged: columns whose samples differ in their first axis after the function.
        """
        call = functions.PythonFunction(function)
        return self.then(functions.Map(call, random, tuple(ragged)))

    def filter(self, function: Callable[[dict[str, Any]], Any]) -> Dataset:
        """Keep the samples for which the function of a sample (a dict) is true."""
        return self.then(functions.Filter(functions.PythonFunction(function)))

    def where(self, column: str, comparison: str, value: float | str) -> Dataset:
        """Keep samples by the number or text in a column, as in ("age", ">=", 18)."""
        return self.then(functions.Where(column, comparison, value))

    def shuffle(self, buffer: int | None = None, *, seed: int | None = None) -> Dataset:
        """Put the samples in a random order, another one in each epoch; see `ordering.Shuffle`."""
        return self.then(ordering.Shuffle(buffer, seed))

    def batch(self, size: int, *, drop_last: bool = False) -> Dataset:
        """Put `size` samples together; the last batch may be smaller."""
        return self.then(grouping.Batched(size, drop_last))

    def padded_batch(
        self,
        size: int,
        *,
        length: int | None = None,
        fill: float = 0,
        lengths: bool = False,
        drop_last: bool = False,
    ) -> Dataset:
        """Put `size` samples together and pad those of different length; `grouping.PaddedBatch`."""
        return self.then(grouping.PaddedBatch(size, length, fill, lengths, drop_last))

    def window(
        self,
        size: int,
        *,
        stride: int = 1,
        ahead: int = 0,
        into: str = "next",
        within: Sequence[str] = (),
    ) -> Dataset:
        """Make each sample of `size` consecutive ones; see `grouping.Windowed`."""
        return self.then(grouping.Windowed(size, stride, ahead, into, tuple(within)))

    def repeat(self, times: int) -> Dataset:
        """Give all samples `times` times in an epoch."""
        return self.then(ordering.Repeat(times))

    def take(self, count: int) -> Dataset:
        """Keep the first `count` samples."""
        n = self.samples if not self.is_batched else None
        if n is not None and not 0 < count <= n:
            raise InvalidInput(f"take needs 1..{n} samples, got {count}")
        return self.then(ordering.Take(count))

    def skip(self, count: int) -> Dataset:
        """Leave out the first `count` samples."""
        return self.then(ordering.Skip(count))

    def select(self, rows: NDArray[np.integer[Any]]) -> Dataset:
        """Keep the samples with these numbers, in that order."""
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise InvalidInput(
                f"select takes the numbers of samples, got {rows.dtype} {list(rows.shape)}; of a "
                "mask they are np.flatnonzero(mask)"
            )
        return self.then(ordering.Pick(tuple(map(int, rows))))

    def shard(self, rank: int, of: int) -> Dataset:
        """Keep the part of process `rank` of `of`; all parts have the same size."""
        return self.then(ordering.Sharded(rank, of))

    def weighted(self, column: str, count: int | None = None) -> Dataset:
        """Draw samples with replacement, by the weights in `column`."""
        return self.then(ordering.Weighted(column, count))

    def balanced(self, column: str | None = None, count: int | None = None) -> Dataset:
        """Draw samples with replacement, each class of a column (the target) equally often."""
        return self.then(ordering.Balanced(column or self._target("balanced"), count))

    def cache(self) -> Dataset:
        """Keep all samples in memory from their first use on."""
        return self.then(functions.Cache())

    def split(
        self, fraction: float = 0.2, *, seed: int = 0, group: str | None = None
    ) -> tuple[Dataset, Dataset]:
        """Return (rest, held out): ceil(fraction * N) samples are held out, in the original order.

        If there is one target of whole numbers, each class contributes its share. The choice
        depends only on the targets and `seed`. group: a column, whose values are held out whole,
        such as persons. Samples are split before the first step that is random, repeats them or
        makes batches. Random steps and repetitions, which are for training, do not apply to those
        held out. Of windows that share samples, those of the last samples are held out, since any
        others would share samples with the rest.
        """
        if group is None and (at := self._first_of_series()) is not None:
            return self._split_at_end(at, fraction)
        at = next((k for k, s in enumerate(self.steps) if _after_split(s)), None)
        later = () if at is None else self.steps[at:]
        first = self if at is None else replace(self, steps=self.steps[:at])
        column = _class_column(first) if group is None else None
        rest, held_out = (
            ordering.Split(fraction, is_held_out, seed, column, group)
            for is_held_out in (False, True)
        )
        kept = tuple(filter(_is_kept, later))
        parts = (
            replace(self, steps=(*first.steps, rest, *later)),
            replace(self, steps=(*first.steps, held_out, *kept)),
        )
        _ = parts[0].view()  # refuses now what cannot be split
        return parts

    @property
    def overlap(self) -> int:
        """Number of the samples before one that share rows with it, as windows do; 0 if none."""
        return grouping.overlap_of(self.steps)

    def _first_of_series(self) -> int | None:
        """Return where to split a series: before random steps in front of windows, or overlaps."""
        for k, step in enumerate(self.steps):
            if isinstance(step, grouping.Windowed):
                at = next((i for i, s in enumerate(self.steps[:k]) if _after_split(s)), k)
                if at < k or grouping.overlap_of(self.steps[: k + 1]):
                    return at
        return None

    def _split_at_end(self, at: int, fraction: float) -> tuple[Dataset, Dataset]:
        """Split the samples before step number `at` in two pieces, one behind the other."""
        ordering.check_fraction(fraction)
        n = len(replace(self, steps=self.steps[:at]))
        first = n - math.ceil(round(fraction * n, 9))
        later = self.steps[at:]
        parts = (
            replace(self, steps=(*self.steps[:at], ordering.Take(max(1, first)), *later)),
            replace(self, steps=(*self.steps[:at], ordering.Skip(first), *filter(_is_kept, later))),
        )
        if not all(part.samples for part in parts):
            raise InvalidInput(
                f"holding out the last {n - first} of {n} samples leaves one part without a window"
                "; make the windows shorter, or hold out another share"
            )
        return parts

    def _target(self, what: str) -> str:
        if len(self.targets) != 1:
            raise InvalidInput(f"{what} needs the name of a column; there is no single target")
        return self.targets[0]

    # Reading

    def load_with(self, workers: int, *, prefetch: int = 2, processes: bool = False) -> Dataset:
        """Read batches ahead in training, by threads or child processes; see `Loading`."""
        return replace(self, loading=Loading(workers, prefetch, processes))

    def opened(self, seed: int = 0) -> Opened:
        """Return the pipeline of a run with this seed, ready to read."""
        return Opened(self.origin, self.steps, seed, self._memo)

    def view(self, seed: int = 0, epoch: int = 0) -> View:
        """Return what the pipeline gives in one epoch; see `views`."""
        return self.opened(seed).view(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Return the samples of epoch 0, each a dict; of a batched dataset its batches."""
        view = self.view()
        if is_table(view) or is_feed(view):
            for block in blocks_of(view):
                for k in range(columns.count(block)):
                    yield columns.sample(block, k)
        else:
            yield from self.opened().batches(0)

    def for_training(self, size: int) -> Dataset:
        """Return the dataset in batches: shuffled unless it is already, of `size` unless batched.

        A source that is read in order keeps its order.
        """
        if self.is_batched:
            return self
        shuffled = self
        if not self.is_ordered and is_table(self.view()):
            shuffled = self.shuffle()
        return shuffled.batch(size)

    def in_batches(self, size: int) -> Dataset:
        """Return the dataset in batches, in its own order."""
        return self if self.is_batched else self.batch(size)

    def batches(
        self, size: int, *, seed: int, epoch: int = 0, start: int = 0, drop_last: bool = False
    ) -> Iterator[tuple[Array, ...]]:
        """Yield the arrays of inputs and targets, shuffled by (seed, epoch), from batch `start` on.

        `size` samples each, every sample once; the last batch is smaller or, with drop_last, left
        out. A dataset with `batch` of its own keeps that.
        """
        if size < 1:
            raise InvalidInput(f"a batch must hold at least 1 sample, got size={size}")
        prepared = self.for_training(size)
        if drop_last and not self.is_batched:
            prepared = replace(prepared, steps=(*prepared.steps[:-1], grouping.Batched(size, True)))
        for batch in prepared.opened(seed).batches(epoch, start):
            yield self.arrays_of(batch)

    def arrays_of(self, batch: Columns) -> tuple[Array, ...]:
        """Return the inputs and targets of a batch, in their order."""
        if not self.inputs:
            raise InvalidInput(
                "it is not known which columns the model takes; name them: .roles(inputs, targets)"
            )
        return as_arrays(batch, (*self.inputs, *self.targets))

    # Columns in memory

    def column(self, name: str) -> Column:
        """Return one column of all samples, in memory; read-only."""
        view = self.view()
        if not is_table(view):
            form = "in batches" if self.is_batched else "in order"
            raise InvalidInput(
                f"{self.origin.name} is read {form}, so its columns are not at hand; read them by "
                "batches, or leave out .batch"
            )

        def read() -> Column:
            column = whole_column(view, name)
            if isinstance(column, np.ndarray):
                # A view, so that the caller's own array stays writeable.
                column = np.ascontiguousarray(column).view()
                column.flags.writeable = False
            return column

        column: Column = self._memo.get(("column", self.steps, name), read)
        return column

    def target_in_memory(self) -> Array | None:
        """Return the single target of all samples if it is a column of a source in memory.

        In the source's own order, so that a message can name the sample.
        """
        table = self.origin.table
        if len(self.targets) != 1 or not isinstance(table, ArrayTable):
            return None
        name = self.targets[0]
        kept = all(isinstance(s, functions.Cache) or keeps(s, name) for s in self.steps)
        column = table.columns.get(name)
        return column if kept and isinstance(column, np.ndarray) else None

    def arrays_in_memory(self) -> tuple[Array, ...] | None:
        """Return inputs and targets of all samples if they are in memory and always the same."""
        fixed = not any(s.is_random or isinstance(s, functions.Map) for s in self.steps)
        if not (fixed and isinstance(self.origin.table, ArrayTable) and not self.is_batched):
            return None
        columns = [self.column(name) for name in (*self.inputs, *self.targets)]
        arrays = tuple(c for c in columns if isinstance(c, np.ndarray))
        return arrays if len(arrays) == len(columns) else None

    @property
    def x(self) -> Any:
        """The single input column of all samples."""
        if len(self.inputs) != 1:
            raise InvalidInput(f"there are {len(self.inputs)} inputs; read them by column(name)")
        return self.column(self.inputs[0])

    @property
    def y(self) -> Any:
        """The single target column of all samples."""
        return self.column(self._target("y"))

    # Files

    def json(self) -> str:
        """Return the pipeline as JSON text; `data.from_json` reads it back to the same stream.

        InvalidInput: the source is an array in memory or a Python object.
        """
        from triplane.unified_ir.data.registry import text_of

        return text_of(self)

    def write(self, path: str | Path, *, progress: Callable[[int], None] | None = None) -> int:
        """Write all samples of epoch 0 as a record set NAME.tpr; return their number.

        Inputs, targets and labels are kept with it. Conflict: there is already something at `path`.
        """
        from triplane.unified_ir.data.storing import write

        return write(self, Path(path), progress)

    def profile(self, batches: int = 100, *, size: int = 32) -> DataProfile:
        """Read up to `batches` batches in this thread and return where the time went, by step."""
        from triplane.unified_ir.data.profile import profile

        return profile(self, batches, size)


def arrays(
    x: Column | Mapping[str, Column],
    y: Array | None = None,
    *,
    labels: Sequence[str] = (),
    **others: Column,
) -> Dataset:
    """Return a dataset of arrays in memory, one row per sample; they are not copied or converted.

    x: (N, ...), the input, or all columns by name (then "x" is the input and "y" the target, if
    they are there; see `Dataset.roles`). y: (N, ...), the target. labels: names of the classes of
    y. InvalidInput: numbers that are not finite, or columns of different length.
    """
    if isinstance(x, Mapping):
        by_name = {name: _as_column(column) for name, column in x.items()}
    else:
        by_name = {DEFAULT_INPUT: _as_column(x)}
    if y is not None:
        by_name[DEFAULT_TARGET] = _as_column(y)
    by_name |= {name: _as_column(column) for name, column in others.items()}
    return of_table(ArrayTable(by_name), "arrays in memory", labels=tuple(labels))


def of_table(table: ArrayTable, name: str, *, labels: tuple[str, ...] = ()) -> Dataset:
    """Return a dataset of columns in memory, after checking their values."""
    if not len(table):
        raise InvalidInput("a dataset must have at least one sample, got none")
    for key, column in table.columns.items():
        values = column.values if isinstance(column, columns.Ragged) else column
        columns.field_of(column)
        if values.dtype != object:
            check_finite(values, key, what="values")
    dataset = with_default_roles(Dataset(Origin(None, table, name)))
    if labels:
        check_labels(dataset.y, labels)
    return dataset.named(labels)


def generated(
    samples: Any, *, names: Sequence[str] = ("x", "y"), ragged: Sequence[str] = ()
) -> Dataset:
    """Return a dataset of samples that Python code computes, read in order.

    samples: a function that returns an iterator, such as a generator function, called in each
    epoch; or an iterable that starts again each time. A sample is a dict by column, or a tuple of
    the columns `names`. ragged: columns whose samples differ in their first axis. An iterator,
    which can be read only once, is refused where a run has checkpoints.
    """
    name = getattr(samples, "__qualname__", None) or f"a {type(samples).__name__}"
    source = IterableSource(samples, name, tuple(names), tuple(ragged))
    return of_source(source, name)


def zipped(*datasets: Dataset) -> Dataset:
    """Return a dataset whose samples have the columns of all `datasets`, side by side.

    Parts of one size that are shuffled get the same order; other random steps of parts draw
    different numbers.
    """
    dataset = of_source(ZipSource(datasets), "zip")
    inputs = tuple(name for part in datasets for name in part.inputs)
    targets = tuple(name for part in datasets for name in part.targets)
    labels = next((part.labels for part in datasets if part.labels and targets == part.targets), ())
    return dataset.roles(inputs, targets).named(labels)


def of_source(source: Source, name: str) -> Dataset:
    """Return the dataset of a source, with x as input and y as target if it has them."""
    dataset = with_default_roles(Dataset(Origin(source, None, name)))
    table = dataset.origin.table
    if isinstance(table, ArrayTable):
        for key, column in table.columns.items():
            # A mapped file is not read as a whole only to look at it.
            if isinstance(column, np.ndarray) and not _is_mapped(column):
                check_finite(column, f"{key} of {name}", what="values")
    return dataset.named(getattr(dataset.origin.table, "labels", ()))


def with_default_roles(dataset: Dataset) -> Dataset:
    """Return the dataset with x as input and y as target, if it has these columns."""
    schema = dataset.schema
    return replace(
        dataset,
        inputs=(DEFAULT_INPUT,) if DEFAULT_INPUT in schema else (),
        targets=(DEFAULT_TARGET,) if DEFAULT_TARGET in schema else (),
    )


def _class_column(dataset: Dataset) -> str | None:
    """Return the single target if it is one whole number for each sample."""
    if len(dataset.targets) != 1:
        return None
    kind = dataset.schema.get(dataset.targets[0])
    is_class = kind is not None and not kind.shape and kind.dtype[:3] in {"int", "uin"}
    return dataset.targets[0] if is_class else None


def _batches(step: Step) -> bool:
    return isinstance(step, grouping.Batched | grouping.PaddedBatch)


def _after_split(step: Step) -> bool:
    """Return whether samples are split before a step: it is random, copies them or batches."""
    return step.is_random or _batches(step) or isinstance(step, ordering.Repeat)


def _is_kept(step: Step) -> bool:
    """Return whether a step applies to samples that are held out."""
    return not (step.is_random or isinstance(step, ordering.Repeat))


def _is_mapped(array: Any) -> bool:
    """Return whether an array, or one that it is a view of, is mapped from a file."""
    while array is not None and not isinstance(array, np.memmap | mmap):
        array = getattr(array, "base", None)
    return array is not None


def _as_column(column: Any) -> Column:
    if isinstance(column, columns.Ragged):
        return column
    array = np.asarray(column)
    if array.dtype.kind == "U":  # numpy's texts of one width; a column holds Python's
        array = array.astype(object)
    return array

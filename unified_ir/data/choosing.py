"""Which columns a model takes, and the steps that turn them into numbers of the usual types.

A choice is written [NAME=]PATTERN[,PATTERN...][:SHAPE], such as "x", "ch*", "image=photo" or
"ch*:2x64": the columns that match, in their own order, joined to one array if there are several.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data.column_runs import names_text
from triplane.unified_ir.data.columns import Array, Field, Schema
from triplane.unified_ir.data.dataset import DEFAULT_INPUT, DEFAULT_TARGET, Dataset
from triplane.unified_ir.data.functions import Cache
from triplane.unified_ir.data.grouping import Windowed
from triplane.unified_ir.data.kinds import is_feed
from triplane.unified_ir.data.records import RecordTable
from triplane.unified_ir.data.step import Step
from triplane.unified_ir.data.storing import facts_of
from triplane.unified_ir.data.table import ArrayTable
from triplane.unified_ir.data.transforms import (
    Cast,
    Concatenate,
    Lookup,
    Rename,
    Reshape,
    Scale,
    Select,
    Stack,
)
from triplane.unified_ir.files.pixels import TOP
from triplane.unified_ir.files.samples import MAX_CLASSES

TOKENS: Final = "token"
"""The column of a text's characters; see `sources.text`."""
NEXT: Final = "next"
WINDOW: Final = 64
"""Characters of a sample of text, if nothing else is asked for."""
SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """Columns that become one input or target.

    name: its name, "" for that of a single column. optional: there may be no such column.
    """

    patterns: tuple[str, ...]
    name: str = ""
    shape: tuple[int, ...] = ()
    optional: bool = False

    @classmethod
    def parse(cls, text: str) -> ColumnChoice:
        """Parse [NAME=]PATTERN[,PATTERN...][:SHAPE]."""
        name, equals, rest = text.rpartition("=")
        rest, _, sizes = rest.partition(":")
        patterns = tuple(p.strip() for p in rest.split(","))
        shape = sizes.split("x") if sizes else []
        if not all(patterns) or (equals and not name) or not all(s.isdecimal() for s in shape):
            raise InvalidInput(
                "columns are chosen as [NAME=]PATTERN[,PATTERN...][:SHAPE], such as x, ch*, "
                f"image=photo or ch*:2x64; got {text!r}"
            )
        return cls(patterns, name, tuple(map(int, shape)))

    def matching(self, schema: Schema, but: Collection[str] = ()) -> list[str]:
        """Return the matching columns; NotFound names the columns that exist.

        but: columns that only their own name matches, such as that of groups.
        """
        names = []
        for pattern in self.patterns:
            matching = [n for n in schema if n == pattern] or [
                n for n in schema if n not in but and fnmatchcase(n, pattern)
            ]
            if not matching and not self.optional:
                raise NotFound(f"no column is called {pattern!r}; there are {names_text(schema)}")
            names += [n for n in matching if n not in names]
        return names


def wanted(x: Sequence[str], y: Sequence[str], keep: Sequence[str]) -> list[ColumnChoice]:
    """Return all choices of columns; by default of x and, where it exists, y."""
    own = [ColumnChoice.parse(c) for c in (*(x or (DEFAULT_INPUT,)), *y)]
    own += [ColumnChoice((name,)) for name in keep]
    return own if y else [*own, ColumnChoice((DEFAULT_TARGET,), optional=True)]


@dataclass(frozen=True)
class ColumnPreparation:
    """Steps that make inputs and targets of a source's columns; the same for all its parts.

    notes: what was assumed, for the user.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    labels: tuple[str, ...]
    notes: tuple[str, ...]

    def of(self, dataset: Dataset) -> Dataset:
        """Return the dataset with the steps, roles and labels."""
        prepared = dataset
        for step in self.steps:
            prepared = prepared.then(step)
        if self.steps and isinstance(dataset.origin.table, ArrayTable):
            # Computed once, since the source is in memory anyway.
            prepared = prepared.then(Cache())
        prepared = prepared.roles(self.inputs, self.targets)
        return replace(prepared, labels=self.labels, notes=self.notes)

    def numbered_as(self, first: ColumnPreparation) -> ColumnPreparation:
        """Return the preparation with the numbers that `first` gives to texts and classes.

        InvalidInput: one of the two has texts where the other has numbers, or their classes have
        other names.
        """
        own, others = (
            {s.column: s for s in p.steps if isinstance(s, Lookup)} for p in (self, first)
        )
        if own.keys() != others.keys():
            text, number = (
                ("first", "second") if others.keys() - own.keys() else ("second", "first")
            )
            name = min(own.keys() ^ others.keys())
            raise InvalidInput(
                f"{name} holds texts in the {text} of the two sources, but numbers in the {number}"
            )
        if not own and self.labels and first.labels and self.labels != first.labels:
            raise InvalidInput(
                f"the classes of the two sources differ: {', '.join(first.labels[:SHOWN])}; "
                f"{', '.join(self.labels[:SHOWN])}"
            )
        steps = tuple(others[s.column] if isinstance(s, Lookup) else s for s in self.steps)
        return replace(self, steps=steps, labels=first.labels)


def preparation(
    dataset: Dataset,
    x: Sequence[str] = (),
    y: Sequence[str] = (),
    *,
    keep: Sequence[str] = (),
    pixels: bool | None = None,
    window: int | None = None,
) -> ColumnPreparation:
    """Return the steps for a source: choices of columns, pixels in 0..1, classes as integers.

    x, y: choices of the inputs and targets; by default the columns x and y. keep: more columns to
    keep, whose changes no window crosses. pixels: whether inputs of bytes are pixels; None: those
    with two axes or more are. window: length of a sample of text. NotFound: a column does not
    exist; InvalidInput: it does not fit.
    """
    building = _Building(dataset)
    if not x and TOKENS in dataset.schema:
        building.text(window or WINDOW, keep)
    else:
        building.columns(_inputs(x, dataset), _targets(y, dataset), keep)
        if window is not None:
            building.add(Windowed(window, within=tuple(dict.fromkeys(keep))))
        for name in building.inputs:
            building.pixels(name, asked=pixels)
        for name in building.targets:
            building.classes(name)
    return ColumnPreparation(
        tuple(building.steps),
        tuple(building.inputs),
        tuple(building.targets),
        building.labels,
        tuple(building.notes),
    )


def class_numbers(dataset: Dataset, names: Sequence[str], column: str = "") -> Array:
    """Return the single target; classes that have names get the places of these in `names`.

    names: of a model's classes, none if it has none. The dataset may number them differently: texts
    are numbered in the order of those that occur, which may be fewer than in training. column: an
    input, in place of the target; characters of a text are numbered as the target's.
    InvalidInput: the model has no class of that name.
    """
    y = np.asarray(dataset.column(column) if column else dataset.y)
    places = class_places(dataset, names, column)
    if places is None or y.dtype.kind not in "iu":
        return y
    numbers: Array = places[y]
    return numbers


def class_places(dataset: Dataset, names: Sequence[str], column: str = "") -> Array | None:
    """Return the number in `names` of each class in a column; None if they are the same.

    See `class_numbers`.
    """
    own = dataset.labels if not column or (column == TOKENS and is_text(dataset)) else ()
    return places_of(own, names, dataset.origin.name)


def places_of(own: Sequence[str], names: Sequence[str], source: str) -> Array | None:
    """Return the place in `names` of each of a source's own classes; None if they are the same.

    InvalidInput: one of them is not in `names`.
    """
    if not own or not names or tuple(own) == tuple(names[: len(own)]):
        return None
    places = {name: k for k, name in enumerate(names)}
    if unknown := [name for name in own if name not in places]:
        known = ", ".join(map(_class_text, names[:SHOWN]))
        raise InvalidInput(
            f"{source} has the class {unknown[0]!r}, but the model's classes are "
            f"{known}{', ...' if len(names) > SHOWN else ''}"
        )
    return np.array([places[name] for name in own], np.int64)


def _class_text(name: str) -> str:
    """Return a class for a message; white space and the like, a character of a text, in quotes."""
    return name if name.isprintable() and name.strip() else repr(name)


def class_columns(dataset: Dataset) -> tuple[str, ...]:
    """Return the columns whose numbers stand for the dataset's labels."""
    names = (TOKENS, *dataset.targets) if is_text(dataset) else dataset.targets
    return names if dataset.labels else ()


def is_text(dataset: Dataset) -> bool:
    """Return whether the samples are characters, numbered as the labels, and those that follow.

    A column of a table may be called `token` too; only a text has both columns.
    """
    return TOKENS in dataset.inputs and NEXT in dataset.schema


def row_bytes(dataset: Dataset, names: Sequence[str]) -> int:
    """Return the bytes of one sample's part of these columns, before anything is read.

    InvalidInput: samples of a column differ in size, or are no numbers.
    """
    total = 0
    for name in names:
        field = dataset.schema[name]
        if field.is_ragged or not field.is_number:
            raise InvalidInput(
                f"{name!r} holds {field}, but a model takes arrays of one shape; pad or encode it "
                "first"
            )
        total += np.dtype(field.dtype).itemsize * prod(n for n in field.shape if n is not None)
    return total


def _targets(choices: Sequence[str], dataset: Dataset) -> list[ColumnChoice]:
    if choices:
        return [ColumnChoice.parse(choice) for choice in choices]
    return [ColumnChoice((name,)) for name in dataset.targets]


def _inputs(choices: Sequence[str], dataset: Dataset) -> list[ColumnChoice]:
    if choices:
        return [ColumnChoice.parse(choice) for choice in choices]
    if dataset.inputs:
        return [ColumnChoice((name,)) for name in dataset.inputs]
    raise NotFound(
        f"{dataset.origin.name} has no column {DEFAULT_INPUT!r}; name the columns of the model's "
        f"inputs by x, as in x='a,b*' (--x on the command line), of {names_text(dataset.schema)}"
    )


class _Building:
    """The steps so far, and the dataset with them."""

    def __init__(self, dataset: Dataset) -> None:
        self.source = self.dataset = dataset
        self.steps: list[Step] = []
        self.inputs: list[str] = []
        self.targets: list[str] = []
        self.labels: tuple[str, ...] = ()
        self.notes: list[str] = []
        table = dataset.origin.table
        facts = facts_of(table) if isinstance(table, RecordTable) else table
        self.tops = dict(getattr(facts, "pixels", {}))

    def add(self, step: Step) -> None:
        """Append a step."""
        self.steps.append(step)
        self.dataset = self.dataset.then(step)

    def text(self, window: int, keep: Sequence[str]) -> None:
        """Make windows of characters, and the same one character later, as numbers."""
        self.columns([ColumnChoice((TOKENS,))], [], keep)
        if is_feed(self.dataset.view()):
            raise InvalidInput(
                f"the vocabulary of {self.dataset.origin.name} is not known before it is read"
            )
        values = np.unique(np.asarray(self.dataset.column(TOKENS))).tolist()
        self.add(Lookup(TOKENS, tuple(values)))
        within = tuple(dict.fromkeys(keep))
        self.add(Windowed(window, stride=window, ahead=1, into=NEXT, within=within))
        self.inputs, self.targets = [TOKENS], [NEXT]
        self.labels = tuple(map(chr, values))

    def columns(
        self, x: Sequence[ColumnChoice], y: Sequence[ColumnChoice], keep: Sequence[str]
    ) -> None:
        """Choose, join and name the columns of all inputs and targets, and drop the others."""
        schema = self.dataset.schema
        chosen = [(choice, choice.matching(schema, keep)) for choice in (*x, *y)]
        _check_shared(chosen)
        kept = [ColumnChoice((name,)).matching(schema, schema)[0] for name in keep]
        every = list(dict.fromkeys([*(n for _, names in chosen for n in names), *kept]))
        if every != list(schema):
            self.add(Select(tuple(every)))
        names = [
            self._joined(choice, names, default, many=many)
            for (choice, names), (default, many) in zip(
                chosen,
                [(DEFAULT_INPUT, len(x) > 1)] * len(x) + [(DEFAULT_TARGET, len(y) > 1)] * len(y),
                strict=True,
            )
        ]
        self.inputs, self.targets = names[: len(x)], names[len(x) :]
        labelled = tuple(name for _, several in chosen[len(x) :] for name in several)
        if labelled == self.source.targets:  # the names are those of the source's own target
            self.labels = self.source.labels

    def _joined(self, choice: ColumnChoice, names: list[str], default: str, *, many: bool) -> str:
        """Join the columns of one choice; return the name of the result."""
        name = choice.name or (names[0] if len(names) == 1 else default)
        if len(names) > 1:
            if many and not choice.name:
                raise InvalidInput(
                    f"give {', '.join(choice.patterns)} a name, as in NAME={choice.patterns[0]}, "
                    "since there are several inputs or targets"
                )
            self._join(names, name)
        elif name != names[0]:
            self.add(Rename(names[0], name))
            self.tops = {name if k == names[0] else k: v for k, v in self.tops.items()}
        if choice.shape:
            self.add(Reshape(name, choice.shape))
        return name

    def _join(self, names: list[str], name: str) -> None:
        if texts := [n for n in names if not self.dataset.schema[n].is_number]:
            raise InvalidInput(
                f"columns of numbers are joined to {name!r}, but {texts[0]!r} holds texts"
                f"{self._first_text(texts[0])}; correct the values, or choose other columns"
            )
        kinds = {self.dataset.schema[n].dtype for n in names}
        if len(kinds) > 1:
            for one in names:
                if self.dataset.schema[one].dtype != "float32":
                    self.add(Cast(one, "float32"))
        scalars = all(not self.dataset.schema[n].shape for n in names)
        self.add(Stack(tuple(names), name) if scalars else Concatenate(tuple(names), name))

    def _first_text(self, name: str) -> str:
        """Return where a column of texts has the first one that is not a number."""
        if is_feed(self.dataset.view()):
            return ""
        column = self.dataset.column(name)
        for number, text in enumerate(column if isinstance(column, np.ndarray) else ()):
            try:
                float(text)
            except ValueError:
                return f", first {str(text)[:40]!r} in sample {number}"
        return ""

    def pixels(self, name: str, *, asked: bool | None) -> None:
        """Scale bytes that are pixels to 0..1; images without channels get one."""
        field = self.dataset.schema[name]
        top = self.tops.get(name)
        if (
            field.dtype != "uint8"
            or asked is False
            or (top is None and len(field.shape) < 2 and not asked)
        ):
            return
        if len(field.shape) == 2:
            self.add(Reshape(name, (1, *_sizes(field))))
        self.add(Scale(name, TOP if top is None else top))
        if top is None and asked is None:
            self.notes.append(
                f"{name} holds bytes in two axes or more, which are read as pixels and divided by "
                f"{TOP}"
                + (", with an axis for one channel" if len(field.shape) == 2 else "")
                + "; pixels=False (--no-pixels) leaves them as they are"
            )

    def classes(self, name: str) -> None:
        """Number the classes of texts, and convert integers to int64."""
        field = self.dataset.schema[name]
        if field.dtype == "text":
            if is_feed(self.dataset.view()):
                raise InvalidInput(
                    f"the classes in {name} of {self.dataset.origin.name} are not known before it "
                    "is read; write it as records first: `triplane data convert`"
                )
            values = tuple(sorted(set(self.dataset.column(name))))  # type: ignore[arg-type]
            if not values:
                raise InvalidInput(
                    f"{self.dataset.origin.name} holds no samples, so {name} has no classes"
                )
            if len(values) > MAX_CLASSES:
                raise InvalidInput(
                    f"{name} has {len(values)} different texts; classes are at most {MAX_CLASSES}"
                )
            self.add(Lookup(name, values))
            self.labels = values if len(self.targets) == 1 else ()
        elif np.dtype(field.dtype).kind in "iub" and field.dtype != "int64":
            self.add(Cast(name, "int64"))


def _check_shared(chosen: Sequence[tuple[ColumnChoice, list[str]]]) -> None:
    """Refuse a column of two choices, unless each takes it alone, under its name, in one shape."""
    users: dict[str, list[tuple[str, tuple[int, ...], int]]] = {}
    for choice, names in chosen:
        for name in names:
            users.setdefault(name, []).append((choice.name or name, choice.shape, len(names)))
    for name, forms in users.items():
        if len(forms) > 1 and set(forms) != {(name, forms[0][1], 1)}:
            raise InvalidInput(
                f"column {name!r} is chosen twice, in different forms; a column is part of one "
                "input or target"
            )


def _sizes(field: Field) -> tuple[int, ...]:
    if field.is_ragged:
        raise InvalidInput("images of one dataset have one size; resize them")
    return tuple(n for n in field.shape if n is not None)

"""Files of predictions: arrays, a table, or JSON; each is read back before it takes its name."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from triplane.proto.disk import atomic_file
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.npz import opened_npz, write_npz

Array = np.ndarray[Any, Any]

MAX_COLUMNS: Final = 4096
MAX_TEXT_ELEMENTS: Final = 20_000_000
"""Limit for the numbers of a text file, which is about 10 bytes for each."""
CLASS: Final = "class"
SCORE: Final = "score"
GROUP: Final = "group"
_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, eq=False)
class Answers:
    """The outputs of a model, one row for each sample; labels: the classes of the first output.

    groups: the name of the column of groups and the group of each sample, text or number.
    """

    outputs: Mapping[str, Array]
    labels: tuple[str, ...] = ()
    groups: tuple[str, Array] | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups[0] in {*self.outputs, CLASS, SCORE}:
            raise InvalidInput(
                f"the column of groups {self.groups[0]!r} has the name of another column of the "
                "answers; rename it in the data"
            )

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(next(iter(self.outputs.values())))

    @cached_property
    def probabilities(self) -> Array | None:
        """(N, C) probabilities of the named classes; None without names."""
        first = next(iter(self.outputs.values()))
        if not self.labels or first.ndim != 2 or first.dtype.kind != "f":
            return None
        scores = first.astype(np.float64)
        sums = scores.sum(1)
        if (scores >= 0).all() and (np.abs(sums - 1) < _TOLERANCE).all():
            return scores
        # Also right for logarithms of probabilities: softmax(log p) = p.
        powers = np.exp(scores - scores.max(1, keepdims=True))
        shares: Array = powers / powers.sum(1, keepdims=True)
        return shares

    @cached_property
    def classes(self) -> tuple[list[str], Array] | None:
        """The most probable class of each sample with its probability, float32."""
        shares = self.probabilities
        if shares is None:
            return None
        best = shares.argmax(1)
        return [self.labels[k] for k in best], shares.max(1).astype(np.float32)

    def records(self, top: int) -> list[dict[str, Any]]:
        """Return each sample as JSON: its `top` classes, or its outputs."""
        shares = self.probabilities
        keys = [{}] * self.rows if self.groups is None else [{GROUP: k} for k in self._keys()]
        if shares is None:
            each = ({n: y[k].tolist() for n, y in self.outputs.items()} for k in range(self.rows))
            return [{**row, **key} for key, row in zip(keys, each, strict=True)]
        return [
            {
                **key,
                "top": [
                    {CLASS: self.labels[c], SCORE: float(row[c])}
                    for c in np.argsort(-row, kind="stable")[:top]
                ],
            }
            for key, row in zip(keys, shares, strict=True)
        ]

    def _keys(self) -> list[Any]:
        """Return the group of each sample as Python's text or number."""
        return [] if self.groups is None else self.groups[1].tolist()

    def column_of_groups(self) -> dict[str, list[str] | Array]:
        """Return the column of groups by its name, texts as a list; nothing without groups."""
        if self.groups is None:
            return {}
        name, values = self.groups
        return {name: self._keys() if values.dtype == object else values}

    def arrays(self) -> dict[str, Array]:
        """Return the outputs and the column of groups; InvalidInput if that holds texts."""
        columns = self.column_of_groups()
        if texts := [name for name, column in columns.items() if isinstance(column, list)]:
            raise InvalidInput(
                f"{texts[0]} holds texts, and .npz holds numbers alone; write .csv or .json"
            )
        return {**self.outputs, **{k: np.asarray(c) for k, c in columns.items()}}


def write_answers(path: Path, answers: Answers) -> None:
    """Write the file that the suffix asks for, whole or not at all.

    Corrupt: what was read back differs from what was to be written.
    """
    write, read_back = WRITERS[path.suffix]
    with atomic_file(path) as file:
        write(file, answers)
        file.flush()
        if not read_back(Path(file.name), answers):
            raise Corrupt(f"{path.name} differs from the answers when read back, so it is not kept")


def _write_npz(file: IO[bytes], answers: Answers) -> None:
    write_npz(file, answers.arrays())


def _npz_equals(path: Path, answers: Answers) -> bool:
    with opened_npz(path, total_bytes=2**62, file_bytes=2**62) as npz:
        arrays = answers.arrays()
        return npz.names == tuple(sorted(arrays)) and all(
            _same(npz.array(name), y) for name, y in arrays.items()
        )


def _columns(answers: Answers) -> dict[str, Any]:
    """Return the columns of a table: texts, or arrays (N,)."""
    columns: dict[str, Any] = {**answers.column_of_groups()}
    first = next(iter(answers.outputs))
    if answers.classes is not None:
        columns[CLASS], columns[SCORE] = answers.classes
    for name, y in answers.outputs.items():
        if name == first and answers.classes is not None:
            continue
        flat = y.reshape(len(y), -1)
        if len(columns) + flat.shape[1] > MAX_COLUMNS:
            raise InvalidInput(
                f"the output {name!r} is {y.dtype}{list(y.shape)}; a table has at most "
                f"{MAX_COLUMNS} columns: write .npz"
            )
        names = [name] if y.ndim == 1 else [f"{name}.{k}" for k in range(flat.shape[1])]
        columns |= dict(zip(names, flat.T, strict=True))
    return columns


def _write_csv(file: IO[bytes], answers: Answers) -> None:
    columns = _columns(answers)
    _check_elements(len(columns) * answers.rows)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    texts = (columns, *(column for column in columns.values() if isinstance(column, list)))
    # Python's minimal quoting leaves a carriage return bare, which is read back as another row.
    quoted = any("\r" in cell for column in texts for cell in column)
    writer = csv.writer(
        text, lineterminator="\n", quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
    )
    writer.writerow(columns)
    writer.writerows(zip(*map(_texts, columns.values()), strict=True))
    text.flush()
    text.detach()


def _texts(column: Any) -> list[str]:
    if isinstance(column, list):
        return column
    # The shortest text that reads as the same number of this type.
    numbers = column.astype(np.uint8) if column.dtype == bool else column
    return [str(x) for x in numbers]


def _csv_equals(path: Path, answers: Answers) -> bool:
    columns = _columns(answers)
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    if header != list(columns) or len(rows) != answers.rows:
        return False
    return all(
        list(texts) == column
        if isinstance(column, list)
        else _same(_numbers(texts, column.dtype), column)
        for texts, column in zip(zip(*rows, strict=True), columns.values(), strict=True)
    )


def _numbers(texts: tuple[str, ...], dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "f":
        return np.array(texts, dtype)
    return np.array([int(t) for t in texts], dtype)


def _write_json(file: IO[bytes], answers: Answers) -> None:
    _check_elements(sum(y.size for y in answers.outputs.values()))
    record: dict[str, Any] = {"samples": answers.rows}
    if answers.groups is not None:
        record["groups"] = {answers.groups[0]: answers.groups[1].tolist()}
    if answers.classes is not None:
        names, scores = answers.classes
        record |= {CLASS: names, SCORE: scores.tolist()}
    record["outputs"] = {name: y.tolist() for name, y in answers.outputs.items()}
    try:
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
    except ValueError as error:
        raise InvalidInput(
            "an output holds NaN or infinity, which JSON lacks; write .npz"
        ) from error


def _json_equals(path: Path, answers: Answers) -> bool:
    record = json.loads(path.read_bytes())
    outputs = record["outputs"]
    return outputs.keys() == answers.outputs.keys() and all(
        _same(np.array(outputs[name], y.dtype).reshape(y.shape), y)
        for name, y in answers.outputs.items()
    )


def _check_elements(count: int) -> None:
    if count > MAX_TEXT_ELEMENTS:
        raise InvalidInput(
            f"the file would have {count} numbers; texts of at most {MAX_TEXT_ELEMENTS} are "
            "written: write .npz"
        )


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


Writer = Callable[[IO[bytes], Answers], None]
WRITERS: Final[Mapping[str, tuple[Writer, Callable[[Path, Answers], bool]]]] = {
    ".npz": (_write_npz, _npz_equals),
    ".csv": (_write_csv, _csv_equals),
    ".json": (_write_json, _json_equals),
}
"""Suffix -> how a file is written, and whether a file has these answers."""

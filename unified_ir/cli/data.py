"""`triplane data`: look at samples, write them as records, check and time them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options
from triplane.unified_ir.cli.shell import (
    COUNT,
    NATURAL,
    CommandOutput,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from triplane.unified_ir.data import Dataset
    from triplane.unified_ir.data.records import RecordTable

EPILOG = """\b
Examples:
  triplane data inspect readings.csv                  columns, types, the first samples
  triplane data inspect readings.csv --x 'ch*:2x64' --y speed:1       as a model is given them
  triplane data convert readings.csv readings.tpr     as records: mapped, in any order, checked
  triplane data convert photos photos.tpr --size 64x64
  triplane data verify readings.tpr
  triplane data profile readings.tpr --batch-size 128

\b
DATA is the name digits, a file (.npz, .npy, .csv, .tsv, .parquet, .arrow, .feather, .txt, IDX
images, .db or .sqlite with --sql, a pipeline as .json), a record set NAME.tpr, or a folder of
images with one sub-folder per class. A record set is a folder; it may be moved and renamed.
"""
SUFFIX: Final = ".tpr"
SHOWN_SAMPLES: Final = 3
SHOWN_WIDTH: Final = 72


# fmt: off
INSPECT_OPTIONS: Final = (
    *data_options.choices("a model"),
    data_options.window_group(),
    *data_options.forms(),
    option("--samples N", "Samples to show.", NATURAL, default=SHOWN_SAMPLES),
)
PROFILE_OPTIONS: Final = (
    *data_options.source_forms(),
    option("--batch-size N", "Samples per batch.", COUNT, default=32),
    option("--batches N", "Batches to read.", COUNT, default=100),
)
# fmt: on


@click.group("data", epilog=EPILOG)
def command() -> None:
    """Look at samples, write them as records, check and time them."""


@command.command(
    "inspect", short_help="Show columns, types, first samples.", params=[*INSPECT_OPTIONS]
)
@click.argument("data", metavar="DATA")
@json_option
def inspect(**options: Any) -> None:
    """Show the columns of DATA, their types, and the first samples.

    With --x, --y, --group, --pixels or --window, samples are shown as a model is given them;
    otherwise as they are stored.
    """
    from triplane.unified_ir.data.column_runs import column_runs, run_text

    output = open_output(options["as_json"])
    dataset = _chosen(options)
    for note in dataset.notes:
        output.note(note)
    text = _start_of_text(dataset)
    rows = [_shown(sample) for sample in _first(dataset, options["samples"])]
    record = {
        "data": options["data"],
        "samples": dataset.samples,
        "columns": {name: str(field) for name, field in dataset.schema.items()},
        "inputs": list(dataset.inputs),
        "targets": list(dataset.targets),
        "labels": list(dataset.labels),
        "first": rows,
        **({"text": text} if text else {}),
        **_shards(dataset),
    }
    lines = [repr(dataset), *([f"text: {_cut(repr(text))}"] if text else [])]
    for k, row in enumerate([] if text else rows):
        lines.append(f"sample {k}")
        lines += [
            f"  {run_text(run)}: {_cut(', '.join(row[name] for name in run))}"
            for run in column_runs(dataset.schema)
        ]
    output.result(record, "\n".join(lines))


@command.command(
    "convert", short_help="Write samples as records.", params=[*data_options.source_forms()]
)
@click.argument("data", metavar="DATA")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.tpr")
@json_option
def convert(**options: Any) -> None:
    """Write the samples of DATA as the record set OUT.tpr, as they are stored.

    Bytes of pixels stay bytes. What is written is read back and compared with its checksums.
    """
    from triplane.unified_ir.data.records import RecordTable

    output = open_output(options["as_json"])
    out: Path = options["out"]
    if out.suffix != SUFFIX:
        raise InvalidInput(f"a record set is called NAME{SUFFIX}, got {out.name}")
    dataset = _stored(options)
    n = dataset.write(out, progress=_progress(output, dataset.samples))
    table = RecordTable(out)
    table.verify()
    record = {"records": str(out), "samples": n, **_shards_of(table)}
    output.result(record, f"{out}: {n:,} samples, {record['bytes']:,} bytes, verified")


@command.command("verify", short_help="Check the blocks of records.")
@click.argument("data", type=click.Path(path_type=Path), metavar="NAME.tpr")
@json_option
def verify(**options: Any) -> None:
    """Compare every block of a record set with its checksum."""
    from triplane.unified_ir.data.records import RecordTable

    output = open_output(options["as_json"])
    table = RecordTable(options["data"])
    table.verify()
    record = {"records": str(options["data"]), "samples": len(table), **_shards_of(table)}
    counts = f"{len(table):,} samples, {record['blocks']:,} blocks, {record['bytes']:,} bytes"
    output.result(record, f"{options['data']}: {counts}, all as their checksums say")


@command.command("profile", short_help="Time reading, step by step.", params=[*PROFILE_OPTIONS])
@click.argument("data", metavar="DATA")
@json_option
def profile(**options: Any) -> None:
    """Time reading DATA in shuffled batches in one thread, step by step."""
    from triplane.unified_ir import data

    output = open_output(options["as_json"])
    source: str = options["data"]
    dataset = data.load(source) if source.endswith(".json") else _stored(options)
    result = dataset.profile(options["batches"], size=options["batch_size"])
    output.result(result.record(), result.text())


def _chosen(options: dict[str, Any]) -> Dataset:
    """Return the samples with the columns that were chosen, or as they are stored."""
    from triplane.unified_ir.data.by_name import load

    form = ("x", "y", "group", "window")
    if options["pixels"] is None and not any(options[k] for k in form):
        return _stored(options)
    return load(options["data"], **data_options.reading_by_group(options))


def _stored(options: dict[str, Any]) -> Dataset:
    from triplane.unified_ir.data.by_name import stored

    return stored(options["data"], query=options["sql"], size=options["size"])


def _first(dataset: Dataset, count: int) -> list[dict[str, Any]]:
    from itertools import islice

    return list(islice(iter(dataset), count))


def _start_of_text(dataset: Dataset) -> str:
    """Return the first characters of a text, whose samples are code points; else nothing."""
    from triplane.unified_ir.data.sources.text import CHARACTERS, TextSource

    source = dataset.origin.source
    if not isinstance(source, TextSource) or source.unit != CHARACTERS or dataset.steps:
        return ""
    return "".join(chr(sample["token"]) for sample in _first(dataset, SHOWN_WIDTH))


def _shown(sample: dict[str, Any]) -> dict[str, str]:
    """Return the values of a sample as short texts."""
    import numpy as np

    texts = {}
    for name, value in sample.items():
        if isinstance(value, np.ndarray):
            text = np.array2string(
                value.ravel(), threshold=8, edgeitems=4, separator=", ", max_line_width=10_000
            )
        else:
            text = repr(value) if isinstance(value, str | bytes) else str(value)
        texts[name] = _cut(text)
    return texts


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_WIDTH else f"{text[: SHOWN_WIDTH - 3]}..."


def _shards(dataset: Dataset) -> dict[str, Any]:
    from triplane.unified_ir.data.records import RecordTable

    table = dataset.origin.table
    return _shards_of(table) if isinstance(table, RecordTable) else {}


def _shards_of(table: RecordTable) -> dict[str, Any]:
    shards = table.shards
    return {
        "shards": len(shards),
        "blocks": sum(shard.blocks for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
    }


def _progress(output: CommandOutput, total: int | None) -> Any:
    """Return a function that notes the samples written, at each tenth of them."""
    step = max(1, (total or 1_000_000) // 10)
    noted = 0

    def note(n: int) -> None:
        nonlocal noted
        if n // step > noted and n != total:
            noted = n // step
            of = "" if total is None else f" of {total:,}"
            output.note(f"{n:,}{of} samples")

    return note

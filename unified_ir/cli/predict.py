"""`triplane predict`: the answers of a model to samples or to an image, printed or in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options, models, training
from triplane.unified_ir.cli.shell import (
    COUNT,
    OUTPUT_FILE,
    CommandOutput,
    check_distinct_files,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from triplane.unified_ir.cli.answers import Answers
    from triplane.unified_ir.cli.models import FileModel
    from triplane.unified_ir.data import Dataset
    from triplane.unified_ir.ir.graph import Array

SHOWN: Final = 10
"""Number of samples that are computed and printed without --out."""
TOP: Final = 3
"""Number of classes that are printed for each sample."""
MAX_OUTPUT_BYTES: Final = 2 << 30
"""Limit for the outputs of all samples, which are in memory until they are written."""

EPILOG = f"""\b
Examples:
  triplane predict digits.tpm seven.png
  triplane predict digits.bundle digits --out scores.csv
  triplane predict gait.tpm steps.csv --x 'ch*:2x64' --group person --out speeds.csv
  triplane predict resnet.onnx photos --size 224x224 --out classes.json

\b
MODEL is {models.KINDS}.
INPUT is DATA, see below, or one image (.png, .jpg, .pgm, .ppm), which gets the channels and the
size that the model takes.

\b
The suffix of --out says what is written:
  .npz    every output under its name, with one row for each sample
  .csv    a line for each sample: class and probability if classes have names, else numbers
  .json   both
Scores that are no probabilities become some by softmax. A model that samples gives the same answers
for the same --seed, --batch-size and order of samples.

{data_options.CHOICES}"""


# fmt: off
OPTIONS: Final = (
    data_options.choices()[0],
    data_options.group_option("Repeat this column beside the answers."),
    *data_options.forms(),
    option("--out", "The file to write (.npz, .csv or .json); without it, the first answers are "
           "printed.", OUTPUT_FILE),
    option("--batch-size N", "Samples per batch.", COUNT, default=models.BATCH),
    data_options.seed_option(),
)
# fmt: on


@click.command("predict", epilog=EPILOG, params=[*OPTIONS])
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL")
@click.argument("source", metavar="INPUT")
@json_option
def command(**options: Any) -> None:
    """Compute what MODEL answers to the samples of INPUT."""
    output = open_output(options["as_json"])
    check_outputs(options)
    answer(models.open_file(options["model"]), options, output)


def check_outputs(options: dict[str, Any]) -> None:
    """Refuse a file to write that is an input, or of another kind."""
    from triplane.unified_ir.cli.answers import WRITERS

    out: Path | None = options["out"]
    check_distinct_files([options["model"], options["source"]], {"--out": out})
    if out is not None and out.suffix not in WRITERS:
        raise InvalidInput(f"--out is a file {', '.join(WRITERS)}, got {out.name}")


def answer(model: FileModel, options: dict[str, Any], output: CommandOutput) -> None:
    """Print or write what a model answers; options: those of `OPTIONS`, `model` and `source`."""
    from triplane.unified_ir.cli.answers import write_answers

    out: Path | None = options["out"]
    model = models.seeded(model, options["seed"])
    if note := models.repeated_draws(model):
        output.note(note)
    dataset = _dataset(options, model, output)
    answers = _answers(model, dataset, options, None if out is not None else SHOWN)
    record: dict[str, Any] = {"model": str(options["model"]), "samples": answers.rows}
    if out is None:
        record["answers"] = answers.records(TOP)
        output.result(record, "\n".join(_lines(answers)))
        return
    write_answers(out, answers)
    record |= {"file": str(out), "bytes": out.stat().st_size}
    record["outputs"] = {n: f"{y.dtype}{list(y.shape)}" for n, y in answers.outputs.items()}
    text = f"{out}: {answers.rows:,} samples, {record['bytes']:,} bytes, read back and compared"
    output.result(record, text)


def _dataset(options: dict[str, Any], model: FileModel, output: CommandOutput) -> Dataset:
    from triplane.unified_ir.data import arrays
    from triplane.unified_ir.data.by_name import load_held_out
    from triplane.unified_ir.data.choosing import is_text
    from triplane.unified_ir.data.sources.decoding import DECODERS

    source = options["source"]
    if Path(source).suffix.lower() in DECODERS:
        return arrays(_image(source, options["size"], model, output))
    group = options["group"] or ""
    dataset = load_held_out(source, group=group, **models.reading(options, model))
    for text in dataset.notes:
        output.note(text)
    if is_text(dataset) and not model.labels:
        output.note("the model has no names of classes, so the characters of the text are numbered "
                    "from 0 in order, whatever their numbers were in training")  # fmt: skip
    return dataset.roles(dataset.inputs)


def _image(
    path: str, size: tuple[int, ...] | None, model: FileModel, output: CommandOutput
) -> Array:
    """Return an image (1, C, H, W) as bytes, in the channels and the size of the model's input."""
    from triplane.unified_ir.data.sources.folder import decoded_image

    info = model.inputs[0]
    if len(model.inputs) != 1 or len(info.shape) != 4:
        taken = ", ".join(map(str, model.inputs))
        raise InvalidInput(f"an image is one input (N, C, H, W), but the model takes {taken}")
    channels, height, width = info.shape[1:]
    own = (height, width) if isinstance(height, int) and isinstance(width, int) else None
    known = channels if isinstance(channels, int) and channels in {1, 3} else None
    image = decoded_image(path, channels=known)
    wanted = (size[-2], size[-1]) if size else own  # the channels are those of the model
    if wanted is not None and wanted != image.shape[1:]:
        old, new = (f"{h}x{w}" for h, w in (image.shape[1:], wanted))
        output.note(f"{path} is resized from {old} to {new}")
        image = decoded_image(path, wanted, len(image))
    return image[None]


def _answers(
    model: FileModel, dataset: Dataset, options: dict[str, Any], limit: int | None
) -> Answers:
    """Return the outputs for all samples, or for the first `limit`."""
    import numpy as np

    from triplane.unified_ir.cli.answers import Answers

    parts: list[Mapping[str, Array]] = []
    keys: list[Array] = []
    rows = taken = 0
    size = options["batch_size"] if limit is None else min(limit, options["batch_size"])
    for arrays, own in models.batches(dataset, size, options["group"] or ""):
        feeds = models.feeds_of(dataset, arrays, model, options["x"])
        count = len(arrays[0])
        results = _checked(model.run(feeds), count)
        parts.append(results)
        keys += [] if own is None else [own]
        rows, taken = rows + count, taken + sum(y.nbytes for y in results.values())
        if taken > MAX_OUTPUT_BYTES:
            raise InvalidInput(
                f"the outputs of {rows} samples take {taken} bytes; at most {MAX_OUTPUT_BYTES} "
                "are kept: split the data"
            )
        if limit is not None and rows >= limit:
            break
    if not parts:
        raise InvalidInput("there are no samples to answer")
    joined = {name: np.concatenate([p[name] for p in parts])[:limit] for name in model.outputs}
    groups = (options["group"], np.concatenate(keys)[:limit]) if keys else None
    return Answers(joined, _class_names(model), groups)


def _checked(results: Mapping[str, Array], rows: int) -> Mapping[str, Array]:
    for name, y in results.items():
        if y.ndim == 0 or len(y) != rows:
            raise InvalidInput(
                f"the output {name!r} is {y.dtype}{list(y.shape)} for {rows} samples; an answer "
                "has one row for each sample"
            )
    return results


def _class_names(model: FileModel) -> tuple[str, ...]:
    """Return the names of classes of which one is right; none where each has its own share."""
    is_shares = dict(training.LOSSES.values()).get(model.loss) == "shares"
    return () if is_shares else model.labels


def _lines(answers: Answers) -> Iterator[str]:
    import numpy as np

    from triplane.unified_ir.cli.answers import GROUP
    from triplane.unified_ir.files.html_table import printable

    for k, row in enumerate(answers.records(TOP)):
        head = f"{k} ({printable(str(row[GROUP]))})" if GROUP in row else f"{k}"
        if "top" in row:
            yield f"{head}: " + ", ".join(
                f"{printable(c['class'])} {c['score']:.3f}" for c in row["top"]
            )
            continue
        texts = (
            f"{name} {np.array2string(np.asarray(y[k]), threshold=8, precision=4, separator=', ')}"
            for name, y in answers.outputs.items()
        )
        yield f"{head}: " + " ".join(" ".join(texts).split())

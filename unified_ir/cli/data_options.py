"""The options of the verbs that read samples: which data, which of its columns, in which form.

They mean the same for every verb. Only `data` itself reads anything; this module imports it late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.unified_ir.cli.shell import COUNT, option

if TYPE_CHECKING:
    from triplane.unified_ir.data import Dataset

    _SizeType = click.ParamType[Any]
else:
    _SizeType = click.ParamType

KINDS: Final = "the name digits, a file (.npz, .npy, .csv, .parquet, .db, .txt, ...), or a folder"
CHOICES: Final = """\b
DATA is the name digits, a file of arrays, a table, a text, MNIST IDX files, a folder of texts, or a
folder of images with one sub-folder per class; docs/data.md lists the kinds. Columns beside the
samples are the file of each text (file) and the folder of FOLDER/CLASS/IMAGE (folder). A CHOICE of
columns is
[NAME=]PATTERN[,PATTERN..][:SHAPE]:
  --x x:1x28x28     the column x, each sample as 1 x 28 x 28
  --x 'ch*:2x64'    128 columns, joined to 2 rows of 64
  --x image=photo   the column photo under another name
  --x a --x b       two inputs, in the order in which the model takes them
  --y price:1       a target of one number, as an array of length 1
"""
"""The paragraph of help on columns, for the verbs that have `choices`."""
PIXELS: Final = "pixels"
READ: Final = {
    "x": "x",
    "y": "y",
    PIXELS: PIXELS,
    "window": "window",
    "sql": "query",
    "size": "size",
}
"""Option -> the field of `data.load`; `query` is the name of an option of studies."""


class ImageSize(_SizeType):
    """HEIGHTxWIDTH of images, or CHANNELSxHEIGHTxWIDTH, as a tuple in this order."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the sizes; a usage error shows the form."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split("x")
        if len(parts) not in {2, 3} or not all(p.isdecimal() and int(p) for p in parts):
            self.fail(
                "a size of images is HEIGHTxWIDTH, such as 32x32, or CHANNELSxHEIGHTxWIDTH, such "
                f"as 3x32x32; got {value!r}", param, ctx,
            )  # fmt: skip
        return tuple(map(int, parts))


def data_option(help_text: str, *, required: bool = False) -> click.Option:
    """Return --data."""
    return option("--data DATA", f"{help_text}: {KINDS}.", required=required)


def choices(model: str = "the model") -> tuple[click.Option, click.Option]:
    """Return --x and --y; model: what takes the inputs, for the help."""
    return (
        option("--x CHOICE", f"Columns of an input of {model}, see below; may be repeated.  "
               "[default: x]", multiple=True, show_default=False),
        option("--y CHOICE", "Columns of a target, see below; texts become classes.  [default: y]",
               multiple=True, show_default=False),
    )  # fmt: skip


def group_option(help_text: str) -> click.Option:
    """Return --group."""
    return option(
        "--group COLUMN",
        f"{help_text} No pattern of --x or --y takes this column.",
        callback=_checked_group,
    )


def _checked_group(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    # An empty value, as of an unset variable of a shell, would hold out no groups and not say so.
    if value == "":
        raise click.BadParameter("it names a column, got ''", param=param)
    return value


def window_group() -> click.Option:
    """Return --group of the verbs that do nothing else with that column."""
    return group_option("Column of the group of each sample, which no --window crosses.")


def seed_option() -> click.Option:
    """Return --seed of the verbs that run a model."""
    return option(
        "--seed N",
        "For a model that samples (train --key-input): its batch number k, "
        "from 0, gets the key (N, k).",
        click.IntRange(0, 2**32 - 1),
    )


def source_forms() -> tuple[click.Option, ...]:
    """Return --size and --sql, which a source itself takes."""
    return (
        option("--size HxW", "Resize the images of a folder; 3xHxW: and make all RGB, 1xHxW: "
               "grey.", ImageSize()),
        option("--sql QUERY", "The rows of a database that are samples; ORDER BY keeps their order "
               "the same."),
    )  # fmt: skip


def forms() -> tuple[click.Option, ...]:
    """Return --pixels, --window and those of `source_forms`."""
    return (
        option("--pixels/--no-pixels", "Read bytes as pixels and divide them by 255, or leave them "
               "as they are.  [default: inputs with two axes or more are pixels]", default=None,
               show_default=False),
        *source_forms(),
        option("--window N", "Length of a sample of text, or of consecutive rows.  [default: 64 "
               "for text]", COUNT),
    )  # fmt: skip


def reading(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `data.load` that a verb's options state."""
    return {name: options[key] for key, name in READ.items() if key in options}


def reading_by_group(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same for verbs that only keep the column of --group; see `window_group`."""
    group = options["group"]
    return reading(options) | ({} if group is None else {"keep": (group,)})


def summary(dataset: Dataset) -> str:
    """Return inputs and targets with their types: "x float32[2x64], y int64 of 5 classes"."""
    schema = dataset.schema
    text = ", ".join(f"{name} {schema[name]}" for name in (*dataset.inputs, *dataset.targets))
    return f"{text} of {len(dataset.labels)} classes" if dataset.labels else text


def shape_hint(
    dataset: Dataset,
    *,
    x: Sequence[str] | None = None,
    y: Sequence[str] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> str:
    """Return what a model was fed and the option that adds an axis, for errors about shapes.

    x, y: the choices of the command line; None where inputs, or targets, are not in question.
    sizes: those of a sample of an input that the model takes, by column, where they are known.
    """
    examples = [
        text
        for flag, names, chosen in (("--x", dataset.inputs, x), ("--y", dataset.targets, y))
        if chosen is not None
        for text in _examples(dataset, flag, names, chosen, sizes or {})
    ]
    way = f"; another shape is chosen as in {' or '.join(examples)}" if examples else ""
    return f"the data gives, for each sample: {summary(dataset)}{way}"


def _examples(
    dataset: Dataset,
    flag: str,
    names: Sequence[str],
    chosen: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
) -> list[str]:
    """Return the choice with one more axis for each column that probably lacks one.

    For a column with known `sizes`, return the choice of those if its samples have as many values.
    """
    examples = []
    for k, name in enumerate(names):
        field = dataset.schema[name]
        shape: Sequence[int | None] = sizes.get(name, (1, *field.shape))
        # Classes have no axis, and three axes are images with their channels.
        lacks = len(field.shape) in (1, 2) if flag == "--x" else field.dtype.startswith("float")
        if name in sizes:
            own = [0 if n is None else n for n in field.shape]
            lacks = [*sizes[name]] != own and prod(sizes[name]) == prod(own)
        if lacks and not (field.is_ragged or (flag == "--y" and field.shape)):
            columns = chosen[k].partition(":")[0] if chosen else name
            examples.append(f"{flag} '{columns}:{'x'.join(map(str, shape))}'")
    return examples

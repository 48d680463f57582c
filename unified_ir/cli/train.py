"""`triplane train`: train a cell from a Python file and write one model file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triplane.proto.errors import InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.cli.importing import SUFFIX
from triplane.unified_ir.cli.shell import OUTPUT_FILE, json_option, open_output

if TYPE_CHECKING:
    from types import ModuleType

    from triplane.unified_ir.frontend import Cell
    from triplane.unified_ir.optim import Optimizer
    from triplane.unified_ir.train import Trainer

EPILOG = """\b
Examples:
  triplane train examples/digits.py:Digits --data digits --epochs 5 --out digits.tpm
  triplane train zoo:lenet --data mnist/ --epochs 3 --out lenet.tpm
  triplane train net.py:Net --data photos --optimizer sgd --lr 0.05 --checkpoint run1 --out n.tpm

\b
Interrupted? The same command with the same --checkpoint folder goes on to the same bits.
FILE.py is ordinary Python; Cell is a subclass of nn.Cell, or a function that makes one. In place of
it MODEL.onnx trains an imported model further, and zoo:resnet8,channels=1 a network that papers
made known; docs/zoo.md lists them.
"""
ZOO = "zoo:"
ENTRIES = ("predict", "evaluate", "loss", "train_step", "local_update", "adapt", "gradients")
DEFAULT_ENTRIES: Any = ENTRIES[:-1]


@click.command("train", epilog=EPILOG)
@click.argument("cell", metavar="FILE.py:Cell")
@click.option(
    "--data", required=True, metavar="DATA",
    help="'digits' (ships with the package), a .npz with x and y, MNIST IDX files, or an image "
    "folder with one sub-folder per class.",
)  # fmt: skip
@click.option(
    "--validation", metavar="DATA",
    help="Held-out data of the same kind; by default a fifth of --data.",
)  # fmt: skip
@click.option(
    "--epochs", type=click.IntRange(1), default=5, show_default=True, metavar="N",
    help="Passes over the training data.",
)  # fmt: skip
@click.option(
    "--batch-size", type=click.IntRange(1), default=32, show_default=True, metavar="N",
    help="Samples per step.",
)  # fmt: skip
@click.option(
    "--optimizer", type=click.Choice(["adam", "adamw", "momentum", "sgd"]), default="adam",
    show_default=True, help="The update rule, part of the graph.",
)  # fmt: skip
@click.option(
    "--lr", type=click.FloatRange(min=0, min_open=True), default=0.002, show_default=True,
    metavar="RATE", help="Learning rate.",
)  # fmt: skip
@click.option(
    "--engine", default="onnx", show_default=True, metavar="NAME",
    help="onnx, reference or ascend.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N",
    help="Of starting weights, split and order; the same seed writes the same bytes.",
)  # fmt: skip
@click.option("--out", type=OUTPUT_FILE, required=True, help="The model file to write (NAME.tpm).")
@click.option("--history", type=OUTPUT_FILE, help="Write loss and accuracy per epoch as JSON.")
@click.option(
    "--checkpoint", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for checkpoints; a run that was killed goes on from the newest.",
)  # fmt: skip
@click.option(
    "--entry", "entries", type=click.Choice(ENTRIES), multiple=True,
    help="Function to export; may be repeated.  [default: all but gradients]",
)  # fmt: skip
@click.option(
    "--local-lr", type=click.FloatRange(min=0, min_open=True), metavar="RATE",
    help="Rate of local_update and adapt.  [default: --lr of sgd, else 0.01]",
)  # fmt: skip
@json_option
def command(**options: Any) -> None:
    """Train FILE.py:Cell and write the result as one model file.

    The whole step (forward, backward, clipping, optimizer) is one graph; the file holds the
    functions, the weights and the optimizer's state, and `triplane convert` takes it from there.
    """
    import time

    as_json = options.pop("as_json")
    output = open_output(as_json)
    start = time.perf_counter()
    try:
        trainer, result = _trained(options, quiet=as_json)
    except KeyboardInterrupt:
        output.note(_after_interrupt(options["checkpoint"]))
        raise
    except TriplaneError:
        raise
    except Exception as error:
        _blame_file(error, options["cell"])
        raise
    module = trainer.export(options["entries"] or DEFAULT_ENTRIES, local_lr=options["local_lr"])
    out = options["out"]
    digest = module.save(out)
    if options["history"] is not None:
        from triplane.proto.disk import write_atomic

        write_atomic(options["history"], trainer.history.json().encode())
    record = {
        "model": str(out),
        "digest": digest,
        "bytes": out.stat().st_size,
        "epochs": trainer.place.epoch,
        "train": _columns(trainer.history.last, prefix=""),
        "validation": result,
        "seconds": time.perf_counter() - start,
    }
    shown = ", ".join(f"{k} {v:.4g}" for k, v in result.items())
    output.result(record, f"{out}: {record['bytes']:,} bytes, held out: {shown}\ndigest {digest}")


def _blame_file(error: Exception, spec: str) -> None:
    """InvalidInput with the last line of the user's file that `error` came from, if it did."""
    from traceback import extract_tb

    file = spec.rpartition(":")[0]
    path = str(Path(file).resolve())
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    if lines:
        what = error.msg if isinstance(error, SyntaxError) else error
        raise InvalidInput(f"{file}:{lines[-1]}: {type(error).__name__}: {what}") from error


def _after_interrupt(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "no model file is written; with --checkpoint FOLDER the same command would go on"
    return f"no model file is written yet; the same command goes on from {checkpoint}"


def _trained(options: dict[str, Any], *, quiet: bool) -> tuple[Trainer, dict[str, float]]:
    from triplane.unified_ir import data, nn
    from triplane.unified_ir.train import Trainer

    nn.seed(options["seed"])
    cell = load_cell(options["cell"])
    if options["validation"] is None:
        training, held_out = data.load_split(options["data"], seed=options["seed"])
    else:
        training, held_out = data.load(options["data"]), data.load(options["validation"])
    trainer = Trainer(
        cell,
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=_optimizer(options["optimizer"], options["lr"]),
        engine=options["engine"],
        seed=options["seed"],
        labels=training.labels,
    )
    trainer.fit(
        training,
        options["epochs"],
        batch_size=options["batch_size"],
        validation=held_out,
        checkpoint=options["checkpoint"],
        progress="lines" if quiet else "auto",
    )
    return trainer, trainer.evaluate(held_out)


def _columns(row: dict[str, float], *, prefix: str) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in row.items() if "." not in k}


def _optimizer(name: str, lr: float) -> Optimizer:
    from triplane.unified_ir import optim

    made: dict[str, Any] = {
        "adam": lambda: optim.Adam(lr),
        "adamw": lambda: optim.AdamW(lr),
        "momentum": lambda: optim.SGD(lr, momentum=0.9),
        "sgd": lambda: optim.SGD(lr),
    }
    return made[name]()  # type: ignore[no-any-return]


def load_cell(spec: str) -> Cell:
    """The cell that FILE.py:NAME names: a Cell subclass, or a function without arguments.

    An ONNX model is such a cell too: its weights go on from where they are.
    """
    from triplane.unified_ir.frontend import Cell

    if Path(spec).suffix == SUFFIX:
        from triplane.unified_ir.nn import Imported
        from triplane.unified_ir.onnx import import_onnx

        return Imported(import_onnx(Path(spec)))
    if spec.startswith(ZOO):
        return _of_zoo(spec.removeprefix(ZOO))
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise InvalidInput(f"the cell is given as FILE.py:Cell or zoo:NAME, got {spec!r}")
    module = _load_module(Path(file))
    found = getattr(module, name, None)
    if found is None:
        known = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Cell)]
        raise NotFound(f"{file} defines no {name!r}; cells there: {', '.join(known) or 'none'}")
    made = found() if callable(found) else found
    if not isinstance(made, Cell):
        raise InvalidInput(f"{spec} gives a {type(made).__name__}; it must give an nn.Cell")
    return made


def _of_zoo(spec: str) -> Cell:
    """NAME or NAME,OPTION=NUMBER,... of the zoo."""
    from triplane.unified_ir.zoo import network

    name, *options = spec.split(",")
    given: dict[str, int | float] = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            given[key] = float(value) if "." in value else int(value)
        except ValueError:
            raise InvalidInput(
                f"options of a zoo network are NAME=NUMBER, such as zoo:resnet8,channels=1; got "
                f"{option!r}"
            ) from None
    try:
        return network(name, **given)
    except TypeError as error:
        raise InvalidInput(f"zoo:{name} does not take these options: {error}") from error


def _load_module(path: Path) -> ModuleType:
    import importlib.util
    import sys

    if not path.is_file():
        raise NotFound(f"no file {path}; give the path of the Python file that defines the cell")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module

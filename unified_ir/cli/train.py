"""`triplane train`: train a cell from a Python file and write one model file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import Conflict, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.cli import data_options, training
from triplane.unified_ir.cli.importing import SUFFIX, model_or_onnx
from triplane.unified_ir.cli.memory_size import MemorySize
from triplane.unified_ir.cli.python_files import blame_file, load_module
from triplane.unified_ir.cli.shell import (
    COUNT,
    FOLDER,
    NATURAL,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    POSITIVE,
    CommandOutput,
    check_distinct_files,
    check_suffix,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from types import ModuleType

    from triplane.unified_ir.data import Dataset
    from triplane.unified_ir.data.columns import Field
    from triplane.unified_ir.frontend import Cell
    from triplane.unified_ir.ir import Module
    from triplane.unified_ir.nn.imported import BatchNormMode
    from triplane.unified_ir.train import Callback, Trainer
    from triplane.unified_ir.train.run import Run

EPILOG = f"""\b
Examples:
  triplane train examples/digits.py:Digits --data digits --epochs 5 --out digits.tpm
  triplane train net.py:Net --cell-args width=32,norm=batch --data photos --out n.tpm
  triplane train zoo:lenet --data mnist/ --epochs 3 --out lenet.tpm
  triplane train net.py:Net --data photos --optimizer adamw --lr 0.001 --weight-decay 0.05
      --schedule cosine --warmup 100 --clip 1.0 --ema 0.999 --checkpoint run1 --out n.tpm
  triplane train net.py:Net --data photos --batch-size 16 --accumulate 8 --precision float16
      --tensorboard logs --early-stop 3:validation.accuracy --metric f1 --out n.tpm
  triplane train gait.py:Net --data steps.csv --x 'ch*:2x64' --y speed:1 --group person
      --loss huber --metric r2 --out gait.tpm
  triplane train charlm.py:CharLM --data book.txt --window 128 --metric perplexity --out lm.tpm

{data_options.CHOICES}
\b
--schedule lowers --lr over the updates of the run; the defaults of each KEY are shown:
  cosine:low=0            half a cosine, down over the whole run
  polynomial:power=1,low=0     a line or a curve, down over the whole run
  one-cycle:rise=0.3      up during this share of the run, then down to almost zero
  step:every=N,factor=0.1      multiplied by factor after every N updates
  multi-step:at=N/N/N,factor=0.1    multiplied by factor at each of these updates
  exponential:factor=F,every=1      multiplied by F over every N updates, smoothly
  plateau:patience=10,factor=0.1,low=0   multiplied by factor whenever validation.loss
                          has not improved for over patience epochs
  restarts:every=N,growth=1,low=0   cosines of N updates, each growth times as long
With --warmup N the rate rises over the first N updates. An update is one batch, or --accumulate.

\b
After an interruption, the same command with the same --checkpoint folder resumes the run, to the
same bits. It refuses another network, loss, optimizer, batch size, data or seed, and names which.
FILE.py is ordinary Python; Cell is a subclass of nn.Cell, or a function that returns one.
MODEL.onnx or MODEL.tpm in its place trains that model's `predict` further (which must return scores
before any softmax), and zoo:resnet8,channels=1 trains a network of the zoo, listed in docs/zoo.md.
"""
ZOO = "zoo:"
ENTRIES = ("predict", "evaluate", "loss", "train_step", "local_update", "adapt", "gradients")
DEFAULT_ENTRIES: Any = ENTRIES[:-1]
_MODELS: Final = frozenset({SUFFIX, ".tpm"})
"""Suffixes of files whose model is trained further."""
RATE: Final = 0.002
FINE_TUNING_RATE: Final = 0.0002
"""Default of --lr for a model that is already trained; ten times that can undo its training."""


# fmt: off
OPTIONS: Final = (
    data_options.data_option("Labelled samples", required=True),
    *data_options.choices("the cell"),
    data_options.group_option("Hold out whole groups: samples with one value in this column stay "
                              "together."),
    *data_options.forms(),
    option("--validation DATA", "Held-out samples with the same columns.  [default: a fifth of "
           "--data]"),
    option("--workers N", "Threads that read batches ahead.", NATURAL, default=0),
    option("--processes", "Make the --workers child processes.", is_flag=True),
    option("--cell-args NAME=VALUE,..", "Arguments of Cell, or a JSON object of them."),
    option("--epochs N", "Passes over the training data.", COUNT, default=5),
    option("--batch-size N", "Samples per step.", COUNT, default=32),
    option("--optimizer NAME", f"{', '.join(training.OPTIMIZERS)}; its other settings have "
           "PyTorch's defaults.",
           click.Choice(list(training.OPTIMIZERS)), default="adam"),
    option("--lr RATE", "Learning rate; the highest one with --schedule.  "
           f"[default: {RATE:g}; {FINE_TUNING_RATE:g} for a model file]", POSITIVE),
    option("--schedule NAME[:KEY=VALUE,..]",
           "Schedule of the learning rate, see below.  [default: constant]"),
    option("--warmup N", "Raise the rate over the first N updates.", COUNT),
    option("--weight-decay W", "Weight decay.  [default: 0; 0.01 for adamw]", NOT_NEGATIVE),
    option("--freeze PATTERN", 'Parameters to exclude from training, such as "body.*"; may be '
           'repeated.', multiple=True),
    option("--batch-norm",
           "For a model file: normalize by its running statistics, or by those of the batch, "
           "updating the running ones.", click.Choice(["kept", "updated"]), default="kept"),
    option("--clip [KIND:]LIMIT", "Limit gradients: their common norm (norm, the default), the "
           "norm of each tensor (each), or each element (value)."),
    option("--accumulate N", "Batches per update: N batches act as one large batch, in the memory "
           "of one.", COUNT, default=1),
    option("--precision", "Precision of products; weights stay float32. float16 has a dynamic loss "
           "scale.", click.Choice(["float32", "float16", "bfloat16"]), default="float32"),
    option("--loss-scale X", "A constant loss scale for float16.  [default: dynamic]", POSITIVE),
    option("--ema D", "Write the exponential moving average of the weights, with decay D (0.999).",
           click.FloatRange(0, 1, max_open=True)),
    option("--tune", "Measure alternative forms of operators and use the fastest; cached on this "
           "machine.", is_flag=True),
    option("--memory-budget MB",
           "Recompute some tensors so that those alive at once fit in MB million bytes.", POSITIVE),
    option("--loss", "Compare with classes (cross-entropy of scores, nll of log-probabilities), "
           "shares in 0..1 (bce, of scores), or numbers.  [default: cross-entropy for classes, mse "
           "for real numbers]", click.Choice(list(training.LOSSES))),
    option("--class-weights W,W,..", "Weight of each class in the loss, in order."),
    option("--metric", "Metric to measure; may be repeated.  [default: accuracy; mae for numbers]",
           click.Choice(list(training.METRICS)), name="metrics", multiple=True),
    option("--early-stop N[:MEASURE]",
           "Stop after N epochs without improvement of validation.loss, or of MEASURE."),
    option("--restore-best", "With --early-stop: write the weights of the best epoch, not of the "
           "last.", is_flag=True),
    option("--tensorboard DIR", "Write event files for TensorBoard.", FOLDER),
    option("--engine NAME", "onnx, reference, ascend or xla (JAX, on a GPU if there is one).",
           default="onnx"),
    option("--device", "With --engine onnx: cuda needs onnxruntime-gpu in place of onnxruntime.  "
           "[default: cpu]", click.Choice(["cpu", "cuda"])),
    option("--mesh AXIS=N,..", "With --engine xla: devices by axis; a batch is split over `data`."),
    option("--shard PATTERN=AXIS,..", "With --mesh: over which axis each axis of the parameters of "
           "such names is split, - for none, as in '*.weight=model,-'; may be repeated.",
           multiple=True),
    option("--parallel", "With --engine xla: split the step over --devices as `triplane plan` "
           "does.", click.Choice(["auto"])),
    option("--devices N", "With --parallel: how many.  [default: all]", COUNT),
    option("--stages N", "With --engine xla: a pipeline, a stage of the layers on each of N "
           "devices.", COUNT),
    option("--microbatches M", "With --stages: equal parts of a batch that follow each other.  "
           "[default: four for each stage]", COUNT),
    option("--buckets SIZE", "With --mesh data=N: gradients that share an all-reduce, as planned "
           "by times that are measured before the first step (auto), all (one), or of a size such "
           "as 25MiB.  [default: XLA decides]",
           MemorySize("auto", "one")),
    option("--topology FILE", "With --parallel, --buckets or --stages: rates, as `triplane plan` "
           "takes them.", click.Path(path_type=Path, exists=True, dir_okay=False)),
    option("--steps-per-launch N", "With --engine xla: steps that the device runs without the host "
           "between them. N is always kept; auto measures, and falls back to 1 where that is "
           "faster.", default="1"),
    option("--deterministic", "With --engine xla: the same bits again on a GPU, too.",
           is_flag=True),
    option("--coordinator HOST:PORT", "With --engine xla: train as one of several processes; where "
           "the first one serves the others. auto: the first node of SLURM."),
    option("--process I/N", "Which of the processes this is, from 1/N.  [default: as SLURM or a "
           "Kubernetes Job says]"),
    option("--heartbeat SECONDS", "With --coordinator: a process that gives no sign of life for so "
           "long is lost.  [default: 10]", COUNT),
    option("--meet-within SECONDS", "With --coordinator: all processes must have started within so "
           "long.  [default: 300]", COUNT),
    option("--seed N", "Seed of initial weights, split and order; the same seed gives the same "
           "bytes.", NATURAL, default=0),
    option("--out", "The model file to write (NAME.tpm).", OUTPUT_FILE, required=True),
    option("--history", "Write loss and metrics per epoch as JSON.", OUTPUT_FILE),
    option("--checkpoint", "Folder for checkpoints; a killed run resumes from the newest.", FOLDER),
    option("--resume/--no-resume",
           "Resume from --checkpoint, or refuse a folder that holds checkpoints.", default=True),
    option("--entry", "Function to export; may be repeated.  [default: all but gradients]",
           click.Choice(ENTRIES), name="entries", multiple=True),
    option("--key-input NAME", "Add an input uint32[2] to predict: the key by which a cell that "
           "samples draws."),
    option("--fixed-batch N", "Export functions for batches of exactly N samples.  [default: any]",
           COUNT),
    option("--local-lr RATE",
           "Rate of local_update and adapt.  [default: --lr with sgd, else 0.01]", POSITIVE),
)
# fmt: on


@click.command("train", epilog=EPILOG, params=[*OPTIONS])
@click.argument("cell", metavar="FILE.py:Cell")
@json_option
def command(**options: Any) -> None:
    """Train FILE.py:Cell and write the result as one model file.

    The whole step (forward, backward, clipping, optimizer) is one graph; the file holds the
    functions, the weights and the optimizer's state, and `triplane convert` takes it from there.
    """
    from triplane.unified_ir.cli import watching

    as_json = options.pop("as_json")
    output = open_output(as_json)
    is_default_rate = options["lr"] is None
    if is_default_rate:
        options["lr"] = FINE_TUNING_RATE if Path(options["cell"]).suffix in _MODELS else RATE
    _check(options)
    options["hosts"] = training.hosts(options)
    if options["hosts"] is not None and not watching.is_watched():
        code = watching.train(options["hosts"], options["checkpoint"], output.note)
        click.get_current_context().exit(code)
    with watching.reporting(options["hosts"]):
        _run(options, output, is_default_rate=is_default_rate)


def _run(options: dict[str, Any], output: CommandOutput, *, is_default_rate: bool) -> None:
    """Train, write the files and report."""
    import time

    start = time.perf_counter()
    with _explained(options, output, is_default_rate=is_default_rate), output.user_code():
        trainer, measures, module = _trained(options, output)
    digest = _written(options, trainer, module)
    if digest is None:
        output.note(f"{options['hosts']}: done; process 1 has written its --out")
        return
    record = _record(options["out"], digest, trainer, measures, time.perf_counter() - start)
    _report(output, options, record)


def _written(options: dict[str, Any], trainer: Trainer, module: Module) -> str | None:
    """Write --out and --history; return the digest, or None in all processes but the first."""
    from triplane.proto.disk import write_atomic
    from triplane.unified_ir.ops.check import save
    from triplane.unified_ir.train.together import group_of

    group, digest = group_of(trainer.engine), None
    if group is None or group.is_first:
        digest = save(module, options["out"])
        if options["history"] is not None:
            write_atomic(options["history"], trainer.history.json().encode())
    if group is not None:
        group.wait("model file")
    return digest


def _check(options: dict[str, Any]) -> None:
    """Refuse options that would fail only after the training."""
    file = options["cell"]
    file = file if Path(file).suffix in _MODELS else file.rpartition(":")[0]
    check_distinct_files(
        [file, options["data"], options["validation"]],
        {"--out": options["out"], "--history": options["history"]},
    )
    check_suffix("--out", options["out"], "model file")
    training.check_effects(options)
    rate = options["local_lr"]
    if rate is not None and not math.isfinite(rate):
        raise InvalidInput(f"--local-lr must be a finite number > 0, got {rate}")


@contextmanager
def _explained(
    options: dict[str, Any], output: CommandOutput, *, is_default_rate: bool
) -> Iterator[None]:
    """Report what an interrupted training left, and add to errors what the user can change."""
    try:
        yield
    except KeyboardInterrupt as error:
        saved = bool(getattr(error, "__notes__", ()))
        output.note(_after_interrupt(options["checkpoint"], saved=saved))
        raise
    except TriplaneError as error:
        if is_default_rate:
            _explain_rate(error, options["lr"])
        raise
    except Exception as error:
        blame_file(error, options["cell"].rpartition(":")[0])
        raise


def _record(
    out: Path, digest: str, trainer: Trainer, measures: Mapping[str, float], seconds: float
) -> dict[str, Any]:
    outcomes = {"tuning": trainer.tuning, "memory": trainer.memory_plan}
    return {
        "model": str(out),
        "digest": digest,
        "bytes": out.stat().st_size,
        "epochs": trainer.place.epoch,
        "train": {k: v for k, v in trainer.history.last.items() if "." not in k},
        "validation": measures,
        "optimizer": repr(trainer.recipe),
        "updates": int(trainer.state().get("optimizer.step", trainer.place.step)),
        "seconds": seconds,
        **{name: str(value) for name, value in outcomes.items() if value is not None},
    }


def _report(output: CommandOutput, options: dict[str, Any], record: dict[str, Any]) -> None:
    epochs = record["epochs"]
    if epochs > options["epochs"]:
        output.note(
            f"{options['checkpoint']} is already at epoch {epochs}, beyond --epochs "
            f"{options['epochs']}: the model is that of epoch {epochs}"
        )
    for text in filter(None, map(record.get, ("tuning", "memory"))):
        output.note(text)
    shown = ", ".join(f"{k} {v:.4g}" for k, v in record["validation"].items())
    head = f"{record['model']}: {record['bytes']:,} bytes, held out: {shown}"
    output.result(record, f"{head}\ndigest {record['digest']}")


def _explain_rate(error: TriplaneError, rate: float) -> None:
    """Raise with the rate to pass where a run started with another rate than today's default."""
    from triplane.unified_ir.train.identity import OtherRun

    first = error.in_place_of(rate) if isinstance(error, OtherRun) else None
    if first is None:
        return
    kind = "a model file" if rate == FINE_TUNING_RATE else "a new network"
    raise Conflict(
        f"the default of --lr is {rate:g} for {kind}, but the checkpoint's run started with "
        f"{first!r}; add --lr {first!r} to continue it, or name another folder for a new run"
    ) from error


def _after_interrupt(checkpoint: Path | None, *, saved: bool) -> str:
    if checkpoint is None:
        return "no model file is written; with --checkpoint FOLDER the same command would continue"
    start = "saved, " if saved else ""
    return f"{start}no model file is written yet; the same command continues from {checkpoint}"


def _trained(
    options: dict[str, Any], output: CommandOutput
) -> tuple[Trainer, dict[str, float], Module]:
    """Return a trained trainer, its measures on held-out data, and the module to export."""
    from triplane.unified_ir import nn
    from triplane.unified_ir.cli import watching

    # First, so that processes meet before each reads its data.
    with watching.waiting(options["hosts"], output.note):
        options["engine"] = training.engine(options)
    nn.seed(options["seed"])  # before the cell exists, whose weights are drawn from it
    cell = load_cell(
        options["cell"], batch_norm=options["batch_norm"], arguments=options["cell_args"]
    )
    samples, held_out = _samples(options, output)
    trainer = _trainer(options, cell, samples, output)
    if any(options[name] not in {None, ()} for name in ("entries", "fixed_batch", "key_input")):
        trainer.callbacks = (*trainer.callbacks, _export_check(trainer, options))
    with _explained_shapes(trainer, samples, options):
        trainer.fit(
            samples,
            options["epochs"],
            batch_size=options["batch_size"],
            validation=held_out,
            checkpoint=options["checkpoint"],
            resume=options["resume"],
            progress="lines" if output.as_json else "auto",  # --json is for programs
        )
    with trainer.averaged() if options["ema"] is not None else nullcontext():
        result = trainer.evaluate(held_out)
        module = _exported(trainer, options)
    if tallies := list(trainer.model.tallies):
        output.note(
            f"{', '.join(tallies)}: no mean of batches, so the functions of the model file do not "
            f"compute it; `triplane evaluate --metric {tallies[0]}` does"
        )
    return trainer, result, module


def _exported(trainer: Trainer, options: dict[str, Any]) -> Module:
    return trainer.export(
        options["entries"] or DEFAULT_ENTRIES,
        local_lr=options["local_lr"],
        batch=options["fixed_batch"],
        key_input=options["key_input"],
    )


def _export_check(trainer: Trainer, options: dict[str, Any]) -> Callback:
    """Return what exports before the first step too, so that no training ends in an error."""
    from triplane.unified_ir.train import Callback

    class ExportCheck(Callback):
        def on_start(self, run: Run) -> None:
            _exported(trainer, options)

    return ExportCheck()


def _samples(options: dict[str, Any], output: CommandOutput) -> tuple[Dataset, Dataset]:
    """Return the data to train on and the held-out data, and report what was read."""
    from triplane.unified_ir import data

    choice, group = data_options.reading(options), options["group"] or ""
    if options["validation"] is None:
        samples, held_out = data.load_split(
            options["data"], seed=options["seed"], group=group, **choice
        )
    elif group:
        raise InvalidInput("--group chooses what is held out, and so does --validation; give one")
    else:
        samples, held_out = data.load_both(options["data"], options["validation"], **choice)
    for text in samples.notes:
        output.note(text)
    output.note(f"each sample: {data_options.summary(samples)}")
    return samples.load_with(options["workers"], processes=options["processes"]), held_out


@contextmanager
def _explained_shapes(
    trainer: Trainer, samples: Dataset, options: dict[str, Any]
) -> Iterator[None]:
    """Add to an error about shapes what the model was fed, and how to change it."""
    from triplane.unified_ir.ir.types import ShapeError, TypeMismatch

    try:
        yield
    except TypeMismatch as error:
        whole = [n for n in samples.inputs if samples.schema[n].dtype.startswith(("int", "uint"))]
        if not whole:
            raise
        raise TypeMismatch(
            f"{error}; {whole[0]} of the data holds whole numbers alone "
            f"({samples.schema[whole[0]]}), which stay integers: write one of them with a decimal "
            "point, as in 1.0, or have the cell cast them"
        ) from error
    except ShapeError as error:
        side = "y" if _takes_inputs(trainer, samples) else "x"
        hint = data_options.shape_hint(samples, **{side: options[side]})
        raise ShapeError(f"{error}; {hint}") from error


def _takes_inputs(trainer: Trainer, samples: Dataset) -> bool:
    """Return whether the network takes the inputs, so that only the targets do not fit."""
    from triplane.unified_ir.train import step
    from triplane.unified_ir.train.batches import as_batch

    try:
        batch = next(samples.batches(1, seed=0))
        types = [step.batch_type(a) for a in as_batch(batch)[: len(samples.inputs)]]
        step.predict(trainer.cell, types, trainer.loss.output)
    except TriplaneError:
        return False
    return True


def _trainer(
    options: dict[str, Any], cell: Cell, samples: Dataset, output: CommandOutput
) -> Trainer:
    from triplane.unified_ir.train import TensorBoard, Trainer

    boards = [] if options["tensorboard"] is None else [TensorBoard(options["tensorboard"])]
    budget_mb = options["memory_budget"]
    same = ("seed", "accumulate", "precision", "loss_scale", "tune", "device")
    loss = _loss_name(options["loss"], samples, output)
    return Trainer(
        cell,
        loss=training.loss(loss, options["class_weights"]),
        optimizer=training.optimizer(options, _updates(options, samples)),
        metrics=training.metrics(options["metrics"], loss),
        callbacks=[
            *training.early_stop(options["early_stop"], restore_best=options["restore_best"]),
            *boards,
        ],
        engine=options["engine"],
        steps_per_launch=training.steps_per_launch(options["steps_per_launch"]),
        average=options["ema"],
        memory_budget_bytes=None if budget_mb is None else round(budget_mb * 1e6),
        labels=samples.labels,
        **{name: options[name] for name in same},
        **training.clipping(options["clip"]),
    )


def _loss_name(stated: str | None, samples: Dataset, output: CommandOutput) -> str:
    """Return the name of the loss; a default other than cross entropy is reported."""
    target: Field | None = None
    if len(samples.targets) == 1:
        target = samples.schema[samples.targets[0]]
    name = training.loss_name(stated, target)
    if stated is None and name == "mse":
        output.note(
            f"{samples.targets[0]} holds real numbers, so the loss is mse; --loss names another"
        )
    return name


def _updates(options: dict[str, Any], samples: Dataset) -> int | None:
    """Return the number of updates of the whole run; None if it is not known beforehand."""
    from triplane.unified_ir.data.kinds import is_batches

    view = samples.for_training(options["batch_size"]).view(options["seed"])
    if not is_batches(view):
        return None
    updates = -(-len(view) // options["accumulate"])
    return int(updates * options["epochs"])


def _of_file(path: Path, batch_norm: BatchNormMode) -> Cell:
    """Return the entry `predict` of a model as a cell; refuse a fixed batch size."""
    from triplane.unified_ir.nn import Imported

    module, _ = model_or_onnx(path)
    cell = Imported(module, batch_norm=batch_norm)
    for param in module.inputs("predict"):
        shape = getattr(param.type, "shape", ())
        if shape and isinstance(shape[0], int):
            sizes = ",".join(map(str, ("N", *shape[1:])))
            raise InvalidInput(
                f"{path} takes only batches of {shape[0]}: input {param.name!r} is {param.type}; "
                f"import the ONNX model with --shape {param.name}={sizes}, and train that file"
            )
    return cell


def _names_of(module: ModuleType) -> list[str]:
    """Return the names of the classes and functions that a file defines itself."""
    own = vars(module).items()
    return [k for k, v in own if callable(v) and getattr(v, "__module__", "") == module.__name__]


def load_cell(
    spec: str, *, batch_norm: BatchNormMode = "kept", arguments: str | None = None
) -> Cell:
    """Return the cell that FILE.py:NAME names: a Cell, a subclass, or a function that returns one.

    arguments: those of --cell-args. An ONNX model or a model file is also a cell, whose weights are
    trained further.
    """
    from triplane.unified_ir.cli.cell_arguments import created
    from triplane.unified_ir.frontend import Cell

    if arguments is not None and (Path(spec).suffix in _MODELS or spec.startswith(ZOO)):
        raise InvalidInput(
            f"--cell-args are for a class or function of FILE.py, not for {spec}; a network of the "
            "zoo takes options as zoo:resnet8,channels=1"
        )
    if Path(spec).suffix in _MODELS:
        return _of_file(Path(spec), batch_norm)
    if batch_norm != "kept":
        raise InvalidInput(
            f"--batch-norm is for model files; the layers of {spec} decide themselves"
        )
    if spec.startswith(ZOO):
        return _of_zoo(spec.removeprefix(ZOO))
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise InvalidInput(
            f"the cell is given as FILE.py:Cell, MODEL.onnx, .tpm or zoo:NAME, got {spec!r}"
        )
    module = load_module(Path(file), "the cell")
    attribute = getattr(module, name, None)
    if attribute is None:
        there = ", ".join(_names_of(module)) or "nothing of that file"
        raise NotFound(f"{file} defines no {name!r}; cells and functions there: {there}")
    if isinstance(attribute, Cell) or not callable(attribute):
        if arguments is not None:
            raise InvalidInput(f"{spec} exists already and takes no --cell-args; name its class")
        cell = attribute
    else:
        cell = created(attribute, spec, arguments)
    if not isinstance(cell, Cell):
        raise InvalidInput(
            f"{spec} returns an object of type {type(cell).__name__}; it must return an nn.Cell"
        )
    return cell


def _of_zoo(spec: str) -> Cell:
    """Return the network of the zoo for NAME or NAME,OPTION=NUMBER,...."""
    from triplane.unified_ir.zoo import network

    name, *parts = spec.split(",")
    settings: dict[str, int | float] = {}
    for part in parts:
        key, _, value = part.partition("=")
        try:
            settings[key] = float(value) if "." in value else int(value)
        except ValueError:
            raise InvalidInput(
                f"options of a zoo network are NAME=NUMBER, such as zoo:resnet8,channels=1; got "
                f"{part!r}"
            ) from None
    try:
        return network(name, **settings)
    except TypeError as error:
        raise InvalidInput(f"zoo:{name} does not take these options: {error}") from error

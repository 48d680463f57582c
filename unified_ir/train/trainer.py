"""`Trainer`: a cell, a loss and an optimizer become one graph per step, run on an engine.

The cell owns parameters, buffers and keys; the trainer owns the optimizer's state and the place in
the run. During `fit` all of it lives in the engine's buffers. It is written back after each epoch
and at the end of `fit`, even after an error; only after a loss that is not finite, the state of the
start of the epoch is kept.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from operator import is_
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import nearest
from triplane.unified_ir import nn, optim
from triplane.unified_ir.engines import Engine, Program
from triplane.unified_ir.engines import engine as engine_named
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.frontend.guards import TraceGuard
from triplane.unified_ir.frontend.shown import shown_lines
from triplane.unified_ir.ir import Function, Module, Role
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.nn.losses import Loss, Metric
from triplane.unified_ir.optim import STEP, Optimizer, slot_name
from triplane.unified_ir.train import identity, resuming, step, together
from triplane.unified_ir.train.batches import (
    Batch,
    BatchSource,
    as_batch,
    in_order,
    is_count,
    n_targets,
)
from triplane.unified_ir.train.callbacks import Callback, states_of
from triplane.unified_ir.train.checkpoint import Checkpoint
from triplane.unified_ir.train.exporting import Entry, build_module
from triplane.unified_ir.train.fitting import Fit
from triplane.unified_ir.train.history import History, Place, Row
from triplane.unified_ir.train.launching import LaunchChoice, StepsPerLaunch, checked_steps
from triplane.unified_ir.train.measuring import measured, predicted
from triplane.unified_ir.train.metrics import Confusion, Metrics, Tally, metrics_by_name
from triplane.unified_ir.train.pipelined import compiled_step
from triplane.unified_ir.train.precision import LossScale, Precision
from triplane.unified_ir.train.progress import Progress, Style
from triplane.unified_ir.train.recipe import AVERAGE, Recipe
from triplane.unified_ir.train.snapshot import Snapshot, read
from triplane.unified_ir.train.step_tuning import StepTuning, sizes_of

if TYPE_CHECKING:
    from triplane.unified_ir.engines.onnx_file import OnnxFile
    from triplane.unified_ir.engines.tuning import Tuning
    from triplane.unified_ir.passes.recompute import RecomputationPlan

EVALUATION_BATCH: Final = 256
"""Samples per batch of evaluation and prediction."""
SHOWN_MEASURES: Final = 8
_CONFUSION: Final = {"confusion": Confusion()}
_LAST_KEY: Final = 2**64 - 1
"""Philox streams: random keys count down from here, the order of epoch e uses stream e."""


class Trainer:
    """Trains `cell` to minimize `loss`.

    loss: an `nn.Loss`, or a function of (output, target) that returns a scalar. metrics: functions
    of the same by name, or tallies (see `metrics`), or a list of names such as ["accuracy", "f1"];
    by default those of the loss. seed: for the order of batches and for random keys (for initial
    weights, see `nn.seed`). clip_value, clip_each, clip_norm, accumulate, average: see `Recipe`.
    precision: "float16" computes products in half precision around float32 weights; loss_scale: a
    constant number, or a `LossScale` that adapts to the gradients (the default with float16).
    engine: a name, or an engine with options (docs/engines.md). device: "cuda" runs the engine onnx
    on a GPU. steps_per_launch: with the engine xla, how many steps the device runs without the host
    between them; `on_step` is then called for all of them after the last. A number is always kept;
    "auto" measures, and falls back to 1 where that is faster.
    """

    def __init__(
        self,
        cell: Cell,
        *,
        loss: Loss | Metric,
        optimizer: Optimizer,
        engine: str | Engine = "onnx",
        device: str | None = None,
        steps_per_launch: StepsPerLaunch = 1,
        seed: int = 0,
        metrics: Metrics | None = None,
        callbacks: Sequence[Callback] = (),
        clip_value: float | None = None,
        clip_each: float | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: Precision = "float32",
        loss_scale: LossScale | float | None = None,
        average: float | None = None,
        tune: bool = False,
        memory_budget_bytes: int | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        _check_instance("cell", cell, Cell)
        _check_instance("loss", loss, None)
        _check_instance("optimizer", optimizer, Optimizer)
        self.cell = cell
        self.loss = loss if isinstance(loss, Loss) else _Function(loss)
        self.optimizer = optimizer
        self.engine, self.device = engine, device
        if device is not None:
            self._engine()  # refuses the device now rather than in `fit`
        self.steps_per_launch = checked_steps(steps_per_launch)
        self.launch_choice = LaunchChoice()
        self.seed = seed
        self.metrics = None if metrics is None else metrics_by_name(metrics, self.loss.targets)
        self.callbacks = _checked_callbacks(callbacks)
        self.clip_value, self.clip_each, self.clip_norm = clip_value, clip_each, clip_norm
        self.accumulate, self.precision, self.average = accumulate, precision, average
        if isinstance(loss_scale, (int, float)):  # overflows are skipped, the scale stays
            loss_scale = LossScale(start=loss_scale, growth=1.0, backoff=1.0)
        self.loss_scale = loss_scale
        _ = self.recipe  # refuses invalid options now rather than in `fit`
        self.step_tuning = StepTuning(tune=tune, memory_budget_bytes=memory_budget_bytes)
        # Set by `training_program`.
        self.tuning: Tuning | None = None
        self.memory_plan: RecomputationPlan | None = None
        self._sizes: dict[str, int] = {}
        self.labels = tuple(labels)
        self.place = Place()
        self.history = History()
        self._types: tuple[TensorType, ...] | None = None
        self._n_targets = 1
        self._models: dict[Any, step.TrainingModel] = {}
        self._optimizer_state: dict[str, Array] = {}
        self._programs: dict[Any, Program] = {}
        self._guarded: tuple[Any, ...] = ()
        self._guard = TraceGuard(())
        _set_keys(cell, seed)

    def __repr__(self) -> str:
        """Return what is trained how, and how far, on one screen."""
        last = self.history.rows[-1] if self.history.rows else {}
        shown = [f"{k} {x:.4g}" for k, x in last.items() if k not in {"epoch", "step"}]
        measures = ", ".join(["", *shown[:SHOWN_MEASURES]])
        engine = getattr(self.engine, "name", self.engine)
        lines = [
            *_wrapped(f"Trainer at epoch {self.place.epoch}, step {self.place.step}{measures}"),
            *_wrapped(f"  loss {type(self.loss).__name__}, optimizer {self.optimizer!r:.200}"),
            f"  engine {engine}, {self.precision}, seed {self.seed}",
        ]
        return "\n".join([*lines, *shown_lines(self.cell, indent="  ")])

    def fit(
        self,
        data: Any,
        epochs: int,
        *,
        batch_size: int = 32,
        validation: Any = None,
        checkpoint: str | Path | Checkpoint | None = None,
        resume: bool = True,
        progress: Style | Progress = "auto",
    ) -> History:
        """Train for `epochs` more epochs; return the history of all epochs.

        data, validation: a `data.Dataset`, a tuple of arrays (x, y), or an iterable of batches. A
        tuple (x,) has no target, and the loss is then a function of the output alone.
        checkpoint: a folder; with `resume` the run continues from its newest checkpoint, to the
        same bits as if it had never stopped; without `resume` the folder must hold none.
        Ctrl-C ends the run between two steps, after a checkpoint. Conflict: the folder holds
        checkpoints although `resume` is off, or network, loss, optimizer, batch size, data or seed
        differ. NonFinite: the loss became NaN or infinite; names the first operator that did.
        """
        if not is_count(epochs, 0):
            raise InvalidInput(f"epochs must be a whole number >= 0, got {epochs!r}")
        with closing(BatchSource(data, batch_size, self.seed)) as source:
            self._fit(source, epochs, validation, checkpoint, progress, resume=resume)
        return self.history

    def _fit(
        self,
        source: BatchSource,
        epochs: int,
        validation: Any,
        checkpoint: str | Path | Checkpoint | None,
        progress: Style | Progress,
        *,
        resume: bool,
    ) -> None:
        """Train on the batches of a source; see `fit`."""
        batch = source.peek()
        self.labels = self.labels or source.labels
        self._n_targets = min(source.n_targets, len(batch) - 1)
        self._types = self._types_for(batch, source.varying())
        self._sizes = sizes_of(self._types, batch)
        goal = self.place.epoch + epochs
        keeper = Checkpoint(checkpoint) if isinstance(checkpoint, (str, Path)) else checkpoint
        if keeper is not None:
            source.refuse_once()
            if resume:
                resuming.resume(self, keeper, source)
            else:
                resuming.refuse_others(keeper)
        shown = progress if isinstance(progress, Progress) else Progress(progress)
        callbacks = [*self.callbacks, *([keeper] if keeper else []), shown]
        shown.say_devices(self._engine())
        callbacks = together.begin(self, source, validation, goal, callbacks)
        try:
            with together.interrupt(self, shown.say) as interrupt:
                Fit(self, source, validation, callbacks, goal, interrupt).run()
        finally:
            shown.close()

    def evaluate(self, data: Any, *, batch_size: int = EVALUATION_BATCH) -> Row:
        """Return loss and metrics over all samples of `data`, in evaluation mode."""
        self._expect(data)
        try:
            place = measured(in_order(data, batch_size), self._own(), self._evaluation)
        except InvalidInput:
            if self._types is not None:
                self.model.check_labels_in_source(data)
            raise
        return place.measures(self.model.tallies)

    def confusion_matrix(self, data: Any, *, batch_size: int = EVALUATION_BATCH) -> Array:
        """Return int64 (C, C) counts: rows are true classes, columns are predicted classes."""
        self._expect(data)
        graph_of = partial(self._evaluation, metrics=_CONFUSION)
        place = measured(in_order(data, batch_size), self._own(), graph_of)
        total: Array = place.counts["confusion"]
        return total.astype(np.int64)

    def predict(self, *inputs: Any, batch_size: int = EVALUATION_BATCH) -> Any:
        """Return the output in evaluation mode: one array, or a dict by name of several."""
        arrays = as_batch(inputs)
        return predicted(self._prediction(arrays), self._own(), arrays, batch_size)

    def export(
        self,
        entries: Iterable[Entry] = ("predict", "evaluate", "loss", "train_step"),
        *,
        local_lr: float | None = None,
        batch: int | None = None,
        key_input: str | None = None,
    ) -> Module:
        """Return the functions and state as an IR module.

        entries: any of "predict", "evaluate", "loss" (which federated algorithms differentiate),
        "train_step", "local_update", "adapt" and "gradients"; the optimizer's state is included
        with `train_step`. `local_update` and `adapt` are plain gradient descent at the constant
        rate `local_lr` (by default the optimizer's rate where that is constant, else 0.01), since a
        device keeps no optimizer state. batch: a fixed batch size in place of the symbol N, for
        runtimes that know only fixed shapes. key_input: the name of one more input of `predict`,
        uint32[2], for a cell that draws random numbers in evaluation mode, too: what it draws
        depends on this key alone.
        """
        if isinstance(entries, str):
            raise InvalidInput(
                f"entries is a sequence of names, such as ('predict',), got the text {entries!r}; "
                "to write a file, save the module: trainer.export().save(PATH)"
            )
        return build_module(self, tuple(entries), local_lr, batch, key_input)

    def export_onnx(
        self,
        path: str | Path,
        entry: Entry = "predict",
        *,
        opset: int | None = None,
        batch: int | None = None,
        key_input: str | None = None,
    ) -> OnnxFile:
        """Write one of the functions as an ONNX file; see `export` and `engines.onnx_file`."""
        from triplane.unified_ir.engines.onnx_file import export_onnx

        module = self.export((entry,), batch=batch, key_input=key_input)
        return export_onnx(module, path, entry=entry, opset=opset)

    def save(self, path: str | Path) -> None:
        """Write everything a run needs to continue; see `load`."""
        own = identity.of_model(self.model, self.recipe) if self._types is not None else {}
        self.snapshot(self.state(), batch_size=0, samples=0, identity=own).write(Path(path))

    def load(self, path: str | Path, *, changed: Collection[str] = ()) -> None:
        """Continue from a file that `save` or a checkpoint wrote.

        Conflict: it is of another network, loss, optimizer or seed. changed: parts that may differ,
        such as ("optimizer",); state that only the new part has starts at zero.
        """
        snapshot = read(Path(path))
        if self._types is not None:
            own = identity.of_model(self.model, self.recipe)
            identity.check(snapshot.identity, own, but=changed)
        resuming.restore(self, snapshot, changed)

    @property
    def model(self) -> step.TrainingModel:
        """The cell, the loss and the types of a batch, which are known once data was seen."""
        return self._model_of(self._known_types())

    def _known_types(self) -> tuple[TensorType, ...]:
        if self._types is None:
            raise InvalidInput(
                "sizes are unknown, because the trainer has not seen data yet; call fit or "
                "evaluate first, or prepare(x, y) with one batch"
            )
        return self._types

    def model_for(self, batch: int) -> step.TrainingModel:
        """Return the model for batches of exactly this size."""
        if not is_count(batch, 1):
            raise InvalidInput(f"batch must be a whole number >= 1, got {batch!r}")
        return self._model_of(
            tuple(type_.with_sizes({step.BATCH: batch}) for type_ in self._known_types())
        )

    def prepare(self, *batch: Any) -> None:
        """Fix the types of batches, from an example (x, y) or from `TensorSpec`s.

        Not needed before `fit`, which takes the types of its first batch with any number of rows.
        Specs may leave more axes open: TensorSpec(("N", "T", 3)) accepts sequences of any length.
        """
        if any(isinstance(x, TensorType) for x in batch):
            self._types = tuple(
                x if isinstance(x, TensorType) else step.batch_type(np.asarray(x)) for x in batch
            )
        else:
            arrays = as_batch(batch)
            self._types = tuple(step.batch_type(a) for a in arrays)
            self._sizes = sizes_of(self._types, arrays)
        self._n_targets = min(self._n_targets, len(self._types) - 1)
        _ = self.model

    def _expect(self, data: Any) -> None:
        """Take the number of targets from data that is evaluated before any training."""
        if self._types is None:
            self._n_targets = n_targets(data)

    def _types_for(self, batch: Batch, varying: Collection[int] = ()) -> tuple[TensorType, ...]:
        """Return the types in use if they admit the batch, else the batch's own types.

        varying: numbers of its arrays whose second axis differs between batches.
        """
        if self._types is not None and step.admits(self._types, batch):
            return self._types
        return tuple(step.batch_type(a, varies=k in varying) for k, a in enumerate(batch))

    def _forget_stale(self) -> None:
        """Drop all graphs if the cell, loss or metrics changed in anything that tracing read."""
        metrics = () if self.metrics is None else tuple(self.metrics.items())
        guarded = (self.cell, self.loss, *(x for pair in metrics for x in pair))
        # By identity: equal objects are not enough, since the guard follows the references of
        # these.
        same = len(guarded) == len(self._guarded) and all(map(is_, guarded, self._guarded))
        if not (same and self._guard.holds()):
            self._models.clear()
            self._programs.clear()
            self._guarded, self._guard = guarded, TraceGuard(guarded)

    def _model_of(self, types: tuple[TensorType, ...]) -> step.TrainingModel:
        self._forget_stale()
        key = (types, self._n_targets, self._signature())
        if key not in self._models:
            before = TraceGuard((self.cell, self.loss))
            self._models[key] = step.model_of(
                self.cell, self.loss, self.metrics, types, self._n_targets
            )
            if (generator := before.drawn()) is not None:
                warnings.warn(
                    f"{type(self.cell).__name__} draws from {generator} while it is compiled, so "
                    "the numbers are the same at every step; draw with ops.random_normal from an "
                    "nn.RandomKey",
                    UserWarning,
                    stacklevel=2,
                )
        return self._models[key]

    def train_function(self) -> Function:
        """Return the training step as an IR function."""
        return step.train_step(self.model, self.recipe)

    @property
    def recipe(self) -> Recipe:
        """Everything between gradients and the next weights."""
        options = {field.name: getattr(self, field.name) for field in fields(Recipe)}
        if self.loss_scale is None and self.precision == "float16":
            options["loss_scale"] = LossScale()
        return Recipe(**options)

    def training_program(self) -> Program:
        """Return the training step on the engine, its state donated."""
        self._forget_stale()
        # Recipe and engine are part of the key because these options are public attributes that a
        # user may change between two calls of `fit`.
        key = ("train", self._types, self._signature(), self.recipe, self.engine, self.device)
        if key not in self._programs:
            engine = self._engine()
            function, self.tuning, self.memory_plan = self.step_tuning.tuned_step(
                self.train_function(), self._sizes, engine
            )
            self._programs[key] = compiled_step(self, engine, function, self._sizes)
        return self._programs[key]

    def _evaluation(
        self, batch: Batch, metrics: Mapping[str, Tally] | None = None
    ) -> tuple[step.TrainingModel, Program]:
        types = self._types_for(batch)
        if self._types is None:
            self._types = types
        model = self._model_of(types)
        if metrics is not None:
            model = replace(model, metrics=metrics)
        key = ("evaluate", types, metrics is None)
        return model, self._compiled(key, lambda: step.evaluate(model))

    def _prediction(self, arrays: Batch) -> Program:
        types = () if self._types is None else self._types[: len(self._types) - self._n_targets]
        if not step.admits(types, arrays):
            types = tuple(step.batch_type(a) for a in arrays)
        return self._compiled(
            ("predict", types), lambda: step.predict(self.cell, types, self.loss.output)
        )

    def _compiled(self, name: Any, make: Callable[[], Function]) -> Program:
        self._forget_stale()
        key = (name, self._signature(), self.engine, self.device)
        if key not in self._programs:
            self._programs[key] = self._engine().compile(make())
        return self._programs[key]

    def _signature(self) -> Any:
        """Return the parts of the cell's state that its graphs depend on."""
        return tuple((k, str(p.type), p.trainable) for k, p in self.cell.parameters().items())

    def _engine(self) -> Engine:
        if isinstance(self.engine, str):
            return engine_named(self.engine, device=self.device)
        if self.device is not None:
            raise InvalidInput(
                f"device={self.device!r} goes with an engine's name; this engine has its options "
                "already, such as OnnxEngine(options=SessionOptions(device='cuda'))"
            )
        return self.engine

    def state_names(self, function: Function) -> tuple[str, ...]:
        """Return the names of the state that a function of batches reads."""
        batch = self.model.batch_names()
        return tuple(n for n in function.param_names if n not in batch)

    def optimizer_state(self) -> dict[str, Array]:
        """Return the optimizer's state by name.

        State for parameters made trainable later, or of another optimizer, is initial; the rest
        is kept.
        """
        parameters = self.cell.parameters()
        state = self.recipe.init({k: p.array for k, p in parameters.items() if p.trainable})
        for name, array in self._optimizer_state.items():
            # Another optimizer may use the name of a slot for tensors of another shape (Adafactor's
            # rows).
            if name in state and array.shape == state[name].shape:
                state[name] = array
        self._optimizer_state = state
        return state

    def state(self) -> dict[str, Array]:
        """Return all state: the cell's and the optimizer's."""
        return {**self._own(), **self.optimizer_state()}

    def _own(self) -> dict[str, Array]:
        return {k: p.array for k, p in self.cell.parameters().items()}

    def roles(self) -> dict[str, Role]:
        """Return the role of every state tensor."""
        own = {k: p.role for k, p in self.cell.parameters().items()}
        return {**own, **dict.fromkeys(self.optimizer_state(), Role.OPTIMIZER)}

    def write_back(self, state: Mapping[str, Array]) -> None:
        """Copy state from an engine's buffers into the cell and the trainer."""
        own = self.cell.parameters()
        kept = self.optimizer_state()
        for name, array in state.items():
            if name in own:
                own[name].array = array
            else:
                kept[name] = array

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving averages of the weights (`average=`) into the cell within the block.

        Use it to evaluate, predict and export; before the first update the averages are the
        weights.
        """
        if self.average is None:
            raise InvalidInput(
                "the Trainer keeps no moving average of the weights; construct it with average="
            )
        # Before the first update the slots hold zeros, not an average.
        if not self.optimizer_state()[STEP]:
            yield
            return
        own, kept = self.cell.parameters(), self.optimizer_state()
        before = {k: own[k].array for k in own if slot_name(AVERAGE, k) in kept}
        for k, array in before.items():
            own[k].array = kept[slot_name(AVERAGE, k)].astype(array.dtype, copy=False)
        try:
            yield
        finally:
            for k, array in before.items():
                own[k].array = array

    def snapshot(
        self,
        state: Mapping[str, Array],
        *,
        batch_size: int,
        samples: int,
        identity: Mapping[str, str],
    ) -> Snapshot:
        """Return everything a run needs to continue, with `state` instead of the current state."""
        return Snapshot(
            state={**self.state(), **state},
            roles=self.roles(),
            place=self.place,
            history=self.history,
            seed=self.seed,
            batch_size=batch_size,
            samples=samples,
            identity=identity,
            callbacks=states_of(resuming.holders(self)),
        )


class _Function(Loss):
    """A function of (output, target) as a loss; of (output) alone where there is no target."""

    def __init__(self, function: Metric) -> None:
        super().__init__()
        self.function = function

    def construct(self, output: Any, *target: Any) -> Any:
        """See the class."""
        return self.function(output, *target)


def _wrapped(line: str) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line, get_terminal_size().columns, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _check_instance(what: str, value: object, kind: type | None) -> None:
    """Refuse a class in place of an instance, and whatever else would fail only much later."""
    if isinstance(value, type):
        raise InvalidInput(
            f"{what} is the class {value.__name__}; give an instance: {value.__name__}(...)"
        )
    if not (callable(value) if kind is None else isinstance(value, kind)):
        wanted = "a loss cell or a function" if kind is None else f"of kind {kind.__name__}"
        raise InvalidInput(f"{what} must be {wanted}, got {value!r:.80}{_likely(value)}")


def _checked_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    if not isinstance(callbacks, Sequence):
        raise InvalidInput(f"callbacks is a list of callbacks, got {callbacks!r:.80}")
    for callback in callbacks:
        _check_instance("each callback", callback, Callback)
    return tuple(callbacks)


def _likely(value: object) -> str:
    """Return the constructor of the loss or optimizer that a text names."""
    makers = {
        name: f"{package.__name__.rpartition('.')[2]}.{name}"
        for package, kind in ((nn, Loss), (optim, Optimizer))
        for name in package.__all__
        if isinstance(cls := getattr(package, name), type) and issubclass(cls, kind)
    }
    close = nearest(value, makers) if isinstance(value, str) else None
    return "" if close is None else f"; write {makers[close]}(...)"


def _set_keys(cell: Cell, seed: int) -> None:
    """Set the initial value of each random key of the cell from (seed, its number)."""
    keys = [p for p in cell.parameters().values() if p.role is Role.KEY]
    for i, parameter in enumerate(keys):
        words = np.random.Philox(key=np.array([seed, _LAST_KEY - i], np.uint64)).random_raw(1)
        parameter.array = np.asarray(words, np.uint64).view(np.uint32).copy()

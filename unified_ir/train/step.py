"""The functions of a model in training, each one closed graph.

`train_step` is forward pass, loss, backward pass, clipping, optimizer and schedule in one graph. It
takes a batch and the state, and returns the loss, metrics, summaries, and the new value of every
state tensor under the tensor's own name. The batch axis is the symbol N everywhere, so one graph
accepts any batch size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import GRAD, value_and_grad
from triplane.unified_ir.autodiff.zero import zero_gradient
from triplane.unified_ir.files.samples import COUNTED, check_classes
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.frontend.trace import traced
from triplane.unified_ir.ir.graph import Array, Function, Role, Value
from triplane.unified_ir.ir.types import TensorSpec, TensorType, as_dtype
from triplane.unified_ir.nn.losses import Loss, Metric
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.summaries import PREFIXES
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim import Optimizer
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.train.batches import Batch, labels_in_source
from triplane.unified_ir.train.metrics import Tally
from triplane.unified_ir.train.precision import half
from triplane.unified_ir.train.recipe import SCALE, Recipe

BATCH: Final = "N"
"""The symbol of the batch axis."""
LENGTH: Final = "T"
"""The symbol of the axis of sequences whose length differs between batches."""
LOSS: Final = "loss"
"""Name of the result that training minimizes."""
_SCALED: Final = "loss.scaled"
_ONE_TENSOR: Final = (Tensor, "Tensor", "ops.Tensor")
"""Annotations of an argument that takes one tensor."""


@dataclass(frozen=True, eq=False)
class TrainingModel:
    """A cell with its loss, metrics and the types of its inputs and target.

    inputs: type by the name the cell's `construct` gives it. targets: type by name; the loss takes
    (output, target), or (output, tuple of targets) of several, or (output) without any.
    """

    cell: Cell
    loss: Loss
    metrics: Mapping[str, Metric | Tally]
    inputs: Mapping[str, TensorType]
    targets: Mapping[str, TensorType]
    classes: int | None
    """Labels are 0..classes-1; None if the target is not a label."""

    def check_types(self, batch: Batch) -> None:
        """Refuse a batch of types other than those of the model."""
        types = (*self.inputs.values(), *self.targets.values())
        if not admits(types, batch):
            expected = ", ".join(map("{}: {}".format, self.batch_names(), types))
            kinds = ", ".join(f"{a.dtype}{list(a.shape)}" for a in batch)
            raise InvalidInput(
                f"a batch must be {expected}, as the first one was, got {kinds}; convert it, or "
                'call prepare(...) with specs that leave more open: TensorSpec(("N", "T", 3))'
            )

    def check_labels(
        self,
        labels: Array,
        where: str = "row {} of the batch",
        numbers: Sequence[int] | Array | None = None,
    ) -> None:
        """Refuse labels out of range. where, numbers: name the samples; see `check_classes`."""
        if self.classes is None or labels.dtype.kind not in "iu":
            return
        giver = f"{type(self.cell).__name__} gives {self.classes} logits"
        check_classes(
            labels, self.classes, giver, where, numbers=numbers, ignored=self.loss.ignored
        )

    def check_labels_in_source(self, data: Any) -> None:
        """Refuse labels of a dataset, naming the sample by its number in the source if it has one.

        It reads all labels; for use after `check_labels` refused some of a batch.
        """
        if (stored := labels_in_source(data)) is not None:
            name = data.origin.name.replace("{", "{{").replace("}", "}}")
            self.check_labels(stored[0], f"sample {{}} of {name}", stored[1])

    @property
    def tallies(self) -> dict[str, Tally]:
        """Metrics that are not means."""
        return {k: m for k, m in self.metrics.items() if isinstance(m, Tally)}

    def of_means(self) -> TrainingModel:
        """Return the model without additional metrics, as it is exported."""
        means = {k: m for k, m in self.metrics.items() if not isinstance(m, Tally)}
        return replace(self, metrics=means)

    def batch_names(self) -> tuple[str, ...]:
        """Return the names of a batch's arrays, those of the targets last."""
        return (*self.inputs, *self.targets)

    def apply(self, measure: Any, output: Any, batch: Sequence[Any]) -> Any:
        """Return the loss or a metric of an output and the batch that it belongs to."""
        return measure(*self._compared(output, batch))

    def _compared(self, output: Any, batch: Sequence[Any]) -> tuple[Any, ...]:
        """Return the output and the target, several targets as a tuple, and no absent target."""
        targets = tuple(batch[len(self.inputs) :])
        return (output, *([targets[0] if len(targets) == 1 else targets] if targets else []))

    def check_compared(self, measure: Any, output: Any, batch: Sequence[Any]) -> None:
        """Refuse several outputs or targets where the measure declares one tensor for them."""
        function = measure.construct if isinstance(measure, Loss) else measure
        own = inspect.signature(function).parameters.values()
        cell = f"{type(self.cell).__name__}.construct"
        sides = (f"{cell} returns {{}} outputs", "the batches have {} targets")
        for value, parameter, side in zip(self._compared(output, batch), own, sides, strict=False):
            if isinstance(value, (tuple, list, dict)) and parameter.annotation in _ONE_TENSOR:
                owner = getattr(measure, "__self__", measure)  # of a tally's method
                name = getattr(owner, "__name__", type(owner).__name__)
                raise InvalidInput(
                    f"{name} compares one output with one target, but {side.format(len(value))} "
                    f"({type(value).__name__}); return one tensor from {cell}, or pass functions "
                    "of your own that choose: loss=lambda output, target: "
                    "nn.MSE()(output[0], target), and metrics likewise"
                )

    def trainable(self) -> tuple[str, ...]:
        """Return the paths of the state that training changes by gradients."""
        return tuple(k for k, p in self.cell.parameters().items() if p.trainable)


def model_of(
    cell: Cell,
    loss: Loss,
    metrics: Mapping[str, Metric | Tally] | None,
    types: Sequence[TensorType],
    n_targets: int = 1,
) -> TrainingModel:
    """Return the model for batches of these types, those of the targets last."""
    inputs, targets = types[: len(types) - n_targets], types[len(types) - n_targets :]
    names = _input_names(cell, len(inputs), n_targets)
    target_name = "y" if "y" not in names else "target"
    target_names = [target_name + (str(k) if n_targets > 1 else "") for k in range(n_targets)]
    _check_loss(loss, n_targets)
    chosen = loss.metrics() if metrics is None else metrics
    function = predict(cell, inputs, loss.output)
    if not function.results:
        raise InvalidInput(f"{type(cell).__name__}.construct returns nothing; return the output")
    model = TrainingModel(
        cell=cell,
        loss=loss,
        metrics=dict(chosen),
        inputs=dict(zip(names, inputs, strict=True)),
        targets=dict(zip(target_names, targets, strict=True)),
        classes=(
            loss.classes(function.results[0].type)
            if len(function.results) == n_targets == 1
            else None
        ),
    )
    _check_names(model)
    return model


def batch_type(array: Array, *, varies: bool = False) -> TensorType:
    """Return the type of arrays like this one with any number of rows.

    varies: of any length too, the symbol T in the second axis of every such array.
    """
    sizes = (LENGTH, *array.shape[2:]) if varies else array.shape[1:]
    return TensorSpec((BATCH, *sizes), array.dtype)


def admits(types: Sequence[TensorType], batch: Batch) -> bool:
    """Return whether a batch is of these types, for any sizes of their symbols."""
    return len(types) == len(batch) and all(
        t.dtype.numpy == a.dtype
        and t.rank == a.ndim
        and all(d == n for d, n in zip(t.shape, a.shape, strict=True) if isinstance(d, int))
        for t, a in zip(types, batch, strict=True)
    )


def _input_names(cell: Cell, count: int, n_targets: int = 1) -> list[str]:
    """Return the names of `count` positional arguments of the cell's `construct`."""
    try:
        bound = inspect.signature(cell.construct).bind(*range(count))
    except TypeError as error:
        raise InvalidInput(
            f"a batch of {count + n_targets} arrays passes {count} inputs to {type(cell).__name__}"
            f".construct (the last {_arrays(n_targets)}): {error}"
        ) from None
    names = []
    for name, value in bound.arguments.items():
        many = isinstance(value, tuple)
        names += [f"{name}{i}" for i in range(len(value))] if many else [name]
    return names


def _check_loss(loss: Loss, n_targets: int) -> None:
    try:
        inspect.signature(loss.construct).bind(*range(1 + min(1, n_targets)))
    except TypeError:
        has = "a target" if n_targets else "no target"
        raise InvalidInput(
            f"the batches have {has}, and {type(loss).__name__}.construct"
            f"{inspect.signature(loss.construct)} does not fit that; pass (x, y), which is "
            "(x, x) for an autoencoder, or a loss of the output alone"
        ) from None


def _arrays(n_targets: int) -> str:
    return "array is the target" if n_targets == 1 else f"{n_targets} arrays are targets"


def _check_names(model: TrainingModel) -> None:
    if counts := [k for k in model.metrics if k.startswith(COUNTED)]:
        raise InvalidInput(
            f"a metric cannot be called {counts[0]!r}: names that start with {COUNTED!r} stand for "
            "the divisors of means; rename it"
        )
    if LOSS in model.metrics:
        raise InvalidInput(f"a metric cannot be called {LOSS!r}, which is the loss; rename it")
    taken = {*model.batch_names(), LOSS, *model.metrics}
    clash = sorted(taken & model.cell.parameters().keys())
    clash += [k for k in model.cell.parameters() if k.startswith("optimizer.")]
    if clash:
        raise InvalidInput(
            f"state {clash[0]!r} of {type(model.cell).__name__} has a name that the training step "
            f"uses ({', '.join(sorted(taken))}, optimizer.*); rename the attribute"
        )


def taken_counts(results: dict[str, Array]) -> dict[str, float]:
    """Remove the divisors of means from a step's results; return them by the name of the mean."""
    names = [n for n in results if n.startswith(COUNTED)]
    return {n.removeprefix(COUNTED): float(results.pop(n).item()) for n in names}


@contextmanager
def training(cell: Cell, *, on: bool) -> Iterator[None]:
    """Put the cell and those below it into training or evaluation mode within the block."""
    before = [(c, c.__dict__["training"]) for _, c in cell.cells()]
    if on:
        cell.train()
    else:
        cell.eval()
    try:
        yield
    finally:
        for c, mode in before:
            c.__dict__["training"] = mode


def predict(cell: Cell, inputs: Sequence[TensorType], output: str) -> Function:
    """Return inputs and state -> the cell's results in evaluation mode; one tensor is `output`."""
    with training(cell, on=False):
        graph = traced(cell, tuple(inputs), {}, name="predict").function
    state = cell.parameters()
    names = [n for n in graph.result_names if n not in state and not n.startswith(PREFIXES)]
    shown = [output if n == "y" else n for n in names]
    return clean(keeping(graph, names).with_(result_names=shown))


def keeping(function: Function, names: Sequence[str]) -> Function:
    """Return the function with these of its results, in this order."""
    return function.with_(results=map(function.result, names), result_names=names)


def evaluate(model: TrainingModel) -> Function:
    """Return a batch and state -> loss and metrics, in evaluation mode."""
    with training(model.cell, on=False):
        function = _objective(model, "evaluate")
    state = model.cell.parameters()  # evaluation changes nothing, even if a cell assigns state
    return clean(keeping(function, [n for n in function.result_names if n not in state]))


def loss(model: TrainingModel) -> Function:
    """Return a batch and state -> loss, metrics and assigned state, in training mode."""
    with training(model.cell, on=True):
        return clean(_objective(model, "loss"))


def gradients(model: TrainingModel, optimizer: Optimizer | None = None) -> Function:
    """Return a batch and state -> loss, metrics, and `grad.PATH` of each trained parameter.

    Parameters that `optimizer` freezes are not trained.
    """
    return _differentiated(model, _trained(model, optimizer), "gradients")


def local_update(
    model: TrainingModel, optimizer: Optimizer, *, name: str = "local_update"
) -> Function:
    """Return one update by an optimizer that keeps no state, such as SGD without momentum."""
    if optimizer.used_slots():
        raise InvalidInput(
            f"{name} needs an optimizer without state; {optimizer} keeps "
            f"{', '.join(optimizer.used_slots())}; use optim.SGD(lr) without momentum"
        )
    return train_step(model, Recipe(optimizer=optimizer), name=name)


def _objective(model: TrainingModel, name: str) -> Function:
    """Return the graph of loss, metrics, assigned state, summaries and divisors of means."""

    def measures(self: Cell, **batch: Tensor) -> dict[str, Any]:
        arrays = [batch[n] for n in model.batch_names()]
        output = self(*arrays[: len(model.inputs)])
        measured = {}
        for label, metric in {LOSS: model.loss, **model.metrics}.items():
            measure = metric.count if isinstance(metric, Tally) else metric
            model.check_compared(measure, output, arrays)
            measured[label] = model.apply(measure, output, arrays)
        for label, x in measured.items():
            if x.shape != () and label not in model.tallies:
                raise InvalidInput(
                    f"losses and metrics are scalars, {label!r} is {x.type}; take the mean"
                )
        return measured | _counts(model, output, arrays)

    specs = {**model.inputs, **model.targets}
    # As a method of the cell, so that state has the cell's own paths (`conv.weight`).
    function = traced(MethodType(measures, model.cell), (), specs, name=name).function
    first = [LOSS, *model.metrics]
    return keeping(function, first + [n for n in function.result_names if n not in first])


def _counts(model: TrainingModel, output: Any, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the divisors of those means that declare one, as float32 scalars."""
    counts = {}
    for label, mean in {LOSS: model.loss, **model.metrics}.items():
        divisor = getattr(mean, "counted", None)
        is_alike = divisor is None or not model.targets
        counted = None if is_alike else model.apply(divisor, output, batch)
        if counted is None:
            continue
        if counted.shape != ():
            raise InvalidInput(
                f"the divisor of {label!r} must be a scalar, got {counted.type}; sum it"
            )
        counts[COUNTED + label] = counted.cast("float32")
    return counts


def _trained(model: TrainingModel, optimizer: Optimizer | None) -> tuple[str, ...]:
    """Return the paths that an optimizer updates."""
    paths = model.trainable()
    frozen = optimizer.frozen(paths) if optimizer is not None else ()
    return tuple(k for k in paths if k not in frozen)


def _differentiated(
    model: TrainingModel, wanted: Sequence[str], name: str, recipe: Recipe | None = None
) -> Function:
    """Return loss, metrics and gradients, those of the scaled loss if the recipe has a scale."""
    with training(model.cell, on=True):
        forward = _objective(model, name)
    if not wanted:
        raise InvalidInput(f"{type(model.cell).__name__} has no trainable parameter")
    unused = [k for k in wanted if k not in forward.param_names]
    if not unused:
        function = _gradients(forward, wanted, recipe)
        # A parameter without influence on the loss is almost always a mistake in `construct`;
        # PyTorch and others would train on silently.
        unused = [k for k in wanted if _is_zero(function, function.result(GRAD + k))]
    if unused:
        raise InvalidInput(
            f"the loss does not depend on {', '.join(map(repr, unused))}, whose gradient is zero "
            f"by construction{_why_zero(forward, unused)}; use it, remove it, or create it with "
            "trainable=False"
        )
    return replace(function, name=name)


def _why_zero(forward: Function, unused: Sequence[str]) -> str:
    """Return in brackets what stops the gradients of the parameters that are read."""
    read = [k for k in unused if k in forward.param_names]
    stops = [zero_gradient(forward, k, LOSS) for k in read]
    reasons = [str(z) for z in stops if z is not None and z.stops]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _gradients(forward: Function, wanted: Sequence[str], recipe: Recipe | None) -> Function:
    if recipe is not None and recipe.precision != "float32":
        forward = half(forward, as_dtype(recipe.precision))
    if recipe is None or recipe.loss_scale is None:
        return value_and_grad(forward, wanted, of=LOSS)
    with (build := Build(TABLE, forward.name)):
        params = [build.param(p.name, p.type) for p in forward.params]
        named = dict(zip(forward.result_names, inline(forward, params), strict=True))
        scale = build.param(SCALE, TensorSpec((), "float32"))
        named[_SCALED] = named[LOSS] * scale
    both = value_and_grad(build.finish(named), wanted, of=_SCALED)
    return keeping(both, [n for n in both.result_names if n != _SCALED])


def _is_zero(function: Function, value: Value) -> bool:
    """Return whether a gradient is the constant zero that means `no dependence`."""
    producer = function.producers()
    node = producer.get(value)
    # Zeros of a symbolic shape are a constant that is expanded.
    while node is not None and (
        row_of(node).preserves_elements or node.op.name in ("Expand", "Cast")
    ):
        node = producer.get(node.inputs[0]) if node.inputs[0] is not None else None
    if node is None or node.op.name != "Constant":
        return False
    return not np.any(np.asarray(node.attrs["value"]))


def train_step(model: TrainingModel, recipe: Recipe, *, name: str = "train_step") -> Function:
    """Return the function of one update: gradients and the recipe's updates in one graph."""
    paths = _trained(model, recipe.optimizer)
    source = _differentiated(model, paths, name, recipe)
    build = Build(TABLE, name)
    with build:
        params = {p.name: build.param(p.name, p.type) for p in source.params}
        results = dict(zip(source.result_names, inline(source, list(params.values())), strict=True))
        grads = {k: results.pop(GRAD + k) for k in paths}
        # Parameters that no graph reads have no slots; `source.params` holds only those that it
        # reads.
        types = recipe.state_types({k: params[k].type for k in model.trainable() if k in params})
        state = {k: params[k] if k in params else build.param(k, t) for k, t in types.items()}
        # The number of samples, read from the shape when the graph runs.
        rows = build.dims([params[model.batch_names()[-1]].shape[0]]).reshape(()).cast("float32")
        moved, fine = recipe.advance(
            {k: params[k] for k in paths}, grads, state, rows, counted=results.get(COUNTED + LOSS)
        )
        if fine is not None:
            results |= _guarded(model, results, params, fine)
    return clean(build.finish({**results, **moved}))


def _guarded(
    model: TrainingModel, results: Mapping[str, Tensor], params: Mapping[str, Tensor], fine: Tensor
) -> dict[str, Tensor]:
    """Return assigned buffers, unchanged where the gradients are not finite."""
    # Running statistics of a batch that overflowed would stay infinite for ever. Random keys are
    # not restored: they only need to advance.
    buffers = [k for k, p in model.cell.parameters().items() if p.role is Role.BUFFER]
    kept = [k for k in buffers if k in results and k in params]
    return {k: ops.where(fine, results[k], params[k]) for k in kept}

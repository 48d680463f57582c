"""Export a trained model as an IR module: functions by entry, state with roles, metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, get_args

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import suggestion
from triplane.unified_ir import ops
from triplane.unified_ir.engines import modules as _modules  # noqa: F401 - lets modules predict
from triplane.unified_ir.files.samples import COUNTED, IGNORED
from triplane.unified_ir.ir import Function, Module, Role, StateTensor
from triplane.unified_ir.ir.module import START
from triplane.unified_ir.nn import Personal
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import check_module
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.summaries import HISTOGRAM, IMAGE
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.optim import SGD, Constant, Optimizer
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.train import step

if TYPE_CHECKING:
    from triplane.unified_ir.train.trainer import Trainer

Entry = Literal["predict", "evaluate", "loss", "train_step", "local_update", "adapt", "gradients"]
ENTRIES: Final[tuple[str, ...]] = get_args(Entry)
LEARNABLE: Final = (Role.PARAMETER, Role.PERSONAL)
DEFAULT_LOCAL_LR: Final = 0.01


def build_module(
    trainer: Trainer,
    entries: tuple[str, ...],
    local_lr: float | None,
    batch: int | None = None,
    key_input: str | None = None,
) -> Module:
    """See `Trainer.export`."""
    unknown = [e for e in entries if e not in ENTRIES]
    if unknown or not entries:
        close = suggestion(unknown[0], ENTRIES) if unknown else ""
        listed = ", ".join(ENTRIES)
        raise InvalidInput(f"entries must be among {listed}, got {unknown or 'none'}{close}")
    functions = {}
    model = trainer.model if batch is None else trainer.model_for(batch)
    for name in dict.fromkeys(entries):
        function = _function(trainer, model.of_means(), name, local_lr)
        # No reader of a model file uses these results; the divisors of means weight evaluations.
        unread = (HISTOGRAM, IMAGE) if name == "evaluate" else (HISTOGRAM, IMAGE, COUNTED)
        names = [n for n in function.result_names if not n.startswith(unread)]
        # Results that are left out may be the only use of a part of the graph.
        functions[name] = clean(step.keeping(function, names))
    if key_input is not None:
        functions["predict"] = _sampling(trainer, functions, key_input)
    module = Module(
        functions=functions,
        entries={name: name for name in functions},
        state=_state(trainer, with_optimizer="train_step" in functions),
        meta=_meta(trainer, model),
    )
    check_module(module)  # `load` checks it again, but here the trainer can still be corrected
    return module


def _function(
    trainer: Trainer, model: step.TrainingModel, name: str, local_lr: float | None
) -> Function:
    graphs: dict[str, Callable[[], Function]] = {
        "predict": lambda: step.predict(model.cell, [*model.inputs.values()], model.loss.output),
        "evaluate": lambda: step.evaluate(model),
        "train_step": lambda: step.train_step(model, trainer.recipe),
        "loss": lambda: step.loss(model),
        "gradients": lambda: step.gradients(model, trainer.optimizer),
    }
    if name in graphs:
        return graphs[name]()
    lr = local_rate(trainer.optimizer) if local_lr is None else local_lr
    # A device keeps no optimizer state, but frozen layers stay frozen there too.
    plain = SGD(lr, groups=trainer.optimizer.freezing())
    return step.local_update(model, plain, name=name)


def _sampling(trainer: Trainer, functions: Mapping[str, Function], name: str) -> Function:
    """Return `predict` with an input in place of the random keys that it reads."""
    if "predict" not in functions:
        raise InvalidInput(f"key_input={name!r} is an input of predict; export that entry")
    if not str(name).isidentifier():
        raise InvalidInput(f"key_input must be a name such as 'seed', got {name!r}")
    source = functions["predict"]
    roles = trainer.roles()
    keys = [p for p in source.params if roles.get(p.name) is Role.KEY]
    if not keys:
        raise InvalidInput(
            f"predict draws no random numbers, so it needs no key_input={name!r}; leave it out, or "
            "draw with the cell's nn.RandomKey in evaluation mode, too"
        )
    if name in {*trainer.cell.parameters(), *source.param_names, *source.result_names}:
        raise InvalidInput(f"key_input={name!r} is the name of another tensor; choose another one")
    build = Build(TABLE, source.name)
    with build:
        kept = {p: build.param(p.name, p.type) for p in source.params if p not in keys}
        key = build.param(name, keys[0].type)
        # Each key of the cell has a number, so that two layers do not draw the same numbers.
        drawn = {p: ops.fold_in(key, i) for i, p in enumerate(keys)}
        results = inline(source, [{**kept, **drawn}[p] for p in source.params])
    return clean(build.finish(dict(zip(source.result_names, results, strict=True))))


def local_rate(optimizer: Optimizer) -> float:
    """Return the rate of plain gradient descent that replaces the optimizer on a device."""
    if isinstance(optimizer, SGD) and not optimizer.counts():
        return optimizer.lr.value if isinstance(optimizer.lr, Constant) else float(optimizer.lr)  # type: ignore[arg-type]
    return DEFAULT_LOCAL_LR


def _state(trainer: Trainer, *, with_optimizer: bool) -> dict[str, StateTensor]:
    roles = trainer.roles()
    state = {
        name: StateTensor(roles[name], array.copy())
        for name, array in trainer.state().items()
        if with_optimizer or roles[name] is not Role.OPTIMIZER
    }
    own = trainer.cell.parameters()
    starts = {  # initial values of personal tensors on a device; those that are zero need none
        START + name: StateTensor(Role.BUFFER, p.start.copy())
        for name, p in own.items()
        if isinstance(p, Personal) and p.start.any()
    }
    if clash := sorted(starts.keys() & state.keys()):
        raise InvalidInput(
            f"{clash[0]!r} is the name of a personal tensor's initial value; rename the attribute"
        )
    return state | starts


def _labels(trainer: Trainer) -> list[str]:
    """Return a name for every class: data may lack the last ones, but a server needs them all."""
    names, classes = list(trainer.labels), trainer.model.classes
    if not names or classes is None:
        return names
    # A class without a name gets its number.
    return names[:classes] + [str(k) for k in range(len(names), classes)]


def _meta(trainer: Trainer, model: step.TrainingModel) -> dict[str, str]:
    """Return metadata as text by key; lists and mappings as JSON."""
    cell = type(trainer.cell)
    inputs = {name: str(type_) for name, type_ in model.inputs.items()}
    # A parameter may be frozen in the cell or by a group of the optimizer; readers of the file see
    # both as frozen.
    trained = set(model.trainable()) - trainer.optimizer.frozen(model.trainable())
    frozen = [k for k, r in trainer.roles().items() if r in LEARNABLE and k not in trained]
    ignored = {} if model.loss.ignored is None else {IGNORED: str(model.loss.ignored)}
    return {
        "cell": f"{cell.__module__}:{cell.__qualname__}",
        "frozen": json.dumps(frozen),
        "inputs": json.dumps(inputs),
        "labels": json.dumps(_labels(trainer)),
        "loss": type(model.loss).__name__,
        "metrics": json.dumps(list(model.of_means().metrics)),
        "optimizer": repr(trainer.optimizer),
        "output": model.loss.output,
        "target": json.dumps({name: str(type_) for name, type_ in model.targets.items()}),
        **ignored,
    }

"""The training step on an engine: as one function, or in the parts of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import GRAD
from triplane.unified_ir.engines import Engine, Program
from triplane.unified_ir.engines.pipelined import GRADIENT_NORM, PipelineEngine, PipelineStep
from triplane.unified_ir.files.samples import COUNTED
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import TensorSpec, as_dtype
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.summaries import PREFIXES
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.optim import clip_by_global_norm
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.train import step
from triplane.unified_ir.train.precision import half

if TYPE_CHECKING:
    from triplane.unified_ir.train.trainer import Trainer

_REFUSED: Final = {
    "accumulate": (1, "is what microbatches do; use more of them and a larger batch"),
    "loss_scale": (None, "looks at the gradients of all stages at once; use precision='bfloat16'"),
}
"""Options of a recipe: the value that a pipeline takes, and why it takes no other."""


def compiled_step(
    trainer: Trainer, engine: Engine, function: Function, sizes: Mapping[str, int]
) -> Program:
    """Return the training step on an engine, its state donated. sizes: of the first batch."""
    donate = trainer.state_names(function)
    if not isinstance(engine, PipelineEngine) or engine.stages is None:
        return engine.compile(function, donate=donate)
    if trainer.steps_per_launch != 1:
        raise InvalidInput("steps_per_launch and pipeline stages exclude each other; choose one")
    for name, (allowed, why) in _REFUSED.items():
        if (value := getattr(trainer.recipe, name)) != allowed:
            raise InvalidInput(f"pipeline stages take no {name}={value!r}, which {why}")
    recipe = trainer.recipe
    if recipe.clip_norm is not None and (recipe.clip_value, recipe.clip_each) != (None, None):
        raise InvalidInput(
            "pipeline stages take clip_norm alone: the norm after clip_value or clip_each is not "
            "computed over all stages; choose one limit"
        )
    forward = forward_of(trainer)
    divisors = [n for n in forward.result_names if n.startswith(COUNTED)]
    parts = PipelineStep(
        function,
        forward,
        _update(trainer, function),
        step.LOSS,
        trained(trainer, function),
        frozenset([*trainer.model.tallies, *divisors]),
        {n.removeprefix(COUNTED): n for n in divisors},
        sizes,
    )
    return engine.compile_pipeline(parts, donate=donate)


def forward_of(trainer: Trainer) -> Function:
    """Return a batch and parameters -> loss, metrics and divisors, in the trainer's precision.

    InvalidInput: the cell assigns state in its forward pass, or records summaries; a metric that is
    no tally is no float.
    """
    forward, state = step.loss(trainer.model), trainer.cell.parameters()
    cell = type(trainer.cell).__name__
    if assigned := [n for n in forward.result_names if n in state]:
        raise InvalidInput(
            f"pipeline stages take no state that the forward pass assigns, and {cell} assigns "
            f"{', '.join(assigned[:3])}: statistics and random masks of a microbatch are not those "
            "of the batch; use layer or group normalization, leave dropout out, or split the batch "
            "over a mesh: XlaEngine(mesh={'data': N})"
        )
    if shown := [n for n in forward.result_names if n.startswith(PREFIXES)]:
        raise InvalidInput(
            f"pipeline stages record no summaries, and {cell} has {shown[0]!r}; remove it"
        )
    for name in (n for n in forward.result_names if n not in trainer.model.tallies):
        if not (type_ := forward.result(name).type).dtype.is_float:
            raise InvalidInput(
                f"pipeline stages average the metrics of microbatches, and {name!r} is {type_}; "
                'return a mean over samples as float32, such as (a == b).cast("float32").mean()'
            )
    precision = trainer.precision
    return forward if precision == "float32" else half(forward, as_dtype(precision))


def trained(trainer: Trainer, function: Function) -> tuple[str, ...]:
    """Return the parameters that a step updates."""
    paths = trainer.model.trainable()
    frozen = trainer.optimizer.frozen(paths)
    return tuple(k for k in paths if k in function.param_names and k not in frozen)


def _update(trainer: Trainer, function: Function) -> Function:
    """Return state and gradients -> new state."""
    recipe, build = trainer.recipe, Build(TABLE, "update")
    paths = trained(trainer, function)
    with build:
        own = [k for k in trainer.model.trainable() if k in function.param_names]
        params = {k: build.param(k, function.param(k).type) for k in own}
        types = recipe.state_types({k: params[k].type for k in own})
        state = {k: params[k] if k in params else build.param(k, t) for k, t in types.items()}
        grads = {k: build.param(GRAD + k, params[k].type) for k in paths}
        one = build.constant(1.0).cast("float32")
        if recipe.clip_norm is not None:
            norm = build.param(GRADIENT_NORM, TensorSpec((), "float32"))
            grads = clip_by_global_norm(grads, recipe.clip_norm, norm)
        unclipped = replace(recipe, clip_norm=None)
        moved, _ = unclipped.advance({k: params[k] for k in paths}, grads, state, one)
    return clean(build.finish(moved))

"""A training step as a pipeline: one program, in which each device computes a stage of the layers.

Every device runs the same program and branches by its number. It holds the state of its stage, as
one vector for each element type. Microbatch after microbatch, the devices pass on what the next
stage reads (`ppermute`), then gradients the other way, each stage computing its forward pass once
more instead of keeping what is in it. Then each stage updates its own parameters. Along a second
axis of the mesh, replicas of the pipeline compute parts of the batch and add their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import GRAD, vjp
from triplane.unified_ir.engines.pipelined import GRADIENT_NORM, PipelineStep
from triplane.unified_ir.engines.xla.devices import DATA, SLOT
from triplane.unified_ir.engines.xla.door import jax, jnp, lax, tracing
from triplane.unified_ir.engines.xla.lower import Requirements, Trace
from triplane.unified_ir.engines.xla.packing import Fields, Packing, common_lengths
from triplane.unified_ir.engines.xla.program import compiler_options
from triplane.unified_ir.ir.dims import evaluate, is_symbol
from triplane.unified_ir.ir.graph import Function, Value
from triplane.unified_ir.passes.clean import drop_dead
from triplane.unified_ir.passes.sharding.stages import StagePart, StagePlan, parts

if TYPE_CHECKING:
    from triplane.unified_ir.engines.xla.pipeline_program import PipelineProgram

STAGE = "stage"
"""The axis of the mesh."""
COTANGENT = "cotangent."
WEIGHT = " weight"
"""Beside the arrays of a microbatch, whose names have no space: its weight in the gradient."""
Vectors = dict[str, Any]
"""A vector for each element type."""


@dataclass(frozen=True, slots=True, eq=False)
class StageFunctions:
    """What one stage computes: forward, gradients of its forward function, update of its state."""

    forward: StagePart
    backward: Function
    update: Function


def stage_functions(step: PipelineStep, plan: StagePlan) -> list[StageFunctions]:
    """Return the functions of each stage.

    InvalidInput: the update of a stage reads what another stage has.
    """
    pieces = parts(step.forward, plan.bounds)
    owners = owners_of(step, pieces)
    return [
        StageFunctions(part, _backward(step, part), _update(step, owners, s))
        for s, part in enumerate(pieces)
    ]


def owners_of(step: PipelineStep, pieces: Sequence[StagePart]) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each state tensor of a step; slots are with their parameter."""
    everywhere = tuple(range(len(pieces)))
    read = {}
    for name in step.function.param_names:
        read[name] = tuple(s for s, part in enumerate(pieces) if name in part.state)
    owners = {}
    for name in step.function.param_names:
        path = name.removeprefix(SLOT).partition(".")[2] if name.startswith(SLOT) else name
        owners[name] = read.get(path) or everywhere
    return owners


def _backward(step: PipelineStep, part: StagePart) -> Function:
    """Return the function of a stage's arguments and cotangents -> gradients."""
    forward = part.function
    wanted = [*part.received, *(n for n in part.state if n in step.trained)]
    wanted = [n for n in wanted if forward.param(n).type.dtype.is_float]
    kept = [n for n in part.sent if forward.result(n).type.dtype.is_float]
    kept = kept if part.sent else [step.loss]
    both = vjp(forward.with_(results=map(forward.result, kept), result_names=kept), wanted)
    names = [GRAD + n for n in wanted]
    return drop_dead(both.with_(results=map(both.result, names), result_names=names))


def _update(step: PipelineStep, owners: Mapping[str, tuple[int, ...]], stage: int) -> Function:
    update = step.update
    names = [n for n in update.result_names if stage in owners[n]]
    own = drop_dead(update.with_(results=map(update.result, names), result_names=names))
    read = {v for node in own.nodes for v in node.inputs} | {*own.results}
    params = [p for p in own.params if p in read]
    for param in params:
        path = param.name.removeprefix(GRAD)
        if path != GRADIENT_NORM and stage not in owners[path]:
            raise InvalidInput(
                f"the update of stage {stage + 1} of the pipeline reads {param.name!r}, which "
                "another stage has; use an optimizer that updates each parameter by itself"
            )
    return own.with_(params=params)


def fields_of(values: Sequence[Value], sizes: Mapping[str, int]) -> Fields:
    """Return shape and element type by name."""
    return {
        v.name: (tuple(evaluate(d, sizes) for d in v.type.shape), v.type.dtype.numpy)
        for v in values
    }


class PipelineExecutable:
    """The pipeline for one combination of sizes: (state, batch) -> (state, results, failed)."""

    def __init__(
        self, program: PipelineProgram, shapes: Mapping[str, tuple[int, ...]], count: int
    ) -> None:
        self.requirements = Requirements()
        self.count = count
        self._program, self._stages = program, program.stages
        sizes = {
            str(d): n
            for name, shape in shapes.items()
            for d, n in zip(program.function.param(name).type.shape, shape, strict=True)
            if is_symbol(d)
        }
        forward = program.step.forward
        self._batch = [n for n in shapes if n in forward.param_names]
        rows = next(iter(shapes.values()))[0]
        # Rows that do not divide are computed by each replica, which is right, but not faster.
        self._replicas = program.replicas if rows % program.replicas == 0 else 1
        self._rows = rows // self._replicas // count
        self._sizes = sizes | {program.rows: self._rows}
        self._plan_transfers()
        places = jax.sharding.NamedSharding(program.mesh, jax.sharding.PartitionSpec(STAGE))
        whole = jax.sharding.NamedSharding(program.mesh, jax.sharding.PartitionSpec())
        self.call: Callable[..., Any] = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(places, None),
            out_shardings=(places, whole, whole),
            compiler_options=compiler_options(deterministic=program.deterministic),
        )

    def _plan_transfers(self) -> None:
        """Lay out what passes between stages, forward and backward, and gradients."""
        self._arriving, self._cotangents, self._grads = [], [], []
        program, trained = self._program, set(self._program.step.trained)
        for stage in self._stages:
            function, received = stage.forward.function, set(stage.forward.received)
            arriving = [p for p in function.params if p.name in received]
            floats = [p for p in arriving if p.type.dtype.is_float]
            own = [p for p in function.params if p.name in trained]
            self._arriving.append(Packing(fields_of(arriving, self._sizes)))
            self._cotangents.append(Packing(fields_of(floats, self._sizes)))
            alone = [p for p in own if p.name not in program.shared]
            self._grads.append(Packing(fields_of(alone, {})))
        shared = [p for p in program.step.forward.params if p.name in program.shared & trained]
        self._shared = Packing(fields_of(shared, {}))

    @tracing()
    def _step(self, state: Vectors, batch: Mapping[str, Any]) -> Any:
        over, whole = jax.sharding.PartitionSpec(STAGE), jax.sharding.PartitionSpec()
        split = jax.sharding.PartitionSpec(DATA) if self._replicas > 1 else whole
        return jax.shard_map(
            self._device,
            mesh=self._program.mesh,
            in_specs=(over, split),
            out_specs=(over, whole, whole),
            check_vma=False,
        )(state, batch)

    def _device(self, state: Vectors, batch: Mapping[str, Any]) -> Any:
        """Compute a step as one device of the mesh does."""
        mine = {kind: x[0] for kind, x in state.items()}
        batches = {
            n: batch[n].reshape(self.count, self._rows, *batch[n].shape[1:]) for n in self._batch
        }
        saved, measured, failed = self._forward_passes(mine, batches)
        results, weights = self._combined(measured)
        grads, failed = self._backward_passes(mine, batches, saved, weights, failed)
        failed = lax.pmax(failed, (STAGE, DATA))
        moved, failed = self._updated(mine, grads, failed)
        return {kind: x[None] for kind, x in moved.items()}, results, failed

    def _updated(self, mine: Vectors, grads: Any, failed: Any) -> tuple[Vectors, Any]:
        """Return the new state, or the old one where a requirement failed before or in the update.

        A branch and no `where`, which would need one more copy of the state.
        """
        before = len(self.requirements.failures)
        wants_norm = GRADIENT_NORM in self._program.step.update.param_names
        operands = (mine, grads, _norm(*grads) if wants_norm else jnp.float32(0))
        moved, own = self._switch(self._updates, operands, (mine, jnp.int32(0)), failed == 0)
        if len(self.requirements.failures) == before:
            return moved, failed
        failed = jnp.where(failed == 0, lax.pmax(own, (STAGE, DATA)), failed)
        return {k: jnp.where(failed == 0, moved[k], x) for k, x in mine.items()}, failed

    def _switch(
        self, branch: Callable[..., Any], operands: Sequence[Any], idle: Any, active: Any
    ) -> Any:
        """Return the outcome of this device's branch, or `idle` where it is not active."""
        branches = [
            lambda _, *xs, s=s: branch(self._stages[s], s, *xs) for s in range(len(self._stages))
        ]
        place = jnp.where(active, lax.axis_index(STAGE) + 1, 0)
        return lax.switch(place, [lambda idle, *_: idle, *branches], idle, *operands)

    def _forward_passes(self, mine: Vectors, batches: Mapping[str, Any]) -> Any:
        """Return what arrived for each microbatch, the last stage's measures, and failed."""
        stages, at = len(self._stages), lax.axis_index(STAGE)
        lengths = common_lengths(self._arriving)
        nothing = {k: jnp.zeros(n, jnp.dtype(k)) for k, n in lengths.items()}

        def tick(carry: Any, t: Any) -> Any:
            arrived, saved, failed = carry
            m, active = self._place(t - at)
            saved = {k: jnp.where(active, x.at[m].set(arrived[k]), x) for k, x in saved.items()}
            now = {n: x[m] for n, x in batches.items()}
            idle = (nothing, self._no_measures(), jnp.int32(0))
            operands = (mine, now, arrived)
            sent, measured, own = self._switch(self._forward, operands, idle, active)
            onward = [(s, s + 1) for s in range(stages - 1)]
            arrived = {k: lax.ppermute(x, STAGE, onward) for k, x in sent.items()}
            return (arrived, saved, jnp.where(failed == 0, own, failed)), measured

        saved = {k: jnp.zeros((self.count, n), jnp.dtype(k)) for k, n in lengths.items()}
        start = (nothing, saved, jnp.int32(0))
        steps = jnp.arange(self.count + stages - 1, dtype=jnp.int32)
        (_, saved, failed), measured = lax.scan(tick, start, steps)
        return saved, jax.tree.map(lambda x: lax.psum(x[stages - 1 :], STAGE), measured), failed

    def _place(self, m: Any) -> tuple[Any, Any]:
        return jnp.clip(m, 0, self.count - 1), (m >= 0) & (m < self.count)

    def _forward(self, stage: StageFunctions, s: int, mine: Any, now: Any, arrived: Any) -> Any:
        """Return what a stage sends, measures (zeros but in the last stage), failed."""
        part = stage.forward
        args = self._arguments(s, mine, now, arrived)
        named, failed = self._run(part.function, args)
        lengths = common_lengths(self._arriving)
        last = s == len(self._stages) - 1
        # What a stage sends is what the next one receives, under the same names.
        packing = Packing({}) if last else self._arriving[s + 1]
        sent = packing.packed({} if last else named, lengths, jnp)
        measured = {n: named[n] if last else x for n, x in self._no_measures().items()}
        return sent, measured, failed

    def _no_measures(self) -> dict[str, Any]:
        """Return a zero for each measure."""
        forward = self._program.step.forward
        types = {n: forward.result(n).type for n in forward.result_names}
        return {
            n: jnp.zeros(tuple(evaluate(d, self._sizes) for d in t.shape), t.dtype.numpy)
            for n, t in types.items()
        }

    def _arguments(self, s: int, mine: Any, now: Any, arrived: Any) -> dict[str, Any]:
        return {
            **now,
            **self._arriving[s].unpacked(arrived),
            **self._program.layouts[s].unpacked(mine),
        }

    def _run(self, function: Function, args: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        kernels = not self._program.deterministic
        trace = Trace(self.requirements, dict(self._sizes), kernels=kernels)
        results = trace.run(function, [args[n] for n in function.param_names])
        failed = jnp.int32(0) if trace.failed is None else trace.failed
        named = zip(function.result_names, map(jnp.asarray, results), strict=True)
        return dict(named), failed

    def _combined(self, measured: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the measures of the batch, and the weight of each microbatch in the gradient."""
        step = self._program.step
        even = jnp.full(self.count, 1 / (self.count * self._replicas), jnp.float32)

        def weights(name: str) -> Any:
            if name not in step.divisors:
                return even
            n = measured[step.divisors[name]]
            return shares(n, self._added(n.sum()), jnp)

        results = {}
        for name, x in measured.items():
            if name in step.counts:
                results[name] = self._added(x.sum(0, dtype=x.dtype))
            else:
                results[name] = self._added((x * weights(name).astype(x.dtype)).sum(0))
        return results, weights(step.loss)

    def _added(self, x: Any) -> Any:
        """Return the sum over the parts of a batch that replicas of the pipeline compute."""
        return lax.psum(x, DATA) if self._replicas > 1 else x

    def _backward_passes(
        self, mine: Vectors, batches: Any, saved: Any, weights: Any, failed: Any
    ) -> Any:
        """Return the sums of gradients over microbatches, alone and shared, and failed."""
        stages, at = len(self._stages), lax.axis_index(STAGE)
        alone, flowing = common_lengths(self._grads), common_lengths(self._cotangents)
        zeros = [
            {k: jnp.zeros(n, jnp.dtype(k)) for k, n in lengths.items()}
            for lengths in (flowing, alone, self._shared.lengths)
        ]

        def tick(carry: Any, t: Any) -> Any:
            arrived, grads, failed = carry
            m, active = self._place(t - (stages - 1 - at))
            now = {WEIGHT: weights[m], **{n: x[m] for n, x in batches.items()}}
            operands = (mine, now, {k: x[m] for k, x in saved.items()}, (arrived, grads))
            idle = (zeros[0], grads, jnp.int32(0))
            sent, grads, own = self._switch(self._backward, operands, idle, active)
            back = [(s, s - 1) for s in range(1, stages)]
            arrived = {k: lax.ppermute(x, STAGE, back) for k, x in sent.items()}
            return (arrived, grads, jnp.where(failed == 0, own, failed)), None

        start = (zeros[0], (zeros[1], zeros[2]), failed)
        steps = jnp.arange(self.count + stages - 1, dtype=jnp.int32)
        (_, (own, shared), failed), _ = lax.scan(tick, start, steps)
        shared = {k: lax.psum(x, STAGE) for k, x in shared.items()}
        return jax.tree.map(self._added, (own, shared)), failed

    def _backward(
        self, stage: StageFunctions, s: int, mine: Any, now: Any, inputs: Any, carried: Any
    ) -> Any:
        """Return the cotangents that a stage sends back, the new sums of gradients, failed.

        carried: the cotangents that arrived, and the sums of gradients so far.
        """
        arrived, (alone, shared) = carried
        step, last = self._program.step, s == len(self._stages) - 1
        args = self._arguments(s, mine, now, inputs)
        if last:
            loss = step.forward.result(step.loss).type.dtype.numpy
            args[COTANGENT + step.loss] = now[WEIGHT].astype(loss)
        else:
            flowing = self._cotangents[s + 1].unpacked(arrived)
            args |= {COTANGENT + n: x for n, x in flowing.items()}
        named, failed = self._run(stage.backward, args)
        grads = {n.removeprefix(GRAD): x for n, x in named.items()}
        sent = self._cotangents[s].packed(grads, common_lengths(self._cotangents), jnp)
        alone = self._grads[s].written(alone, grads, add=True)
        return sent, (alone, self._shared.written(shared, grads, add=True)), failed

    def _updates(self, stage: StageFunctions, s: int, mine: Vectors, grads: Any, norm: Any) -> Any:
        """Return the state of a stage after the update, and failed."""
        program = self._program
        own = program.layouts[s].unpacked(mine)
        named = {**self._grads[s].unpacked(grads[0]), **self._shared.unpacked(grads[1])}
        args = {**own, **{GRAD + n: x for n, x in named.items()}, GRADIENT_NORM: norm}
        moved, failed = self._run(stage.update, args)
        return program.layouts[s].written(mine, moved), failed


def shares(counts: Any, total: Any, xp: Any) -> Any:
    """Return the weights of means over so many, as `Recipe.advance` weighs accumulated batches.

    Without any count, a mean is a sum. xp: numpy, or its namesake of JAX.
    """
    return xp.where(counts == 0, 1.0, counts) / xp.where(total == 0, 1.0, total)


def _norm(alone: Vectors, shared: Vectors) -> Any:
    """Return the norm of all gradients: those of this stage alone, and those that stages share."""

    def squares(vectors: Vectors) -> Any:
        return sum((jnp.square(x.astype(jnp.float32)).sum() for x in vectors.values()), 0.0)

    return jnp.sqrt(lax.psum(squares(alone), STAGE) + squares(shared))

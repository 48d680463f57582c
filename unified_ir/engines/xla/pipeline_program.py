"""The program and the loop of a training step that runs as a pipeline."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.pipelined import PipelineStep
from triplane.unified_ir.engines.protocol import (
    StateLost,
    by_position,
    check_donated,
    check_state,
)
from triplane.unified_ir.engines.reference import ReferenceProgram
from triplane.unified_ir.engines.xla.devices import DATA, SLOT, first_devices
from triplane.unified_ir.engines.xla.door import exact, explained, jax, jax_devices
from triplane.unified_ir.engines.xla.lower import check
from triplane.unified_ir.engines.xla.packing import Packing, common_lengths
from triplane.unified_ir.engines.xla.pipeline import (
    STAGE,
    PipelineExecutable,
    fields_of,
    owners_of,
    shares,
    stage_functions,
)
from triplane.unified_ir.engines.xla.program import MAX_SHAPES, checked, fetched, read
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ops.values import HostValue
from triplane.unified_ir.passes.sharding import Topology
from triplane.unified_ir.passes.sharding.stage_report import stage_table
from triplane.unified_ir.passes.sharding.stages import (
    DEFAULT_MICROBATCHES,
    StagePlan,
    microbatches_of,
    plan_stages,
    training_copies,
)
from triplane.unified_ir.runtime.session import check_rows

TOLERANCE: Final = 1e-2
"""Relative difference between a batch and its parts that rounding may cause, in bfloat16 too."""
COMPARED: Final = 8
"""Samples that are measured together and one by one. Of two, a mean over the samples that a mask
keeps, or a condition on the batch, often looks like a mean over samples."""


class StageDevices:
    """A device for each stage of a pipeline, and of each replica of it.

    say: called with each line of a plan.
    """

    def __init__(
        self,
        stages: int,
        microbatches: int | None,
        *,
        replicas: int = 1,
        memory_bytes: int | None = None,
        topology: Topology | None = None,
    ) -> None:
        numbers = {"stages": stages, "microbatches": microbatches, DATA: replicas,
                   "memory_bytes": memory_bytes}  # fmt: skip
        for name, number in numbers.items():
            if number is not None and (type(number) is not int or number < 1):
                raise InvalidInput(f"{name} is a whole number >= 1, got {number!r}")
        copies = "" if replicas == 1 else f", {replicas} times,"
        self.places = first_devices(stages * replicas, f"a pipeline of {stages} stages{copies}")
        if jax.process_count() > 1:
            raise InvalidInput(
                f"pipeline stages run on the devices of one process, and this run has "
                f"{jax.process_count()}; split the batch over the hosts with mesh={{'data': N}}"
            )
        self.stages, self.replicas = stages, replicas
        self.microbatches = microbatches or DEFAULT_MICROBATCHES * stages
        self._memory_bytes, self._topology = memory_bytes, topology
        self.mesh = jax.sharding.Mesh(
            np.array(self.places).reshape(stages, replicas), (STAGE, DATA)
        )
        self.say: Callable[[str], None] = lambda _: None

    def __str__(self) -> str:
        """Say which devices these are, and what for."""
        kind = self.places[0].platform.upper()
        copies = "" if self.replicas == 1 else f" of {self.replicas} pipelines"
        used = f"{len(self.places)} of {len(jax_devices())} x {kind}"
        return f"{used}, a stage of the pipeline on each{copies}"

    def share(self, rows: int) -> int:
        """Return how many rows of a batch one replica computes; all, if they do not divide."""
        return rows if rows % self.replicas else rows // self.replicas

    def plan(self, step: PipelineStep, rows: str) -> StagePlan:
        """Return the cut of a step, after saying it."""
        if rows not in step.sizes:
            raise InvalidInput(
                "pipeline stages need the sizes of a batch before the first step; call fit, or "
                "prepare(x, y) with arrays"
            )
        size = self.share(step.sizes[rows])
        count = microbatches_of(size, self.microbatches)
        slots = [n for n in step.function.param_names if n.startswith(SLOT) and "." in n[10:]]
        plan = plan_stages(
            step.forward,
            self.stages,
            count,
            sizes={**step.sizes, rows: size // count},
            copies=training_copies(math.ceil(len(slots) / len(step.trained))),
            memory_bytes=self._memory_bytes,
            topology=self._topology,
        )
        for line in stage_table(plan):
            self.say(line)
        return plan


class PipelineProgram:
    """A training step whose state is divided over the devices of a pipeline."""

    def __init__(
        self,
        step: PipelineStep,
        donate: Collection[str],
        devices: StageDevices,
        *,
        deterministic: bool = False,
    ) -> None:
        check_donated(step.function, donate)
        for function in (step.function, step.forward, step.update):
            check(function)
        if (own := next((n for n in step.forward.walk() if n.strategy), None)) is not None:
            raise InvalidInput(
                f"{own.op} at {own.meta.location or 'an unknown line'} has a strategy of its own, "
                "which a pipeline does not carry out; use parallel='auto' and devices=N"
            )
        self.step, self.function, self.mesh = step, step.function, devices.mesh
        self.donate, self.deterministic = tuple(donate), deterministic
        self.batch = tuple(p for p in self.function.params if p.name not in self.donate)
        self.rows = self._batch_axis()
        self.plan = devices.plan(step, self.rows)
        self.stages = stage_functions(step, self.plan)
        self.owners = owners_of(step, [stage.forward for stage in self.stages])
        self.shared = {n for n in step.trained if len(self.owners[n]) > 1}
        self.layouts = [
            Packing(fields_of([self.function.param(n) for n in self._held_by(s)], {}))
            for s in range(len(self.stages))
        ]
        self.lengths = common_lengths(self.layouts)
        self._devices, self.replicas = devices, devices.replicas
        self._compiled: OrderedDict[Any, PipelineExecutable] = OrderedDict()

    def _held_by(self, stage: int) -> list[str]:
        return [n for n in self.donate if stage in self.owners[n]]

    def _batch_axis(self) -> str:
        """Return the symbol of the rows of a batch."""
        first = {str(p.type.shape[0]) if p.type.shape else "" for p in self.batch}
        symbols = {str(d) for p in self.batch for d in p.type.shape if is_symbol(d)}
        if len(first) != 1 or not first <= symbols:
            types = ", ".join(f"{p.name}: {p.type}" for p in self.batch)
            raise InvalidInput(
                f"a pipeline splits each array of a batch by its first axis, of one open size; the "
                f"batch is {types}"
            )
        return first.pop()

    def __call__(self, *args: HostValue) -> tuple[Array, ...]:
        """See `Program`."""
        feeds = by_position(self.function, args)
        loop = self.loop({n: feeds[n] for n in self.donate})
        named = loop.step(**{p.name: feeds[p.name] for p in self.batch})
        named |= loop.state()
        return tuple(named[n] for n in self.function.result_names)

    def loop(self, state: Mapping[str, Array]) -> PipelineLoop:
        """See `Program`."""
        check_state(self.donate, state)
        return PipelineLoop(self, state)

    def executable(self, feeds: Mapping[str, Array]) -> PipelineExecutable:
        """Return the pipeline for a batch of these shapes; the one unused longest gives way."""
        shapes = {n: x.shape for n, x in feeds.items()}
        key = tuple(shapes.items())
        if key not in self._compiled:
            rows = self._devices.share(next(iter(shapes.values()))[0])
            count = microbatches_of(rows, self._devices.microbatches)
            self._compiled[key] = PipelineExecutable(self, shapes, count)
            if len(self._compiled) > MAX_SHAPES:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def placed(self, state: Mapping[str, Array]) -> dict[str, Any]:
        """Return the vectors of all stages, each on its device."""
        rows = [
            layout.packed({n: state[n] for n in self._held_by(s)}, self.lengths, np)
            for s, layout in enumerate(self.layouts)
        ]
        places = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(STAGE))
        with exact():
            return {k: jax.device_put(np.stack([r[k] for r in rows]), places) for k in self.lengths}


def check_parts(step: PipelineStep, state: Mapping[str, Array], feeds: Mapping[str, Array]) -> None:
    """Refuse measures that are not means (or sums) of those of the parts of a batch.

    The first samples are measured together and one by one on the host; a batch that is refused
    there is left to the step itself.
    """
    program = ReferenceProgram(step.forward, ())
    count = min(COMPARED, *map(len, feeds.values()))

    def measured(rows: slice) -> dict[str, Array]:
        values = {**state, **{n: x[rows] for n, x in feeds.items()}}
        results = program(*(values[n] for n in step.forward.param_names))
        return dict(zip(step.forward.result_names, results, strict=True))

    try:
        together = measured(slice(count))
        single = [measured(slice(i, i + 1)) for i in range(count)]
    except InvalidInput:
        return
    for name in together.keys() - step.counts:
        if name in step.divisors:
            counts = np.array([one[step.divisors[name]] for one in single])
            weights = shares(counts, counts.sum(), np)
        else:
            weights = np.full(count, 1 / count)
        mean = sum(w * one[name] for w, one in zip(weights, single, strict=True))
        if not np.allclose(together[name], mean, rtol=TOLERANCE, atol=1e-5, equal_nan=True):
            raise InvalidInput(
                f"pipeline stages need measures that are means over samples: {name!r} of {count} "
                f"samples is {float(together[name]):g}, the mean of each alone is {float(mean):g}; "
                "use a mean, or a loss with `counted`, or do without stages"
            )


class PipelineLoop:
    """See `EngineLoop`: each device keeps the state of its stage."""

    def __init__(self, program: PipelineProgram, state: Mapping[str, Array]) -> None:
        self._program, self._compared = program, False
        self.vectors = program.placed(self._checked(state))
        """For each element type an array (stages, elements), a row on each device."""

    def step(self, **batch: Array) -> dict[str, Array]:
        """See `EngineLoop.step`."""
        program = self._program
        wanted = {p.name for p in program.batch}
        if batch.keys() != wanted:
            wrong = sorted(batch.keys() ^ wanted)
            raise InvalidInput(f"step takes {', '.join(sorted(wanted))}; wrong: {wrong}")
        feeds = checked(program.batch, batch)
        check_rows(feeds)
        self._present()
        if not self._compared and min(map(len, feeds.values())) > 1:
            check_parts(program.step, self.state(), feeds)
            self._compared = True
        compiled = program.executable(feeds)
        with exact(), explained(f"the pipeline of {program.function.name}"):
            moved, results, failed = compiled.call(self.vectors, feeds)
            jax.block_until_ready((results, moved, failed))
        self.vectors = moved
        (number,) = read([failed])
        if number:
            raise self._explained(compiled.requirements.error(int(number)), feeds)
        names = program.step.forward.result_names
        return dict(zip(names, fetched([results[n] for n in names]), strict=True))

    def _explained(self, plain: InvalidInput, feeds: Mapping[str, Array]) -> InvalidInput:
        """Return the error of the reference engine, which shows operands; else the plain one."""
        function, values = self._program.function, {**self.state(), **feeds}
        try:
            ReferenceProgram(function, ())(*(values[n] for n in function.param_names))
        except InvalidInput as error:
            return error
        return plain

    def state(self) -> dict[str, Array]:
        """See `EngineLoop.state`."""
        self._present()
        program = self._program
        rows = dict(zip(self.vectors, read(list(self.vectors.values())), strict=True))
        state = {}
        for name in program.donate:
            stage = program.owners[name][0]
            held = {kind: x[stage] for kind, x in rows.items()}
            state[name] = np.array(program.layouts[stage].tensor(held, name))
        return state

    def view(self) -> Mapping[str, Array]:
        """See `EngineLoop.view`: what is read is copied from its device."""
        self._present()
        return _View(self._program, self.vectors)

    def load(self, state: Mapping[str, Array]) -> None:
        """See `EngineLoop.load`."""
        if unknown := sorted(state.keys() - set(self._program.donate)):
            raise InvalidInput(f"the state has {sorted(self._program.donate)}, but not {unknown}")
        self.vectors = self._program.placed(self.state() | self._checked(state))

    def _present(self) -> None:
        if any(x.is_deleted() for x in self.vectors.values()):
            raise StateLost("a step that was cut short has used up the state; start a new loop")

    def _checked(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state as arrays; InvalidInput if one is not of its parameter's type."""
        params = [self._program.function.param(n) for n in state]
        return checked(params, state)


class _View(Mapping[str, Array]):
    """State by name, each tensor read from the device of its stage."""

    def __init__(self, program: PipelineProgram, vectors: Mapping[str, Any]) -> None:
        self._program, self._vectors = program, vectors

    def __getitem__(self, name: str) -> Array:
        stage = self._program.owners[name][0]
        with exact():
            rows = {
                kind: shard.data[0]
                for kind, x in self._vectors.items()
                for shard in x.addressable_shards
                if (shard.index[0].start or 0) == stage
            }
            (tensor,) = read([self._program.layouts[stage].tensor(rows, name)])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._program.donate)

    def __len__(self) -> int:
        return len(self._program.donate)

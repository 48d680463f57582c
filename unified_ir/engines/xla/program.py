"""Programs of XLA, one for each combination of sizes, and loops whose state stays on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.protocol import (
    StateLost,
    by_position,
    check_donated,
    check_state,
)
from triplane.unified_ir.engines.reference import ReferenceProgram
from triplane.unified_ir.engines.xla.devices import Devices
from triplane.unified_ir.engines.xla.door import (
    exact,
    explained,
    jax,
    jnp,
    lax,
    tracing,
    transferring,
)
from triplane.unified_ir.engines.xla.lower import Requirements, Trace, check
from triplane.unified_ir.engines.xla.planned import PlannedDevices
from triplane.unified_ir.engines.xla.processes import Processes, gathered
from triplane.unified_ir.engines.xla.staging import StagedBatches, Staging
from triplane.unified_ir.ir.graph import Array, Function, Value
from triplane.unified_ir.ops.evaluate import check_argument
from triplane.unified_ir.ops.values import HostValue, bind
from triplane.unified_ir.runtime.session import check_rows

Arrays = Sequence[Any]
MAX_SHAPES: Final = 32
"""Combinations of sizes whose programs are kept at once."""


class XlaExecutable:
    """A function traced for one combination of sizes: (state, batch) -> (results, state, failed).

    failed: int32, which requirement failed, 0 if none; the new state is then the old one.
    """

    def __init__(self, program: XlaProgram, batch: Arrays, *, steps: int | None) -> None:
        self.requirements = Requirements()
        self._function, self._donate = program.function, program.donate
        options: dict[str, Any] = {}
        shapes = {p.name: x.shape for p, x in zip(program.batch, batch, strict=True)}
        self.placement = program.devices.placement(
            program.function, program.donate, shapes, lead=0 if steps is None else 1
        )
        if (where := self.placement) is not None:
            options = {
                "in_shardings": (where.state, where.batch),
                "out_shardings": (where.whole, where.state, where.whole),
            }
        self._kernels = not program.deterministic
        self._is_launch = steps is not None
        self._processes = program.devices.processes
        self._options = compiler_options(deterministic=program.deterministic)
        traced = self._launch if self._is_launch else self._step
        self.call = self._compiled(traced, donate_argnums=0, **options)
        self._is_decided = self.placement is None or self.placement.buckets is None

    def _compiled(self, traced: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = jax.jit(
            traced, keep_unused=True, compiler_options=self._options, **options
        )
        return call if self._processes is None else self._processes.checked(call)

    def decide(self, state: Arrays, batch: Arrays) -> None:
        """Decide about what depends on measures before the first run, which has these arguments."""
        if self._is_decided:
            return
        where = self.placement
        assert where is not None
        assert where.buckets is not None
        buckets, shardings = where.buckets, (where.state, where.batch)
        # State is in its place already; without this, times would contain the batch's way there.
        batch = jax.device_put(list(batch), list(where.batch))

        def run_up_to(number: int) -> Callable[[], Any]:
            @tracing()
            def traced(state: Arrays, batch: Arrays) -> Any:
                row = [x[0] for x in batch] if self._is_launch else batch
                return buckets.up_to(number, self._arguments(state, row), kernels=self._kernels)

            call = self._compiled(traced, in_shardings=shardings, out_shardings=where.whole)
            return lambda: jax.block_until_ready(call(state, batch))

        buckets.decide(run_up_to)
        self._is_decided = True

    def _arguments(self, state: Arrays, batch: Arrays) -> list[Any]:
        """Return the function's arguments in its own order."""
        named, fed = dict(zip(self._donate, state, strict=True)), iter(batch)
        return [named[n] if n in named else next(fed) for n in self._function.param_names]

    @tracing()
    def _step(self, state: Arrays, batch: Arrays, failed: Any = None) -> Any:
        function = self._function
        trace = Trace(self.requirements, {}, failed, kernels=self._kernels)
        named, args = dict(zip(self._donate, state, strict=True)), self._arguments(state, batch)
        old = [named.get(n) for n in function.result_names]
        where = self.placement
        if where is not None and where.buckets is not None:
            results, failed = where.buckets(
                self.requirements, args, old, failed, kernels=self._kernels
            )
            trace = Trace(self.requirements, {}, failed)
        else:
            results = trace.run(function, args, old, {} if where is None else where.nodes)
        results = [jnp.asarray(r) for r in results]
        by_name = dict(zip(function.result_names, results, strict=True))
        moved = [by_name.pop(n, named[n]) for n in self._donate]
        return list(by_name.values()), moved, trace.failed

    def _launch(self, state: Arrays, batches: Arrays) -> Any:
        """Run a step for each row of `batches`; after one that fails, no step changes the state."""

        def one(carry: Any, batch: Any) -> Any:
            results, moved, failed = self._step(carry[0], batch, carry[1])
            return (moved, failed), (results, failed)

        (moved, _), (results, failed) = lax.scan(one, (list(state), jnp.int32(0)), list(batches))
        return results, moved, failed if self.requirements.failures else None


class XlaProgram:
    """A function compiled by XLA, for each combination of the sizes of its symbols."""

    def __init__(
        self,
        function: Function,
        donate: Collection[str],
        devices: Devices | PlannedDevices,
        *,
        deterministic: bool = False,
    ) -> None:
        check_donated(function, donate)
        check(function)
        self.function, self.deterministic = function, deterministic
        self.devices = devices
        self.donate = tuple(donate)
        devices.check(function, self.donate)
        self._compiled: OrderedDict[Any, XlaExecutable] = OrderedDict()
        self._last: XlaExecutable | None = None
        self.batch = tuple(p for p in function.params if p.name not in self.donate)
        """The parameters that are not donated."""
        self.results = tuple(n for n in function.result_names if n not in self.donate)
        """The names of the results that are not state."""

    def __call__(self, *args: HostValue) -> tuple[Array, ...]:
        """See `Program`."""
        feeds = checked(self.function.params, by_position(self.function, args))
        try:
            state, results = self.run([feeds[n] for n in self.donate], feeds)
        except RefusedData as refused:
            raise self.explained(refused, feeds) from None
        named = dict(zip(self.results, results, strict=True))
        named |= dict(zip(self.donate, state, strict=True))
        return tuple(fetched([named[n] for n in self.function.result_names]))

    def loop(self, state: Mapping[str, Array]) -> XlaLoop:
        """See `Program`."""
        check_state(self.donate, state)
        return XlaLoop(self, state)

    def run(self, state: Arrays, feeds: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        """Return the new state and the results; the arrays of `state` are given away.

        RefusedData where the data do not meet a requirement: it has the state, which is as it was.
        """
        compiled, results, state, failed = self._ran(state, [feeds[p.name] for p in self.batch])
        if failed:
            raise RefusedData(compiled.requirements.error(int(failed)), state)
        return state, results

    def launch(self, state: Arrays, batches: Arrays, steps: int) -> tuple[Arrays, Arrays, int]:
        """Run steps on stacked batches: the state, stacked results, how many steps were done.

        The arrays of `state` are given away. Steps from the first that fails change nothing.
        """
        _, results, state, failed = self._ran(state, batches, steps)
        bad = np.flatnonzero(failed)
        return state, results, int(bad[0]) if bad.size else steps

    def explained(self, refused: RefusedData, feeds: Mapping[str, Any]) -> InvalidInput:
        """Return the error of the reference engine, which shows operands; else the plain one."""
        state = dict(zip(self.donate, read(refused.state), strict=True))
        values = {**feeds, **state}
        try:
            ReferenceProgram(self.function, ())(*(values[n] for n in self.function.param_names))
        except InvalidInput as error:
            return error
        return refused.error

    def _ran(self, state: Arrays, batch: Arrays, steps: int | None = None) -> Any:
        """Return the program, its results, the new state, and which requirement failed."""
        compiled = self._for_shapes(batch, steps)
        with exact():
            where = compiled.placement
            if (processes := self.devices.processes) is not None and where is not None:
                state = processes.put(state, where.state)
                batch = processes.put(batch, where.batch)
            elif compiled is not self._last and where is not None:
                state = jax.device_put(list(state), list(where.state))
            self._last = compiled
            with explained(self.function.name), _noticing(processes):
                compiled.decide(state, batch)
                results, moved, failed = compiled.call(state, batch)
                # All of it: the memory of the batches is used again.
                jax.block_until_ready((results, moved, failed))
                number = np.zeros((), np.int32) if failed is None else np.asarray(failed)
        return compiled, results, moved, number

    def _for_shapes(self, batch: Arrays, steps: int | None) -> XlaExecutable:
        """Return the program for a batch of these shapes; the one unused longest gives way."""
        key = self.devices.revision, steps, *(x.shape for x in batch)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        fresh = self._compiled[key] = XlaExecutable(self, batch, steps=steps)
        if len(self._compiled) > MAX_SHAPES:
            self._compiled.popitem(last=False)
        return fresh


class RefusedData(Exception):
    """Data that a program refused. state: as it was before."""

    def __init__(self, error: InvalidInput, state: Arrays) -> None:
        super().__init__(str(error))
        self.error, self.state = error, state


class XlaLoop:
    """See `EngineLoop`: state in arrays of the device, each step's replacing those of the last."""

    def __init__(self, program: XlaProgram, state: Mapping[str, Array]) -> None:
        self._program = program
        self._state: dict[str, Any] = dict.fromkeys(program.donate)
        self._state |= self._placed(state)
        self._names = frozenset(p.name for p in program.batch)
        self._staging = Staging()

    def step(self, **batch: Array) -> dict[str, Array]:
        """See `EngineLoop.step`."""
        program, feeds = self._program, self._checked(batch)
        try:
            state, results = program.run(self._present(), feeds)
        except RefusedData as refused:
            self._keep(refused.state)
            raise program.explained(refused, feeds) from None
        self._keep(state)
        return dict(zip(program.results, fetched(results), strict=True))

    def stage(self, *, room: int) -> StagedBatches:
        """See `LaunchingLoop.stage`."""
        program = self._program
        names = [p.name for p in program.batch]
        ahead = program.devices.is_single
        return StagedBatches(names, self._checked, self._staging, room=room, ahead=ahead)

    def launch(self, staged: StagedBatches) -> list[dict[str, Array]]:
        """See `LaunchingLoop.launch`."""
        count = len(staged)
        state, results, done = self._program.launch(self._present(), staged.arrays(), count)
        self._keep(state)
        if not done:
            return [self.step(**staged.batch(0))]
        names, arrays = self._program.results, fetched(results)
        return [{n: a[i] for n, a in zip(names, arrays, strict=True)} for i in range(done)]

    def steps(self, batches: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """Stage batches and launch their steps; see `launch`."""
        staged = self.stage(room=len(batches))
        for batch in batches:
            staged.add(batch)
        return self.launch(staged)

    def state(self) -> dict[str, Array]:
        """See `EngineLoop.state`."""
        return dict(zip(self._state, fetched(self._present()), strict=True))

    def view(self) -> Mapping[str, Array]:
        """See `EngineLoop.view`."""
        return StateView(dict(zip(self._state, self._present(), strict=True)))

    def load(self, state: Mapping[str, Array]) -> None:
        """See `EngineLoop.load`."""
        if unknown := sorted(state.keys() - self._state.keys()):
            raise InvalidInput(f"the state has {sorted(self._state)}, but not {unknown}")
        self._state |= self._placed(state)

    def _present(self) -> list[Any]:
        """Return the state, unless a step took it and did not end."""
        if any(x.is_deleted() for x in self._state.values()):
            raise StateLost("a step that was cut short has used up the state; start a new loop")
        return list(self._state.values())

    def _keep(self, state: Arrays) -> None:
        self._state = dict(zip(self._state, state, strict=True))

    def _checked(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        if batch.keys() != self._names:
            wrong = sorted(batch.keys() ^ self._names)
            raise InvalidInput(f"step takes {', '.join(sorted(self._names))}; wrong: {wrong}")
        feeds = checked(self._program.batch, batch)
        check_rows(feeds)
        return feeds

    def _placed(self, state: Mapping[str, Array]) -> dict[str, Any]:
        """Return copies on the device; InvalidInput if one is not of its parameter's type."""
        arrays = {n: np.asarray(x) for n, x in state.items()}
        for name, x in arrays.items():
            wanted = self._program.function.param(name).type
            if x.dtype != wanted.dtype.numpy or x.shape != wanted.shape:
                raise InvalidInput(f"state {name!r} is {wanted}, got {x.dtype}{x.shape}")
        with exact():
            return {n: self._program.devices.place(n, x) for n, x in arrays.items()}


def compiler_options(*, deterministic: bool) -> dict[str, bool | int]:
    """Return XLA's options: round where the graph casts; the others are for GPUs alone."""
    options: dict[str, bool | int] = {"xla_allow_excess_precision": False}
    if deterministic:
        # Without the second one, XLA takes kernels from what it tried out for other programs, also
        # in other processes, and these need not be deterministic.
        options |= {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    return options


class StateView(Mapping[str, Array]):
    """Arrays of the device, read one by one: processes hold different parts of some of them."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        """Return an array as it is in memory, if it is there."""
        return read([self._arrays[name]])[0]

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names."""
        return iter(self._arrays)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._arrays)


def fetched(results: Arrays) -> list[Array]:
    """Return copies in the host's memory."""
    return [np.array(x) for x in read(results)]


def read(results: Arrays) -> list[Array]:
    """Return arrays of the host, which must not be written; the transfers run together."""
    arrays = [gathered(x) for x in results]
    with transferring():
        for x in arrays:
            x.copy_to_host_async()
        return [np.asarray(x) for x in arrays]


def _noticing(processes: Processes | None) -> AbstractContextManager[None]:
    return nullcontext() if processes is None else processes.noticing_loss()


def checked(params: Sequence[Value], args: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arguments as arrays; InvalidInput if one is not of its parameter's type."""
    sizes: dict[str, int] = {}
    feeds = {}
    for param in params:
        array = np.asarray(args[param.name])
        check_argument(param, array)
        bind(sizes, param.type, array)
        feeds[param.name] = array
    return feeds

"""Which devices a program runs on, and which part of each array each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Final, Protocol

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import suggestion
from triplane.unified_ir.engines.xla.door import jax, jax_devices
from triplane.unified_ir.engines.xla.processes import Processes
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.graph import Function, Value

DATA: Final = "data"
"""The axis of a mesh over which a batch is split."""
SLOT: Final = "optimizer."
"""Prefix of the optimizer's state: `optimizer.SLOT.PATH` for the parameter PATH."""

Shape = tuple[int, ...]
Axes = tuple[str | None, ...]
"""For each axis of an array, the axis of the mesh over which it is split; None: not split."""


class BucketedFunction(Protocol):
    """Runs a function on each device's rows and adds up the gradients in buckets."""

    def decide(self, run_up_to: Callable[[int], Callable[[], Any]]) -> None:
        """Decide about the buckets, before the first call.

        run_up_to: compiles the function up to the gradient of a number, to a program that runs it
        on the arguments of this call and returns when that is done.
        """
        ...

    def up_to(self, number: int, args: Sequence[Any], *, kernels: bool) -> list[Any]:
        """Return each device's own part of the gradients up to this one, which is the last."""
        ...

    def __call__(
        self, requirements: Any, args: Sequence[Any], old: Sequence[Any], failed: Any,
        *, kernels: bool,
    ) -> tuple[list[Any], Any]:  # fmt: skip
        """Return the results, whole on each device, and which requirement failed on any device."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a program's arrays are: shardings of state, of the batch, and of results.

    nodes: by index, the shardings that a plan wants of a node's operands and of its outputs.
    buckets: what runs the function instead, if gradients are added in buckets.
    """

    state: Sequence[Any]
    batch: Sequence[Any]
    whole: Any
    nodes: Mapping[int, tuple[Sequence[Any], Sequence[Any]]] = field(default_factory=dict)
    buckets: BucketedFunction | None = None


class Devices:
    """The devices of an engine: the first one, or a mesh over which batches and state are split.

    XLA splits the work as batch and state are split and adds what must be added, so a program
    computes what it computes on one device, in another order of sums. mesh: the number of devices
    by axis. shard: axes by patterns of names of state; state that no pattern names is whole on each
    device. say: called with a line on batches that are not split.
    """

    def __init__(
        self,
        mesh: Mapping[str, int] | None = None,
        shard: Mapping[str, Sequence[str | None]] | None = None,
    ) -> None:
        for name, value in (("mesh", mesh), ("shard", shard)):
            if not isinstance(value, Mapping | None):
                raise InvalidInput(
                    f"{name} is a dictionary, as in mesh={{'data': 2, 'model': 2}} and "
                    f"shard={{'*.weight': ('model', None)}}, got {value!r}"
                )
        _check_shard(shard or {})
        jax_devices()  # so that what is wrong with them is named here
        self.axes = dict(mesh or {})
        self._shard = {pattern: tuple(axes) for pattern, axes in (shard or {}).items()}
        self._mesh: Any = None
        self.processes: Processes | None = None
        self.revision = 0
        """Rises when programs that were compiled before no longer fit."""
        self._whole: set[int] = set()
        self._unsplit = [p for p, axes in self._shard.items() if any(axes)]
        self.say: Callable[[str], None] = lambda _: None
        _check_axes(self.axes, self._shard)
        if mesh:
            places = np.array(_first(self.axes)).reshape(tuple(self.axes.values()))
            self._mesh = jax.sharding.Mesh(places, tuple(self.axes))

    def __str__(self) -> str:
        """Say which devices these are, and why."""
        there = jax_devices()
        first = there[0]
        kind = first.platform.upper()
        named = kind if kind == "CPU" else f"{kind} ({first.device_kind})"
        if self._mesh is not None:
            by = "" if self.processes is None else f"; {self.processes.hosts}"
            mesh = f"for the mesh {self._named()}"
            return f"{self._mesh.size} of {len(there)} x {named}, {mesh}{by}"
        if len(there) > 1:
            return f"{named}, the first of {len(there)}; a mesh data={len(there)} uses them all"
        return f"{named}, because JAX finds no GPU" if kind == "CPU" else named

    @property
    def layout(self) -> str:
        """Return what decides where arrays are, to be compared between processes."""
        return f"{self.axes}, shard {self._shard}"

    @property
    def is_single(self) -> bool:
        """Whether there is one device, and so nothing is split."""
        return not self.axes

    def placement(
        self, function: Function, donate: Sequence[str], shapes: Mapping[str, Shape], lead: int
    ) -> Placement | None:
        """Return where the arrays of a function are; None for a single device.

        shapes: of the arguments that are not donated. lead: axes of these before those of the
        parameter's type.
        """
        if self._mesh is None:
            return None
        own = {n: function.param(n).type.concrete({}) for n in donate}
        self._say_unsplit(own)
        state = [self.of_state(n, x) for n, x in own.items()]
        batch = [self.of_batch(function.param(n), x, lead) for n, x in shapes.items()]
        return Placement(state, batch, self._sharding())

    def check(self, function: Function, state: Sequence[str]) -> None:
        """Refuse patterns that name no state, axes that do not divide, and strategies by node."""
        own = next((n for n in function.walk() if n.strategy and self._mesh is not None), None)
        if own is not None:
            raise InvalidInput(
                f"{own.op} at {own.meta.location or 'an unknown line'} has a strategy of its own, "
                f"which the mesh {self._named()} does not carry out; use parallel='auto' and "
                "devices=N, which plans around it"
            )
        for pattern in self._shard:
            if state and not any(_matches(name, pattern) for name in state):
                near = suggestion(pattern, state)
                raise InvalidInput(f"shard names {pattern!r}, and no state has such a name{near}")
        for name in state:
            self._axes_of(name, function.param(name).type.concrete({}))

    def of_state(self, name: str, shape: Shape) -> Any:
        """Return the sharding of a state tensor."""
        return self._sharding(*self._axes_of(name, shape))

    def of_batch(self, param: Value, shape: Shape, lead: int = 0) -> Any:
        """Return the sharding of an argument that is not donated: its rows are split over `data`.

        Rows that do not divide evenly are computed on every device: the last batch of an epoch.
        lead: axes before those of the parameter's type.
        """
        own = param.type.shape
        if not (own and is_symbol(own[0])):
            return self._sharding() if lead else self.of_state(param.name, shape)
        if DATA in self.axes and shape[lead] and shape[lead] % self.axes[DATA] == 0:
            return self._sharding(*[None] * lead, DATA)
        if DATA in self.axes:
            self._say_whole(shape[lead])
        return self._sharding()

    def _say_whole(self, rows: int) -> None:
        """Say once for each number of rows that all devices compute such batches."""
        if rows not in self._whole:
            self._whole.add(rows)
            self.say(
                f"a batch of {rows} rows does not divide by {DATA}={self.axes[DATA]}: each device "
                "computes all of it, which is right, but not faster"
            )

    def _say_unsplit(self, state: Mapping[str, Shape]) -> None:
        """Say once for each pattern of `shard` that it splits no tensor."""
        for pattern in self._unsplit.copy() if state else ():
            self._unsplit.remove(pattern)
            named = [n for n in state if _matches(n, pattern)]
            if named and not any(self._axes_of(n, state[n]) for n in named):
                self.say(
                    f"shard {pattern!r} splits none of the {len(named)} tensors of such names, "
                    f"such as {named[0]} of shape {state[named[0]]}: each device has all of them"
                )

    def place(self, name: str, x: Any) -> Any:
        """Return a copy of a state tensor where it belongs."""
        if self.processes is not None:
            return self.processes.put([x], [self.of_state(name, x.shape)])[0]
        # A copy: on a CPU JAX would otherwise read the caller's memory, which may change.
        copied = jax.numpy.array(x, copy=True)
        if self._mesh is None:
            return copied
        return jax.device_put(copied, self.of_state(name, copied.shape))

    def _axes_of(self, name: str, shape: Shape) -> Axes:
        """Return the axes of the first pattern that names a tensor; none if it cannot be split."""
        for pattern, axes in self._shard.items():
            if _matches(name, pattern):
                return self._fitting(name, pattern, axes, shape)
        return ()

    def _fitting(self, name: str, pattern: str, axes: Axes, shape: Shape) -> Axes:
        parts = [self.axes[a] if a else 1 for a in axes]
        fits = len(axes) <= len(shape) and all(
            size % n == 0 for size, n in zip(shape, parts, strict=False)
        )
        # A name is a demand; a pattern, or a slot of another shape, is a rule with exceptions.
        if not fits and name == pattern:
            raise InvalidInput(
                f"{name!r} has the shape {shape}, which {axes} does not divide: the mesh has "
                f"{self._named()}; split another axis, or use a pattern, which leaves whole what "
                "does not divide"
            )
        return axes if fits else ()

    def _named(self) -> str:
        return ", ".join(f"{name}={n}" for name, n in self.axes.items())

    def _sharding(self, *axes: str | None) -> Any:
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*axes))


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern names a tensor, or the parameter whose slot it is."""
    if fnmatchcase(name, pattern):
        return True
    path = name.removeprefix(SLOT).partition(".")[2] if name.startswith(SLOT) else ""
    return bool(path) and not pattern.startswith(SLOT) and fnmatchcase(path, pattern)


def _check_axes(mesh: Mapping[str, int], shard: Mapping[str, Axes]) -> None:
    for name, n in mesh.items():
        if type(n) is not int or n < 1 or not name:
            raise InvalidInput(
                f"the axis {name!r} of a mesh needs a number of devices >= 1, got {n!r}"
            )
    if shard and not mesh:
        raise InvalidInput("shard splits state over a mesh; give one, such as data=2,model=2")
    used = {DATA, *(axis for axes in shard.values() for axis in axes)}
    for name, n in mesh.items():
        if n > 1 and name not in used:
            raise InvalidInput(
                f"nothing is split over the axis {name!r} of the mesh: a batch is split over "
                f"{DATA!r}, and state as shard says, as in '*.weight={name},-'; leave the axis out "
                "or name it there"
            )
    for pattern, axes in shard.items():
        for axis in axes:
            if axis is not None and axis not in mesh:
                raise InvalidInput(
                    f"shard splits {pattern!r} over {axis!r}; the mesh has the axes "
                    f"{', '.join(mesh)}{suggestion(axis, mesh)}"
                )


def _check_shard(shard: Mapping[str, Sequence[str | None]]) -> None:
    for pattern, axes in shard.items():
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise InvalidInput(
                f"shard gives {pattern!r} an axis of the mesh or None for each of its axes, such "
                f"as ('data', None), got {axes!r}"
            )
        over = [a for a in axes if a is not None]
        if twice := [a for a in over if over.count(a) > 1]:
            raise InvalidInput(
                f"shard splits {pattern!r} twice over {twice[0]!r}; once is possible"
            )


def _first(axes: Mapping[str, int]) -> list[Any]:
    """Return as many devices as the mesh has places."""
    named = ",".join(f"{name}={n}" for name, n in axes.items())
    return first_devices(prod(axes.values()), f"the mesh {named}")


def first_devices(wanted: int, what: str) -> list[Any]:
    """Return so many devices; InvalidInput if JAX has fewer, in the name of what needs them."""
    there = jax_devices()
    if len(there) < wanted:
        kind = there[0].platform.upper()
        way = (
            "; JAX_NUM_CPU_DEVICES=N in the environment splits a CPU into N of them"
            if kind == "CPU"
            else ""
        )
        raise InvalidInput(
            f"{what} needs {wanted} devices, and JAX finds {len(there)} ({kind}){way}"
        )
    return list(there[:wanted])


def sizes_of(function: Function, shapes: Mapping[str, Shape], lead: int) -> dict[str, int]:
    """Return a number for each symbol of arguments, by their shapes; see `Devices.placement`."""
    return {
        str(d): n
        for name, shape in shapes.items()
        for d, n in zip(function.param(name).type.shape, shape[lead:], strict=True)
        if is_symbol(d)
    }

"""Devices that a plan splits a function over: `parallel="auto"`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.devices import Placement, Shape, first_devices, sizes_of
from triplane.unified_ir.engines.xla.door import jax, jax_devices
from triplane.unified_ir.engines.xla.processes import Processes
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.text import strategy_text
from triplane.unified_ir.passes.sharding import ParallelPlan, Topology, plan
from triplane.unified_ir.passes.sharding.problem import with_dividing_strategies
from triplane.unified_ir.passes.sharding.report import time_text


class PlannedDevices:
    """A number of devices (None: all), over which functions are split as the planner decides.

    A function is planned for each combination of its sizes, around the strategies in its code; one
    that the sizes of a batch do not divide is left to the planner for that batch.
    memory_bytes: what one device has. say: called with a line on each plan. InvalidInput: JAX has
    fewer devices.
    """

    def __init__(
        self, count: int | None, *, memory_bytes: int | None = None,
        topology: Topology | None = None,
    ) -> None:  # fmt: skip
        for name, number in (("devices", count), ("memory_bytes", memory_bytes)):
            if number is not None and (type(number) is not int or number < 1):
                raise InvalidInput(f"{name} is a whole number >= 1, got {number!r}")
        if not isinstance(topology, Topology | None):
            raise InvalidInput(
                f"topology is a Topology, got {topology!r}; a file of rates becomes one with "
                "passes.sharding.read_topology(PATH)"
            )
        self._devices = first_devices(count or len(jax_devices()), 'parallel="auto"')
        self._memory_bytes, self._topology = memory_bytes, topology
        self.processes: Processes | None = None
        self.say: Callable[[str], None] = lambda _: None
        self.plans: list[ParallelPlan] = []
        """The plans so far, the newest last."""

    is_single = False
    revision = 0
    """See `Devices`."""

    def __str__(self) -> str:
        kind = self._devices[0].platform.upper()
        by = "" if self.processes is None else f"; {self.processes.hosts}"
        return f"{len(self._devices)} of {len(jax_devices())} x {kind}, split by a plan{by}"

    @property
    def layout(self) -> str:
        """Return what decides the plans, to be compared between processes."""
        count, limit = len(self._devices), self._memory_bytes
        return f"planned for {count} devices of {limit} bytes at {self._topology}"

    def check(self, function: Function, state: Sequence[str]) -> None:
        """Accept any function: what has no rule is computed by every device."""

    def placement(
        self, function: Function, donate: Sequence[str], shapes: Mapping[str, Shape], lead: int
    ) -> Placement:
        """Plan a function for these shapes; see `Devices.placement`."""
        sizes = sizes_of(function, shapes, lead)
        divided = with_dividing_strategies(function, sizes)
        best = plan(
            divided, len(self._devices), sizes=sizes, memory_bytes=self._memory_bytes,
            topology=self._topology,
        )  # fmt: skip
        self.plans.append(best)
        self.say(_line(best, sizes) + _left_out(function, divided))
        shardings = Shardings(best, self._devices)
        layouts = best.layouts()
        return Placement(
            [shardings.of(layouts[n]) for n in donate],
            [shardings.of(layouts[n], lead) for n in shapes],
            shardings.of((-1,) * len(best.mesh)),
            shardings.of_nodes(),
        )

    def place(self, _name: str, x: Any) -> Any:
        """Return a copy of a state tensor; the first run puts it where the plan wants it."""
        return jax.numpy.array(x, copy=True)


class Shardings:
    """Layouts of a plan as JAX's shardings."""

    def __init__(self, best: ParallelPlan, devices: Sequence[Any]) -> None:
        self._plan = best
        self._names = tuple(f"axis{i}" for i in range(len(best.mesh)))
        self._mesh = jax.sharding.Mesh(np.array(devices).reshape(best.mesh), self._names)

    def of(self, layout: Sequence[int], lead: int = 0) -> Any:
        """Return the sharding of a layout: for each axis of the mesh, the axis that it cuts."""
        cuts: list[list[str]] = [[] for _ in range(lead + max(layout, default=-1) + 1)]
        for name, axis in zip(self._names, layout, strict=True):
            if axis >= 0:
                cuts[lead + axis].append(name)
        axes = [tuple(c) or None for c in cuts]
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*axes))

    def of_nodes(self) -> dict[int, tuple[list[Any], list[Any]]]:
        """Return the shardings of the operands and outputs of each node that has a strategy."""
        wanted = {}
        for i in self._plan.strategies():
            strategy = self._plan.strategy(i)
            assert strategy is not None
            wanted[i] = (
                [self.of(layout) for layout in strategy.operands],
                [self.of(layout) for layout in strategy.outputs],
            )
        return wanted


def _left_out(function: Function, divided: Function) -> str:
    """Say which strategies in code a plan is without, as their slices do not divide."""
    pairs = zip(function.nodes, divided.nodes, strict=True)
    lost = [node for node, kept in pairs if node.strategy != kept.strategy]
    if not lost:
        return ""
    first = f"{strategy_text(lost[0].strategy)} of {lost[0].op} at {lost[0].meta.location}"
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"; planned freely, as its slices do not divide: {first}{more}"


def _line(best: ParallelPlan, sizes: Mapping[str, int]) -> str:
    named = ", ".join(f"{k}={n}" for k, n in sizes.items())
    other = best.next_best
    beside = "" if other is None else f"; next best: {other.what}, {time_text(other.seconds)}"
    mesh = " x ".join(map(str, best.mesh))
    took = f"{time_text(best.seconds)} predicted at {best.problem.topology.source}"
    return f"plan for {named or 'fixed sizes'}: mesh {mesh}, {took}{beside}"

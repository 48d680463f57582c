"""Data parallelism with explicit all-reduces: gradients are added in the buckets of a plan.

XLA's own partitioner adds each gradient where it is first read, and then joins all-reduces as it
likes. Here each device computes its rows of the batch (`shard_map`), and the all-reduces are those
of the buckets, in their order. The numbers stay those of the whole batch: divisors are global, and
what needs rows of other devices is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.bucket_choice import BucketChoices
from triplane.unified_ir.engines.xla.devices import DATA, Devices, Placement, Shape, sizes_of
from triplane.unified_ir.engines.xla.door import jax, jnp, lax
from triplane.unified_ir.engines.xla.lower import Requirements, Trace
from triplane.unified_ir.engines.xla.ready_times import measured_times
from triplane.unified_ir.ir.dims import evaluate
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ops.build import note_contents
from triplane.unified_ir.ops.row import Known
from triplane.unified_ir.ops.table import row_of
from triplane.unified_ir.passes.sharding import Topology
from triplane.unified_ir.passes.sharding.batch_split import (
    WAY_OUT,
    BatchSplit,
    PartialResult,
    is_shape_of_result,
    split_batch,
)
from triplane.unified_ir.passes.sharding.buckets import (
    AUTO,
    BucketPlan,
    GradientBuckets,
    check_buckets,
    planned_buckets,
    table,
)
from triplane.unified_ir.passes.sharding.report import bytes_text, time_text

RunUpTo = Callable[[int], Callable[[], Any]]
"""See `BucketedFunction.decide`."""
_UNSEEN: Final = np.int32(0x7FC0BEEF)
"""The bits of a NaN that no arithmetic gives."""


class BucketedDevices(Devices):
    """A mesh with the axis `data` alone, on which training steps add gradients in buckets.

    buckets: "auto" for the plan that ends the earliest by ready times that are measured before the
    first step, and the rates of a topology; "one"; or the bytes of each. One choice holds for
    batches of all sizes. InvalidInput: the mesh has other axes, or a step cannot work on parts of a
    batch.
    """

    def __init__(
        self, mesh: Mapping[str, int] | None, buckets: str | int, topology: Topology | None = None
    ) -> None:
        self._how = check_buckets(buckets)
        if not isinstance(mesh, Mapping) or set(mesh) != {DATA}:
            raise InvalidInput(
                "buckets belong to plain data parallelism, a mesh with the one axis 'data' such as "
                f"data=4; the mesh is {mesh or 'not given'}"
            )
        super().__init__(mesh)
        self._topology = topology or Topology()
        self._choices = BucketChoices()
        self.plans: list[BucketPlan] = []
        """The buckets so far, the newest last."""

    def __str__(self) -> str:
        return f"{super().__str__()}, gradients in buckets"

    @property
    def layout(self) -> str:
        """See `Devices.layout`."""
        chosen = f", chosen: {self._choices}" if self._how == AUTO else ""
        return f"{super().layout}, buckets {self._how} at {self._topology}{chosen}"

    def state_dict(self) -> Mapping[str, Array]:
        """Return what was chosen by measured times."""
        return self._choices.state() if self._how == AUTO else {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take what a checkpoint holds in place of what would be measured; see `BucketChoices`."""
        if self._how == AUTO and self._choices.load(state):
            self.revision += 1

    def placement(
        self, function: Function, donate: Sequence[str], shapes: Mapping[str, Shape], lead: int
    ) -> Placement | None:
        """See `Devices.placement`; only functions that update state have gradients to add."""
        where = super().placement(function, donate, shapes, lead)
        updates = set(donate) & set(function.result_names)
        if where is None or not updates or not any(DATA in batch.spec for batch in where.batch):
            return where
        sizes = sizes_of(function, shapes, lead)
        split = split_batch(function, self.axes[DATA], sizes=sizes, topology=self._topology)
        return replace(where, buckets=BucketedStep(split, self._chosen, self._mesh))

    def _chosen(self, split: BatchSplit, run_up_to: RunUpTo) -> BucketPlan:
        """Return the buckets of a step, after saying them."""
        link = self._topology.link((split.devices,), 0)
        buckets = planned_buckets(split, link)
        measures = self._how == AUTO and buckets.parts
        plan = self._choices.of(buckets) if measures else buckets.chosen(self._how)
        if plan is None:
            measured = measured_times(buckets.predicted_s, run_up_to, self._agreed)
            buckets = planned_buckets(split, link, measured)
            for line in table(buckets):
                self.say(line)
            # Rounding may differ between hosts, and programs must not.
            ends = self._agreed("buckets", list(buckets.chosen(AUTO).ends))
            plan = buckets.ending_at("planned", ends)
            self._choices.keep(buckets, plan)
        self.plans.append(plan)
        self.say(_line(plan, buckets, self._topology.source))
        return plan

    def _agreed(self, what: str, value: Any) -> Any:
        return value if self.processes is None else self.processes.agreed(what, value)


def _line(plan: BucketPlan, buckets: GradientBuckets, source: str) -> str:
    total = bytes_text(sum(t.size_bytes for t in buckets.tensors))
    times = "" if buckets.measured is None else ", by measured ready times and"
    return (
        f"gradient buckets: {plan.what}, {len(plan.buckets)} of {total} in all, predicted to end "
        f"{time_text(plan.exposed_s)} after the backward pass{times} at {source}"
    )


class BucketedStep:
    """A function that each device runs on its rows of the batch, with the all-reduces of a plan.

    choose: returns the plan, see `BucketedFunction.decide`.
    """

    def __init__(
        self, split: BatchSplit, choose: Callable[[BatchSplit, RunUpTo], BucketPlan], mesh: Any
    ) -> None:
        self._split, self._choose, self._mesh = split, choose, mesh
        self._gradients = split.gradients()
        self._buckets: list[list[PartialResult]] = []
        self._parts = {p.value: p for p in split.partial}
        self._waits = _after(split.function, {p.value for p in self._gradients})

    def decide(self, run_up_to: RunUpTo) -> None:
        """See `BucketedFunction`."""
        plan = self._choose(self._split, run_up_to)
        self._buckets = [[self._gradients[k] for k in bucket] for bucket in plan.buckets]

    def up_to(self, number: int, args: Sequence[Any], *, kernels: bool) -> list[Any]:
        """See `BucketedFunction`."""
        parts = self._gradients[: number + 1]

        def on_one(args: Sequence[Any]) -> list[Any]:
            run = self._run(Requirements(), None, kernels=kernels)
            return run.up_to(self, args, parts)

        return list(self._mapped(on_one, (self._specs(),))(list(args)))

    def __call__(
        self,
        requirements: Requirements,
        args: Sequence[Any],
        old: Sequence[Any],
        failed: Any,
        *,
        kernels: bool,
    ) -> tuple[list[Any], Any]:
        """Return the results, whole on each device, and which requirement failed on any device.

        old, failed, kernels: see `Trace`.
        """
        spec = jax.sharding.PartitionSpec()
        state = [x is not None for x in old]

        def on_one(args: Sequence[Any], held: Sequence[Any], failed: Any) -> Any:
            fed = iter(held)
            old = [next(fed) if is_state else None for is_state in state]
            return self._run(requirements, failed, kernels=kernels).run(self, args, old)

        held = [x for x in old if x is not None]
        mapped = self._mapped(on_one, (self._specs(), spec, spec))
        results, failed = mapped(list(args), held, failed)
        return list(results), failed

    def _specs(self) -> list[Any]:
        """Return how the arguments are split."""
        spec, axes = jax.sharding.PartitionSpec, self._split.axes
        return [
            spec(*[None] * axes[p], DATA) if p in axes else spec()
            for p in self._split.function.params
        ]

    def _mapped(self, on_one: Callable[..., Any], specs: Any) -> Any:
        # Each all-reduce makes its results whole, which JAX's own check cannot follow.
        return jax.shard_map(
            on_one, mesh=self._mesh, in_specs=specs, out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )  # fmt: skip

    def _run(self, requirements: Requirements, failed: Any, *, kernels: bool) -> _DeviceRun:
        whole = Trace(requirements, dict(self._split.sizes), failed, kernels=kernels)
        part = _PartTrace(requirements, dict(self._split.local_sizes), kernels=kernels)
        return _DeviceRun(self._split, whole, part)

    def reduced(self, values: Mapping[Value, Any]) -> dict[Value, Any]:
        """Return the gradients, added over the devices bucket by bucket, each after the last."""
        done: dict[Value, Any] = {}
        last = None
        for bucket in self._buckets:
            for dtype in dict.fromkeys(p.value.type.dtype for p in bucket):
                alike = [p for p in bucket if p.value.type.dtype == dtype]
                arrays = [values[p.value] for p in alike]
                flat = _following(_joined(arrays), last)
                added = lax.psum(flat, DATA)
                last = added[0] if added.size else last
                for part, x in zip(alike, _parted(added, arrays), strict=True):
                    done[part.value] = self._as_result(part, x)
        return done

    def awaited(self, value: Value, x: Any) -> Any:
        """Return a value that later parts depend on, added over the devices now."""
        part = self._parts.get(value)
        if part is None or not part.is_awaited:
            return x
        return self._as_result(part, lax.psum(x, DATA))

    def waits(self, node: Node) -> bool:
        """Return whether a node depends on gradients that the buckets add."""
        return any(v in self._waits for v in node.outputs)

    def _as_result(self, part: PartialResult, x: Any) -> Any:
        return x / self._split.devices if part.is_mean else x


class _PartTrace(Trace):
    """Nodes that work on a device's rows."""

    def batch_statistics(self, x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
        """See `XlaContext`."""
        # In float32 at least, as `jax.numpy.var` does.
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = lax.pmean(wide.mean(axes, keepdims=True), DATA)
        var = lax.pmean(((wide - mean) ** 2).mean(axes), DATA)
        return mean.reshape(var.shape).astype(x.dtype), var.astype(x.dtype)


class _DeviceRun:
    """One device's run of a function: on its parts of values, and on those that are whole."""

    def __init__(self, split: BatchSplit, whole: Trace, part: Trace) -> None:
        """whole, part: of the nodes that work on whole values, and on this device's rows."""
        self._split, self._whole, self._part = split, whole, part
        self._sources = {v: n for n in split.function.nodes for v in n.outputs}
        self._contents: dict[Value, Known] = {}
        self._values: dict[Value, Any] = {}

    def run(
        self, step: BucketedStep, args: Sequence[Any], old: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """Return the results and the number of the requirement that failed on any device."""
        function, values = self._split.function, self._values
        stays = {r: x for r, x in zip(function.results, old, strict=True) if x is not None}
        self._run_before(step, args, len(function.nodes))
        values |= step.reduced(values)
        if self._part.failed is not None:
            self._whole.merge(lax.pmax(self._part.failed, DATA))
        for i, node in enumerate(function.nodes):
            if step.waits(node):
                for value, x in zip(node.outputs, self._run(i, node), strict=True):
                    keeps = value in stays and not isinstance(x, np.ndarray)
                    values[value] = self._whole.kept(value, x, stays[value]) if keeps else x
        results = [
            self._whole.kept(r, jnp.asarray(values[r]), x)
            for r, x in zip(function.results, old, strict=True)
        ]
        return results, self._whole.failed

    def up_to(
        self, step: BucketedStep, args: Sequence[Any], parts: Sequence[PartialResult]
    ) -> list[Any]:
        """Return this device's own parts of results, after the nodes up to that of the last."""
        self._run_before(step, args, parts[-1].node + 1)
        return [jnp.asarray(self._values[p.value]) for p in parts]

    def _run_before(self, step: BucketedStep, args: Sequence[Any], end: int) -> None:
        """Run the nodes before a number that wait for no bucket."""
        function = self._split.function
        self._values |= dict(zip(function.params, args, strict=True))
        for i, node in enumerate(function.nodes[:end]):
            if not step.waits(node):
                for value, x in zip(node.outputs, self._run(i, node), strict=True):
                    self._values[value] = step.awaited(value, x)

    def _run(self, index: int, node: Node) -> Sequence[Any]:
        work = self._split.work.get(index)
        if work is None:
            operands = [None if v is None else self._values[v] for v in node.inputs]
            results = self._whole.lowered(node, operands, self._contents)
        else:
            operands = [self._taken(node, v, a) for v, a in zip(node.inputs, work, strict=True)]
            results = self._part.lowered(node, operands, self._contents)
            self._check_shapes(node, results)
        note_contents(row_of(node), node, self._contents)
        return results

    def _taken(self, node: Node, value: Value | None, axis: int) -> Any:
        """Return the part of an operand that this device works on."""
        if value is None:
            return None
        x, source = self._values[value], self._sources.get(value)
        if source is not None and is_shape_of_result(node, source):
            return np.array(self._local_shape(node.outputs[0]), x.dtype)
        if axis < 0 or value in self._split.axes:
            return x
        size = x.shape[axis] // self._split.devices
        start = lax.axis_index(DATA) * size
        return lax.dynamic_slice_in_dim(jnp.asarray(x), start, size, axis)

    def _local_shape(self, value: Value) -> Shape:
        shape = [evaluate(d, self._split.sizes) for d in value.type.shape]
        if value in self._split.axes:
            shape[self._split.axes[value]] //= self._split.devices
        return tuple(shape)

    def _check_shapes(self, node: Node, results: Sequence[Any]) -> None:
        """Refuse a node that has used the sizes of the whole batch for a part of it."""
        for value, x in zip(node.outputs, results, strict=False):
            if x.shape != self._local_shape(value):
                place = f" (at {node.meta.location})" if node.meta.location else ""
                raise InvalidInput(
                    f"{node.op}{place} gives {x.shape} for one device's rows, and "
                    f"{self._local_shape(value)} is its part; {WAY_OUT}"
                )


def _after(function: Function, values: set[Value]) -> set[Value]:
    """Return what depends on these values, without themselves."""
    late: set[Value] = set()
    for node in function.nodes:
        if any(v in values or v in late for v in node.inputs if v is not None):
            late.update(node.outputs)
    return late


def _joined(arrays: Sequence[Any]) -> Any:
    flat = [x.reshape(-1) for x in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def _parted(flat: Any, like: Sequence[Any]) -> list[Any]:
    ends = np.cumsum([x.size for x in like])
    return [
        flat[end - x.size : end].reshape(x.shape)
        for end, x in zip(ends.tolist(), like, strict=True)
    ]


def _following(flat: Any, last: Any) -> Any:
    """Return an array that depends on an element of the last all-reduce, in XLA's eyes only.

    XLA joins all-reduces that do not depend on each other into one (on a CPU it joins all of them,
    and a barrier does not stop it), and a link carries one after the other anyway.
    """
    if last is None:
        return flat
    bits = lax.bitcast_convert_type(last.astype(jnp.float32), jnp.int32)
    return jnp.where(bits != _UNSEEN, flat, last.astype(flat.dtype))

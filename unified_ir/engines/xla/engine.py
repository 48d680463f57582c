"""The engine: its devices and options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Literal

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.engines.pipelined import PipelineStep
from triplane.unified_ir.engines.xla.bucketed import BucketedDevices
from triplane.unified_ir.engines.xla.devices import DATA, Devices
from triplane.unified_ir.engines.xla.door import jax_devices
from triplane.unified_ir.engines.xla.hosts import Hosts
from triplane.unified_ir.engines.xla.pipeline_program import PipelineProgram, StageDevices
from triplane.unified_ir.engines.xla.planned import PlannedDevices
from triplane.unified_ir.engines.xla.processes import join
from triplane.unified_ir.engines.xla.program import XlaProgram
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ops.rows.control.custom_ops import with_kernels
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.sharding import Topology
from triplane.unified_ir.passes.sharding.problem import with_strategies_outside
from triplane.unified_ir.passes.sharding.topology import assumed_topology


class XlaEngine:
    """JAX/XLA on the first device that JAX finds, a GPU if there is one, or on a mesh of devices.

    mesh: devices by axis; a batch is split over the axis `data`. shard: for patterns of names of
    state, the axis of the mesh over which each axis is split, as in {"*.weight": ("model", None)};
    slots of the optimizer follow their parameter unless a pattern names them, as in
    {"optimizer.*": ("data",)}. parallel="auto": split each function over `devices` (by default all)
    as the planner decides around the strategies in its code (docs/parallel.md), within memory_bytes
    on each, at the rates of a topology. buckets: with mesh={"data": N}, add gradients in the
    all-reduces that end the earliest by measured ready times and the topology's rates ("auto"), in
    one ("one"), or in buckets of so many bytes. stages, microbatches: run training steps as a
    pipeline, a stage of the layers on each device, within memory_bytes too
    (docs/parallel.md#pipeline-stages); with mesh={"data": N}, as N of them. hosts: this process is
    one of several, whose devices together form the mesh (by default all of them over `data`); see
    docs/many_hosts.md. deterministic: a GPU gives the same bits again, also in another process; XLA
    then uses no kernel whose sums depend on timing, and tries out none, which may take longer. A
    CPU does so in any case. `str(engine.devices)` says which devices are used, and why.
    """

    name = "xla"
    state_key = "engine.xla"
    """See `HasState`."""

    def __init__(
        self,
        *,
        mesh: Mapping[str, int] | None = None,
        shard: Mapping[str, Sequence[str | None]] | None = None,
        parallel: Literal["auto"] | None = None,
        devices: int | None = None,
        memory_bytes: int | None = None,
        topology: Topology | None = None,
        buckets: Literal["auto", "one"] | int | None = None,
        stages: int | None = None,
        microbatches: int | None = None,
        hosts: Hosts | None = None,
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        self.stages = stages
        """Stages of the pipeline in which training steps run; None for none."""
        self.devices: Devices | PlannedDevices | StageDevices
        if stages is not None:
            others = (parallel, devices, buckets, hosts) != (None,) * 4 or shard
            if others or set(mesh or {}) - {DATA}:
                raise InvalidInput(
                    "stages takes a device of this process for each stage; beside it there is "
                    "mesh={'data': N}, but no other axis, shard, parallel, devices, buckets, hosts"
                )
            self.processes = None
            self.devices = StageDevices(
                stages, microbatches, replicas=(mesh or {}).get(DATA, 1),
                memory_bytes=memory_bytes, topology=topology,
            )  # fmt: skip
            return
        if microbatches is not None:
            raise InvalidInput("microbatches are those of a pipeline; give stages too")
        rates = topology if buckets is None else None
        if parallel is None and (devices, memory_bytes, rates) != (None, None, None):
            raise InvalidInput("devices, memory_bytes and topology belong to parallel='auto'")
        if buckets is not None and (parallel is not None or shard):
            raise InvalidInput("buckets belong to a mesh with the axis 'data' alone")
        if parallel is not None:
            check_choice("parallel", parallel, ("auto",))
            if mesh or shard:
                raise InvalidInput("parallel='auto' chooses mesh and shard; give one or the other")
        self.processes = None if hosts is None else join(hosts)
        if self.processes is not None:
            mesh = mesh or ({DATA: len(jax_devices())} if parallel is None else None)
            topology = topology or assumed_topology(self.processes.devices_per_host)
        if parallel is not None:
            self.devices = PlannedDevices(devices, memory_bytes=memory_bytes, topology=topology)
        elif buckets is not None:
            self.devices = BucketedDevices(mesh, buckets, topology)
        else:
            self.devices = Devices(mesh, shard)
        self.devices.processes = self.processes
        if hosts is not None:
            axes = self.devices.axes if isinstance(self.devices, Devices) else {}
            _check_all_used(prod(axes.values()) if axes else devices)

    def state_dict(self) -> Mapping[str, Array]:
        """Return which buckets were chosen by measured times; empty if none were."""
        return self.devices.state_dict() if isinstance(self.devices, BucketedDevices) else {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take the buckets of a checkpoint in place of those that would be chosen by measures."""
        if isinstance(self.devices, BucketedDevices):
            self.devices.load_state_dict(state)

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> XlaProgram:
        """See `Engine`. With stages, all but training steps run whole on the first device."""
        devices = Devices() if isinstance(self.devices, StageDevices) else self.devices
        if isinstance(devices, PlannedDevices):
            function = with_strategies_outside(function)
        return XlaProgram(
            with_kernels(TABLE, function, self.name), donate, devices,
            deterministic=self.deterministic,
        )  # fmt: skip

    def compile_pipeline(self, step: PipelineStep, *, donate: Collection[str]) -> PipelineProgram:
        """See `PipelineEngine`."""
        assert isinstance(self.devices, StageDevices)

        def own(function: Function) -> Function:
            return with_kernels(TABLE, function, self.name)

        parts = replace(
            step,
            function=own(step.function),
            forward=own(step.forward),
            update=own(step.update),
        )
        return PipelineProgram(parts, donate, self.devices, deterministic=self.deterministic)


def _check_all_used(devices: int | None) -> None:
    """Refuse a number of devices that leaves some process without one; None: all."""
    there = len(jax_devices())
    if devices not in {None, there}:
        raise InvalidInput(
            f"a run of several processes uses all their devices, {there}, got {devices}; each "
            "process must have a part in the mesh"
        )

"""The engine: its devices and options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.engines.xla.devices import Devices
from triplane.unified_ir.engines.xla.planned import PlannedDevices
from triplane.unified_ir.engines.xla.program import XlaProgram
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ops.rows.control.custom_ops import with_kernels
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.sharding import Topology


class XlaEngine:
    """JAX/XLA on the first device that JAX finds, a GPU if there is one, or on a mesh of devices.

    mesh: devices by axis; a batch is split over the axis `data`. shard: for patterns of names of
    state, the axis of the mesh over which each axis is split, as in {"*.weight": ("model", None)};
    slots of the optimizer follow their parameter unless a pattern names them, as in
    {"optimizer.*": ("data",)}. parallel="auto": split each function over `devices` (by default all)
    as the planner decides around the strategies in its code (docs/parallel.md), within memory_bytes
    on each, at the rates of a topology. deterministic: a GPU gives the same bits again, also in
    another process; XLA then uses no kernel whose sums depend on timing, and tries out none, which
    may take longer. A CPU does so in any case. `str(engine.devices)` says which devices are used,
    and why.
    """

    name = "xla"

    def __init__(
        self,
        *,
        mesh: Mapping[str, int] | None = None,
        shard: Mapping[str, Sequence[str | None]] | None = None,
        parallel: Literal["auto"] | None = None,
        devices: int | None = None,
        memory_bytes: int | None = None,
        topology: Topology | None = None,
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        if parallel is None and (devices, memory_bytes, topology) != (None, None, None):
            raise InvalidInput("devices, memory_bytes and topology belong to parallel='auto'")
        if parallel is not None:
            check_choice("parallel", parallel, ("auto",))
            if mesh or shard:
                raise InvalidInput("parallel='auto' chooses mesh and shard; give one or the other")
        self.devices: Devices | PlannedDevices = (
            Devices(mesh, shard)
            if parallel is None
            else PlannedDevices(devices, memory_bytes=memory_bytes, topology=topology)
        )

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> XlaProgram:
        """See `Engine`."""
        return XlaProgram(
            with_kernels(TABLE, function, self.name), donate, self.devices,
            deterministic=self.deterministic,
        )  # fmt: skip

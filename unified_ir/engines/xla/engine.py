"""The engine: its devices and options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from triplane.unified_ir.engines.xla.devices import Devices
from triplane.unified_ir.engines.xla.program import XlaProgram
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ops.rows.control.custom_ops import with_kernels
from triplane.unified_ir.ops.table import TABLE


class XlaEngine:
    """JAX/XLA on the first device that JAX finds, a GPU if there is one, or on a mesh of devices.

    mesh: devices by axis; a batch is split over the axis `data`. shard: for patterns of names of
    state, the axis of the mesh over which each axis is split, as in {"*.weight": ("model", None)};
    slots of the optimizer follow their parameter unless a pattern names them, as in
    {"optimizer.*": ("data",)}. `str(engine.devices)` says which devices are used, and why.
    """

    name = "xla"

    def __init__(
        self,
        *,
        mesh: Mapping[str, int] | None = None,
        shard: Mapping[str, Sequence[str | None]] | None = None,
    ) -> None:
        self.devices = Devices(mesh, shard)

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> XlaProgram:
        """See `Engine`."""
        return XlaProgram(with_kernels(TABLE, function, self.name), donate, self.devices)

"""Which devices a program runs on, and which part of each array each of them holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.door import jax
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.graph import Value

DATA: Final = "data"
"""The axis of a mesh over which a batch is split."""


class Devices:
    """The devices of an engine: the first one, or a mesh over which each batch is split.

    State is whole on each device. XLA splits the work as the batch is split and adds what must be
    added, so a program computes what it computes on one device, in another order of sums.
    """

    def __init__(self, mesh: Mapping[str, int] | None = None) -> None:
        self.axes = dict(mesh or {})
        self._mesh: Any = None
        if mesh:
            _check_axes(self.axes)
            self._mesh = jax.make_mesh(
                tuple(self.axes.values()), tuple(self.axes), devices=_first(self.axes)
            )

    def __str__(self) -> str:
        """Say which devices these are, and why."""
        there = jax.devices()
        first = there[0]
        kind = first.platform.upper()
        named = kind if kind == "CPU" else f"{kind} ({first.device_kind})"
        if self._mesh is not None:
            axes = ", ".join(f"{name}={n}" for name, n in self.axes.items())
            return f"{self._mesh.size} of {len(there)} x {named}, for the mesh {axes}"
        if len(there) > 1:
            return f"{named}, the first of {len(there)}; a mesh data={len(there)} uses them all"
        return f"{named}, because JAX finds no GPU" if kind == "CPU" else named

    @property
    def count(self) -> int:
        """How many parts a batch is split into."""
        return self.axes.get(DATA, 1)

    def whole(self) -> Any:
        """Return the sharding of an array that each device holds whole; None for one device."""
        return self._sharding() if self._mesh is not None else None

    def split(self, params: Sequence[Value], batch: Sequence[Any], *, lead: int = 0) -> Any:
        """Return the shardings of a batch: its rows are split if they divide evenly.

        Rows that do not divide are computed on every device: the last batch of an epoch. lead: axes
        before that of the parameter's type.
        """
        if self._mesh is None:
            return None
        return [self._of(p, x, lead) for p, x in zip(params, batch, strict=True)]

    def place(self, x: Any) -> Any:
        """Return a copy of an array, whole on each device."""
        # A copy: on a CPU JAX would otherwise read the caller's memory, which may change.
        copied = jax.numpy.array(x, copy=True)
        return copied if self._mesh is None else jax.device_put(copied, self._sharding())

    def _of(self, param: Value, x: Any, lead: int) -> Any:
        shape = param.type.shape
        rows = x.shape[lead] if shape and is_symbol(shape[0]) else 0
        if rows and rows % self.count == 0:
            return self._sharding(*[None] * lead, DATA)
        return self._sharding()

    def _sharding(self, *axes: str | None) -> Any:
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*axes))


def _check_axes(axes: Mapping[str, int]) -> None:
    for name, n in axes.items():
        if name != DATA:
            raise InvalidInput(f"a mesh has the axis {DATA!r}, got {name!r}")
        if type(n) is not int or n < 1:
            raise InvalidInput(
                f"the axis {name!r} of a mesh needs a number of devices >= 1, got {n}"
            )


def _first(axes: Mapping[str, int]) -> list[Any]:
    """Return as many devices as the mesh has places."""
    wanted, there = axes[DATA], jax.devices()
    if len(there) < wanted:
        kind = there[0].platform.upper()
        way = (
            "; JAX_NUM_CPU_DEVICES=N in the environment splits a CPU into N of them"
            if there[0].platform == "cpu"
            else ""
        )
        raise InvalidInput(
            f"the mesh {DATA}={wanted} needs {wanted} devices, and JAX finds {len(there)} ({kind})"
            f"{way}"
        )
    return list(there[:wanted])

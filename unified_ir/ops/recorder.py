"""Who records operators: the stack of graphs under construction, innermost last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from triplane.proto.errors import InvalidInput

if TYPE_CHECKING:
    from triplane.unified_ir.ir.dims import Dim
    from triplane.unified_ir.ir.graph import Array, Function, Meta, Value
    from triplane.unified_ir.ir.types import DType
    from triplane.unified_ir.ops.row import Known, Op
    from triplane.unified_ir.ops.tensor import Tensor


class Recorder(Protocol):
    """A graph under construction, as operators and tensors see it."""

    name: str
    table: Mapping[tuple[str, str], Op]
    arrays: dict[Value, Array] | None
    """In eager mode, the array of each value; otherwise None."""

    def apply(
        self,
        row: Op,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
        *,
        regions: tuple[Function, ...] = (),
        outputs: int = 1,
    ) -> tuple[Tensor, ...]:
        """Adds one node; its first `outputs` outputs."""
        ...

    def as_operand(self, x: Any, dtype: DType | None = None) -> Tensor:
        """`x` as a tensor of this graph."""
        ...

    def dims(self, dims: Sequence[Dim]) -> Tensor:
        """Sizes as an int64 vector."""
        ...

    def known(self, tensor: Tensor) -> Known | None:
        """Contents of a constant or of a size vector."""
        ...

    def at(self, meta: Meta) -> AbstractContextManager[None]:
        """Nodes added meanwhile carry `meta`."""
        ...

    def effect(self, name: str, x: Tensor) -> None:
        """Adds a named result beside what the function returns."""
        ...

    def position(self) -> tuple[int, ...]:
        """Distinct for each place in a program."""
        ...


stack: ContextVar[tuple[Recorder, ...]] = ContextVar("triplane_recorders", default=())


def recorder() -> Recorder:
    """The graph being recorded."""
    builds = stack.get()
    if not builds:
        raise InvalidInput(
            "an operator was called outside a graph; call it in a Cell's construct or in a "
            "function decorated with @graph, and call that with arrays"
        )
    return builds[-1]


def recording() -> bool:
    """Whether a graph is being recorded in this context."""
    return bool(stack.get())

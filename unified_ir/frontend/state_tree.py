"""`StateTree`, a tree of named state: the part of a cell that tracing depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter


class StateTree:
    """Holds parameters and other trees by name; `training` is the mode of the whole tree."""

    __slots__ = ("__dict__", "__weakref__", "_programs_")
    _programs_: Any
    """Programs compiled from it, kept by `frontend.run`: no attribute, and not copied with it."""

    _parameters: dict[str, Parameter]
    _cells: dict[str, StateTree]
    training: bool

    def __init__(self) -> None:
        self.__dict__["_parameters"] = {}
        self.__dict__["_cells"] = {}
        self.__dict__["training"] = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """The computation; overridden by every cell."""
        raise InvalidInput(f"{type(self).__name__} has no construct method; define one")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record `construct`, or run it on arrays."""
        raise NotImplementedError

    def cells(self, prefix: str = "") -> Iterator[tuple[str, StateTree]]:
        """Yield this tree and every one below it, with their paths."""
        yield prefix, self
        for name, cell in self._cells.items():
            yield from cell.cells(f"{prefix}.{name}" if prefix else name)

    def parameters(self) -> dict[str, Parameter]:
        """Return all state by path in order of creation; a shared parameter has its first path."""
        by_path: dict[str, Parameter] = {}
        seen: set[Parameter] = set()
        for path, cell in self.cells():
            for name, parameter in cell._parameters.items():  # noqa: SLF001 - same class
                if parameter not in seen:
                    seen.add(parameter)
                    by_path[f"{path}.{name}" if path else name] = parameter
        return by_path

"""Named state: `Parameter`, the tree that owns it, and `Binding`, its tensors during a trace.

A parameter that is read in a trace is a tensor; a buffer that is assigned there has a new value,
which becomes an extra result. An assignment belongs to the graph in which it was made. Branches,
loops and differentiated functions pass it outwards as a result of their own; in any other nested
graph it would be lost, so it is refused there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Final, Self, TypeVar

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.frontend.arguments import check_arguments, name_constructor
from triplane.unified_ir.ir.graph import Array, Role
from triplane.unified_ir.ir.types import DType, TensorType, as_dtype, type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.tensor import Tensor, as_tensor

_T = TypeVar("_T")
LEARNT: Final = frozenset([Role.PARAMETER, Role.PERSONAL])
"""Roles of the state that training changes by gradients."""


class Parameter:
    """A state tensor of a cell: its array, its role, and whether training changes it.

    role: PARAMETER is trained, BUFFER and KEY are assigned by `construct`, PERSONAL is trained but
    never leaves the device. Without `dtype`, a float64 array (numpy's default) becomes float32;
    pass `dtype="float64"` to keep it.
    """

    def __init__(
        self,
        array: Any,
        *,
        role: Role = Role.PARAMETER,
        trainable: bool | None = None,
        dtype: DType | str | None = None,
    ) -> None:
        # A copy: later writes to the caller's array must not change the model.
        value = np.array(array)
        wanted = as_dtype("float32" if value.dtype == np.float64 else value.dtype)
        self.array: Array = value.astype((wanted if dtype is None else as_dtype(dtype)).numpy)
        check_choice("a parameter's role", role, [str(r) for r in Role])
        self.role = Role(role)
        self.trainable = self.role in LEARNT if trainable is None else trainable

    @property
    def type(self) -> TensorType:
        """Element type and shape."""
        return type_of(self.array)

    def __repr__(self) -> str:
        return f"Parameter({self.type}, role={self.role})"

    def __tensor__(self) -> Tensor:
        """The tensor that stands for this parameter in the current trace."""
        return current().read(self)


class StateTree:
    """Holds parameters and other trees by name; `training` is the mode of the whole tree."""

    __slots__ = ("__dict__", "__weakref__", "_programs_")
    _programs_: Any
    """Cache of compiled programs; a slot, so it is no attribute and is not copied or pickled."""

    _parameters: dict[str, Parameter]
    _cells: dict[str, StateTree]
    training: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_constructor(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return the object without state; ArgumentError for arguments that do not fit."""
        check_arguments(cls, args, kwargs)
        return super().__new__(cls)

    def __init__(self) -> None:
        # Written past `Cell.__setattr__`, which needs these entries to exist.
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


UNKNOWN: Final = (
    "make the cell an attribute of the traced cell, an argument of the traced function, or a "
    "variable that the function itself names"
)
MAX_NESTING: Final = 4
"""Containers within containers that are searched for a cell."""


def _holds(value: Any, parameter: Parameter | None, depth: int = 0) -> bool:
    """Return whether a container holds a parameter, or a cell that owns it; None for any."""
    if depth and isinstance(value, (Parameter, StateTree)):
        own = [value] if isinstance(value, Parameter) else value.parameters().values()
        return bool(own) if parameter is None else parameter in own
    if not isinstance(value, (list, tuple, set, dict)) or depth > MAX_NESTING:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds(item, parameter, depth + 1) for item in items)


def container_within(cell: StateTree, parameter: Parameter | None = None) -> str:
    """Name the plain list or dict of a cell that holds the parameter (None for any), else "".

    The name is a sentence that says what to write instead.
    """
    for name, value in vars(cell).items():
        if not name.startswith("_") and _holds(value, parameter):
            return (
                f"{type(cell).__name__}.{name} is a plain {type(value).__name__}, in which cells "
                "are not found: make it nn.CellList([...]) or nn.CellDict({...}), and parameters "
                "attributes of a cell"
            )
    return ""


class Binding:
    """The tensors that stand for parameters during one trace, and the values assigned in it."""

    def __init__(self, home: Build) -> None:
        self.home = home
        """The graph in which assignments are collected at present."""
        self.tensors: dict[Parameter, Tensor] = {}
        self.assigned: dict[Parameter, Tensor] = {}
        self.paths: dict[Any, str] = {}
        """The path of each cell, which is the scope of its nodes."""
        self.frozen = ""
        """Why buffers cannot be assigned at present; empty when they can."""

    def read(self, parameter: Parameter) -> Tensor:
        """Return the parameter's value: the last one assigned, else its value at the start."""
        if parameter in self.assigned:
            return self.assigned[parameter]
        if parameter not in self.tensors:
            raise InvalidInput(
                f"{parameter!r} belongs to a cell that the trace does not know; "
                f"{self._container_of(parameter) or UNKNOWN}"
            )
        return self.tensors[parameter]

    def _container_of(self, parameter: Parameter) -> str:
        """Name the plain list or dict of a cell that holds the parameter; "" if there is none."""
        return next((c for cell in self.paths if (c := container_within(cell, parameter))), "")

    def assign(self, name: str, parameter: Parameter, value: Any) -> None:
        """Record a buffer's new value."""
        if parameter.trainable:
            raise InvalidInput(
                f"construct assigned the trained parameter {name!r}; only buffers may be assigned "
                "there, an optimizer changes parameters"
            )
        self.replace(f"buffer {name!r}", parameter, value)

    def replace(self, label: str, parameter: Parameter, value: Any) -> None:
        """Record the new value of any parameter; `label` names it in messages."""
        if self.frozen:
            raise InvalidInput(f"{label} is assigned {self.frozen}")
        if recorder() is not self.home:
            raise InvalidInput(
                f"{label} is assigned inside a function given to an operator such as "
                "ops.scan or ops.cond, which would lose it; write Python if, while or for, or "
                "return the value and assign it outside"
            )
        tensor = as_tensor(value, parameter.type.dtype)
        if tensor.type != parameter.type:
            raise InvalidInput(
                f"{label} is {parameter.type} and was assigned a {tensor.type}; "
                "it must keep its type"
            )
        self.assigned[parameter] = tensor

    @contextmanager
    def substituted(self, tensors: Mapping[Parameter, Tensor]) -> Iterator[None]:
        """Read these parameters as the given tensors within the block."""
        assigned = {p: t for p, t in self.assigned.items() if p in tensors}
        others = {p: t for p, t in self.assigned.items() if p not in tensors}
        with replaced(self, tensors={**self.tensors, **tensors}):
            # A value assigned before the block would hide the tensor.
            self.assigned = others
            try:
                yield
            finally:
                self.assigned = {**assigned, **self.assigned}


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `target` to other values within the block."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


_current: ContextVar[Binding | None] = ContextVar("triplane_binding", default=None)


def current() -> Binding:
    """Return the binding of the trace being recorded."""
    binding = _current.get()
    if binding is None:
        raise InvalidInput(
            "a cell's parameter was used outside a trace of its cell; call the cell with arrays, "
            "or trace it"
        )
    return binding


def current_or_none() -> Binding | None:
    """Return the binding of the trace being recorded; None if there is none."""
    return _current.get()


@contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable to a value within the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def bound(binding: Binding) -> AbstractContextManager[None]:
    """Make parameters read as the binding's tensors within the block."""
    return holding(_current, binding)

"""`Cell`, the building block users write, and `Parameter`, the named state it owns.

A cell's state lives in `Parameter`s. While a cell is traced, reading one gives its tensor and
assigning a buffer in `construct` records the new value, which becomes an extra result; outside, the
parameter itself is seen. Names are attribute paths: `head.weight`, `blocks.0.conv.bias`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.ir.graph import Array, Role
from triplane.unified_ir.ir.types import TensorType, type_of
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.tensor import Tensor, as_tensor


class Parameter:
    """A state tensor of a cell: its array, its role, and whether training changes it.

    `role`: PARAMETER is trained, BUFFER and KEY are assigned by `construct`, PERSONAL is trained
    but never leaves the device.
    """

    def __init__(
        self, array: Any, *, role: Role = Role.PARAMETER, trainable: bool | None = None
    ) -> None:
        self.array: Array = np.array(array)
        if self.array.dtype == np.float64:
            self.array = self.array.astype(np.float32)
        self.role = role
        trained = role in (Role.PARAMETER, Role.PERSONAL)
        self.trainable = trained if trainable is None else trainable

    @property
    def type(self) -> TensorType:
        """Element type and shape."""
        return type_of(self.array)

    def __repr__(self) -> str:
        return f"Parameter({self.type}, role={self.role})"

    def __tensor__(self) -> Tensor:
        """The tensor that stands for this parameter in the current trace."""
        return _binding().read(self)


class Binding:
    """Which tensors stand for which parameters during one trace, and what was assigned."""

    def __init__(self) -> None:
        self.tensors: dict[Parameter, Tensor] = {}
        self.assigned: dict[Parameter, Tensor] = {}

    def read(self, parameter: Parameter) -> Tensor:
        """The parameter's current value: what was assigned last, else what it was at the start."""
        if parameter in self.assigned:
            return self.assigned[parameter]
        if parameter not in self.tensors:
            raise InvalidInput(
                f"{parameter!r} belongs to a cell that is not part of the traced cell; assign the "
                "cell to an attribute of it"
            )
        return self.tensors[parameter]

    def assign(self, name: str, parameter: Parameter, value: Any) -> None:
        """Records a buffer's new value."""
        if parameter.trainable:
            raise InvalidInput(
                f"construct assigned the trained parameter {name!r}; only buffers may be assigned "
                "there, an optimizer changes parameters"
            )
        tensor = as_tensor(value, parameter.type.dtype)
        if tensor.type != parameter.type:
            raise InvalidInput(
                f"buffer {name!r} is {parameter.type} and was assigned a {tensor.type}; "
                "a buffer keeps its type"
            )
        self.assigned[parameter] = tensor


_current: ContextVar[Binding | None] = ContextVar("triplane_binding", default=None)


def _binding() -> Binding:
    found = _current.get()
    if found is None:
        raise InvalidInput(
            "a cell's parameter was used outside a trace of its cell; call the cell with arrays, "
            "or trace it"
        )
    return found


@contextmanager
def bound(binding: Binding) -> Iterator[Binding]:
    """Parameters read as the binding's tensors meanwhile."""
    token = _current.set(binding)
    try:
        yield binding
    finally:
        _current.reset(token)


class Cell:
    """A part of a model: subclass it, create state in `__init__`, compute in `construct`.

    >>> from triplane.unified_ir import nn, ops
    >>> class Scale(nn.Cell):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = nn.Parameter([2.0])
    ...     def construct(self, x):
    ...         return x * self.factor
    >>> Scale()(np.ones(3, np.float32))
    array([2., 2., 2.], dtype=float32)
    """

    def __init__(self) -> None:
        self.__dict__["_parameters"] = {}
        self.__dict__["_cells"] = {}
        self.__dict__["training"] = True

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """The computation; overridden by every cell."""
        raise InvalidInput(f"{type(self).__name__} has no construct method; define one")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a trace: records `construct`. With arrays: runs it and writes assigned buffers back."""
        if recording():
            return rewritten(type(self).construct)(self, *args, **kwargs)
        from triplane.unified_ir.frontend.run import run  # noqa: PLC0415 - run traces cells

        return run(self, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__:
            raise InvalidInput(f"{type(self).__name__}.__init__ must call super().__init__() first")
        if name in self._parameters and not isinstance(value, Parameter):
            if not recording():
                self._parameters[name].array = _fitting(self._parameters[name], name, value)
                return
            _binding().assign(name, self._parameters[name], value)
            return
        if isinstance(value, Tensor):
            raise InvalidInput(
                f"construct assigned a tensor to {name!r}, which is not a buffer of "
                f"{type(self).__name__}; create it in __init__ as nn.Buffer, or return the tensor"
            )
        self._forget(name)
        if isinstance(value, Parameter):
            self._parameters[name] = value
        elif isinstance(value, Cell):
            self._cells[name] = value
        else:
            if isinstance(value, (list, tuple)) and any(isinstance(v, Cell) for v in value):
                self._cells[name] = CellList(value)
                return
            self.__dict__[name] = value

    def _forget(self, name: str) -> None:
        self._parameters.pop(name, None)
        self._cells.pop(name, None)
        self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_parameters" not in self.__dict__:
            raise AttributeError(name)
        if name in self._cells:
            return self._cells[name]
        if name in self._parameters:
            parameter = self._parameters[name]
            return _binding().read(parameter) if recording() else parameter
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; state: {list(self._parameters)}, "
            f"cells: {list(self._cells)}"
        )

    def cells(self, prefix: str = "") -> Iterator[tuple[str, Cell]]:
        """This cell and every cell below it, with their paths."""
        yield prefix, self
        for name, cell in self._cells.items():
            yield from cell.cells(f"{prefix}.{name}" if prefix else name)

    def parameters(self) -> dict[str, Parameter]:
        """All state by path, in order of creation; a shared parameter under its first path."""
        found: dict[str, Parameter] = {}
        seen: set[Parameter] = set()
        for path, cell in self.cells():
            for name, parameter in cell._parameters.items():  # noqa: SLF001 - same class
                if parameter not in seen:
                    seen.add(parameter)
                    found[f"{path}.{name}" if path else name] = parameter
        return found

    def load(self, state: Mapping[str, Array], *, strict: bool = True) -> None:
        """Copies arrays into the parameters of the same path; all of them, or with
        `strict=False` those present."""
        own = self.parameters()
        odd = sorted(own.keys() ^ state.keys()) if strict else sorted(state.keys() - own.keys())
        if odd:
            raise InvalidInput(f"state does not fit {type(self).__name__}; see {odd}")
        fitting = {k: _fitting(own[k], k, v) for k, v in state.items()}
        for name, array in fitting.items():
            own[name].array = array

    def train(self) -> Cell:
        """Dropout drops and batch normalization uses the batch (the default)."""
        return self._set_training(on=True)

    def eval(self) -> Cell:
        """Dropout passes and batch normalization uses its running statistics."""
        return self._set_training(on=False)

    def _set_training(self, *, on: bool) -> Cell:
        for _, cell in self.cells():
            cell.__dict__["training"] = on
        return self

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self._cells.items())
        return f"{type(self).__name__}({inner})"


class CellList(Cell):
    """Cells in order, indexed and iterated like a list; lists of cells become one by themselves."""

    def __init__(self, cells: Any = ()) -> None:
        super().__init__()
        for i, cell in enumerate(cells):
            self._cells[str(i)] = cell

    def __getitem__(self, i: int) -> Cell:
        return list(self._cells.values())[i]

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())


def _fitting(parameter: Parameter, name: str, value: Any) -> Array:
    array = np.asarray(value)
    if array.shape != parameter.array.shape or not np.can_cast(
        array.dtype, parameter.array.dtype, "same_kind"
    ):
        raise InvalidInput(
            f"{name!r} is {parameter.type}, got {array.dtype}{list(array.shape)}"
        )
    return array.astype(parameter.array.dtype)

"""`Cell`, the building block users write, and `Parameter`, the named state it owns.

While a cell is traced, reading a `Parameter` gives its tensor, and assigning a buffer in
`construct` records the new value, which becomes an extra result. Outside a trace the attribute is
the parameter itself. Names are attribute paths: `head.weight`, `blocks.0.conv.bias`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, Self, cast

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import LEARNT, Parameter, StateTree, current
from triplane.unified_ir.frontend.custom import construct_with_bprop
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.run import run
from triplane.unified_ir.frontend.shown import shown_lines
from triplane.unified_ir.frontend.summary import summary
from triplane.unified_ir.frontend.trace import entered, within
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.tensor import Tensor

__all__ = ["Cell", "CellList", "Parameter"]

SHOWN: Final = 8
"""Number of paths that a message lists."""


class Cell(StateTree):
    """A part of a model: subclass it, create state in `__init__`, compute in `construct`.

    >>> from triplane.unified_ir import nn, ops
    >>> class Scale(nn.Cell):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = nn.Parameter([2.0])
    ...
    ...     def construct(self, x):
    ...         return x * self.factor
    >>> Scale()(np.ones(3, np.float32))
    array([2., 2., 2.], dtype=float32)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a trace, record `construct`; with arrays, run it and write assigned buffers back.

        A cell with a method `bprop(self, *inputs, y, g)` is differentiated by it; see
        `frontend.custom`.
        """
        if not recording():
            return run(self, args, kwargs)
        with within(self), entered(type(self).construct, self):
            if hasattr(type(self), "bprop"):
                return construct_with_bprop(self, args, kwargs)
            return rewritten(type(self).construct)(self, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__:
            raise InvalidInput(f"{type(self).__name__}.__init__ must call super().__init__() first")
        if name in self._parameters and not isinstance(value, Parameter):
            if not recording():
                self._parameters[name].array = _fitting(self._parameters[name], name, value)
                return
            current().assign(name, self._parameters[name], value)
            return
        if isinstance(value, Tensor):
            raise InvalidInput(
                f"construct assigned a tensor to {name!r}, which is not a buffer of "
                f"{type(self).__name__}; create it in __init__ as nn.Buffer, or return the tensor"
            )
        # An attribute may change its kind, for example from a cell to a plain value.
        self._forget(name)
        if isinstance(value, (list, tuple)) and any(isinstance(v, Cell) for v in value):
            value = CellList(value)
        if not isinstance(value, (Parameter, Cell)):
            self.__dict__[name] = value
            return
        if hasattr(type(self), name):
            # Python looks into the class first, so reading would never give the value.
            raise InvalidInput(
                f"{type(self).__name__} has an attribute {name!r} of its class, which hides a "
                f"{type(value).__name__} of that name; choose another name"
            )
        if isinstance(value, Parameter):
            self._parameters[name] = value
        else:
            self._cells[name] = value

    def _forget(self, name: str) -> None:
        self._parameters.pop(name, None)
        self._cells.pop(name, None)
        self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` look up attributes before the state exists; without this check the
        # lookup of `_cells` below would recurse without end.
        if name.startswith("__") or "_parameters" not in self.__dict__:
            raise AttributeError(name)
        if name in self._cells:
            return self._cells[name]
        if name in self._parameters:
            parameter = self._parameters[name]
            return current().read(parameter) if recording() else parameter
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; state: {list(self._parameters)}, "
            f"cells: {list(self._cells)}"
        )

    def load(self, state: Mapping[str, Array], *, strict: bool = True) -> None:
        """Copy arrays into the parameters of the same path.

        strict: require an array for every parameter; otherwise only those present are loaded.
        """
        own = self.parameters()
        missing = sorted(own.keys() - state.keys()) if strict else []
        unexpected = sorted(state.keys() - own.keys())
        if missing or unexpected:
            sets = {"missing": missing, "unexpected": unexpected}
            parts = [f"{what}: {_listed(names)}" for what, names in sets.items() if names]
            partly = "; strict=False loads a part" if missing and not unexpected else ""
            raise InvalidInput(
                f"the state does not fit {type(self).__name__}; {'; '.join(parts)}{partly}"
            )
        # Every array is checked before the first is stored, so a failed load changes nothing.
        fitting = {k: _fitting(own[k], k, v) for k, v in state.items()}
        for name, array in fitting.items():
            own[name].array = array

    def state_dict(self) -> dict[str, Array]:
        """Return a copy of all state by path, in the form that `load` takes."""
        return {name: np.array(p.array) for name, p in self.parameters().items()}

    def freeze(self, *patterns: str) -> Self:
        """Exclude from training the parameters whose path matches a pattern, or all of them.

        A pattern is a path with `*` for any part: "conv*", "blocks.0.*". InvalidInput: a pattern
        matches no parameter.
        """
        return self._set_trainable(patterns, trainable=False)

    def unfreeze(self, *patterns: str) -> Self:
        """Train parameters again; see `freeze`. Other state is unchanged."""
        return self._set_trainable(patterns, trainable=True)

    def _set_trainable(self, patterns: tuple[str, ...], *, trainable: bool) -> Self:
        learnt = {name: p for name, p in self.parameters().items() if p.role in LEARNT}
        for pattern in patterns or ("*",):
            fitting = [p for name, p in learnt.items() if fnmatchcase(name, pattern)]
            if not fitting and learnt:
                raise InvalidInput(
                    f"no parameter of {type(self).__name__} matches {pattern!r}; there are "
                    f"{', '.join(list(learnt)[:SHOWN])}"
                )
            for parameter in fitting:
                parameter.trainable = trainable
        return self

    def train(self) -> Self:
        """Select training mode, the default: dropout drops, batch normalization uses the batch."""
        return self._set_training(on=True)

    def eval(self) -> Self:
        """Select evaluation mode: no dropout, batch normalization uses its running statistics."""
        return self._set_training(on=False)

    def _set_training(self, *, on: bool) -> Self:
        for _, cell in self.cells():
            cell.__dict__["training"] = on
        return self

    def summary(self, *specs: Any) -> str:
        """Return a table of all parts; see `nn.summary`. specs: arrays or specs of the arguments.

        >>> from triplane.unified_ir import TensorSpec, nn
        >>> net = nn.Sequential(nn.Dense(8, 16), nn.BatchNorm1d(16))
        >>> print(net.summary(TensorSpec(("N", 8))))
        path     cell         gives          parameters  buffers
        (whole)  Sequential   float32[N,16]         176       32
        0        Dense        float32[N,16]         144        0
        1        BatchNorm1d  float32[N,16]          32       32
        176 parameters, 176 of them trainable; 32 elements of buffers
        """
        return summary(self, *specs)

    def __repr__(self) -> str:
        return "\n".join(shown_lines(self))


class CellList(Cell):
    """Cells in order, indexed and iterated like a list. Assigning a list of cells creates one."""

    def __init__(self, cells: Any = ()) -> None:
        super().__init__()
        for i, cell in enumerate(cells):
            if not isinstance(cell, Cell):
                raise InvalidInput(f"a list of cells may only hold cells, got {cell!r} at {i}")
            self._cells[str(i)] = cell

    def __getitem__(self, i: int) -> Cell:
        return cast("Cell", list(self._cells.values())[i])

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[Cell]:
        return (self[i] for i in range(len(self)))


def _listed(names: list[str]) -> str:
    """Return the first names and how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _fitting(parameter: Parameter, name: str, value: Any) -> Array:
    array = np.asarray(value)
    if array.shape != parameter.array.shape or not np.can_cast(
        array.dtype, parameter.array.dtype, "same_kind"
    ):
        raise InvalidInput(f"{name!r} is {parameter.type}, got {array.dtype}{list(array.shape)}")
    return array.astype(parameter.array.dtype)

"""`Cell`, the building block users write, and `Parameter`, the named state it owns.

While a cell is traced, reading a `Parameter` gives its tensor, and assigning a buffer in
`construct` records the new value, which becomes an extra result. Outside a trace the attribute is
the parameter itself. Names are attribute paths: `head.weight`, `blocks.0.conv.bias`.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Self, cast

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.proto.suggestions import nearest, suggestion
from triplane.unified_ir.frontend.binding import LEARNT, Parameter, StateTree, current
from triplane.unified_ir.frontend.custom import construct_with_bprop
from triplane.unified_ir.frontend.rewrite import rewritten
from triplane.unified_ir.frontend.run import run, with_arrays_as_tensors
from triplane.unified_ir.frontend.sharded import sharded_cell
from triplane.unified_ir.frontend.shown import shown_lines
from triplane.unified_ir.frontend.summary import summary
from triplane.unified_ir.frontend.trace import entered, within
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.tensor import Tensor

__all__ = ["Cell", "CellDict", "CellList", "Parameter"]

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
        # An array of the enclosing function is data here as it is at a call outside a graph.
        args = tuple(map(with_arrays_as_tensors, args))
        kwargs = {k: with_arrays_as_tensors(v) for k, v in kwargs.items()}
        with within(self), entered(type(self).construct, self):
            if hasattr(type(self), "bprop"):
                return construct_with_bprop(self, args, kwargs)
            return rewritten(type(self).construct)(self, *args, **kwargs)

    def shard(self, *strategy: Sequence[int] | None) -> Callable[..., Any]:
        """Return the call of the cell with a strategy: for each tensor, slices of each axis.

        None leaves a tensor open. The tensors are cut before `construct` reads them; its operators
        may have strategies of their own, and a planner chooses the others (`docs/parallel.md`).
        """
        return partial(sharded_cell, self, strategy)

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
        if isinstance(value, (list, tuple)) and any(isinstance(v, Cell) for v in value):
            value = CellList(value)
        elif isinstance(value, dict) and self._can_own(value):
            value = CellDict(value)
        if isinstance(value, Cell) and any(cell is self for _, cell in value.cells()):
            raise InvalidInput(
                f"{type(self).__name__} would be a part of itself through {name!r}, so its "
                f"parameters would have no end; keep weakref.ref({name}) if a part needs its owner"
            )
        # An attribute may change its kind, for example from a cell to a plain value.
        self._forget(name)
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

    def _can_own(self, entries: Mapping[Any, Any]) -> bool:
        """Return whether a dict holds cells by name, none of which has this cell below it."""
        if not entries or not all(map(_is_entry, entries.items())):
            return False
        return not any(cell is self for entry in entries.values() for _, cell in entry.cells())

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
        if not isinstance(state, Mapping):
            raise InvalidInput(
                f"load takes a dict of arrays by path, got a {type(state).__name__}; that of a "
                "cell is cell.state_dict(), that of a file dict(numpy.load(path))"
            )
        own = self.parameters()
        missing = sorted(own.keys() - state.keys()) if strict else []
        unexpected = sorted(state.keys() - own.keys())
        if missing or unexpected:
            raise InvalidInput(_misfit(type(self).__name__, len(own), missing, unexpected))
        # Every array is checked before the first is stored, so a failed load changes nothing.
        for name, array in fitting_state(own, state).items():
            own[name].array = array

    def state_dict(self) -> dict[str, Array]:
        """Return a copy of all state by path, in the form that `load` takes."""
        return self._copies(self.parameters())

    def trainable_state(self) -> dict[str, Array]:
        """Return a copy of the arrays that gradients change, by path.

        It is the state of a training loop of one's own: the form that `nn.functional_call`,
        `Optimizer.init` and `Optimizer.update` take; `load(..., strict=False)` stores it.
        """
        return self._copies({k: p for k, p in self.parameters().items() if p.trainable})

    def _copies(self, parameters: Mapping[str, Parameter]) -> dict[str, Array]:
        if recording():
            raise InvalidInput(
                f"the arrays of {type(self).__name__} were asked for while a graph is recorded, "
                "which would keep today's numbers as constants; pass the cell or its "
                "trainable_state() as an argument of the recorded function"
            )
        return {path: np.array(p.array) for path, p in parameters.items()}

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
        if isinstance(cells, Cell) or not isinstance(cells, Iterable):
            raise InvalidInput(f"a CellList is made of a list of cells, got {cells!r:.80}")
        for cell in cells:
            self.append(cell)

    def append(self, cell: Cell) -> None:
        """Add a cell at the end."""
        if not isinstance(cell, Cell):
            raise InvalidInput(
                f"a list of cells may only hold cells, got {cell!r:.80} at {len(self)}{_hint(cell)}"
            )
        self._cells[str(len(self))] = cell

    def __getitem__(self, i: int) -> Cell:
        return cast("Cell", list(self._cells.values())[i])

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[Cell]:
        return (self[i] for i in range(len(self)))


class CellDict(Cell):
    """Cells by name, in the order of insertion. Assigning a dict of cells creates one.

    >>> from triplane.unified_ir import nn
    >>> heads = nn.CellDict({"age": nn.Dense(8, 1), "sex": nn.Dense(8, 2)})
    >>> heads["job"] = nn.Dense(8, 9)
    >>> list(heads), list(heads.parameters())[:2]
    (['age', 'sex', 'job'], ['age.weight', 'age.bias'])
    """

    def __init__(self, cells: Mapping[str, Cell] | Iterable[tuple[str, Cell]] = ()) -> None:
        super().__init__()
        try:
            entries = dict(cells)
        except (TypeError, ValueError):
            raise InvalidInput(
                f"a CellDict is made of a dict of cells by name, got {cells!r:.80}"
            ) from None
        for name, cell in entries.items():
            self[name] = cell

    def __getitem__(self, name: str) -> Cell:
        if name not in self._cells:
            raise NotFound(
                f"no cell {name!r}; there are {_listed(list(self))}{suggestion(name, self)}"
            )
        return cast("Cell", self._cells[name])

    def __setitem__(self, name: str, cell: Cell) -> None:
        if not _is_entry((name, cell)):
            raise InvalidInput(
                "a CellDict holds cells by names without a dot, since names are parts of paths; "
                f"got {cell!r:.80} under {name!r}{_hint(cell)}"
            )
        self._cells[name] = cell

    def __delitem__(self, name: str) -> None:
        _ = self[name]  # names the cells there are
        del self._cells[name]

    def __contains__(self, name: object) -> bool:
        return name in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._cells.keys()

    def values(self) -> ValuesView[Cell]:
        """Return the cells."""
        return cast("ValuesView[Cell]", self._cells.values())

    def items(self) -> ItemsView[str, Cell]:
        """Return pairs of name and cell."""
        return cast("ItemsView[str, Cell]", self._cells.items())

    def update(self, cells: Mapping[str, Cell]) -> None:
        """Add or replace cells."""
        for name, cell in cells.items():
            self[name] = cell


def _hint(value: Any) -> str:
    """Return what to do with a value that stands where a cell belongs."""
    if isinstance(value, type):
        return f"; create it: {value.__name__}(...)" if issubclass(value, Cell) else ""
    if isinstance(value, (list, tuple)) and all(isinstance(v, Cell) for v in value):
        return "; pass the cells themselves: *cells"
    if callable(value) and not isinstance(value, Cell):
        return "; a function belongs into the construct of a cell, or take its layer, such as ReLU"
    return ""


def _is_entry(item: tuple[Any, Any]) -> bool:
    """Return whether a pair is a cell under a name that can be a part of a path."""
    name, cell = item
    return isinstance(name, str) and bool(name) and "." not in name and isinstance(cell, Cell)


def _misfit(cell: str, count: int, missing: list[str], unexpected: list[str]) -> str:
    """Say which state is missing and which unexpected, with the names that it may stand for."""
    lines = [f"the state does not fit {cell}"]
    if missing:
        lines.append(f"missing, {len(missing)} of {count}: {_listed(missing)}")
    if unexpected:
        pairs = ((name, nearest(name, missing)) for name in unexpected[:SHOWN])
        named = [f"{name} (for {close}?)" if close else name for name, close in pairs]
        lines.append(f"unexpected, {len(unexpected)}: {_listed([*named, *unexpected[SHOWN:]])}")
    elif missing:
        lines.append("strict=False loads a part")
    return "\n  ".join(lines)


def _listed(names: list[str]) -> str:
    """Return the first names and how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def fitting_state(own: Mapping[str, Parameter], state: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays of the types of the parameters of these paths; InvalidInput if one cannot."""
    return {path: _fitting(own[path], path, array) for path, array in state.items()}


def _fitting(parameter: Parameter, name: str, value: Any) -> Array:
    array = np.asarray(value)
    if array.shape != parameter.array.shape or not np.can_cast(
        array.dtype, parameter.array.dtype, "same_kind"
    ):
        raise InvalidInput(f"{name!r} is {parameter.type}, got {array.dtype}{list(array.shape)}")
    return array.astype(parameter.array.dtype)

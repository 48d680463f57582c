"""`functional_call`: a cell computed with other arrays or tensors in place of its own state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter, current
from triplane.unified_ir.frontend.cell import Cell, fitting_state
from triplane.unified_ir.frontend.run import refuse_lost, run
from triplane.unified_ir.frontend.traced_call import at_users_line
from triplane.unified_ir.ir.types import float64
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.tensor import Tensor, as_tensor


def functional_call(cell: Cell, state: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return `cell(*args, **kwargs)` computed with the values of `state`, which is not changed.

    state: path -> array or tensor, of the type of the parameter at that path; parameters that it
    lacks keep the cell's own values. A buffer or random key that the call assigns (running
    statistics, the key of a dropout) must not be in `state`: the cell keeps its new value, as in an
    ordinary call. InvalidInput: an unknown path, another type, or a value that would be lost.

    >>> import numpy as np
    >>> from triplane.unified_ir import nn
    >>> dense = nn.Dense(2, 1)
    >>> doubled = {path: 2 * array for path, array in dense.trainable_state().items()}
    >>> x = np.ones((3, 2), np.float32)
    >>> bool(np.allclose(nn.functional_call(dense, doubled, x), 2 * dense(x)))
    True
    """
    _check_arguments(cell, state)
    own = cell.parameters()
    if unknown := sorted(state.keys() - own.keys()):
        raise InvalidInput(
            f"{type(cell).__name__} has no parameter {unknown[0]!r}; it has {', '.join(own)}"
            f"{at_users_line()}"
        )
    if not recording():
        arrays = fitting_state(own, state)
        return run(cell, args, kwargs, replacing={own[k]: a for k, a in arrays.items()})
    tensors = {own[path]: _fitting_tensor(path, own[path], x) for path, x in state.items()}
    binding = current()
    with binding.substituted(tensors):
        result = cell(*args, **kwargs)
        lost = [p for p in tensors if p in binding.assigned]
    refuse_lost(cell, lost)
    return result


def _fitting_tensor(path: str, parameter: Parameter, value: Any) -> Tensor:
    tensor = as_tensor(value, parameter.type.dtype)
    if tensor.type != parameter.type:
        converted = parameter.type == tensor.type.with_dtype(float64)
        way_out = '; a call converts float64 arrays, unless mode("graph", floats="float64")'
        raise InvalidInput(
            f"{path!r} is {parameter.type}, got {tensor.type}{way_out if converted else ''}"
            f"{at_users_line()}"
        )
    return tensor


def _check_arguments(cell: Any, state: Any) -> None:
    if not isinstance(cell, Cell) or not isinstance(state, Mapping):
        raise InvalidInput(
            "functional_call takes a cell, its parameters by path and the cell's arguments; got a "
            f"{type(cell).__name__} and a {type(state).__name__}{at_users_line()}"
        )

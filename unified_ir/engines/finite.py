"""Find the first value that is not finite, by running node by node on the reference engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ops.evaluate import observing, run_function
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.values import as_host_value


class _NotFinite(Exception):
    """Ends the run at the first such node."""


def first_nonfinite(function: Function, args: Mapping[str, Any]) -> str:
    """Describe the first argument or node of `function` that is not finite; empty if all are.

    Nodes inside branches and loops are checked too, in the order in which they run.
    """
    for name in function.param_names:
        if not finite(args[name]):
            return f"{name!r} holds {describe(args[name])} before the step"

    def look(node: Node, operands: Sequence[Any], results: Sequence[Any]) -> None:
        # A constant may be infinite on purpose, such as the -inf of a mask.
        if node.op.name != "Constant" and not all(finite(a) for a in results):
            raise _NotFinite(_node_text(node, operands, results))

    values = [as_host_value(args[p.name], p.type) for p in function.params]
    try:
        with observing(look):
            run_function(TABLE, function, values)
    except _NotFinite as error:
        return str(error)
    return ""


def finite(array: Any) -> bool:
    """Return whether no element is NaN or infinite; integers, text and the like are finite."""
    if not isinstance(array, np.ndarray) or array.dtype.kind in "biuOSU":
        return True
    return bool(np.isfinite(array.astype(np.float64)).all())


def _node_text(node: Node, operands: Sequence[Any], results: Sequence[Any]) -> str:
    where = f" at {node.meta.location}" if node.meta.location else ""
    scope = f" (in {node.meta.scope})" if node.meta.scope else ""
    described = ", ".join(describe(a) for a in operands if isinstance(a, np.ndarray))
    bad = next(a for a in results if not finite(a))
    return f"{node.op}{where}{scope} makes {describe(bad)} of {described}"


def describe(array: Array) -> str:
    """Describe type, shape and range, and how many elements are not finite."""
    kind = f"{array.dtype}{list(array.shape)}"
    if array.size == 0 or array.dtype.kind in "bOSU":
        return kind
    wide = array.astype(np.float64)
    good = wide[np.isfinite(wide)]
    spread = f" in [{good.min():g}, {good.max():g}]" if good.size else ""
    bad = array.size - good.size
    return f"{kind}{spread}" + (f" with {bad} of {array.size} not finite" if bad else "")

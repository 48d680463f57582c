"""Where a number that is not finite comes from: the step again, node by node, on the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ops.evaluate import run_node
from triplane.unified_ir.ops.sizes import bind_sizes
from triplane.unified_ir.ops.table import TABLE


class NonFinite(InvalidInput):
    """The loss became NaN or infinite. step: from 1. cause: the first thing that is not finite."""

    def __init__(self, message: str, *, step: int, cause: str) -> None:
        super().__init__(message)
        self.step = step
        self.cause = cause


def first_nonfinite(function: Function, args: Mapping[str, Array]) -> str:
    """Names the first argument or node of `function` that is not finite; empty if none is."""
    for name in function.param_names:
        if not finite(args[name]):
            return f"{name!r} holds {_describe(args[name])} before the step"
    arrays = {p: args[p.name] for p in function.params}
    sizes: dict[str, int] = {}
    for param in function.params:
        bind_sizes(sizes, param.type, args[param.name].shape)
    with np.errstate(all="ignore"):
        for node, operands, results in _evaluated(function.nodes, arrays, sizes):
            if node.op.name != "Constant" and not all(finite(a) for a in results):
                return _node_text(node, operands, results)
    return ""


def finite(array: Array) -> bool:
    """Whether no element is NaN or infinite; whole numbers and booleans are finite."""
    return array.dtype.kind in "biu" or bool(np.isfinite(array.astype(np.float64)).all())


def _evaluated(
    nodes: Sequence[Node], arrays: dict[Value, Array], sizes: dict[str, int]
) -> Iterator[tuple[Node, list[Array | None], tuple[Array, ...]]]:
    for node in nodes:
        operands = [None if v is None else arrays[v] for v in node.inputs]
        results = run_node(TABLE, node, operands, sizes)
        for value, array in zip(node.outputs, results, strict=True):
            arrays[value] = array
            bind_sizes(sizes, value.type, array.shape)
        yield node, operands, results


def _node_text(node: Node, operands: Sequence[Array | None], results: Sequence[Array]) -> str:
    where = f" at {node.meta.location}" if node.meta.location else ""
    scope = f" (in {node.meta.scope})" if node.meta.scope else ""
    given = ", ".join(_describe(a) for a in operands if a is not None)
    bad = next(a for a in results if not finite(a))
    return f"{node.op}{where}{scope} makes {_describe(bad)} of {given}"


def _describe(array: Array) -> str:
    """Type, shape and range; how many elements are not finite."""
    kind = f"{array.dtype}{list(array.shape)}"
    if array.size == 0 or array.dtype.kind == "b":
        return kind
    wide = array.astype(np.float64)
    good = wide[np.isfinite(wide)]
    spread = f" in [{good.min():g}, {good.max():g}]" if good.size else ""
    bad = array.size - good.size
    return f"{kind}{spread}" + (f" with {bad} of {array.size} not finite" if bad else "")

"""Compute nodes one by one in numpy, by the reference kernels of their rows.

A row without a kernel uses its body, or else ONNX's reference implementation. Eager mode, constant
folding and the reference engine run on this; it is written to be obvious, not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
from onnx import helper

from triplane.proto.errors import InvalidInput, TriplaneError
from triplane.unified_ir.ir.dims import evaluate, is_symbol
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ir.types import TensorType, bfloat16, is_plain
from triplane.unified_ir.ops.build import body_function, note_contents
from triplane.unified_ir.ops.infer import onnx_attrs
from triplane.unified_ir.ops.inline import introduced_sizes
from triplane.unified_ir.ops.row import MEANING_OPSET, Known, OpKind, Table
from triplane.unified_ir.ops.values import HostValue, Sizes, as_host_value, bind

Observer = Callable[[Node, Sequence[Any], Sequence[Any]], None]
"""Called with each node, its operands and results; nodes of a region come before its owner."""
_observer: ContextVar[Observer | None] = ContextVar("triplane_observer", default=None)


@contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
    """Within the block, call `observer` for each node that runs, but not for nodes of bodies."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def run_function(
    table: Table, function: Function, args: Sequence[Array], outer: Sizes | None = None
) -> list[Array]:
    """Return the results of a function on host arrays; `outer`: symbols of enclosing scopes."""
    sizes = dict(outer or {})
    observer = _observer.get()
    arrays: dict[Value, Array] = {}
    # Symbols of the parameters are defined again by each call and shadow those of enclosing scopes.
    for param in function.params:
        for d in param.type.shape:
            if is_symbol(d):
                sizes.pop(str(d), None)
    for param, arg in zip(function.params, args, strict=True):
        check_argument(param, arg)
        bind(sizes, param.type, arg)
        arrays[param] = arg
    contents: dict[Value, Known] = {}
    for node in function.nodes:
        operands = [None if v is None else arrays[v] for v in node.inputs]
        # A region runs several times, and a size that data decide may differ each time.
        for name in introduced_sizes(node):
            sizes.pop(name, None)
        known = [None if v is None else contents.get(v) for v in node.inputs]
        results = run_node(table, node, operands, sizes, known)
        if observer is not None:
            observer(node, operands, results)
        note_contents(table[node.op.domain, node.op.name], node, contents)
        for value, array in zip(node.outputs, results, strict=True):
            arrays[value] = array
            bind(sizes, value.type, array)
    return [arrays[r] for r in function.results]


def check_argument(param: Value, arg: Array) -> None:
    """Check element type and rank of an argument, naming the parameter in the error."""
    if not is_plain(param.type):
        return
    if arg.dtype != param.type.dtype.numpy or arg.ndim != param.type.rank:
        raise InvalidInput(
            f"argument {param.name!r} is {param.type}, got {arg.dtype}{list(arg.shape)}"
        )


MAX_SHOWN: Final = 8
"""Elements of an operand that an error shows."""


class NodeFailed(InvalidInput):
    """A node refused its operands; the text says which node, where, and on what."""

    def __init__(self, text: str, why: str = "") -> None:
        super().__init__(text)
        self.why = why
        """The text of the kernel's error."""


_RAISED_BY_KERNELS: Final = (IndexError, ValueError, TypeError, OverflowError, MemoryError)


def run_node(
    table: Table,
    node: Node,
    operands: Sequence[Array | None],
    sizes: Sizes,
    known: Sequence[Known | None],
) -> tuple[Array, ...]:
    """Return the outputs of one node in the inferred element types; NodeFailed if it fails.

    `known`: what was known of the operands' contents when the graph was built.
    """
    try:
        with np.errstate(all="ignore"):  # NaN and infinity are values, as on every engine
            return _run_node(table, node, operands, sizes, known)
    except NodeFailed as failed:
        # The message already names the node inside the region.
        if node.regions:
            raise
        raise NodeFailed(failure(node, failed.why, operands), failed.why) from failed
    except TriplaneError:
        raise
    except _RAISED_BY_KERNELS as error:
        raise NodeFailed(failure(node, str(error), operands), str(error)) from error


def failure(node: Node, why: str, operands: Sequence[Array | None]) -> str:
    """Describe the failure of a node on these operands; unknown ones are left out."""
    place = f" (at {node.meta.location})" if node.meta.location else ""
    scope = f" in {node.meta.scope}" if node.meta.scope else ""
    seen = ", ".join(_shown(a) for a in operands if a is not None)
    explain = EXPLANATIONS.get(node.op.name)
    why = (explain(node, operands) if explain else "") or why
    on = f"; its operands were {seen}" if seen else ""
    return f"the graph failed on these values: {node.op}{place}{scope}: {why.strip()}{on}"


def _index_outside(node: Node, operands: Sequence[Array | None]) -> str:
    """Return the first index of a Gather that its axis does not have, and the size it needs."""
    data, indices = operands if len(operands) == 2 else (None, None)
    axis = node.attrs.get("axis", 0)
    if data is None or indices is None or not isinstance(axis, int):
        return ""
    n = data.shape[axis]
    outside = np.argwhere((indices < -n) | (indices >= n))
    if not len(outside):
        return ""
    at = tuple(outside[0].tolist())
    most = int(indices.max())
    needed = f"; the largest is {most}, so {most + 1} are needed" if most >= n else ""
    return (
        f"index {indices[at]} at {list(at)} is out of range: axis {axis} of the table has {n} "
        f"rows, 0 to {n - 1}{needed} (of an Embedding, its count)"
    )


EXPLANATIONS: Final[Mapping[str, Callable[[Node, Sequence[Array | None]], str]]] = {
    "Gather": _index_outside,
}
"""What the operands of a failed node say in the user's words, by operator; "" if nothing."""


def _shown(a: Any) -> str:
    """Return element type, shape, and as much of the contents as fits on a line."""
    if not isinstance(a, np.ndarray):
        return repr(a)
    head = f"{a.dtype}{list(a.shape)}"
    if 0 < a.size <= MAX_SHOWN:
        return f"{head} {np.array2string(a, separator=', ', threshold=MAX_SHOWN)}".replace("\n", "")
    if a.size and a.dtype.kind in "iuf":
        return f"{head} from {a.min()} to {a.max()}"
    return head


def _run_node(
    table: Table,
    node: Node,
    operands: Sequence[Array | None],
    sizes: Sizes,
    known: Sequence[Known | None],
) -> tuple[Array, ...]:
    row = table[node.op.domain, node.op.name]
    attrs = {k: _concrete(v, sizes) for k, v in row.full_attrs(node.attrs).items()}
    if row.kind is OpKind.CONTRACTION:
        operands = [_widened(x) for x in operands]
    if row.reference is not None:
        if node.regions:
            attrs["regions"] = [_callable(table, region, sizes) for region in node.regions]
        raw = row.reference(*operands, **attrs)
        results = raw if isinstance(raw, tuple) else (raw,)
    elif row.body is not None:
        types = tuple(None if v is None else v.type for v in node.inputs)
        body = body_function(table, row, types, node.attrs, len(node.outputs), known)
        # Nodes of a body do not exist in the observed graph.
        with observing(None):
            present = [a for a in operands if a is not None]
            results = tuple(run_function(table, body, present, sizes))
    else:
        results = _onnx_kernel(node, operands)
    filled = [*results, *(_empty(v, sizes) for v in node.outputs[len(results) :])]
    return tuple(_held(a, v.type) for a, v in zip(filled, node.outputs, strict=False))


def _widened(x: Array | None) -> Array | None:
    """Return bfloat16 as float32: numpy has no products of it; results are rounded back."""
    return x.astype(np.float32) if x is not None and x.dtype == bfloat16.numpy else x


def _held(value: HostValue, type_: TensorType) -> HostValue:
    """Return a kernel's result in the form that values of the type have."""
    if is_plain(type_):
        return np.asarray(value, type_.dtype.numpy)
    return as_host_value(value, type_)


def _empty(value: Value, sizes: Sizes) -> HostValue:
    """Return the stacked output of a loop without iterations, whose type no kernel knows."""
    if not is_plain(value.type):
        return []
    return np.zeros(value.type.concrete({str(value.type.shape[0]): 0, **sizes}))


def _concrete(value: Any, sizes: Sizes) -> Any:
    if isinstance(value, tuple) and any(not isinstance(d, (int, float, str)) for d in value):
        return tuple(evaluate(d, sizes) for d in value)
    return value


def _callable(table: Table, region: Function, sizes: Sizes) -> Callable[..., list[Array]]:
    return lambda *args: run_function(table, region, args, sizes)


def _onnx_kernel(node: Node, operands: Sequence[Array | None]) -> tuple[Array, ...]:
    """Run ONNX's reference implementation of one node."""
    # Imported late: it loads several hundred kernels.
    from onnx.reference.ops import load_op

    names = ["" if a is None else f"i{k}" for k, a in enumerate(operands)]
    outs = [f"o{k}" for k in range(len(node.outputs))]
    proto = helper.make_node(node.op.name, names, outs, **onnx_attrs(node.attrs))
    context = {"log": lambda *_: None, "opsets": {"": MEANING_OPSET}, "verbose": 0, "new_ops": None}
    kernel = load_op("", node.op.name, MEANING_OPSET)(proto, context)
    return tuple(kernel.run(*operands))

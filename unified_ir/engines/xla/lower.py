"""A function traced by JAX, node by node, by the `xla` rules of its rows.

A row without a rule takes the function of `jax.numpy` that its reference kernel is by name, or its
body. What depends on constants and sizes alone is computed while tracing, in numpy, because JAX
needs sizes, axes and paddings as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput, TriplaneError
from triplane.unified_ir.engines.xla import fused
from triplane.unified_ir.engines.xla.door import jnp, lax
from triplane.unified_ir.ir.dims import evaluate, is_symbol
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ir.types import TensorType, is_plain, string
from triplane.unified_ir.ops.build import expansion, note_contents
from triplane.unified_ir.ops.evaluate import failure, run_node
from triplane.unified_ir.ops.inline import introduced_sizes
from triplane.unified_ir.ops.lowering import Region, Rule, by_name
from triplane.unified_ir.ops.row import OPEN, Known, Op
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.ops.values import bind

NodeShardings = Mapping[int, tuple[Sequence[Any], Sequence[Any]]]
NOTHING_WANTED: Final[NodeShardings] = MappingProxyType({})
MAX_KNOWN: Final = 1 << 14
"""Elements of the largest array that is computed while tracing; XLA computes larger ones."""


def rule_of(row: Op) -> Rule | None:
    """Return the row's own rule, or that of its reference kernel's namesake in `jax.numpy`."""
    if row.xla is not None:
        return row.xla
    kernel = row.reference
    is_numpys = isinstance(kernel, np.ufunc) or getattr(kernel, "__module__", "") == "numpy"
    name = getattr(kernel, "__name__", "")
    return by_name(name) if is_numpys and not row.attr_specs and hasattr(jnp, name) else None


def check(function: Function) -> None:
    """Refuse what XLA cannot do, by the name of the operator and with the way out."""
    for value in (*function.params, *function.results):
        _check_type(value, None)
    _check_nodes(function, None)


def _check_nodes(function: Function, owner: Node | None) -> None:
    """Check nodes, and those of the bodies of rows without a rule. owner: whose body it is."""
    contents: dict[Value, Known] = {}
    for node in function.nodes:
        row, named = row_of(node), owner or node
        for value in node.outputs:
            _check_type(value, named)
        if node.attrs.get(OPEN):
            raise _refused(
                named, "gives an output whose size only the data decide", row_of(named).fixed_sizes
            )
        if rule_of(row) is None and (body := expansion(TABLE, node, contents)) is not None:
            _check_nodes(body, named)
        elif rule_of(row) is None:
            raise _refused(named, "has no rule for XLA")
        for region in node.regions:
            _check_nodes(region, owner)
        note_contents(row, node, contents)


def _check_type(value: Value, node: Node | None) -> None:
    if not is_plain(value.type) or value.type.dtype == string:
        if node is None:
            raise InvalidInput(
                f"the engine xla takes tensors of numbers, and {value.name or 'a result'} is "
                f"{value.type}; use the engine 'onnx'"
            )
        raise _refused(node, f"gives {value.type}, which is no tensor of numbers")


def _refused(node: Node, why: str, instead: str = "") -> InvalidInput:
    """Return the error. instead: what the call may pass."""
    way = f"pass {instead}, " if instead else ""
    place = f" (at {node.meta.location})" if node.meta.location else ""
    return InvalidInput(
        f"the engine xla cannot run {node.op}{place}: it {why}; {way}use the engine 'onnx', or do "
        "this step outside the compiled function"
    )


class Requirements:
    """What a program refuses in its data: each requirement has a number, from 1."""

    def __init__(self) -> None:
        self.failures: list[tuple[Node, str]] = []

    def add(self, node: Node, why: str) -> int:
        """Return the number of a requirement of a node."""
        self.failures.append((node, why))
        return len(self.failures)

    def error(self, failed: int) -> InvalidInput:
        """Return the error of the requirement that failed."""
        node, why = self.failures[failed - 1]
        return InvalidInput(failure(node, why, []))


class Trace:
    """The nodes of one function, or of one region, while JAX traces them.

    kernels: whether the device's own may be used, whose sums may depend on timing.
    """

    np = jnp
    lax = lax

    def __init__(
        self,
        requirements: Requirements,
        sizes: dict[str, int],
        failed: Any = None,
        *,
        kernels: bool = True,
    ) -> None:
        self._kernels = kernels
        self._requirements = requirements
        self._sizes = sizes
        self._failed = failed
        self._decided: dict[tuple[Value, int], Any] = {}
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        """See `XlaContext`."""
        assert self._node is not None
        return self._node

    @property
    def failed(self) -> Any:
        """The number of the requirement that failed, 0 if none did; None if there is none."""
        return self._failed

    def known(self, x: Any, what: str) -> Array:
        """See `XlaContext`."""
        if isinstance(x, (np.ndarray, np.generic)):
            return np.asarray(x)
        raise _refused(self.node, f"needs {what} when the graph is compiled, and data decide it")

    def require(self, holds: Any, why: str) -> None:
        """See `XlaContext`."""
        number = self._requirements.add(self.node, why)
        self.merge(jnp.where(jnp.all(holds), np.int32(0), np.int32(number)))

    def merge(self, failed: Any) -> None:
        """See `XlaContext`."""
        before = self._failed
        self._failed = failed if before is None else jnp.where(before == 0, failed, before)

    def batch_statistics(self, x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
        """See `XlaContext`."""
        return x.mean(axes), x.var(axes)

    def attention(self, *operands: Any, **how: Any) -> Any:
        """See `XlaContext`."""
        return fused.attention(*operands, **how) if self._kernels else NotImplemented

    def attention_gradient(self, *operands: Any, **how: Any) -> Any:
        """See `XlaContext`."""
        return fused.attention_gradient(*operands, **how) if self._kernels else NotImplemented

    def region(self, i: int) -> Region:
        """See `XlaContext`."""
        function, sizes = self.node.regions[i], dict(self._sizes)

        def run(*args: Any) -> tuple[list[Any], Any]:
            inner = Trace(self._requirements, dict(sizes), kernels=self._kernels)
            results = inner.run(function, args)
            arrays = [jnp.asarray(r) for r in results]
            return arrays, np.int32(0) if inner.failed is None else inner.failed

        return run

    def run(
        self,
        function: Function,
        args: Sequence[Any],
        old: Sequence[Any] = (),
        wanted: NodeShardings = NOTHING_WANTED,
    ) -> list[Any]:
        """Return the results of a function of this scope on tracers and known arrays.

        old: for each result that is state, what it stays where a requirement fails; None for the
        others. wanted: by index of the node, how its operands and its outputs are split.
        """
        sizes = self._sizes
        for param in function.params:
            for d in param.type.shape:
                if is_symbol(d):
                    sizes.pop(str(d), None)
        values: dict[Value, Any] = {}
        for param, arg in zip(function.params, args, strict=True):
            bind(sizes, param.type, arg)
            values[param] = arg
        contents: dict[Value, Known] = {}
        stays = {r: x for r, x in zip(function.results, old, strict=False) if x is not None}
        for i, node in enumerate(function.nodes):
            operands = [None if v is None else values[v] for v in node.inputs]
            for name in introduced_sizes(node):
                sizes.pop(name, None)
            before, after = wanted.get(i, ((), ()))
            results = self.lowered(node, _split(operands, before), contents)
            results = _split(results, after)
            note_contents(row_of(node), node, contents)
            for value, result in zip(node.outputs, results, strict=True):
                keeps = value in stays and not isinstance(result, np.ndarray)
                values[value] = self.kept(value, result, stays[value]) if keeps else result
                bind(sizes, value.type, result)
        if not old:
            return [values[r] for r in function.results]
        return [self.kept(r, values[r], x) for r, x in zip(function.results, old, strict=True)]

    def kept(self, value: Value, new: Any, old: Any) -> Any:
        """Return new state, or the old one where a requirement up to here fails.

        That is decided where state is computed, so that what follows from it, as weights follow
        from momentum, reads what is stored. At the end XLA would compute momentum a second time
        for the weights, from a copy of the old one.
        """
        if old is None or self._failed is None:
            return new
        if self._decided.get((value, id(old))) is self._failed:
            return new
        self._decided[value, id(old)] = self._failed
        return jnp.where(self._failed == 0, new, old)

    def lowered(
        self, node: Node, operands: Sequence[Any], contents: dict[Value, Known]
    ) -> Sequence[Any]:
        """Return the outputs of a node: arrays if they are known now, else traced."""
        if self._is_known(node, operands):
            known = [None if v is None else contents.get(v) for v in node.inputs]
            return run_node(TABLE, node, operands, self._sizes, known)
        outer, self._node = self._node, node
        try:
            rule = rule_of(row_of(node))
            raw: Any = NotImplemented
            if rule is not None:
                raw = rule(self, *operands, **self._attributes(node))
            if raw is NotImplemented:
                raw = self._expanded(node, operands, contents)
        except TriplaneError:
            raise
        except (TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise InvalidInput(failure(node, str(error), [])) from error
        finally:
            self._node = outer
        results = raw if isinstance(raw, (tuple, list)) else (raw,)
        return [_held(x, v.type) for x, v in zip(results, node.outputs, strict=False)]

    def _expanded(
        self, node: Node, operands: Sequence[Any], contents: dict[Value, Known]
    ) -> Sequence[Any]:
        body = expansion(TABLE, node, contents)
        if body is None:
            raise _refused(node, "has no rule for XLA")
        inner = Trace(self._requirements, dict(self._sizes), kernels=self._kernels)
        results = inner.run(body, [x for x in operands if x is not None])
        if inner.failed is not None:
            self.merge(inner.failed)
        return results

    def _attributes(self, node: Node) -> dict[str, Any]:
        full = row_of(node).full_attrs(node.attrs)
        return {k: self._concrete(v) for k, v in full.items()}

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, tuple) and any(not isinstance(d, (int, float, str)) for d in value):
            return tuple(evaluate(d, self._sizes) for d in value)
        return value

    def _is_known(self, node: Node, operands: Sequence[Any]) -> bool:
        """Return whether the outputs are computed now: they follow from what is known, and fit."""
        row = row_of(node)
        if row.nondeterministic or node.regions:
            return False
        if not all(x is None or isinstance(x, np.ndarray) for x in operands):
            return False
        if row.name == "Constant":
            return True
        outputs = [prod(self._size(d) for d in v.type.shape) for v in node.outputs]
        return max(outputs, default=0) <= MAX_KNOWN

    def _size(self, dim: Any) -> int:
        try:
            return evaluate(dim, self._sizes)
        except (KeyError, TriplaneError):
            return 0  # only these known operands decide it


def _split(arrays: Sequence[Any], shardings: Sequence[Any]) -> Sequence[Any]:
    """Return traced arrays split as wanted; without a wish XLA decides."""
    if not shardings:
        return arrays
    return [
        x if x is None or isinstance(x, np.ndarray) else lax.with_sharding_constraint(x, s)
        for x, s in zip(arrays, shardings, strict=True)
    ]


def _held(x: Any, type_: TensorType) -> Any:
    """Return a rule's result with the inferred element type, and no weak one."""
    dtype = type_.dtype.numpy
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x, dtype)
    return lax.convert_element_type(x, dtype)

"""Check functions from files: infer the types of every node and compare them with the claimed ones.

A function from a file claims its types, and engines and passes rely on them. Each node must be a
known operator of the version that this program implements, with operands, attributes and regions as
its row declares, and its output types must be those that the row infers. The work of a check is
limited before it is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import defs

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.ir import module as modules
from triplane.unified_ir.ir.decode import MISREAD
from triplane.unified_ir.ir.dims import Dim, FloorDiv
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.module import Module
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.build import MAX_SIZES, infer_types, note_contents
from triplane.unified_ir.ops.inline import introduced_sizes
from triplane.unified_ir.ops.row import Known, Op
from triplane.unified_ir.ops.signatures import counted
from triplane.unified_ir.ops.table import TABLE

MAX_WORK: Final = 4_000_000
"""Symbolic terms of each operand, squared, over all nodes; an operand with one symbol counts 1."""

_Types = tuple["TensorType | None", ...]


def load(path: str | Path, expected_digest: str | None = None) -> Module:
    """Read a model file and check every function; arrays are views of the mapped file.

    Corrupt names the damaged part, or the function and node whose claims are wrong.
    `expected_digest`: the root digest, in hexadecimal.
    """
    module = modules.read(path, expected_digest)
    try:
        check_module(module)
    except Corrupt as error:
        hint = f"; {MISREAD}" if modules.may_be_misread(Path(path), module) else ""
        raise Corrupt(f"{Path(path).name}: {error}{hint}") from error
    return module


def save(module: Module, path: str | Path, *, parent: str = "") -> str:
    """Write a model file, load it again before it takes its name, and return its root digest.

    Raises Corrupt if `load` refuses what was written; a file of that name stays as it was.
    parent: root digest of the file that the model was made from. Checking takes as long as `load`,
    which hashes the file and infers its types.
    """
    return module.save(path, parent=parent, check=load)


def check_module(module: Module) -> None:
    """Raise Corrupt unless every function of the module passes `check_function`."""
    checker = _Checker()
    for name, function in module.functions.items():
        _labelled(f"function {name!r}", checker, function)


def check_function(function: Function) -> None:
    """Raise Corrupt, naming node and operator, unless inference gives the function's types."""
    _labelled(f"function {function.name!r}", _Checker(), function)


def _labelled(label: str, checker: _Checker, function: Function) -> None:
    try:
        checker.function(function)
    except Corrupt as error:
        raise Corrupt(f"{label}: {error}") from error


class _Checker:
    """Types inferred so far, and the work done for them."""

    def __init__(self) -> None:
        self.work = 0
        self.seen: dict[Any, tuple[TensorType, ...]] = {}

    def function(self, function: Function) -> None:
        """Check nodes in order; each value must be computed before it is used."""
        known: dict[Value, Known] = {}
        computed = set(function.params)
        symbols = set().union(*(p.type.symbols for p in function.params))
        for i, node in enumerate(function.nodes):
            try:
                if not computed.issuperset(v for v in node.inputs if v is not None):
                    raise Corrupt("an operand is not computed before it")
                self.node(node, known, symbols)
            except Corrupt as error:
                raise Corrupt(f"node {i} ({node.op}): {error}") from error
            computed.update(node.outputs)
            for value in node.outputs:
                symbols |= value.type.symbols
        if not computed.issuperset(function.results):
            raise Corrupt("a result is not computed in it")

    def node(self, node: Node, known: dict[Value, Known], symbols: set[str]) -> None:
        """Check one node and record what is known of its contents."""
        row = _row(node)
        _check_operands(row, node)
        _check_attrs(row, node)
        names = introduced_sizes(node)
        # Two nodes that introduce one symbol would make two unrelated sizes look equal, and
        # inference would accept operands that do not fit.
        if len(set(names)) < len(names) or not symbols.isdisjoint(names):
            raise Corrupt(f"the size {next(iter(names))!r} that it introduces exists already")
        for k, region in enumerate(node.regions):
            _labelled(f"region {k}", self, region)
        operand_types = tuple(None if v is None else v.type for v in node.inputs)
        contents = tuple(None if v is None else known.get(v) for v in node.inputs)
        inferred = self.infer(row, node, operand_types, contents)
        claimed = tuple(v.type for v in node.outputs)
        if inferred != claimed:
            raise Corrupt(
                f"claims the types {_shown(claimed)}, but gives {_shown(inferred)} "
                f"for operands {_shown(operand_types)}"
            )
        note_contents(row, node, known)

    def infer(
        self, row: Op, node: Node, types: _Types, known: Sequence[Known | None]
    ) -> tuple[TensorType, ...]:
        """Infer output types; equal calls are inferred once."""
        attrs = tuple((k, _hashable(v)) for k, v in node.attrs.items())
        key = (row.id, types, tuple(map(_hashable, known)), attrs, len(node.outputs))
        # The key does not cover regions, so nodes with regions are inferred each time.
        inferred = None if node.regions else self.seen.get(key)
        if inferred is None:
            # Products of polynomials take quadratic time in their terms. Counted before inferring,
            # so that a file cannot keep the checker busy.
            self.work += sum(_weight(t) for t in types if t is not None)
            if self.work > MAX_WORK:
                raise Corrupt("the module has more symbolic sizes than can be checked")
            inferred = self.seen[key] = _inferred(row, node, types, known)
        return inferred


def _row(node: Node) -> Op:
    row = TABLE.get((node.op.domain, node.op.name))
    if row is None:
        raise Corrupt("there is no such operator")
    if row.id.since != node.op.since:
        raise Corrupt(
            f"this program implements version {row.id.since} of the operator, not {node.op.since}; "
            "convert the model again with the version of triplane that wrote it"
        )
    if node.regions and not _takes_regions(row):
        raise Corrupt(f"it takes no regions, got {len(node.regions)}")
    return row


def _check_operands(row: Op, node: Node) -> None:
    fewest, most = row.arity
    if not fewest <= len(node.inputs) <= most:
        raise Corrupt(f"it takes {counted(row)}, not {len(node.inputs)}")
    for i, value in enumerate(node.inputs):
        if value is None and not _optional(row, i):
            raise Corrupt(f"operand {i} is absent")


def _optional(row: Op, i: int) -> bool:
    if row.schema is None:
        return i < len(row.operands) and row.operands[i].endswith("?")
    declared = row.schema.inputs[min(i, len(row.schema.inputs) - 1)]
    return bool(declared.option == defs.OpSchema.FormalParameterOption.Optional)


def _check_attrs(row: Op, node: Node) -> None:
    for name, value in node.attrs.items():
        spec = row.attr_specs.get(name)
        if spec is None:
            raise Corrupt(f"it has no attribute {name!r}")
        if not _HOLDS[spec.kind](value):
            raise Corrupt(f"its attribute {name!r} is {spec.kind}, not {type(value).__name__}")
    for name, spec in row.attr_specs.items():
        if spec.required and name not in node.attrs:
            raise Corrupt(f"its attribute {name!r} is absent")


def _tuple_of(value: Any, kind: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, kind) for v in value)


# fmt: off
_HOLDS: Final[Mapping[str, Any]] = {
    "INT":     lambda v: type(v) is int,
    "FLOAT":   lambda v: type(v) is float,
    "STRING":  lambda v: type(v) is str,
    "INTS":    lambda v: _tuple_of(v, int),
    "FLOATS":  lambda v: _tuple_of(v, float),
    "STRINGS": lambda v: _tuple_of(v, str),
    "TENSOR":  lambda v: isinstance(v, np.ndarray),
    "DIMS":    lambda v: _tuple_of(v, Dim),
    "TYPE_PROTO": lambda v: isinstance(v, TensorType),
}
# fmt: on


@cache
def _takes_regions(row: Op) -> bool:
    # Only kernels of control-flow rows have this parameter (`evaluate` passes regions by it).
    kernel = row.reference
    return kernel is not None and "regions" in inspect.signature(kernel).parameters


def _inferred(
    row: Op, node: Node, types: _Types, known: Sequence[Known | None]
) -> tuple[TensorType, ...]:
    """Infer output types; rules are written for valid calls and may fail in any way on others."""
    try:
        n = len(node.outputs)
        return infer_types(TABLE, row, types, known, node.attrs, regions=node.regions, outputs=n)
    except InvalidInput as error:
        raise Corrupt(str(error)) from error
    except Exception as error:
        raise Corrupt(f"its types cannot be inferred: {type(error).__name__}: {error}") from error


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MAX_SIZES * 8
        # Arrays of a module live as long as its checker, so an id is not reused while it is a key.
        return (str(value.dtype), value.shape, value.tobytes() if small else id(value))
    return value


@lru_cache(maxsize=65_536)
def _weight(type_: TensorType) -> int:
    return sum(_terms(d) for d in type_.shape) ** 2


def _terms(dim: Dim) -> int:
    if isinstance(dim, int):
        return 0
    atoms = [atom for monomial, _ in dim.terms for atom, _ in monomial]
    inner = [a for a in atoms if isinstance(a, FloorDiv)]
    return len(dim.terms) + sum(_terms(a.numerator) + _terms(a.denominator) for a in inner)


def _shown(types: _Types) -> str:
    return ", ".join("none" if t is None else str(t) for t in types[:8]) or "nothing"

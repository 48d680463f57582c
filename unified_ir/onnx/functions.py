"""Functions of ONNX: a model's local functions, and the bodies of operators that have no row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from onnx import FunctionProto, GraphProto, NodeProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.onnx.source import subgraphs_of
from triplane.unified_ir.ops.infer import type_proto

FunctionKey = tuple[str, str, str]
"""Domain, name, overload."""

MAX_CALLS: Final = 64
"""The deepest nesting of function calls."""


def domain_of(domain: str) -> str:
    """Return the domain, "" for either name of ONNX's own."""
    return "" if domain == "ai.onnx" else domain


def key_of(domain: str, name: str, overload: str) -> FunctionKey:
    """Return the key of a function, or of the node that calls it."""
    return (domain_of(domain), name, overload)


def local_functions(functions: Iterable[FunctionProto]) -> dict[FunctionKey, FunctionProto]:
    """Return a model's functions by key; refuse one that is defined twice."""
    by_key: dict[FunctionKey, FunctionProto] = {}
    for function in functions:
        key = key_of(function.domain, function.name, function.overload)
        if by_key.setdefault(key, function) is not function:
            raise InvalidInput(f"the function {function.name[:80]!r} is defined twice")
    return by_key


def check_expanded(
    graph: GraphProto, functions: Mapping[FunctionKey, FunctionProto], most: int
) -> None:
    """Refuse more than `most` nodes after inlining, recursive functions, and calls too deep."""
    sizes: dict[FunctionKey, int] = {}

    # Counted once per function and added per call, not expanded: functions that call others twice,
    # 64 levels deep, would be 2^64 nodes.
    def size(nodes: Iterable[NodeProto], calls: tuple[FunctionKey, ...]) -> int:
        total = 0
        for node in nodes:
            total += 1 + sum(size(inner.node, calls) for inner in subgraphs_of(node))
            key = key_of(node.domain, node.op_type, node.overload)
            if key in functions:
                total += called(key, calls)
        return total

    def called(key: FunctionKey, calls: tuple[FunctionKey, ...]) -> int:
        if key in calls:
            raise InvalidInput(f"the function {key[1][:80]!r} calls itself")
        if len(calls) >= MAX_CALLS:
            raise InvalidInput(f"function calls nest more than {MAX_CALLS} deep")
        if key not in sizes:
            sizes[key] = size(functions[key].node, (*calls, key))
        return sizes[key]

    if size(graph.node, ()) > most:
        raise InvalidInput(f"the model has more than {most} nodes after its functions are inlined")


def has_body(schema: Any) -> bool:
    """Return whether ONNX defines the operator by other operators."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def body_of(
    schema: Any, node: NodeProto, types: Sequence[TensorType | None], opset: int
) -> FunctionProto:
    """Return the body of a node for operands of these types, in its newest form up to `opset`."""
    if schema.has_function:
        version = _newest(schema.function_opset_versions, opset)
        function = schema.get_function_with_opset_version(version)
    else:
        version = _newest(schema.context_dependent_function_opset_versions, opset)
        # Such bodies depend on the types of operands, for instance on the rank.
        operand_types = [b"" if t is None else type_proto(t).SerializeToString() for t in types]
        function = schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), operand_types
        )
    return FunctionProto.FromString(function) if isinstance(function, bytes) else function


def _newest(versions: Sequence[int], opset: int) -> int:
    return max((v for v in versions if v <= opset), default=min(versions))

"""How many nodes a model has when its functions are inlined, known before any is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from onnx import FunctionProto, GraphProto, NodeProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.onnx.source import subgraphs_of

FunctionKey = tuple[str, str, str]
"""Domain, name, overload."""

MAX_CALLS: Final = 64
"""Functions called inside one another."""


def key_of(domain: str, name: str, overload: str) -> FunctionKey:
    """The key of a function, or of the node that calls it."""
    return ("" if domain == "ai.onnx" else domain, name, overload)


def check_expanded(
    graph: GraphProto, functions: Mapping[FunctionKey, FunctionProto], most: int
) -> None:
    """InvalidInput: more than `most` nodes, a function that calls itself, or calls too deep."""
    sizes: dict[FunctionKey, int] = {}

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
            raise InvalidInput(f"functions call one another more than {MAX_CALLS} deep")
        if key not in sizes:
            sizes[key] = size(functions[key].node, (*calls, key))
        return sizes[key]

    if size(graph.node, ()) > most:
        raise InvalidInput(f"the model has more than {most} nodes, functions inlined")

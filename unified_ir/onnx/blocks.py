"""Repeated structure of a model as ONNX functions: the same results from a fraction of the nodes.

Every repeated block becomes a function of the domain `triplane.blocks`, every occurrence a call of
it. A runtime that inlines functions, as onnxruntime does, runs the same nodes as before.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from typing import Final

from onnx import FunctionProto, ModelProto, NodeProto, helper

from triplane.proto.errors import Conflict
from triplane.unified_ir.onnx.source import subgraphs_of
from triplane.unified_ir.passes.repeats import LEAST_NODES, Block, Listing, repeats

BLOCKS: Final = "triplane.blocks"
"""Domain of the functions for blocks."""
SINCE: Final = 1


def fold_repeats(model: ModelProto, least_nodes: int = LEAST_NODES) -> ModelProto:
    """Return the model with each repeated block of at least `least_nodes` nodes as a function.

    Names of values do not change. Nodes with subgraphs stay outside functions. A model that already
    has functions in `triplane.blocks` is refused with Conflict: inline them first.
    """
    if any(f.domain == BLOCKS for f in model.functions):
        raise Conflict(f"the model has functions in {BLOCKS!r} already; inline them before folding")
    nodes = list(model.graph.node)
    listing, names = _listed(model)
    folded = deepcopy(model)
    del folded.graph.node[:]
    calls = {}
    for number, block in enumerate(repeats(listing, least_nodes)):
        function = _function(f"block_{number}", block, nodes, listing, model)
        folded.functions.append(function)
        for start, arguments in zip(block.starts, block.arguments, strict=True):
            produced = [nodes[start + node].output[k] for node, k in block.outputs]
            taken = [names[value] for value in arguments]
            name = f"{function.name}/{start}"
            call = helper.make_node(function.name, taken, produced, domain=BLOCKS, name=name)
            calls[start] = (block.length, call)
    at = 0
    while at < len(nodes):
        length, node = calls.get(at, (1, nodes[at]))
        folded.graph.node.append(node)
        at += length
    if folded.functions:
        folded.opset_import.append(helper.make_opsetid(BLOCKS, SINCE))
    return folded


def node_count(model: ModelProto) -> int:
    """Count the nodes in the model's file: those of the graph, and of each function once."""
    return len(model.graph.node) + sum(len(f.node) for f in model.functions)


def _listed(model: ModelProto) -> tuple[Listing, list[str]]:
    """Return the top-level nodes of a model, and the name of each value."""
    nodes = model.graph.node
    captured = (name for node in nodes for name in _captured(node))
    return Listing.of(
        [_label(node) for node in nodes],
        ([name or None for name in node.input] for node in nodes),
        (node.output for node in nodes),
        [*(info.name for info in model.graph.output), *captured],
    )


def _label(node: NodeProto) -> Hashable:
    """Return a node's operation; None for one with subgraphs, which may read any name around it."""
    if next(subgraphs_of(node), None) is not None or any(not name for name in node.output):
        return None
    attrs = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return (node.domain, node.op_type, node.overload, *attrs)


def _captured(node: NodeProto) -> list[str]:
    """Return every name that is read inside a node's subgraphs."""
    captured = []
    for graph in subgraphs_of(node):
        captured += [info.name for info in graph.output]
        for inner in graph.node:
            captured += [*inner.input, *_captured(inner)]
    return [name for name in captured if name]


def _function(
    name: str, block: Block, nodes: list[NodeProto], listing: Listing, model: ModelProto
) -> FunctionProto:
    """Return the function for a block: its first occurrence, with names of its own."""
    start, arguments = block.starts[0], block.arguments[0]
    local = {value: f"x{i}" for i, value in enumerate(arguments)}
    for i in range(start, start + block.length):
        for value in listing.outputs[i]:
            local[value] = f"v{len(local)}"
    body = []
    for i in range(start, start + block.length):
        node = deepcopy(nodes[i])
        node.ClearField("name")
        node.input[:] = [local.get(value, "") for value in listing.inputs[i]]
        node.output[:] = [local[value] for value in listing.outputs[i]]
        body.append(node)
    return helper.make_function(
        BLOCKS,
        name,
        [local[value] for value in arguments],
        [local[listing.outputs[start + node][k]] for node, k in block.outputs],
        body,
        list(model.opset_import),
    )

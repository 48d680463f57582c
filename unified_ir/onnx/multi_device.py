"""Strategies of nodes as ONNX's multi-device annotations, and back.

A node with a strategy gets a `NodeDeviceConfigurationProto` with a `ShardingSpecProto` for each
operand: into how many shards each axis is cut, and which devices have them. The model declares one
configuration with as many devices as its strategies need. Stock runtimes ignore all of it.

Reading takes the shards of the operands, in the model's first configuration. An annotation that
breaks a rule of ONNX is refused; one that is correct and says what no strategy can (shards that do
not divide, spatial axes of a convolution, several devices in a subgraph) is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, ShardingSpecProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import limits
from triplane.unified_ir.ir.graph import Node, Value
from triplane.unified_ir.ir.split import check_divides
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.factors import Axes
from triplane.unified_ir.ops.row import Known
from triplane.unified_ir.ops.sharding import attach, cuts_of, factors_of_node
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.ops.tensor import Tensor

CONFIGURATION: Final = "triplane"
"""Name of the configuration that export writes."""
IR_VERSION: Final = 11
"""The first version of ONNX's file format with multi-device annotations."""


MAX_LISTED: Final = 1 << 22
"""Numbers of devices, over all nodes of a model."""


@dataclass(frozen=True, slots=True)
class ShardedNode:
    """An emitted node with a strategy: the factors of its operands' axes, and the cut ones."""

    emitted: NodeProto
    node: Node
    axes: tuple[Axes, ...]
    cuts: Mapping[str, int]

    @property
    def devices(self) -> int:
        """Return how many devices its slices need."""
        return math.prod(self.cuts.values())


def sharded_node(
    node: Node, names: Sequence[str], emitted: Sequence[NodeProto], contents: Mapping[Value, Known]
) -> ShardedNode | None:
    """Return the strategy of a node for the ONNX node that stands for it; None if there is none.

    names: of the operands. A node that is written in another form loses its strategy, and so does
    one whose sizes the slices do not divide, such as a fixed batch.
    """
    wanted = list(names)
    while wanted and not wanted[-1]:
        wanted.pop()
    same = [n for n in emitted if n.op_type == node.op.name and list(n.input) == wanted]
    if not node.strategy or not same:
        return None
    known = [None if v is None else contents.get(v) for v in node.inputs]
    factors = factors_of_node(TABLE, node, known)
    try:
        for slices, value in zip(node.strategy, node.inputs, strict=True):
            if value is not None and slices:
                check_divides(slices, value, node.op.name)
        cuts = cuts_of(row_of(node), factors, node.strategy)
    except InvalidInput:  # or a split that only a plan knows how to make, such as that of a Scan
        return None
    return ShardedNode(same[0], node, factors.operands, cuts)


def annotate(model: ModelProto, sharded: Sequence[ShardedNode]) -> None:
    """Write the strategies of emitted nodes, unless they need more devices than can be listed."""
    devices = math.lcm(*(s.devices for s in sharded))
    if not sharded or devices > limits.MAX_SLICES or devices * len(sharded) > MAX_LISTED:
        return
    model.ir_version = max(model.ir_version, IR_VERSION)
    model.configuration.add(name=CONFIGURATION, num_devices=devices)
    by_name = {n.name: n for n in model.graph.node}
    for item in sharded:
        target = by_name.get(item.emitted.name)
        if target is None:
            continue
        config = target.device_configurations.add(configuration_id=CONFIGURATION)
        for k, value in enumerate(item.node.inputs):
            if value is not None:
                config.sharding_spec.append(_spec(item, k, value, target.input[k], devices))


def _spec(item: ShardedNode, k: int, value: Value, name: str, devices: int) -> ShardingSpecProto:
    """Return how one operand is cut; the devices form a mesh with an axis for each factor."""
    spec = ShardingSpecProto(tensor_name=name)
    axes, slices = item.axes[k], item.node.strategy[k]
    for axis, n in enumerate(slices):
        if n > 1:
            size = value.type.shape[axis]
            dim = spec.sharded_dim.add(axis=axis).simple_sharding.add(num_shards=n)
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = str(size)
    factors = list(item.cuts)
    mesh = np.arange(devices).reshape(*item.cuts.values(), devices // item.devices)
    own = [factors.index(f) for f, n in zip(axes, slices, strict=True) if n > 1]
    rest = [i for i in range(mesh.ndim) if i not in own]
    groups = mesh.transpose([*own, *rest]).reshape(math.prod(slices), -1)
    for number, group in enumerate(groups.tolist()):
        if len(group) == 1:
            spec.device.append(group[0])
            continue
        # A number beyond the devices stands for all that have the same shard.
        spec.device.append(devices + number)
        spec.index_to_device_group_map.add(key=devices + number, value=group)
    return spec


def read_annotations(
    declared: Mapping[str, None],
    node: NodeProto,
    inputs: Sequence[Tensor | None],
    build: Build,
    start: int,
) -> None:
    """Give what was recorded for an ONNX node, from `start` on, the strategy in its annotations.

    declared: the names of the model's configurations, in order. InvalidInput: the annotations break
    a rule of ONNX.
    """
    for config in node.device_configurations:
        if config.configuration_id not in declared:
            raise InvalidInput(
                f"its device configuration {config.configuration_id[:80]!r} is not among those of "
                f"the model ({', '.join(repr(n[:80]) for n in islice(declared, 8)) or 'none'})"
            )
    first = next(iter(declared))
    chosen = [c for c in node.device_configurations if c.configuration_id == first]
    if not chosen:
        return
    present = [(name, x) for name, x in zip(node.input, inputs, strict=True) if x is not None]
    ranks, outputs = {name: x.rank for name, x in present}, set(node.output)
    shards: dict[str, deque[tuple[int, ...] | None]] = {}
    for spec in chosen[0].sharding_spec:
        if spec.tensor_name in ranks:
            slices = _slices(spec, ranks[spec.tensor_name])
            shards.setdefault(spec.tensor_name, deque()).append(slices)
        elif spec.tensor_name not in outputs:
            raise InvalidInput(f"it has no tensor {spec.tensor_name[:80]!r}, which is annotated")
    strategy = [_next(shards, name, x) for name, x in present]
    if not shards or None in strategy:
        return
    try:
        attach(build, start, [x for _, x in present], [s or () for s in strategy], node.op_type)
    except InvalidInput:
        return  # correct for ONNX, and nothing that a strategy can say


def _next(shards: Mapping[str, deque[Any]], name: str, x: Tensor) -> tuple[int, ...] | None:
    """Return the slices of the next operand of a name; a tensor that is read twice may have two."""
    specs = shards.get(name)
    if not specs:
        return (1,) * x.rank
    return specs.popleft() if len(specs) > 1 else specs[0]  # type: ignore[no-any-return]


def _slices(spec: ShardingSpecProto, rank: int) -> tuple[int, ...] | None:
    """Return the slices of each axis; None if they are not equal parts of it."""
    slices, what = [1] * rank, f"the annotation of {spec.tensor_name[:80]!r}"
    seen: set[int] = set()
    fused = False
    for dim in spec.sharded_dim:
        if not -rank <= dim.axis < rank or dim.axis % rank in seen:
            raise InvalidInput(
                f"{what} cuts axis {dim.axis}, out of range or twice, of {rank} axes"
            )
        seen.add(dim.axis % rank)
        counts = [part.num_shards for part in dim.simple_sharding]
        if any(n < 1 for n in counts):
            raise InvalidInput(f"{what} cuts axis {dim.axis} into {min(counts)} shards")
        fused |= len(counts) > 1
        slices[dim.axis % rank] = counts[0] if counts else 1
    return None if fused else tuple(slices)

"""The operator table: every row by (domain, name). Suites, engines and docs iterate it."""

from __future__ import annotations

from types import MappingProxyType, ModuleType
from typing import Final

from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ops import (
    activations,
    attention,
    barrier,
    bits,
    conditional,
    conv_gradients,
    convolution,
    custom_gradients,
    custom_ops,
    detection,
    drawing,
    elementwise,
    equations,
    image_files,
    indexing,
    likelihood,
    looping,
    matrix,
    mean_pool,
    norm,
    onnx_dropout,
    patches,
    pool,
    products,
    quant,
    random,
    recurrent,
    reductions,
    regions,
    resizing,
    sample_norm,
    sampling,
    scanning,
    selection,
    sequences,
    shapes,
    signal,
    slicing,
    structure,
    text,
)
from triplane.unified_ir.ops import recurrences as sweeps
from triplane.unified_ir.ops import shape_assertions as claims
from triplane.unified_ir.ops.row import Op, Table

_MODULES: Final = (
    activations,
    attention,
    barrier,
    bits,
    claims,
    conditional,
    conv_gradients,
    convolution,
    custom_gradients,
    custom_ops,
    detection,
    drawing,
    elementwise,
    equations,
    image_files,
    indexing,
    likelihood,
    looping,
    matrix,
    mean_pool,
    norm,
    onnx_dropout,
    patches,
    pool,
    products,
    quant,
    random,
    recurrent,
    reductions,
    regions,
    resizing,
    sample_norm,
    sampling,
    scanning,
    selection,
    sequences,
    shapes,
    signal,
    slicing,
    structure,
    sweeps,
    text,
)


def _collect(modules: tuple[ModuleType, ...]) -> dict[tuple[str, str], Op]:
    table: dict[tuple[str, str], Op] = {}
    for module in modules:
        assert isinstance(module, ModuleType), f"{module} hides the module of that name"
        for value in vars(module).values():
            if isinstance(value, Op):
                known = table.setdefault((value.domain, value.name), value)
                assert known is value, f"two rows for {value}"
    return table


TABLE: Final[Table] = MappingProxyType(_collect(_MODULES))


def row_of(node: Node) -> Op:
    """The row of a node's operator."""
    return TABLE[node.op.domain, node.op.name]

"""Bodies in ONNX's own words, for operators that have no row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import FunctionProto, NodeProto

from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.infer import type_proto


def has_body(schema: Any) -> bool:
    """Whether ONNX defines the operator by others."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def function_of(
    schema: Any, node: NodeProto, types: Sequence[TensorType | None], opset: int
) -> FunctionProto | None:
    """The body of a node for operands of these types, in its newest form up to `opset`."""
    if schema.has_function:
        version = _newest(schema.function_opset_versions, opset)
        function = schema.get_function_with_opset_version(version)
    elif schema.has_context_dependent_function:
        version = _newest(schema.context_dependent_function_opset_versions, opset)
        operand_types = [b"" if t is None else type_proto(t).SerializeToString() for t in types]
        function = schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), operand_types
        )
    else:
        return None
    return FunctionProto.FromString(function) if isinstance(function, bytes) else function


def _newest(versions: Sequence[int], opset: int) -> int:
    fitting = [v for v in versions if v <= opset]
    return max(fitting, default=min(versions))

"""Find the nodes that really run on integers, in the graph that onnxruntime optimized.

Q/DQ form is only a request; onnxruntime's optimizer decides. It can save the graph that it will
run, in which a fused kernel keeps the name of the product that it absorbed. Integer kernels for
every product do not imply speed: operators between the products may run in float, and each change
to float and back converts the whole tensor. So the shares of a call's time are measured too.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx

from triplane.unified_ir.engines.profile import kernel_shares
from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ops.row import IntegerForm
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.quantize import Artifact
from triplane.unified_ir.runtime import SessionOptions

PRODUCTS: Final = frozenset(
    row.name
    for row in TABLE.values()
    if row.integer_form in {IntegerForm.PRODUCT, IntegerForm.RECURRENT}
)
"""Operators that multiply by weights and have an integer form."""
# An LSTM in int8 is emitted under this name, see `targets`.
_EMITTED: Final = frozenset({*PRODUCTS, "DynamicQuantizeLSTM"})
INTEGER: Final = frozenset(
    {
        "QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "MatMulInteger",
        "ConvInteger", "DynamicQuantizeMatMul", "QLinearAdd", "QLinearMul", "QLinearAveragePool",
        "QLinearGlobalAveragePool", "QLinearConcat", "QLinearSoftmax", "QLinearSigmoid",
        "QLinearLeakyRelu", "NhwcMaxPool", "DynamicQuantizeLSTM",
    }
)  # fmt: skip
"""onnxruntime's kernels that compute on integers."""
UNKNOWN: Final = "unknown"
"""The kernel of a node whose name did not survive fusion."""
_NAME: Final = re.compile(r"(?<![a-zA-Z0-9])n\d+(?![0-9])")
"""A node's name as emitted: onnxruntime makes `n7_token_2`, `fused n7` and `n7_nchwc` of `n7`."""
CASTS: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
CALLS: Final = 10
"""Number of profiled calls; the median of a kernel counts."""
SHOWN: Final = 3
"""Number of float kernels that a report names."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Kernels of an optimized graph. products: kernel by product node, in the function's order."""

    integer: Mapping[str, int]
    casts: Mapping[str, int]
    other: Mapping[str, int]
    products: tuple[str, ...]

    @property
    def all_int8(self) -> bool:
        """Whether every product runs on integers."""
        return all(kernel in INTEGER for kernel in self.products)

    def record(self) -> dict[str, Any]:
        """Return the kernels as JSON."""
        return {
            "int8_kernels": dict(self.integer),
            "conversions": dict(self.casts),
            "other_kernels": dict(self.other),
            "products": list(self.products),
        }


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time of a call, which add up to 1; in_float: by kernel, largest first."""

    integer: float
    conversions: float
    in_float: Mapping[str, float]

    def __str__(self) -> str:
        floats = sum(self.in_float.values())
        most = [f"{k} {100 * s:.0f} %" for k, s in list(self.in_float.items())[:SHOWN] if s > 0.01]
        named = f" ({', '.join(most)})" if most else ""
        return (
            f"{100 * self.integer:.0f} % of the time on integers, {100 * self.conversions:.0f} % "
            f"converting to and from them, {100 * floats:.0f} % in float or moving data{named}"
        )

    def record(self) -> dict[str, Any]:
        """Return the shares as JSON."""
        return {
            "integer": round(self.integer, 4),
            "conversions": round(self.conversions, 4),
            "other": {k: round(s, 4) for k, s in self.in_float.items()},
        }


def product_nodes(function: Function) -> list[Node]:
    """Return the nodes that multiply by weights, in order."""
    return [node for node in function.nodes if node.op.name in PRODUCTS]


def residency(artifact: Artifact) -> Resident:
    """Return the kernels that this machine's onnxruntime chooses for a graph."""
    ours = onnx.load_from_string(artifact.model).graph.node
    products = [node for node in ours if node.op_type in _EMITTED]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        artifact.session(SessionOptions(optimized_model_path=path))
        optimized = onnx.load(path, load_external_data=False).graph
    # Matched by name, because fusion changes the operator, the inputs and the order of nodes.
    kernels = {_original(node.name): node.op_type for node in optimized.node}
    counts = Counter(node.op_type for node in optimized.node)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return Resident(
        integer={k: n for k, n in ordered if k in INTEGER},
        casts={k: n for k, n in ordered if k in CASTS},
        other={k: n for k, n in ordered if k not in INTEGER | CASTS},
        products=tuple(_kernel(node, ours, kernels) for node in products),
    )


def _original(name: str) -> str:
    match = _NAME.search(name)
    # The suffix marks float convolutions that onnxruntime converted to its blocked layout.
    return match.group() if match else name.removesuffix("_nchwc")


def _kernel(node: Any, nodes: Sequence[Any], kernels: Mapping[str, str]) -> str:
    """Return the kernel of a product by its name.

    A blocked float convolution is named by its output instead: the output of what it absorbed.
    """
    readers = [reader for reader in nodes if node.output[0] in reader.input]
    names = [node.name, node.output[0], *(r.output[0] for r in readers[:1])]
    return next((kernels[name] for name in names if name in kernels), UNKNOWN)


def time_shares(artifact: Artifact, feeds: Mapping[str, Array]) -> Shares:
    """Measure the shares on this machine by onnxruntime's profile of a few calls."""
    shares = kernel_shares(artifact.session, feeds, CALLS)
    return Shares(
        integer=sum(s for k, s in shares.items() if k in INTEGER),
        conversions=sum(s for k, s in shares.items() if k in CASTS),
        in_float={k: s for k, s in shares.items() if k not in INTEGER | CASTS},
    )

"""How much memory a function's tensors take on onnxruntime: foretold from its plan, and measured.

onnxruntime joins nodes and orders them as it likes, so the graph that counts is the one it has
made ready to run. Its nodes come in the order of execution; sizes are those of the graph it was
given, whose names it keeps. The measurement is its own profile of one run: which nodes ran when,
and the bytes of each output.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, shape_inference

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ir.types import BY_ONNX
from triplane.unified_ir.onnx import OnnxTarget, emit, emit_typed, serialize
from triplane.unified_ir.onnx.target import DEFAULT
from triplane.unified_ir.passes.memory import VIEWS, Live, MemoryRow, alive, type_bytes
from triplane.unified_ir.passes.recompute import RecomputationPlan, recompute
from triplane.unified_ir.runtime.session import Session, SessionOptions

TRIALS: Final = 8
"""Plans that are compared with what onnxruntime makes of them."""
_KERNEL: Final = "_kernel_time"


def foretold(
    function: Function,
    sizes: Mapping[str, int],
    *,
    target: OnnxTarget = DEFAULT,
    options: SessionOptions | None = None,
) -> Live[str]:
    """Bytes alive during each node that onnxruntime would run, without running any.

    sizes: of each symbol, such as {"N": 32}.
    """
    model, types = emit_typed(function, target=target)
    with tempfile.TemporaryDirectory() as folder:
        ready = _ready(model, Path(folder), options or SessionOptions())[1]
    known = _sizes(model, sizes) | {name: type_bytes(t, sizes) for name, t in types.items()}
    return _alive(ready, ready.graph.node, known)


def measured(
    function: Function,
    arguments: Mapping[str, Array],
    *,
    target: OnnxTarget = DEFAULT,
    options: SessionOptions | None = None,
) -> Live[str]:
    """Bytes alive during each node of one run, by onnxruntime's profile of it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        chosen = replace(options or SessionOptions(), profile_prefix=place / "run")
        session, ready = _ready(emit(function, target=target), place, chosen)
        session.run(arguments)
        events = json.loads(session.profile().read_text())
    nodes = {node.name: node for node in ready.graph.node}
    ran: list[NodeProto] = []
    known: dict[str, int] = {}
    for event in sorted((e for e in events if _is_kernel(e)), key=lambda e: int(e["ts"])):
        node = nodes.get(str(event["name"]).removesuffix(_KERNEL))
        if node is None:
            continue  # of a subgraph
        ran.append(node)
        names = [name for name in node.output if name]
        known.update(zip(names, map(_bytes_of, event["args"]["output_type_shape"]), strict=False))
    return _alive(ready, ran, known)


def within(
    function: Function,
    budget_bytes: int,
    sizes: Mapping[str, int],
    *,
    target: OnnxTarget = DEFAULT,
    options: SessionOptions | None = None,
) -> tuple[Function, RecomputationPlan]:
    """The function with recomputation, so that onnxruntime keeps within a budget; and the plan.

    The plan's figures are those foretold for onnxruntime. Of several plans the first that fits is
    taken, or the one with the lowest peak. InvalidInput: no plan can fit.
    """

    def peak(function_tried: Function) -> int:
        return foretold(function_tried, sizes, target=target, options=options).peak_bytes

    before = peak(function)
    recomputed, plan = recompute(function, budget_bytes, sizes)
    best = replace(plan, before_bytes=before, peak_bytes=peak(recomputed))
    asked = budget_bytes
    for _ in range(TRIALS):
        if best.fits or not plan.fits:
            break
        asked = max(plan.least_bytes, min(asked, plan.peak_bytes) * 19 // 20)
        tried, plan = recompute(function, asked, sizes)
        candidate = replace(
            plan, budget_bytes=budget_bytes, before_bytes=before, peak_bytes=peak(tried)
        )
        if candidate.peak_bytes < best.peak_bytes:
            recomputed, best = tried, candidate
        if asked == plan.least_bytes:
            break
    return recomputed, best


def _ready(model: ModelProto, folder: Path, options: SessionOptions) -> tuple[Session, ModelProto]:
    """A session, and the graph it runs."""
    saved = folder / "ready.onnx"
    session = Session(serialize(model), options=replace(options, optimized_model_path=saved))
    return session, onnx.load(saved)


def _alive(model: ModelProto, nodes: Sequence[NodeProto], known: Mapping[str, int]) -> Live[str]:
    rows = [
        MemoryRow(
            tuple(name for name in node.input if name),
            tuple(name for name in node.output if name),
            node.op_type in VIEWS,
        )
        for node in nodes
    ]
    return alive(rows, [info.name for info in model.graph.output], lambda v: known.get(v, 0))


def _sizes(model: ModelProto, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of what lowering added, as far as inference of shapes tells them."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for info in [*fixed.graph.input, *fixed.graph.output]:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            elif dim.HasField("dim_param"):
                dim.Clear()
    inferred = shape_inference.infer_shapes(fixed, data_prop=True).graph
    bytes_by_name = {}
    for info in [*inferred.value_info, *inferred.output]:
        tensor = info.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        if tensor.HasField("shape") and min(dims, default=0) >= 0:
            bytes_by_name[info.name] = math.prod(dims) * BY_ONNX[tensor.elem_type].bits // 8
    return bytes_by_name


def _is_kernel(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event["name"]).endswith(_KERNEL)


_PROFILED: Final = {"float": "float32", "double": "float64"}
"""Element types under the names of the profile, where they are not numpy's."""


def _bytes_of(typed: Mapping[str, Sequence[int]]) -> int:
    """One entry of `output_type_shape`: {"float": [32, 10]}."""
    ((name, dims),) = typed.items()
    try:
        item = np.dtype(_PROFILED.get(name, name)).itemsize
    except TypeError:
        raise InvalidInput(f"onnxruntime's profile names an element type {name!r}") from None
    return math.prod(dims) * item

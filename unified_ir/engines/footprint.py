"""The memory of a function's tensors on onnxruntime: predicted from its plan, and measured.

onnxruntime fuses and orders nodes by its own rules, so the graph that counts is the one that it has
optimized. Its nodes come in the order of execution; sizes are those of the original graph, whose
names it keeps. The measurement is onnxruntime's own profile of one run: which nodes ran when, and
the bytes of each output.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, shape_inference

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.profile import KERNEL, kernel_events
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ir.types import BY_ONNX
from triplane.unified_ir.onnx import OnnxTarget, emit, emit_typed, serialize
from triplane.unified_ir.onnx.target import DEFAULT
from triplane.unified_ir.passes.memory import VIEWS, Live, MemoryRow, alive, type_bytes
from triplane.unified_ir.passes.recompute import RecomputationPlan, recompute
from triplane.unified_ir.runtime.session import Session, SessionOptions

TRIALS: Final = 8
"""Number of recomputation plans whose memory on onnxruntime is compared."""


def predicted_footprint(
    function: Function,
    sizes: Mapping[str, int],
    *,
    target: OnnxTarget = DEFAULT,
    options: SessionOptions | None = None,
) -> Live[str]:
    """Return the bytes alive during each node that onnxruntime would run, without running any.

    sizes: the size of each symbol, such as {"N": 32}.
    """
    model, types = emit_typed(function, target=target)
    with tempfile.TemporaryDirectory() as folder:
        ready = _ready(model, Path(folder), options or SessionOptions())[1]
    # The types of our own graph win: they are known even where ONNX's shape inference gives up.
    known = _sizes(model, sizes) | {name: type_bytes(t, sizes) for name, t in types.items()}
    return _alive(ready, ready.graph.node, known)


def measured(
    function: Function,
    arguments: Mapping[str, Array],
    *,
    target: OnnxTarget = DEFAULT,
    options: SessionOptions | None = None,
) -> Live[str]:
    """Return the bytes alive during each node of one run, by onnxruntime's profile of it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        chosen = replace(options or SessionOptions(), profile_prefix=place / "run")
        session, ready = _ready(emit(function, target=target), place, chosen)
        session.run(arguments)
        events = kernel_events(session)
    nodes = {node.name: node for node in ready.graph.node}
    ran: list[NodeProto] = []
    known: dict[str, int] = {}
    for event in events:
        node = nodes.get(event["name"].removesuffix(KERNEL))
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
    """Return the function with recomputation within a budget on onnxruntime, and the plan.

    The plan's figures are those predicted for onnxruntime. The result is the first plan that fits,
    else the one with the lowest peak. InvalidInput: no plan can fit.
    """

    def figures(tried: Function, plan: RecomputationPlan) -> RecomputationPlan:
        peak = predicted_footprint(tried, sizes, target=target, options=options).peak_bytes
        return replace(plan, budget_bytes=budget_bytes, before_bytes=before, peak_bytes=peak)

    before = predicted_footprint(function, sizes, target=target, options=options).peak_bytes
    recomputed, plan = recompute(function, budget_bytes, sizes)
    best = figures(recomputed, plan)
    asked = budget_bytes
    for _ in range(TRIALS):
        if best.fits or not plan.fits:
            break
        # The planner predicts for our order of nodes; where onnxruntime needs more, ask for 5 %
        # less than before.
        asked = max(plan.least_bytes, min(asked, plan.peak_bytes) * 19 // 20)
        tried, plan = recompute(function, asked, sizes)
        candidate = figures(tried, plan)
        if candidate.peak_bytes < best.peak_bytes:
            recomputed, best = tried, candidate
        if asked == plan.least_bytes:
            break
    return recomputed, best


def _ready(model: ModelProto, folder: Path, options: SessionOptions) -> tuple[Session, ModelProto]:
    """Return a session, and the graph it runs."""
    path = folder / "ready.onnx"
    session = Session(serialize(model), options=replace(options, optimized_model_path=path))
    return session, onnx.load(path)


def _alive(model: ModelProto, nodes: Sequence[NodeProto], known: Mapping[str, int]) -> Live[str]:
    rows = [
        MemoryRow([*filter(None, n.input)], [*filter(None, n.output)], n.op_type in VIEWS)
        for n in nodes
    ]
    return alive(rows, [info.name for info in model.graph.output], lambda v: known.get(v, 0))


def _sizes(model: ModelProto, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of tensors that lowering added, where shape inference knows their sizes."""
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


_PROFILED: Final = {"float": "float32", "double": "float64"}
"""The profile's names of element types that differ from numpy's."""


def _bytes_of(typed: Mapping[str, Sequence[int]]) -> int:
    """Return the bytes of one entry of `output_type_shape`: {"float": [32, 10]}."""
    ((name, dims),) = typed.items()
    try:
        item = np.dtype(_PROFILED.get(name, name)).itemsize
    except TypeError:
        raise InvalidInput(f"onnxruntime's profile names an element type {name!r}") from None
    return math.prod(dims) * item

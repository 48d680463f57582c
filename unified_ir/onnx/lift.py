"""Older definitions of operators, lifted to the definition that the IR uses.

`LIFTS` is literal: (operator, version of the older definition) -> the application in the next one.
A definition without a rule is lifted unchanged: its attributes, defaults and operands have the same
meaning, which a test checks against ONNX's own schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from onnx import defs

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ir.dims import Expr, product
from triplane.unified_ir.onnx.application import Application, Lifted
from triplane.unified_ir.onnx.newer import as_meant
from triplane.unified_ir.ops.row import MEANING_OPSET
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, dims_of, emit

_FLOAT_MAX: Final = 3.4028234663852886e38
Lift = Callable[[Application], Lifted]


def lift(app: Application, opset: int) -> Lifted:
    """Return the application in the definition that the IR uses, or the values it computes."""
    while (newer := _next_version(app.op, app.since)) is not None:
        rule = LIFTS.get((app.op, app.since))
        if rule is None:
            app = replace(app, since=newer)
            continue
        lifted = rule(app)
        if isinstance(lifted, tuple):
            return lifted
        # A rule may rename the operator; the replacement is then in its newest definition.
        app = replace(lifted, since=newer if lifted.op == app.op else VERSIONS[lifted.op][-1])
    loose = LOOSE.get(app.op)
    read = app if loose is None else loose(app)
    if isinstance(read, Application) and read.since > MEANING_OPSET:
        return as_meant(read, opset)
    return read


def _versions() -> Mapping[str, tuple[int, ...]]:
    versions: dict[str, list[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= MEANING_OPSET and not schema.deprecated:
            versions.setdefault(schema.name, []).append(schema.since_version)
    return {name: tuple(sorted(v)) for name, v in versions.items()}


VERSIONS: Final = _versions()
"""Versions of each operator's definition up to the IR's, from ONNX's own schemas."""


def _next_version(op: str, since: int) -> int | None:
    later = [v for v in VERSIONS.get(op, ()) if v > since]
    if later:
        return later[0]
    return MEANING_OPSET if op in REPLACED and since < MEANING_OPSET else None


def _moved(name: str, dtype: Any = np.int64, *, is_required: bool = False) -> Lift:
    """Return the rule for an attribute that becomes a vector operand, absent if it was not set.

    is_required: it must be set, and the old definition has one operand.
    """

    def rule(app: Application) -> Application:
        value = app.attr(name)
        if is_required and (value is None or len(app.inputs) != 1):
            raise InvalidInput(f"{app.op}-{app.since} takes one operand and the attribute {name}")
        moved = None if value is None else _array(np.atleast_1d(value), dtype)
        return replace(app.without(name), inputs=(*app.inputs, moved))

    return rule


def _array(value: Any, dtype: Any) -> Tensor:
    return as_tensor(np.array(value, dtype))


def _flattened(app: Application) -> Lifted:
    """Apply softmax to a matrix: before opset 13, all axes from `axis` on are one."""
    x = app.operand(0)
    # Before opset 13 the operand is coerced to 2D at `axis`, and the softmax runs over all of the
    # second axis.
    axis = app.attr("axis", 1) % x.rank if x.rank else 0
    if x.rank and axis == x.rank - 1:
        return app.without(axis=-1)
    matrix = x.reshape(product(x.shape[:axis]), product(x.shape[axis:]))
    return (emit(app.op, matrix, axis=-1).reshape(x.shape),)


def _batch_norm_7(app: Application) -> Application:
    if not app.attr("spatial", 1):
        raise InvalidInput("spatial=0, statistics per position, is unsupported; use opset 9")
    return app.without("spatial")


def _batch_norm_9(app: Application) -> Application:
    """Recognize training by further outputs: first the running statistics, then the saved ones."""
    if app.outputs > 3:
        raise InvalidInput(
            "saved_mean and saved_var are outputs of old training graphs; export for inference"
        )
    return app.without(training_mode=1) if app.outputs > 1 else app


def _clip_6(app: Application) -> Application:
    x = app.operand(0)
    # The old defaults are the largest finite numbers, which stand for "no bound": infinity must
    # pass.
    bounds = [app.attr("min", -_FLOAT_MAX), app.attr("max", _FLOAT_MAX)]
    bound_operands = [None if abs(b) >= _FLOAT_MAX else _array(b, x.dtype.numpy) for b in bounds]
    return replace(app.without("min", "max"), inputs=(x, *bound_operands))


def _grid_sample_16(app: Application) -> Application:
    modes = {"bilinear": "linear", "bicubic": "cubic"}
    mode = app.attr("mode", "bilinear")
    return app.without(mode=modes.get(mode, mode))


def _group_norm_18(app: Application) -> Application:
    """Repeat scale and bias of each group for every channel of the group."""
    x, groups = app.operand(0), app.attr("num_groups")
    channels = x.shape[1]
    repeated = [
        ops.reshape(
            ops.expand(ops.unsqueeze(app.operand(i), 1), (groups, channels // groups)), (channels,)
        )
        for i in (1, 2)
    ]
    return replace(app, inputs=(x, *repeated))


def _pad_2(app: Application) -> Application:
    x = app.operand(0)
    value = _array(app.attr("value", 0.0), x.dtype.numpy)
    pads = _array(app.attr("pads", app.attr("paddings")), np.int64)
    return replace(app.without("pads", "value", "paddings"), inputs=(x, pads, value))


def _upsampled(app: Application) -> Application:
    """Lift Upsample and Resize-10: output[i] = input[floor(i / scale)], or linear in between."""
    return replace(
        app.without(
            mode=app.attr("mode", "nearest"),
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        ),
        op="Resize",
        inputs=(app.operand(0), None, app.operand(1)),
    )


def _resize_11(app: Application) -> Application:
    """Drop empty scales and regions of interest, which stand for absent ones."""
    operands = (None if x is not None and x.shape == (0,) else x for x in app.padded(4))
    return replace(app, inputs=tuple(operands))


def _split_13(app: Application) -> Application:
    """Set the number of parts: without sizes, there are as many equal parts as outputs."""
    return app.without(num_outputs=app.outputs) if app.padded(2)[1] is None else app


def _slice_1(app: Application) -> Application:
    starts = [dims_of(app.attr(n)) for n in ("starts", "ends")]
    axes = dims_of(app.attrs["axes"]) if "axes" in app.attrs else None
    operands = (app.operand(0), *starts, axes)
    return replace(app.without("starts", "ends", "axes"), inputs=operands)


def _dft_17(app: Application) -> Application:
    inputs = (*app.padded(2), _array(app.attr("axis", 1), np.int64))
    return replace(app.without("axis"), inputs=inputs)


def _scalars(app: Application) -> Application:
    """Read vectors of one element as single numbers."""
    single = (x.reshape(()) if x is not None and x.shape == (1,) else x for x in app.inputs)
    return replace(app, inputs=tuple(single))


def _squeezed(app: Application) -> Lifted:
    """Without axes, drop every size of 1; the run checks that symbolic sizes are not 1."""
    x = app.operand(0)
    loose = [d for d in x.shape if isinstance(d, Expr)]
    if app.padded(2)[1] is not None or not loose:
        return app
    kept = [d for d in x.shape if d != 1]
    # If a symbolic size turns out to be 1, ONNX would drop its axis and change the rank. Index 1 of
    # a vector with one element makes the run fail instead.
    ones = emit("Equal", dims_of(loose), as_tensor(np.ones(1, np.int64))).cast("int64")
    inside = emit("Gather", as_tensor(np.zeros(1, np.int64)), emit("ReduceMax", ones, keepdims=1))
    return (assume_shape(emit("Reshape", x, dims_of(kept) + inside, allowzero=1), kept),)


LOOSE: Final[Mapping[str, Lift]] = {"Range": _scalars, "Squeeze": _squeezed}
"""Forms that ONNX's definitions leave open or forbid, but that its bodies and runtimes use."""

REPLACED: Final[Mapping[str, str]] = {"Upsample": "Resize", "Scatter": "ScatterElements"}
"""Operators that ONNX removed, and their replacements."""

_REDUCTIONS: Final = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSumSquare",
)  # fmt: skip

LIFTS: Final[Mapping[tuple[str, int], Lift]] = {
    ("BatchNormalization", 7): _batch_norm_7,
    ("BatchNormalization", 9): _batch_norm_9,
    ("Clip", 6): _clip_6,
    ("DFT", 17): _dft_17,
    **{("Dropout", v): lambda app: app.without("ratio", "seed") for v in (7, 10)},  # inference
    ("GridSample", 16): _grid_sample_16,
    ("GroupNormalization", 18): _group_norm_18,
    **{(name, v): _flattened for name in ("Hardmax", "LogSoftmax", "Softmax") for v in (1, 11)},
    ("Pad", 2): _pad_2,
    **{(name, 13): _moved("axes") for name in _REDUCTIONS},
    ("ReduceSum", 11): _moved("axes"),
    ("Resize", 10): lambda app: replace(_upsampled(app), since=11),
    ("Resize", 11): _resize_11,
    ("RoiAlign", 10): lambda app: app.without(coordinate_transformation_mode="output_half_pixel"),
    ("Scatter", 9): lambda app: replace(app, op="ScatterElements"),
    ("Slice", 1): _slice_1,
    ("Split", 11): _moved("split"),
    ("Split", 13): _split_13,
    ("Squeeze", 11): _moved("axes"),
    ("TopK", 1): _moved("k", is_required=True),
    ("Unsqueeze", 11): _moved("axes"),
    ("Upsample", 7): _moved("scales", np.float32, is_required=True),
    ("Upsample", 9): _upsampled,
}

"""Contents of values known while a model is imported: constants, and sizes as dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.dims import Dim, Expr, is_symbol
from triplane.unified_ir.ir.graph import Array, Value
from triplane.unified_ir.ir.types import DType, bool_, int64, is_plain
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.onnx.fold import ARRANGING, MAX_CONTENTS, MAX_FOLDED, fold, symbolic
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_node
from triplane.unified_ir.ops.row import Op, dtype_attr
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.tensor import Tensor


class KnownValues:
    """Sizes by the value that holds them, beside what the build knows of its constants."""

    def __init__(self) -> None:
        self.sizes: dict[Value, Array] = {}
        self.partly: dict[Value, Array] = {}
        """Sizes of which some are known; the others are None."""

    def of(self, x: Tensor) -> Array | None:
        """Contents as an array of ints, truths or dimensions; None where they are not known."""
        if x.value in self.sizes:
            return self.sizes[x.value]
        known = x.build.known(x)
        if isinstance(known, np.ndarray):
            whole = known.dtype.kind in "iub" and known.size <= MAX_CONTENTS
            return known.astype(object) if whole else None
        if isinstance(known, tuple) and all(isinstance(d, int) for d in x.shape):
            return np.array(known, dtype=object).reshape(x.shape)
        return None

    def note(self, app: Application, output: Tensor) -> Tensor:
        """Follows vectors of sizes that are known in part, and claims what they say of a shape."""
        if app.op in ARRANGING and output.dtype == int64:
            contents_of_operands = [None if x is None else self._seen(x) for x in app.inputs]
            if all(
                f is not None
                for f, x in zip(contents_of_operands, app.inputs, strict=True)
                if x is not None
            ):
                contents = fold(app.op, contents_of_operands, app.attrs)
                if contents is not None and any(d is not None for d in contents.flat):
                    self.partly[output.value] = contents
        if app.op in {"Expand", "Reshape"} and len(app.inputs) > 1 and app.inputs[1] is not None:
            wanted = self.partly.get(app.inputs[1].value)
            if wanted is not None and wanted.shape == (output.rank,):
                return assume_shape(output, _narrowed(app.op, output, wanted))
        return output

    def _seen(self, x: Tensor) -> Array | None:
        """What is known of whole numbers, each of them or None."""
        known = self.of(x) if x.value not in self.partly else self.partly[x.value]
        size = x.type.size
        if known is not None or x.dtype != int64 or not isinstance(size, int):
            return known
        static = [d for d in x.shape if isinstance(d, int)]
        return np.full(static, None, dtype=object) if size <= MAX_CONTENTS else None

    def hold(self, build: Build, sizes: Array, dtype: DType) -> Tensor:
        """Sizes as a tensor whose contents stay known."""
        if not symbolic(sizes):
            return build.constant(sizes.astype(dtype.numpy))
        flat = [d if isinstance(d, Expr) else int(d) for d in sizes.flat]
        x = build.dims(flat).reshape(sizes.shape).cast(dtype)
        self.sizes[x.value] = sizes
        return x

    def folded(self, build: Build, row: Op, app: Application) -> Tensor | None:
        """The output as a constant or a vector of sizes, where the operands say what it is."""
        present = [x for x in app.inputs if x is not None]
        if app.outputs != 1 or not present:
            return None
        known = [x.build.known(x) for x in present]
        if all(isinstance(k, np.ndarray) and k.size <= MAX_FOLDED for k in known):
            return _evaluated(build, row, app)
        operands = [None if x is None else self.of(x) for x in app.inputs]
        if any(f is None for f, x in zip(operands, app.inputs, strict=True) if x is not None):
            return None
        contents = fold(app.op, operands, app.attrs)
        return None if contents is None else self.hold(build, contents, _dtype(app, contents))


def _narrowed(op: str, output: Tensor, wanted: Array) -> list[Dim]:
    """The output's sizes, open ones being what the shape operand has in their place."""
    least = 2 if op == "Expand" else 1  # an axis expanded to 1 keeps its size
    return [
        w if is_symbol(d) and isinstance(w, int) and w >= least else d
        for d, w in zip(output.shape, wanted.tolist(), strict=True)
    ]


def _dtype(app: Application, contents: Array) -> DType:
    if contents.size and all(isinstance(v, (bool, np.bool_)) for v in contents.flat):
        return bool_
    if "to" in app.attrs:
        return dtype_attr(app.attrs["to"])
    return next(x.dtype for x in app.inputs if x is not None and x.dtype != bool_)


def _evaluated(build: Build, row: Op, app: Application) -> Tensor | None:
    """The kernel's result on constants, where it is small and the same each time."""
    schema: Any = row.schema
    if schema is None or schema.non_deterministic:
        return None
    known = [None if x is None else x.build.known(x) for x in app.inputs]
    scratch = Build(build.table, "constants")
    with scratch:
        scratch.apply(row, known, app.attrs)
    node = scratch.nodes[-1]
    type_ = node.outputs[0].type
    size = type_.size
    if not is_plain(type_) or not isinstance(size, int) or size > MAX_FOLDED:
        return None
    (array,) = run_node(build.table, node, known, {}, known)  # type: ignore[arg-type]
    return build.constant(array)

"""Contents of values that are known while a model is imported: constants, and sizes."""

from __future__ import annotations

from collections.abc import Callable
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
    """Sizes by the value that holds them, in addition to the constants that the build knows."""

    def __init__(self) -> None:
        self.sizes: dict[Value, Array] = {}
        self.partly: dict[Value, Array] = {}
        """Vectors of which only some sizes are known; the others are None."""

    def of(self, x: Tensor) -> Array | None:
        """Return contents as an array of ints, bools or dimensions; None if they are unknown."""
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
        """Follow vectors of partly known sizes, and claim the sizes that they give to a shape."""
        if app.op in ARRANGING and output.dtype == int64:
            contents = _folded(app, self._seen)
            if contents is not None and any(d is not None for d in contents.flat):
                self.partly[output.value] = contents
        if app.op in {"Expand", "Reshape"} and len(app.inputs) > 1 and app.inputs[1] is not None:
            wanted = self.partly.get(app.inputs[1].value)
            if wanted is not None and wanted.shape == (output.rank,):
                return assume_shape(output, _narrowed(app.op, output, wanted))
        return output

    def _seen(self, x: Tensor) -> Array | None:
        """Return integers of which some may be known, the others being None; None if none is."""
        known = self.of(x) if x.value not in self.partly else self.partly[x.value]
        size = x.type.size
        if known is not None or x.dtype != int64 or not isinstance(size, int):
            return known
        static = [d for d in x.shape if isinstance(d, int)]
        return np.full(static, None, dtype=object) if size <= MAX_CONTENTS else None

    def hold(self, build: Build, sizes: Array, dtype: DType) -> Tensor:
        """Return sizes as a tensor whose contents stay known."""
        if not symbolic(sizes):
            return build.constant(sizes.astype(dtype.numpy))
        flat = [d if isinstance(d, Expr) else int(d) for d in sizes.flat]
        x = build.dims(flat).reshape(sizes.shape).cast(dtype)
        self.sizes[x.value] = sizes
        return x

    def folded(self, build: Build, row: Op, app: Application) -> Tensor | None:
        """Return the output as a constant or a vector of sizes, if the operands determine it."""
        present = [x for x in app.inputs if x is not None]
        if app.outputs != 1 or not present:
            return None
        known = [x.build.known(x) for x in present]
        if all(isinstance(k, np.ndarray) and k.size <= MAX_FOLDED for k in known):
            return _evaluated(build, row, app)
        contents = _folded(app, self.of)
        return None if contents is None else self.hold(build, contents, _dtype(app, contents))


def _folded(app: Application, look: Callable[[Tensor], Array | None]) -> Array | None:
    """Return the contents of the output, if `look` knows those of every operand."""
    operands = [None if x is None else look(x) for x in app.inputs]
    if any(f is None for f, x in zip(operands, app.inputs, strict=True) if x is not None):
        return None
    return fold(app.op, operands, app.attrs)


def _narrowed(op: str, output: Tensor, wanted: Array) -> list[Dim]:
    """Return the output's sizes, with unknown ones replaced by those of the shape operand."""
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
    """Return the kernel's result on constants, if it is small and deterministic."""
    schema: Any = row.schema
    if schema is None or schema.non_deterministic:
        return None
    known = [None if x is None else x.build.known(x) for x in app.inputs]
    scratch = Build(build.table, "constants")
    with scratch:
        scratch.apply(row, known, app.attrs)
    node = scratch.nodes[-1]
    type_, size = node.outputs[0].type, node.outputs[0].type.size
    if not is_plain(type_) or not isinstance(size, int) or size > MAX_FOLDED:
        return None
    (array,) = run_node(build.table, node, known, {}, known)  # type: ignore[arg-type]
    return build.constant(array)

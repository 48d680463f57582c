"""Samples of the operator table as functions: what every conformance suite iterates."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.ir.dims import symbol
from triplane.unified_ir.ir.types import as_dtype, type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.row import Op, Sample
from triplane.unified_ir.ops.samples import FixedArray, LiteralArray
from triplane.unified_ir.ops.table import TABLE


@dataclass(frozen=True, eq=False)
class Use:
    """One sample of one row of a table."""

    row: Op
    number: int
    table: Any = field(default_factory=lambda: TABLE)

    def __str__(self) -> str:
        return f"{self.row}-{self.number}"

    @property
    def sample(self) -> Sample:
        return self.row.samples[self.number]

    def arrays(self, dtype):
        """Operands; floating-point ones in `dtype` except those a maker fixed to another type."""
        return [
            None if a is None else a.astype(dtype) if a.dtype == np.float64 else np.asarray(a)
            for a in self.sample.arrays()
        ]

    def is_constant(self, i, array):
        """Sizes, axes, positions and literals are constants of the graph."""
        return is_constant(self.sample.inputs[i], array)

    def smooth(self, args):
        """Parameters in which finite differences hold, by the sample's own statement."""
        wanted = self.sample.smooth
        if wanted is None:
            wanted = tuple(i for i, a in enumerate(self.arrays(np.float64)) if is_float(a))
        return [f"x{i}" for i in wanted if f"x{i}" in args]


def is_constant(maker, array):
    """Whether an operand of a sample belongs to the graph, not to a call."""
    return isinstance(maker, LiteralArray) or (
        isinstance(maker, FixedArray) and array.dtype.kind in "iu"
    )


def is_float(array):
    return array is not None and array.dtype == np.float64


def uses_of(table=TABLE):
    return [Use(row, i, table) for row in table.values() for i in range(len(row.samples))]


def differentiable(table=TABLE):
    return [use for use in uses_of(table) if use.row.differentiable]


def first_shallow(uses):
    """The uses as parameters of a test: each row's first always, its others in the deep run."""
    return [use if use.number == 0 else pytest.param(use, marks=pytest.mark.deep) for use in uses]


def mostly_long(uses):
    """The uses as parameters of a test: each row's first and one in three of its others.

    The rest is for the long run. Chosen by name, so that a new row moves no other.
    """
    return [use if is_sampled(use) else pytest.param(use, marks=pytest.mark.long) for use in uses]


def is_sampled(use):
    """Whether the fast suite runs this use in every check, not only in some."""
    return use.number == 0 or crc32(str(use).encode()) % 3 == 0


@contextmanager
def naming(what):
    """Failures inside say which row and sample they are about."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def recorded(use, dtype, *, symbolic=()):
    """The row as a function of its operands, and those operands by parameter name.

    `symbolic` numbers the operands whose first axis becomes the symbol N.
    """
    build, args = Build(use.table, str(use)), {}
    with build:
        operands = []
        for i, array in enumerate(use.arrays(dtype)):
            if array is None or use.is_constant(i, array):
                operands.append(array)
                continue
            t = type_of(array)
            if i in symbolic:
                t = t.with_shape((symbol("N"), *t.shape[1:]))
            operands.append(build.param(f"x{i}", t))
            args[f"x{i}"] = array
        made = build.apply(use.row, operands, use.sample.attrs, outputs=use.sample.outputs)
    return build.finish({f"y{i}": y for i, y in enumerate(made)}), args


def weighted_sum(function, dtype, *, table=TABLE, seed=5):
    """A scalar function of the same parameters: all floating-point results, weighted at random.

    None where no result is floating-point.
    """
    rng = np.random.default_rng(seed)
    build = Build(table, f"{function.name}.sum")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        parts = []
        for y in inline(function, params):
            if y.dtype.is_float:
                shape = () if y.type.symbols else y.type.concrete({})
                weight = rng.standard_normal(shape).astype(y.dtype.numpy)
                parts.append((y * weight).sum().cast(as_dtype(dtype)))
        if not parts:
            return None
        total = sum(parts[1:], parts[0])
    return build.finish({"loss": total})


def slope(function, names, directions, *, table=TABLE):
    """The scalar <gradient, directions> of a scalar function: its slope along them."""
    gradients = value_and_grad(function, names)
    build = Build(table, f"{function.name}.slope")
    with build:
        params = [build.param(p.name, p.type) for p in gradients.params]
        found = dict(zip(gradients.result_names, inline(gradients, params), strict=True))
        parts = [(found[f"grad.{n}"] * directions[n]).sum() for n in names]
        total = sum(parts[1:], parts[0])
    return build.finish({"loss": total})

"""Fully connected layers, embeddings, and cells in sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, CellList, Parameter
from triplane.unified_ir.nn.init import STANDARD_NORMAL, WEIGHT, Initializer, bias_of
from triplane.unified_ir.nn.random import generator
from triplane.unified_ir.nn.sizes import check_axis, positive
from triplane.unified_ir.nn.state import State


class Dense(Cell):
    """y = x weight^T + bias; weight: (outputs, inputs), bias: (outputs,).

    Both are initially uniform within 1 / sqrt(inputs), unless `init` makes the weight.
    """

    weight: State
    bias: State

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        init: Initializer = WEIGHT,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        shape = positive("Dense", outputs=outputs, inputs=inputs)
        self.weight = Parameter(init(shape, generator(rng)))
        self.bias = Parameter(bias_of(shape)(shape[:1], generator(rng))) if bias else None

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (..., inputs) -> (..., outputs)."""
        outputs, inputs = self.weight.shape
        check_axis(f"Dense({inputs}, {outputs})", f"(..., {inputs})", x, -1, inputs)
        return ops.linear(x, self.weight, self.bias)


class Embedding(Cell):
    """Rows of a table; weight: (count, size), standard normal unless `init` is given.

    padding: the id that pads shorter sequences; its row is zero and stays zero.
    """

    weight: State

    def __init__(
        self,
        count: int,
        size: int,
        *,
        padding: int | None = None,
        init: Initializer = STANDARD_NORMAL,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        shape = positive("Embedding", count=count, size=size)
        if padding is not None and not 0 <= padding < count:
            raise InvalidInput(f"padding must be one of the ids 0..{count - 1}, got {padding}")
        self.padding = padding
        table = np.array(init(shape, generator(rng)))
        if padding is not None:
            table[padding] = 0.0
        self.weight = Parameter(table)

    def construct(self, ids: ops.Tensor) -> ops.Tensor:
        """ids: (...) ints in 0..count-1 -> (..., size)."""
        rows = ops.embedding(self.weight, ids)
        if self.padding is None:
            return rows
        # `where` stops the gradient of that row too, so that no optimizer moves it away from zero.
        return ops.where(ops.unsqueeze(ids == self.padding, -1), 0.0, rows)


class Sequential(CellList):
    """Cells in sequence; each takes the output of the one before.

    >>> from triplane.unified_ir import nn
    >>> net = nn.Sequential(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
    >>> net(np.zeros((2, 4), np.float32)).shape
    (2, 3)
    """

    def __init__(self, *cells: Cell) -> None:
        super().__init__(cells)

    def construct(self, x: Any) -> Any:
        """x: what the first cell takes."""
        for cell in self:
            x = cell(x)
        return x

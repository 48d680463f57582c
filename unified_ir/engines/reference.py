"""The reference engine: numpy, node by node, for gradient checks in float64 and as an oracle."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from triplane.unified_ir.engines.protocol import HostLoop, by_position, check_donated
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.values import HostValue, as_host_value


class ReferenceProgram:
    """A function interpreted by its rows' reference kernels."""

    def __init__(self, function: Function, donate: Collection[str]) -> None:
        check_donated(function, donate)
        self.function = function
        self._donate = tuple(donate)

    def __call__(self, *args: HostValue) -> tuple[Array, ...]:
        """See `Program`."""
        by_position(self.function, args)
        params = self.function.params
        arrays = [as_host_value(a, p.type) for a, p in zip(args, params, strict=True)]
        return tuple(run_function(TABLE, self.function, arrays))

    def loop(self, state: Mapping[str, Array]) -> HostLoop:
        """See `Program`."""
        return HostLoop(self, self._donate, state)


class ReferenceEngine:
    """See the module."""

    name = "reference"

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> ReferenceProgram:
        """See `Engine`."""
        return ReferenceProgram(function, donate)

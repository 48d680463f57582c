"""The default engine: the whole function as one ONNX graph on onnxruntime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.failing import ExplainingLoop, explained
from triplane.unified_ir.engines.protocol import by_position, check_donated, check_state
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.onnx.emit import emit, serialize
from triplane.unified_ir.onnx.target import DEFAULT, OnnxTarget
from triplane.unified_ir.ops.rows.control.custom_ops import with_kernels
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.values import HostValue, as_host_value
from triplane.unified_ir.passes.widen import widen_half
from triplane.unified_ir.runtime.session import (
    Loop,
    RunFailed,
    Session,
    SessionOptions,
    check_device,
    check_rows,
)
from triplane.unified_ir.runtime.signature import next_name


class OnnxProgram:
    """A function compiled to an onnxruntime session."""

    def __init__(
        self,
        function: Function,
        donate: Collection[str],
        options: SessionOptions,
        target: OnnxTarget,
    ) -> None:
        check_donated(function, donate)
        self.function = function
        self._donate = tuple(donate)
        self._target = target
        # In ONNX a graph's input and output cannot share a name, so a next state has a suffix.
        replaced = set(function.param_names).intersection(function.result_names)
        if donate and (odd := sorted(replaced.difference(donate))):
            raise InvalidInput(
                f"results {odd} replace parameters that are not donated; donate them or rename "
                "the results"
            )
        # onnxruntime has few float16 kernels for the CPU.
        self._ran = widen_half(function) if options.device == "cpu" else function
        # A training step keeps its state in buffers of its own; a block for the whole run would be
        # added to that memory (see `SessionOptions`).
        options = replace(options, one_block=options.one_block and not donate)
        self._session = Session(serialize(emit(self._ran, target=target)), options=options)
        names = function.result_names
        self._outputs = tuple(next_name(n) if n in replaced else n for n in names)

    def __call__(self, *args: HostValue) -> tuple[Array, ...]:
        """See `Program`."""
        values = by_position(self.function, args)
        feeds = {p.name: as_host_value(values[p.name], p.type) for p in self.function.params}
        if self._donate:
            check_rows({n: x for n, x in feeds.items() if n not in self._donate})
        try:
            outputs = self._session.run(feeds, self._outputs)
        except RunFailed as failed:
            raise self._explained(failed, feeds) from failed
        return tuple(outputs[n] for n in self._outputs)

    def loop(self, state: Mapping[str, Array]) -> Loop:
        """See `Program`."""
        check_state(self._donate, state)
        return ExplainingLoop(self._session, state, self._explained)

    def _explained(self, failed: RunFailed, feeds: Mapping[str, Any]) -> InvalidInput:
        return explained(failed, self._ran, self._target, feeds)


class OnnxEngine:
    """onnxruntime on a CPU, or on a GPU with `SessionOptions(device="cuda")`.

    devices: where it runs if that is not the CPU. Unavailable: this onnxruntime has no such device.
    """

    name = "onnx"

    def __init__(
        self,
        *,
        options: SessionOptions | None = None,
        target: OnnxTarget = DEFAULT,
        kernels: str = "onnx",
    ) -> None:
        self.options = replace(options or SessionOptions(), values="any")
        check_device(self.options.device)
        self.devices = None if self.options.device == "cpu" else self.options.device
        self._target = replace(target, device=self.options.device) if self.devices else target
        self._kernels = kernels

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> OnnxProgram:
        """See `Engine`."""
        function = with_kernels(TABLE, function, self._kernels)
        return OnnxProgram(function, donate, self.options, self._target)

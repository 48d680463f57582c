"""Engines: where a function runs. Importing this package imports no engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from triplane.proto.errors import InvalidInput, NotFound
from triplane.proto.suggestions import suggestion
from triplane.unified_ir.engines.protocol import (
    Engine,
    EngineLoop,
    HasState,
    LaunchBatches,
    LaunchingLoop,
    ProcessGroup,
    Program,
    StateLost,
)

if TYPE_CHECKING:
    from triplane.unified_ir.runtime.devices import Device

ENGINES: Final = {
    "onnx": "triplane.unified_ir.engines.onnx:OnnxEngine",
    "reference": "triplane.unified_ir.engines.reference:ReferenceEngine",
    "ascend": "triplane.unified_ir.engines.ascend:AscendEngine",
    "xla": "triplane.unified_ir.engines.xla.engine:XlaEngine",
}
"""Engine names and the classes behind them."""


def engine(name: str, *, device: str | None = None) -> Engine:
    """Return a new engine of that name. device: "cpu" or "cuda", for the engine onnx only.

    Unavailable: the installed onnxruntime cannot use the device.
    """
    if name not in ENGINES:
        raise NotFound(
            f"no engine {name!r}; there are {', '.join(ENGINES)}{suggestion(name, ENGINES)}"
        )
    module, _, cls = ENGINES[name].partition(":")
    loaded: Engine = getattr(import_module(module), cls)(**_options(name, device))
    return loaded


def _options(name: str, device: str | None) -> dict[str, Any]:
    """Return the arguments of an engine's constructor."""
    if device is None:
        return {}
    if name != "onnx":
        why = (
            "JAX chooses, and JAX_PLATFORMS=cpu or cuda in the environment decides for it"
            if name == "xla"
            else "it runs on the CPU"
        )
        raise InvalidInput(f"the engine 'onnx' takes a device, got {device!r} with {name!r}: {why}")
    from triplane.unified_ir.runtime.session import SessionOptions

    return {"options": SessionOptions(device=cast("Device", device))}


__all__ = [
    "ENGINES",
    "Engine",
    "EngineLoop",
    "HasState",
    "LaunchBatches",
    "LaunchingLoop",
    "ProcessGroup",
    "Program",
    "StateLost",
    "engine",
]

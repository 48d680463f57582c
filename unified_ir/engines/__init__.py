"""Engines: where a function runs. Importing this package imports no engine."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from triplane.proto.errors import NotFound
from triplane.proto.suggestions import suggestion
from triplane.unified_ir.engines.protocol import Engine, EngineLoop, LaunchingLoop, Program

ENGINES: Final = {
    "onnx": "triplane.unified_ir.engines.onnx:OnnxEngine",
    "reference": "triplane.unified_ir.engines.reference:ReferenceEngine",
    "ascend": "triplane.unified_ir.engines.ascend:AscendEngine",
    "xla": "triplane.unified_ir.engines.xla.engine:XlaEngine",
}
"""Engine names and the classes behind them."""


def engine(name: str) -> Engine:
    """Return a new engine of that name."""
    if name not in ENGINES:
        raise NotFound(
            f"no engine {name!r}; there are {', '.join(ENGINES)}{suggestion(name, ENGINES)}"
        )
    module, _, cls = ENGINES[name].partition(":")
    loaded: Engine = getattr(import_module(module), cls)()
    return loaded


__all__ = ["ENGINES", "Engine", "EngineLoop", "LaunchingLoop", "Program", "engine"]

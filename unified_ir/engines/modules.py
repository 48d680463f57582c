"""Run the entries of a module: what `Module.predict` calls.

Importing this module gives modules that ability, since the IR itself imports no engine; the names
`load` and `import_onnx` of the top package come from here for that reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import Engine, engine
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.graph import Array, Value
from triplane.unified_ir.ir.module import run_modules_with
from triplane.unified_ir.ir.types import float32
from triplane.unified_ir.onnx import import_onnx
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.ops.values import HostValue, as_host_value, bind

__all__ = ["EntryProgram", "import_onnx", "load", "predict", "program_of"]


class EntryProgram:
    """An entry of a module, compiled, with the module's state."""

    def __init__(self, module: Module, entry: str, runs_on: Engine | None = None) -> None:
        """Compile; InvalidInput if the entry assigns state, which a single call would lose."""
        if assigned := module.assigned(entry):
            raise InvalidInput(
                f"entry {entry!r} changes the state {assigned[0]!r}, and a call would lose that; "
                "name an entry such as predict or evaluate"
            )
        self.function = module.entry(entry)
        self.inputs = module.inputs(entry)
        names = [p.name for p in self.function.params if p.name in module.state]
        self._state = {name: module.state[name].array for name in names}
        self._program = (runs_on or engine("onnx")).compile(self.function)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Return the results by name; InvalidInput names an input that does not fit its type."""
        names = [p.name for p in self.inputs]
        if feeds.keys() != set(names):
            raise InvalidInput(
                f"{self.function.name} takes the inputs {', '.join(names) or 'none'}, got "
                f"{', '.join(feeds) or 'none'}"
            )
        sizes: dict[str, int] = {}
        values = {p.name: _fitting(feeds[p.name], p, sizes) for p in self.inputs}
        args = [{**self._state, **values}[name] for name in self.function.param_names]
        return dict(zip(self.function.result_names, self._program(*args), strict=True))


_programs: WeakKeyDictionary[Module, dict[str, EntryProgram]] = WeakKeyDictionary()


def program_of(module: Module, entry: str) -> EntryProgram:
    """Return the compiled entry, which is kept as long as the module exists."""
    programs = _programs.setdefault(module, {})
    if entry not in programs:
        programs[entry] = EntryProgram(module, entry)
    return programs[entry]


def predict(
    module: Module, entry: str, unnamed: Sequence[Any], named: Mapping[str, Any]
) -> Array | dict[str, Array]:
    """See `Module.predict`."""
    program = program_of(module, entry)
    names = [p.name for p in program.inputs]
    if len(unnamed) > len(names) or not named.keys().isdisjoint(names[: len(unnamed)]):
        raise InvalidInput(
            f"{entry} takes the inputs {', '.join(names) or 'none'}; give each once, got "
            f"{len(unnamed)} unnamed and {', '.join(named) or 'none'} by name"
        )
    results = program.run({**dict(zip(names, unnamed, strict=False)), **named})
    return next(iter(results.values())) if len(results) == 1 else results


def _fitting(x: Any, param: Value, sizes: dict[str, int]) -> HostValue:
    """Return `x` for a parameter; InvalidInput shows both types."""
    if not isinstance(x, (list, tuple)) or param.type.dtype == float32:
        x = np.asarray(x)
    value = as_host_value(x, param.type)
    if not isinstance(value, np.ndarray):
        return value  # a sequence or an optional, which the engine checks
    if value.dtype == np.float64 and param.type.dtype == float32:
        with np.errstate(over="ignore"):
            value = value.astype(np.float32)
    if value.dtype != param.type.dtype.numpy or value.ndim != param.type.rank:
        raise InvalidInput(
            f"input {param.name!r} is {param.type}, got {value.dtype}{list(value.shape)}"
        )
    try:
        bind(sizes, param.type, value)
    except InvalidInput as error:
        raise InvalidInput(f"input {param.name!r}: {error}") from error
    return value


run_modules_with(predict)

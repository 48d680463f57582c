"""Modules, and the model file that holds one.

In a `Module`, a parameter with the name of a state tensor *is* that state, and a result of that
name is its new value. Personal state never enters a file: the file only declares it with its type.
A module that is read back has it at its initial value: the buffer `start.NAME`, with which the
model was built before any training, or zero if there is no such buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import container
from triplane.unified_ir.ir import codec
from triplane.unified_ir.ir.dims import Expr
from triplane.unified_ir.ir.encode import NEGATIVE_VERSION
from triplane.unified_ir.ir.graph import Array, Function, ModuleContents, Role, StateTensor, Value
from triplane.unified_ir.ir.summary import summary_html, summary_lines

KIND: Final = "model"
WEIGHTS_PART: Final = "weights.safetensors"
START: Final = "start."
"""Prefix of the buffer with the initial value of a personal tensor, the same on every device."""

ModuleRunner = Callable[..., Any]
"""Computes `Module.predict`: (module, entry, unnamed inputs, inputs by name)."""
# The IR stands below the engines and imports none. `engines.modules` puts its function here when it
# is imported, which everything above the engines does, and `triplane.unified_ir.load` too.
_runners: Final[list[ModuleRunner]] = []


def run_modules_with(runner: ModuleRunner) -> None:
    """Let `Module.predict` call `runner`."""
    _runners[:] = [runner]


# With a slot for weak references, because engines keep compiled programs for as long as the module
# exists.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Module(ModuleContents):
    """Functions, the entries that name them, and the state they share; see `ModuleContents`."""

    def __post_init__(self) -> None:
        for entry, name in self.entries.items():
            if name not in self.functions:
                raise InvalidInput(
                    f"entry {entry!r} names function {name!r}; the module has "
                    f"{', '.join(self.functions) or 'none'}"
                )
        for function in self.functions.values():
            _check_state(function, self.state)

    def entry(self, name: str) -> Function:
        """Return the function of an entry."""
        if name not in self.entries:
            raise InvalidInput(f"no entry {name!r}; the module has {', '.join(self.entries)}")
        return self.functions[self.entries[name]]

    def inputs(self, entry: str) -> tuple[Value, ...]:
        """Return the parameters of an entry that the caller supplies: all but state."""
        return tuple(p for p in self.entry(entry).params if p.name not in self.state)

    def assigned(self, entry: str) -> tuple[str, ...]:
        """Return the names of the state that one call of the entry replaces."""
        return tuple(r for r in self.entry(entry).result_names if r in self.state)

    def predict(self, *x: Any, entry: str = "predict", **inputs: Any) -> Any:
        """Return the result of an entry, or a dict of several, for inputs in order or by name.

        float64 becomes float32 where the entry takes float32. The first call compiles the entry for
        onnxruntime. InvalidInput: an array does not fit, or the entry would change state.
        """
        if not _runners:
            raise InvalidInput("no engine is loaded; import triplane.unified_ir.engines.modules")
        return _runners[0](self, entry, x, inputs)

    def summary(self) -> str:
        """Return entries with inputs and results, state, classes and origin, on one screen."""
        return "\n".join(summary_lines(self))

    __repr__ = summary

    def _repr_html_(self) -> str:
        return summary_html(self)

    def initial(self, name: str) -> Array:
        """Return a state tensor's value on a new device; never the contents of a personal one."""
        tensor = self.state[name]
        if tensor.role is not Role.PERSONAL:
            return tensor.array
        start = self.state.get(START + name)
        # A buffer of that name with another role or type belongs to the user's model.
        fits = start is not None and start.role is Role.BUFFER and start.type == tensor.type
        return start.array if start is not None and fits else np.zeros_like(tensor.array)

    def save(
        self,
        path: str | Path,
        *,
        parent: str = "",
        check: Callable[[Path], object] | None = None,
    ) -> str:
        """Write a model file atomically; return its root digest in hexadecimal.

        `parent`: root digest of the file that this model was derived from. Personal state is
        declared in the file, without its contents. Equal modules give equal bytes. The file is read
        back by `check`, or `read`, before it takes its name; `ops.check.save` also infers types.
        """
        data, tensors = codec.encode(self)
        roles = {name: str(t.role) for name, t in self.state.items() if name in tensors}
        weights = container.tensor_part(WEIGHTS_PART, tensors, roles)
        parts = [container.part(codec.PART, data), weights]
        return container.write(Path(path), KIND, parts, parent=parent, check=check or read)


def read(path: str | Path, expected_digest: str | None = None) -> Module:
    """Return the module in a model file, its arrays being read-only views of the mapped file.

    The bytes match the manifest, and the module is well formed; whether its operators exist and its
    types hold is not checked here but in `ops.check.load`. Raise Corrupt, naming the damaged part.
    `expected_digest` is the root digest in hexadecimal.
    """
    file = container.Container(Path(path), kind=KIND, expected_digest=expected_digest)
    names = [part.name for part in file.manifest.parts]
    if names != [codec.PART, WEIGHTS_PART]:
        raise Corrupt(f"{file.path.name}: a model has module.pb and weights, not {names}")
    data, tensors = bytes(file.part(codec.PART)), file.tensors(WEIGHTS_PART)
    try:
        module = _module(codec.decode(data, tensors))
    except Corrupt as error:
        raise Corrupt(f"{file.path.name}: {error}") from error
    roles = {t.name: t.role for t in file.manifest.tensors}
    # The manifest repeats the roles for readers that do not decode the module; the two copies must
    # agree, or such a reader could take a parameter for something else.
    known = {n: str(module.state[n].role) if n in module.state else "" for n in roles}
    if roles != known:
        raise Corrupt(f"{file.path.name}: roles in the manifest are not those of {codec.PART}")
    return module


def with_assigned_state(function: Function, state: Mapping[str, StateTensor]) -> Function:
    """Return the function with a parameter for each state tensor it assigns without reading.

    The output `NAME:next` of its graph then has an input NAME, which tells a device that it is
    state.
    """
    missing = [n for n in function.result_names if n in state and n not in function.param_names]
    params = (*function.params, *(Value(state[n].type, n) for n in missing))
    return function.with_(params=params)


def may_be_misread(path: Path, module: Module) -> bool:
    """Return whether the file has a format before version 3 and symbolic sizes in attributes.

    Negative numbers among them were written so that they read as symbols; see `docs/ir.md`.
    """
    part = container.Container(path, kind=KIND).part(codec.PART)
    if codec.version_of(bytes(part)) >= NEGATIVE_VERSION:
        return False
    values = (v for f in module.functions.values() for n in f.walk() for v in n.attrs.values())
    return any(isinstance(v, tuple) and any(isinstance(d, Expr) for d in v) for v in values)


def _module(contents: ModuleContents) -> Module:
    try:
        module = Module(contents.functions, contents.entries, contents.state, contents.meta)
    except InvalidInput as error:
        raise Corrupt(f"{codec.PART}: {error}") from error
    # The decoder gave personal tensors zeros; `initial` is known only now that the module is whole.
    state = {n: StateTensor(t.role, module.initial(n)) for n, t in module.state.items()}
    return replace(module, state=state)


def _check_state(function: Function, state: Mapping[str, StateTensor]) -> None:
    named = [(p.name, p.type) for p in function.params]
    named += [(n, v.type) for n, v in zip(function.result_names, function.results, strict=True)]
    for name, type_ in named:
        if name in state and type_ != state[name].type:
            raise InvalidInput(
                f"function {function.name!r} uses state {name!r} as {type_}, "
                f"but the state tensor is {state[name].type}"
            )

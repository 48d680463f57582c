"""Write an entry of a module as one ONNX file that any runtime loads.

State that the entry reads is inside, as initializers. State that it assigns (all of it in a
training step) is an input NAME with an output NAME:next; the value in the module is the input's
default, so the first call needs no state and each later one takes the outputs of the one before.
The file takes its name only after onnx.checker accepted it and onnxruntime computed from it what
the module computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto, helper

from triplane.proto.disk import OS_DISK, refusal, write_atomic
from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.profile import sample_inputs
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.graph import Array, Function, Value
from triplane.unified_ir.ir.module import with_assigned_state
from triplane.unified_ir.onnx import EmittedInitializer, External, OnnxTarget, serialize
from triplane.unified_ir.onnx.annotated import emit_annotated
from triplane.unified_ir.onnx.emit import held_tensor
from triplane.unified_ir.ops.infer import type_proto
from triplane.unified_ir.passes.widen import widen_half
from triplane.unified_ir.runtime.session import Session
from triplane.unified_ir.runtime.signature import TensorInfo, next_name

DATA_SUFFIX: Final = ".data"
MAX_INSIDE_BYTES: Final = 2**31 - 2**26
"""Limit for weights inside the file: protobuf reads at most 2 GiB, the graph among them."""
ALIGNMENT: Final = 64
SAMPLED_ROWS: Final = 2
SAMPLED_SIZES: Final = (32, 8, 64, 224)
"""Sizes that an open axis besides the batch is tried with, until the entry accepts one."""
MAX_ERROR: Final = 1e-3
"""Largest difference from the module, relative to the largest element, at least 1."""
MAX_STATE_ERROR: Final = 5e-2
"""The same for new state: where a gradient is rounding alone, an optimizer such as Adam moves a
weight by the whole rate in either direction."""
ENTRY_KEY: Final = "triplane.entry"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """A written ONNX file. data: the file with its weights beside it, where they exceed 2 GB.

    state: names of the inputs with defaults. difference: the largest one from the module's results,
    relative to the largest element.
    """

    path: Path
    data: Path | None
    opset: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    state: tuple[str, ...]
    difference: float

    @property
    def size_bytes(self) -> int:
        """Bytes of the file and of the weights beside it."""
        return sum(p.stat().st_size for p in (self.path, self.data) if p is not None)


def export_onnx(
    module: Module,
    path: str | Path,
    *,
    entry: str = "predict",
    opset: int | None = None,
    batch: int | None = None,
    inputs: Mapping[str, Array] | None = None,
) -> OnnxFile:
    """Write an entry as an ONNX file, whole or not at all; labels and metadata are among its props.

    opset: 17 to 26, by default 21. batch: a fixed batch size in place of the symbol. inputs: what
    the file is compared on, by default made up. Half precision is computed in float32, and personal
    state has its initial value. InvalidInput: no such entry or opset, or inputs that do not fit.
    Conflict: onnxruntime computes something else from the file, which is a fault of the export.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} cannot become a file; give the name of a new or a regular file")
    target = OnnxTarget() if opset is None else OnnxTarget(opset)
    export = _Export(module, entry, target, batch)
    with _folder_beside(path) as folder:
        draft = Path(folder) / path.name
        data = export.write(draft)
        onnx.checker.check_model(str(draft), full_check=True)
        session = Session(draft)
        difference = export.compare(session, inputs)
        _publish([p for p in (data, draft) if p is not None], path.parent)
    return OnnxFile(
        path=path,
        data=None if data is None else path.with_name(data.name),
        opset=target.opset,
        inputs=session.inputs,
        outputs=session.outputs,
        state=export.assigned,
        difference=difference,
    )


class _Export:
    """An entry on its way to a file."""

    def __init__(self, module: Module, entry: str, target: OnnxTarget, batch: int | None) -> None:
        self.module, self.entry, self.target = module, entry, target
        function = module.entry(entry)
        self.assigned = module.assigned(entry)
        # onnxruntime has few kernels for half precision on CPUs.
        self.function = widen_half(with_assigned_state(function, module.state))
        self.inputs = module.inputs(entry)
        self.symbol = _batch_symbol(self.inputs, needed=batch is not None)
        self.batch = batch

    def write(self, path: Path) -> Path | None:
        """Write the model, and return the file of its weights if they are beside it."""
        params = [p for p in self.function.params if p.name in self.module.state]
        # `initial`: what was learned on one device for its user never enters a file.
        arrays = {p.name: self.module.initial(p.name) for p in params}
        outside = sum(a.nbytes for a in arrays.values()) > MAX_INSIDE_BYTES
        places = _offsets(arrays) if outside else {}
        held = {n: EmittedInitializer(a, places.get(n)) for n, a in arrays.items()}
        inside = {n: h for n, h in held.items() if n not in self.assigned}
        model = emit_annotated(self.function, target=self.target, initializers=inside)
        defaults = [held_tensor(p, held[p.name]) for p in params if p.name in self.assigned]
        model.graph.initializer.extend(defaults)
        if self.batch is not None:
            _fix_batch(model, self.function, {self.symbol: self.batch})
        helper.set_model_props(model, {**self.module.meta, ENTRY_KEY: self.entry})
        data = path.with_name(path.name + DATA_SUFFIX) if outside else None
        if data is not None:
            _write_data(data, arrays, places)
            _locate(model, data.name)
        write_atomic(path, serialize(model))
        return data

    def compare(self, session: Session, inputs: Mapping[str, Array] | None) -> float:
        """Return the largest relative difference from the module; Conflict if it is too large."""
        feeds, expected = self._expected(inputs)
        names = tuple(f.name for f in session.outputs)
        computed = session.run(feeds, names)
        state = {next_name(name) for name in self.assigned}
        errors = {n: _difference(n, computed[n], expected[n]) for n in names}
        for name, error in errors.items():
            allowed = MAX_STATE_ERROR if name in state else MAX_ERROR
            if not error <= allowed:
                raise Conflict(
                    f"result {name!r} of the exported {self.entry} differs by {error:.3g} from the "
                    f"module's, allowed {allowed:g}; please report this"
                )
        return max(errors.values(), default=0.0)

    def _expected(
        self, inputs: Mapping[str, Array] | None
    ) -> tuple[Mapping[str, Array], dict[str, Array]]:
        """Return inputs, and what the module computes from them by the name of the output."""
        program = OnnxEngine().compile(self.function, donate=self.assigned)
        state = {p.name: self.module.initial(p.name) for p in self.function.params
                 if p.name in self.module.state}  # fmt: skip
        refused: InvalidInput | None = None
        for feeds in self._candidates() if inputs is None else [inputs]:
            try:
                results = program(*({**state, **feeds}[n] for n in self.function.param_names))
            except InvalidInput as error:
                refused = error
                continue
            names = [next_name(n) if n in self.assigned else n for n in self.function.result_names]
            return feeds, dict(zip(names, results, strict=True))
        raise InvalidInput(
            f"the inputs that {self.entry} is compared on do not fit it; give inputs= to "
            f"export_onnx: {refused}"
        )

    def _candidates(self) -> list[Mapping[str, Array]]:
        """Return made-up inputs, one for each of `SAMPLED_SIZES` that makes a difference."""
        types = {p.name: p.type for p in self.inputs}
        sizes = {self.symbol: self.batch or SAMPLED_ROWS}
        is_open = any(t.symbols - sizes.keys() for t in types.values())
        tried = SAMPLED_SIZES if is_open else SAMPLED_SIZES[:1]
        return [sample_inputs(types, sizes, default=size) for size in tried]


def _folder_beside(path: Path) -> TemporaryDirectory[str]:
    """Return a folder on the same file system, from which files are moved to their place."""
    try:
        return TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise refusal(error, f"could not write {path}: {error.strerror}") from error


def _batch_symbol(inputs: Sequence[Value], *, needed: bool) -> str:
    """Return the symbol of the first axis of the inputs, "" if there is none."""
    firsts = [p.type.shape[0] for p in inputs if getattr(p.type, "rank", 0)]
    names = sorted({str(d) for d in firsts if is_symbol(d)})
    if needed and len(names) != 1:
        raise InvalidInput(
            f"a batch size fixes the first axis of the inputs, which has "
            f"{'no symbol' if not names else 'the symbols ' + ', '.join(names)}"
        )
    return names[0] if names else ""


def _fix_batch(model: ModelProto, function: Function, sizes: Mapping[str, int]) -> None:
    """Declare inputs and outputs with a number in place of the symbol."""
    types = {p.name: p.type for p in function.params}
    names = [next_name(n) if n in types else n for n in function.result_names]
    types |= {n: v.type for n, v in zip(names, function.results, strict=True)}
    for info in (*model.graph.input, *model.graph.output):
        info.type.CopyFrom(type_proto(types[info.name].with_sizes(sizes)))


def _offsets(arrays: Mapping[str, Array]) -> dict[str, External]:
    places, at = {}, 0
    for name, array in arrays.items():
        places[name] = External(at, array.nbytes)
        at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places


def _write_data(path: Path, arrays: Mapping[str, Array], places: Mapping[str, External]) -> None:
    try:
        with OS_DISK.create(path) as file:
            for name, array in arrays.items():
                file.seek(places[name].offset)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            OS_DISK.sync(file)
    except OSError as error:
        raise refusal(error, f"could not write {path.name}: {error}") from error


def _locate(model: ModelProto, name: str) -> None:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name


def _publish(files: Sequence[Path], folder: Path) -> None:
    """Move complete files to their folder, that of the weights first."""
    try:
        for file in files:
            OS_DISK.replace(file, folder / file.name)
        OS_DISK.sync_folder(folder)
    except OSError as error:
        raise refusal(error, f"could not write {files[-1].name}: {error}") from error


def _difference(name: str, y: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest element, at least 1."""
    if not isinstance(y, np.ndarray):
        return 0.0 if repr(y) == repr(expected) else np.inf
    if (y.shape, y.dtype) != (expected.shape, expected.dtype):
        raise Conflict(
            f"result {name!r} is {y.dtype}{list(y.shape)} in the exported file and "
            f"{expected.dtype}{list(expected.shape)} in the module; please report this"
        )
    a, b = (np.asarray(v, np.float64) for v in (y, expected))
    with np.errstate(invalid="ignore"):  # inf - inf
        errors = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = np.abs(b[np.isfinite(b)]).max(initial=1.0)
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0) / largest)

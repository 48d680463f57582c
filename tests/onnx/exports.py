"""What becomes of a file that another library exported: in memory, from the model file, in int8."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from triplane.proto.errors import TriplaneError
from triplane.unified_ir import import_onnx, load, nn, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.convert import convert
from triplane.unified_ir.engines import engine
from triplane.unified_ir.onnx import EmittedInitializer, emit, serialize

AGREES = 1e-4
"""The largest error, relative to the largest number of an output."""
GRADIENT_AGREES = 1e-3


@dataclass
class Row:
    """One file: errors by name, or the reason why there is none."""

    network: str
    exporter: str
    memory: float | str = "not run"
    file: float | str = "not run"
    gradient: float | str | None = None
    weights: str = ""
    int8: str = "not run"
    notes: list[str] = field(default_factory=list)

    @property
    def works(self):
        return isinstance(self.file, float) and self.file <= AGREES

    @property
    def wrong(self):
        """An answer, and not the right one."""
        answers = [a for a in (self.memory, self.file) if isinstance(a, float)]
        return any(not a <= AGREES for a in answers)


def measured(path, folder, *, int8=True):
    """The row of one exported file."""
    network, exporter = path.stem.rsplit(".", 1)
    row = Row(network, exporter)
    arrays = dict(np.load(path.with_suffix(".npz")))
    original = session(path.read_bytes())
    names = [i.name for i in original.get_inputs()]
    feeds, wanted = [], []
    for key in "ab":
        given = {n: arrays[f"{key}:{n}"] for n in names}
        try:
            wanted.append(original.run(None, given))
            feeds.append(given)
        except Exception as error:  # noqa: BLE001 - onnxruntime's own families
            row.notes.append(f"onnxruntime fails on the original with inputs {key}: {short(error)}")
    try:
        module = import_onnx(path)
    except TriplaneError as error:
        row.memory = row.file = f"refused: {short(error)}"
        return row
    row.memory = error_of(module, feeds, wanted)
    saved = folder / f"{path.stem}.tpm"
    try:
        module.save(saved)
        again = load(saved)
    except TriplaneError as error:
        row.file = f"cannot be read back: {short(error)}"
    else:
        row.file = error_of(again, feeds, wanted)
    saved.unlink(missing_ok=True)
    if "loss" in arrays and isinstance(row.memory, float):
        row.gradient, row.weights = gradient_error(module, feeds[0], arrays)
    if int8 and not network.startswith("ml_") and isinstance(row.memory, float):
        row.int8 = converted(module, feeds[0])
    return row


def short(error):
    return " ".join(str(error).split())[:240].replace("|", "/")


def session(model):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model, options)


def error_of(module, feeds, wanted):
    """The largest relative error over all inputs and outputs, or why there is no answer."""
    try:
        held = {n: EmittedInitializer(t.array) for n, t in module.state.items()}
        run = session(serialize(emit(module.entry("predict"), initializers=held)))
        found = [run.run(None, given) for given in feeds]
    except Exception as error:  # noqa: BLE001 - onnxruntime's own families, and ours
        return f"fails in the run: {short(error)}"
    pairs = [p for f, w in zip(found, wanted, strict=True) for p in zip(f, w, strict=True)]
    return max(apart(*pair) for pair in pairs)


def apart(found, wanted):
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if wanted.dtype.kind not in "fiu":
        return float((found != wanted).mean()) if wanted.size else 0.0
    if not wanted.size:
        return 0.0
    scale = np.abs(wanted.astype(float)).max() + 1e-9
    return float(np.abs(found.astype(float) - wanted.astype(float)).max() / scale)


def digest(array):
    array = np.ascontiguousarray(array)
    return hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest()


def gradient_error(module, feeds, arrays):
    """Of the mean square of the first output, over weights that the exporter left as they were."""
    cell = nn.Imported(module)

    def loss(*xs):
        y = cell(*xs)
        y = y[0] if isinstance(y, tuple) else y
        return (y * y).mean()

    entry = module.entry("predict")
    types = {p.name: p.type for p in entry.params}
    weights = sorted(n for n, t in module.state.items() if str(t.role) == "parameter")
    state = {f"cell.{n}": t.array for n, t in module.state.items()}
    try:
        function = trace(loss, *(types[n] for n in cell.inputs))
        compiled = engine("onnx").compile(value_and_grad(function, [f"cell.{n}" for n in weights]))
        free = [p for p in compiled.function.param_names if p not in state]
        given = state | dict(zip(free, (feeds[n] for n in cell.inputs), strict=True))
        made = compiled(*(given[p] for p in compiled.function.param_names))[1:]
    except TriplaneError as error:
        return f"no gradient: {short(error)}", ""
    places = {}
    for name, array in arrays.items():
        if name.startswith("param:"):
            weight = name.removeprefix("param:")
            places[digest(array)] = weight, False
            if array.ndim == 2:
                places.setdefault(digest(array.T), (weight, True))
    ours: dict[str, Any] = {}
    matched = 0
    for name, g in zip(weights, made, strict=True):
        weight, turned = places.get(digest(module.state[name].array), (None, False))
        if weight is not None:  # a weight written twice has its gradient in two parts
            ours[weight] = ours.get(weight, 0.0) + (g.T if turned else g)
            matched += 1
    if not ours:
        return "no weight is as PyTorch has it", ""
    pairs = [(g, arrays[f"grad:{weight}"]) for weight, g in ours.items()]
    scale = max(np.abs(w).max() for _, w in pairs)
    worst = max(np.abs(g - w).max() for g, w in pairs) / scale
    return float(worst), f"{matched} of {len(weights)}"


def converted(module, feeds):
    try:
        report = convert(module, quantize="int8", calibration=feeds)
    except TriplaneError as error:
        return f"refused: {short(error)}"
    return "yes" if report.is_int8 else "stays float"

"""ONNX's own node cases through import, IR, files, text and emission: what holds for each of them.

python -m tests.onnx.node_suite [-k OP] [--original] [--failing] [--out docs/evidence/onnx-nodes.md]

`original`: stock onnxruntime passes the case as it is. Then, of our module: `import`, `types` (ours
against the expected arrays), `files` (bytes and text read back to the same text), `own` and `21`
(emitted at the case's own opset, held to 17..26, and at 21, run by onnxruntime), `reference`
(emitted at its own opset, run by onnx.reference).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import (
    ModelProto,
    OptionalProto,
    SequenceProto,
    TensorProto,
    defs,
    numpy_helper,
)

from triplane.proto.errors import TriplaneError
from triplane.unified_ir import load
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.parse import parse_function
from triplane.unified_ir.ir.text import function_text, module_text
from triplane.unified_ir.ir.types import DTYPES, OptionalType, as_dtype
from triplane.unified_ir.onnx import EmittedInitializer, OnnxTarget, emit, import_onnx, serialize
from triplane.unified_ir.onnx.target import NEWEST_OPSET, OLDEST_OPSET
from triplane.unified_ir.ops.table import TABLE

STEPS: Final = ("import", "types", "files", "own", "21", "reference")


@dataclass
class Result:
    """What held for one case: the error per step, empty where it held."""

    name: str
    op: str
    opset: int
    errors: dict[str, str] = field(default_factory=dict)
    original: bool | None = None

    def passed(self, step: str) -> bool:
        return not self.errors.get(step)

    def __str__(self) -> str:
        marks = " ".join(f"{s}={'ok' if self.passed(s) else 'NO'}" for s in STEPS)
        lost = " LOST" if self.original and not self.passed("own") else ""
        return f"{self.name} ({self.op}, opset {self.opset}): {marks}{lost}"


@cache
def cases() -> tuple[Any, ...]:
    """All node cases of the installed onnx."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return tuple(load_model_tests(kind="node"))


def chosen(pattern: str) -> Iterator[Any]:
    """Cases of an operator, or whose name has the pattern; all for an empty one."""
    for case in cases():
        ops = {n.op_type for n in case.model.graph.node}
        if not pattern or pattern in ops or re.search(pattern, case.name):
            yield case


def opset_of(model: ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in {"", "ai.onnx"}), default=26)


def arrays_of(case: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Inputs and expected outputs of each data set."""
    for inputs, outputs in case.data_sets:
        yield [host(x) for x in inputs], [host(y) for y in outputs]


def host(x: Any) -> Any:
    """A value as numpy has it; sequences as lists, an empty optional as None."""
    if isinstance(x, TensorProto):
        return numpy_helper.to_array(x)
    if isinstance(x, SequenceProto):
        return numpy_helper.to_list(x)
    if isinstance(x, OptionalProto):
        return numpy_helper.to_optional(x)
    if isinstance(x, list):
        return [host(i) for i in x]
    return x if x is None else np.asarray(x)


def same(case: Any, found: Any, wanted: Any) -> None:
    """AssertionError unless the values agree as ONNX's own runner demands."""
    if wanted is None or found is None:
        assert wanted is found, f"{found} where {wanted} was expected"
        return
    if isinstance(wanted, list):
        assert isinstance(found, list), f"{type(found).__name__} where a sequence was expected"
        assert len(found) == len(wanted), f"{len(found)} elements, {len(wanted)} expected"
        for f, w in zip(found, wanted, strict=True):
            same(case, f, w)
        return
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, f"shape {found.shape}, {wanted.shape} expected"
    if wanted.dtype.kind in "OUST":
        assert found.astype(str).tolist() == wanted.astype(str).tolist()
        return
    assert found.dtype == wanted.dtype, f"{found.dtype}, {wanted.dtype} expected"
    if wanted.dtype.kind == "V" or wanted.dtype.itemsize == 1 or wanted.dtype.name == "bfloat16":
        found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_allclose(found, wanted, rtol=case.rtol, atol=case.atol)


def on_onnxruntime(model: bytes, feeds: dict[str, Any], wanted: list[Any]) -> list[Any]:
    """Results by stock onnxruntime; `wanted` says the types of those that numpy has no name for."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    if any(_is_foreign(x) for x in [*feeds.values(), *wanted]):
        return _bound(session, feeds, wanted)
    return list(session.run(None, feeds))


def _is_foreign(x: Any) -> bool:
    """Whether onnxruntime takes and gives such arrays by their bytes only."""
    return isinstance(x, np.ndarray) and x.dtype in FOREIGN


FOREIGN: Final = frozenset(
    d.numpy for d in DTYPES.values() if d.host.__module__ == "ml_dtypes" and d.bits >= 8
)


def _bytes(array: Any) -> Any:
    return array.view(np.uint8 if array.dtype.itemsize == 1 else np.uint16)


def _bound(session: Any, feeds: dict[str, Any], wanted: list[Any]) -> list[Any]:
    import onnxruntime as ort

    binding = session.io_binding()
    for name, x in feeds.items():
        if _is_foreign(x):
            number = as_dtype(x.dtype).onnx
            flat = np.ascontiguousarray(x).reshape(x.shape)
            held = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(_bytes(flat), number)
        else:
            held = ort.OrtValue.ortvalue_from_numpy(np.asarray(x, order="C"))
        binding.bind_ortvalue_input(name, held)
    made = []
    for info, w in zip(session.get_outputs(), wanted, strict=True):
        array = np.zeros(w.shape, w.dtype)
        number = as_dtype(w.dtype).onnx
        binding.bind_output(info.name, "cpu", 0, number, array.shape, array.ctypes.data)
        made.append(array)
    session.run_with_iobinding(binding)
    return made


def on_reference(model: ModelProto, feeds: dict[str, Any], _: list[Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return list(ReferenceEvaluator(model).run(None, feeds))


def original_passes(case: Any) -> bool:
    """Whether stock onnxruntime passes the case as it is."""
    try:
        for inputs, outputs in arrays_of(case):
            names = [i.name for i in case.model.graph.input]
            feeds = dict(zip(names, inputs, strict=False))
            found = on_onnxruntime(case.model.SerializeToString(), feeds, outputs)
            for f, w in zip(found, outputs, strict=True):
                same(case, f, w)
    except Exception:  # noqa: BLE001 - whatever onnxruntime says, it does not pass
        return False
    return True


def judged(case: Any, *, original: bool = False) -> Result:
    """Every step of one case."""
    op = case.model.graph.node[0].op_type if case.model.graph.node else "-"
    result = Result(case.name, op, opset_of(case.model))
    if original:
        result.original = original_passes(case)
    try:
        module = import_onnx(case.model)
    except TriplaneError as error:
        result.errors = dict.fromkeys(STEPS, str(error))
        return result
    held = min(max(result.opset, OLDEST_OPSET), NEWEST_OPSET)
    steps = {
        "types": lambda: check_types(case, module),
        "files": lambda: check_files(module),
        "own": lambda: check_run(case, module, held, on_onnxruntime),
        "21": lambda: check_run(case, module, 21, on_onnxruntime),
        "reference": lambda: check_run(case, module, held, on_reference),
    }
    for name, step in steps.items():
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the report says what failed and how
            text = str(error).strip() or type(error).__name__
            result.errors[name] = f"{type(error).__name__}: {text[:300]}"
    return result


def feeds_of(case: Any, module: Module, inputs: list[Any]) -> dict[str, Any]:
    names = [i.name for i in case.model.graph.input]
    wanted = {p.name for p in module.inputs("predict")}
    return {n: x for n, x in zip(names, inputs, strict=False) if n in wanted}


def check_types(case: Any, module: Module) -> None:
    """Element types and shapes of results against the expected arrays; symbols agree."""
    function = module.entry("predict")
    for inputs, outputs in arrays_of(case):
        sizes: dict[str, int] = {}
        feeds = feeds_of(case, module, inputs)
        pairs = [(p.type, feeds[p.name]) for p in module.inputs("predict")]
        pairs += list(zip([r.type for r in function.results], outputs, strict=True))
        for type_, array in pairs:
            _check_type(type_, array, sizes)


def _check_type(type_: Any, value: Any, sizes: dict[str, int]) -> None:
    if isinstance(type_, OptionalType):
        type_ = type_.element
    if value is None or isinstance(value, list):
        return
    array = np.asarray(value)
    if array.dtype.kind not in "OUST":
        assert type_.dtype.numpy == array.dtype, f"{type_} for {array.dtype}"
    assert type_.rank == array.ndim, f"{type_} for the shape {array.shape}"
    for dim, size in zip(type_.shape, array.shape, strict=True):
        if isinstance(dim, int):
            assert dim == size, f"{type_} for the shape {array.shape}"
        elif is_symbol(dim):
            assert sizes.setdefault(str(dim), size) == size, f"{type_} for {array.shape}: {sizes}"


def check_files(module: Module) -> None:
    """The module file and the text of its function read back to the same."""
    text = module_text(module)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.tpm"
        module.save(path)
        assert module_text(load(path)) == text, "another text after save and load"
    function = module.entry("predict")
    arrays = [v for n in function.walk() for v in n.attrs.values() if isinstance(v, np.ndarray)]
    written = function_text(function)
    assert function_text(parse_function(written, arrays)) == written, "another text after parsing"


def check_run(case: Any, module: Module, opset: int, run: Any) -> None:
    """The emitted model gives the expected outputs."""
    held = {n: EmittedInitializer(t.array) for n, t in module.state.items()}
    model = emit(module.entry("predict"), target=OnnxTarget(opset), initializers=held)
    given = serialize(model) if run is on_onnxruntime else model
    for inputs, outputs in arrays_of(case):
        found = run(given, feeds_of(case, module, inputs), outputs)
        for f, w in zip(found, outputs, strict=True):
            same(case, f, w)


def missing_rows() -> list[str]:
    """Operators of ai.onnx that have no row and no body of ONNX's own."""
    schemas = [s for s in defs.get_all_schemas() if s.domain == "" and not s.deprecated]
    structure = {"If", "Loop", "Scan", "Shape", "Size"}
    return sorted(s.name for s in schemas if ("", s.name) not in TABLE and s.name not in structure)


def summary(results: Iterable[Result]) -> Iterator[str]:
    """Counts by step, then what was lost, then the missing rows."""
    found = list(results)
    for step in STEPS:
        yield f"{step:>10}: {sum(r.passed(step) for r in found)} of {len(found)}"
    if any(r.original is not None for r in found):
        passing = [r for r in found if r.original]
        kept = sum(r.passed("own") for r in passing)
        yield f"  original: {len(passing)} pass on onnxruntime, {kept} still do at their own opset"
    failing = Counter(r.op for r in found if not all(map(r.passed, STEPS)))
    yield "failing by operator: " + (", ".join(f"{k} {v}" for k, v in failing.most_common()) or "-")
    yield "no row for: " + ", ".join(missing_rows())


def lost(results: Iterable[Result]) -> list[str]:
    """Cases that stock onnxruntime passes as they are, and not after import and emission."""
    steps = ("import", "files", "own")
    return [r.name for r in results if r.original and not all(map(r.passed, steps))]


def page(results: list[Result]) -> str:
    """The evidence: counts, and each case that fails at some step with why."""
    import onnx
    import onnxruntime

    n = len(results)
    kept = sum(bool(r.original) for r in results)
    rows = [
        ("imported", "import"), ("types inferred as the expected arrays have them", "types"),
        ("bytes and text read back to the same text", "files"),
        ("emitted at its own opset (17 to 26), run by onnxruntime", "own"),
        ("emitted at opset 21, run by onnxruntime", "21"),
        ("emitted at its own opset, run by onnx.reference", "reference"),
    ]  # fmt: skip
    lines = [
        "# ONNX's node cases",
        "",
        f"The {n} node cases of onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__};",
        "written by `python -m tests.onnx.node_suite --out docs/evidence/onnx-nodes.md`.",
        "",
        "| step | cases |",
        "|---|---|",
        f"| the case as it is, run by onnxruntime | {kept} |",
        *(f"| {text} | {sum(r.passed(step) for r in results)} |" for text, step in rows),
        f"| passes on onnxruntime as it is, and no more afterwards | {len(lost(results))} |",
        "",
        "A case of opset 7 to 16 is emitted at 17, the oldest that is written; one of 27 or 28 at",
        "26, the newest. onnx.reference itself passes 1,861 of the cases as they are.",
        "",
        "## Cases that fail at a step",
        "",
        "Failures on onnxruntime are listed where it passes the case as it is.",
        "",
        "| case | opset | step | why |",
        "|---|---|---|---|",
    ]
    for r in results:
        steps = STEPS if r.original else ("import", "types", "files", "reference")
        failing = [s for s in steps if not r.passed(s)]
        if failing:
            why = " ".join(r.errors[failing[0]].split())[:160].replace("|", "/")
            lines.append(f"| {r.name} | {r.opset} | {failing[0]} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="an operator, or a pattern of case names")
    parser.add_argument("--original", action="store_true", help="also run the cases as they are")
    parser.add_argument("--failing", action="store_true", help="list failing cases only, with why")
    parser.add_argument("--out", type=Path, help="write the evidence here; all cases as they are")
    args = parser.parse_args()
    results = []
    for case in chosen(args.k):
        result = judged(case, original=args.original or args.out is not None)
        results.append(result)
        if args.failing and all(map(result.passed, STEPS)):
            continue
        write(str(result))
        seen: set[str] = set()
        for step in STEPS:
            error = result.errors.get(step)
            if error and error not in seen:
                seen.add(error)
                write(f"    {step}: {error}")
    for line in summary(results):
        write(line)
    if args.out is not None:
        args.out.write_text(page(results))


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()

"""Choose the fastest form of an operator on this machine, by measuring once and remembering.

`_TUNABLE` lists the forms of operators that can be computed in several ways. The attribute `form`
of a node chooses one; without it, the operator's rule of thumb does. Measurements are kept in a
small file in the user's cache, by processor, version of onnxruntime and number of threads. The
choice changes rounding, so do not tune a training run that has to repeat bit for bit on another
machine.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.disk import write_atomic
from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.windows.conv_gradients import conv_grad_weight, weight_forms
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.memory import type_bytes
from triplane.unified_ir.runtime.session import Session, SessionOptions, version

ROUNDS: Final = 7
"""Timed runs of each form; the fastest counts."""
LEAST_GAIN: Final = 0.95
"""A form replaces that of the rule of thumb only if it takes at most this share of its time."""
MAX_FILE_BYTES: Final = 4 << 20
MAX_MEASURED_BYTES: Final = 1 << 30
"""A node with larger operands keeps the rule of thumb; measuring would double their memory."""

_TUNABLE: Final = {(conv_grad_weight.domain, conv_grad_weight.name): weight_forms}
"""Rows with several forms; each function lists the forms for some operands, default first."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The outcome of tuning a function."""

    measured: int
    remembered: int
    changed: Mapping[str, int]
    """Form -> number of nodes that take it against the rule of thumb."""

    def __str__(self) -> str:
        changed = ", ".join(f"{n} to {form}" for form, n in sorted(self.changed.items()))
        return (
            f"{self.measured} operators measured, {self.remembered} remembered; "
            f"changed: {changed or 'none'}"
        )


def tuned(
    function: Function,
    sizes: Mapping[str, int],
    *,
    options: SessionOptions | None = None,
    cache: Path | None = None,
) -> tuple[Function, Tuning]:
    """Return the function with the fastest known form at each node that has a choice.

    sizes: of each symbol, such as {"N": 32}; at other sizes another form may be fastest, and
    results stay right.  cache: the file of measurements, by default `cache_path()`.
    """
    options = options or SessionOptions()
    path, machine = cache or cache_path(), _machine(options)
    known, measured = _read(path).get(machine, {}), dict[str, str]()
    nodes: list[Node] = []
    asked: set[str] = set()
    changed: Counter[str] = Counter()
    function = clean(function)
    for node in function.nodes:
        forms = _forms(node, sizes)
        if len(forms) > 1 and not node.attrs.get("form"):
            key = _key(node, sizes)
            asked.add(key)
            # Not measured yet, or by a version that had other forms.
            if known.get(key) not in forms:
                known[key] = measured[key] = _fastest(node, forms, sizes, options)
            if known[key] != forms[0]:
                changed[known[key]] += 1
                node = replace(node, attrs={**node.attrs, "form": known[key]})
        nodes.append(node)
    _remember(path, machine, measured)
    tuning = Tuning(len(measured), len(asked) - len(measured), changed)
    return function.with_(nodes=nodes), tuning


def cache_path() -> Path:
    """Return the path of `tuning.json` in the user's cache: XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "triplane" / "tuning.json"


def _forms(node: Node, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the forms of a node, the rule of thumb's first; none if it has no choice."""
    forms_of = _TUNABLE.get((node.op.domain, node.op.name))
    types = [v.type for v in node.inputs if v is not None]
    if forms_of is None or sum(type_bytes(t, sizes) for t in types) > MAX_MEASURED_BYTES:
        return ()
    return forms_of(types[0], types[1], row_of(node).full_attrs(node.attrs))


def _sized(t: TensorType, sizes: Mapping[str, int]) -> TensorType:
    return t.with_shape(t.concrete(sizes))


def _key(node: Node, sizes: Mapping[str, int]) -> str:
    """Return the key of a measurement: the operator, its attributes and sizes of operands."""
    types = [str(_sized(v.type, sizes)) for v in node.inputs if v is not None]
    attrs = [f"{name}={node.attrs[name]}" for name in sorted(node.attrs)]
    return f"{node.op}({', '.join(types)}) {' '.join(attrs)}"


def _machine(options: SessionOptions) -> str:
    """Return the machine that a measurement is valid for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}; onnxruntime {version()}; {options.threads} threads"


def _fastest(
    node: Node, forms: tuple[str, ...], sizes: Mapping[str, int], options: SessionOptions
) -> str:
    """Return the fastest form by processor time, measured in turn."""
    rng = np.random.default_rng(0)
    types = [_sized(v.type, sizes) for v in node.inputs if v is not None]
    arrays: dict[str, Array] = {
        f"x{i}": rng.normal(size=t.concrete({})).astype(t.dtype.numpy) for i, t in enumerate(types)
    }
    sessions = {form: _session(node, form, types, options) for form in forms}
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(ROUNDS):
        for form, session in sessions.items():
            # Processor time, which other processes disturb less; the forms take turns and the best
            # run counts, so that a change of the clock frequency meets all of them.
            start = time.process_time()
            session.run(arrays)
            best[form] = min(best[form], time.process_time() - start)
    quickest = min(forms, key=lambda form: best[form])
    return quickest if best[quickest] <= LEAST_GAIN * best[forms[0]] else forms[0]


def _session(node: Node, form: str, types: list[TensorType], options: SessionOptions) -> Session:
    with Build(TABLE, "tried") as build:
        params = [build.param(f"x{i}", t) for i, t in enumerate(types)]
        outputs = build.apply(row_of(node), params, {**node.attrs, "form": form})
    return Session(serialize(emit(build.finish({"y": outputs[0]}))), options=options)


def _remember(path: Path, machine: str, measured: Mapping[str, str]) -> None:
    """Add measurements to the file, whose present contents other processes may have written."""
    if not measured:
        return
    # Read again just before writing; a measurement that is lost to a race is repeated later.
    known = _read(path)
    known[machine] = {**known.get(machine, {}), **measured}
    with suppress(OSError):  # without a cache, the next run measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(known, indent=1, sort_keys=True).encode())


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        with path.open("rb") as file:
            # A damaged or foreign file counts as empty: it is only a cache.
            record: Any = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {
        machine: {k: v for k, v in own.items() if isinstance(v, str)}
        for machine, own in record.items()
        if isinstance(own, dict)
    }

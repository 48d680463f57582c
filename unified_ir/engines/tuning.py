"""Which way of computing an operator is fastest here: measured once, remembered for this machine.

A row that can be computed in several ways names them (`ops.tunable`); a node's attribute `form`
chooses one, and without it the row's rule of thumb does. What was measured lies in one small file
of the user's cache, by processor, onnxruntime and number of threads. The choice changes rounding,
so a training run that shall repeat to the bit on another machine leaves tuning off.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.disk import write_atomic
from triplane.unified_ir.ir.dims import evaluate
from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.windows.conv_gradients import conv_grad_weight, weight_forms
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.runtime.session import Session, SessionOptions, version

ROUNDS: Final = 7
"""Turns of each form; the fastest of them counts."""
LEAST_GAIN: Final = 0.95
"""Another form than the rule of thumb's must take at most this share of its time."""
MAX_FILE_BYTES: Final = 4 << 20
MAX_MEASURED_BYTES: Final = 1 << 30
"""A node with larger operands keeps the rule of thumb: trying would take their memory again."""

_TUNABLE: Final = {(conv_grad_weight.domain, conv_grad_weight.name): weight_forms}
"""Rows with several forms, and what lists those that serve some operands, the default first."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a function's nodes were given."""

    measured: int
    remembered: int
    changed: Mapping[str, int]
    """Form -> how many nodes take it that the rule of thumb had given another."""

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
    """The function with the fastest known form at each node that has a choice.

    sizes: of each symbol, such as {"N": 32}; a node may be fastest otherwise at other sizes, and
    stays right.  cache: the file of what is remembered, by default `cache_path()`.
    """
    options = options or SessionOptions()
    memory = _Memory(cache or cache_path(), _machine(options))
    nodes: list[Node] = []
    asked: set[str] = set()
    measured: set[str] = set()
    changed: dict[str, int] = {}
    function = clean(function)
    for node in function.nodes:
        forms = _forms(node, sizes)
        if len(forms) < 2 or node.attrs.get("form"):
            nodes.append(node)
            continue
        key = _key(node, sizes)
        asked.add(key)
        best = memory.get(key)
        if best not in forms:
            best = _fastest(node, forms, sizes, options)
            memory.put(key, best)
            measured.add(key)
        if best != forms[0]:
            changed[best] = changed.get(best, 0) + 1
            node = Node(
                node.op, node.inputs, node.outputs, {**node.attrs, "form": best},
                node.regions, node.meta,
            )  # fmt: skip
        nodes.append(node)
    memory.save()
    function_tuned = function.with_(nodes=nodes)
    return function_tuned, Tuning(len(measured), len(asked) - len(measured), changed)


def cache_path() -> Path:
    """`tuning.json` in the user's cache: XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "triplane" / "tuning.json"


def _forms(node: Node, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The forms that serve a node, the rule of thumb's first; none where it has no choice."""
    lists = _TUNABLE.get((node.op.domain, node.op.name))
    if lists is None:
        return ()
    types = [v.type for v in node.inputs if v is not None]
    if sum(_bytes(_sized(t, sizes)) for t in types) > MAX_MEASURED_BYTES:
        return ()
    return lists(types[0], types[1], TABLE[node.op.domain, node.op.name].full_attrs(node.attrs))


def _sized(t: TensorType, sizes: Mapping[str, int]) -> TensorType:
    return t.with_shape(tuple(evaluate(d, sizes) for d in t.shape))


def _ints(t: TensorType) -> list[int]:
    return [evaluate(d, {}) for d in t.shape]


def _bytes(t: TensorType) -> int:
    return math.prod(_ints(t)) * t.dtype.bits // 8


def _key(node: Node, sizes: Mapping[str, int]) -> str:
    """The operator, its attributes and the sizes of its operands."""
    types = [str(_sized(v.type, sizes)) for v in node.inputs if v is not None]
    attrs = [f"{name}={node.attrs[name]}" for name in sorted(node.attrs)]
    return f"{node.op}({', '.join(types)}) {' '.join(attrs)}"


def _machine(options: SessionOptions) -> str:
    """What a measurement holds for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}; onnxruntime {version()}; {options.threads} threads"


def _fastest(
    node: Node, forms: tuple[str, ...], sizes: Mapping[str, int], options: SessionOptions
) -> str:
    """By processor time, the forms in turn."""
    rng = np.random.default_rng(0)
    types = [_sized(v.type, sizes) for v in node.inputs if v is not None]
    arrays: dict[str, Array] = {
        f"x{i}": rng.normal(size=_ints(t)).astype(t.dtype.numpy) for i, t in enumerate(types)
    }
    sessions = {form: _session(node, form, types, options) for form in forms}
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(ROUNDS):
        for form, session in sessions.items():
            start = time.process_time()
            session.run(arrays)
            best[form] = min(best[form], time.process_time() - start)
    quickest = min(forms, key=lambda form: best[form])
    return quickest if best[quickest] <= LEAST_GAIN * best[forms[0]] else forms[0]


def _session(node: Node, form: str, types: list[TensorType], options: SessionOptions) -> Session:
    build = Build(TABLE, "tried")
    with build:
        params = [build.param(f"x{i}", t) for i, t in enumerate(types)]
        row = TABLE[node.op.domain, node.op.name]
        outputs = build.apply(row, params, {**node.attrs, "form": form})
    return Session(serialize(emit(build.finish({"y": outputs[0]}))), options=options)


class _Memory:
    """What is remembered for one machine; a file that cannot be read is begun anew."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path, self._machine = path, machine
        self._known = _read(path)
        self._own = dict(self._known.get(machine, {}))
        self._new = False

    def get(self, key: str) -> str | None:
        """The form that was fastest."""
        return self._own.get(key)

    def put(self, key: str, form: str) -> None:
        """Remember a form."""
        self._own[key] = form
        self._new = True

    def save(self) -> None:
        """Write what is new; others' measurements since then are kept."""
        if not self._new:
            return
        known = _read(self._path)
        known[self._machine] = {**known.get(self._machine, {}), **self._own}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(known, indent=1, sort_keys=True).encode())
        except OSError:
            return  # a cache that cannot be written is measured again next time


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        with path.open("rb") as file:
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

"""The targets of conversion: what each kind of machine needs of a graph, one row per target.

Figures and traps were measured on onnxruntime 1.31; `docs/converting.md` describes how. The help of
commands lists the rows, so nothing heavy is imported at the top.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triplane.proto.errors import NotFound
from triplane.proto.machines import targets_here

if TYPE_CHECKING:
    from triplane.unified_ir.onnx import OnnxTarget
    from triplane.unified_ir.quantize import Scheme

_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One target.

    name: also in `proto.machines` if a kind of machine reports it. summary: the machines in a few
    words, for help. min_version: of the runtime. scheme: of int8. dot_products: processor flags,
    each of which stands for sums of int8 products in 32 bits. operators: operators beyond ai.onnx
    that the runtime's packages for these machines have since `min_version`; graphs in int8 may use
    them.
    """

    name: str
    summary: str
    runtime: str
    min_version: str
    opset: int
    scheme: str
    dot_products: tuple[str, ...]
    traps: tuple[str, ...]
    operators: tuple[str, ...] = ()

    @property
    def onnx(self) -> OnnxTarget:
        """The operators that an emitted float graph may use."""
        return self._emitting()

    @property
    def onnx_int8(self) -> OnnxTarget:
        """The operators that an emitted int8 graph may use."""
        return self._emitting(*self.operators)

    def _emitting(self, *operators: str) -> OnnxTarget:
        from triplane.unified_ir.onnx import OnnxTarget

        return OnnxTarget(self.opset, frozenset(operators))

    @property
    def is_here(self) -> bool:
        """Whether this machine is of the target's kind, so that its measurements are valid."""
        return self.name in targets_here()


_ROWS: Final = (
    Target(
        name="ort-x64",
        summary="Intel and AMD processors",
        runtime="onnxruntime",
        min_version="1.23.2",
        opset=21,
        scheme="u8s8",
        dot_products=("avx512_vnni", "avx_vnni", "amx_int8"),
        traps=(
            "S8 activations have no fast convolution here: 11 of 20 in a ResNet-18 stay in float",
            "without VNNI sums of two U8 x S8 saturate 16 bits; reduce_range (7-bit weights) helps",
            "without VNNI nodes run 8-bit weights in slower exact kernels or in float",
            "fp16 is computed in float32 and bf16 does not run",
        ),
        operators=("com.microsoft.DynamicQuantizeLSTM",),
    ),
    Target(
        name="ort-arm64",
        summary="64-bit ARM processors",
        runtime="onnxruntime",
        min_version="1.23.2",
        opset=21,
        scheme="s8s8",
        dot_products=("asimddp", "i8mm"),
        traps=(
            "U8 activations cost an extra correction per product; S8 x S8 is the native form",
            "measured only on an arm64 machine; elsewhere the report leaves latency undecided",
        ),
        operators=("com.microsoft.DynamicQuantizeLSTM",),
    ),
)
TARGETS: Final[Mapping[str, Target]] = {row.name: row for row in _ROWS}
# No name twice: a dict would keep only the last row.
assert len(TARGETS) == len(_ROWS)
TARGET_LIST: Final = ", ".join(f"{row.name} ({row.summary})" for row in _ROWS)
"""Each target with the machines that it is for, for the help of commands."""


def target_row(name: str) -> Target:
    """Return the target of that name; NotFound lists the existing ones."""
    if name not in TARGETS:
        raise NotFound(f"no target {name!r}; this version converts for {', '.join(TARGETS)}")
    return TARGETS[name]


def int8_scheme(target: Target, *, reduce_range: bool = False) -> Scheme:
    """Return the int8 scheme of a target; `reduce_range` takes its 7-bit form if it has one."""
    from triplane.unified_ir.quantize import scheme

    row = scheme(target.scheme)
    return scheme(row.reduced) if reduce_range and row.reduced else row


@lru_cache(maxsize=1)
def cpu_flags(source: Path = _CPUINFO) -> frozenset[str]:
    """Return the instruction sets of this machine's first core; empty if they are not listed."""
    try:
        text = source.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    rows = (line.partition(":") for line in text.splitlines())
    # "flags" on x86, "Features" on arm64
    flags = (value for key, _, value in rows if key.strip() in {"flags", "Features"})
    return frozenset(next(flags, "").split())


def instruction_note(target: Target) -> str:
    """Return a note on this machine's instruction sets for int8."""
    if not target.is_here:
        return f"this machine is {platform.machine()}, not {target.name}"
    flags = [flag for flag in target.dot_products if flag in cpu_flags()]
    if flags:
        return f"int8 products run on {', '.join(flags)}"
    note = f"none of {', '.join(target.dot_products)} here: int8 gains little"
    saturates = int8_scheme(target).reduced
    return f"{note}, and less with 8-bit weights: try --reduce-range" if saturates else note

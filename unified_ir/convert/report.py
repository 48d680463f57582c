"""The report of a conversion: sizes, times, accuracy and layers, under a verdict in words.

A report is a value: `text` for people, `record` for programs, `svg` for a page. Only the report has
measured figures, so the rest of a bundle is the same from run to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from triplane.unified_ir.convert.latency import CallTiming, Latency, Quartiles
from triplane.unified_ir.convert.residency import Resident, Shares
from triplane.unified_ir.files.chart import bar_chart, stack
from triplane.unified_ir.files.html_table import html_table

TINY_S: Final = 200e-6
"""A float inference that takes less time than this is mostly overhead, and int8 adds to it."""
SHOWN_LINES: Final = 30
SHOWN_CHARS: Final = 160
"""Lines, and characters of each, in the `repr` of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Bytes of graph and weights, and of the weights alone; int8: None for a float bundle."""

    float32: int
    float32_weights: int
    int8: int | None = None
    int8_weights: int | None = None

    def __str__(self) -> str:
        """The size of int8, compared with float32."""
        int8 = self.int8 or self.float32
        times = self.float32 / int8
        return f"{times:.1f}x smaller" if times >= 1.05 else f"no smaller ({_bytes(int8)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Share of right answers before (float) and after; agreement: share of equal answers."""

    samples: int
    before: float
    after: float
    agreement: float

    @property
    def drop_points(self) -> float:
        """Percentage points lost; negative where accuracy rose."""
        return 100.0 * (self.before - self.after)

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {
            "samples": self.samples,
            "before": self.before,
            "after": self.after,
            "drop_points": self.drop_points,
            "agreement": self.agreement,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One product: its source, the kernel that runs it, and why it stayed in float.

    snr_db: signal-to-noise ratio at its output; None without noise, or if it was not measured.
    """

    name: str
    op: str
    location: str
    kernel: str
    int8: bool
    reason: str = ""
    snr_db: float | None = None

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {
            "name": self.name,
            "op": self.op,
            "location": self.location,
            "kernel": self.kernel,
            "int8": self.int8,
            "reason": self.reason,
            "snr_db": None if self.snr_db is None else round(self.snr_db, 2),
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The result of `convert`; digest and path are empty if nothing was written."""

    name: str
    version: str
    target: str
    precision: str
    size: Size
    latency: Latency
    accuracy: Accuracy | None
    layers: tuple[Layer, ...]
    residency: Resident
    machine: Mapping[str, str]
    calibration: Mapping[str, Any] = field(default_factory=dict)
    shares: Shares | None = None
    """The shares of the time of an int8 call."""
    notes: tuple[str, ...] = ()
    digest: str = ""
    content_digest: str = ""
    path: Path | None = None

    @property
    def is_int8(self) -> bool:
        """Whether the bundle computes on integers."""
        return self.precision == "int8"

    @property
    def verdict(self) -> str:
        """The first line: the outcome of this conversion in words."""
        if not self.is_int8:
            time = f"{_duration(self.latency.float32.cpu)} a call here"
            return f"float32 for {self.target}: {_bytes(self.size.float32)}, {time}"
        smaller = str(self.size)
        if self.latency.verdict == "undecided":
            why = "interleaved runs scatter too much"
            if not self.latency.on_target:
                why = f"this machine is not {self.target}; measure there"
            return f"int8 is {smaller}; its speed is UNDECIDED here ({why})"
        assert self.latency.ratio is not None
        ratio = self.latency.ratio.median
        if self.latency.verdict == "faster":
            return f"int8 is faster here ({1 / ratio:.1f}x) and {smaller}"
        return f"int8 is SLOWER here ({ratio:.1f}x) and {smaller}: {self._slower_why()}"

    def _slower_why(self) -> str:
        in_float = sum(not layer.int8 for layer in self.layers)
        # The most likely cause first: fixed costs of a call outweigh what integers save.
        if self.latency.float32.cpu.median < TINY_S:
            return "the network is too small for int8 to pay"
        if in_float:
            return f"{in_float} of {len(self.layers)} layers stayed in float"
        return str(self.shares or "converting to bytes and back costs more than the products save")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        """Return the first lines of the text, on one screen."""
        lines = self.text().splitlines()
        shown = [line[:SHOWN_CHARS] for line in lines[:SHOWN_LINES]]
        more = len(lines) - len(shown)
        return "\n".join([*shown, *([f"and {more} more lines; print(report)"] if more else [])])

    def _repr_html_(self) -> str:
        rows = [*self._rows(), *((layer.name, _layer_words(layer)) for layer in self.layers)]
        return html_table(self.verdict, (), rows, count=len(rows), notes=self.notes)

    def text(self) -> str:
        """Return the report as plain text."""
        lines = [self.verdict, ""]
        lines += [f"  {name:<12}{value}" for name, value in self._rows()]
        if self.layers:
            lines += ["", *_layer_lines(self.layers, self.is_int8)]
        lines += ["", *self._kernel_lines()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str]]:
        where = f", {self.path}" if self.path else " (not written)"
        bundle = f"{self.name} version {self.version} for {self.target}{where}"
        s = self.size
        size = f"{_bytes(s.float32)} float32 (weights {_bytes(s.float32_weights)})"
        if s.int8 is not None and s.int8_weights is not None:
            size += f" -> {_bytes(s.int8)} int8 (weights {_bytes(s.int8_weights)})"
        rows = [("bundle", bundle), ("size", size), *_latency_rows(self.latency)]
        if self.shares:
            rows.append(("time", str(self.shares)))
        if self.accuracy:
            rows.append(("accuracy", _accuracy_words(self.accuracy, self.is_int8)))
        elif self.is_int8:
            rows.append(("accuracy", "not measured: no evaluation set was given"))
        if self.calibration:
            c = self.calibration
            rows.append(("calibration", f"{c['samples']} samples, sha256 {c['sha256'][:12]}"))
        rows.append(("machine", ", ".join(self.machine.values())))
        if self.digest:
            content = f"{self.content_digest} (without report)"
            rows += [("digest", self.digest), ("content", content)]
        return rows

    def _kernel_lines(self) -> list[str]:
        r = self.residency
        groups = {"int8 kernels": r.integer, "conversions": r.casts, "other": r.other}
        return [
            f"  {title:<12} " + ", ".join(f"{k} x{n}" if n > 1 else k for k, n in counts.items())
            for title, counts in groups.items()
            if counts
        ]

    def record(self) -> dict[str, Any]:
        """Return the report as JSON, without path and digest: a file cannot hold its own digest."""
        return {
            "verdict": self.verdict,
            "name": self.name,
            "version": self.version,
            "target": self.target,
            "precision": self.precision,
            "size_bytes": {
                "float32": self.size.float32,
                "float32_weights": self.size.float32_weights,
                "int8": self.size.int8,
                "int8_weights": self.size.int8_weights,
            },
            "latency": self.latency.record(),
            "time_shares": self.shares.record() if self.shares else None,
            "accuracy": self.accuracy.record() if self.accuracy else None,
            "layers": [layer.record() for layer in self.layers],
            "residency": self.residency.record(),
            "calibration": dict(self.calibration),
            "machine": dict(self.machine),
            "notes": list(self.notes),
        }

    def svg(self) -> str:
        """Return charts of size, latency, accuracy and noise, under the verdict."""
        head, _, why = self.verdict.partition(": ")
        rows = [why] if why else []
        return stack(self._charts(), head, [*rows, f"{self.name} {self.version}, {self.target}"])

    def _charts(self) -> list[str]:
        sizes, times = self.size, self.latency
        kilobytes = {"float32": sizes.float32 / 1e3}
        cpu_ms = {"float32": 1e3 * times.float32.cpu.median}
        if sizes.int8 is not None:
            kilobytes["int8"] = sizes.int8 / 1e3
        if times.int8:
            cpu_ms["int8"] = 1e3 * times.int8.cpu.median
        note = f"Median of {times.rounds} interleaved runs, batch {times.batch}, one thread."
        charts = [
            bar_chart(kilobytes, "Size of graph and weights", "kB", highlight="int8"),
            bar_chart(cpu_ms, "Processor time per call", "ms", note=note, highlight="int8"),
        ]
        if a := self.accuracy:
            shares = {"float32": 100 * a.before} | ({"int8": 100 * a.after} if self.is_int8 else {})
            title = f"Accuracy on {a.samples:,} samples"
            charts.append(bar_chart(shares, title, "%", highlight="int8"))
        # A cell that is applied several times gives several layers of one name; bars need distinct
        # names.
        counts = Counter(layer.name for layer in self.layers)
        levels = {
            layer.name if counts[layer.name] == 1 else f"{layer.name} {i}": max(0.0, layer.snr_db)
            for i, layer in enumerate(self.layers)
            if layer.snr_db is not None
        }
        if levels:
            note = "Signal over rounding noise at each layer's output; every 6 dB is one bit."
            charts.append(bar_chart(levels, "Signal-to-noise ratio by layer", "dB", note=note))
        return charts


def _latency_rows(latency: Latency) -> list[tuple[str, str]]:
    rows = [("float32", _timing_words(latency.float32))]
    if latency.int8 is not None and latency.ratio is not None:
        ratio = f"int8 / float32 = {_ratio_words(latency.ratio)}: {latency.verdict}"
        rows += [("int8", _timing_words(latency.int8)), ("latency", ratio)]
    return [*rows, ("control", f"float32 / float32 = {_ratio_words(latency.control_ratio)}")]


def _ratio_words(r: Quartiles) -> str:
    return f"{r.median:.2f} ({r.q1:.2f} to {r.q3:.2f})"


def _timing_words(timing: CallTiming) -> str:
    cpu, wall = timing.cpu, _duration(timing.wall)
    return f"{_duration(cpu)} a call ({1e3 * cpu.q1:.4g} to {1e3 * cpu.q3:.4g} ms, wall {wall})"


def _accuracy_words(a: Accuracy, int8: bool) -> str:  # noqa: FBT001 - private
    if not int8:
        return f"{100 * a.before:.2f} % on {a.samples} samples"
    return (
        f"{100 * a.before:.2f} % -> {100 * a.after:.2f} % on {a.samples} samples "
        f"({a.drop_points:+.2f} points lost, {100 * a.agreement:.2f} % equal answers)"
    )


def _layer_words(layer: Layer) -> str:
    noise = f", {layer.snr_db:.1f} dB" if layer.snr_db is not None else ""
    why = f", in float: {layer.reason}" if layer.reason else ""
    return f"{layer.kernel}{noise}{why}"


def _layer_lines(layers: tuple[Layer, ...], int8: bool) -> list[str]:  # noqa: FBT001 - private
    width = max(len(layer.name) for layer in layers)
    lines = []
    for layer in layers:
        noise = f"{layer.snr_db:5.1f} dB" if layer.snr_db is not None else " " * 8
        why = f"in float: {layer.reason}" if int8 and not layer.int8 else ""
        line = f"  {layer.name:<{width}}  {layer.kernel:<20} {noise}  {layer.location}  {why}"
        lines.append(line.rstrip())
    return lines


def _bytes(n: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} bytes"


def _duration(q: Quartiles) -> str:
    return f"{1e3 * q.median:.4g} ms"

"""The time of one call, by node of the user's graph, by operator and by source line.

The total comes from a session that is not profiled, since profiling itself takes time; the shares
come from onnxruntime's profile of a second session of the same graph. The time of a subgraph is
attributed to the nodes inside. A node that onnxruntime fused from several keeps the name of one of
them, or is counted as `fused`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.onnx.emit import emit_located, serialize
from triplane.unified_ir.onnx.target import DEFAULT, OnnxTarget
from triplane.unified_ir.passes.widen import widen_half
from triplane.unified_ir.runtime.session import Session, SessionOptions

WARMUPS: Final = 3
FUSED: Final = "fused"
KERNEL: Final = "_kernel_time"
"""Suffix of the names of profile events that are runs of kernels."""
_NAME: Final = re.compile(r"at/\d+")
Event = Mapping[str, Any]
_Group = defaultdict[tuple[str, str, str, str], list[list[float]]]
"""Times of kernels by (identity, operator, line, scope)."""


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of a node, an operator or a line. `runs` counts kernels per call."""

    what: str
    op: str
    line: str
    scope: str
    share: float
    ms: float
    runs: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The time of one function; each list is sorted by share, and its shares add up to 1.

    `nodes` are the user's, `ops` the kernels that ran, `lines` the user's source.
    """

    total_ms: float
    """Median time of a call without profiling."""
    calls: int
    nodes: tuple[Spent, ...]
    ops: tuple[Spent, ...]
    lines: tuple[Spent, ...]


def profiled(
    function: Function,
    args: Mapping[str, Array],
    *,
    state: Sequence[str] = (),
    calls: int = 20,
    options: SessionOptions | None = None,
    target: OnnxTarget = DEFAULT,
) -> Profile:
    """Profile `calls` calls on `args`; the tensors that `state` names stay in session buffers."""
    if calls < 1:
        raise InvalidInput(f"a profile needs at least one call, got {calls}")
    chosen = options or SessionOptions()
    model, places = emit_located(widen_half(function), target=target)
    graph = serialize(model)
    run = _runner(Session(graph, options=chosen), args, state)
    total = _median_ms(run, calls)
    with TemporaryDirectory() as folder:
        session = Session(graph, options=replace(chosen, profile_prefix=Path(folder) / "run"))
        run = _runner(session, args, state)
        for _ in range(calls):
            run()
        events = kernel_events(session)
    return _profile(_kernels(events), places, total, calls)


def kernel_shares(
    open_session: Callable[[SessionOptions], Session], feeds: Mapping[str, Array], calls: int
) -> dict[str, float]:
    """Return the shares of a call's time by kind of kernel, largest first; they add up to 1.

    open_session: opens a session on the graph with the given options.
    """
    with TemporaryDirectory() as folder:
        session = open_session(SessionOptions(profile_prefix=Path(folder) / "run"))
        for _ in range(calls):
            session.run(feeds)
        events = kernel_events(session)
    kinds: dict[str, float] = defaultdict(float)
    for (_, kernel), times in _kernels(events).items():
        kinds[kernel] += _usual(times)
    whole = sum(kinds.values()) or 1.0
    return {k: t / whole for k, t in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))}


def kernel_events(session: Session) -> list[Event]:
    """End a session's profile and return its runs of kernels, each before those inside it."""
    events = json.loads(session.profile().read_text())
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(KERNEL)]
    # An event that contains others starts no later and lasts longer, so it comes before them.
    return sorted(kernels, key=lambda e: (e["ts"], -e["dur"]))


def sample_inputs(
    types: Mapping[str, TensorType], sizes: Mapping[str, int], *, default: int, seed: int = 0
) -> dict[str, Array]:
    """Return inputs to time a call on: normal numbers, and 0 for integers, a valid index."""
    rng = np.random.default_rng(seed)
    samples = {}
    for name, t in types.items():
        shape = t.concrete({s: sizes.get(s, default) for s in t.symbols})
        drawn = rng.standard_normal(shape) if t.dtype.is_float else np.zeros(shape)
        samples[name] = drawn.astype(t.dtype.numpy)
    return samples


def _runner(
    session: Session, args: Mapping[str, Array], state: Sequence[str]
) -> Callable[[], object]:
    if not state:
        return lambda: session.run(args)
    loop = session.loop({k: args[k] for k in state})
    batch = {k: v for k, v in args.items() if k not in state}
    return lambda: loop.step(**batch)


def _median_ms(run: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(WARMUPS + calls):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times[WARMUPS:]) * 1e3


def _kernels(events: Sequence[Event]) -> dict[tuple[str, str], list[float]]:
    """Return the own microseconds of each run, by (node name, operator)."""
    runs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kernel, t in _self_times(events):
        runs[name, kernel].append(t)
    return runs


def _self_times(kernels: Sequence[Event]) -> list[tuple[str, str, float]]:
    """Return (node name, operator, microseconds without nodes inside) of each run of a kernel."""
    own = [float(e["dur"]) for e in kernels]
    open_: list[int] = []
    for i, event in enumerate(kernels):
        # `open_` is the stack of events that contain the current one.
        while open_ and _end(kernels[open_[-1]]) <= event["ts"]:
            open_.pop()
        if open_ and _end(event) <= _end(kernels[open_[-1]]):
            own[open_[-1]] -= event["dur"]
        open_.append(i)
    return [
        # Times are rounded to microseconds, so a difference may fall below 0.
        (e["name"].removesuffix(KERNEL), e.get("args", {}).get("op_name", ""), max(t, 0.0))
        for e, t in zip(kernels, own, strict=True)
    ]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _usual(times: Sequence[float]) -> float:
    """Return the time of all runs of one kernel; an interrupted one counts like the others."""
    # The median rather than the sum: when the system runs another process in between, one run takes
    # many times as long.
    return median(times) * len(times)


def _profile(
    kernels: Mapping[tuple[str, str], list[float]],
    places: Mapping[str, Node],
    total: float,
    calls: int,
) -> Profile:
    whole = sum(map(_usual, kernels.values())) or 1.0
    nodes, ops, lines = _Group(list), _Group(list), _Group(list)
    for (name, kernel), ts in kernels.items():
        match = _NAME.search(name)
        node = places.get(match.group()) if match else None
        if node is None:
            key = op = f"{FUSED} {kernel}"
            line = scope = ""
        else:
            key, op, scope = str(id(node)), str(node.op), node.meta.scope
            line = str(node.meta.location or "")
        nodes[key, op, line, scope].append(ts)
        ops["", kernel or (op if node else FUSED), "", ""].append(ts)
        lines[line, "", line, ""].append(ts)

    def table(group: _Group) -> tuple[Spent, ...]:
        rows = []
        for (_, op, line, scope), parts in group.items():
            share = sum(map(_usual, parts)) / whole
            runs = sum(map(len, parts)) / calls
            rows.append(Spent(op or line or "no line", op, line, scope, share, share * total, runs))
        return tuple(sorted(rows, key=lambda r: (-r.share, r.what, r.line)))

    return Profile(total, calls, table(nodes), table(ops), table(lines))

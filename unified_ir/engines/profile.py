"""Where the time of one call goes: by node of the user's graph, by operator, by line.

Total time comes from a session that is not profiled, since profiling itself takes time; shares come
from onnxruntime's profile of a second session of the same graph. What a node with a subgraph spends
in it counts for the nodes inside. A node that onnxruntime made by fusing several keeps the name of
one of them, or counts as `fused`.
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
from triplane.unified_ir.ir.dims import evaluate
from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.onnx.emit import emit_located, serialize
from triplane.unified_ir.onnx.target import DEFAULT, OnnxTarget
from triplane.unified_ir.passes.widen import widen_half
from triplane.unified_ir.runtime.session import Session, SessionOptions

WARMUPS: Final = 3
FUSED: Final = "fused"
_NAME: Final = re.compile(r"at/\d+")


@dataclass(frozen=True, slots=True)
class Spent:
    """Time of one thing: a node, an operator, a line. `runs` counts kernels per call."""

    what: str
    op: str
    line: str
    scope: str
    share: float
    ms: float
    runs: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One function's time; each list falls by share, shares of a list add up to 1.

    `nodes` are the user's, `ops` the kernels that ran, `lines` the user's source.
    """

    total_ms: float
    """Median of a call, not profiled."""
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
    """The profile of `calls` calls on `args`; what `state` names stays in the session's buffers."""
    if calls < 1:
        raise InvalidInput(f"a profile takes one call at least, got {calls}")
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
        events = json.loads(session.profile().read_text())
    return _profile(_self_times(events), places, total, calls)


def kernel_shares(
    open_session: Callable[[SessionOptions], Session], feeds: Mapping[str, Array], calls: int
) -> dict[str, float]:
    """Share of the time of a call by kind of kernel, largest first; the shares add up to 1.

    open_session: a session on the graph, with the options given.
    """
    with TemporaryDirectory() as folder:
        session = open_session(SessionOptions(profile_prefix=Path(folder) / "run"))
        for _ in range(calls):
            session.run(feeds)
        events = json.loads(session.profile().read_text())
    each: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kernel, t in _self_times(events):
        each[name, kernel].append(t)
    kinds: dict[str, float] = defaultdict(float)
    for (_, kernel), times in each.items():
        kinds[kernel] += _usual(times)
    whole = sum(kinds.values()) or 1.0
    return {k: t / whole for k, t in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))}


def sample_inputs(
    types: Mapping[str, TensorType], sizes: Mapping[str, int], *, default: int, seed: int = 0
) -> dict[str, Array]:
    """Inputs to time a call on: normal numbers, and 0 for whole numbers, an index that exists."""
    rng = np.random.default_rng(seed)
    samples = {}
    for name, t in types.items():
        bound = {s: sizes.get(s, default) for s in t.symbols}
        shape = tuple(evaluate(d, bound) for d in t.shape)
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
    for _ in range(WARMUPS):
        run()
    times = []
    for _ in range(calls):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times) * 1e3


def _self_times(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """(node name, operator, microseconds without those of nodes inside) of each kernel run."""
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    kernels.sort(key=lambda e: (e["ts"], -e["dur"]))
    own = [float(e["dur"]) for e in kernels]
    open_: list[int] = []
    for i, event in enumerate(kernels):
        while open_ and _end(kernels[open_[-1]]) <= event["ts"]:
            open_.pop()
        if open_ and _end(event) <= _end(kernels[open_[-1]]):
            own[open_[-1]] -= event["dur"]
        open_.append(i)
    return [
        (e["name"].removesuffix("_kernel_time"), e.get("args", {}).get("op_name", ""), max(t, 0.0))
        for e, t in zip(kernels, own, strict=True)
    ]


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _usual(times: Sequence[float]) -> float:
    """What the runs of one kernel take together; one that was interrupted counts as the others."""
    return median(times) * len(times)


def _profile(
    times: Sequence[tuple[str, str, float]], places: Mapping[str, Node], total: float, calls: int
) -> Profile:
    each: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kernel, t in times:
        each[name, kernel].append(t)
    whole = sum(_usual(ts) for ts in each.values()) or 1.0
    groups: dict[str, dict[tuple[str, str, str, str], list[list[float]]]] = {
        k: defaultdict(list) for k in ("nodes", "ops", "lines")
    }
    for (name, kernel), ts in each.items():
        match = _NAME.search(name)
        node = places.get(match.group()) if match else None
        op = str(node.op) if node is not None else FUSED
        line = str(node.meta.location) if node is not None and node.meta.location else ""
        scope = node.meta.scope if node is not None else ""
        key = str(id(node)) if node is not None else f"{FUSED} {kernel}"
        groups["nodes"][key, op if node is not None else key, line, scope].append(ts)
        groups["ops"]["", kernel or op, "", ""].append(ts)
        groups["lines"][line, "", line, ""].append(ts)

    def table(kind: str) -> tuple[Spent, ...]:
        rows = []
        for (_, op, line, scope), parts in groups[kind].items():
            share = sum(map(_usual, parts)) / whole
            runs = sum(map(len, parts)) / calls
            rows.append(Spent(op or line or "no line", op, line, scope, share, share * total, runs))
        return tuple(sorted(rows, key=lambda r: (-r.share, r.what, r.line)))

    return Profile(total, calls, table("nodes"), table("ops"), table("lines"))

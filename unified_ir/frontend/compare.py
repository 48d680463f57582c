"""Compare two ways of running a function: find the first node whose results differ.

Every output of every top-level node becomes an extra result, so both sides run the same graph. As
with any probe, this can change what an engine computes, because a node whose output is observed
cannot be fused away. The side "eager" records the function on the same arrays; its results are also
compared with those of the traced graph, which reveals a condition that was decided differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import engine
from triplane.unified_ir.frontend.run import current_floats, host_arguments, state_arrays
from triplane.unified_ir.frontend.trace import Traceable, Traced, name_of, record
from triplane.unified_ir.ir.graph import NO_META, Array, Function, Location, Meta, Value
from triplane.unified_ir.ops.evaluate import run_node

EAGER = "eager"


@dataclass(frozen=True, slots=True, eq=False)
class FirstDifference:
    """The first value that differs between the two sides; `max_abs` is at index `at`."""

    op: str
    location: Location | None
    scope: str
    max_abs: float
    at: tuple[int, ...]
    left: Array
    right: Array


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """True when nothing differs; `str` says what was compared and where the sides diverge."""

    name: str
    left: str
    right: str
    values: int
    """Number of values compared."""
    difference: FirstDifference | None

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        head = f"{self.name}: {self.left} against {self.right}"
        d = self.difference
        if d is None:
            return f"{head}: {self.values} values agree"
        where = f" at {d.location}" if d.location else ""
        scope = f" in {d.scope}" if d.scope else ""
        if d.left.shape != d.right.shape:
            return f"{head}: {d.op}{where}{scope} gives {d.left.shape} and {d.right.shape}"
        return (
            f"{head}: {d.op}{where}{scope} differs by {d.max_abs:.3g} at {list(d.at)}: "
            f"{d.left[d.at]!s} and {d.right[d.at]!s}"
        )

    __repr__ = __str__


def compare(
    f: Traceable,
    *args: Any,
    left: str = "reference",
    right: str = "onnx",
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **kwargs: Any,
) -> Comparison:
    """Run `f` on two engines (or "eager") and find the first node where they differ.

    Values agree where |a - b| <= atol + rtol |b|, NaN with NaN. No state is written back.

    >>> from triplane.unified_ir import ops
    >>> compare(lambda x: ops.relu(x) * 2.0, np.ones(3, np.float32))
    lambda: reference against onnx: 3 values agree
    """
    if left == right:
        raise InvalidInput(f"compare takes two different sides, got {left!r} for both")
    eager = EAGER in {left, right}
    traced, arrays = recorded_call(f, args, kwargs, eager=eager)
    probes = _probes(traced.function)
    first, second = (_values(side, traced, arrays, probes) for side in (left, right))
    pairs = zip(probes, first, second, strict=True)
    difference = _first(((*probe[:2], a, b) for probe, a, b in pairs), (rtol, atol))
    # So far both sides ran the graph that the eager call took. The traced graph holds both sides of
    # every condition and may take the other one.
    if difference is None and eager:
        graph = recorded_call(f, args, kwargs)
        difference = _first(_graph_results(graph, traced, (left, right)), (rtol, atol))
    return Comparison(name_of(f), left, right, len(probes), difference)


Probe = tuple[str, Meta, Value]
Compared = tuple[str, Meta, Array, Array]


def recorded_call(
    f: Traceable, args: Sequence[Any], kwargs: dict[str, Any], *, eager: bool = False
) -> tuple[Traced, list[Array]]:
    """Record a call of `f`; return it and the arrays of its parameters."""
    arguments, arrays = host_arguments(f, args, kwargs, current_floats())
    traced = record(f, arguments, run=run_node if eager else None, arrays=arrays)
    return traced, [*arrays, *state_arrays(traced)]


def _probes(function: Function) -> list[Probe]:
    """Return every node output in order, then results that no node computes."""
    probes = [(str(node.op), node.meta, v) for node in function.nodes for v in node.outputs]
    seen, results = {v for *_, v in probes}, dict.fromkeys(function.results)
    return probes + [(f"result {r.name}", NO_META, r) for r in results if r not in seen]


def _values(
    side: str, traced: Traced, arrays: Sequence[Array], probes: Sequence[Probe]
) -> Sequence[Array]:
    if side == EAGER:
        assert traced.arrays is not None
        return [traced.arrays[v] for *_, v in probes]
    names = (f"node/{i}" for i in range(len(probes)))
    shown = traced.function.with_(results=(v for *_, v in probes), result_names=names)
    return engine(side).compile(shown)(*arrays)


def _first(rows: Iterable[Compared], tolerance: tuple[float, float]) -> FirstDifference | None:
    for label, meta, a, b in rows:
        gap = _difference(a, b, *tolerance)
        if gap is not None:
            return FirstDifference(label, meta.location, meta.scope, *gap, a, b)
    return None


def _difference(
    a: Array, b: Array, rtol: float, atol: float
) -> tuple[float, tuple[int, ...]] | None:
    """Return the largest difference and its index, or None where the arrays agree."""
    if a.shape != b.shape:
        return float("inf"), ()
    x, y = a.astype(np.float64), b.astype(np.float64)
    agree = np.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    if agree.all():
        return None
    with np.errstate(invalid="ignore"):
        gap = np.where(agree, 0.0, np.abs(x - y))
    # A NaN against a number is the largest difference; argmax must not be left to compare NaNs.
    gap = np.where(np.isnan(gap), np.inf, gap)
    at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
    return float(gap[at]), at


def _graph_results(
    graph: tuple[Traced, Sequence[Array]], eager: Traced, names: tuple[str, str]
) -> Iterator[Compared]:
    """Yield the results of the traced graph and of the eager record, in the order of the sides."""
    traced, arrays = graph
    (side,) = (name for name in names if name != EAGER)
    values = engine(side).compile(traced.function)(*arrays)
    by_name = dict(zip(traced.function.result_names, values, strict=True))
    assert eager.arrays is not None
    for name, value in zip(eager.function.result_names, eager.function.results, strict=True):
        pair = (by_name[name], eager.arrays[value])
        a, b = pair[::-1] if names[0] == EAGER else pair
        yield f"result {name} of the traced graph", NO_META, a, b

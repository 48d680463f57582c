"""TreeEnsembleClassifier and TreeEnsembleRegressor of ai.onnx.ml: all trees walked at once.

One array holds the current node of each row in each tree; a step gathers the splits of these nodes
and moves on. There are as many steps as the deepest tree has levels. Leaves lead to themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import float32, float64
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.onnx.scores import (
    COMPARE,
    chosen,
    labelled,
    labels,
    matrix,
    regressed,
    transformed,
    two_scores,
)
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, dims_of, emit

MAX_DEPTH: Final = 512
"""The most levels of a tree: each is a few nodes of the graph."""
MAX_TABLE: Final = 1 << 24
"""The most numbers in the table of weights: nodes times classes."""
LEAF: Final = "LEAF"


@dataclass(frozen=True)
class _Trees:
    """Columns of the nodes of all trees."""

    features: Any
    values: Any
    modes: Any
    yes: Any
    no: Any
    tracks: Any
    roots: Any
    depth: int
    places: Mapping[tuple[int, int], int]


def _values(app: Application, name: str, default: Any = ()) -> Any:
    """Return an attribute as a vector, in doubles if the model has that form."""
    tensor = app.attr(f"{name}_as_tensor")
    return np.asarray(app.attr(name, default) if tensor is None else tensor).reshape(-1)


def _column(app: Application, name: str, count: int, default: Any = ()) -> Any:
    """Return an attribute with one entry per node."""
    column = _values(app, name, default)
    if len(column) != count:
        raise InvalidInput(f"{name} has {len(column)} entries for {count} nodes")
    return column


def _trees(app: Application) -> _Trees:
    ids = app.attr("nodes_nodeids", ())
    n = len(ids)
    of = _column(app, "nodes_treeids", n).tolist()
    keys = list(zip(of, ids, strict=True))
    places = {key: i for i, key in enumerate(keys)}
    modes = _column(app, "nodes_modes", n)
    unknown = sorted(set(modes.tolist()) - {LEAF, *COMPARE})
    if not n or len(places) < n or unknown:
        raise InvalidInput(f"it has {n} nodes, {n - len(places)} named twice, modes {unknown[:3]}")
    inner = modes != LEAF
    ways = []
    for side in ("true", "false"):
        to = zip(of, _column(app, f"nodes_{side}nodeids", n).tolist(), strict=True)
        children = np.array([places.get((tree, int(node)), -1) for tree, node in to], np.int64)
        # A leaf leads to itself, so rows that end early wait there for the deepest tree.
        ways.append(np.where(inner, children, np.arange(n)))
    if min(int(w.min()) for w in ways) < 0:
        raise InvalidInput("a split leads to a node that its tree does not have")
    roots, depth = _levels(np.array(of), ways, inner)
    tracks = _column(app, "nodes_missing_value_tracks_true", n, np.zeros(n))
    return _Trees(
        features=np.where(inner, _column(app, "nodes_featureids", n), 0).astype(np.int64),
        values=np.where(inner, _column(app, "nodes_values", n), 0),
        modes=modes,
        yes=ways[0],
        no=ways[1],
        tracks=np.asarray(tracks, bool) & inner,
        roots=roots,
        depth=depth,
        places=places,
    )


def _levels(of: Any, ways: Sequence[Any], inner: Any) -> tuple[Any, int]:
    """Return the root of each tree, and the number of splits on the longest path to a leaf."""
    reached = np.zeros(len(of), np.int64)
    for way in ways:
        np.add.at(reached, way[inner], 1)
    roots = np.flatnonzero(reached == 0)
    if reached.max() > 1 or len(roots) != len(set(of.tolist())):
        raise InvalidInput("its nodes are not trees: one has two parents, or none")
    # Level by level from the roots. Untrusted children may form a cycle: one that hangs on a root
    # has a node with two parents, and one apart from all roots is never met.
    at, depth, met = roots, 0, len(roots)
    while (splits := at[inner[at]]).size:
        at, depth = np.concatenate([way[splits] for way in ways]), depth + 1
        met += len(at)
        if depth > MAX_DEPTH:
            raise InvalidInput(f"a tree has more than {MAX_DEPTH} levels")
    if met < len(of):
        raise InvalidInput("its nodes are not trees: some form a cycle that no root leads to")
    return roots, depth


def _leaves(x: Tensor, trees: _Trees) -> Tensor:
    """Return the (N, trees) indices of the leaves that the rows end in."""
    width = x.shape[1]
    if not isinstance(width, int) or not 0 <= trees.features.min() <= trees.features.max() < width:
        raise InvalidInput(f"a split reads feature {trees.features.max()} of {x.type}")
    values = as_tensor(trees.values.astype(x.dtype.numpy))
    tables = [as_tensor(t) for t in (trees.features, trees.yes, trees.no)]
    spread = dims_of([x.shape[0], len(trees.roots)])
    at = emit("Expand", as_tensor(trees.roots.astype(np.int64)), spread)
    kinds = sorted(set(trees.modes.tolist()) - {LEAF})
    for _ in range(trees.depth):
        feature, yes, no = (emit("Gather", t, at, axis=0) for t in tables)
        number = emit("GatherElements", x, feature, axis=1)
        goes = _split_holds(number, emit("Gather", values, at, axis=0), at, trees, kinds)
        # A comparison with NaN is false, so a missing value goes to the false side unless the node
        # tracks it.
        if trees.tracks.any():
            tracked = emit("Gather", as_tensor(trees.tracks), at, axis=0)
            goes = emit("Or", goes, emit("And", emit("IsNaN", number), tracked))
        at = emit("Where", goes, yes, no)
    return at


def _split_holds(x: Tensor, v: Tensor, at: Tensor, trees: _Trees, kinds: Sequence[str]) -> Tensor:
    """Return whether each current split holds."""
    # Most forests have one kind of comparison; each further kind overrides the answer at its own
    # nodes.
    goes = COMPARE[kinds[0]](x, v)
    for kind in kinds[1:]:
        here = emit("Gather", as_tensor(trees.modes == kind), at, axis=0)
        asks, others = emit("And", here, COMPARE[kind](x, v)), emit("And", emit("Not", here), goes)
        goes = emit("Or", asks, others)
    return goes


def _table(app: Application, stem: str, trees: _Trees, n: int) -> tuple[Any, Any]:
    """Return (nodes, n) weights, and whether a leaf has one."""
    count = len(app.attr(f"{stem}_ids", ()))
    weights = _column(app, f"{stem}_weights", count)
    tree, node = (_column(app, f"{stem}_{k}ids", count).tolist() for k in ("tree", "node"))
    ids = _column(app, f"{stem}_ids", count).astype(np.int64)
    places = [trees.places.get(key, -1) for key in zip(tree, node, strict=True)]
    if not count or min(places) < 0 or not 0 <= ids.min() <= ids.max() < n:
        raise InvalidInput(f"a weight has an unknown leaf or target; there are {n} targets")
    if len(trees.features) * n > MAX_TABLE:
        raise InvalidInput(f"{len(trees.features)} nodes by {n} targets are more than {MAX_TABLE}")
    table = np.zeros((len(trees.features), n), weights.dtype)
    # A leaf may list the same target more than once; its weights add up.
    np.add.at(table, (places, ids), weights)
    held = np.zeros(table.shape, bool)
    held[places, ids] = True
    return table, held


def _working(app: Application) -> Tensor:
    """Return the input in the type in which thresholds are compared."""
    x = matrix(app)
    return x if x.dtype in {float32, float64} else x.cast(float32)


def _summed(x: Tensor, trees: _Trees, table: Any, how: str = "Sum") -> Tensor:
    """Return the (N, n) sums, or another reduction, of the leaves' weights over the trees."""
    rows = emit("Gather", as_tensor(table.astype(x.dtype.numpy)), _leaves(x, trees), axis=0)
    return emit(f"Reduce{how}", rows, np.array([1]), keepdims=0)


def tree_regressor(app: Application) -> Sequence[Tensor]:
    """x: (N, features) -> (N, targets): sums, means, least or largest weights of the leaves."""
    x, trees, n = _working(app), _trees(app), int(app.attr("n_targets", 1))
    table, held = _table(app, "target", trees, n)
    how = str(app.attr("aggregate_function", "SUM"))
    if how in {"SUM", "AVERAGE"}:
        summed = _summed(x, trees, table)
        summed = summed if how == "SUM" else summed / float(len(trees.roots))
    elif how in {"MIN", "MAX"}:
        if not held[trees.modes == LEAF].all():
            raise InvalidInput(f"{how} over trees needs leaves that have a weight for each target")
        summed = _summed(x, trees, table, how.capitalize())
    else:
        raise InvalidInput(f"it aggregates trees by {how!r}; known are SUM, AVERAGE, MIN and MAX")
    return regressed(app, summed, _values(app, "base_values"), n)


def tree_classifier(app: Application) -> Sequence[Tensor]:
    """x: (N, features) -> labels (N,), scores (N, classes)."""
    x, trees, names = _working(app), _trees(app), labels(app)
    table, held = _table(app, "class", trees, len(names))
    scored, base = np.flatnonzero(held.any(0)), _values(app, "base_values")
    if len(names) == 2:
        return _binary(app, x, trees, table, names)
    if len(base) not in {0, len(names)} or len(names) < 2 or len(scored) < len(names):
        raise InvalidInput(
            f"{len(scored)} of {len(names)} classes have weights, {len(base)} base values are given"
        )
    scores = _summed(x, trees, table)
    scores = scores + as_tensor(base.astype(scores.dtype.numpy)) if len(base) else scores
    scores = scores.cast(float32)
    return labelled(scores, names), transformed(app, scores)


def _binary(app: Application, x: Tensor, trees: _Trees, table: Any, names: Any) -> Sequence[Tensor]:
    """Return label and scores of two classes; the threshold is 0, or 0.5 if no weight is negative.

    As in onnxruntime, scores of the first class are those of the second, and the first gets the
    complement; scores of the second class leave 0 to the first.
    """
    ids, base = set(app.attr("class_ids")), _values(app, "base_values")
    if len(ids) != 1 or len(base) > (0 if 1 in ids else 1):
        raise InvalidInput(
            f"of two classes, {len(ids)} have weights, with {len(base)} base values; runtimes "
            "disagree there: export the scores of the first class"
        )
    weights = table[:, next(iter(ids))]
    score = _summed(x, trees, weights[:, None])
    score = (score + float(base[0]) if len(base) else score).cast(float32)
    positive = bool((weights >= 0).all())
    label = chosen(score > (0.5 if positive else 0.0), names)
    if 1 in ids:
        return label, transformed(app, emit("Concat", score * 0.0, score, axis=1))
    return label, two_scores(app, score, complement=positive)

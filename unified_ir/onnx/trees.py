"""TreeEnsemble of ai.onnx.ml as a few matrix products that find the leaf of every row at once.

Every split is evaluated on every row; a leaf is reached if all the splits on its path have the
answers that the path requires. With the answers C (N, splits), and the paths as two matrices T and
F (splits, leaves) of ones, leaf l is reached if (C T + (1 - C) F)[l] equals the length of its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.onnx.scores import COMPARE
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit

MAX_ENTRIES: Final = 1 << 22
"""Splits times leaves: the size of the matrices of paths."""
MEMBER: Final = 6
_SUM, _MIN, _MAX = 1, 2, 3
_COMPARE: Final = tuple(COMPARE.values())

Way = tuple[int, list[tuple[int, bool]]]
"""A leaf, and the answers on the path to it."""


def tree_ensemble(app: Application) -> Sequence[Tensor]:
    """x: (N, features) -> (N, targets)."""
    x = app.operand(0)
    if x.rank != 2 or app.attr("post_transform", 0) != 0:
        raise InvalidInput("it takes a matrix and no post_transform; transform its output instead")
    ways = [w for root in app.attr("tree_roots") for w in _ways(app, int(root))]
    answers = _answers(app, x)
    splits, leaves = answers.shape[1], len(ways)
    if not isinstance(splits, int) or splits * leaves > MAX_ENTRIES:
        raise InvalidInput(f"{splits} splits by {leaves} leaves are more than {MAX_ENTRIES}")
    right = np.zeros((2, splits, leaves), x.dtype.numpy)
    for k, (_, way) in enumerate(ways):
        for split, answer in way:
            right[0 if answer else 1, split, k] = 1
    asked = answers.cast(x.dtype)
    agree = asked @ as_tensor(right[0]) + (1.0 - asked) @ as_tensor(right[1])
    lengths = np.array([len(way) for _, way in ways], x.dtype.numpy)
    return (_gathered(app, emit("Equal", agree, as_tensor(lengths)), [leaf for leaf, _ in ways]),)


def _ways(app: Application, root: int) -> list[Way]:
    """Return every leaf below a split, with the path to it."""
    ways: list[Way] = []
    stack: list[tuple[int, bool, list[tuple[int, bool]]]] = [(root, False, [])]
    splits = len(app.attr("nodes_featureids"))
    while stack:
        at, leaf, way = stack.pop()
        if leaf:
            ways.append((at, way))
            continue
        # Untrusted links: a path longer than the number of splits repeats one, so it would never
        # end.
        if not 0 <= at < splits or len(way) > splits or len(ways) * splits > MAX_ENTRIES:
            raise InvalidInput(f"split {at} of a tree of {splits} splits is on an endless path")
        for side, answer in (("false", False), ("true", True)):
            ends = bool(app.attr(f"nodes_{side}leafs")[at])
            stack.append((app.attr(f"nodes_{side}nodeids")[at], ends, [*way, (at, answer)]))
    return ways


def _answers(app: Application, x: Tensor) -> Tensor:
    """Return the (N, splits) answers."""
    modes = np.asarray(app.attr("nodes_modes")).reshape(-1)
    values = np.asarray(app.attr("nodes_splits")).reshape(-1)
    if not len(modes) == len(values) == len(app.attr("nodes_featureids")):
        raise InvalidInput("each split has one feature, one mode and one value")
    taken = emit("Gather", x, np.array(app.attr("nodes_featureids"), np.int64), axis=1)
    sets = _sets(app)
    columns = []
    for k, mode in enumerate(modes.tolist()):
        column = emit("Gather", taken, np.array([k]), axis=1)
        columns.append(_test_holds(int(mode), column, values[k : k + 1], sets))
    answers = emit("Concat", *columns, axis=1)
    tracks = app.attr("nodes_missing_value_tracks_true")
    if tracks is not None and any(tracks):
        absent = emit("And", emit("IsNaN", taken), as_tensor(np.array(tracks, bool)))
        answers = emit("Or", answers, absent)
    return answers


def _test_holds(mode: int, x: Tensor, value: Any, sets: list[Any]) -> Tensor:
    if mode == MEMBER:
        if not sets:
            raise InvalidInput("a split by membership has no values")
        # Sets are stored in the order of the splits that use them.
        hit = emit("Equal", x, as_tensor(sets.pop(0).astype(x.dtype.numpy)[None]))
        return emit("ReduceMax", hit.cast("int32"), np.array([1]), keepdims=1) > 0
    if not 0 <= mode < MEMBER:
        raise InvalidInput(f"a split has mode {mode}; modes are 0 to {MEMBER}")
    return _COMPARE[mode](x, as_tensor(value.astype(x.dtype.numpy)))


def _sets(app: Application) -> list[Any]:
    """Return the values of the splits by membership, in their order; NaN ends each."""
    values = np.asarray(app.attr("membership_values", ())).reshape(-1)
    ends = np.flatnonzero(np.isnan(values))
    return [part[~np.isnan(part)] for part in np.split(values, ends)][: len(ends)]


def _gathered(app: Application, reached: Tensor, leaves: Sequence[int]) -> Tensor:
    """Return the weights of the leaves reached, summed for each target."""
    targets, n = app.attr("leaf_targetids"), int(app.attr("n_targets", 0))
    weights = np.asarray(app.attr("leaf_weights")).reshape(-1)
    if any(not 0 <= leaf < len(weights) or not 0 <= targets[leaf] < n for leaf in leaves):
        raise InvalidInput(f"a leaf has an unknown weight or target; there are {n} targets")
    if n * len(leaves) > MAX_ENTRIES:
        raise InvalidInput(f"{n} targets by {len(leaves)} leaves are more than {MAX_ENTRIES}")
    table = np.zeros((len(leaves), n), weights.dtype)
    for k, leaf in enumerate(leaves):
        table[k, targets[leaf]] = weights[leaf]
    how = app.attr("aggregate_function", _SUM)
    if how in {_MIN, _MAX}:
        raise InvalidInput("only sums and means over trees are supported, not MIN and MAX")
    total = reached.cast(table.dtype.name) @ as_tensor(table)
    return total if how == _SUM else total / float(len(app.attr("tree_roots")))

"""Nested tuples, lists and dicts of leaves, flattened in a fixed order (dicts by sorted key)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from triplane.proto.errors import InvalidInput


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree; None is an empty tree."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def names_of_leaves(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return, for each leaf in order, the keys of the dicts around it, outermost first."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [n for key in sorted(tree) for n in names_of_leaves(tree[key], (*prefix, key))]
    if isinstance(tree, (tuple, list)):
        return [n for item in tree for n in names_of_leaves(item, prefix)]
    return [prefix]


def rebuild(tree: Any, values: Sequence[Any]) -> Any:
    """Return a tree shaped like `tree` with its leaves replaced in order."""
    remaining = iter(values)
    tree_of_leaves = _fill(tree, remaining)
    if list(remaining):
        raise InvalidInput(f"{len(values)} values do not fit a tree of {len(leaves(tree))} leaves")
    return tree_of_leaves


def _fill(tree: Any, values: Iterator[Any]) -> Any:
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: _fill(tree[key], values) for key in sorted(tree)}
    # A named tuple takes its fields one by one, any other tuple takes one iterable.
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_fill(item, values) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_fill(item, values) for item in tree)
    return next(values)


def structure(tree: Any) -> Any:
    """Return the nesting as a hashable value, equal for trees with equal keys and lengths."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return ("dict", tuple((key, structure(tree[key])) for key in sorted(tree)))
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, tuple(structure(item) for item in tree))
    return "leaf"

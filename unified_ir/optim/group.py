"""Parameter groups: parameters that a pattern selects, with their own options or frozen."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from triplane.proto.errors import InvalidInput


@dataclass(frozen=True, init=False)
class Group:
    """Parameters whose path matches `pattern`, with options of their own.

    pattern: as in a shell, matched against the whole path: "*.bias", "body.*", "head.weight".
    options: any field of the optimizer (`lr=`, `weight_decay=`, `momentum=`, ...).
    frozen: the parameters do not change, get no gradient and have no state.
    A path belongs to the first group that matches it.

    >>> from triplane.unified_ir import optim
    >>> optim.SGD(0.1, weight_decay=1e-4, groups=(optim.Group("*.bias", weight_decay=0.0),)).groups
    (Group('*.bias', weight_decay=0.0),)
    """

    pattern: str
    frozen: bool
    options: tuple[tuple[str, Any], ...]

    def __init__(self, pattern: str, *, frozen: bool = False, **options: Any) -> None:
        if not pattern:
            raise InvalidInput('a group needs a pattern of paths, such as "*.bias"')
        if frozen and options:
            raise InvalidInput(
                f"group {pattern!r} is frozen and ignores {', '.join(options)}; leave them out"
            )
        if "groups" in options:
            raise InvalidInput(f"group {pattern!r} cannot hold groups; list them in one tuple")
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "frozen", frozen)
        # Sorted, so that groups with equal options are equal and have equal hashes.
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    def holds(self, path: str) -> bool:
        """Return whether the parameter at `path` matches."""
        return fnmatchcase(path, self.pattern)

    def __repr__(self) -> str:
        options = [f"{k}={v!r}" for k, v in self.options] + ["frozen=True"] * self.frozen
        return f"Group({', '.join([repr(self.pattern), *options])})"

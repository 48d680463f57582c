"""How one trip of a loop ended: with the next trip, out of the loop, or out of the function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from triplane.unified_ir.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class LoopExit:
    """`broken`: the loop ends here. `returned`: the function ends too and returns `value`.

    Each flag is a bool, or a bool tensor where a tensor decided.
    """

    broken: bool | Tensor = False
    returned: bool | Tensor = False
    value: Any = None

    def parts(self) -> tuple[Any, Any, Any]:
        """Return the three parts as a tree."""
        return self.broken, self.returned, self.value


NEXT: Final = LoopExit()
BREAK: Final = LoopExit(broken=True)


def returned(value: Any) -> LoopExit:
    """`return value` inside a loop."""
    return LoopExit(broken=True, returned=True, value=value)

"""An operator applied in some version of its definition, before it is lifted to the IR's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Application:
    """An operator applied: `since` is the version of the definition that its form follows."""

    op: str
    since: int
    inputs: tuple[Tensor | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default."""
        return self.attrs.get(name, default)

    def operand(self, i: int) -> Tensor:
        """Return operand `i`, which must be present."""
        operand = self.inputs[i] if i < len(self.inputs) else None
        if operand is None:
            raise InvalidInput(f"{self.op} needs operand {i}")
        return operand

    def without(self, *names: str, **attrs: Any) -> Application:
        """Return the application without some attributes, and with others set."""
        kept = {k: v for k, v in self.attrs.items() if k not in names}
        return replace(self, attrs=kept | attrs)

    def padded(self, n: int) -> tuple[Tensor | None, ...]:
        """Return the operands, with None for absent ones up to `n`."""
        return (*self.inputs, *[None] * (n - len(self.inputs)))


Lifted = Application | tuple[Tensor, ...]

"""The variables and buffers that a piece of rewritten control flow may assign."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter, current_or_none, holding, replaced
from triplane.unified_ir.frontend.guards import TraceGuard, named_values
from triplane.unified_ir.frontend.merge import UNBOUND
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.source import location_of
from triplane.unified_ir.ops.tensor import Tensor

Odd = tuple[Any, ...]
"""A statement that a tensor cannot decide: (what, line) or (what, line, owner, attribute)."""


@dataclass(frozen=True, slots=True)
class VariableSnapshot:
    """Values at one moment: variables by name (UNBOUND without one), assigned buffers."""

    variables: dict[str, Any]
    buffers: dict[Parameter, Tensor]


class VariableAccess:
    """Accesses, from outside their function, the variables that one `if` or loop may assign."""

    def __init__(
        self,
        names: Sequence[str] = (),
        reads: Sequence[Callable[[], Any]] = (),
        write: Callable[[tuple[Any, ...]], None] | None = None,
        odd: Sequence[Odd] = (),
        *,
        depth: int = 1,
    ) -> None:
        self.names = tuple(names)
        self.here = location_of(sys._getframe(depth))  # noqa: SLF001 - the rewritten statement
        self._reads = reads
        self._write = write
        self._odd = odd

    def snapshot(self) -> VariableSnapshot:
        """Return the current values."""
        binding = current_or_none()
        variables = {n: _read(r) for n, r in zip(self.names, self._reads, strict=True)}
        return VariableSnapshot(variables, {} if binding is None else dict(binding.assigned))

    def restore(self, snapshot: VariableSnapshot) -> None:
        """Restore the values of a snapshot."""
        if self._write is not None:
            self._write(tuple(snapshot.variables[n] for n in self.names))
        binding = current_or_none()
        if binding is not None:
            binding.assigned = dict(snapshot.buffers)

    def refuse_odd(self, kind: str) -> None:
        """Refuse, by name, statements that cannot depend on a tensor."""
        for what, line, *owner in self._odd:
            # Whether `x.y = ...` assigns a buffer is known only when it runs, so the rewritten code
            # passes a thunk that gives the owner `x`.
            if owner and owner[1] in getattr(owner[0](), "_parameters", ()):
                continue  # a buffer
            raise InvalidInput(
                f"{what} (line {line}) is in {kind} that a tensor decides ({self.here}), and "
                "would happen once, while the graph is recorded, whatever the tensor is; move it "
                "out, or use mode('eager')"
            )

    @contextmanager
    def refusing_changes(self, kind: str, *functions: Any) -> Iterator[None]:
        """Refuse, by name, changes within the block to anything but variables and buffers.

        Examples are a list that grew, or an attribute set by a called function: it happened once,
        while the graph was recorded. Variables must be restored before the block ends.
        """
        guard = TraceGuard((), named_values(functions))
        yield
        changed = guard.changed()
        if changed is not None:
            raise InvalidInput(
                f"`{changed}` is changed in {kind} that a tensor decides ({self.here}), which "
                "happens while the graph is recorded, whatever the tensor is; assign variables "
                "instead (a new list or number), stack values with ops.scan, or use mode('eager')"
            )


def _read(thunk: Callable[[], Any]) -> Any:
    try:
        return thunk()
    except NameError:
        return UNBOUND


@contextmanager
def collecting() -> Iterator[None]:
    """Let the binding collect, within the block, buffers assigned in the current graph."""
    binding = current_or_none()
    with nullcontext() if binding is None else replaced(binding, home=recorder()):
        yield


_reasons: ContextVar[dict[str, str]] = ContextVar("triplane_unbound")


def reasons() -> AbstractContextManager[None]:
    """Record, within the block, why variables of one call of rewritten code have no value."""
    return holding(_reasons, {})


def unbind(name: str, reason: str) -> Any:
    """Return UNBOUND and remember the reason, which reading the variable will report."""
    _reasons.get({})[name] = reason
    return UNBOUND


def reason_of(name: str) -> str | None:
    """Return why a variable has no value; None where no branch or loop removed it."""
    return _reasons.get({}).get(name)


def explain(error: NameError) -> None:
    """Raise InvalidInput with the reason, if a variable without a value was read."""
    quoted_name = re.search(r"'(\w+)'", str(error))
    reason = reason_of(quoted_name.group(1)) if quoted_name else None
    if quoted_name is None or reason is None:
        return
    # The innermost frame is the line that read the variable.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = f" at {location_of(trace.tb_frame)}" if trace is not None else ""
    raise InvalidInput(f"{quoted_name.group(1)!r} has no value{at}: {reason}") from None

"""Names of one ONNX graph while it is imported, and the weights of the whole model.

A name refers to a value computed so far, or to an initializer that has not been read yet. An inner
graph sees its parent's names; the build that it records into captures the values it reads there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from onnx import TensorProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import limits
from triplane.unified_ir.ir.graph import Array, Role, StateTensor
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.onnx.source import array_of, unused
from triplane.unified_ir.onnx.twins import Twins, equal_weights
from triplane.unified_ir.onnx.uses import Uses
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor

MAX_WEIGHT_BYTES: Final = 2**34
"""The most bytes of all weights of a model together."""
MAX_SHOWN: Final = 8
"""The most names in a message."""


class TrainableChoice:
    """The caller's choice of tensors to train or to freeze, by name, whatever their use.

    A pattern is a name with `*` for any part. A tensor that matches both `trainable` and `frozen`
    is trained, so that "*" frozen and "head.*" trainable trains the head alone. Running statistics
    stay buffers: batch normalization updates them, and as parameters they would be trained.
    """

    def __init__(self, trainable: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
        self.trainable = tuple(trainable)
        self.frozen = tuple(frozen)
        self.names: list[str] = []
        self.statistics: set[str] = set()

    def role(self, name: str, array: Array, judged: Role, *, is_statistic: bool = False) -> Role:
        """Return the role of a tensor, given the role for its use; scalars and non-floats keep it.

        name: its name in the state, which the patterns are matched with.
        """
        if array.dtype.kind == "O" or not type_of(array).dtype.is_float or not array.ndim:
            return judged
        self.names.append(name)
        if is_statistic and judged is Role.BUFFER:
            self.statistics.add(name)
        elif self._fits(self.trainable, name):
            return Role.PARAMETER
        if judged is Role.PARAMETER and self._fits(self.frozen, name):
            return Role.BUFFER
        return judged

    def is_trainable(self, name: str) -> bool:
        """Return whether the caller wants a tensor trained."""
        return self._fits(self.trainable, name)

    def check(self) -> None:
        """Refuse a pattern that matches no tensor, or one to train that matches only statistics."""
        for option, patterns in (("trainable", self.trainable), ("frozen", self.frozen)):
            for pattern in patterns:
                fitting = [name for name in self.names if fnmatchcase(name, pattern)]
                if not fitting:
                    raise InvalidInput(
                        f"{option}: no tensor of the model matches {pattern!r}; there are "
                        f"{_shown(self.names)}"
                    )
                if option == "trainable" and self.statistics.issuperset(fitting):
                    raise InvalidInput(
                        f"trainable: {pattern!r} fits only running statistics: {_shown(fitting)}; "
                        "no gradient reaches them, leave the pattern out (batch normalization "
                        'moves them in training with nn.Imported(module, batch_norm="updated"))'
                    )

    @staticmethod
    def _fits(patterns: Sequence[str], name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shown(names: Sequence[str]) -> str:
    """Return the first names, and "..." if there are more."""
    shown = ", ".join(names[:MAX_SHOWN]) or "none"
    return f"{shown}, ..." if len(names) > MAX_SHOWN else shown


class Weights:
    """State tensors created so far, by name, and their parameters in the graph."""

    def __init__(
        self,
        build: Build,
        folder: Path | None,
        taken: Iterable[str],
        choice: TrainableChoice | None = None,
        tie: Sequence[str] = (),
    ) -> None:
        self.choice = TrainableChoice() if choice is None else choice
        self.build = build
        self.folder = folder
        self.state: dict[str, StateTensor] = {}
        self.taken = set(taken)
        self.bytes = 0
        self.tie = tuple(tie)
        """Patterns of names; equal parameters that match become one."""
        self._twins = Twins()
        self._tensors: dict[str, Tensor] = {}
        self.scopes = 0
        """Number of scopes created so far, which numbers each of them."""
        self._scope_of: dict[str, int] = {}
        self._tied: dict[str, str] = {}
        """The weight that replaces each omitted one."""

    def tied(self, name: str, array: Array, scope: int) -> tuple[Tensor, bool] | None:
        """Return an equal parameter to tie this one to, and whether it is the transpose.

        name: the name that it would have in the state, from `free`. scope: the equal parameter is
        now also a weight of this scope, and kept as long as it.
        """
        if not any(fnmatchcase(name, pattern) for pattern in self.tie):
            return None
        twin = self._twins.first(name, array, self.state)
        if twin is None:
            return None
        first, is_transposed = twin
        self._tied[name] = first
        # The outermost of the two scopes, which is the one that is discarded last.
        self._scope_of[first] = min(self._scope_of[first], scope)
        return self._tensors[first], is_transposed

    def check_tied(self) -> None:
        """Refuse a pattern of `tie` that ties nothing."""
        names = {*self._tied, *self._tied.values()}
        for pattern in self.tie:
            if not any(fnmatchcase(name, pattern) for name in names):
                equal = [f"{first} = {name}" for name, first in self._tied.items()]
                equal += [" = ".join(group) for group in equal_weights(self.state)]
                raise InvalidInput(
                    f"tie: {pattern!r} matches no two equal weights; equal are {_shown(equal)}"
                )

    def add(self, name: str, array: Array, role: Role, scope: int) -> Tensor:
        """Add a weight of a scope, under a name from `free`."""
        self.bytes += array.nbytes
        if self.bytes > MAX_WEIGHT_BYTES:
            raise InvalidInput(f"the weights are more than {MAX_WEIGHT_BYTES} bytes")
        self.taken.add(name)
        self._scope_of[name] = scope
        self.state[name] = StateTensor(role, array)
        self._tensors[name] = self.build.param(name, type_of(array))
        return self._tensors[name]

    def back_to(self, mark: int) -> None:
        """Forget weights of scopes created since `scopes` was `mark`; their recording is discarded.

        Weights of an outer scope that the recording was the first to read stay.
        """
        for name in [name for name, scope in self._scope_of.items() if scope > mark]:
            self.bytes -= self.state.pop(name).array.nbytes
            self.taken.remove(name)
            self.build.params.remove(self._tensors.pop(name).value)
            del self._scope_of[name]

    def free(self, name: str, prefix: str = "") -> str:
        """Return the name of a weight in the state; a taken one gets a prefix or a number."""
        stem = name if name not in self.taken else f"{prefix or 'inner'}.{name}"
        if len(stem.encode()) > limits.MAX_NAME_BYTES - 8:
            raise InvalidInput(f"the name {stem[:40]!r}... is too long")
        return unused(stem, self.taken)


class Scope:
    """Names of one graph, function body or region."""

    def __init__(
        self,
        build: Build,
        weights: Weights,
        uses: Uses,
        parent: Scope | None = None,
        prefix: str = "",
    ) -> None:
        self.build = build
        self.weights = weights
        self.uses = uses
        self.parent = parent
        self.prefix = prefix
        self.values: dict[str, Tensor] = {}
        self.waiting: dict[str, TensorProto] = {}
        weights.scopes += 1
        self.number = weights.scopes

    def declare(self, initializers: Iterable[TensorProto]) -> None:
        """Add names of initializers, which are read when first used."""
        for tensor in initializers:
            if tensor.name in self.waiting or not tensor.name:
                fault = "is given twice" if tensor.name else "has no name"
                raise InvalidInput(f"initializer {tensor.name[:80]!r} {fault}")
            self.waiting[tensor.name] = tensor

    def define(self, name: str, x: Tensor) -> None:
        """Name a value; two values may not have the same name."""
        if name in self.values or name in self.waiting:
            raise InvalidInput(f"two values have the name {name[:80]!r}")
        self.values[name] = x

    def read(self, name: str, what: str) -> Tensor:
        """Return the value of a name; refuse a name that nothing defines."""
        # Read when first used, so initializers that no output needs are never loaded.
        if name in self.waiting:
            array = array_of(self.waiting.pop(name), self.weights.folder)
            self.values[name] = self.held(name, array)
        if name in self.values:
            return self.values[name]
        if self.parent is None:
            raise InvalidInput(f"no node, input or initializer produces {what} {name[:80]!r}")
        return self.parent.read(name, what)

    def is_wanted(self, name: str) -> bool:
        """Return whether the caller wants a Constant of this name trained."""
        choice = self.weights.choice
        return bool(choice.trainable) and choice.is_trainable(self.weights.free(name, self.prefix))

    def held(self, name: str, array: Array) -> Tensor:
        """Return an initializer: state if it is a weight, a constant if its contents matter."""
        use = self.uses.role(name, array)
        if use is None:
            return self.build.constant(array)
        free = self.weights.free(name, self.prefix)
        is_statistic = self.uses.is_statistic(name)
        role = self.weights.choice.role(free, array, use, is_statistic=is_statistic)
        tied = self.weights.tied(free, array, self.number) if role is Role.PARAMETER else None
        if tied is None:
            return self.weights.add(free, array, role, self.number)
        weight, is_transposed = tied
        if not is_transposed:
            return weight
        return self.build.apply(TABLE["", "Transpose"], (weight,), {"perm": (1, 0)})[0]

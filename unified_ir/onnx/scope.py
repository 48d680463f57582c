"""Names of one ONNX graph while it is imported, and the weights of the whole model.

A name stands for a value computed so far, or for an initializer nobody has read yet. An inner
graph sees its parent's names; the build it records into makes captures of what it reads there.
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
from triplane.unified_ir.onnx.source import array_of
from triplane.unified_ir.onnx.twins import Twins, equal_weights
from triplane.unified_ir.onnx.uses import Uses
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor

MAX_WEIGHT_BYTES: Final = 2**34
"""All weights of a model together."""
MAX_SHOWN: Final = 8
"""Names in a message."""


class TrainableChoice:
    """Which tensors the caller wants trained, and which not, whatever their use; by name.

    A pattern is a name with `*` for any part. What fits one of `trainable` is trained even where it
    fits one of `frozen`: so "*" frozen and "head.*" trainable says what it seems to say. Running
    statistics stay buffers: batch normalization moves them, and as parameters they would be learnt
    as weights are.
    """

    def __init__(self, trainable: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
        self.trainable = tuple(trainable)
        self.frozen = tuple(frozen)
        self.names: list[str] = []
        self.statistics: set[str] = set()

    def role(self, name: str, array: Array, judged: Role, *, is_statistic: bool = False) -> Role:
        """The role of a tensor that its use judged; only floats of some axes are chosen.

        name: the one that it would have in the state, which patterns fit or not.
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
        """Whether the caller wants it trained."""
        return self._fits(self.trainable, name)

    def check(self) -> None:
        """InvalidInput where a pattern fits no tensor, or one to train fits statistics alone."""
        for option, patterns in (("trainable", self.trainable), ("frozen", self.frozen)):
            for pattern in patterns:
                fitting = [name for name in self.names if fnmatchcase(name, pattern)]
                if not fitting:
                    raise InvalidInput(
                        f"{option}: no tensor of the model fits {pattern!r}; there are "
                        f"{_shown(self.names)}"
                    )
                if option == "trainable" and self.statistics.issuperset(fitting):
                    raise InvalidInput(
                        f"trainable: {pattern!r} fits running statistics alone: {_shown(fitting)}; "
                        "no gradient reaches them, leave the pattern out (batch normalization "
                        'moves them in training with nn.Imported(module, batch_norm="updated"))'
                    )

    @staticmethod
    def _fits(patterns: Sequence[str], name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shown(names: Sequence[str]) -> str:
    """The first names, and that there are more."""
    shown = ", ".join(names[:MAX_SHOWN]) or "none"
    return f"{shown}, ..." if len(names) > MAX_SHOWN else shown


class Weights:
    """State tensors made so far, by name, and the parameters that stand for them."""

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
        """Patterns of names; equal parameters that fit are one."""
        self._twins = Twins()
        self._tensors: dict[str, Tensor] = {}
        self.scopes = 0
        """Scopes made so far; each is known by how many there were with it."""
        self._scope_of: dict[str, int] = {}
        self._tied: dict[str, str] = {}
        """The weight that stands for each that was left out."""

    def tied(self, name: str, array: Array, scope: int) -> tuple[Tensor, bool] | None:
        """An equal parameter that this one is tied to, and whether as its transpose.

        name: the one that it would have in the state, as `free` gives it. scope: it stands for a
        weight of this scope now, too, and is kept as long.
        """
        if not any(fnmatchcase(name, pattern) for pattern in self.tie):
            return None
        twin = self._twins.first(name, array, self.state)
        if twin is None:
            return None
        first, is_transposed = twin
        self._tied[name] = first
        self._scope_of[first] = min(self._scope_of[first], scope)
        return self._tensors[first], is_transposed

    def check_tied(self) -> None:
        """InvalidInput where a pattern of `tie` ties nothing."""
        names = {*self._tied, *self._tied.values()}
        for pattern in self.tie:
            if not any(fnmatchcase(name, pattern) for name in names):
                equal = [f"{first} = {name}" for name, first in self._tied.items()]
                equal += [" = ".join(group) for group in equal_weights(self.state)]
                raise InvalidInput(
                    f"tie: {pattern!r} fits no two equal weights; equal are {_shown(equal)}"
                )

    def add(self, name: str, array: Array, role: Role, scope: int) -> Tensor:
        """A weight of a scope, under a name that `free` gave."""
        self.bytes += array.nbytes
        if self.bytes > MAX_WEIGHT_BYTES:
            raise InvalidInput(f"the weights are more than {MAX_WEIGHT_BYTES} bytes")
        self.taken.add(name)
        self._scope_of[name] = scope
        self.state[name] = StateTensor(role, array)
        self._tensors[name] = self.build.param(name, type_of(array))
        return self._tensors[name]

    def mark(self) -> int:
        """Where one is, for `back_to`."""
        return self.scopes

    def back_to(self, mark: int) -> None:
        """Forget weights of scopes made since, with a recording that is thrown away.

        What such a recording was the first to read of an outer scope stays: it is known there.
        """
        forgotten = [name for name, scope in self._scope_of.items() if scope > mark]
        for name in forgotten:
            self.bytes -= self.state.pop(name).array.nbytes
            self.taken.remove(name)
            self.build.params.remove(self._tensors.pop(name).value)
            del self._scope_of[name]

    def free(self, name: str, prefix: str = "") -> str:
        """The name that a weight has in the state; one already taken gets a prefix or a number."""
        stem = name if name not in self.taken else f"{prefix or 'inner'}.{name}"
        if len(stem.encode()) > limits.MAX_NAME_BYTES - 8:
            raise InvalidInput(f"the name {stem[:40]!r}... is longer than names may be")
        free, k = stem, 1
        while free in self.taken:
            k += 1
            free = f"{stem}.{k}"
        return free


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
        """Names that stand for initializers, read when first used."""
        for tensor in initializers:
            if tensor.name in self.waiting or not tensor.name:
                fault = "is given twice" if tensor.name else "has no name"
                raise InvalidInput(f"initializer {tensor.name[:80]!r} {fault}")
            self.waiting[tensor.name] = tensor

    def define(self, name: str, x: Tensor) -> None:
        """Lets a name stand for a value; each name is given once."""
        if name in self.values or name in self.waiting:
            raise InvalidInput(f"the name {name[:80]!r} is given to two values")
        self.values[name] = x

    def find(self, name: str) -> Tensor | None:
        """What a name stands for."""
        if name in self.values:
            return self.values[name]
        if name in self.waiting:
            tensor = self.held(name, array_of(self.waiting.pop(name), self.weights.folder))
            self.values[name] = tensor
            return tensor
        return self.parent.find(name) if self.parent is not None else None

    def is_wanted(self, name: str) -> bool:
        """Whether the caller wants a Constant of this name trained."""
        choice = self.weights.choice
        return bool(choice.trainable) and choice.is_trainable(self.weights.free(name, self.prefix))

    def held(self, name: str, array: Array) -> Tensor:
        """An initializer: state where it is a weight, a constant where its contents matter."""
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

"""A function with fixed weights, and the builder of another one for passes over it.

A converter's passes need weights as arrays. The weights stay parameters of the function, so that a
graph emitted from it keeps them under their own names, outside the graph. Invariant: every name in
`weights` is a parameter of the array's type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, compress, count
from typing import Final, Self

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import Module, Role
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import Replay
from triplane.unified_ir.ops.row import DOMAIN
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.rewrite import Rewriter

MAX_CONSTANT_BYTES: Final = 64
"""Arrays up to this size, and all that are not floats, are constants; others are weights."""


OPENED: Final = frozenset({"Swish"})
"""Operators of ONNX that onnxruntime lacks, but whose parts have integer kernels there."""


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A function, and the arrays of those of its parameters that are weights."""

    function: Function
    weights: Mapping[str, Array]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Parameters that the caller supplies."""
        return tuple(p for p in self.function.params if p.name not in self.weights)

    def known(self) -> dict[Value, Array]:
        """Return the array of every weight and every constant."""
        arrays = {p: self.weights[p.name] for p in self.function.params if p.name in self.weights}
        for node in self.function.nodes:
            if node.op.name == "Constant":
                arrays[node.outputs[0]] = node.attrs["value"]  # type: ignore[assignment]
        return arrays


def freeze(module: Module, entry: str) -> Frozen:
    """Return an entry with the module's state as its weights, without the state that it assigns.

    Raise InvalidInput if it needs a personal tensor, which never leaves its device, or a random
    key, which means that it was traced for training.
    """
    function = module.entry(entry)
    # An entry that assigns state (running statistics, a step counter) is served without doing so.
    kept = [name not in module.state for name in function.result_names]
    function = function.with_(
        results=compress(function.results, kept), result_names=compress(function.result_names, kept)
    )
    if not function.results:
        raise InvalidInput(f"entry {entry!r} returns only state; there is nothing to serve")
    held = {p.name: module.state[p.name] for p in function.params if p.name in module.state}
    frozen = pruned(Frozen(function, {name: held[name].array for name in held}))
    for name in frozen.weights:
        if held[name].role is Role.PERSONAL:
            raise InvalidInput(
                f"entry {entry!r} uses the personal tensor {name!r}, which never leaves its "
                "device; convert an entry without it"
            )
        if held[name].role is Role.KEY:
            raise InvalidInput(
                f"entry {entry!r} draws random numbers with {name!r}, which would be the same at "
                "every call; draw in training mode only, or let the caller give the key: "
                "trainer.export(('predict',), key_input='seed'), or on the command line "
                "`triplane train --key-input seed`"
            )
    return expanded(frozen)


def pruned(frozen: Frozen) -> Frozen:
    """Drop the nodes that no result needs, and the weights that no node reads."""
    function = clean(frozen.function)
    used = {v for node in function.nodes for v in node.inputs} | set(function.results)
    params = tuple(p for p in function.params if p in used or p.name not in frozen.weights)
    names = {p.name for p in params}
    weights = {name: array for name, array in frozen.weights.items() if name in names}
    return Frozen(function.with_(params=params), weights)


class FrozenBuilder:
    """Builds a new function from a frozen one: replays its nodes, or replaces them by others.

    with FrozenBuilder(frozen) as builder:
        for node in frozen.function.nodes:
            builder.keep(node)
    frozen = builder.finish()
    """

    def __init__(self, frozen: Frozen) -> None:
        self.frozen = frozen
        self.weights: dict[str, Array] = dict(frozen.weights)
        self._build = Build(TABLE, frozen.function.name)
        self._names = set(frozen.function.param_names)
        self._added: dict[tuple[str, tuple[int, ...], bytes], Tensor] = {}

    def __enter__(self) -> Self:
        self._build.__enter__()
        function = self.frozen.function
        params = [self._build.param(p.name, p.type) for p in function.params]
        self._replay = Replay(function, params)
        return self

    def __exit__(self, *exception: object) -> None:
        self._build.__exit__(*exception)

    def __getitem__(self, value: Value) -> Tensor:
        """Return the tensor that replaces a value of the old function."""
        return self._replay.values[value]

    def keep(self, node: Node) -> None:
        """Keep the node, on the tensors that replace its operands."""
        self._replay.run(node)

    def replace(self, node: Node, operands: Sequence[Tensor | None]) -> None:
        """Apply the node's operator to other operands."""
        row, outputs = row_of(node), len(node.outputs)
        with self._build.at(node.meta):
            tensors = self._build.apply(row, operands, node.attrs, outputs=outputs)
        self._replay.define(node, tensors)

    def put(self, value: Value, tensor: Tensor) -> None:
        """Replace the old value by `tensor` from here on."""
        self._replay.values[value] = tensor

    def weight(self, name: str, array: Array) -> Tensor:
        """Return a new weight called `name`, or `name.1`, `name.2`, ... if that is taken.

        An array that this builder has added before is the same weight, so an array that several
        nodes read is stored once.
        """
        # A digest as key: weights may take gigabytes, and their bytes would be held twice as a key.
        key = (array.dtype.str, array.shape, sha256(np.ascontiguousarray(array).data).digest())
        if key not in self._added:
            names = chain([name], (f"{name}.{n}" for n in count(1)))
            unique = next(n for n in names if n not in self._names)
            self._names.add(unique)
            self.weights[unique] = array
            self._added[key] = self._build.param(unique, type_of(array))
        return self._added[key]

    def hold(self, name: str, array: Array) -> Tensor:
        """Return a weight, or a constant if the array is small or not of floats."""
        # Integers are shapes, axes and indices as a rule. Other passes and runtimes read them when
        # they load the graph, for which they must be constants.
        if array.dtype.kind != "f" or array.nbytes <= MAX_CONSTANT_BYTES:
            return self._build.constant(array)
        return self.weight(name, array)

    def finish(self, more: Mapping[str, Tensor] | None = None) -> Frozen:
        """Return the new function, pruned; `more` are results in addition to the old ones."""
        named = dict(zip(self.frozen.function.result_names, self._replay.results(), strict=True))
        return pruned(Frozen(self._build.finish(named | dict(more or {})), self.weights))


def expanded(frozen: Frozen, also: Collection[str] = ()) -> Frozen:
    """Replace rows that are emitted as their bodies by these, so that passes see what is inside.

    also: names of further operators to replace by their bodies.
    """
    return pruned(Frozen(_Expansion(also).rewrite(frozen.function), frozen.weights))


class _Expansion(Rewriter):
    def __init__(self, also: Collection[str]) -> None:
        super().__init__()
        self._also = also

    def region(self, function: Function) -> Function:
        """Keep a region: passes over weights do not look inside."""
        return function

    def visit(self, node: Node) -> None:
        """Add the nodes of a body in place of the node, or keep it."""
        self.note(node)
        body = self.body(node) if _opened(node, self._also) else None
        if body is None:
            self.keep(node)
        else:
            self.spread(node, body)


def _opened(node: Node, also: Collection[str]) -> bool:
    """Return whether a node's row is defined by other rows, and should be replaced by them."""
    row = row_of(node)
    stays = row.domain != DOMAIN and row.name not in OPENED and row.name not in also
    return not stays and (row.inline_region or row.body is not None)

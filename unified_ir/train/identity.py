"""The identity of a run, so that a checkpoint is never silently continued with something else.

Network, loss and optimizer are identified by their graphs without source locations, data by its
size, types and bytes. Each part is a line of text that ends with a digest; two parts are equal if
their lines are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triplane.proto.errors import Conflict
from triplane.unified_ir.frontend.trace import traced
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.ir.types import TensorType, float32
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.train.step import TrainingModel, batch_type, predict, training

if TYPE_CHECKING:
    from triplane.unified_ir.train.batches import BatchSource
    from triplane.unified_ir.train.recipe import Recipe

PARTS: Final = ("network", "loss", "optimizer", "batch size", "data")
WHOLE_BYTES: Final = 64 << 20
"""Data up to this size is hashed whole, larger data by `SAMPLED_ROWS` rows."""
SAMPLED_ROWS: Final = 4096
DIGITS: Final = 16
MAX_SHOWN: Final = 160
"""Characters of a part that a message shows."""
_NUMBER: Final = re.compile(r"((?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_IS_DIGEST: Final = re.compile(f"[0-9a-f]{{{DIGITS}}}")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


class OtherRun(Conflict):
    """A part of the checkpoint's run, described by `there`, differs from this run's, `here`."""

    def __init__(self, part: str, there: str, here: str) -> None:
        super().__init__(
            f"the checkpoint belongs to a run with another {part}: {shown(there, here)}; continue "
            f"with the {part} of that run, or name another folder for a new run"
        )
        self.part, self.there, self.here = part, there, here

    def in_place_of(self, number: float) -> float | None:
        """Return the number in `there` if it and `number` in `here` are the only difference."""
        texts = (text.rpartition(" ")[0] for text in (self.there, self.here))
        left, right = (_NUMBER.split(text) for text in texts)
        pairs = {(a, b) for a, b in zip(left, right, strict=False) if a != b}
        if len(left) != len(right) or len(pairs) != 1:
            return None
        ((there, here),) = pairs
        both = _NUMBER.fullmatch(there) and _NUMBER.fullmatch(here)
        return float(there) if both and float(here) == number else None


def of_model(model: TrainingModel, recipe: Recipe) -> dict[str, str]:
    """Return the parts that do not depend on the data."""
    return {
        "network": f"{type(model.cell).__qualname__} {_network(model)}",
        "loss": f"{type(model.loss).__qualname__} {_loss(model)}",
        # The address of a function in a repr differs in every process.
        "optimizer": f"{_ADDRESS.sub('', repr(recipe))} {_updates(model, recipe)}",
    }


def of_data(source: BatchSource) -> dict[str, str]:
    """Return the parts that determine the batches; none for data that can be read only once."""
    facts = {"batch size": str(source.size)}
    if not source.repeats():
        return facts
    arrays = source.arrays()
    if arrays is not None:
        kinds = ", ".join(str(batch_type(a)) for a in arrays)
        digest, how = _rows(arrays)
        return facts | {"data": f"{len(arrays[0])} samples of {kinds}, {how} {digest}"}
    first = source.peek()
    kinds = ", ".join(str(batch_type(a)) for a in first)
    count = "batches" if source.count is None else f"{source.count} batches"
    steps = source.steps()
    return facts | {"data": f"{count} of {kinds}{steps}, the first {_digest(map(_bytes, first))}"}


def check(theirs: Mapping[str, str], mine: Mapping[str, str], *, but: Collection[str] = ()) -> None:
    """Raise OtherRun for the first part that both have, that differs, and that is not in `but`."""
    for part in PARTS:
        both = part in theirs and part in mine and part not in but
        if both and theirs[part] != mine[part]:
            raise OtherRun(part, theirs[part], mine[part])


def shown(there: str, here: str) -> str:
    """Return both texts, or where only their digests differ, say that the contents differ."""
    left, right = there.rpartition(" "), here.rpartition(" ")
    if left[0] == right[0] and left[0] and _IS_DIGEST.fullmatch(left[2]):
        return f"{_short(left[0])} has digest {left[2]} there and {right[2]} here"
    if _fields(left[0]) is not None and _fields(right[0]) is not None:
        there, here = _differing(left[0], right[0])
    return f"{_short(there)} there, {_short(here)} here"


def _differing(there: str, here: str) -> tuple[str, str]:
    """Return two representations of dataclasses without the fields in which they agree."""
    left, right = _fields(there), _fields(here)
    if left is None or right is None or left[0] != right[0]:
        return there, here
    names = [n for n in {**left[1], **right[1]} if left[1].get(n) != right[1].get(n)]
    pairs = [_differing(left[1].get(n, "absent"), right[1].get(n, "absent")) for n in names]
    sides = [", ".join(map("{}={}".format, names, side)) for side in zip(*pairs, strict=True)]
    return (f"{left[0]}({sides[0]})", f"{left[0]}({sides[1]})") if sides else (there, here)


def _fields(text: str) -> tuple[str, dict[str, str]] | None:
    """Split `Name(a=1, b=F(c=2))` into its name and fields' texts; None for other forms."""
    name, bracket, inside = text.partition("(")
    if not name.isidentifier() or not bracket or not inside.endswith(")"):
        return None
    parts, depth = [""], 0
    for char in inside[:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    pairs = [part.strip().partition("=") for part in parts if part.strip()]
    return (name, {n: value for n, _, value in pairs}) if all(e for _, e, _ in pairs) else None


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _network(model: TrainingModel) -> str:
    """Identify a cell by its graphs in both modes and by which state is trained."""
    inputs = list(model.inputs.values())
    with training(model.cell, on=True):
        # Both modes, because dropout and batch normalization show only in one of them.
        learning = traced(model.cell, tuple(inputs), {}, name="network").function
    state = [f"{k} {p.type} {p.trainable}" for k, p in model.cell.parameters().items()]
    graphs = (learning, predict(model.cell, inputs, model.loss.output))
    return _digest([*map(_graph, graphs), *(s.encode() for s in state)])


def _loss(model: TrainingModel) -> str:
    results = predict(model.cell, list(model.inputs.values()), model.loss.output).results
    if len(results) != 1 or len(model.targets) > 1:
        return _digest([])
    with training(model.loss, on=True):
        types = (results[0].type, *model.targets.values())
        return _digest([_graph(traced(model.loss, types, {}, name="loss").function)])


def _updates(model: TrainingModel, recipe: Recipe) -> str:
    """Identify the updates by the graph from gradients to the next weights."""
    own = model.cell.parameters()
    types = {k: own[k].type for k in model.trainable()}
    frozen = recipe.optimizer.frozen(types)
    with (build := Build(TABLE, "update")):
        params = {k: build.param(k, t) for k, t in types.items() if k not in frozen}
        grads = {k: build.param(f"grad.{k}", types[k]) for k in params}
        state = {k: build.param(k, t) for k, t in recipe.state_types(types).items()}
        rows = build.param("rows", TensorType(float32, ()))
        results, _ = recipe.advance(params, grads, state, rows)
    return _digest([_graph(build.finish(results))])


def of_function(function: Function) -> str:
    """Return a digest of a graph, whatever the lines of its source are."""
    return _digest([_graph(function)])


def _graph(function: Function) -> bytes:
    return function_text(_bare(function)).encode()


def _bare(function: Function) -> Function:
    """Return the graph without what changes no result: locations, scopes and strategies.

    An Identity with a strategy is what `cell.shard` adds.
    """
    env: dict[Value, Value] = {}
    nodes = []
    for n in function.nodes:
        inputs = tuple(env.get(v, v) if v else None for v in n.inputs)
        if n.strategy and n.op.name == "Identity" and inputs[0]:
            env[n.outputs[0]] = inputs[0]
        else:
            nodes.append(Node(n.op, inputs, n.outputs, n.attrs, tuple(map(_bare, n.regions))))
    return function.with_(nodes=nodes, results=(env.get(r, r) for r in function.results))


def _rows(arrays: Sequence[Array]) -> tuple[str, str]:
    """Return a digest of rows, and say which rows."""
    if sum(a.nbytes for a in arrays) <= WHOLE_BYTES:
        return _digest(map(_bytes, arrays)), "all of them"
    n = len(arrays[0])
    # Hashing hundreds of gigabytes would take longer than an epoch; evenly spread rows notice other
    # data, though not the change of a single row.
    chosen = np.unique(np.linspace(0, n - 1, SAMPLED_ROWS).astype(np.int64))
    return _digest(_bytes(a[chosen]) for a in arrays), f"{len(chosen)} of them"


def _bytes(array: Array) -> bytes:
    return f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()


def _digest(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # With its length, so that bytes cannot move from one part to the next unnoticed.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:DIGITS]

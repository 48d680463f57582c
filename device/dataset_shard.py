"""Samples of a dataset, which get the names and the class numbers of a model from its plan.

A file or folder names its columns and numbers its classes by itself. What the model calls them and
how it numbers them is known only when a plan arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.learn import EVALUATE, EntrySignatures, Shard

Arrays = Mapping[str, Array]


class LabelledPlan(EntrySignatures, Protocol):
    """The part of `runtime.Plan` that `shard_for` uses; see there."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the model's classes, none if it has none."""


@dataclass(frozen=True, slots=True)
class DatasetShard(Shard):
    """Samples with columns in the order of the model's inputs and target.

    inputs: how many of the columns, the first ones, are inputs. source: name of the data, for
    messages. classes: by column, the names of the classes that its numbers stand for. numbered:
    whether the data states these numbers itself, as a pipeline does, so that a model without names
    of classes may take them as they are.
    """

    inputs: int
    source: str
    classes: Mapping[str, tuple[str, ...]]
    numbered: bool = False


def shard_for(plan: LabelledPlan, shard: Shard) -> Shard:
    """Return the samples as `plan` takes them; any other shard than a `DatasetShard` unchanged.

    Columns whose names the plan does not have get those of its other inputs, in order. Classes get
    the numbers of the plan's labels. InvalidInput: the model does not know one of the classes, or
    has no names of classes.
    """
    if not isinstance(shard, DatasetShard):
        return shard
    names = _names(plan, tuple(shard.train), shard.inputs)
    parts = ({names[k]: x for k, x in part.items()} for part in (shard.train, shard.held_out))
    train, held_out = parts
    for column, own in shard.classes.items():
        places = _places(plan.labels, own, shard)
        if places is not None:
            name = names[column]
            train[name] = places[train[name]]
            if name in held_out:
                held_out[name] = places[held_out[name]]
    return Shard(train, held_out)


def _names(plan: EntrySignatures, own: Sequence[str], inputs: int) -> dict[str, str]:
    """Return the plan's name of each column: the same, or the next one that no column has.

    An input never becomes a target, whatever it is called.
    """
    wanted = [x.name for x in plan.signature(EVALUATE)[0]] if EVALUATE in plan.entries else []
    if len(wanted) != len(own):
        return {name: name for name in own}
    return _matched(own[:inputs], wanted[:inputs]) | _matched(own[inputs:], wanted[inputs:])


def _matched(own: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
    free = iter([name for name in wanted if name not in own])
    return {name: name if name in wanted else next(free) for name in own}


def _places(labels: tuple[str, ...], own: tuple[str, ...], shard: DatasetShard) -> Array | None:
    from triplane.unified_ir.data.choosing import places_of

    if not labels and not shard.numbered:
        raise InvalidInput(
            f"{shard.source} names its classes ({', '.join(map(repr, own[:3]))}, ...), but the "
            "model has no names for its classes; give whole numbers as the model has them, or a "
            "pipeline (.json) whose step lookup states all classes in order"
        )
    return places_of(own, labels, shard.source)

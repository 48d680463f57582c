"""From a file of samples to devices, by the options of a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data import Dataset, load
from triplane.unified_ir.data.by_name import PIPELINE, size_like
from triplane.unified_ir.data.choosing import class_numbers, row_bytes
from triplane.unified_ir.data.grouping import Windowed
from triplane.unified_ir.data.ordering import Balanced, Pick, Repeat, Shuffle, Weighted
from triplane.unified_ir.federated.algorithms.objective import objective_of
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.metric import metric_of
from triplane.unified_ir.federated.study import partition
from triplane.unified_ir.federated.study.partition import Samples, Shards
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.meta import labels_of
from triplane.unified_ir.ir.types import TensorType

Way = Literal["even", "group", "dirichlet", "labels"]
REORDERING: Final = (Shuffle, Pick, Repeat, Weighted, Balanced)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """The source of samples and their partition over devices.

    data, x, y: as `data.load` takes them. form: its other options, such as window. group: the
    column that assigns each sample to a device, by a text or a whole number. split: the column that
    is not 0 for samples of unseen devices. devices: their number, unless the way is "group".
    unseen: share of devices that are only scored, without split. least: smaller groups are left
    out. any_labels: labels may be any whole numbers, since episodes number the classes anew.
    """

    data: str
    x: tuple[str, ...] = ()
    y: tuple[str, ...] = ()
    form: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    split: str = ""
    way: Way = "even"
    devices: int = 20
    alpha: float = 0.3
    label_shards: int = 2
    held_out: float = 0.2
    unseen: float = 0.0
    least: int = 10
    any_labels: bool = False
    seed: int = 0


def devices_of(source: SampleSource, module: Module) -> tuple[Shards, Shards]:
    """Return (devices that take part, devices that are only scored), with the model's names."""
    names = batch_names(module)
    dataset = _read(_sized(source, module))
    samples = _samples(source, dataset, module, names)
    if not source.any_labels:
        _check_labels(source, samples[names[-1]], module)
    groups = np.asarray(dataset.column(source.group)) if source.group else None
    shards = partial(_partitioned, source, overlap=_overlap(source, dataset))
    if not source.split:
        return _chosen(source, shards(samples, groups))
    split = np.asarray(dataset.column(source.split))
    partition.check_whole(split, len(dataset), f"column {source.split!r} must have")
    unseen = split != 0
    seen, apart = (_part(source, samples, groups, chosen) for chosen in (~unseen, unseen))
    return shards(*seen), shards(*apart)


def _overlap(source: SampleSource, dataset: Dataset) -> int:
    if dataset.overlap and source.way not in {"group", "even"}:
        raise InvalidInput(
            f"windows of {source.data} share rows with the {dataset.overlap} before them, so "
            "devices with samples at random would learn from what others are scored on; partition "
            "evenly, or by group"
        )
    if dataset.overlap and (step := _reordering(dataset)):
        raise InvalidInput(
            f"the step {step} of {source.data} changes the order of windows that share rows, so "
            "those to score on would share rows with those to learn from; leave it out"
        )
    return dataset.overlap


def _reordering(dataset: Dataset) -> str:
    """Return the name of the first step behind windows that changes their order; "" if none."""
    behind = dropwhile(lambda step: not isinstance(step, Windowed), dataset.steps)
    names = (type(step).__name__.lower() for step in behind if isinstance(step, REORDERING))
    return next(names, "")


def _sized(source: SampleSource, module: Module) -> SampleSource:
    """Return the source whose images have the size of the model's input, unless it states one."""
    inputs = objective_of(module).batch[:-1]
    size = source.form.get("size") or size_like(source.data, [p.type.shape for p in inputs])
    return replace(source, form={**source.form, "size": size}) if size else source


def _read(source: SampleSource) -> Dataset:
    if (source.way == "group") != bool(source.group):
        raise InvalidInput("a partition by group, and only that, needs the column of groups")
    if source.split and not source.group:
        raise InvalidInput(
            f"the column {source.split!r} marks unseen groups, but no column of groups is named; "
            "name one, or give the share of unseen devices"
        )
    keep = tuple(key for key in (source.group, source.split) if key)
    if keep and Path(source.data).suffix == PIPELINE:
        return load(source.data, x=source.x, y=source.y, **source.form)  # it keeps all its columns
    try:
        return load(source.data, x=source.x, y=source.y, keep=keep, **source.form)
    except NotFound as error:
        raise NotFound(f"{error}; the options x, y, group and split name the columns") from error


def _samples(
    source: SampleSource, dataset: Dataset, module: Module, names: Sequence[str]
) -> dict[str, Array]:
    """Return inputs and target by the model's names; InvalidInput unless they fit its inputs."""
    roles = (*dataset.inputs, *dataset.targets)
    if (len(dataset.inputs), len(dataset.targets)) != (len(names) - 1, 1):
        raise InvalidInput(
            f"the model takes the inputs {', '.join(names[:-1])} and a target; {source.data} gives "
            f"the inputs {', '.join(dataset.inputs)} and the targets "
            f"{', '.join(dataset.targets) or 'none'}; choose its columns by x and y"
        )
    row_bytes(dataset, roles)  # refuses columns that are not arrays
    labels = labels_of(module.meta)
    samples = {}
    for name, own, value in zip(names, roles, objective_of(module).batch, strict=True):
        is_target = name == names[-1]
        x = class_numbers(dataset, labels, "" if is_target else own)
        # Tables hold float64; a model computes in float32.
        samples[name] = x.astype(value.type.dtype.numpy) if x.dtype == np.float64 else x
        if not is_target or x.dtype.kind == "f":
            _check_samples(source, x, value.type, "targets" if is_target else "samples")
    return samples


def _check_samples(source: SampleSource, x: Array, wanted: TensorType, what: str) -> None:
    """Refuse samples or targets of another shape than the model's."""
    way = "--y speed:1" if what == "targets" else "--x 'a*:2x64'"
    sizes = zip(wanted.shape[1:], x.shape[1:], strict=False)
    if len(wanted.shape) != x.ndim or any(isinstance(a, int) and a != b for a, b in sizes):
        raise InvalidInput(
            f"the model takes {what} as {wanted}; those of {source.data} are "
            f"{list(x.shape[1:])} each; choose another shape as in {way}"
        )


def _check_labels(source: SampleSource, y: Array, module: Module) -> None:
    """Refuse labels that a classifier cannot learn, before a graph fails on them."""
    if not metric_of(module.entry("evaluate").result_names).share or y.dtype.kind not in "iu":
        return  # targets of another loss are any numbers
    least, most = int(y.min()), int(y.max())
    if least < 0:
        raise InvalidInput(f"classes must be 0 or more, got {least}..{most} in {source.data}")
    if least == most:
        raise InvalidInput(
            f"all {len(y)} samples of {source.data} have the label {most}, but a study compares "
            "classifiers of at least two classes; did you mean another column?"
        )
    shape = module.entry("predict").results[0].type.shape
    classes = shape[-1] if len(shape) == y.ndim + 1 else None
    if isinstance(classes, int) and most >= classes:
        raise InvalidInput(
            f"the model tells {classes} classes apart, 0 to {classes - 1}; the labels of "
            f"{source.data} are {least} to {most}"
        )


def _part(
    source: SampleSource, samples: Samples, groups: Array | None, chosen: Array
) -> tuple[Samples, Array | None]:
    rows = np.flatnonzero(chosen)
    if not len(rows):
        raise InvalidInput(f"column {source.split!r} leaves no sample on one side")
    some = {name: np.asarray(x)[rows] for name, x in samples.items()}
    return some, None if groups is None else groups[rows]


def _partitioned(
    source: SampleSource, samples: Samples, groups: Array | None, *, overlap: int
) -> Shards:
    held_out, seed = source.held_out, source.seed
    if groups is not None:
        return partition.by_group(
            samples, groups, held_out=held_out, seed=seed, least=source.least, overlap=overlap
        )
    labels = list(samples)[-1]
    ways: dict[Way, Callable[..., Shards]] = {
        "even": partial(partition.evenly, overlap=overlap),
        "dirichlet": partial(partition.by_dirichlet, alpha=source.alpha, labels=labels),
        "labels": partial(partition.by_label_shards, shards=source.label_shards, labels=labels),
    }
    return ways[source.way](samples, source.devices, held_out=held_out, seed=seed)


def _chosen(source: SampleSource, shards: Shards) -> tuple[Shards, Shards]:
    if not 0 <= source.unseen < 1:
        raise InvalidInput(f"the share of unseen devices must be in [0, 1), got {source.unseen}")
    names = sorted(shards)
    order = Draws(source.seed, 0, "partition", "unseen").permutation(len(names))
    # At least one device takes part.
    count = min(round(len(names) * source.unseen), len(names) - 1)
    apart = {names[k] for k in order[:count]}
    return (
        {name: shard for name, shard in shards.items() if name not in apart},
        {name: shard for name, shard in shards.items() if name in apart},
    )


def batch_names(module: Module) -> tuple[str, ...]:
    """Return the model's names of inputs and target; InvalidInput if it has no target."""
    names = tuple(value.name for value in objective_of(module).batch)
    if len(names) < 2:
        raise InvalidInput(
            f"a study needs a loss of samples and a target; this one takes {list(names)}"
        )
    return names

"""From a file of samples to devices, by the options of a study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data import load, npz
from triplane.unified_ir.data.dataset import Dataset, from_arrays
from triplane.unified_ir.federated.algorithms.objective import objective_of
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.metric import metric_of
from triplane.unified_ir.federated.study import partition
from triplane.unified_ir.federated.study.partition import Samples, Shards
from triplane.unified_ir.ir import Module

Way = Literal["even", "group", "dirichlet", "labels"]
NPZ: Final = ".npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """The source of samples and their partition over devices.

    data: the name digits, an npz file, IDX files or a folder of images. x, y, group, split: keys of
    an npz; group assigns each sample to a device; samples where split is not 0 belong to unseen
    devices. devices: their number, unless the way is "group". unseen: share of devices that are
    only scored, without split. least: smaller groups are left out.
    """

    data: str
    x: str = "x"
    y: str = "y"
    group: str = ""
    split: str = ""
    way: Way = "even"
    devices: int = 20
    alpha: float = 0.3
    label_shards: int = 2
    held_out: float = 0.2
    unseen: float = 0.0
    least: int = 10
    seed: int = 0


def devices_of(source: SampleSource, module: Module) -> tuple[Shards, Shards]:
    """Return (devices that take part, devices that are only scored), with the model's names."""
    names = batch_names(module)
    dataset, columns = _read(source)
    _check_samples(source, dataset.x, module)
    _check_labels(source, dataset.y, module)
    samples: Samples = {names[0]: dataset.x, names[1]: dataset.y}
    groups = columns.get(source.group)
    if not source.split:
        return _chosen(source, _partitioned(source, samples, groups))
    unseen = columns[source.split] != 0
    return _part(source, samples, groups, ~unseen), _part(source, samples, groups, unseen)


def _read(source: SampleSource) -> tuple[Dataset, dict[str, Array]]:
    keys = [key for key in (source.group, source.split) if key]
    if (source.way == "group") != bool(source.group):
        raise InvalidInput("a partition by group, and only that, needs the column of groups")
    if source.split and not source.group:
        raise InvalidInput(
            f"the column {source.split!r} marks unseen groups, but no column of groups is named; "
            "name one, or give the share of unseen devices"
        )
    if Path(source.data).suffix != NPZ:
        if keys:
            raise InvalidInput(f"columns {keys} are those of an npz file, not of {source.data}")
        return load(source.data), {}
    try:
        columns = npz.columns(Path(source.data), [source.x, source.y, *keys])
    except NotFound as error:
        raise NotFound(f"{error}; the options x, y, group and split name the arrays") from error
    dataset = from_arrays(columns[source.x], columns[source.y])
    for key in keys:
        partition.check_whole(columns[key], len(dataset), f"column {key!r} must have")
    return dataset, {key: columns[key] for key in keys}


def _check_samples(source: SampleSource, x: Array, module: Module) -> None:
    """Refuse samples of another shape than the model's."""
    wanted = objective_of(module).batch[0].type
    sizes = zip(wanted.shape[1:], x.shape[1:], strict=False)
    if len(wanted.shape) != x.ndim or any(isinstance(a, int) and a != b for a, b in sizes):
        raise InvalidInput(
            f"the model takes samples as {wanted}; those of {source.data} are "
            f"{list(x.shape[1:])} each"
        )


def _check_labels(source: SampleSource, y: Array, module: Module) -> None:
    """Refuse labels that a classifier cannot learn, before a graph fails on them."""
    if not metric_of(module.entry("evaluate").result_names).share or y.dtype.kind not in "iu":
        return  # targets of another loss are any numbers
    least, most = int(y.min()), int(y.max())
    if least == most:
        raise InvalidInput(
            f"all {len(y)} samples of {source.data} have the label {most}, but a study compares "
            "classifiers of at least two classes; did you mean another array?"
        )
    shape = module.entry("predict").results[0].type.shape
    classes = shape[-1] if len(shape) == 2 else None
    if isinstance(classes, int) and most >= classes:
        raise InvalidInput(
            f"the model tells {classes} classes apart, 0 to {classes - 1}; the labels of "
            f"{source.data} are {least} to {most}"
        )


def _part(source: SampleSource, samples: Samples, groups: Array | None, chosen: Array) -> Shards:
    rows = np.flatnonzero(chosen)
    if not len(rows):
        raise InvalidInput(f"column {source.split!r} leaves no sample on one side")
    some = {name: np.asarray(x)[rows] for name, x in samples.items()}
    return _partitioned(source, some, None if groups is None else groups[rows])


def _partitioned(source: SampleSource, samples: Samples, groups: Array | None) -> Shards:
    held_out, seed = source.held_out, source.seed
    if groups is not None:
        return partition.by_group(samples, groups, held_out=held_out, seed=seed, least=source.least)
    labels = list(samples)[1]
    ways: dict[Way, Callable[..., Shards]] = {
        "even": partition.evenly,
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


def batch_names(module: Module) -> tuple[str, str]:
    """Return the model's names of samples and labels; InvalidInput if it has other inputs."""
    names = [value.name for value in objective_of(module).batch]
    if len(names) != 2:
        raise InvalidInput(f"a study needs a loss of samples and labels; this one takes {names}")
    return names[0], names[1]

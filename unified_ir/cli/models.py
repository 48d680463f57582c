"""Models that answer, from any file: one interface over model files, ONNX models and bundles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options
from triplane.unified_ir.cli.importing import SUFFIX

if TYPE_CHECKING:
    from triplane.unified_ir.data import Dataset
    from triplane.unified_ir.data.columns import Columns
    from triplane.unified_ir.ir import Module
    from triplane.unified_ir.ir.graph import Array
    from triplane.unified_ir.runtime import Session, TensorInfo

BUNDLE_SUFFIX: Final = ".bundle"
KINDS: Final = "a model file (.tpm), an ONNX model (.onnx) or a bundle (.bundle)"
LOSS: Final = "loss"
"""The key of the loss in the metadata of a module, and in the properties of its ONNX file."""
KEY: Final = ("uint32", (2,))
"""Element type and shape of an input that is a random key; see `Trainer.export`."""
BATCH: Final = 256
"""Samples per batch."""


@dataclass(frozen=True, kw_only=True)
class FileModel:
    """A model from a file.

    outputs: their names, in order. labels: class names of the first output, if it has them.
    compute: arrays by input name -> results by name. loss: the class of the loss that the model was
    trained with, "" if that is not known. ignored: the label that this loss leaves out. module:
    that of a model file.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[str, ...]
    labels: tuple[str, ...]
    compute: Callable[[Mapping[str, Any]], Mapping[str, Array]]
    loss: str = ""
    ignored: int | None = None
    module: Module | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs for a batch of any size, also where the model has a fixed one."""
        import numpy as np

        rows = len(next(iter(feeds.values())))
        size = self.batch
        if size is None:
            return dict(self.compute(feeds))
        parts = []
        for start in range(0, rows, size):
            taken = np.minimum(np.arange(start, start + size), rows - 1)
            parts.append(self.compute({name: x[taken] for name, x in feeds.items()}))
        self._check_rows(parts[0], size)
        return {name: np.concatenate([p[name] for p in parts])[:rows] for name in self.outputs}

    @property
    def batch(self) -> int | None:
        """The batch size of a model that has a fixed one."""
        sizes = {info.shape[0] for info in self.inputs if info.shape}
        size = next((size for size in sizes if isinstance(size, int)), None)
        if size == 0:
            raise InvalidInput(f"the model takes batches without samples: {self.inputs[0]}")
        return size

    def _check_rows(self, results: Mapping[str, Array], size: int) -> None:
        for name, y in results.items():
            if y.ndim == 0 or len(y) != size:
                raise InvalidInput(
                    f"the model takes batches of {size}, but its output {name!r} is "
                    f"{y.dtype}{list(y.shape)}, which has no row for each sample"
                )


def repeated_draws(model: FileModel) -> str:
    """Return what to note of a model that draws from a key in its file; "" of others."""
    from triplane.unified_ir.ir.graph import Role

    if model.module is None:
        return ""
    reads = model.module.entry("predict").param_names
    keys = [n for n in reads if n in model.module.state and model.module.state[n].role is Role.KEY]
    if not keys:
        return ""
    return (
        f"the model draws random numbers from its own key {keys[0]!r}, the same in each batch, so "
        "answers depend on --batch-size; train with --key-input NAME to choose them by --seed"
    )


def seeded(model: FileModel, seed: int | None) -> FileModel:
    """Return a model that needs no key: its call number k, from 0, gets the key (seed, k).

    InvalidInput: the model samples, but there is no seed; or the other way around.
    """
    keys = [i.name for i in model.inputs if (i.dtype, i.shape) == KEY]
    if not keys:
        if seed is not None:
            raise InvalidInput("the model has no key as input, so it samples nothing; omit --seed")
        return model
    if seed is None:
        raise InvalidInput(
            f"the model draws random numbers by its input {keys[0]!r}; give a number, as in "
            "--seed 7: the same number gives the same answers"
        )
    calls = count()

    def compute(feeds: Mapping[str, Any]) -> Mapping[str, Array]:
        import numpy as np

        key = np.array([seed, next(calls)], np.uint32)
        return model.compute({**feeds, **dict.fromkeys(keys, key)})

    return replace(
        model, inputs=tuple(i for i in model.inputs if i.name not in keys), compute=compute
    )


def open_file(path: Path) -> FileModel:
    """Open a model to run its entry `predict`."""
    if path.suffix == SUFFIX:
        from triplane.unified_ir.ir.meta import labels_if_any
        from triplane.unified_ir.runtime import Session

        session = Session(path)
        meta = session.metadata
        return _of_session(session, labels_if_any(meta), meta)
    if path.suffix == BUNDLE_SUFFIX:
        from triplane.unified_ir.runtime import Bundle

        bundle = Bundle.load(path)
        session = bundle.session()
        return _of_session(session, bundle.labels.get(session.outputs[0].name, ()))
    return _of_module(path)


def _of_module(path: Path) -> FileModel:
    from triplane.unified_ir.convert.conversion import open_model
    from triplane.unified_ir.engines.modules import program_of
    from triplane.unified_ir.ir.meta import labels_if_any
    from triplane.unified_ir.ir.types import is_plain
    from triplane.unified_ir.runtime import TensorInfo

    module, _ = open_model(path)
    program = program_of(module, "predict")
    values = {p.name: p.type for p in program.inputs}
    function = program.function
    values |= {n: v.type for n, v in zip(function.result_names, function.results, strict=True)}
    if odd := [n for n, t in values.items() if not is_plain(t) or t.dtype.kind == "string"]:
        raise InvalidInput(f"{path.name}: {odd[0]} is {values[odd[0]]}, not an array of numbers")
    infos = tuple(
        TensorInfo(
            p.name,
            str(p.type.dtype),
            tuple(d if isinstance(d, int) else str(d) for d in p.type.shape),
        )
        for p in program.inputs
    )
    last = function.results[0].type.shape[-1:] if function.results else ()
    return FileModel(
        inputs=infos,
        outputs=function.result_names,
        labels=_fitting(labels_if_any(module.meta), last),
        compute=program.run,
        loss=module.meta.get(LOSS, ""),
        ignored=_ignored(module.meta),
        module=module,
    )


def _of_session(
    session: Session, labels: tuple[str, ...], meta: Mapping[str, str] = MappingProxyType({})
) -> FileModel:
    if not session.outputs:
        raise InvalidInput("the model has no outputs")
    return FileModel(
        inputs=session.inputs,
        outputs=tuple(info.name for info in session.outputs),
        labels=_fitting(labels, session.outputs[0].shape[-1:]),
        compute=session.run,
        loss=meta.get(LOSS, ""),
        ignored=_ignored(meta),
    )


def _ignored(meta: Mapping[str, str]) -> int | None:
    """Return the label that the loss leaves out; another tool may use the key for anything."""
    from triplane.unified_ir.files.samples import IGNORED

    text = meta.get(IGNORED, "")
    return int(text) if re.fullmatch("-?[0-9]{1,18}", text) else None


def _fitting(labels: tuple[str, ...], last: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the labels where they are as many as the output's last axis."""
    return labels if last and last[0] == len(labels) else ()


def reading(options: Mapping[str, Any], model: FileModel) -> dict[str, Any]:
    """Return the arguments of `data.load`.

    A model that takes bytes gets them as they are, and images of a folder get the model's size.
    """
    from triplane.unified_ir.data.by_name import size_like

    choice = data_options.reading(options)
    if choice["size"] is None:
        source = options["data"] if "data" in options else options["source"]
        choice["size"] = size_like(source, [info.shape for info in model.inputs])
    if choice[data_options.PIXELS] is None and all(i.dtype == "uint8" for i in model.inputs):
        choice[data_options.PIXELS] = False
    return choice


def feeds_of(
    dataset: Dataset, arrays: tuple[Array, ...], model: FileModel, x: tuple[str, ...]
) -> dict[str, Array]:
    """Return a batch by the names of the model's inputs: by name where they agree, else in order.

    x: the choices of the command line, for errors.
    """
    from triplane.unified_ir.data.choosing import class_places

    names = [info.name for info in model.inputs]
    if len(dataset.inputs) != len(names):
        raise InvalidInput(
            f"the model takes {', '.join(names)}, but the data has the inputs "
            f"{', '.join(dataset.inputs) or 'none'}; choose columns: one --x for each input"
        )
    own = names if set(dataset.inputs) == set(names) else dataset.inputs
    columns = dict(zip(dataset.inputs, arrays, strict=False))
    feeds = {}
    for info, name in zip(model.inputs, own, strict=True):
        column = columns[name]
        # Characters have the numbers of the training, whichever occur in this text.
        places = class_places(dataset, model.labels, name)
        if places is not None and column.dtype.kind in "iu":
            column = places[column]
        feeds[info.name] = _as(column, info.dtype)
        _check(feeds[info.name], info, dataset, x, name)
    return feeds


def _as(x: Array, dtype: str) -> Array:
    """Return numbers in the element type of an input, where that changes no value."""
    from triplane.unified_ir.files.pixels import as_input

    x = as_input(x, dtype)
    if x.dtype == dtype or x.dtype.kind not in "iuf":
        return x
    cast = x.astype(dtype)
    are_reals = x.dtype.kind == cast.dtype.kind == "f"
    return cast if are_reals or (cast == x).all() else x


def _check(
    x: Array, info: TensorInfo, dataset: Dataset, chosen: tuple[str, ...], column: str
) -> None:
    fits = x.dtype == info.dtype and x.ndim == len(info.shape)
    fits = fits and all(
        not isinstance(d, int) or d == n for d, n in zip(info.shape[1:], x.shape[1:], strict=True)
    )
    if not fits:
        from triplane.unified_ir.files.samples import transpose_hint

        transposed = transpose_hint(x.shape, info.shape)
        sizes = [n for n in info.shape[1:] if isinstance(n, int)]
        # Other sizes with as many values, unless the axes only have another order.
        known = {column: sizes} if len(sizes) == len(info.shape) - 1 and not transposed else {}
        hint = data_options.shape_hint(dataset, x=chosen, sizes=known)
        raise InvalidInput(f"the model takes {info}, but {hint}{transposed or _size_hint(x, info)}")


def _size_hint(x: Array, info: TensorInfo) -> str:
    """Return the option that gives images the size and channels of the input."""
    sizes = info.shape[1:]
    is_image = x.ndim == len(info.shape) == 4 and {x.shape[1], sizes[0]} <= {1, 3}
    if not is_image or not all(isinstance(n, int) for n in sizes):
        return ""
    text = "x".join(map(str, sizes if x.shape[1] != sizes[0] else sizes[1:]))
    return f"; images of a folder are resized by --size {text}"


def batches(
    dataset: Dataset, size: int, group: str = ""
) -> Iterator[tuple[tuple[Array, ...], Array | None]]:
    """Yield the inputs and targets of a dataset in its own order, `size` samples at a time.

    group: a column whose values are yielded beside them.
    """
    import numpy as np

    from triplane.unified_ir.data.choosing import class_columns
    from triplane.unified_ir.train.batches import as_batch

    # Groups of classes have the names of these, not the numbers that a model is given.
    classes, names = class_columns(dataset), np.array(dataset.labels, object)
    own = dataset.in_batches(size)
    for batch in own.opened().batches(0):
        keys = _groups_of(batch, group) if group else None
        if keys is not None and group in classes:
            keys = names[keys]
        yield as_batch(own.arrays_of(batch)), keys


def _groups_of(batch: Columns, group: str) -> Array:
    import numpy as np

    column = batch.get(group)
    if column is None:
        raise InvalidInput(
            f"a batch has no column {group!r}, which --group names; a column that is renamed, or "
            "joined with others to an input or target, is not kept beside it"
        )
    if not isinstance(column, np.ndarray) or column.ndim != 1 or isinstance(column[0], bytes):
        raise InvalidInput(f"--group needs one text or number for each sample; {group!r} has more")
    return column

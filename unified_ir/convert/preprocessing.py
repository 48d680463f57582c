"""The preprocessing of a pipeline as part of the served graph, so that callers send raw samples.

Each step of a pipeline has its form in operators in `ONNX_FORMS`. Steps that augment samples at
random are for training: served samples pass them unchanged. A value that a step refuses with its
row (a class that it does not know) makes the served call fail too, instead of a wrong answer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.data import Dataset, grouping, transforms
from triplane.unified_ir.data.columns import Field
from triplane.unified_ir.data.registry import CHOOSING
from triplane.unified_ir.data.step import RowStep, Step
from triplane.unified_ir.data.transforms.single import ColumnStep
from triplane.unified_ir.ir import Meta, Module
from triplane.unified_ir.ir.dims import Dim, is_symbol
from triplane.unified_ir.ir.graph import Function, Value
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.rows.movement.resizing import resize_row
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor, dims_of

MAX_SERVED_VALUES: Final = 1 << 16
"""Entries of a vocabulary in a graph, which compares each value with all of them."""
META_KEY: Final = "preprocessing_steps"
"""Key of `Module.meta` with the steps that a module's entry begins with, as JSON."""
SCOPE: Final = "preprocessing"
"""Scope of the nodes, as the path of a cell is that of its nodes."""

Lazy = Callable[[], Tensor]
"""A column that is recorded once something reads it: labels never become part of the graph."""
Lazies = dict[str, Lazy]
Rule = Callable[[Any, Lazies], Lazies]
"""rule(step, columns before) -> columns after."""


def with_pipeline(module: Module, dataset: Dataset, entry: str = "predict") -> Module:
    """Return the module with an entry that takes samples as the dataset's source holds them.

    The dataset's inputs are the inputs of the entry, in their order; its steps are computed before.
    Raises InvalidInput like `with_preprocessing`.
    """
    names = [p.name for p in module.inputs(entry)]
    if len(names) != len(dataset.inputs):
        raise InvalidInput(
            f"the inputs of {entry!r} are {', '.join(names)}, but those of the dataset are "
            f"{', '.join(dataset.inputs) or 'none'}; name as many columns with .roles(inputs)"
        )
    inputs = dict(zip(names, dataset.inputs, strict=True))
    schema = replace(dataset, steps=()).schema
    return with_preprocessing(module, entry, dataset.steps, schema, inputs)


def with_preprocessing(
    module: Module,
    entry: str,
    steps: Sequence[Step],
    schema: Mapping[str, Field],
    inputs: Mapping[str, str],
) -> Module:
    """Return the module with an entry that applies `steps` to raw samples, then computes as before.

    schema: the columns of raw samples. inputs: by input of the entry, the column after the steps
    that it takes. The inputs of the new entry are the raw columns that these are computed from,
    under their own names, each (N, ...) with the entry's symbol N for the number of samples.
    `Module.meta` lists the steps under `META_KEY`. Raises InvalidInput if a step has no form in a
    graph, or if a column does not fit its input.
    """
    function = module.entry(entry)
    wanted = module.inputs(entry)
    after = _checked(entry, wanted, steps, schema, inputs)
    build = Build(TABLE, function.name)
    with build:
        columns = _raw(build, schema, _rows(entry, wanted))
        for step in steps:
            columns = _rule(step)(step, columns)
        tensors = {p.name: columns[inputs[p.name]]() for p in wanted}
        for p in wanted:
            _check_fits(p, tensors[p.name], inputs[p.name], after)
        state = {p.name: build.param(p.name, p.type) for p in function.params if p not in wanted}
        args = [(tensors | state)[p.name] for p in function.params]
        results = inline(function, args)
    served = build.finish(dict(zip(function.result_names, results, strict=True)))
    return _replaced(module, entry, served, steps)


def _checked(
    entry: str,
    wanted: Sequence[Value],
    steps: Sequence[Step],
    schema: Mapping[str, Field],
    inputs: Mapping[str, str],
) -> Mapping[str, Field]:
    """Return the schema after the steps."""
    names = [p.name for p in wanted]
    if sorted(inputs) != sorted(names):
        raise InvalidInput(
            f"each input of {entry!r} takes a column: the inputs are {', '.join(names)}, got "
            f"columns for {', '.join(inputs) or 'none'}"
        )
    for step in steps:
        if isinstance(step, RowStep):
            schema = step.schema(schema)
        elif _rule(step) is _refused:
            raise _without_form(step)
    for name, column in inputs.items():
        if column not in schema:
            raise InvalidInput(
                f"input {name!r} of {entry!r} takes the column {column!r}, but the columns after "
                f"the steps are {', '.join(schema)}"
            )
    return schema


def _rows(entry: str, wanted: Sequence[Value]) -> Dim:
    """Return the size of the axis that counts samples, the first of each input."""
    sizes = {p.type.shape[0] if p.type.rank else 0 for p in wanted}
    rows = sizes.pop()
    if sizes or not (is_symbol(rows) or rows):
        shown = ", ".join(f"{p.name}: {p.type}" for p in wanted)
        raise InvalidInput(
            f"the first axis of each input of {entry!r} must count the same samples, got {shown}"
        )
    return rows


def _raw(build: Build, schema: Mapping[str, Field], rows: Dim) -> Lazies:
    """Return a parameter for each column of raw samples."""
    return {name: cache(_raw_column(build, name, field, rows)) for name, field in schema.items()}


def _raw_column(build: Build, name: str, field: Field, rows: Dim) -> Lazy:
    def record() -> Tensor:
        sizes = [n for n in field.shape if n is not None]
        if not field.is_number or len(sizes) < len(field.shape):
            raise InvalidInput(
                f"a served model takes numbers of one shape, but column {name!r} of raw samples is "
                f"{field}; let the caller compute the steps up to numbers, and give the steps "
                "after them with their schema"
            )
        return build.param(name, TensorSpec((rows, *sizes), field.dtype))

    return record


def _check_fits(p: Value, x: Tensor, column: str, schema: Mapping[str, Field]) -> None:
    fits = x.dtype == p.type.dtype and x.rank == p.type.rank
    sizes = zip(p.type.shape, x.shape, strict=False)
    if not fits or any(isinstance(d, int) and d != n for d, n in sizes):
        raise InvalidInput(
            f"input {p.name!r} is {p.type}, but a sample of column {column!r} after the steps is "
            f"{schema[column]}; add steps such as Scale, Cast or Reshape"
        )


def _replaced(module: Module, entry: str, served: Function, steps: Sequence[Step]) -> Module:
    """Return the module with `served` as the function of that entry alone."""
    name = module.entries[entry]
    if list(module.entries.values()).count(name) > 1:
        name = f"{name}.{SCOPE}"
    clash = {p.name for p in served.params if p.name not in module.state} & {*served.result_names}
    if clash:
        raise InvalidInput(
            f"{clash.pop()!r} is both a column of raw samples and a result of {entry!r}; call the "
            "result by another name"
        )
    recorded = [
        {"step": type(step).__name__, **dataclasses.asdict(step)}
        for step in steps
        if isinstance(step, RowStep) and _rule(step) is not _unchanged
    ]
    # A list of what callers must do to a sample would be about inputs that no longer exist.
    meta = {key: text for key, text in module.meta.items() if key != "preprocessing"}
    return replace(
        module,
        functions={**module.functions, name: served},
        entries={**module.entries, entry: name},
        meta={**meta, META_KEY: json.dumps(recorded)},
    )


def _rule(step: Step) -> Rule:
    for kind, rule in ONNX_FORMS.items():
        if isinstance(step, kind):
            return rule
    return _refused


def _recorded(step: Step, function: Callable[[], Tensor]) -> Lazy:
    """Return a column whose nodes carry the step's name."""

    def record() -> Tensor:
        with recorder().at(Meta(scope=f"{SCOPE}.{type(step).__name__}")):
            return function()

    return cache(record)


def _refused(step: Step, columns: Lazies) -> Lazies:
    """Refuse the columns that a step without a form writes, as soon as an input needs one."""

    def refuse() -> Tensor:
        raise _without_form(step)

    written = getattr(step, "column", None), getattr(step, "lengths", None)
    names = {name for name in written if isinstance(name, str)} or columns.keys()
    return {**columns, **dict.fromkeys(names, refuse)}


def _without_form(step: Step) -> InvalidInput:
    return InvalidInput(
        f"{type(step).__name__} has no form in a served graph (these have: "
        f"{', '.join(kind.__name__ for kind in ONNX_FORMS if issubclass(kind, RowStep))}); let the "
        "caller compute it, and give the steps after it with their schema"
    )


def _column(form: Callable[[Any, Tensor], Tensor]) -> Rule:
    """Return the rule of a step that replaces one column. form(step, x: (N, ...)) -> (N, ...)."""

    def rule(step: ColumnStep, columns: Lazies) -> Lazies:
        before = columns[step.column]
        return {**columns, step.column: _recorded(step, lambda: form(step, before()))}

    return rule


def _joined(join: Callable[[Sequence[Tensor]], Tensor]) -> Rule:
    """Return the rule of a step that replaces several columns by one."""

    def rule(step: Any, columns: Lazies) -> Lazies:
        kept = {name: x for name, x in columns.items() if name not in step.columns}
        parts = [columns[name] for name in step.columns]
        return {**kept, step.into: _recorded(step, lambda: join(_alike([x() for x in parts])))}

    return rule


def _alike(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    dtype = np.result_type(*[x.dtype.numpy for x in xs])
    return [x.cast(str(dtype)) for x in xs]


def _select(step: transforms.Select, columns: Lazies) -> Lazies:
    return {name: columns[name] for name in step.columns}


def _drop(step: transforms.Drop, columns: Lazies) -> Lazies:
    return {name: x for name, x in columns.items() if name not in step.columns}


def _rename(step: transforms.Rename, columns: Lazies) -> Lazies:
    return {step.into if name == step.column else name: x for name, x in columns.items()}


def _scale(step: transforms.Scale, x: Tensor) -> Tensor:
    return x.cast("float32") / np.float32(step.top)


def _normalize(step: transforms.Normalize, x: Tensor) -> Tensor:
    mean, std = step.constants(x.rank - 1)
    return (x.cast("float32") - mean) / std


def _clip(step: transforms.Clip, x: Tensor) -> Tensor:
    # onnxruntime has no kernel of Clip for 16 bits; in 32 bits the result is the same.
    wide = x.cast("int32") if str(x.dtype) in {"int16", "uint16"} else x
    kind = wide.dtype.numpy.type
    bounds = (None if v is None else kind(v) for v in (step.low, step.high))
    return wide.clip(*bounds).cast(x.dtype)


def _reshape(step: transforms.Reshape, x: Tensor) -> Tensor:
    field = step.after(Field(str(x.dtype), _sizes(x)))
    return x.reshape(x.shape[0], *field.shape)


def _transpose(step: transforms.Transpose, x: Tensor) -> Tensor:
    return x.transpose(0, *[axis + 1 for axis in step.axes])


def _center_crop(step: transforms.CenterCrop, x: Tensor) -> Tensor:
    if x.shape[2:] == step.size:
        return x
    _, height, width = _sizes(x)
    top, left = step.corner(height, width)
    return x[:, :, top : top + step.size[0], left : left + step.size[1]]


def _random_crop(step: transforms.RandomCrop, x: Tensor) -> Tensor:
    """Cut the middle: the image itself, if the window is as large."""
    if step.padding and x.shape[2:] != step.size:
        edge = [0, 0, step.padding, step.padding]
        x = ops.pad(x, edge * 2, x.dtype.numpy.type(step.fill))
    return _center_crop(transforms.CenterCrop(step.column, step.size), x)


def _resize(step: transforms.Resize, x: Tensor) -> Tensor:
    if x.shape[2:] == step.size:
        return x
    sizes = dims_of(list(step.size))
    y = resize_row(x.cast("float32"), None, None, sizes, axes=(2, 3), mode="linear", antialias=1)
    if x.dtype.is_float:
        return y
    # In float32 as `files.resize` computes: onnxruntime's kernel for bytes rounds its weights.
    return ops.round_(y).clip(0.0, 255.0).cast(x.dtype)


def _sizes(x: Tensor) -> tuple[int, ...]:
    """Return the shape of a sample, which raw columns and steps keep free of symbols."""
    return tuple(d for d in x.shape[1:] if isinstance(d, int))


def _one_hot(step: transforms.OneHot, x: Tensor) -> Tensor:
    x = x.cast("int64")
    return ops.one_hot(_in_range(x, x >= 0, step.classes), step.classes, step.dtype)


def _lookup(step: transforms.Lookup, x: Tensor) -> Tensor:
    if len(step.values) > MAX_SERVED_VALUES:
        raise InvalidInput(
            f"Lookup in a served graph compares with at most {MAX_SERVED_VALUES} values, got "
            f"{len(step.values)}; let the caller compute it, and give the steps after it with "
            "their schema"
        )
    hits = (x.cast("int64").unsqueeze(x.rank) == np.array(step.values, np.int64)).cast("int32")
    place, listed = ops.argmax(hits), hits.max(-1) > 0
    if step.unknown is None:
        return _in_range(place, listed, len(step.values))
    return ops.where(listed, place, np.int64(step.unknown))


def _in_range(x: Tensor, holds: Tensor, size: int) -> Tensor:
    """Return x: int64 where it is in 0..size-1 and `holds`; elsewhere the run fails."""
    # Gather refuses an index beyond the end; nothing else in ONNX raises an error.
    return ops.gather(np.arange(size), ops.where(holds, x, np.int64(size)), axis=0)


def _unchanged(_: Step, columns: Lazies) -> Lazies:
    return columns


ONNX_FORMS: Final[Mapping[type[Step], Rule]] = MappingProxyType({
    transforms.Select: _select,
    transforms.Drop: _drop,
    transforms.Rename: _rename,
    transforms.Stack: _joined(lambda xs: ops.stack(xs, 1)),
    transforms.Concatenate: _joined(
        lambda xs: ops.concat([x if x.rank > 1 else x.unsqueeze(1) for x in xs], 1)
    ),
    transforms.Scale: _column(_scale),
    transforms.Normalize: _column(_normalize),
    transforms.Cast: _column(lambda step, x: x.cast(step.dtype)),
    transforms.Clip: _column(_clip),
    transforms.Reshape: _column(_reshape),
    transforms.Transpose: _column(_transpose),
    transforms.CenterCrop: _column(_center_crop),
    transforms.Resize: _column(_resize),
    transforms.OneHot: _column(_one_hot),
    transforms.Lookup: _column(_lookup),
    transforms.RandomCrop: _column(_random_crop),
    transforms.Augmentation: _unchanged,
    **dict.fromkeys((*CHOOSING, grouping.Batched), _unchanged),
})  # fmt: skip
"""The form of each kind of step in a graph; the first kind that a step belongs to decides."""

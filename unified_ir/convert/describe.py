"""The parts of a bundle's description, from the arguments and the module's meta.

Two keys of `Module.meta` are read, both JSON: `labels`, class names of the first result, and
`preprocessing`, a list of `{"input": ..., "name": ..., "params": {key: [numbers]}}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert.targets import Target
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ir.meta import LABELS, json_of
from triplane.unified_ir.ir.types import is_plain
from triplane.unified_ir.ops.values import bind
from triplane.unified_ir.passes.memory import live
from triplane.unified_ir.runtime import Constraints, Preprocessing, TensorInfo, Tolerance

FLOAT_TOLERANCE: Final = 1e-4
INT8_TOLERANCE: Final = 0.02
"""Allowed errors of golden outputs, relative to the largest one: kernels of other machines round
differently, and a rounding step of int8 is large."""
COPIES: Final = 2
"""Copies of the weights that onnxruntime may hold at once: as loaded and as prepacked."""

MAX_NAME_CHARS: Final = 256
"""Limit for the length of a bundle's name and version; a server refuses longer ones."""

Labels = Sequence[str] | Mapping[str, Sequence[str]]


def check_names(name: str, version: str) -> None:
    """Raise InvalidInput if no server would load a bundle with this name or version."""
    for what, text in (("name", name), ("version", version)):
        if not 1 <= len(text) <= MAX_NAME_CHARS or not text.isprintable():
            raise InvalidInput(
                f"a bundle's {what} has 1 to {MAX_NAME_CHARS} printable characters, "
                f"got {len(text)}: {text[:40]!r}"
            )
    # A name such as "../x" must never become part of a path.
    if name.startswith(".") or set(name) & set("/\\"):
        raise InvalidInput(
            f"a bundle's name is not a path: it must not contain / or \\ or begin with a dot, "
            f"got {name[:40]!r}"
        )


def constraints(target: Target, memory_bytes: int) -> Constraints:
    """Return the requirements of a graph for this target."""
    return Constraints(
        runtime=target.runtime,
        min_version=target.min_version,
        opset=target.opset,
        memory_bytes=memory_bytes,
    )


def tolerance(goldens: Mapping[str, Array], relative: float) -> Tolerance:
    """Return the tolerance of golden outputs; its absolute part follows the largest of them."""
    largest = max(float(np.abs(y.astype(np.float64)).max()) for y in goldens.values() if y.size)
    # The floor is for outputs that are all zero, which would otherwise allow no error at all.
    return Tolerance(absolute=relative * max(largest, 1e-3), relative=relative)


def running_bytes(function: Function, feeds: Mapping[str, Array]) -> int:
    """Return the bytes of the tensors that are alive at once in a run, beside inputs and weights.

    It is 0 where sizes, or the contents of a sequence, are known only during a run. This is an
    estimate, not a measurement: the signer converts again on another machine and has to get the
    same bytes.
    """
    sizes: dict[str, int] = {}
    for value in function.params:
        if value.name in feeds:
            bind(sizes, value.type, feeds[value.name])
    types = (value.type for node in function.nodes for value in node.outputs)
    if not all(is_plain(t) and t.symbols <= sizes.keys() for t in types):
        return 0
    return live(function.nodes, function.results, sizes).peak_bytes


def class_names(
    module: Module, outputs: Sequence[TensorInfo], labels: Labels | None
) -> dict[str, tuple[str, ...]]:
    """Return class names by output, as many as the output's last axis counts."""
    if labels is None:
        labels = json_of(module.meta, LABELS) or {}
    if not isinstance(labels, Mapping):
        labels = {outputs[0].name: labels}
    sizes = {info.name: info.shape[-1] if info.shape else None for info in outputs}
    for output, names in labels.items():
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise InvalidInput(
                f"labels of the output {output!r} must be a list of names, got {str(names)[:80]!r}"
            )
        if output not in sizes:
            raise InvalidInput(f"labels name the output {output!r}; there are {sorted(sizes)}")
        if isinstance(sizes[output], int) and len(names) != sizes[output]:
            raise InvalidInput(
                f"output {output!r} has {sizes[output]} classes but {len(names)} labels; "
                "give one name per class"
            )
    return {output: tuple(map(str, names)) for output, names in labels.items()}


def preprocessing(module: Module) -> tuple[Preprocessing, ...]:
    """Return the steps in the module's meta; InvalidInput if they have another form."""
    steps = json_of(module.meta, "preprocessing") or []
    try:
        return tuple(
            Preprocessing(
                input=str(step["input"]),
                name=str(step["name"]),
                params=tuple(
                    (str(key), tuple(float(v) for v in values))
                    # Sorted, so that equal models give equal bytes.
                    for key, values in sorted(step.get("params", {}).items())
                ),
            )
            for step in steps
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            "the module's meta 'preprocessing' must be a JSON list of objects with input, name and "
            f"params, got {str(steps)[:80]!r}"
        ) from error

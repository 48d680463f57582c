"""`python -m triplane.edge.agent.adapting`: adapt a start point to this node's own samples.

This is a child with limits, as the trial is. Each sample of the node belongs to one of two halves,
by its own bytes and the names of node and model, even if samples are added. The start point learns
from one half. On the other half the start point, its adapted version and the version that serves
now are scored; the best of them serves.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.edge.serving.pointers import pointer_path
from triplane.proto.disk import OS_DISK, write_atomic
from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.proto.sandbox import serve_order

LEAST_SAMPLES: Final = 4
MAX_SAMPLES: Final = 10_000
MAX_SAMPLES_BYTES: Final = 256 << 20
SUPPORT_SHARE: Final = 0.5
NPZ: Final = ".npz"
GROWTH: Final = 2
"""Largest size of the adapted bundle, in sizes of the start point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Accuracies on the node's held-out samples. current: that of the serving version, or None.

    digest: names the bundle that was written: the adapted one, or the start point if it is better.
    """

    support: int
    held_out: int
    start: float
    adapted: float
    current: float | None
    digest: str

    @property
    def is_better(self) -> bool:
        """Whether the written bundle is at least as good as the version that serves."""
        return self.current is None or max(self.start, self.adapted) >= self.current

    def __str__(self) -> str:
        now = self.current
        serving = "nothing serves yet" if now is None else f"the serving version has {now:.3f}"
        new = "the start point as it is" if self.start > self.adapted else "the adapted version"
        return (
            f"adapted to {self.support} samples of this node, it has accuracy {self.adapted:.3f} "
            f"({self.start:.3f} before) on {self.held_out} others; {serving}; this node keeps "
            f"{new if self.is_better else 'the version that serves'}"
        )


def adaptation(order: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison, or why the adaptation is refused: `error` and its `kind`."""
    from triplane.edge.agent.trial import memory_refusal

    try:
        return adapt(order)
    except TriplaneError as error:
        return {"error": str(error), "kind": "adaptation"}
    except MemoryError:
        return memory_refusal(order)


def adapt(order: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt, write the result, and score it and the version that serves."""
    from triplane.unified_ir.files.pixels import as_input
    from triplane.unified_ir.runtime import Bundle, adapted_weights, write_adapted

    bundle = Bundle.load(Path(order["path"]))
    path = Path(order["samples"])
    samples = read_samples(path)
    _check_labels(samples["y"], bundle, path.name)
    samples["x"] = as_input(samples["x"], bundle.inputs[0].dtype)
    support, held_out = split(samples, order["seed"])
    out = Path(order["out"])
    digest = write_adapted(bundle, adapted_weights(bundle, support), out)
    start, adapted = accuracy(bundle, held_out), accuracy(Bundle.load(out), held_out)
    # The learning made it worse: write the start point in the adapted form, so that the agent
    # handles one kind of file.
    if start > adapted:
        digest = write_adapted(bundle, {n: t.data for n, t in bundle.weights.items()}, out)
    current = order["current"]
    return {
        "support": len(support["y"]),
        "held_out": len(held_out["y"]),
        "start": start,
        "adapted": adapted,
        "current": None if current is None else accuracy(Bundle.load(Path(current)), held_out),
        "digest": digest,
    }


def read_samples(path: Path) -> dict[str, Any]:
    """Return `x` and `y` of an .npz. InvalidInput names the rule that the file breaks."""
    from triplane.unified_ir.files.npz import opened_npz

    rule = f"{path.name} is an .npz with x (N, ...) and whole numbers y (N,)"
    try:
        with opened_npz(path, file_bytes=MAX_SAMPLES_BYTES) as npz:
            x, y = npz.array("x"), npz.array("y")
    except TriplaneError as error:
        reason = str(error).replace(str(path), path.name)  # the cloud is sent no path of the node
        raise InvalidInput(f"{rule}: {reason}") from error
    return _checked(x, y, path.name, rule)


def _checked(x: Any, y: Any, name: str, rule: str) -> dict[str, Any]:
    """Return the samples with int64 classes. InvalidInput: they break a rule."""
    from triplane.unified_ir.files.samples import MAX_CLASSES, check_classes, check_finite

    if y.ndim != 1 or y.dtype.kind not in "iu" or len(x) != len(y):
        raise InvalidInput(f"{rule}, got {x.dtype}{x.shape} and {y.dtype}{y.shape}")
    _check_count(len(y), name)
    check_finite(x, "x", what="samples")
    most = f"a model gives at most {MAX_CLASSES} logits"
    check_classes(y, MAX_CLASSES, most, _sample_of(name))
    return {"x": x, "y": y.astype("int64")}


def _check_count(count: int, name: str) -> None:
    if not LEAST_SAMPLES <= count <= MAX_SAMPLES:
        raise InvalidInput(
            f"{name} has {count} samples; from {LEAST_SAMPLES} to {MAX_SAMPLES} are used, "
            "one half to adapt and the other to compare"
        )


def keep_samples(
    folder: Path,
    model: str,
    source: Path,
    *,
    bundle: Path | None = None,
    x: Sequence[str] = (),
    y: Sequence[str] = (),
    **form: Any,
) -> tuple[int, Path]:
    """Store `source` as the node's samples for a model; return their number and the new file.

    source: an .npz, or other data with the columns x and y, which are chosen as for `data.load`;
    form: more options of it. Images of a folder get the size of the bundle's input.
    bundle: the serving bundle, whose input the samples must fit. InvalidInput: not samples, or they
    do not fit, or the model's name is invalid.
    """
    if not source.exists():
        raise NotFound(f"no file {source}")
    stated = any(value is not None for value in form.values())
    is_copied = source.suffix == NPZ and not (x or y or stated)
    choice = {"x": x, "y": y, **form}
    samples = read_samples(source) if is_copied else _loaded(source, bundle, choice)
    count = len(samples["y"])
    if bundle is not None:
        _check_fit(samples, bundle, model, source.name)
    path = pointer_path(folder, model).with_suffix(NPZ)
    OS_DISK.make_folder(folder)
    # The name of the file stays inside the folder: `pointer_path` has checked the model's name.
    write_atomic(path, source.read_bytes() if is_copied else _npz_bytes(samples))
    return count, path


def _loaded(source: Path, bundle: Path | None, choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return x and y of a table, a folder of images or other data, within the limits of samples."""
    import numpy as np

    from triplane.unified_ir.data import load
    from triplane.unified_ir.data.by_name import size_like
    from triplane.unified_ir.data.choosing import class_numbers, row_bytes

    names, shapes = _served_facts(bundle)
    size = choice.get("size") or size_like(source, shapes)
    dataset = load(source, **{**choice, "size": size})
    if (len(dataset.inputs), len(dataset.targets)) != (1, 1):
        raise InvalidInput(
            f"{source.name} must give one input and one column of classes; choose them: --x, --y"
        )
    if dataset.overlap:
        raise InvalidInput(
            f"windows of {source.name} share rows with the {dataset.overlap} before them, so both "
            "halves, to adapt to and to compare on, would have the same rows; use windows that do "
            "not overlap (the step window with a stride of its size)"
        )
    _check_count(len(dataset), source.name)
    n_bytes = row_bytes(dataset, dataset.inputs) * len(dataset)
    if n_bytes > MAX_SAMPLES_BYTES:
        raise InvalidInput(f"samples take at most {MAX_SAMPLES_BYTES} bytes, got {n_bytes}")
    if dataset.labels and not names:
        raise InvalidInput(
            f"{source.name} names its classes, but no version serves here whose names say their "
            "numbers; give whole numbers"
        )
    samples, classes = np.asarray(dataset.x), class_numbers(dataset, names)
    if samples.dtype == np.float64:  # tables hold float64; a bundle takes float32
        samples = samples.astype(np.float32)
    return _checked(samples, classes, source.name, f"{source.name} has whole numbers as classes")


def _served_facts(bundle: Path | None) -> tuple[tuple[str, ...], list[tuple[int | str, ...]]]:
    """Return the names of the serving bundle's classes and the shapes of its inputs."""
    from triplane.unified_ir.runtime import Bundle

    if bundle is None:
        return (), []
    with contextlib.suppress(Corrupt):  # the agent will fetch it again
        served = Bundle.load(bundle)
        names = tuple(served.labels.get(served.outputs[0].name, ()))
        return names, [info.shape for info in served.inputs]
    return (), []


def _npz_bytes(samples: Mapping[str, Any]) -> bytes:
    from triplane.unified_ir.files.npz import write_npz

    stream = io.BytesIO()
    write_npz(stream, samples)
    return stream.getvalue()


def _sample_of(name: str) -> str:
    """Return a template for the name of a sample, for `check_classes`."""
    return f"sample {{}} of {name.replace('{', '{{').replace('}', '}}')}"


def _check_labels(y: Any, bundle: Any, name: str, model: str = "") -> None:
    """Raise InvalidInput if the file `name` has a label for which the bundle has no class."""
    from triplane.unified_ir.files.samples import check_classes

    shape = bundle.outputs[0].shape
    classes = shape[-1] if len(shape) > 1 else None
    if isinstance(classes, int) and classes > 0:
        giver = f"{model or bundle.name} gives {classes} logits"
        check_classes(y, classes, giver, _sample_of(name))


def _check_fit(samples: Mapping[str, Any], bundle: Path, model: str, name: str) -> None:
    """Raise InvalidInput unless samples have the shape and the classes of the bundle."""
    from triplane.unified_ir.runtime import Bundle

    try:
        served = Bundle.load(bundle)
    except Corrupt:  # the agent will fetch it again; meanwhile its input is unknown
        return
    x, wanted = samples["x"], served.inputs[0]
    sizes = [size if isinstance(size, int) and size > 0 else None for size in wanted.shape[1:]]
    fits = len(sizes) == x.ndim - 1 and all(
        expected in (None, size) for expected, size in zip(sizes, x.shape[1:], strict=False)
    )
    if not fits:
        shape = ", ".join("any" if size is None else str(size) for size in sizes)
        raise InvalidInput(
            f"{model} takes samples of shape ({shape}), as input {wanted.name!r} of the version "
            f"that serves here; x has samples of shape {x.shape[1:]}"
        )
    _check_labels(samples["y"], served, name, model)


def split(samples: Mapping[str, Any], seed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (support, held out), about half of the samples each, by the bytes of each sample.

    A sample stays in its half when others are added, and equal samples are in the same half.
    InvalidInput if a half is empty, which may happen with few samples.
    """
    from triplane.unified_ir.federated.core.parts import places

    # By content and not by position, so that a duplicate of a held-out sample is never learned
    # from.
    chosen = places(samples["x"], seed) < SUPPORT_SHARE
    if chosen.all() or not chosen.any():
        raise InvalidInput(
            f"all {len(chosen)} samples fall into one half, by their bytes, as equal ones always "
            "do; add different samples: one half is to adapt, the other to compare"
        )
    return (
        {name: array[chosen] for name, array in samples.items()},
        {name: array[~chosen] for name, array in samples.items()},
    )


def accuracy(bundle: Any, samples: Mapping[str, Any]) -> float:
    """Return the share of samples whose largest output is their label."""
    from triplane.edge.agent.trial import share_right
    from triplane.unified_ir.runtime import SessionOptions

    session = bundle.session(SessionOptions(threads=1))
    return share_right(session, bundle.inputs[0].name, samples["x"], samples["y"])


if __name__ == "__main__":
    serve_order({"adapt": adaptation})

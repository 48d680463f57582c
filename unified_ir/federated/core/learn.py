"""A device's work in a run, the same for every algorithm: learn, or adapt and score.

Algorithms differ only in the plan's graphs (decision 0015). The samples of a step depend on seed,
round and device name, so the same arguments give the same bits over gRPC and in one process. A step
takes a batch, or an episode if the inputs of the entry are named `support.*` and `query.*`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.episodes import Episodes
from triplane.unified_ir.federated.core.metric import Metric, metric_of
from triplane.unified_ir.files.pixels import as_input
from triplane.unified_ir.files.samples import COUNTED

LEARN: Final = "local_update"
ADAPT: Final = "adapt"
EVALUATE: Final = "evaluate"
PREDICT: Final = "predict"
SMALLER_RATE: Final = "a smaller rate is needed"
"""The way out in an error of numbers that diverge; a caller knows which options set the rates."""
LOSS: Final = "loss"
SUPPORT: Final = "support."
QUERY: Final = "query."
ANCHOR: Final = "anchor."
HYPER: Final = "hyper."
WHOLE: Final = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
"""Element types of labels."""
PARAMETER: Final = "parameter"
BUFFER: Final = "buffer"
SHARED_ROLES: Final = (PARAMETER, BUFFER)
EVALUATE_ROWS: Final = 256
"""Samples in one call of `evaluate`; this limits memory for any number of samples."""
SCORED_EPISODES: Final = 10
"""Episodes over which a device is scored where an episode has classes of its own."""
Parts = Mapping[str, tuple[Mapping[str, Array], Array | slice]]
"""Samples and the rows of a batch among them, by the prefix of the names of inputs."""
MAX_STEPS: Final = 1_000_000
"""Limit for the steps of one learning or adaptation."""


class Input(Protocol):
    """One batch input of an entry."""

    @property
    def name(self) -> str:
        """Name of the batch input."""

    @property
    def dtype(self) -> str:
        """Element type, as numpy names it."""


class EntryOutput(Input, Protocol):
    """One result of an entry, or a batch input with its sizes."""

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Sizes, those of the batch as text."""


class EntrySignatures(Protocol):
    """The part of `runtime.Plan` that `check_labels` uses; see there."""

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of graphs."""

    def signature(self, entry: str, /) -> tuple[Sequence[EntryOutput], Sequence[EntryOutput]]:
        """Batch and results of an entry."""


class Learner(Protocol):
    """The part of `runtime.Plan` that learning uses; see there."""

    @property
    def roles(self) -> Mapping[str, str]:
        """By state tensor."""

    def inputs(self, entry: str, /) -> Sequence[Input]:
        """Return the inputs of a batch of `entry`."""

    def run(self, entry: str, batch: Mapping[str, Array], /) -> Mapping[str, Array]:
        """Run one step on the current state."""

    def state(self, *roles: str) -> dict[str, Array]:
        """Return a copy of the state, or only of the given roles."""

    def view(self, *roles: str) -> Mapping[str, Array]:
        """Return the same without a copy, to be read before the next step."""

    def assign(self, values: Mapping[str, Array], /) -> None:
        """Replace the named state tensors."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A device's samples by batch name ("x", "y"), in two disjoint parts.

    The first axis counts samples. held_out may be empty: such a device does not evaluate.
    """

    train: Mapping[str, Array]
    held_out: Mapping[str, Array]

    def __post_init__(self) -> None:
        for part, arrays in (("train", self.train), ("held_out", self.held_out)):
            sizes = {name: np.shape(array)[:1] for name, array in arrays.items()}
            if len(set(sizes.values())) > 1 or () in sizes.values():
                raise InvalidInput(
                    f"arrays of {part} must have the same number of samples, got {sizes}"
                )
        if not self.examples:
            raise InvalidInput("a shard must have at least one sample to train on")

    @property
    def examples(self) -> int:
        """Number of samples to learn from."""
        return _count(self.train)

    @property
    def held_out_samples(self) -> int:
        """Number of samples to score on."""
        return _count(self.held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A device's work in a round.

    support: 0 to adapt on all samples; see `Sampling` in federation.proto. ways: 0, or the classes
    of an episode, which are drawn and numbered anew for each (`core.episodes`).
    """

    run: str
    round: int
    device: str
    seed: int
    steps: int
    batch_size: int
    support: int
    query: int
    ways: int = 0

    def draws(self, purpose: str) -> Draws:
        """Return the random choices of this device and round for one purpose."""
        return Draws(self.seed, self.round, self.device, purpose)


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of learning.

    change: new - old of each shared float tensor. examples: of the shard. loss: mean over steps.
    """

    change: dict[str, Array]
    examples: int
    loss: float


@dataclass(frozen=True, slots=True)
class LearnerScore:
    """Score on held-out samples before and after adaptation, by the metric of the plan."""

    samples: int
    before: float
    after: float


def shared(roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sorted names of the state that a run shares: parameters and buffers."""
    names = (name for name, role in roles.items() if role in SHARED_ROLES)
    return tuple(sorted(name for name in names if not name.startswith((ANCHOR, HYPER))))


def buffers(roles: Mapping[str, str]) -> frozenset[str]:
    """Return the buffers, such as statistics of batches, which are sent and averaged as they are.

    A server's optimizer, rounding or a choice of the largest changes could make a running variance
    negative.
    """
    return frozenset(name for name, role in roles.items() if role == BUFFER)


def sent_buffers(state: Mapping[str, Array], roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the buffers that updates carry: of the shared state, those of floating point."""
    names = sorted(buffers(roles) & set(shared(roles)))
    return tuple(n for n in names if np.issubdtype(state[n].dtype, np.floating))


def check_labels(plan: EntrySignatures, shard: Shard, *, ways: int = 0) -> None:
    """Raise InvalidInput if a label is not one of the plan's classes.

    ways: the classes of an episode, where these are numbered anew and only they count.

    A graph would fail at a label beyond the last class, and take -1 for the last class. Labels are
    the integer inputs of `evaluate` that `predict` does not have; the number of classes is the last
    size of the output of `predict`, if that has one axis more than the labels.
    """
    if not {EVALUATE, PREDICT} <= set(plan.entries):
        return
    inputs, logits = plan.signature(PREDICT)
    names = {tensor.name for tensor in inputs}
    shape = logits[0].shape if logits else ()
    for tensor in plan.signature(EVALUATE)[0]:
        is_label = tensor.name not in names and tensor.dtype in WHOLE
        if is_label and len(shape) == len(tensor.shape) + 1 and isinstance(shape[-1], int):
            if ways > shape[-1]:
                raise InvalidInput(
                    f"the model has {shape[-1]} outputs, one for each class; an episode of {ways} "
                    "classes needs as many"
                )
            if not ways:
                _check_classes(tensor.name, shape[-1], shard)


def _check_classes(name: str, classes: int, shard: Shard) -> None:
    for part, arrays in (("learn from", shard.train), ("score on", shard.held_out)):
        y = arrays.get(name)
        if y is not None and y.size and (y.min() < 0 or y.max() >= classes):
            raise InvalidInput(
                f"the model tells {classes} classes apart, 0 to {classes - 1}; labels {name!r} of "
                f"the samples to {part} are {y.min()} to {y.max()}. Leave the others out, or "
                "number the classes as the model does"
            )


def check_episodes(plan: Learner, work: Work, shard: Shard, *, learns: bool) -> None:
    """Raise InvalidInput if a device cannot learn from, or be scored on, episodes of N classes.

    learns: whether it learns. A device is scored if it has held-out samples.
    """
    if not work.ways:
        return
    episodes, draws = _episodes_of_classes(plan, work, shard), work.draws("check")
    if learns:
        episodes.to_learn(draws)
    if shard.held_out_samples:
        episodes.to_score(draws)


def learn(
    plan: Learner,
    work: Work,
    shard: Shard,
    start: Callable[[], Mapping[str, Array]] | None = None,
) -> Learned:
    """Take `work.steps` steps from the plan's state, which the caller has assigned.

    The plan keeps its new state, personal tensors included. start: opens the shared state that the
    plan began with, if the caller has it in a file; otherwise a copy is held while learning.
    InvalidInput: the entry does not fit the samples, or numbers are no longer finite.
    """
    _check_steps(work.steps, least=1)
    _begin(plan, work)
    # A device has little memory: with the state in a file, no second copy is held while learning.
    before = {} if start else plan.state(*SHARED_ROLES)
    steps = enumerate(batches(plan, work, shard))
    losses = [_loss(plan.run(LEARN, batch), k) for k, batch in steps]
    return _learned(_change(plan, start() if start else before), shard, losses)


def learned_elsewhere(
    plan: Learner,
    shard: Shard,
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    losses: Iterable[float],
) -> Learned:
    """Return what `learn` returns, for steps that did not run on the plan.

    before, after: the shared state at both ends. losses: of each step. InvalidInput as in `learn`.
    """
    numbers = [float(loss) for loss in losses]
    for k, loss in enumerate(numbers):
        _check_loss(loss, k)
    with np.errstate(over="ignore", invalid="ignore"):
        change = {n: np.subtract(after[n], before[n]) for n in _changing(plan, after)}
    return _learned(change, shard, numbers)


def _learned(change: dict[str, Array], shard: Shard, losses: Sequence[float]) -> Learned:
    for name, x in change.items():
        if not np.isfinite(x).all():
            raise InvalidInput(f"after {len(losses)} steps {name!r} is not finite; {SMALLER_RATE}")
    # fsum rounds once, so that the sum is the same on every machine.
    return Learned(change, shard.examples, math.fsum(losses) / len(losses))


def evaluate(plan: Learner, work: Work, shard: Shard, *, steps: int) -> LearnerScore:
    """Score on held-out samples, adapt `steps` steps to one support set, score again.

    Support comes from `train`, so adaptation never sees what it is scored on. The plan's state is
    restored at the end. With ways, both scores are means over `SCORED_EPISODES` episodes.
    InvalidInput without held-out samples, or without the entries.
    """
    before = [score(plan, part) for _, part in scored_parts(plan, work, shard)]
    after = adapted_score(plan, work, shard, steps=steps)
    return LearnerScore(shard.held_out_samples, mean(before), after)


def adapted_score(plan: Learner, work: Work, shard: Shard, *, steps: int) -> float:
    """Return the score after adaptation alone; see `evaluate`."""
    _check_steps(steps, least=0)
    state, scores = plan.state(), []
    for part_work, part in scored_parts(plan, work, shard):
        try:
            adapt(plan, part_work, part, steps=steps)
            scores.append(score(plan, part))
        finally:
            plan.assign(state)
    return mean(scores)


def scored_parts(plan: Learner, work: Work, shard: Shard) -> Iterator[tuple[Work, Shard]]:
    """Yield what a device is scored on: its samples, or the episodes that stand for them."""
    if not work.ways:
        yield work, shard
        return
    episodes, draws = _episodes_of_classes(plan, work, shard), work.draws("scored episodes")
    for _ in range(SCORED_EPISODES):
        # The whole support of an episode.
        yield replace(work, support=0), Shard(*episodes.to_score(draws))


def _episodes_of_classes(plan: Learner, work: Work, shard: Shard) -> Episodes:
    asked = {tensor.name for tensor in plan.inputs(PREDICT)}
    labels = [t.name for t in plan.inputs(EVALUATE) if t.name not in asked and t.dtype in WHOLE]
    if len(labels) != 1:
        raise InvalidInput(
            f"episodes of {work.ways} classes need a model with one target of whole numbers, "
            f"its classes; this one has {len(labels)}"
        )
    return Episodes(
        shard.train, shard.held_out, labels[0],
        ways=work.ways, support=work.support, query=work.query,
    )  # fmt: skip


def adapt(plan: Learner, work: Work, shard: Shard, *, steps: int) -> None:
    """Take `steps` steps of `adapt` on one support set drawn from `train`; the plan keeps them."""
    _check_steps(steps, least=0)
    _begin(plan, work)
    batch = support_batch(plan, work, shard) if steps else {}
    for _ in range(steps):
        plan.run(ADAPT, batch)


def support_batch(plan: Learner, work: Work, shard: Shard) -> dict[str, Array]:
    """Return the batch of each step of adaptation: a support set drawn from `train`."""
    order = work.draws("support").permutation(shard.examples)
    chosen = (shard.train, order[: work.support or shard.examples])
    return _batch_of(plan, ADAPT, {"": chosen, SUPPORT: chosen})


def metric_of_plan(plan: EntrySignatures) -> Metric:
    """Return the metric by which devices with this plan are scored."""
    return metric_of([tensor.name for tensor in plan.signature(EVALUATE)[1]])


def score(plan: Learner, shard: Shard) -> float:
    """Return the accuracy of the plan's current state on the held-out samples, or else its loss.

    InvalidInput: a loss is not finite, or no label counts in it.
    """
    return score_of((n, plan.run(EVALUATE, batch)) for n, batch in scoring_batches(plan, shard))


def scoring_batches(plan: Learner, shard: Shard) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield the held-out samples as batches of `evaluate`, each with its number of samples."""
    n = shard.held_out_samples
    if not n:
        raise InvalidInput("a device without held-out samples cannot score; give it some")
    for at in range(0, n, EVALUATE_ROWS):
        rows = np.arange(at, min(at + EVALUATE_ROWS, n))
        yield len(rows), _batch_of(plan, EVALUATE, {"": (shard.held_out, rows)})


def score_of(evaluated: Iterable[tuple[int, Mapping[str, Array]]]) -> float:
    """Return the score of batches, each with its number of samples and the results; see `score`."""
    sums, divisors = [], []
    for n, results in evaluated:
        metric = metric_of(results)
        value = float(results[metric.name])
        if not (metric.share or math.isfinite(value)):
            raise InvalidInput(f"the {metric.name} on held-out samples is {value}; {SMALLER_RATE}")
        # Weighted, since the last batch may be smaller, and labels may weigh or be ignored. Where
        # the divisor is 0 the value is a sum, see `nn.Loss.counted`.
        divisors.append(float(results.get(COUNTED + metric.name, n)))
        sums.append(value * (divisors[-1] or 1.0))
    if not (divisor := math.fsum(divisors)):
        raise InvalidInput(
            f"no held-out label counts in the {metric.name}: each is ignored or has weight 0; give "
            "held-out samples with labels that count"
        )
    return math.fsum(sums) / divisor


def _begin(plan: Learner, work: Work) -> None:
    """Set the anchors to the round's start, and the graph's own random keys."""
    began = beginning(plan, work)
    plan.assign(began)


def beginning(plan: Learner, work: Work) -> dict[str, Array]:
    """Return the state that a device sets before it learns: anchors and random keys."""
    state = plan.view()
    anchored = {n: n.removeprefix(ANCHOR) for n in state if n.startswith(ANCHOR)}
    if lost := [(anchor, n) for anchor, n in anchored.items() if n not in state]:
        raise InvalidInput(
            f"{lost[0][0]!r} holds the start of the round of {lost[0][1]!r}, which the plan does "
            "not have; make the plan again"
        )
    anchors = {anchor: state[n] for anchor, n in anchored.items()}
    # Keys of dropout come from the round too, so that a device that repeats its work gets the same
    # bits.
    keys = {
        name: work.draws(f"key {name}").key(x.dtype, x.shape)
        for name, x in state.items()
        if plan.roles[name] == "key"
    }
    return anchors | keys


def _change(plan: Learner, before: Mapping[str, Array]) -> dict[str, Array]:
    """Return new - old of the shared float tensors, written over the old ones if possible."""
    after = plan.view(*SHARED_ROLES)
    names = _changing(plan, after)
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = ((n, after[n], before[n]) for n in names)
        return {
            # A state that is mapped from a file is read-only.
            n: np.subtract(new, old, out=old if old.flags.writeable else None)
            for n, new, old in pairs
        }


def _changing(plan: Learner, state: Mapping[str, Array]) -> list[str]:
    """Return the names of the shared tensors that learning changes: those of floats."""
    return [n for n in shared(plan.roles) if np.issubdtype(state[n].dtype, np.floating)]


def batches(plan: Learner, work: Work, shard: Shard) -> Iterator[dict[str, Array]]:
    """Yield the batch, or the episode, of each of a device's steps."""
    draws, episodes = work.draws("samples"), takes_episodes(plan)
    if work.ways and not episodes:
        raise InvalidInput(
            f"episodes of {work.ways} classes need an algorithm that learns from episodes, such as "
            "maml; a step of this one takes a batch"
        )
    parts = (
        _class_episodes(plan, work, shard, draws) if work.ways
        else _episodes(draws, work, shard) if episodes
        else _batches(draws, work, shard)
    )  # fmt: skip
    for _, chosen in zip(range(work.steps), parts, strict=False):
        yield _batch_of(plan, LEARN, chosen)


def _class_episodes(plan: Learner, work: Work, shard: Shard, draws: Draws) -> Iterator[Parts]:
    episodes = _episodes_of_classes(plan, work, shard)
    while True:
        support, query = episodes.to_learn(draws)
        yield {SUPPORT: (support, slice(None)), QUERY: (query, slice(None))}


def _batches(draws: Draws, work: Work, shard: Shard) -> Iterator[Parts]:
    """Yield batches from one shuffled pass after another; the whole shard if a batch is larger."""
    n = shard.examples
    if work.batch_size < 1:
        raise InvalidInput(f"a batch has at least one sample, got {work.batch_size}")
    size = min(work.batch_size, n)
    rows = np.empty(0, np.intp)
    while True:
        if len(rows) < size:
            # The end of a pass is joined with the next one, so all batches are equally large and
            # the graph sees one shape.
            rows = np.concatenate([rows, draws.permutation(n)])
        yield {"": (shard.train, rows[:size])}
        rows = rows[size:]


def takes_episodes(plan: Learner) -> bool:
    """Return whether a step of the plan takes an episode instead of a batch."""
    return any(tensor.name.startswith((SUPPORT, QUERY)) for tensor in plan.inputs(LEARN))


def episode_sizes(work: Work, n: int) -> tuple[int, int]:
    """Return the samples of support and query in a step, of n in the shard.

    A small shard shrinks both in proportion. InvalidInput: one of them would be empty.
    """
    support, query = work.support, work.query
    if support < 1 or query < 1 or n < 2:
        raise InvalidInput(
            f"an episode needs at least 1 sample each for support and query; got {support} and "
            f"{query} of {n} samples"
        )
    if support + query > n:
        # In proportion, with at least one sample on each side.
        support = min(max(1, n * support // (support + query)), n - 1)
        query = n - support
    return support, query


def _episodes(draws: Draws, work: Work, shard: Shard) -> Iterator[Parts]:
    """Yield disjoint support and query of each step."""
    n = shard.examples
    support, query = episode_sizes(work, n)
    while True:
        order = draws.permutation(n)
        rows = {SUPPORT: order[:support], QUERY: order[support : support + query]}
        yield {prefix: (shard.train, some) for prefix, some in rows.items()}


def _batch_of(plan: Learner, entry: str, parts: Parts) -> dict[str, Array]:
    """Return the batch of `entry`, from the part of the prefix of each input's name."""
    return {tensor.name: _column(tensor, entry, parts) for tensor in plan.inputs(entry)}


def _column(tensor: Input, entry: str, parts: Parts) -> Array:
    prefix = next((p for p in (SUPPORT, QUERY) if tensor.name.startswith(p)), "")
    name = tensor.name.removeprefix(prefix)
    samples, rows = parts.get(prefix, ({}, slice(0)))
    if name not in samples:
        columns = sorted(
            {prefix + column for prefix, (part, _) in parts.items() for column in part}
        )
        raise InvalidInput(
            f"`{entry}` of this plan takes {tensor.name!r}; the samples are {columns}"
        )
    column = as_input(samples[name][rows], tensor.dtype)
    if not np.can_cast(column.dtype, tensor.dtype, "same_kind"):
        raise InvalidInput(f"{name!r} is {column.dtype} here, `{entry}` takes {tensor.dtype}")
    return column.astype(tensor.dtype, copy=False)


def _loss(results: Mapping[str, Array], step: int) -> float:
    if LOSS not in results or results[LOSS].size != 1:
        raise InvalidInput(f"`{LEARN}` must return one number {LOSS!r}, got {sorted(results)}")
    loss = float(results[LOSS].reshape(()))
    _check_loss(loss, step)
    return loss


def _check_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise InvalidInput(f"the loss is {loss} at step {step + 1}; {SMALLER_RATE}")


def _check_steps(steps: int, *, least: int) -> None:
    if not least <= steps <= MAX_STEPS:
        raise InvalidInput(f"work has {least} to {MAX_STEPS} steps, got {steps}")


def mean(scores: Sequence[float]) -> float:
    """Return the mean, whose sum is rounded once."""
    return math.fsum(scores) / len(scores)


def _count(arrays: Mapping[str, Array]) -> int:
    return next((len(array) for array in arrays.values()), 0)

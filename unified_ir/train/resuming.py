"""Resuming from a snapshot: only of the same run, and all of it or nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from triplane.proto.errors import Conflict
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train import identity
from triplane.unified_ir.train.batches import BatchSource
from triplane.unified_ir.train.checkpoint import Checkpoint
from triplane.unified_ir.train.snapshot import Snapshot

if TYPE_CHECKING:
    from triplane.unified_ir.train.trainer import Trainer


def resume(trainer: Trainer, keeper: Checkpoint, source: BatchSource) -> None:
    """Load the newest snapshot of a folder, if there is one; Conflict if it is of another run."""
    snapshot = keeper.newest()
    if snapshot is None:
        return
    mine = identity.of_model(trainer.model, trainer.recipe) | identity.of_data(source)
    identity.check(snapshot.identity, mine)
    _check_order(snapshot, source)
    restore(trainer, snapshot)


def refuse_others(keeper: Checkpoint) -> None:
    """Refuse to start a new run among the checkpoints of another."""
    if keeper.files():
        raise Conflict(
            f"{keeper.folder} holds checkpoints of a run; resume it, or name another folder"
        )


def restore(trainer: Trainer, snapshot: Snapshot, changed: Collection[str] = ()) -> None:
    """Load a snapshot of the same model and optimizer; else raise Conflict, nothing changed."""
    mine = trainer.state()
    if "optimizer" in changed:
        snapshot = replace(snapshot, state=_with_optimizer(snapshot.state, mine))
    own, theirs = _kinds(mine), _kinds(snapshot.state)
    odd = sorted(k for k in own.keys() | theirs.keys() if own.get(k) != theirs.get(k))
    if odd:
        raise Conflict(
            f"the checkpoint is of another model or optimizer: {odd[0]!r} is "
            f"{theirs.get(odd[0], 'absent')} there and {own.get(odd[0], 'absent')} here"
        )
    if snapshot.seed != trainer.seed:
        raise Conflict(
            f"the checkpoint is of a run with seed {snapshot.seed}, this trainer has {trainer.seed}"
        )
    trainer.write_back(snapshot.state)
    trainer.place, trainer.history = snapshot.place, snapshot.history


def _with_optimizer(theirs: Mapping[str, Array], mine: Mapping[str, Array]) -> dict[str, Array]:
    """Return the snapshot's state, completed by our optimizer's where it has none."""
    own, other = _kinds(mine), _kinds(theirs)
    shared = {k for k in theirs if not _is_optimizers(k) or own.get(k) == other[k]}
    kept = {k: a for k, a in mine.items() if _is_optimizers(k)}
    return {**kept, **{k: theirs[k] for k in theirs if k in shared}}


def _is_optimizers(name: str) -> bool:
    return name.startswith("optimizer.")


def _kinds(state: Mapping[str, Array]) -> dict[str, tuple[object, tuple[int, ...]]]:
    return {k: (a.dtype, a.shape) for k, a in state.items()}


def _check_order(snapshot: Snapshot, source: BatchSource) -> None:
    """Within an epoch, check that the next batches are those that the snapshot's run had next."""
    now = (source.size, source.samples or 0)
    if snapshot.place.position and (snapshot.batch_size, snapshot.samples) != now:
        raise Conflict(
            f"the checkpoint lies within an epoch of {snapshot.samples} samples in batches of "
            f"{snapshot.batch_size}, this run has {now[1]} in batches of {now[0]}"
        )

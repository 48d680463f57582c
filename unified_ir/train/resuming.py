"""Resume from a snapshot: only from one of the same run, and completely or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from triplane.proto.errors import Conflict
from triplane.unified_ir.engines import HasState
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train import identity
from triplane.unified_ir.train.batches import BatchSource
from triplane.unified_ir.train.checkpoint import Checkpoint
from triplane.unified_ir.train.snapshot import Snapshot

if TYPE_CHECKING:
    from triplane.unified_ir.train.trainer import Trainer


def resume(trainer: Trainer, keeper: Checkpoint, source: BatchSource) -> None:
    """Load the newest snapshot of a folder, if any; Conflict if it belongs to another run."""
    snapshot = keeper.newest()
    if snapshot is None:
        return
    mine = identity.of_model(trainer.model, trainer.recipe) | identity.of_data(source)
    # Before anything is loaded: this names the part that differs, where the checks of shapes below
    # would only name a tensor.
    identity.check(snapshot.identity, mine)
    now = (source.size, source.samples or 0)
    if snapshot.place.position and (snapshot.batch_size, snapshot.samples) != now:
        raise Conflict(  # the next batches would not be those that the run had next
            f"the checkpoint is within an epoch of {snapshot.samples} samples in batches of "
            f"{snapshot.batch_size}, this run has {now[1]} in batches of {now[0]}"
        )
    restore(trainer, snapshot)


def refuse_others(keeper: Checkpoint) -> None:
    """Refuse to start a new run in a folder with checkpoints of another."""
    if keeper.files():
        raise Conflict(
            f"{keeper.folder} already holds checkpoints; resume that run, or name another folder"
        )


def restore(trainer: Trainer, snapshot: Snapshot, changed: Collection[str] = ()) -> None:
    """Load a snapshot of the same model and optimizer; otherwise raise Conflict, change nothing."""
    mine = trainer.state()
    if "optimizer" in changed:
        snapshot = replace(snapshot, state=_with_optimizer(snapshot.state, mine))
    own, theirs = _kinds(mine), _kinds(snapshot.state)
    odd = sorted(k for k in own.keys() | theirs.keys() if own.get(k) != theirs.get(k))
    if odd:
        raise Conflict(
            f"the checkpoint belongs to another model or optimizer: {odd[0]!r} is "
            f"{theirs.get(odd[0], 'absent')} there and {own.get(odd[0], 'absent')} here"
        )
    if snapshot.seed != trainer.seed:
        raise Conflict(
            f"the checkpoint belongs to a run with seed {snapshot.seed}, this trainer has "
            f"{trainer.seed}"
        )
    trainer.write_back(snapshot.state)
    trainer.place, trainer.history = snapshot.place, snapshot.history
    for holder in holders(trainer):
        holder.load_state_dict(snapshot.callbacks.get(holder.state_key, {}))


def holders(trainer: Trainer) -> list[HasState]:
    """Return what checkpoints hold beside the state of the training step."""
    own = [trainer.engine] if isinstance(trainer.engine, HasState) else []
    return [*trainer.callbacks, trainer.launch_choice, *own]


def _with_optimizer(theirs: Mapping[str, Array], mine: Mapping[str, Array]) -> dict[str, Array]:
    """Return the snapshot's state, completed by our optimizer's where it has none that fits."""
    own, other = _kinds(mine), _kinds(theirs)
    initial = {k: a for k, a in mine.items() if k.startswith("optimizer.")}
    fits = {k for k in theirs if not k.startswith("optimizer.") or own.get(k) == other[k]}
    return initial | {k: a for k, a in theirs.items() if k in fits}


def _kinds(state: Mapping[str, Array]) -> dict[str, str]:
    return {k: f"{a.dtype}{list(a.shape)}" for k, a in state.items()}

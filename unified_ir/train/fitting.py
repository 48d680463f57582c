"""One run of a trainer: the loop over epochs and batches, with the state on the engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triplane.proto.errors import Conflict, InvalidInput
from triplane.proto.suggestions import suggestion
from triplane.unified_ir.engines import (
    EngineLoop,
    LaunchBatches,
    LaunchingLoop,
    Program,
    StateLost,
)
from triplane.unified_ir.engines.finite import finite, first_nonfinite
from triplane.unified_ir.ir.graph import Array, Role
from triplane.unified_ir.optim import STEP, slot_name
from triplane.unified_ir.train import identity, step
from triplane.unified_ir.train.batches import Batch, BatchSource, with_last
from triplane.unified_ir.train.callbacks import Callback
from triplane.unified_ir.train.checkpoint import Checkpoint
from triplane.unified_ir.train.feeding import ThreadFeed
from triplane.unified_ir.train.history import NOTHING_COUNTED, VALIDATION, Row, split
from triplane.unified_ir.train.interrupt import Interrupt
from triplane.unified_ir.train.launching import AUTO, Launching, SingleBatch
from triplane.unified_ir.train.precision import LEAST_SCALE
from triplane.unified_ir.train.progress import Progress
from triplane.unified_ir.train.recipe import AVERAGE, LEFT, LOSS_SCALE, SKIPPED
from triplane.unified_ir.train.run import Run
from triplane.unified_ir.train.snapshot import Snapshot

if TYPE_CHECKING:
    from triplane.unified_ir.train.together import SharedInterrupt
    from triplane.unified_ir.train.trainer import Trainer


Named = Mapping[str, Array]
Launch = tuple[LaunchBatches, bool]
"""Batches, and whether to update after the last one in any case."""
AVERAGES: Final = slot_name(AVERAGE, "")


class NonFinite(InvalidInput):
    """The loss became NaN or infinite.

    step: number of the step, from 1. cause: the first value that is not finite.
    """

    def __init__(self, message: str, *, step: int, cause: str) -> None:
        super().__init__(message)
        self.step, self.cause = step, cause


class Fit:
    """One run: the loop over epochs and batches with the state on the engine."""

    def __init__(
        self,
        trainer: Trainer,
        source: BatchSource,
        validation: Any,
        callbacks: Sequence[Callback],
        goal: int,
        interrupt: Interrupt | SharedInterrupt,
    ) -> None:
        self.trainer, self.source, self.validation = trainer, source, validation
        self.interrupt = interrupt
        # Steps that ran on the engine and that `place` does not count yet: batches and results.
        self._ahead: deque[tuple[Named, dict[str, Array]]] = deque()
        # Held by whoever reads the data, or by the thread that feeds launches.
        self._reading = Lock()
        self._feed: ThreadFeed[Launch] | Generator[Launch] | None = None
        self.launching = Launching(trainer.steps_per_launch, trainer.launch_choice, self._say)
        self.callbacks, self.goal = callbacks, goal
        self._check_measures()
        self._compile(trainer.training_program())
        self.start = trainer.place.copy()
        self.info = Run(
            trainer.place,
            trainer.history,
            epochs=goal,
            batches=source.count,
            snapshot=self._snapshot,
            learning_rate=self._learning_rate,
            weights=self._weights,
            restore=self._restore,
        )

    def _compile(self, program: Program) -> None:
        """Continue the trainer's state in a program's buffers."""
        trainer = self.trainer
        self.program, self.model = program, trainer.model
        self.names, self.tallies = self.model.batch_names(), self.model.tallies
        # Types of batches that were checked already: the check is repeated for new shapes only.
        self._kinds: set[Any] = set()
        self.accumulates = trainer.accumulate > 1
        state = trainer.state() | self._measured_rates()
        # The state at the start of the epoch, from which `_replayed` repeats steps.
        self.anchor = {k: state[k] for k in trainer.state_names(program.function)}
        self.loop: EngineLoop = program.loop(self.anchor)
        if trainer.steps_per_launch != 1 and not isinstance(self.loop, LaunchingLoop):
            raise InvalidInput(
                f"steps_per_launch={trainer.steps_per_launch} needs the engine 'xla': the other "
                "engines run one step at a time"
            )
        if trainer.steps_per_launch == AUTO and getattr(trainer.engine, "processes", None):
            raise InvalidInput(
                'steps_per_launch="auto" measures, and the processes of a run must decide alike; '
                "give a number"
            )
        # Computed when a snapshot first needs it: it traces the model and hashes the data.
        self._identity: dict[str, str] | None = None

    def _snapshot(self) -> Snapshot:
        """Return everything a checkpoint holds."""
        self._refuse_gone()
        return self.trainer.snapshot(
            self.loop.state(),
            batch_size=self.source.size,
            samples=self.source.samples or 0,
            identity=self._own_identity(),
        )

    def _own_identity(self) -> dict[str, str]:
        if self._identity is None:
            own = identity.of_model(self.model, self.trainer.recipe)
            with self._reading:
                self._identity = own | identity.of_data(self.source)
        return self._identity

    def _refuse_gone(self) -> None:
        if self._ahead:
            raise InvalidInput(
                f"the state after step {self.trainer.place.step} is gone: the launch went "
                f"{len(self._ahead)} steps further; ask for it in on_epoch, or use "
                "steps_per_launch=1"
            )

    def _learning_rate(self) -> float:
        optimizer = self.trainer.optimizer
        state = self.loop.view()
        updates = int(state[STEP]) - self._updates_ahead(state) if optimizer.counts() else 0
        return optimizer.rate_at(updates, state)

    def _updates_ahead(self, state: Mapping[str, Array]) -> int:
        """Return how many updates the steps ahead made."""
        due, size = len(self._ahead), self.trainer.accumulate
        if self.accumulates:
            since = size - int(state[LEFT])  # batches since the newest update
            due = -(-max(0, due - since) // size)
        return due - sum(bool(results.get(SKIPPED)) for _, results in self._ahead)

    def _weights(self) -> dict[str, Array]:
        self._refuse_gone()
        roles = self.trainer.roles()
        return {
            name: array.copy()
            for name, array in {**self.trainer.state(), **self.loop.state()}.items()
            if roles[name] not in (Role.KEY, Role.OPTIMIZER) or name.startswith(AVERAGES)
        }

    def _restore(self, weights: Mapping[str, Array]) -> None:
        own = self.trainer.state()
        for name, array in weights.items():
            if name not in own or (own[name].shape, own[name].dtype) != (array.shape, array.dtype):
                raise Conflict(
                    f"the weights to restore have {name!r} as {array.dtype}{list(array.shape)}, "
                    "which this network does not have; the checkpoint belongs to another one"
                )
        self.trainer.write_back(weights)

    def _measured_rates(self) -> dict[str, Array]:
        """Return the rates that depend on measures, by the names of their state."""
        rows = self.trainer.history.rows
        rates = {}
        for name, schedule in self.trainer.optimizer.plateaus().items():
            values = [row[schedule.measure] for row in rows if schedule.measure in row]
            if rows and not values:
                columns = self.trainer.history.columns()
                raise InvalidInput(
                    f"ReduceOnPlateau watches {schedule.measure!r}, which no epoch has; there are "
                    f"{', '.join(columns)}{suggestion(schedule.measure, columns)}"
                )
            rates[name] = np.array(schedule.rate_after(values), np.float32)
        return rates

    def _check_measures(self) -> None:
        """Refuse, before the first epoch, a rate that follows a measure of no validation data."""
        for schedule in self.trainer.optimizer.plateaus().values():
            if schedule.measure.startswith(VALIDATION) and self.validation is None:
                raise InvalidInput(
                    f"ReduceOnPlateau watches {schedule.measure!r}, but there is no validation "
                    "data; pass validation= to fit, or measure='loss'"
                )

    def run(self) -> None:
        """Train to the goal; write the state back unless the loss was not finite."""
        labels = self.source.targets()
        if labels is not None:  # in the data's own order, so that the user can find the sample
            self.model.check_labels(labels, "sample {} of the training data")
        try:
            self._call("on_start")
            while self.trainer.place.epoch < self.goal and not self.info.stopped:
                if self._epoch():
                    self._finish_epoch()
        except NonFinite:
            # The state on the engine is ruined. The cell still holds that of the start of the
            # epoch, so the position goes back there too.
            self._go_back()
            raise
        except BaseException as error:
            if self._settled() and isinstance(error, KeyboardInterrupt):
                self._save(error)
            raise
        self.trainer.write_back(self.loop.state())
        self._call("on_end")

    def _settled(self) -> bool:
        """Write back the state after an error, with all steps counted that led to it.

        A step that fails leaves the state as it was. One that is cut short may have used it up, and
        one whose loss is not finite has ruined it: the run goes back to the start of the epoch, and
        the result is False.
        """
        try:
            state = self.loop.state()
            while self._ahead:
                self._take(*self._ahead.popleft())
        except (StateLost, NonFinite):
            self._go_back()
            return False
        self.trainer.write_back(state)
        return True

    def _save(self, error: KeyboardInterrupt) -> None:
        """Save an interrupted run and add to the error how to continue it."""
        if not (keepers := self._keepers()):
            return
        path = keepers[0].save(self._snapshot())
        error.add_note(
            f"saved {path}; the same call with checkpoint={str(path.parent)!r} continues the run"
        )

    def _keepers(self) -> list[Checkpoint]:
        return [c for c in self.callbacks if isinstance(c, Checkpoint)]

    def _call(self, moment: str) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self.info)

    def _epoch(self) -> bool:
        """Train the rest of an epoch; return False if the run was stopped within it."""
        place = self.trainer.place
        program = self.trainer.training_program()
        # A callback changed the cell, for example froze a layer, so the step was traced again.
        if program is not self.program:
            self._compile(program)
        with closing(self._fed(self._launches(place.epoch, place.position, place.step))) as feed:
            self._feed = feed
            for batches, is_last in feed:
                # The last batch of an epoch updates in any case, so that no gradient is dropped.
                if is_last:
                    self.loop.load({LEFT: np.ones((), np.int64)})
                self._launch(batches)
                if self.info.stopped:
                    return False
        if not place.rows:
            raise InvalidInput(f"epoch {place.epoch + 1} has no batches; {_ONCE}")
        if names := place.uncounted():
            where = f"epoch {place.epoch + 1}"
            # No sample counted, so all gradients were 0, but momentum and weight decay moved the
            # weights.
            self.loop.load(self.anchor)
            self._go_back()
            raise InvalidInput(NOTHING_COUNTED.format(names=names, where=where))
        return True

    def _launch(self, batches: LaunchBatches) -> None:
        """Run the steps of these batches on the engine, and account for each of them in turn."""
        together = self.launching.together(batches)
        done, seconds = 0, 0.0
        while done < len(batches):
            begin = perf_counter()
            # What a launch left is what it refused: a single step says why.
            results = self._steps(batches, done, together=together and not done)
            seconds += perf_counter() - begin
            self._ahead.extend((batches.batch(done + i), r) for i, r in enumerate(results))
            done += len(results)
            while self._ahead:
                self._take(*self._ahead.popleft())
                self._call("on_step")
            self.interrupt.check()
            if self.info.stopped:
                return
        self.launching.measure(batches, seconds, together=together)

    def _steps(self, batches: LaunchBatches, at: int, *, together: bool) -> list[dict[str, Array]]:
        if not together:
            return [self.loop.step(**batches.batch(at))]
        assert isinstance(self.loop, LaunchingLoop)
        return self.loop.launch(batches)

    def _take(self, batch: Named, results: dict[str, Array]) -> None:
        """Add a step's results to the epoch's measures."""
        counts = {k: results.pop(k) for k in self.tallies}
        counted = step.taken_counts(results)
        self.info.results, self.info.tensors = split(results)
        if not math.isfinite(self.info.results[step.LOSS]):
            self._explain()
        if self.info.results.get(LOSS_SCALE, 1.0) < LEAST_SCALE:
            self._explain_scale(batch)
        self.trainer.place.advance(self.info.results, len(batch[self.names[-1]]), counts, counted)

    def _fed(self, launches: Generator[Launch]) -> ThreadFeed[Launch] | Generator[Launch]:
        """Return launches that are read and stacked on a thread while the device runs others.

        Data that can be read only once is not read ahead: a run that stops would lose batches.
        """
        if self.launching.is_single or not self.source.repeats():
            return launches
        if self._keepers():
            # While the thread waits for data that do not come, an interrupt must be able to save.
            self._own_identity()
        return ThreadFeed(launches, self._reading)

    def _launches(self, epoch: int, first: int, step: int) -> Generator[Launch]:
        """Yield the batches of each launch from a step on.

        A launch has batches of one shape, and ends where a checkpoint is due. Data that raise do so
        after the steps of the batches before.
        """
        launch: LaunchBatches | None = None
        room, kinds = 1, None
        loop = None if self.launching.is_single else self.loop
        try:
            for batch, is_last in self._batches(epoch, first):
                self._check(batch)
                if launch and (is_last or _kinds(batch) != kinds):
                    yield _finished(launch), False
                    launch = None
                if launch is None:
                    kinds = _kinds(batch)
                    if isinstance(loop, LaunchingLoop):
                        room = self._room(batch, step)
                        launch = loop.stage(room=room)
                    else:
                        launch = SingleBatch()
                launch.add(dict(zip(self.names, batch, strict=True)))
                step += 1
                if is_last or len(launch) == room:
                    yield _finished(launch), is_last
                    launch = None
        except Exception:
            if launch:
                yield _finished(launch), False
            raise
        if launch:
            yield _finished(launch), False

    def _room(self, batch: Batch, step: int) -> int:
        """Return how many steps the launch that starts after a step has at most."""
        due = [c.every_steps for c in self._keepers() if c.every_steps]
        return min([self.launching.room(batch), *(n - step % n for n in due)])

    def _say(self, line: str) -> None:
        for callback in self.callbacks:
            if isinstance(callback, Progress):
                callback.say(line)

    def _check(self, batch: Batch) -> None:
        """Check a batch's labels, and its types unless a batch of these types was checked."""
        kinds = _kinds(batch)
        if kinds not in self._kinds:
            self.model.check_types(batch)
            self._kinds.add(kinds)
        if self.model.classes is not None:
            try:
                self.model.check_labels(batch[-1])
            except InvalidInput:
                self.model.check_labels_in_source(self.source.own)
                raise

    def _batches(self, epoch: int, first: int) -> Iterator[tuple[Batch, bool]]:
        """Yield batches, and whether to update after this one even if `accumulate` is not reached.

        Only accumulation looks one batch ahead, so that stopping a run does not consume an
        iterator's next batch.
        """
        batches = self.source.epoch(epoch, first=first)
        return with_last(batches) if self.accumulates else ((b, False) for b in batches)

    def _finish_epoch(self) -> None:
        trainer, place = self.trainer, self.trainer.place
        row: Row = {"epoch": place.epoch + 1, "step": place.step, **place.measures(self.tallies)}
        state = self.loop.state()
        # Before the validation, which reads the cell's parameters.
        trainer.write_back(state)
        if self.validation is not None:
            measured = trainer.evaluate(self.validation)
            row |= {VALIDATION + k: v for k, v in measured.items()}
        place.next_epoch()
        trainer.history.rows.append(row)
        if rates := self._measured_rates():
            self.loop.load(rates)
            trainer.write_back(rates)
        self.anchor, self.start = {**state, **rates}, place.copy()
        self._call("on_epoch")

    def _go_back(self) -> None:
        """Set the position back to the start of the epoch, whose state the cell holds."""
        vars(self.trainer.place).update(vars(self.start.copy()))

    def _explain(self) -> None:
        """Raise NonFinite, after repeating the epoch up to the first bad step."""
        place, loss = self.trainer.place, self.info.results[step.LOSS]
        cause, message = self._cause()
        raise NonFinite(
            f"the loss of step {place.step + 1} (epoch {place.epoch + 1}) is {loss}; {message}; a "
            "smaller learning rate, clip_norm, or data without extremes usually helps",
            step=place.step + 1,
            cause=cause,
        )

    def _explain_scale(self, batch: Named) -> None:
        """Raise NonFinite: halving the loss scale again would not help."""
        values = {**self.loop.view(), **batch}
        cause = first_nonfinite(self.program.function, values)
        number = self.trainer.place.step + 1
        raise NonFinite(
            f"the gradients of step {number} are not finite at any loss scale (it has fallen to "
            f"{self.info.results[LOSS_SCALE]:g}), so no update was made for a long time; {cause}; "
            "use precision='float32', or keep that operator's values in range",
            step=number,
            cause=cause,
        )

    def _cause(self) -> tuple[str, str]:
        """Return the first value that was not finite, described alone and within a sentence."""
        if not self.source.repeats():
            return "", "the data cannot be iterated again to find where it began"
        if self._feed is not None:
            self._feed.close()  # one reader at a time
        first = self.start.step + 1
        for number, values in enumerate(self._replayed(), first):
            if values is not None:
                cause = first_nonfinite(self.program.function, values)
                if cause:
                    return cause, f"it began in step {number}: {cause}"
                return "", f"in step {number} the reference engine finds every value finite"
        return "", "repeating the same batches gives finite losses: the data changes between epochs"

    def _replayed(self) -> Iterator[dict[str, Array] | None]:
        """Repeat this epoch's steps: yield None while all is finite, then that step's arguments."""
        # Random keys are part of the state, so dropout draws the same masks as in the first pass.
        loop = self.program.loop(self.anchor)
        before = loop.state()
        for batch, is_last in self._batches(self.trainer.place.epoch, self.start.position):
            if is_last:
                loop.load({LEFT: np.ones((), np.int64)})
            named = dict(zip(self.names, batch, strict=True))
            results, after = loop.step(**named), loop.state()
            bad = not all(finite(a) for a in (*after.values(), *results.values()))
            yield {**before, **named} if bad else None
            if bad:
                return
            before = after


_ONCE: Final = "pass data that can be iterated in every epoch, not an iterator that ends"


def _finished(launch: LaunchBatches) -> LaunchBatches:
    launch.finish()
    return launch


def _kinds(batch: Batch) -> Any:
    return tuple([(a.dtype, a.shape) for a in batch])

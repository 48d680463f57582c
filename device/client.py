"""`FederatedClient`: a device in an application or as a process; it learns from local samples.

An event loop has one session with the cloud; a thread does one task at a time. The process may be
killed at any instant: all state is in the home, and the next client goes on from there.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from triplane.device.enrolling import enrol
from triplane.device.home import DEFAULT_HOME, DeviceHome, DeviceSettings, SessionNote
from triplane.device.samples import Source, shard_of
from triplane.device.seen_metadata import note_metadata
from triplane.device.stopping import StopToken, TaskExpired, Withdrawn
from triplane.device.tasks import KEYS, MAX_REASON_CHARS, STEPS, Task, WorkSet, work_set_of
from triplane.proto import federation_pb2 as pb
from triplane.proto.channels import connect_aio
from triplane.proto.errors import Conflict, InvalidInput, NotFound, TriplaneError, Unavailable
from triplane.proto.stream import SessionClient
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.files.pixels import as_input

if TYPE_CHECKING:
    from triplane.device.child_executor import ChildExecutor
    from triplane.device.model import ModelChoice
    from triplane.device.task_runner import InProcessExecutor
    from triplane.unified_ir.runtime.plan import Plan

logger = logging.getLogger(__name__)

T = TypeVar("T")

SOFTWARE: Final = "triplane"
IDLE_S: Final = 1.5
"""Time without work after which the newest document is settled once more; see `model.WAIT_S`."""
LAST_WRITE_S: Final = 2.0
"""Longest time for which a stop waits until the model is written."""
FIRST_WAIT_S: Final = 0.5
MAX_WAIT_S: Final = 30.0
RENEWAL_LOOK_S: Final = 3600.0
MASKING_WAIT_S: Final = 3600.0
"""Longest time for which open masked rounds delay the use of a new certificate."""
MODEL_TRIES: Final = 3
"""Attempts to read a model, because a newer one may replace it meanwhile."""
REMEMBERED: Final = 256
"""Number of tasks that are remembered as done, because an older document may still name them."""

TELLING_S: Final = 0.5
"""Time before its deadline at which a task ends, so that the cloud gets the reason in time."""
TELLING_SHARE: Final = 0.1
"""Largest share of a task's time that is reserved in this way."""
TOO_LONG: Final = "the task was not done by its deadline; fewer steps, or a longer deadline?"

_UNKNOWN_WORK: Final = WorkSet()
"""Before the first document arrives, pending updates wait, because their leases are not known."""

NO_WORK: Final[Mapping[bool | None, str]] = {
    None: "no work: no run of the cloud asks this device now",
    False: "no work: no run of the cloud asks the population of this device",
    True: "no work now: a run asks the population of this device, and other devices of it",
}
"""Log texts of a device without a task, by whether a run asks its population."""


class Graphs(Enum):
    """The process in which a client runs the graphs of its tasks.

    IN_PROCESS: in a thread; at its deadline or at `stop`, a graph ends between two of its nodes.
    CHILD: in a child with limits of memory and processor time, which is killed if necessary.
    """

    IN_PROCESS = "in process"
    CHILD = "child"


class FederatedClient:
    """A device that learns with others from its own samples.

    home: its folder. samples: see `shard_of`. population: it takes part in runs of this population.
    app: a Flower `ClientApp` of the device's owner (extra `[flower]`), for runs whose strategy
    needs one. graphs: where they run. With Graphs.CHILD, samples is a path and app is MODULE:NAME.
    x, y: the columns of the model's inputs and target in a file or folder; form: more options of
    `data.load`, such as {"window": 32} (`home.FORM`).

        client = FederatedClient("my-device", {"x": images, "y": labels}, population="cameras")
        client.enrol(token, "cloud.example:8444")     # once
        client.run()                                  # until stop(), from another thread
        client.predict(images[:1])
    """

    def __init__(
        self,
        home: Path | str = DEFAULT_HOME,
        samples: "Source | None" = None,
        *,
        population: str | None = None,
        held_out: float | None = None,
        app: Any = None,
        graphs: Graphs = Graphs.IN_PROCESS,
        x: Sequence[str] = (),
        y: Sequence[str] = (),
        form: Mapping[str, Any] | None = None,
    ) -> None:
        """Take options that are None or empty from `device.json`.

        NotFound if no samples are named.
        """
        self._home = DeviceHome(home)
        settings = self._home.settings.but(
            data=None, population=population, held_out=held_out, x=x, y=y, form=form
        )
        if samples is None and not settings.data:
            raise NotFound(
                "no samples: give arrays, a file (--data FILE), a Dataset or batches, or set "
                f"`data` in {self._home.settings_file}"
            )
        source = settings.data if samples is None else samples
        self.settings = settings
        shard = shard_of(
            source, held_out=settings.held_out, x=settings.x, y=settings.y, form=settings.form
        )
        self.examples, self.held_out_samples = shard.examples, shard.held_out_samples
        in_child = graphs is Graphs.CHILD
        self._file = _file_of(source) if in_child else None
        self._shard = None if in_child else shard
        self._app = app
        self._working: _Working | None = None
        self._stop_requested = False
        self._lock = threading.Lock()
        self._serving: tuple[ModelChoice, Plan] | None = None

    @property
    def shard(self) -> Shard:
        """The samples. Conflict if they are in a child process."""
        if self._shard is None:
            raise Conflict("the samples of this client are in its child process (Graphs.CHILD)")
        return self._shard

    @property
    def name(self) -> str:
        """The name in the device's certificate. NotFound before enrolment."""
        self._home.require_enrolled()
        return self._home.enrolled.name

    def enrol(self, token: str, cloud: str, *, root: Path | None = None) -> str:
        """Become a device of the cloud whose enrolment port is at `cloud`.

        Return the name of the device; see `enrolling.enrol`. The key is generated here and never
        leaves the home.
        """
        return enrol(self._home, self.settings, token, cloud, root).name

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Take part in runs until `stop`. Call it from one thread. ready: called at its begin."""
        asyncio.run(self.serve(ready))

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Do the same as `run` in the caller's event loop, until `stop` or cancellation."""
        self._home.require_enrolled()
        self._home.make()
        # The lock is taken before the runner starts: a second process fails here, before it touches
        # anything in the home.
        with self._home.held(), contextlib.closing(self._runner()) as runner:
            working = _Working(self._home, self.settings, runner, self._offer())
            with self._lock:
                if self._working is not None:
                    raise Conflict("this client runs already")
                self._working = working
            try:
                ready()
                if not self._stop_requested:
                    await working.run()
            finally:
                self._working, self._stop_requested = None, False

    def _runner(self) -> "InProcessExecutor | ChildExecutor":
        if self._file is None:
            from triplane.device.task_runner import InProcessExecutor

            return InProcessExecutor(self._home, self.shard, self.settings, self._app)
        from triplane.device.child_executor import ChildExecutor

        runner = ChildExecutor(self._home, self.settings, self._file, self._app)
        if self._app is not None:
            try:
                runner.start()  # reports an app that cannot be loaded before the device is ready
            except BaseException:
                runner.close()
                raise
        return runner

    def _offer(self) -> pb.Offer:
        return pb.Offer(
            population=self.settings.population,
            examples=self.examples,
            held_out=self.settings.scoring_samples(self.held_out_samples),
            software=SOFTWARE,
            app=self._app is not None,
        )

    def stop(self) -> None:
        """Let `run` return soon. It can be called from any thread or signal handler.

        If `run` has not begun, it will return at once, because its thread may only be starting.
        """
        self._stop_requested = True
        working = self._working
        if working is not None:
            working.stop()

    def choice(self) -> "ModelChoice | None":
        """Return which model this device has, and its scores; None before the first task."""
        from triplane.device.model import DeviceModel

        return DeviceModel(self._home.model).choice()

    @property
    def model(self) -> "Plan":
        """The newest plan with the better of shared and personal state. NotFound before it came."""
        with self._lock:
            # The task thread may replace the model between the choice and the load.
            for tries in range(MODEL_TRIES, 0, -1):
                choice = self.choice()
                if choice is None:
                    raise NotFound("no model yet: it comes with the first task of a run")
                try:
                    return self._load(choice)
                except (Conflict, NotFound):
                    if tries == 1:
                        raise
            raise AssertionError("the tries end with an error")

    def _load(self, choice: "ModelChoice") -> "Plan":
        """Load a model. Conflict or NotFound if a newer one has replaced it."""
        from triplane.device.model import DeviceModel
        from triplane.unified_ir.runtime.plan import Plan

        if self._serving is None or self._serving[0] != choice:
            plan = Plan.load(self._home.plans / choice.plan)
            DeviceModel(self._home.model).load_into(plan)
            self._serving = (choice, plan)
        return self._serving[1]

    def predict(self, *x: Array, **inputs: Array) -> dict[str, Array]:
        """Run the model's `predict`; see `Plan.predict`. One thread at a time may call it.

        Unsigned bytes for a float input are pixels, as in training, and are divided by 255.
        """
        model = self.model
        types = {tensor.name: tensor.dtype for tensor in model.inputs("predict")}
        only = next(iter(types.values()), "")
        return model.predict(
            *(as_input(array, only) for array in x),
            **{name: as_input(array, types.get(name, "")) for name, array in inputs.items()},
        )


class _Working:
    """One run of a client."""

    def __init__(
        self,
        home: DeviceHome,
        settings: DeviceSettings,
        runner: "InProcessExecutor | ChildExecutor",
        offer: pb.Offer,
    ) -> None:
        self._home, self._settings, self._runner = home, settings, runner
        self._name = home.enrolled.name
        self._offered = offer
        self._telling: asyncio.Task[None] | None = None
        self._session = SessionClient(
            lambda: connect_aio(home.identity),
            self._on_message,
            software=SOFTWARE,
            greeting=self._greeting,
        )
        self._work_set = self._settled = _UNKNOWN_WORK
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._runner_free = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._no_masking = asyncio.Event()
        """Set while no masked round asks this device."""
        self._no_masking.set()
        self._doing: tuple[str, StopToken] | None = None
        self._done: dict[str, None] = {}

    async def run(self) -> None:
        """Run until `stop` or cancellation."""
        sizes = {"examples": self._offered.examples, "held_out": self._offered.held_out}
        logger.info("device started", extra={"device": self._name, **sizes})
        self._note("connecting")
        tasks = [
            asyncio.create_task(work)
            for work in (self._stopped.wait(), self._session.run(), self._work(), self._renew())
        ]
        try:
            # `stop` completes the first task; any other one completes only by an error, raised
            # below.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks += [self._telling] if self._telling else []
            for task in tasks:
                task.cancel()
            if self._doing:
                self._doing[1].now()
            else:
                await self._write_model()
            self._runner.interrupt()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with self._runner_free:
                self._runner.close()
                logger.info("device stopped", extra={"device": self._name})

    async def _write_model(self) -> None:
        """Let a runner without a task write the newest state, which may wait for the next one."""
        limit = self._loop.call_later(LAST_WRITE_S, self._runner.interrupt)
        with contextlib.suppress(TriplaneError, Withdrawn):  # the model is older, as after a kill
            await self._in_runner(self._runner.write_model)
        limit.cancel()

    def _greeting(self) -> pb.Offer:
        """Return the offer, with the metadata that was verified until now."""
        offer = pb.Offer()
        offer.CopyFrom(self._offered)
        note_metadata(self._home, offer)
        return offer

    def stop(self) -> None:
        """End the run; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            # An asyncio event is not safe to set from another thread.
            self._loop.call_soon_threadsafe(self._stopped.set)

    async def _on_message(self, message: Any) -> None:
        if not isinstance(message, pb.Work):
            return
        try:
            work_set = work_set_of(
                message,
                self._name,
                max_blob_bytes=self._settings.max_blob_bytes,
                now_s=time.monotonic(),
            )
        except TriplaneError as error:
            logger.warning("work document refused", extra={"reason": str(error)})
            return
        first = self._work_set is _UNKNOWN_WORK
        if work_set.leases and (first or not self._work_set.leases):
            self._note("working")
        elif not work_set.leases and (first or _idle(work_set) != _idle(self._work_set)):
            self._note("idle", is_asked=work_set.population_asked)
            facts = {"population": self._settings.population}
            logger.info(NO_WORK[work_set.population_asked], extra=facts)
        # The document is complete: what it does not name is withdrawn.
        self._work_set = work_set
        if self._doing and self._doing[0] not in work_set.keys:
            self._doing[1].now()
        has_masking = any(task.step for task in work_set.tasks)
        (self._no_masking.clear if has_masking else self._no_masking.set)()
        self._changed.set()

    def _note(self, state: str, *, is_asked: bool | None = None) -> None:
        population = self._settings.population
        self._home.note_session(SessionNote(state, population, time.time(), is_asked))

    async def _work(self) -> None:
        """Repeatedly settle updates by a document, then do one task of the same document.

        A document is read once per turn and passed on as a value. `_on_message` may replace it at
        any await, and a task of a document that was not settled would overwrite an update that
        counted.
        """
        wait_s = FIRST_WAIT_S
        while True:
            # Clear before reading: a document that arrives afterwards ends the wait below at once.
            self._changed.clear()
            work_set = self._work_set
            try:
                answer = await self._next(work_set)
                wait_s = FIRST_WAIT_S
                self._tell_waits("")
            except Withdrawn:
                continue
            except Unavailable as error:
                logger.info("task waits", extra={"reason": str(error), "seconds": wait_s})
                self._tell_waits(str(error))
                await self._pause(wait_s)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
                continue
            if answer is None:
                await self._idle(work_set)
            else:
                await self._contribute(*answer)

    def _tell_waits(self, reason: str) -> None:
        """Send the offer again if the reason why the device cannot work has changed."""
        cut = reason[:MAX_REASON_CHARS]
        if cut == self._offered.waits:
            return
        offer = pb.Offer()
        # A new message: the old one may be queued or on its way.
        offer.CopyFrom(self._offered)
        offer.waits = cut
        self._offered = offer
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_offer())

    async def _tell_offer(self) -> None:
        """Send the offer until the newest one is acknowledged."""
        sent = None
        while sent is not self._offered:
            sent = self._offered
            await self._session.send(sent)

    async def _idle(self, work_set: WorkSet) -> None:
        """Wait for the next document; after a while let the runner write what it holds back."""
        await self._pause(IDLE_S)
        if not self._changed.is_set() and work_set is self._settled:
            with contextlib.suppress(Unavailable, Withdrawn):  # nothing is lost but time
                await self._in_runner(lambda: self._runner.settle(work_set))
        await self._changed.wait()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _next(self, work_set: WorkSet) -> tuple[str, pb.Contribution] | None:
        """Settle a document, then do the first of its tasks that was neither done nor withdrawn.

        Return its key and its contribution.
        It does not wait until the newest document is settled, because that might never end if the
        cloud sends documents faster than the device settles.
        """
        refused = [x for x in work_set.refused if x.lease.hex() not in self._done]
        if not refused:
            for task in _urgent(work_set.tasks, self._done):
                if task.key not in self._done and task.key in self._work_set.keys:
                    answer = await self._do(task, work_set)
                    return None if answer is None else (task.key, answer)
        await self._settle(work_set)
        return (refused[0].lease.hex(), refused[0]) if refused else None

    async def _do(self, task: Task, work_set: WorkSet) -> pb.Contribution | None:
        """Settle a document and do a task of it; None if it was withdrawn before it was begun."""
        left_s = task.until_s - time.monotonic()
        # Leave time to decline: a lease that expires silently tells the operator nothing.
        left_s -= min(TELLING_S, TELLING_SHARE * left_s)
        stop = StopToken(time.monotonic() + left_s)
        # The token's own time is checked between steps; this also ends a graph that is running.
        deadline = self._loop.call_later(left_s, stop.expire)
        self._doing = (task.key, stop)
        wanted = [
            blob
            for other in work_set.tasks
            for blob in (other.plan, other.state, other.message)
            if blob is not None
        ]

        def settle_and_do() -> pb.Contribution | None:  # in one turn of the thread
            self._settle_now(work_set)
            if stop.is_withdrawn:
                return None
            logger.log(_level(task.step), "task begun", extra=_facts(task))
            return self._runner.do(task, stop, wanted)

        try:
            return await self._in_runner(settle_and_do)
        except TaskExpired:
            logger.warning("task not done by its deadline", extra=_facts(task))
            return task.decline(TOO_LONG)
        except Withdrawn:  # not remembered as done: a later document may ask for it again
            logger.info("task withdrawn", extra=_facts(task))
            raise
        finally:
            deadline.cancel()
            self._doing = None

    async def _contribute(self, key: str, contribution: pb.Contribution) -> None:
        # Remember the key only once the cloud has it. A repeated contribution is harmless, because
        # the cloud takes one for each.
        await self._session.send(contribution)
        self._remember(key)
        kind = contribution.WhichOneof("outcome")
        facts = {"run": contribution.run, "kind": kind}
        logger.log(_level(key.partition(".")[2]), "contributed", extra=facts)

    async def _settle(self, work_set: WorkSet) -> None:
        """Apply updates that counted, and forget those whose lease is over."""
        if work_set is not self._settled:
            await self._in_runner(lambda: self._settle_now(work_set))

    def _settle_now(self, work_set: WorkSet) -> None:
        """Do what `_settle` does, in the runner's thread."""
        if work_set is not self._settled and not _settles_alike(work_set, self._settled):
            self._runner.settle(work_set)
        self._settled = work_set

    async def _in_runner(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; the runner stays locked until the thread ends."""
        async with self._runner_free:
            doing = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                # A thread cannot be cancelled. The lock must outlive the cancellation, or a second
                # task would use the runner beside it.
                return await asyncio.shield(doing)
            except asyncio.CancelledError:
                if self._doing:
                    self._doing[1].now()
                await asyncio.wait({doing})
                if (error := doing.exception()) and not isinstance(error, Withdrawn):
                    logger.warning("work ended while stopping", extra={"reason": str(error)})
                raise

    def _remember(self, key: str) -> None:
        self._done[key] = None
        while len(self._done) > REMEMBERED:
            del self._done[next(iter(self._done))]

    async def _renew(self) -> None:
        while True:
            if time.time() >= self._home.enrolled.renew_at_s:
                try:
                    await asyncio.to_thread(self._home.renew)
                    # A new process for tasks would have to leave the masked rounds that are open.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(MASKING_WAIT_S):
                            await self._no_masking.wait()
                    async with self._runner_free:
                        self._runner.use_new_certificate()
                    logger.info("certificate renewed")
                except TriplaneError as error:
                    logger.warning("certificate not renewed", extra={"reason": str(error)})
            await asyncio.sleep(RENEWAL_LOOK_S)


def _urgent(tasks: Sequence[Task], done: Container[str]) -> Sequence[Task]:
    """Return the steps of masked rounds in which nothing is learned; all tasks if there is none.

    The other devices of such a round wait for seconds. A device that learns for another run in the
    meantime would be lost to the round, which spends it for this state. done: keys of tasks; after
    its last step a round needs this device no more.
    """
    steps = [task for task in tasks if task.step not in {"", KEYS}]
    return [task for task in steps if task.step != STEPS[-1] or task.key not in done] or tasks


def _settles_alike(work_set: WorkSet, settled: WorkSet) -> bool:
    """Return whether settling changes nothing: a masked round has a document for each step."""
    return bool(
        work_set.tasks and work_set.leases == settled.leases and work_set.settled == settled.settled
    )


def _level(step: str) -> int:
    """Return the level of log messages about a task: a round has one pair of them, not five."""
    return logging.INFO if step in {"", KEYS} else logging.DEBUG


def _facts(task: Task) -> dict[str, object]:
    facts = {"run": task.work.run, "round": task.work.round, "kind": task.kind}
    return facts | ({"step": task.step} if task.step else {})


def _file_of(source: "Source") -> Path:
    if isinstance(source, str | Path):
        return Path(source).expanduser().absolute()
    raise InvalidInput(
        "a child process reads its samples from a file or folder; give its path, or let graphs run "
        "in this process (Graphs.IN_PROCESS)"
    )


def _idle(work_set: WorkSet) -> tuple[bool, bool | None]:
    """Return the facts about an idle device that are logged when they change."""
    return not work_set.leases, work_set.population_asked

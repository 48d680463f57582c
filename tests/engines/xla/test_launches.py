"""Launches: what feeds them, what they may be killed in, and when they are given up."""

import os
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.support.xla_training import At, drawn_samples

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.xla import cohort
from triplane.unified_ir.engines.xla.cohort import Cohort, CohortClient
from triplane.unified_ir.engines.xla.door import exact
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.engines.xla.staging import Staging
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.train import feeding, fitting
from triplane.unified_ir.train.launching import MEASURED
from triplane.unified_ir.train.snapshot import read

QUIET: Any = {"progress": "none"}
VICTIM = Path(__file__).with_name("killed_training.py")
X, Y, BATCHES = drawn_samples(64)


def trainer(*callbacks, steps_per_launch=4, **options):
    nn.seed(0)
    chosen: Any = {"engine": "xla", "optimizer": optim.SGD(0.1, momentum=0.9)} | options
    return train.Trainer(
        nn.Dense(3, 2), loss=nn.SoftmaxCrossEntropy(), callbacks=callbacks,
        steps_per_launch=steps_per_launch, **chosen,
    )  # fmt: skip


def same_bits(a, b):
    a, b = a.state(), b.state()
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def alike(a, b):
    a, b = a.state(), b.state()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6, err_msg=name)


class Threads:
    """Batches that record which thread reads them, and whether two do at once."""

    def __init__(self):
        self.readers, self.reading, self.at_once = [], 0, 0

    def __iter__(self):
        for batch in BATCHES:
            self.readers.append(threading.current_thread().name)
            self.reading += 1
            self.at_once = max(self.at_once, self.reading)
            threading.Event().wait(0.001)  # gives another reader the time to come in
            self.reading -= 1
            yield batch


@pytest.mark.long
class TestFeeding:
    def test_one_thread_at_a_time_reads_the_data(self):
        """Also where a snapshot within the epoch reads the data for the run's identity."""
        read_ahead = Threads()
        run = trainer(At(4, lambda run: run.state()))
        run.fit(read_ahead, 2, **QUIET)
        assert read_ahead.readers.count("triplane-feed") >= 2 * len(BATCHES)
        assert read_ahead.at_once == 1
        whole = trainer()
        whole.fit(BATCHES, 2, **QUIET)
        same_bits(run, whole)

    def test_a_loss_that_is_not_finite_is_traced_with_one_reader(self):
        data = Threads()
        bad = [*BATCHES[:9], (X[:2] * np.float32(np.inf), Y[:2]), *BATCHES[9:]]
        data.__class__ = type("Bad", (Threads,), {"__iter__": lambda _: iter(bad)})
        with pytest.raises(train.NonFinite, match="began in step 10"):
            trainer().fit(data, 1, **QUIET)

    def test_data_that_fill_one_array_again_and_again_are_copied(self):
        class Refills:
            def __iter__(self):
                x, y = np.empty_like(X[:2]), np.empty_like(Y[:2])
                for batch in BATCHES:
                    x[:], y[:] = batch
                    yield x, y

        run, whole = trainer(), trainer()
        run.fit(Refills(), 2, **QUIET)
        whole.fit(BATCHES, 2, **QUIET)
        same_bits(run, whole)

    def test_an_iterator_keeps_what_a_stopped_run_has_not_trained_on(self):
        left = iter(BATCHES)
        trainer(At(4, lambda run: run.stop())).fit(left, 1, **QUIET)
        assert len(list(left)) == len(BATCHES) - 4

    def test_the_place_in_a_checkpoint_is_that_of_the_steps_not_of_the_reading(self, tmp_path):
        keeper = train.Checkpoint(tmp_path)
        run = trainer(At(6, lambda run: run.stop()))
        run.fit((X, Y), 1, batch_size=2, checkpoint=keeper, **QUIET)
        kept = keeper.newest()
        assert kept is not None
        assert (kept.place.step, kept.place.position) == (8, 8)
        resumed, whole = trainer(), trainer()
        resumed.fit((X, Y), 1, batch_size=2, checkpoint=keeper, **QUIET)
        whole.fit((X, Y), 1, batch_size=2, **QUIET)
        same_bits(resumed, whole)

    def test_an_interrupt_saves_while_the_thread_waits_for_data_that_do_not_come(
        self, monkeypatch, tmp_path
    ):
        waits, released, came = threading.Event(), threading.Event(), []

        class Stalls:
            def __iter__(self):
                yield from BATCHES[:4]
                waits.set()
                came.append(released.wait(20))

        def interrupt(_):
            assert waits.wait(60)
            raise KeyboardInterrupt

        monkeypatch.setattr(feeding, "JOIN_S", 0.01)
        keeper = train.Checkpoint(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            trainer(At(4, interrupt)).fit(Stalls(), 1, checkpoint=keeper, **QUIET)
        assert not came
        released.set()
        kept = keeper.newest()
        assert kept is not None
        assert kept.place.step == 4

    def test_accumulated_gradients_are_not_lost_at_the_end_of_an_epoch(self):
        run, whole = trainer(accumulate=5), trainer(accumulate=5, steps_per_launch=1)
        run.fit((X, Y), 2, batch_size=2, **QUIET)
        whole.fit((X, Y), 2, batch_size=2, **QUIET)
        alike(run, whole)


def killed_after(folder, steps):
    """Start the victim, let it take some steps, and kill it within the next."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, VICTIM, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=env,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        for said in process.stdout:
            if steps is not None and int(said) >= steps:
                os.kill(process.pid, signal.SIGKILL)
            process.stdin.write("\n")
            process.stdin.flush()
    return process.returncode


@pytest.mark.long
def test_a_run_killed_within_launches_ends_with_the_bits_of_one_undisturbed(tmp_path):
    for steps in (5, 14):
        assert killed_after(tmp_path, steps) == -signal.SIGKILL
    assert killed_after(tmp_path, None) == 0
    ours, theirs = (read(tmp_path / f"{n}.tpc") for n in ("final", "undisturbed"))
    assert ours.place.step == theirs.place.step == 33
    for name, array in theirs.state.items():
        np.testing.assert_array_equal(ours.state[name], array, err_msg=name)


class Clock:
    """A clock by which a step takes `launch` seconds in a launch, and `step` alone."""

    def __init__(self, monkeypatch, launch, step):
        self.now, self.launch, self.step = 0.0, launch, step
        self.launches, self.steps = count(), count()
        own = fitting.Fit._steps

        def steps(fit, batches, at, *, together):
            self.now += self.launch * len(batches) if together else self.step
            next(self.launches if together else self.steps)
            return own(fit, batches, at, together=together)

        monkeypatch.setattr(fitting.Fit, "_steps", steps)
        monkeypatch.setattr(fitting, "perf_counter", lambda: self.now)


@pytest.mark.long
class TestAuto:
    @pytest.mark.parametrize(("launch", "faster"), [(0.5, True), (99.0, False)])
    def test_the_way_that_measures_slower_is_given_up(self, monkeypatch, launch, faster, capfd):
        whole = trainer(steps_per_launch=1)
        whole.fit((X, Y), 10, batch_size=2, **QUIET)
        clock = Clock(monkeypatch, launch, step=1.0)
        run = trainer(steps_per_launch="auto")
        run.fit((X, Y), 10, batch_size=2, progress="lines")
        assert run.launch_choice.together is faster
        # An epoch has 32 batches, so it is one launch; two of them compile.
        turns = MEASURED + 1
        launches = 10 - turns if faster else turns
        assert (next(clock.launches), next(clock.steps)) == (launches, 32 * (10 - launches))
        lines = [x for x in capfd.readouterr().err.splitlines() if "several steps in one" in x]
        assert len(lines) == 1
        assert ("goes on with launches of several" in lines[0]) is faster
        alike(run, whole)

    def test_a_resumed_run_keeps_to_the_decision(self, monkeypatch, tmp_path):
        run = trainer(steps_per_launch="auto")
        with monkeypatch.context() as patched:
            Clock(patched, launch=99.0, step=1.0)
            run.fit((X, Y), 8, batch_size=2, checkpoint=tmp_path, **QUIET)
        clock = Clock(monkeypatch, launch=0.5, step=99.0)
        resumed = trainer(steps_per_launch="auto")
        resumed.fit((X, Y), 10, batch_size=2, checkpoint=tmp_path, **QUIET)
        assert resumed.launch_choice.together is False
        assert (next(clock.launches), next(clock.steps)) == (0, 64)

    def test_single_steps_stop_at_once_and_their_state_can_be_asked_for(self):
        asked: list[Any] = []

        def ends(run):
            asked.append(run.weights())
            run.stop()

        run = trainer(At(2, ends), steps_per_launch="auto")
        run.launch_choice.together = False
        run.fit((X, Y), 1, batch_size=2, **QUIET)
        assert run.place.step == 2
        np.testing.assert_array_equal(asked[0]["weight"], run.state()["weight"])


def doubled():
    """A step whose state grows by its batch."""
    build = Build(TABLE, "step")
    with build:
        s, x = (build.param(n, TensorSpec((3,))) for n in "sx")
        return build.finish({"r": s + x, "s": s + x})


@pytest.mark.long
class TestTheUsersOwnJax:
    def test_a_guard_against_transfers_does_not_hold_for_the_engine(self):
        whole, run = trainer(), trainer()
        whole.fit((X, Y), 1, batch_size=2, **QUIET)
        config: Any = jax.config
        before = config.jax_transfer_guard
        config.update("jax_transfer_guard", "disallow_explicit")
        try:
            run.fit((X, Y), 1, batch_size=2, **QUIET)
            loop = engine("xla").compile(doubled(), donate=["s"]).loop({"s": np.zeros(3, "f")})
            assert loop.step(x=np.ones(3, "f"))["r"].tolist() == [1, 1, 1]
            loop.load({"s": np.zeros(3, "f")})
            assert loop.state()["s"].tolist() == loop.view()["s"].tolist() == [0, 0, 0]
            assert config.jax_transfer_guard == "disallow_explicit"
        finally:
            config.update("jax_transfer_guard", before)
        same_bits(run, whole)


@pytest.mark.parametrize("steps", [2**40, 2**70])
def test_more_batches_than_the_host_has_memory_for_are_refused(steps):
    with pytest.raises(InvalidInput, match="bytes, which the host does not have; use fewer steps"):
        Staging().arrays([((steps, 4, 1024), np.dtype("f4"))])


def test_no_memory_left_is_explained(monkeypatch):
    """A device without memory is not at hand; the error is XLA's own."""

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    whole = Cohort(doubled(), ["s"])
    monkeypatch.setattr(whole, "_program", full)
    client = CohortClient({"s": np.zeros(3, "f")}, [{"x": np.ones(3, "f")}])
    with pytest.raises(
        InvalidInput,
        match=r"could not run step for 1 devices in one launch: RESOURCE_EXH.*fewer steps",
    ):
        whole.run({}, [client])


@pytest.mark.parametrize(("batches", "sizes"), [(1, [4, 4, 2]), (4, [1] * 10)])
def test_a_launch_holds_as_many_clients_as_their_states_and_batches_allow(
    monkeypatch, batches, sizes
):
    """A state and a batch are 12 bytes each; launches are padded to powers of four."""
    launched: list[int] = []
    own = CohortClient({"s": np.zeros(3, "f")}, [{"x": np.ones(3, "f")}] * batches)

    def launch(_, clients):
        launched.append(len(clients))
        return clients

    whole = Cohort(doubled(), ["s"])
    monkeypatch.setattr(cohort, "MAX_BYTES", 130)
    monkeypatch.setattr(whole, "_launch", launch)
    whole.run({"s": np.zeros(3, "f")}, [own] * 10)
    assert launched == sizes


@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_is_asked_of_xla_for_the_program_alone(monkeypatch, deterministic):
    """A GPU is not at hand: its option reaches the compiler, which accepts it on a CPU too."""
    asked, own = [], jax.jit

    def recorded(*args, **options):
        asked.append(options.get("compiler_options"))
        return own(*args, **options)

    monkeypatch.setattr(jax, "jit", recorded)
    program = XlaEngine(deterministic=deterministic).compile(doubled(), donate=["s"])
    program.loop({"s": np.zeros(3, "f")}).step(x=np.ones(3, "f"))
    wanted = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    (options,) = [o for o in asked if o]
    assert (wanted.items() <= options.items()) == deterministic
    assert "xla_gpu_deterministic_ops" not in os.environ.get("XLA_FLAGS", "")


@pytest.mark.long
@pytest.mark.parametrize("lead", [(), (4,)], ids=["one step", "a launch"])
def test_products_of_float32_ask_for_all_their_bits(lead):
    """A GPU would use TF32 otherwise; none is at hand, so this reads what XLA is asked."""
    run = trainer()
    run.prepare(X[:2], Y[:2])
    program: Any = run.training_program()
    state = [run.state()[n] for n in run.state_names(program.function)]
    batch = [np.zeros((*lead, *a.shape), a.dtype) for a in (X[:2], Y[:2])]
    with exact():
        text = program._for_shapes(batch, *lead or (None,)).call.lower(state, batch).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(line.count("HIGHEST") == 2 for line in products), products


@pytest.mark.long
def test_float16_keeps_float32_weights_and_updates_what_float16_would_drop():
    """An update of 2^-13 of a weight is half of float16's last place, so it would be lost."""
    run = trainer(optimizer=optim.SGD(2.0**-12), precision="float16")
    before = run.state()
    run.fit((X, Y), 1, batch_size=2, **QUIET)
    after = run.state()
    assert after["weight"].dtype == np.float32
    moved = after["weight"] != before["weight"]
    assert moved.all()
    assert (after["weight"].astype(np.float16) == before["weight"].astype(np.float16)).any()
    assert after["optimizer.scale"] > 1

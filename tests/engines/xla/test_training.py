"""Training on XLA: the same run as on other engines, in launches, over devices, across a stop."""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support.xla_training import Net, digits

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli.train import command
from triplane.unified_ir.engines.xla import door
from triplane.unified_ir.engines.xla.devices import Devices
from triplane.unified_ir.engines.xla.engine import XlaEngine

QUIET: Any = {"progress": "none"}


class Words(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.head = nn.Dense(4, 2)

    def construct(self, x):
        return self.head(self.table(x))


def trained(samples, cell=Net, epochs=2, batch_size=16, fit=None, **options):
    """The trainer and the loss of each step."""
    nn.seed(3)
    record = train.Record()
    chosen: Any = {"engine": "xla", "optimizer": optim.SGD(0.05, momentum=0.9)} | options
    trainer = train.Trainer(
        cell(), loss=nn.SoftmaxCrossEntropy(), seed=1, callbacks=[record], **chosen
    )
    trainer.fit(samples, epochs, batch_size=batch_size, **QUIET, **(fit or {}))
    return trainer, [row["loss"] for row in record.steps]


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.slow
def test_a_run_is_the_run_of_the_default_engine():
    samples = digits(0, 200)
    ours, losses = trained(samples)
    others, wanted = trained(samples, engine="onnx")
    np.testing.assert_allclose(losses, wanted, rtol=1e-4, atol=1e-4)
    assert losses[-1] < losses[0]
    held_out = digits(200, 300)
    assert ours.evaluate(held_out) == pytest.approx(others.evaluate(held_out), abs=1e-3)
    np.testing.assert_allclose(
        ours.predict(held_out[0]), others.predict(held_out[0]), rtol=1e-3, atol=1e-3
    )


@pytest.mark.long
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path):
    samples = digits(0, 100)
    straight, _ = trained(samples, epochs=3)
    trained(samples, epochs=1, fit={"checkpoint": tmp_path})
    resumed, _ = trained(samples, epochs=3, fit={"checkpoint": tmp_path})
    same_bits(resumed.state(), straight.state())


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_follows_single(precision):
    samples = digits(0, 96)
    _, single = trained(samples)
    _, half = trained(samples, precision=precision)
    np.testing.assert_allclose(half, single, rtol=5e-2, atol=5e-2)
    assert half != single


class TestLaunches:
    @pytest.mark.long
    def test_they_take_the_steps_that_single_ones_take(self):
        samples = digits(0, 100)  # 6 batches of 16 and one of 4
        one, single = trained(samples)
        many, launched = trained(samples, steps_per_launch=4)
        np.testing.assert_allclose(launched, single, rtol=1e-5, atol=1e-5)
        assert many.place.step == one.place.step == 14

    @pytest.mark.long
    def test_they_end_where_a_checkpoint_is_due_which_resumes_to_the_same_bits(self, tmp_path):
        samples = digits(0, 96)
        keeper = train.Checkpoint(tmp_path, every_steps=4, keep=9)
        straight, _ = trained(samples, epochs=2, steps_per_launch=3, fit={"checkpoint": keeper})
        assert {4, 8, 12} <= {int(p.stem.split("-")[-1]) for p in keeper.files()}
        for path in keeper.files()[-2:]:
            path.unlink()
        resumed, _ = trained(samples, epochs=2, steps_per_launch=3, fit={"checkpoint": keeper})
        same_bits(resumed.state(), straight.state())

    @pytest.mark.long
    def test_state_within_a_launch_cannot_be_asked_for(self):
        class Asks(train.Callback):
            def on_step(self, run):
                run.state()

        trainer = train.Trainer(
            Net(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1), engine="xla",
            steps_per_launch=3, callbacks=[Asks()],
        )  # fmt: skip
        with pytest.raises(InvalidInput, match="2 steps further; ask for it in on_epoch"):
            trainer.fit(digits(0, 64), 1, batch_size=16, **QUIET)

    @pytest.mark.slow
    def test_a_refused_batch_leaves_the_run_after_the_step_before_it(self):
        x, y = np.tile(np.arange(5), 12), np.tile([0, 1], 30)
        before, _ = trained((x[:20], y[:20]), cell=Words, epochs=1, batch_size=10)
        x[35] = 9
        batches = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 60, 10)]
        nn.seed(3)
        trainer = train.Trainer(
            Words(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.05, momentum=0.9),
            engine="xla", steps_per_launch=6, seed=1,
        )  # fmt: skip
        with pytest.raises(InvalidInput, match=r"index 9 at \[5\] is out of range"):
            trainer.fit(batches, 1, **QUIET)
        assert trainer.place.step == 3
        good, _ = trained(batches[:3], cell=Words, epochs=1)
        same_bits(
            {k: v.round(5) for k, v in trainer.state().items()},
            {k: v.round(5) for k, v in good.state().items()},
        )
        assert before.place.step == 2

    def test_other_engines_refuse_them(self):
        with pytest.raises(InvalidInput, match="needs the engine 'xla'"):
            trained(digits(0, 32), engine="onnx", steps_per_launch=2)
        with pytest.raises(InvalidInput, match=r"a number >= 1 or \"auto\", got 0"):
            trained(digits(0, 32), steps_per_launch=0)


class TestMesh:
    def test_a_mesh_without_enough_devices_is_refused(self):
        with pytest.raises(InvalidInput, match=r"data=8 needs 8 devices, and JAX finds 1 \(CPU\)"):
            XlaEngine(mesh={"data": 8})

    @pytest.mark.parametrize(
        ("mesh", "why"),
        [
            ({"data": 0}, "devices >= 1, got 0"),
            ({"data": 1.0}, "devices >= 1, got 1.0"),
            ({}, "give one, such as data=2"),
            ({"data": 1, "modle": 1}, "the axes data, modle; did you mean 'modle'"),
        ],
    )
    def test_axes_that_do_not_exist_are_refused(self, mesh, why):
        with pytest.raises(InvalidInput, match=why):
            XlaEngine(mesh=mesh, shard={"*.weight": ("model", None)})

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"mesh": 4}, "mesh is a dictionary"),
            ({"mesh": {"data": 1}, "shard": ["*"]}, "shard is a dictionary"),
            ({"mesh": {"data": 1}, "shard": {"*": "data"}}, "for each of its axes, .* got 'data'"),
            ({"mesh": {"data": 1}, "shard": {"*": ("data", "data")}}, "twice over 'data'"),
            ({"parallel": "auto", "devices": 0}, "devices is a whole number >= 1, got 0"),
            ({"parallel": "auto", "devices": -1}, "devices is a whole number >= 1, got -1"),
            ({"parallel": "auto", "memory_bytes": "4"}, "memory_bytes is a whole number >= 1"),
            ({"parallel": "auto", "topology": "x.json"}, r"read_topology\(PATH\)"),
        ],
        ids=str,
    )
    def test_options_of_the_wrong_form_are_refused(self, options, why):
        with pytest.raises(InvalidInput, match=why):
            XlaEngine(**options)

    def test_a_pattern_that_splits_nothing_is_said_once(self):
        devices = Devices({"data": 1}, {"*.weight": (None, None, "data")})
        lines: list[str] = []
        devices.say = lines.append
        for _ in range(2):
            devices._say_unsplit({"head.weight": (4, 2), "optimizer.m.head.weight": (4, 2)})
        (line,) = lines
        assert line.startswith("shard '*.weight' splits none of the 2 tensors of such names, such")

    def test_state_that_does_not_exist_is_refused(self):
        engine = XlaEngine(mesh={"data": 1}, shard={"hiden.weight": ("data",)})
        with pytest.raises(
            InvalidInput, match=r"no state has such a name; did you mean 'hidden\.w"
        ):
            trained(digits(0, 32), engine=engine)

    @pytest.mark.long
    def test_eight_and_six_devices_learn_what_one_learns(self, tmp_path):
        """Batches of 48, and a last one of 4 that neither number divides."""
        script = tmp_path / "run.py"
        script.write_text(MESH)
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
        ran = subprocess.run(
            [sys.executable, script], env=env, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.splitlines()[-1] == "8 of 8 x CPU, for the mesh data=8"


MESH = """
import io
import numpy as np
from triplane.unified_ir import data, nn, ops, optim, train
from triplane.unified_ir.engines.xla.engine import XlaEngine

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Dense(4 * 36, 10)
    def construct(self, x):
        return self.head(self.drop(ops.flatten(ops.relu(self.norm(self.conv(x))))))

held = np.load(data.__path__[0] + "/digits.npz")
x = held["x"].astype(np.float32).reshape(-1, 1, 8, 8)[:148] / 16
y = held["y"].astype(np.int64)[:148]

def losses(engine, progress="none", **options):
    nn.seed(0)
    record = train.Record()
    trainer = train.Trainer(
        Net(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.05, momentum=0.9),
        engine=engine, callbacks=[record], **options)
    trainer.fit((x, y), 3, batch_size=48, progress=progress)
    return np.array([row["loss"] for row in record.steps]), trainer.state()

one, state = losses("xla")
SPLIT = {"mesh": {"data": 4, "model": 2}, "shard": {"head.weight": (None, "model")}}
ZERO = {"mesh": {"data": 8}, "shard": {"optimizer.*": ("data",)}}
for made, options in (
    (SPLIT, {}), (ZERO, {}), ({"mesh": {"data": 6}}, {}),
    ({"mesh": {"data": 8}}, {"steps_per_launch": 3}),
):
    engine = XlaEngine(**made)
    progress = train.Progress("lines", stream=io.StringIO())
    split, after = losses(engine, progress, **options)
    # The last batch of each of the three epochs has 4 rows.
    wanted = 0 if made is SPLIT else 1
    assert progress.stream.getvalue().count("a batch of 4 rows does not divide by data=") == wanted
    np.testing.assert_allclose(split, one, rtol=2e-4, atol=2e-4)
    for name in state:
        np.testing.assert_allclose(after[name], state[name], rtol=1e-2, atol=2e-3, err_msg=name)
    print(engine.devices)

bad = XlaEngine(mesh={"data": 3}, shard={"head.weight": ("data",)})
try:
    losses(bad)
except ValueError as error:
    assert "does not divide" in str(error), error
else:
    raise AssertionError("10 classes do not divide by 3")
"""


def test_the_callers_own_jax_keeps_its_settings():
    import jax

    trained(digits(0, 32), epochs=1)
    assert jax.numpy.arange(3).dtype == np.int32
    assert not jax.config.read("jax_enable_x64")


def test_strict_settings_of_the_caller_do_not_reach_the_engine():
    import jax

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        nn.seed(3)
        trainer = train.Trainer(
            nn.Dense(3, 2), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1), engine="xla"
        )
        trainer.fit((x, np.array([0, 1, 1, 0])), 1, batch_size=2, **QUIET)
    assert trainer.place.step == 2


def test_the_commands_options(tmp_path):
    out = tmp_path / "m.tpm"
    common = ["zoo:lenet", "--data", "digits", "--epochs", "1", "--out", str(out)]
    wrong = {
        "--mesh data=2": "--mesh, --shard, --parallel, --buckets and --stages are for --engine xla",
        "--engine xla --mesh data": r"--mesh is AXIS=N,\.\., got 'data'",
        "--engine xla --mesh data=1,data=1": r"--mesh is AXIS=N,\.\., got 'data' twice",
        "--engine xla --mesh data=nan": "--mesh data is a number of devices, as data=4, got 'nan'",
        "--engine xla --mesh data=2.5": "--mesh data is a number of devices, as data=4, got '2.5'",
        "--engine xla --mesh model=2": "nothing is split over the axis 'model' of the mesh",
        "--engine xla --mesh data=1 --shard x": r"--shard is PATTERN=AXIS,\.\., got 'x'",
        "--engine xla --mesh data=1 --shard x=data --shard x=-": "got 'x' twice",
        "--engine xla --devices 2": "--devices belongs to --parallel auto",
        "--deterministic": "--deterministic belongs to --engine xla",
        "--engine xla --steps-per-launch 0": r"a number from 1 to 999999999, .* got '0'",
        "--engine xla --steps-per-launch many": r"a number from 1 to 999999999, .* got 'many'",
    }
    for words, why in wrong.items():
        refused = CliRunner().invoke(command, [*common, *words.split()])
        assert re.search(why, str(refused.exception or refused.output)), words


def test_a_user_without_a_home_directory_keeps_no_programs(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(door, "_OWN", True)
    kept = door.jax.config.jax_compilation_cache_dir
    door.jax.config.update("jax_compilation_cache_dir", None)
    try:
        door.keep_programs()
        assert door.jax.config.jax_compilation_cache_dir is None
    finally:
        door.jax.config.update("jax_compilation_cache_dir", kept)

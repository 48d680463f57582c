"""Accumulation, half precision, loss scales, averages of weights: what a step adds around it."""

from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import load, nn, ops, optim, train
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import as_tensor
from triplane.unified_ir.runtime import Session

from .models import QUIET, bits, data, trainer


def dense():
    return nn.Sequential(nn.Dense(4, 8), nn.Tanh(), nn.Dense(8, 3))


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_accumulated_batches_are_one_large_batch(name):
    """8 batches of 6 and one of 2, by fours, are batches of 24, 24 and 2 in the same order."""
    large = trainer(cell=dense, clip_norm=0.5, average=0.9, engine=name)
    large.fit(data(), 3, batch_size=24, **QUIET)
    small = trainer(cell=dense, clip_norm=0.5, average=0.9, engine=name, accumulate=4)
    small.fit(data(), 3, batch_size=6, **QUIET)
    expected, found = large.state(), small.state()
    assert found["optimizer.step"] == expected["optimizer.step"] == 9
    for k, array in expected.items():
        np.testing.assert_allclose(found[k], array, rtol=2e-5, atol=2e-7, err_msg=k)
    assert found["optimizer.left"] == 4
    assert found["optimizer.rows"] == 0


class Everything(nn.Cell):
    """Products of every kind, normalization, a scan, a product hidden in a body."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.rnn, self.head = nn.LSTM(16, 8), nn.Dense(8, 3)

    def construct(self, x):
        y = ops.max_pool(ops.relu(self.norm(self.conv(x))), 2)
        rows = y.transpose(0, 2, 1, 3).reshape(-1, 4, 16)
        return self.head(self.rnn(rows)[1][0])


def images(n=32):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((n, 1, 8, 8)).astype(np.float32)
    return x, (x[:, 0, :4].mean((1, 2)) > 0).astype(np.int64)


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_half_precision_follows_single(name):
    losses = {}
    for precision in ("float32", "float16", "bfloat16"):
        record = train.Record()
        made = trainer(cell=Everything, precision=precision, engine=name, callbacks=[record])
        made.fit(images(), 3, batch_size=8, **QUIET)
        losses[precision] = [row["loss"] for row in record.steps]
        assert {a.dtype for k, a in made.state().items() if "weight" in k} == {np.dtype("f4")}
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=5e-3, atol=5e-3)
    assert losses["float16"] != losses["float32"]


class Looks(nn.Cell):
    """Attention with and without a mask: one has a form in one kernel."""

    def __init__(self, *, masked):
        super().__init__()
        self.layer, self.head, self.masked = nn.MultiheadAttention(8, 2), nn.Dense(8, 3), masked

    def construct(self, x):
        y = x[:, 0]
        mask = y[:, :, 0] > 2.0 if self.masked else None
        return self.head(self.layer(y, key_padding_mask=mask, causal=True).mean([1]))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_a_mask_stays_one_node_in_half_precision(masked):
    records = {}
    for precision in ("float32", "float16"):
        records[precision] = train.Record()
        made = trainer(
            cell=lambda: Looks(masked=masked), precision=precision, callbacks=[records[precision]]
        )
        made.fit(images(), 3, batch_size=8, **QUIET)
    single, half = ([row["loss"] for row in records[k].steps] for k in ("float32", "float16"))
    np.testing.assert_allclose(half, single, rtol=5e-3)
    nodes = {n.op.name: n for n in made.train_function().walk()}
    wanted = set() if masked else {"PlainAttention", "PlainAttentionGradient"}
    assert wanted == {name for name in nodes if "Attention" in name}
    assert all(str(v.type.dtype) == "float16" for k in wanted for v in nodes[k].inputs)


def test_the_reference_engine_has_attention_of_bfloat16():
    """It also names the first value that is not finite, whichever engine trains."""
    losses = {}
    for precision in ("float32", "bfloat16"):
        made = trainer(cell=lambda: Looks(masked=False), precision=precision, engine="reference")
        losses[precision] = made.fit(images(), 1, batch_size=8, **QUIET).last["loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-2)


def test_every_product_is_in_half_precision_and_nothing_else():
    made = trainer(cell=Everything, precision="float16")
    made.prepare(*images())
    kinds: dict[str, set[str]] = {}
    for node in made.train_function().walk():
        if node.outputs[0].type.dtype.is_float:
            kinds.setdefault(node.op.name, set()).add(str(node.outputs[0].type.dtype))
    assert {"Conv", "ConvGradWeight", "Gemm"} <= kinds.keys()
    products = {"Conv", "ConvTranspose", "ConvGradWeight", "MatMul", "Gemm"} & kinds.keys()
    assert all(kinds[name] == {"float16"} for name in products)
    assert all(kinds[name] == {"float32"} for name in ("Sqrt", "Exp", "ReduceMean", "Tanh"))
    assert not kinds.keys() & {"LSTM", "Linear"}, "products hide in their bodies"


def half(**options):
    record = train.Record()
    options = {"cell": dense, "precision": "float16", "callbacks": [record], **options}
    made = trainer(**options)
    made.fit(data(), 1, batch_size=5, **QUIET)
    return made, record.steps


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_that_overflows_is_skipped_and_the_scale_halved(accumulate):
    """The loss is about 1: times 2^18 and more its gradients leave float16."""
    start = trainer(cell=dense).state()
    scale = train.LossScale(start=2.0**21)
    made, steps = half(loss_scale=scale, accumulate=accumulate)
    due = steps[accumulate - 1 :: accumulate]
    skipped = [row["summary/skipped"] for row in due]
    lost = int(sum(skipped))
    assert 0 < lost < len(due)
    scales = [row["summary/loss_scale"] for row in due]
    assert (scales[0], skipped[0]) == (2.0**21, 1.0)
    for before, after, lost_one in zip(scales, scales[1:], skipped, strict=False):
        assert after == before * (0.5 if lost_one else 1.0)
    state = made.state()
    assert state["optimizer.step"] == len(due) - lost
    assert all(np.isfinite(a).all() for a in state.values())
    assert not np.array_equal(state["0.weight"], start["0.weight"])


def test_a_skipped_update_changes_no_weight_and_no_statistics():
    made = trainer(cell=Everything, precision="float16", loss_scale=2.0**60)
    before = made.state()
    history = made.fit(images(), 1, batch_size=8, **QUIET)
    after = made.state()
    assert history.last["summary/skipped"] == 1
    assert {k for k in after if not np.array_equal(after[k], before[k])} == set()
    assert after["optimizer.scale"] == 2.0**60


class Root(nn.Cell):
    """sqrt where it is 0: a finite loss whose gradient is none."""

    def __init__(self):
        super().__init__()
        self.body = nn.Dense(4, 3)

    def construct(self, x):
        y = self.body(x)
        return ops.sqrt(ops.relu(y - 100.0)) + y


def test_gradients_that_no_scale_saves_end_the_run_with_their_operator():
    made = trainer(cell=Root, precision="float16")
    with pytest.raises(train.NonFinite, match=r"not finite at any loss scale .*Div at .*test_rec"):
        made.fit(data(), 20, batch_size=10, **QUIET)


def test_the_scale_grows_after_good_updates():
    _, steps = half(loss_scale=train.LossScale(start=4.0, growth=2.0, interval=3))
    scales = [row["summary/loss_scale"] for row in steps]
    assert scales == [4, 4, 4, 8, 8, 8, 16, 16, 16, 32]


def test_a_fixed_scale_saves_gradients_that_float16_would_lose():
    """A loss of 1e-6: its gradients lie below what float16 holds."""

    def tiny(y, t):
        return ((y - t) * (y - t)).mean() * 1e-8

    moved = []
    for scale in (1.0, 2.0**20):
        nn.seed(0)
        made = train.Trainer(
            nn.Dense(4, 1), loss=tiny, optimizer=optim.SGD(1e7), precision="float16",
            loss_scale=scale,
        )  # fmt: skip
        x, y = data()
        before = made.state()["weight"]
        made.fit((x, y[:, None].astype(np.float32)), 1, batch_size=50, **QUIET)
        moved.append(np.abs(made.state()["weight"] - before).max())
    assert moved[0] < 0.9 * moved[1]


def test_the_average_of_weights_follows_pytorch():
    with np.load(Path(__file__).parents[1] / "golden" / "optim" / "updates.npz") as held:
        golden = {k: held[k] for k in held.files}
    params = {k: golden[f"start/{k}"] for k in ("w", "b")}
    recipe = train.Recipe(optimizer=optim.SGD(0.1), average=0.9)
    types = {k: type_of(a) for k, a in params.items()}
    with (build := Build(TABLE, "update")):
        p = {k: build.param(k, t) for k, t in types.items()}
        g = {k: build.param(f"g.{k}", t) for k, t in types.items()}
        state = {k: build.param(k, t) for k, t in recipe.state_types(types).items()}
        found, _ = recipe.advance(p, g, state, ops.constant(np.float32(1)))
    held_state = {**params, **recipe.init(params)}
    loop = engine("onnx").compile(build.finish(found), donate=tuple(held_state)).loop(held_state)
    kept = []
    for t in range(100):
        loop.step(**{f"g.{k}": golden[f"grad/{k}"][t] for k in params})
        if t < 10 or t % 10 == 9:
            kept.append(loop.state())
    for k in params:
        ours = np.stack([s[f"optimizer.average.{k}"] for s in kept])
        np.testing.assert_allclose(ours, golden[f"averaged/{k}"], rtol=1e-5, atol=3e-6)


def test_averaged_weights_stand_in_for_the_block_only():
    made = trainer(cell=dense, average=0.5)
    made.fit(data(), 2, **QUIET)
    plain, raw = made.evaluate(data())["loss"], bits(made)
    with made.averaged():
        averaged = made.evaluate(data())["loss"]
        module = made.export(["predict"])
    assert averaged != plain
    assert np.array_equal(
        module.state["0.weight"].array, made.state()["optimizer.average.0.weight"]
    )
    assert bits(made) == raw
    with pytest.raises(ZeroDivisionError), made.averaged():
        raise ZeroDivisionError
    assert bits(made) == raw
    fresh = trainer(cell=dense, average=0.5)
    fresh.prepare(*data())
    with fresh.averaged():
        assert np.abs(fresh.state()["0.weight"]).max() > 0


class Kept(nn.Cell):
    """A layer whose weights are kept in `dtype`."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(np.full((4, 1), 0.5), dtype=dtype)

    def construct(self, x):
        return x @ as_tensor(self.w).cast("float32")


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "average": 0.5, "clip_norm": 1.0}])
@pytest.mark.parametrize(("dtype", "state"), [("float16", "float32"), ("float64", "float64")])
def test_the_state_of_float16_weights_is_float32_and_of_float64_float64(dtype, state, options):
    cell, optimizer = Kept(dtype), optim.AdamW(optim.Cosine(0.1, 60))
    made = train.Trainer(cell, loss=nn.MSE(), optimizer=optimizer, metrics={}, **options)
    x = data()[0]
    history = made.fit((x, x.sum(axis=1, keepdims=True)), 10, **QUIET)
    assert history["loss"][-1] < 0.3 * history["loss"][0]
    assert {k: a.dtype for k, a in made.state().items() if a.ndim} == {
        k: np.dtype(dtype if k == "w" else state) for k in made.state() if k[-1] == "w"
    }
    if options:
        with made.averaged():
            assert cell.w.array.dtype == dtype
            made.evaluate((x, x.sum(axis=1, keepdims=True)))


def test_a_run_resumes_between_the_batches_of_an_update(tmp_path):
    options = {"cell": dense, "accumulate": 4, "precision": "float16", "average": 0.9}
    whole = trainer(**options)
    whole.fit(data(), 2, batch_size=6, **QUIET)

    class Stop(train.Callback):
        def on_step(self, run):
            if run.step == 6:
                run.stop()

    first = trainer(callbacks=[Stop()], **options)
    first.fit(data(), 2, batch_size=6, checkpoint=tmp_path, **QUIET)
    assert first.state()["optimizer.left"] == 2
    second = trainer(**options)
    second.fit(data(), 2, batch_size=6, checkpoint=tmp_path, **QUIET)
    assert bits(second) == bits(whole)


def test_stopping_an_accumulated_run_leaves_an_iterators_next_batch_unless_it_must_look():
    x, y = data()
    batches = iter([(x[i : i + 5], y[i : i + 5]) for i in range(0, 50, 5)])

    class Stop(train.Callback):
        def on_step(self, run):
            run.stop()

    trainer(cell=dense, callbacks=[Stop()]).fit(batches, 1, **QUIET)
    assert len(list(batches)) == 9


def test_a_frozen_group_gets_no_gradient_and_is_exported_as_frozen():
    groups = (optim.Group("0.*", frozen=True),)
    made = trainer(cell=dense, optimizer=optim.Adam(0.1, groups=groups))
    before = made.state()
    made.fit(data(), 1, **QUIET)
    after = made.state()
    assert np.array_equal(before["0.weight"], after["0.weight"])
    assert not np.array_equal(before["2.weight"], after["2.weight"])
    module = made.export(["gradients", "local_update", "train_step"])
    names = module.functions["gradients"].result_names
    assert [n for n in names if n.startswith("grad.")] == ["grad.2.weight", "grad.2.bias"]
    assert "0.weight" not in module.functions["local_update"].result_names
    assert '"0.weight"' in module.meta["frozen"]
    assert not [k for k in module.state if k.startswith("optimizer.") and ".0." in k]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate": 0}, "whole number >= 1, got 0"),
        ({"precision": "int8"}, "one of 'float32', 'float16', 'bfloat16', got 'int8'"),
        ({"loss_scale": 8.0}, "needs precision='float16'"),
        ({"average": 1.0}, r"a decay in \[0, 1\), got 1.0"),
        ({"clip_value": -1.0}, "element is clipped to a limit > 0"),
        ({"precision": "float16", "loss_scale": 0.0}, "must start above 0, got 0.0"),
        ({"loss_scale": train.LossScale}, "precision='float16'"),
    ],
)
def test_senseless_options_are_refused_at_once(options, said):
    with pytest.raises(InvalidInput, match=said):
        trainer(cell=dense, **options)


def test_senseless_loss_scales_are_refused():
    for options in ({"growth": 0.5}, {"backoff": 0.0}, {"interval": 0}):
        with pytest.raises(InvalidInput, match="growth >= 1"):
            train.LossScale(**options)
    with (
        pytest.raises(InvalidInput, match="keeps no moving average"),
        trainer(cell=dense).averaged(),
    ):
        pass


@pytest.mark.slow
def test_an_exported_step_of_every_part_runs_on_a_stock_session(tmp_path):
    """Where a CPU lacks float16 it computes in float32, so the losses agree to float16's digits."""
    made = trainer(
        cell=Everything, precision="float16", accumulate=2, average=0.9, clip_norm=1.0,
        optimizer=optim.AdamW(optim.Warmup(3, optim.Cosine(0.01, 20))),
    )  # fmt: skip
    made.prepare(*images())
    made.export(["train_step"]).save(tmp_path / "m.tpm")
    module = load(tmp_path / "m.tpm")
    session = Session(serialize(emit(module.functions["train_step"])))
    loop = session.loop({k: t.array for k, t in module.state.items()})
    x, y = images()
    losses = [float(loop.step(x=x[i : i + 8], y=y[i : i + 8])["loss"]) for i in range(0, 32, 8)]
    record = train.Record()
    made.callbacks = (record,)
    made.fit([(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)], 1, **QUIET)
    np.testing.assert_allclose(losses, [row["loss"] for row in record.steps], rtol=5e-3)
    assert loop.state()["optimizer.step"] == 2

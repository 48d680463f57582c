"""Ways in which a training step on onnxruntime goes silently wrong, each held shut by a test.

The reference engine, node by node in numpy, says what is right. Denormals from masked softmax only
cost time; that they are flushed is a session option, so here their values alone are checked.
"""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE

F32 = np.float32
BATCH_NORM = TABLE["", "BatchNormalization"]


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def recorded(specs, body):
    build = Build(TABLE, "f")
    with build:
        made = body(**{k: build.param(k, spec) for k, spec in specs.items()})
    return build.finish(made)


def descent(function, state, lr=0.05):
    """One step of gradient descent on the result `loss`, other results of state names kept."""
    trained = [n for n in state if n not in function.result_names]
    gradients = value_and_grad(function, trained, of="loss")
    build = Build(TABLE, "step")
    with build:
        params = {p.name: build.param(p.name, p.type) for p in gradients.params}
        found = dict(
            zip(gradients.result_names, inline(gradients, list(params.values())), strict=True)
        )
        results = {k: v for k, v in found.items() if not k.startswith("grad.")}
        for name in trained:
            results[name] = params[name] - found[f"grad.{name}"] * lr
    return build.finish(results)


def loops_agree(step, state, batches, *, close=1e-4):
    """Every result of every step and the final state are the same on onnx and reference."""
    loops = [
        engine(name).compile(step, donate=tuple(state)).loop(state)
        for name in ("onnx", "reference")
    ]
    for batch in batches:
        ours, wanted = (loop.step(**batch) for loop in loops)
        for key, value in wanted.items():
            np.testing.assert_allclose(ours[key], value, rtol=close, atol=close, err_msg=key)
    ours, wanted = (loop.state() for loop in loops)
    for key, value in wanted.items():
        np.testing.assert_allclose(ours[key], value, rtol=close, atol=close, err_msg=key)


def normalized(x, scale, bias, mean, var, momentum=0.9):
    return BATCH_NORM.all_outputs(
        x, scale, bias, mean, var, outputs=3, training_mode=1, momentum=momentum
    )


def batch_norm_state():
    ones, zeros = np.ones(3, F32), np.zeros(3, F32)
    return {
        "w": random(0, 4, 3), "scale": ones, "bias": zeros, "mean": zeros, "var": ones,
    }  # fmt: skip


def specs_of(arrays, **more):
    return {k: TensorSpec(a.shape, a.dtype) for k, a in arrays.items()} | more


class TestBatchNormalization:
    """In training mode onnxruntime's kernel writes into its mean and variance INPUTS."""

    def test_two_layers_may_share_constant_statistics(self):
        def body(w, scale, bias, x):
            zeros, ones = np.zeros(3, F32), np.ones(3, F32)
            y, _, _ = normalized(x @ w, scale, bias, zeros, ones, momentum=0.0)
            z, mean, _ = normalized(ops.tanh(y), scale, bias, zeros, ones, momentum=0.0)
            return {"loss": (z * y).mean(), "mean": mean, "zeros": ops.constant(zeros)}

        state = {k: v for k, v in batch_norm_state().items() if k not in {"mean", "var"}}
        step = descent(recorded(specs_of(state, x=TensorSpec((8, 4))), body), state)
        loops_agree(step, state, [{"x": random(k, 8, 4)} for k in range(20)])

    def test_two_layers_may_share_running_statistics_state(self):
        """Twice the same layer: the second reads what the first read, not what it wrote."""

        def body(w, scale, bias, mean, var, x):
            y, mean_1, var_1 = normalized(x @ w, scale, bias, mean, var)
            z, mean_2, var_2 = normalized(ops.tanh(y) + 1.0, scale, bias, mean, var)
            return {
                "loss": (z * y).mean(), "mean": (mean_1 + mean_2) * 0.5,
                "var": (var_1 + var_2) * 0.5,
            }  # fmt: skip

        state = batch_norm_state()
        step = descent(recorded(specs_of(state, x=TensorSpec((8, 4))), body), state)
        loops_agree(step, state, [{"x": random(k, 8, 4)} for k in range(20)])

    def test_equal_layers_on_equal_inputs_survive_common_subexpressions(self):
        def body(w, scale, bias, mean, var, x):
            y, mean_1, var_1 = normalized(x @ w, scale, bias, mean, var)
            z, _, _ = normalized(x @ w, scale, bias, mean, var)
            u, _, _ = normalized(x @ w, scale, bias, mean, var, momentum=0.5)
            return {"loss": (z * y * u).mean(), "mean": mean_1, "var": var_1}

        state = batch_norm_state()
        step = descent(recorded(specs_of(state, x=TensorSpec((8, 4))), body), state)
        loops_agree(step, state, [{"x": random(k, 8, 4)} for k in range(20)])

    def test_inference_reads_the_statistics_that_training_left(self):
        def train(scale, bias, mean, var, x):
            y, new_mean, new_var = normalized(x, scale, bias, mean, var)
            served = BATCH_NORM(x, scale, bias, mean, var)
            return {"y": y.sum(), "served": served, "mean": new_mean, "var": new_var}

        state = {k: v for k, v in batch_norm_state().items() if k != "w"}
        step = recorded(specs_of(state, x=TensorSpec((8, 3))), train)
        batches = [{"x": 3 + 2 * random(k, 8, 3)} for k in range(30)]
        loops_agree(step, state, batches)
        loop = engine("onnx").compile(step, donate=tuple(state)).loop(state)
        for batch in batches:
            loop.step(**batch)
        x = np.concatenate([b["x"] for b in batches])
        np.testing.assert_allclose(loop.state()["mean"], x.mean(0), atol=0.3)


class TestTies:
    """Random images hide ties; a constant background makes them the rule."""

    def images(self, seed):
        x = np.zeros((4, 1, 8, 8), F32)
        x[:, :, 2:5, 3:6] = random(seed, 4, 1, 3, 3)
        return x

    @pytest.mark.slow
    @pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 3, 0)])
    def test_training_through_tied_maxima_agrees(self, kernel, stride, padding):
        def body(w, b, x, labels):
            y = ops.relu(ops.conv(x, w, b, padding=1))
            pooled = ops.max_pool(y, kernel, stride=stride, padding=padding)
            logits = ops.flatten(pooled)[:, :4] * 3.0
            return {"loss": ops.cross_entropy(logits, labels).mean()}

        state = {"w": random(1, 3, 1, 3, 3), "b": np.full(3, 0.1, F32)}
        specs = specs_of(state, x=TensorSpec(("N", 1, 8, 8)), labels=TensorSpec(("N",), "int64"))
        step = descent(recorded(specs, body), state)
        labels = np.array([0, 1, 2, 3])
        loops_agree(step, state, [{"x": self.images(k), "labels": labels} for k in range(10)])

    def test_the_first_maximum_takes_the_whole_gradient(self):
        f = recorded({"x": TensorSpec((1, 1, 2, 4))}, lambda x: {"loss": ops.max_pool(x, 2).sum()})
        for name in ("onnx", "reference", "ascend"):
            _, g = engine(name).compile(value_and_grad(f))(np.zeros((1, 1, 2, 4), F32))
            np.testing.assert_array_equal(g[0, 0], [[1, 0, 1, 0], [0, 0, 0, 0]])

    @pytest.mark.parametrize("name", ["onnx", "ascend"])
    @pytest.mark.parametrize("stride", [2, 1])
    def test_no_precision_decides_which_maximum_wins(self, name, stride):
        """Moving elements by a product of matrices must not round them, on any engine."""
        size = {2: 4, 1: 7}[stride]
        f = recorded(
            {"x": TensorSpec((2, 3, 8, 8)), "g": TensorSpec((2, 3, size, size))},
            lambda x, g: {"loss": (ops.max_pool(x, 2, stride=stride) * g).sum()},
        )
        args = 1 + 1e-5 * random(0, 2, 3, 8, 8), random(1, 2, 3, size, size)
        wanted = engine("reference").compile(value_and_grad(f))(*args)
        found = engine(name).compile(value_and_grad(f))(*args)
        for a, b in zip(found[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


class TestMaskedSoftmax:
    @pytest.mark.parametrize("low", [-np.inf, -1e9, -100.0])
    def test_values_and_gradients_are_exact_under_a_causal_mask(self, low):
        mask = np.where(np.tri(6, dtype=bool), 0, low).astype(F32)

        def body(q, k):
            return {"loss": (ops.softmax(q @ k.transpose() + mask) @ (q * k)).sum()}

        f = recorded({"q": TensorSpec((6, 4)), "k": TensorSpec((6, 4))}, body)
        args = random(0, 6, 4) * 3, random(1, 6, 4)
        wanted = engine("reference").compile(value_and_grad(f))(*args)
        found = engine("onnx").compile(value_and_grad(f))(*args)
        for a, b in zip(found, wanted, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class TestSharing:
    def test_one_large_constant_feeds_many_nodes_over_many_steps(self):
        table = random(0, 16, 16)

        def body(w, x):
            shared = ops.constant(table)
            y = ops.tanh(x @ shared + w)
            z = ops.tanh(y @ shared) + shared.sum((0,))
            return {"loss": (z * z).mean(), "w": w * 0.9 + (y @ shared).mean((0,))}

        state = {"w": random(1, 16)}
        f = recorded(specs_of(state, x=TensorSpec((4, 16))), body)
        loops_agree(f, state, [{"x": random(k, 4, 16)} for k in range(20)])

    def test_labels_are_int64_and_the_batch_changes_between_steps(self):
        def body(w, x, labels):
            return {"loss": ops.cross_entropy(x @ w, labels).mean()}

        state = {"w": random(0, 5, 3)}
        specs = specs_of(state, x=TensorSpec(("N", 5)), labels=TensorSpec(("N",), "int64"))
        step = descent(recorded(specs, body), state)
        batches = [{"x": random(n, n, 5), "labels": np.arange(n) % 3} for n in (8, 3, 1, 8, 13)]
        loops_agree(step, state, batches)


@pytest.mark.parametrize("name", ["onnx", "reference", "ascend"])
@pytest.mark.parametrize("label", [-1, -4, 4, 2**40, -(2**40)])
def test_a_label_that_is_no_class_is_refused_and_never_counts_from_the_end(name, label):
    specs = {"logits": TensorSpec(("N", 4)), "labels": TensorSpec(("N",), "int64")}
    loss = recorded(
        specs, lambda logits, labels: {"loss": ops.cross_entropy(logits, labels).mean()}
    )
    program = engine(name).compile(value_and_grad(loss, ["logits"]))
    logits = random(0, 3, 4)
    program(logits, np.array([0, 1, 3]))
    with pytest.raises(InvalidInput, match="bounds"):
        program(logits, np.array([0, label, 3]))

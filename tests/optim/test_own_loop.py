"""Training loops of one's own: any number of optimizers, in a graph or call by call."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import grad, graph, mode, nn, ops, optim, train, value_and_grad
from triplane.unified_ir.frontend import run as run_module

GOLDEN = Path(__file__).parents[1] / "golden" / "train" / "gan.npz"
STEPS = 6
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.integers(0, 3, 8)
LOSS = nn.SoftmaxCrossEntropy()


class Net(nn.Cell):
    def __init__(self, sizes=(4, 5, 3)):
        super().__init__()
        first, hidden, last = sizes
        rng = np.random.default_rng(1)
        self.one = nn.Dense(first, hidden, rng=rng)
        self.two = nn.Dense(hidden, last, rng=rng)

    def construct(self, x):
        return self.two(ops.tanh(self.one(x)))


def loss_of(net, x, y):
    return LOSS(net(x), y)


def loop(optimizer):
    """A training step of a cell in one graph."""

    @graph
    def step(net, state, x, y):
        loss, grads = value_and_grad(loss_of)(net, x, y)
        net, state = optimizer.update(net, grads, state)
        return loss, state

    return step


def check(state, expected, **tolerance):
    assert state.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_allclose(state[path], array, err_msg=path, **tolerance)


OPTIMIZERS = [
    optim.SGD(0.1),
    optim.SGD(0.1, momentum=0.9),
    optim.AdamW(optim.Cosine(0.1, 10)),
    optim.Adam(0.01, groups=(optim.Group("one.*", frozen=True),)),
    optim.Adafactor(),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_loop_in_a_graph_computes_the_bits_of_the_trainer(optimizer):
    trained, own = Net(), Net()
    trainer = train.Trainer(trained, loss=LOSS, optimizer=optimizer, metrics={})
    trainer.fit([(X, Y)] * STEPS, epochs=1)
    step, state = loop(optimizer), optimizer.init(own)
    for _ in range(STEPS):
        _, state = step(own, state, X, Y)
    check(own.state_dict(), trained.state_dict(), rtol=0)
    assert state.keys() == {k for k in trainer.state() if k.startswith("optimizer.")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_parameters_may_be_a_mapping_and_updates_calls(optimizer):
    net, other = Net(), Net()
    step, state, params = loop(optimizer), optimizer.init(net), other.trainable_state()
    own = optimizer.init(params)
    start = {path: a.copy() for path, a in params.items()}

    @graph
    def mapped(params, state, x, y):
        grads = grad(lambda p: loss_of_parameters(other, p, x, y))(params)
        return optimizer.update(params, grads, state)

    called, kept = params, own
    for _ in range(STEPS):
        _, state = step(net, state, X, Y)
        params, own = mapped(params, own, X, Y)
        grads = grad(lambda p: loss_of_parameters(other, p, X, Y))(called)
        called, kept = optimizer.update(called, grads, kept)
    for result in (params, called):
        check(result, net.trainable_state(), rtol=1e-6, atol=1e-7)
    check(kept, own, rtol=1e-6, atol=1e-7)
    check(other.trainable_state(), start, rtol=0)
    other.load(params, strict=False)
    check(other.state_dict(), params, rtol=0)


def loss_of_parameters(net, params, x, y):
    return LOSS(nn.functional_call(net, params, x), y)


def test_a_step_is_compiled_once(monkeypatch):
    compiled = []
    compile_one = run_module._compiled

    def counting(target, *args):
        compiled.append(target)
        return compile_one(target, *args)

    monkeypatch.setattr(run_module, "_compiled", counting)
    optimizer = optim.Adam(0.01)
    net = Net()
    step, state = loop(optimizer), optimizer.init(net)
    for _ in range(4):
        _, state = step(net, state, X, Y)
    assert len(compiled) == 1
    for _ in range(4):
        net, state = optimizer.update(net, grad(loss_of)(net, X, Y), state)
    # `grad(loss_of)` is a new function at each call; the update is not.
    assert sum("update" in c.__name__ for c in compiled) == 1


def test_an_update_in_a_branch_and_in_a_loop_is_one_of_the_cell():
    optimizer = optim.SGD(0.1, momentum=0.9)
    net, other = Net(), Net()

    @graph
    def several(net, state, x, y, n):
        i = n * 0
        while i < n:
            if i != 1:
                net, state = optimizer.update(net, grad(loss_of)(net, x, y), state)
            i = i + 1
        return state

    state = optimizer.init(net)
    after = several(net, state, X, Y, np.int64(3))
    step = loop(optimizer)
    for _ in range(2):
        _, state = step(other, state, X, Y)
    check(net.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-7)
    check(after, state, rtol=1e-6, atol=1e-7)


class Double(nn.Cell):
    """A weight of float64 and a bias of float32."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(np.ones((4, 1)), dtype="float64")
        self.b = nn.Parameter(np.zeros(1, np.float32))

    def construct(self, x):
        return (x.cast("float64") @ self.w).cast("float32") + self.b


def clipped_loop(optimizer):
    @graph
    def step(net, state, x):
        loss, grads = value_and_grad(lambda net, x: (net(x) ** 2.0).mean())(net, x)
        net, state = optimizer.update(net, optim.clip_by_global_norm(grads, 0.5), state)
        return loss, state

    return step


def test_a_cell_with_weights_of_float64_is_trained_in_a_loop_that_keeps_them():
    optimizer = optim.AdamW(optim.Cosine(0.1, 40))
    net, step = Double(), clipped_loop(optimizer)
    state = optimizer.init(net)
    with mode("graph", floats="float64"):
        losses = []
        for _ in range(30):
            loss, state = step(net, state, X)
            losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]
    kept = {k: a.dtype.name for k, a in state.items() if a.ndim} | {"w": net.w.array.dtype.name}
    assert kept == {k: "float64" if k[-1] == "w" else "float32" for k in kept}


def test_state_of_float64_that_a_call_converted_is_refused_with_the_mode_that_keeps_it():
    optimizer = optim.Adam()
    net = Double()
    with pytest.raises(InvalidInput, match=r'must be float64.*mode\("graph", floats="float64"\)'):
        clipped_loop(optimizer)(net, optimizer.init(net), X)


def test_a_rate_that_follows_a_measure_is_assigned_by_the_loop():
    optimizer = optim.SGD(optim.ReduceOnPlateau(0.5))
    params, grads = {"w": np.ones(2, np.float32)}, {"w": np.ones(2, np.float32)}
    state = optimizer.init(params)
    params, state = optimizer.update(params, grads, state)
    assert params["w"].tolist() == [0.5, 0.5]
    state["optimizer.plateau"] = np.array(0.25, np.float32)
    params, state = optimizer.update(params, grads, state)
    assert params["w"].tolist() == [0.25, 0.25]
    assert float(state["optimizer.plateau"]) == 0.25


def test_two_updates_in_one_graph_are_two_steps():
    optimizer = optim.SGD(0.1, momentum=0.9)
    net, other = Net(), Net()
    step = loop(optimizer)

    @graph
    def twice(net, state, x, y):
        _, state = step(net, state, x, y)
        between = net(x)
        loss, state = step(net, state, x, y)
        return between, loss, state

    between, loss, after = twice(net, optimizer.init(net), X, Y)
    _, state = step(other, optimizer.init(other), X, Y)
    np.testing.assert_allclose(between, other(X), rtol=1e-5, atol=1e-6)
    expected, state = step(other, state, X, Y)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    check(net.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-7)
    check(after, state, rtol=1e-6, atol=1e-7)


def test_a_call_with_other_parameters_keeps_the_updated_ones():
    optimizer = optim.SGD(0.1)
    net, other = Net(), Net()
    step, start = loop(optimizer), net.trainable_state()

    @graph
    def compared(net, params, x, y):
        step(net, {}, x, y)
        return nn.functional_call(net, params, x), net(x)

    before, after = compared(net, start, X, Y)
    np.testing.assert_allclose(before, other(X), rtol=1e-6)
    step(other, {}, X, Y)
    np.testing.assert_allclose(after, other(X), rtol=1e-6)
    check(net.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-7)


def test_eager_mode_updates_a_cell():
    optimizer = optim.Adam(0.01)
    net, other = Net(), Net()
    step = loop(optimizer)
    with mode("eager"):
        loss, state = step(net, optimizer.init(net), X, Y)
    expected, after = step(other, optimizer.init(other), X, Y)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    check(net.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)
    check(state, after, rtol=1e-5, atol=1e-6)


class Generator(Net):
    def __init__(self):
        super().__init__((3, 8, 2))


class Critic(Net):
    def __init__(self):
        super().__init__((2, 8, 1))


def critic_loss(critic, generator, noise, real):
    fake = generator(noise)
    return ops.softplus(-critic(real)).mean() + ops.softplus(critic(fake)).mean()


def generator_loss(generator, critic, noise):
    return ops.softplus(-critic(generator(noise))).mean()


OF_GENERATOR, OF_CRITIC = optim.Adam(0.02), optim.SGD(0.1, momentum=0.9)


@graph
def adversarial_step(generator, critic, of_generator, of_critic, noise, real):
    judged, grads = value_and_grad(critic_loss)(critic, generator, noise, real)
    critic, of_critic = OF_CRITIC.update(critic, grads, of_critic)
    fooled, grads = value_and_grad(generator_loss)(generator, critic, noise)
    generator, of_generator = OF_GENERATOR.update(generator, grads, of_generator)
    return judged, fooled, of_generator, of_critic


NAMES = {"0": "one", "2": "two"}


def golden(arrays, prefix):
    """The arrays of a network of PyTorch, by the names of ours."""
    names = [k.removeprefix(f"{prefix}/") for k in arrays if k.startswith(f"{prefix}/")]
    return {f"{NAMES[n[0]]}{n[1:]}": arrays[f"{prefix}/{n}"] for n in names}


def test_two_optimizers_in_turn_follow_pytorch():
    arrays = dict(np.load(GOLDEN))
    generator, critic = Generator(), Critic()
    generator.load(golden(arrays, "start/generator"))
    critic.load(golden(arrays, "start/critic"))
    noise, real = arrays["noise"], arrays["real"]
    grads = grad(critic_loss)(critic, generator, noise[0], real[0])
    check(grads, golden(arrays, "grad/critic"), rtol=1e-5, atol=1e-7)
    states = OF_GENERATOR.init(generator), OF_CRITIC.init(critic)
    for z, x, losses in zip(noise, real, arrays["losses"], strict=True):
        *measured, of_generator, of_critic = adversarial_step(generator, critic, *states, z, x)
        states = of_generator, of_critic
        np.testing.assert_allclose(measured, losses, rtol=1e-4)
    check(generator.state_dict(), golden(arrays, "end/generator"), rtol=1e-3, atol=1e-5)
    check(critic.state_dict(), golden(arrays, "end/critic"), rtol=1e-3, atol=1e-5)


def test_the_generators_gradient_passes_through_the_critic():
    arrays = dict(np.load(GOLDEN))
    generator, critic = Generator(), Critic()
    generator.load(golden(arrays, "start/generator"))
    critic.load(golden(arrays, "start/critic"))
    plain = optim.SGD(0.1)  # the first step of a momentum is a plain step
    params = plain.update(critic.trainable_state(), golden(arrays, "grad/critic"), {})[0]
    critic.load(params)
    grads = grad(generator_loss)(generator, critic, arrays["noise"][0])
    check(grads, golden(arrays, "grad/generator"), rtol=1e-4, atol=1e-6)


ADAM = optim.Adam(0.01)


def wrong(kind):
    net = Net()
    grads, state = {k: 0 * a for k, a in net.trainable_state().items()}, ADAM.init(net)
    if kind == "missing gradient":
        del grads["one.bias"]
    if kind == "unknown gradient":
        grads["three"] = X
    if kind == "shape of a gradient":
        grads["two.bias"] = grads["two.bias"][:1]
    if kind == "no state":
        state = {}
    if kind == "state of another network":
        state = ADAM.init(Net((4, 6, 3)))
    if kind == "state of another optimizer":
        state |= optim.SGD(0.1, momentum=0.9).init(net)
    return net, grads, state


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing gradient", "the gradient lacks 'one.bias'; take grads from value_and_grad"),
        ("unknown gradient", "there is a gradient of 'three', but no such parameter"),
        ("shape of a gradient", r"gradient 'two.bias' must be float32\[3\], got float32\[1\]"),
        ("no state", r"state lacks 'optimizer.m.one.bias'; start with state = optimizer.init"),
        (
            "state of another network",
            r"'optimizer.m.one.\w+' must be float32\[5.*\], got float32\[6",
        ),
        ("state of another optimizer", r"state has, .*'optimizer.momentum.one.bias'; start with"),
    ],
)
def test_what_does_not_fit_is_refused(kind, message):
    net, grads, state = wrong(kind)
    before = net.state_dict()
    for params in (net, net.trainable_state()):
        with pytest.raises(InvalidInput, match=message):
            ADAM.update(params, grads, state)
    check(net.state_dict(), before, rtol=0)


ANOTHER_KIND: dict[str, tuple[Any, Any, Any]] = {
    r"'one\.weight' is a Parameter; pass the cell itself": (Net().parameters(), {}, {}),
    "'one' is a dict; pass the cell itself": ({"one": {"weight": X}}, {}, {}),
    r"'w' is a float; pass np\.asarray": ({"w": 0.5}, {"w": 0.5}, {}),
    r"'w' is a list; pass np\.asarray": ({"w": [0.5]}, {"w": [0.5]}, {}),
    r"a cell or a dict of arrays .* got a tuple; .* for each cell": ((Net(), Net()), {}, {}),
    "the gradient is a dict of arrays by name, got a NoneType": (Net(), None, {}),
    "the state is a dict of arrays by name, got a NoneType": (Net(), {}, None),
}


@pytest.mark.parametrize("message", ANOTHER_KIND)
def test_arguments_of_another_kind_are_refused(message):
    params, grads, state = ANOTHER_KIND[message]
    with pytest.raises(InvalidInput, match=message):
        ADAM.update(params, grads, state)
    if not isinstance(params, Net):
        with pytest.raises(InvalidInput, match=message):
            ADAM.init(params)


def test_freezing_between_steps_changes_the_next_step():
    net, step, gradient = Net(), loop(optim.SGD(0.1)), grad(loss_of)

    def moved():
        before = net.state_dict()
        step(net, {}, X, Y)
        changed = {k for k, a in net.state_dict().items() if (a != before[k]).any()}
        assert gradient(net, X, Y).keys() == changed
        return changed

    every = moved()
    net.freeze("one.*")
    assert moved() == {"two.weight", "two.bias"}
    net.unfreeze()
    assert moved() == every == net.parameters().keys()


def test_a_frozen_cell_has_nothing_to_update():
    net = Net().freeze()
    for update in (ADAM.update, graph(lambda *args: ADAM.update(*args)[1])):
        with pytest.raises(InvalidInput, match="Net has no trainable parameter to update"):
            update(net, {}, {})


@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), ADAM], ids=["sgd", "adam"])
def test_parameters_of_whole_numbers_are_refused(optimizer):
    """They would be updated in float32 and rounded towards 0."""
    params = {"scale": X, "count": np.array([3, 3])}
    for call in (optimizer.init, lambda p: optimizer.update(p, p, {})):
        with pytest.raises(InvalidInput, match=r"'count' is int64\[2\].*optim.Group\('count'"):
            call(params)


def test_whole_numbers_may_be_frozen():
    sgd = optim.SGD(0.5, groups=(optim.Group("count", frozen=True),))
    params = {"scale": np.ones(2, np.float32), "count": np.array([3, 3])}
    moved, _ = sgd.update(params, {"scale": params["scale"]}, sgd.init(params))
    check(moved, {"scale": np.full(2, 0.5, np.float32), "count": np.array([3, 3])}, rtol=0)


@pytest.mark.parametrize("clip", [optim.clip_by_global_norm, optim.clip_by_norm])
def test_large_gradients_of_float16_are_clipped_to_the_limit(clip):
    g = np.full(1000, 60000, np.float16)
    clipped = graph(lambda g: clip({"g": g}, 1e-3)["g"])(g)
    np.testing.assert_allclose(clipped, np.full(1000, 1e-3 / np.sqrt(1000)), rtol=2e-2)

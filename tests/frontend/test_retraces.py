"""Arguments that cause a compilation at each call are named once, with the way out."""

import functools
import gc
import random
import warnings
import weakref

import numpy as np
import pytest

from triplane.unified_ir import (
    grad,
    graph,
    hessian_vector_product,
    jvp,
    nn,
    optim,
    value_and_grad,
    vjp,
    vmap,
)
from triplane.unified_ir.frontend import run
from triplane.unified_ir.frontend.programs import MANY_TRACES, MANY_VALUES, programs_of

X = np.ones(3, np.float32)


def warned(call, values):
    """Return the warnings of a call with each of the values, one after another."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in values:
            call(value)
    return [str(w.message) for w in caught]


def rates(count):
    return [0.1 / (k + 1) for k in range(count)]


@graph
def step(x, rate, *, options=None):
    scale = 1.0 if options is None else options["scale"]
    return x - x * (rate * scale)


def test_a_number_that_changes_is_named_once_with_its_place_and_the_way_out():
    step = graph(lambda x, rate: x * rate)
    (message,) = warned(lambda rate: step(X, rate), rates(3 * MANY_VALUES))
    assert f"compiled for {MANY_VALUES} values of its argument 'rate', a Python number" in message
    assert f"now {rates(MANY_VALUES)[-1]!r}" in message
    assert "pass np.float32(rate)" in message
    assert "test_retraces.py" in message


def test_a_number_within_a_dict_given_by_name_is_named():
    def call(scale):
        step(X, 0.5, options={"scale": scale})

    (message,) = warned(call, rates(2 * MANY_VALUES))
    assert "argument 'options'" in message


def test_a_whole_number_is_to_be_passed_as_one():
    repeated = graph(lambda x, times: x * times)
    (message,) = warned(lambda times: repeated(X, times), range(MANY_VALUES))
    assert "pass np.int64(times)" in message


def test_numbers_that_alternate_or_are_few_are_not_warned_of():
    few = graph(lambda x, rate: x * rate)
    assert warned(lambda rate: few(X, rate), rates(MANY_VALUES - 1) * 10) == []
    arrays = graph(lambda x, rate: x * rate)
    assert warned(lambda rate: arrays(X, np.float32(rate)), rates(50)) == []


def test_an_object_constructed_at_each_call_is_named():
    @graph
    def move(w, optimizer):
        return optimizer.update({"w": w}, {"w": w}, {})[0]

    (message,) = warned(lambda rate: move(X, optim.SGD(rate)), rates(2 * MANY_TRACES))
    assert f"compiled for {MANY_TRACES} objects that its argument 'optimizer' was" in message
    assert "construct it once" in message


def test_shapes_that_keep_changing_are_named_with_the_last_one():
    total = graph(lambda x, weight: (x * weight).sum())
    sizes = range(1, 2 * MANY_TRACES)
    (message,) = warned(lambda n: total(np.ones((2, n), np.float32), np.float32(1)), sizes)
    assert (
        f"compiled for {MANY_TRACES} shapes of its argument 'x', now (2, {MANY_TRACES})" in message
    )
    assert "pad" in message


def loss(x, rate):
    return (x * x).sum() * rate


@pytest.mark.parametrize(
    "transform",
    [grad, value_and_grad, hessian_vector_product, vjp, jvp, vmap],
    ids=lambda transform: str(transform.__name__),
)
def test_a_transform_of_a_function_is_one_function(transform):
    assert transform(loss) is transform(loss)
    assert transform(lambda x: x) is not transform(lambda x: x)


def test_a_transform_called_in_a_loop_is_compiled_once(monkeypatch):
    compiled = []
    compile_one = run._compiled

    def counting(target, *args):
        compiled.append(target)
        return compile_one(target, *args)

    monkeypatch.setattr(run, "_compiled", counting)
    for k in range(5):
        np.testing.assert_allclose(grad(loss)(X * k, np.float32(3)), 6 * k * X)
    assert len(compiled) == 1


def test_other_options_give_another_transform():
    assert grad(loss, 1)(X, np.float32(2)) == 3
    np.testing.assert_allclose(grad(loss)(X, np.float32(2)), 4 * X)
    by_list, by_tuple = (grad(loss, numbers)(X, np.float32(2)) for numbers in ([0, 1], (0, 1)))
    np.testing.assert_allclose(by_list[0], by_tuple[0])


def test_a_wrapper_does_not_get_the_transform_of_what_it_wraps():
    grad(loss)

    @functools.wraps(loss)
    def half(*args):
        return loss(*args) * 0.5

    np.testing.assert_allclose(grad(half)(X, np.float32(2)), 2 * X)


def test_a_transform_goes_with_its_function():
    def own(x):
        return (x * x).sum()

    grad(own)(X)
    alive = weakref.ref(own)
    del own
    gc.collect()
    assert alive() is None


GENERATOR, STATE = np.random.default_rng(0), np.random.RandomState(0)
OWN = random.Random(0)
DRAWS = {
    "of np.random": lambda x: x * np.random.normal(),  # noqa: NPY002 - likewise
    "of random": lambda x: x * random.random(),
    "GENERATOR": lambda x: x * GENERATOR.normal(),
    "STATE": lambda x: x * STATE.normal(),
    "OWN": lambda x: x * OWN.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_python_draws_differ_at_each_call(name):
    """They are constants of a trace, so a program that is kept would repeat them."""
    draw = DRAWS[name]
    call = graph(draw)
    assert len({float(call(X)[0]) for _ in range(4)}) == 4

    def scaled(x):
        return draw(x).sum()

    assert len({float(grad(scaled)(X)[0]) for _ in range(4)}) == 4
    (message,) = warned(lambda _: call(X), range(2 * MANY_TRACES))
    assert f"changes between calls, this time the random generator {name};" in message


def test_draws_outside_of_a_function_cause_no_trace():
    def total(x):
        return (x * float(GENERATOR is not None)).sum()

    def call(_):
        GENERATOR.normal()
        random.random()
        grad(total)(X)

    assert warned(call, range(2 * MANY_TRACES)) == []
    (kept,) = programs_of(grad(total).__wrapped__)._by_key.values()
    assert len(kept) == 1


def test_programs_go_with_the_cells_that_were_arguments():
    """They hold the parameters, so a search over many networks would keep all of these."""

    def square(net, x):
        return (net(x) ** 2.0).mean()

    step, alive = graph(square), []
    for _ in range(4):
        net = nn.Dense(3, 3)
        alive += [weakref.ref(p) for p in net.parameters().values()]
        grad(square)(net, X[None])
        step(net, X[None])
        del net
    gc.collect()
    assert sum(parameter() is not None for parameter in alive) == 2  # those of the newest

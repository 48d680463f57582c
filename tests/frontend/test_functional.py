"""Cells as arguments of transforms, and cells called with other parameters."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import grad, graph, nn, ops, optim, value_and_grad, vjp, vmap
from triplane.unified_ir.frontend import hessian_vector_product, jvp

from .sides import SIDES, on_side

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


class Net(nn.Cell):
    def __init__(self, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.one = nn.Dense(3, 4, rng=rng)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5, rng=rng)
        self.two = nn.Dense(4, 1, rng=rng)

    def construct(self, x):
        return self.two(self.drop(self.norm(ops.tanh(self.one(x)))))


def energy(net, x):
    return (net(x) ** 2.0).mean()


def in_double(net):
    """The cell with its floating-point state in float64, for finite differences."""
    for parameter in net.parameters().values():
        if parameter.array.dtype == np.float32:
            parameter.array = parameter.array.astype(np.float64)
    return net


def moved(state, direction, step):
    return {path: a + step * direction[path] for path, a in state.items()}


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def double():
    with on_side("reference", "float64"):
        yield in_double(Net()).eval()


def test_gradients_of_a_cell_are_central_differences(double):
    rng, state = np.random.default_rng(1), double.trainable_state()
    v = {path: rng.normal(size=a.shape) for path, a in state.items()}
    x = X.astype(np.float64)
    value, grads = value_and_grad(energy)(double, x)
    assert grads.keys() == state.keys()

    def at(step):
        return float((nn.functional_call(double, moved(state, v, step), x) ** 2.0).mean())

    assert float(value) == pytest.approx(at(0.0), rel=1e-12)
    along = sum((grads[k] * v[k]).sum() for k in v)
    assert along == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-7)
    value, tangent = jvp(energy)(double, x, (v, None))
    assert float(tangent) == pytest.approx(along, rel=1e-10)


def test_second_derivatives_of_a_cell_are_differences_of_its_gradients(double):
    rng, state, x = np.random.default_rng(1), double.trainable_state(), X.astype(np.float64)
    v = {path: rng.normal(size=a.shape) for path, a in state.items()}
    products = hessian_vector_product(energy)(double, x, v)
    slopes = []
    for step in (1e-5, -1e-5):
        double.load(moved(state, v, step), strict=False)
        slopes.append(grad(energy)(double, x))
    for path, product in products.items():
        difference = (slopes[0][path] - slopes[1][path]) / 2e-5
        np.testing.assert_allclose(product, difference, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("side", SIDES)
def test_a_cell_and_its_parameters_as_a_mapping_have_equal_gradients(net, side):
    net.eval()
    with on_side(side):
        grads = grad(energy)(net, X)
        same = grad(lambda p: (nn.functional_call(net, p, X) ** 2.0).mean())(net.trainable_state())
    for path, g in grads.items():
        np.testing.assert_allclose(g, same[path], rtol=1e-6, err_msg=path)


def test_cells_in_a_tree_have_a_tree_of_gradients(net):
    other = Net(1)
    grads = grad(lambda pair, x: (pair["a"](x) * pair["b"](x)).sum())({"a": net, "b": other}, X)
    assert grads["a"].keys() == grads["b"].keys() == net.trainable_state().keys()
    _, (of_net, of_x) = value_and_grad(energy, argnums=(0, 1))(net, X)
    assert of_x.shape == X.shape
    assert of_net.keys() == grads["a"].keys()
    _, pulled = vjp(lambda c, x: c(x))(net, X, np.ones((6, 1), np.float32))
    assert pulled[0].keys() == grads["a"].keys()


def test_frozen_and_unused_parameters(net):
    net.freeze("one.*")
    grads = grad(lambda c: (c.two.weight * 1.0).sum())(net)
    assert "one.weight" not in grads
    assert grads["two.weight"].tolist() == [[1.0] * 4]
    assert grads["norm.weight"].tolist() == [0.0] * 4
    with pytest.raises(InvalidInput, match=r"Net needs a trainable parameter.*test_functional.py"):
        grad(energy)(net.freeze(), X)


def test_a_cell_given_twice_is_refused(net):
    with pytest.raises(
        InvalidInput, match=r"share the parameter 'norm.bias' of Net; pass the cell"
    ):
        grad(lambda a, b: (a(X) * b(X)).sum(), argnums=(0, 1))(net, net)


@pytest.mark.parametrize("side", SIDES)
def test_state_that_changes_in_a_call_stays_with_the_cell(side):
    """Running statistics and dropout keys advance once per call, differentiated or not."""
    plain, differentiated, functional = Net(), Net(), Net()
    with on_side(side):
        for _ in range(2):
            plain(X)
            value_and_grad(energy)(differentiated, X)
            nn.functional_call(functional, functional.trainable_state(), X)
    for other in (differentiated, functional):
        for path, array in plain.state_dict().items():
            np.testing.assert_allclose(other.state_dict()[path], array, rtol=1e-6, err_msg=path)
    assert (plain.state_dict()["drop.key"] != Net().state_dict()["drop.key"]).any()


@pytest.mark.parametrize("side", SIDES)
def test_new_state_that_nobody_would_receive_is_refused(net, side):
    before = net.state_dict()
    with on_side(side):
        for call in (nn.functional_call, graph(nn.functional_call)):
            with pytest.raises(InvalidInput, match=r"assigns its state 'norm.running_mean'.*lost"):
                call(net, net.state_dict(), X)
        net.eval()
        np.testing.assert_array_equal(nn.functional_call(net, net.state_dict(), X), net(X))
    for path, array in before.items():
        np.testing.assert_array_equal(net.state_dict()[path], array)


def test_other_parameters_leave_the_cell_unchanged_and_compile_nothing(net):
    net.eval()
    y, before = net(X), net.state_dict()
    programs = net._programs_._by_key.copy()
    twice = {"two.weight": 2 * net.two.weight.array, "two.bias": 2 * net.two.bias.array}
    np.testing.assert_allclose(nn.functional_call(net, twice, X), 2 * y, rtol=1e-5)
    assert net._programs_._by_key == programs
    for path, array in before.items():
        np.testing.assert_array_equal(net.state_dict()[path], array)


def test_an_ensemble_is_a_vmap_over_parameters(net):
    net.eval()
    members = [Net(seed).trainable_state() for seed in range(3)]
    stacked = {path: np.stack([m[path] for m in members]) for path in members[0]}
    answers = vmap(lambda p: nn.functional_call(net, p, X))(stacked)
    for member, answer in zip(members, answers, strict=True):
        np.testing.assert_allclose(answer, nn.functional_call(net, member, X), rtol=1e-5)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"two.wieght": X}, r"no parameter 'two.wieght'; it has one.weight, .*test_functional.py"),
        ({"two.weight": X}, r"'two.weight' is float32\[1,4\], got float32\[6, ?3\]"),
        (X, r"takes a cell, its parameters by path .* got a Net and a "),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(net, state, message):
    for call in (nn.functional_call, graph(nn.functional_call)):
        with pytest.raises(InvalidInput, match=message):
            call(net, state, X)


def test_arrays_of_a_cell_do_not_become_constants_of_a_graph(net):
    for call in (net.state_dict, net.trainable_state):
        with pytest.raises(InvalidInput, match=r"arrays of Net .* constants; pass the cell or its"):
            graph(lambda x, call=call: x * call()["one.bias"])(X)


def test_gradients_of_each_sample_and_through_an_update(net):
    net.eval()
    each = vmap(grad(energy), in_axes=(None, 0))(net, X[:, None])
    for path, g in grad(lambda c, x: (c(x) ** 2.0).sum())(net, X).items():
        np.testing.assert_allclose(each[path].sum(axis=0), g, rtol=1e-4, atol=1e-5, err_msg=path)


def test_an_inner_update_is_differentiated_through(double):
    """The gradient of a step of descent is the one of finite differences."""
    sgd, x = optim.SGD(0.1), X.astype(np.float64)

    def after_a_step(params):
        inner = grad(lambda p: (nn.functional_call(double, p, x) ** 2.0).mean())(params)
        params, _ = sgd.update(params, inner, {})
        return (nn.functional_call(double, params, x) ** 2.0).mean()

    rng, state = np.random.default_rng(1), double.trainable_state()
    v = {path: rng.normal(size=a.shape) for path, a in state.items()}
    grads, outer = grad(after_a_step)(state), graph(after_a_step)
    difference = float(outer(moved(state, v, 1e-5)) - outer(moved(state, v, -1e-5))) / 2e-5
    assert sum((grads[k] * v[k]).sum() for k in v) == pytest.approx(difference, rel=1e-6)


def test_a_cell_takes_arrays_of_the_enclosing_function(net):
    net.eval()
    np.testing.assert_allclose(graph(lambda: net(X.astype(np.float64)))(), net(X), rtol=1e-6)


def test_tangents_and_cotangents_by_other_names_are_refused(net):
    """Leaves are paired in order, so a wrong name would give the derivative along another one."""
    square = nn.Sequential(nn.Dense(3, 3), nn.Dense(3, 3))
    v = square.trainable_state()
    renamed = {path.replace("0.", "2."): a for path, a in v.items()}
    with pytest.raises(InvalidInput, match=r"names 0\.bias, .* got 1\.bias"):
        jvp(energy)(square, X, (renamed, None))
    with pytest.raises(InvalidInput, match=r"names 0\.bias"):
        hessian_vector_product(energy)(square, X, renamed)
    pair = vjp(lambda x: {"a": x, "b": 2.0 * x})
    with pytest.raises(InvalidInput, match="names a, b; got b, c"):
        pair(X, {"b": X, "c": X})
    jvp(energy)(square, X, (dict(reversed(v.items())), None))


def test_a_cell_without_parameters_names_the_container_that_hides_them():
    class Hidden(nn.Cell):
        def __init__(self):
            super().__init__()
            self.rows = [[nn.Dense(3, 1)]]

    with pytest.raises(InvalidInput, match=r"has none; Hidden\.rows is a plain list"):
        grad(energy)(Hidden(), X)
    with pytest.raises(InvalidInput, match=r"has none; unfreeze\(\) some"):
        grad(energy)(Net().freeze(), X)


def test_float64_parameters_that_a_call_converts_say_how_to_keep_them():
    cell = nn.Cell()
    cell.weight = nn.Parameter(np.ones(2), dtype="float64")

    def total(state):
        return nn.functional_call(cell, state).sum()

    with pytest.raises(InvalidInput, match=r"'weight' is float64\[2\], .* floats=\"float64\""):
        grad(total)(cell.trainable_state())

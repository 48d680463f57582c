"""The mean against numpy in float64, its order, and the server's optimizers by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import reduce as reducing
from triplane.unified_ir.federated.core.reduce import ADAM, MAX_EXAMPLES, SGD, reduce


def Hyper(**values):
    """Hyperparameters with defaults."""
    return {"server_lr": 1.0, "beta1": 0.9, "beta2": 0.99, "floor": 1e-3, **values}


def state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "b": rng.normal(size=()).astype(np.float32),
        "w": rng.normal(size=(3, 5)).astype(np.float32),
        "count": np.array(4, np.int64),
    }


def changes(n, seed=1):
    rng = np.random.default_rng(seed)
    names = [f"device-{k}" for k in range(n)]
    return {
        name: (
            int(rng.integers(1, 100)),
            {n: rng.normal(size=x.shape).astype(np.float32) for n, x in floats(state()).items()},
        )
        for name in names
    }


def floats(tensors):
    return {n: x for n, x in tensors.items() if n != "count"}


def in_order(arrived):
    return [(n, lambda change=change: change) for _, (n, change) in sorted(arrived.items())]


def mean(arrived, weighting="examples", **options):
    return reduce(
        state(), {}, in_order(arrived), weighting=weighting, server=SGD,
        hyper=Hyper(**options),
    )[0]  # fmt: skip


@pytest.mark.parametrize("weighting", ["examples", "equal"])
def test_fedavg_is_numpy_s_weighted_mean_in_float64(weighting):
    arrived = changes(7)
    weights = [n if weighting == "examples" else 1 for n, _ in arrived.values()]
    found = mean(arrived, weighting)
    for name, x in floats(state()).items():
        stack = np.stack([c[name] for _, c in arrived.values()]).astype(np.float64)
        expected = x + np.average(stack, axis=0, weights=weights)
        np.testing.assert_allclose(found[name], expected, rtol=1e-7)


@pytest.mark.slow
@given(order=st.permutations(range(6)))
def test_the_order_of_arrival_changes_no_bit(order):
    arrived = list(changes(6).items())
    found = mean(dict(arrived[k] for k in order))
    assert {n: x.tobytes() for n, x in found.items()} == {
        n: x.tobytes() for n, x in mean(dict(arrived)).items()
    }


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_the_size_of_chunks_changes_no_bit(monkeypatch, chunk):
    whole = mean(changes(5))
    monkeypatch.setattr(reducing, "CHUNK", chunk)
    found = mean(changes(5))
    assert {n: x.tobytes() for n, x in found.items()} == {n: x.tobytes() for n, x in whole.items()}


def test_equal_changes_have_themselves_as_mean():
    change = {n: np.full(x.shape, 0.1, np.float32) for n, x in floats(state()).items()}
    found = mean({f"d{k}": (k + 3, change) for k in range(9)})
    for name, x in floats(state()).items():
        assert (
            found[name].tobytes() == (x + np.float64(np.float32(0.1))).astype(np.float32).tobytes()
        )


def test_tensors_that_are_no_floats_stay_as_they_are():
    assert mean(changes(2))["count"].tolist() == 4
    assert mean(changes(2))["count"].dtype == np.int64


def test_updates_are_opened_one_at_a_time():
    opened, change = [], changes(1)["device-0"][1]

    def opening(k):
        def open_it():
            opened.append(k)
            return change

        return open_it

    updates = [(1, opening(k)) for k in range(4)]
    reduce(state(), {}, updates, weighting="equal", server=SGD, hyper=Hyper())
    assert opened == [0, 1, 2, 3]


def test_the_server_s_rate_scales_the_mean():
    full, half = mean(changes(3)), mean(changes(3), server_lr=0.5)
    for name, x in floats(state()).items():
        np.testing.assert_allclose(half[name] - x, (full[name] - x) / 2, rtol=1e-5, atol=1e-7)


def test_fedadam_follows_its_paper_over_rounds():
    hyper, x = Hyper(server_lr=0.1), floats(state())["w"].astype(np.float64)
    m, v = np.zeros_like(x), np.zeros_like(x)
    now = state()
    slots: dict = {}
    for k in range(5):
        arrived = changes(3, seed=k)
        now, slots = reduce(
            now, slots, in_order(arrived), weighting="equal", server=ADAM, hyper=hyper
        )
        d = np.mean([c["w"] for _, c in arrived.values()], axis=0, dtype=np.float64)
        m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d * d
        x += 0.1 * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(now["w"], x, rtol=1e-4)
    assert sorted(slots) == ["m.b", "m.w", "v.b", "v.w"]
    assert {a.dtype for a in slots.values()} == {np.dtype(np.float32)}


def test_fedadam_keeps_squares_of_small_changes_of_float16():
    """(1 - beta2) d^2 = 1e-10 is 0 in float16, and Adam would divide by the floor alone."""
    now, changed = {"w": np.ones(3, np.float16)}, {"w": np.full(3, 1e-4, np.float16)}
    hyper = Hyper(server_lr=0.1, floor=1e-6)
    after, slots = reduce(
        now, {}, [(1, lambda: changed)], weighting="equal", server=ADAM, hyper=hyper
    )
    np.testing.assert_allclose(slots["v.w"], 1e-10, rtol=1e-2)
    assert {a.dtype for a in slots.values()} == {np.dtype(np.float32)}
    assert after["w"].dtype == np.float16
    np.testing.assert_allclose(after["w"], 1 + 0.1 * 1e-5 / (1e-5 + 1e-6), rtol=1e-3)


def test_every_server_is_a_row_and_keeps_the_state_s_types():
    for server in (SGD, ADAM):
        found, _ = reduce(
            state(), {}, in_order(changes(2)), weighting="equal", server=server, hyper=Hyper()
        )
        assert {n: (x.dtype, x.shape) for n, x in found.items()} == {
            n: (x.dtype, x.shape) for n, x in state().items()
        }


def test_what_cannot_be_reduced_is_refused_by_name():
    good = changes(1)["device-0"][1]

    def attempt(updates, **options):
        given_ = {"weighting": "examples", "server": SGD, **options}
        reduce(state(), {}, updates, hyper=Hyper(), **given_)

    with pytest.raises(InvalidInput, match="at least one update"):
        attempt([])
    with pytest.raises(InvalidInput, match=f"1 to {MAX_EXAMPLES} examples, got 0"):
        attempt([(0, lambda: good)])
    with pytest.raises(InvalidInput, match="it differs in"):
        attempt([(1, lambda: {"w": good["w"]})])
    with pytest.raises(InvalidInput, match=r"'w' is \(3, 5\), the update has \(5, 3\)"):
        attempt([(1, lambda: {**good, "w": good["w"].T})])
    with pytest.raises(InvalidInput, match="examples or equal, got 'loss'"):
        attempt([(1, lambda: good)], weighting="loss")


@pytest.mark.parametrize("server", [SGD, ADAM])
def test_buffers_take_the_plain_mean_whatever_the_optimizer_and_its_rate(server):
    arrived = changes(5)
    found, slots = reduce(
        state(), {}, in_order(arrived), weighting="equal", server=server,
        hyper=Hyper(server_lr=0.3), buffers={"w"},
    )  # fmt: skip
    expected = mean(arrived, "equal", server_lr=1.0)
    assert found["w"].tobytes() == expected["w"].tobytes()
    assert found["b"].tobytes() != expected["b"].tobytes()
    assert not [name for name in slots if name.endswith(".w")]

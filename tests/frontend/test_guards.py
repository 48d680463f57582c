# ruff: noqa: PLW0603 - globals that change are what is tested
# mypy: disable-error-code="operator,assignment,attr-defined,method-assign"
"""A program is used again only while everything its trace read is as it was."""

import copy
import gc
import pickle
import sys
import types
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import grad, graph, nn, ops
from triplane.unified_ir.frontend import guards
from triplane.unified_ir.frontend.guards import TraceGuard
from triplane.unified_ir.frontend.programs import programs_of

from .sides import floats

X = floats(1.0, 2.0)
FACTOR = 2.0
TABLE = {"factor": 2.0}
SIZES = [2.0]
HELD = {"is": 2.0}
WEIGHTS = floats(2.0, 2.0)


@dataclass
class Config:
    factor: float = 2.0


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 2.0


CONFIG = Config()
SPACE = types.SimpleNamespace(factor=2.0)
SLOTTED = Slotted()


def helper(x):
    return x * FACTOR


def tripled(x):
    return x * 3.0


def nested(x):
    def inner(v):
        return v * FACTOR

    return inner(x)


class Net(nn.Cell):
    factor_of_class = 2.0

    def __init__(self):
        super().__init__()
        self.factor = 2.0
        self.factors = [2.0, {"deep": 2.0}]
        self.config = Config()
        self.act = Double()
        self.blocks = [Double(), Double()]
        self.table = floats(2.0, 2.0)
        self.read = lambda net, _: net.factor

    def construct(self, x):
        return x * self.read(self, x)


class Double(nn.Cell):
    def construct(self, x):
        return x * 2.0


class Triple(nn.Cell):
    def construct(self, x):
        return x * 3.0


def _set(name, value):
    def change(net):
        setattr(net, name, value)

    return change


def _class_attribute(net):
    type(net).factor_of_class = 3.0


def _config(net):
    net.config.factor = 3.0


CHANGES = {
    "an attribute": (lambda net, _: net.factor, _set("factor", 3.0)),
    "an item of a list": (lambda net, _: net.factors[0], lambda net: net.factors.insert(0, 3.0)),
    "a value deep inside": (
        lambda net, _: net.factors[1]["deep"],
        lambda net: net.factors[1].update(deep=3.0),
    ),
    "an attribute of an object": (lambda net, _: net.config.factor, _config),
    "an attribute of the class": (lambda net, _: net.factor_of_class, _class_attribute),
    "a cell without state": (lambda net, x: net.act(x) / x, _set("act", Triple())),
    "a list of cells": (lambda net, x: net.blocks[0](x) / x, _set("blocks", [Triple()])),
    "an array, in place": (lambda net, _: net.table, lambda net: net.table.fill(3.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_part_of_a_cell_is_a_new_trace(what):
    class Own(Net):
        pass

    net, (net_read, change) = Own(), CHANGES[what]
    net.read = net_read
    np.testing.assert_array_equal(net(X), X * 2)
    change(net)
    np.testing.assert_array_equal(net(X), X * 3)


def test_a_method_replaced_on_the_class_is_a_new_trace():
    class Own(Double):
        pass

    net = Own()
    np.testing.assert_array_equal(net(X), X * 2)
    Own.construct = lambda _, x: x * 3.0
    np.testing.assert_array_equal(net(X), X * 3)


def _global_number():
    global FACTOR
    FACTOR = 3.0


def _global_dict():
    TABLE["factor"] = 3.0


def _global_list():
    SIZES[0] = 3.0


def _global_array():
    WEIGHTS[:] = 3.0


def _global_function():
    global helper
    helper = tripled


def _global_object():
    CONFIG.factor = SPACE.factor = SLOTTED.factor = 3.0


GLOBALS: dict[str, Any] = {
    "number": (lambda x: x * FACTOR, _global_number),
    "number read by a nested function": (nested, _global_number),
    "number read by a called function": (lambda x: helper(x), _global_number),  # noqa: PLW0108
    "dict": (lambda x: x * TABLE["factor"], _global_dict),
    "list": (lambda x: x * SIZES[0], _global_list),
    "array": (lambda x: x * WEIGHTS, _global_array),
    "function": (lambda x: helper(x), _global_function),  # noqa: PLW0108
    "dataclass": (lambda x: x * CONFIG.factor, _global_object),
    "namespace": (lambda x: x * SPACE.factor, _global_object),
    "object with slots": (lambda x: x * SLOTTED.factor, _global_object),
    "partial": (partial(lambda factor, x: x * factor["is"], HELD),
                lambda: HELD.update({"is": 3.0})),
}  # fmt: skip


@pytest.fixture
def globals_as_before():
    here = sys.modules[__name__]
    kept = {k: getattr(here, k) for k in ("FACTOR", "helper")}
    yield
    for k, v in kept.items():
        setattr(here, k, v)
    TABLE["factor"] = SIZES[0] = WEIGHTS[:] = CONFIG.factor = SPACE.factor = SLOTTED.factor = 2.0
    HELD["is"] = 2.0


@pytest.mark.usefixtures("globals_as_before")
@pytest.mark.parametrize("what", GLOBALS)
def test_a_changed_global_is_a_new_trace(what):
    f, change = GLOBALS[what]
    f = graph(f)
    np.testing.assert_array_equal(f(X), X * 2)
    change()
    np.testing.assert_array_equal(f(X), X * 3)


@pytest.mark.usefixtures("globals_as_before")
def test_a_cell_sees_the_globals_that_its_construct_reads():
    class Scale(nn.Cell):
        def construct(self, x):
            return helper(x)

    net = Scale()
    np.testing.assert_array_equal(net(X), X * 2)
    _global_number()
    np.testing.assert_array_equal(net(X), X * 3)


def test_an_attribute_of_a_users_module_is_watched(tmp_path, monkeypatch):
    (tmp_path / "watched_settings.py").write_text("FACTOR = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import watched_settings  # type: ignore[import-not-found]

    @graph
    def f(x):
        return x * watched_settings.FACTOR

    np.testing.assert_array_equal(f(X), X * 2)
    monkeypatch.setattr(watched_settings, "FACTOR", 3.0)
    np.testing.assert_array_equal(f(X), X * 3)


def test_a_name_imported_inside_a_function_is_watched(tmp_path, monkeypatch):
    (tmp_path / "watched_within.py").write_text("FACTOR = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    @graph
    def taken(x):
        from watched_within import FACTOR  # type: ignore[import-not-found]

        return x * FACTOR

    @graph
    def whole(x):
        import watched_within

        return x * watched_within.FACTOR

    for f in (taken, whole):
        for factor in (2.0, 2.0, 3.0):
            monkeypatch.setattr("watched_within.FACTOR", factor)
            np.testing.assert_array_equal(f(X), X * factor)


def test_defaults_are_watched_and_so_is_what_is_inside_them():
    @graph
    def f(x, factor=2.0, more=[1.0]):  # noqa: B006 - it is what changes
        return x * factor * more[0]

    np.testing.assert_array_equal(f(X), X * 2)
    f.__wrapped__.__defaults__ = (3.0, f.__wrapped__.__defaults__[1])
    np.testing.assert_array_equal(f(X), X * 3)
    f.__wrapped__.__defaults__[1][0] = 2.0
    np.testing.assert_array_equal(f(X), X * 6)


def test_what_a_transform_was_given_is_watched():
    held = {"factor": 2.0}
    slope = grad(lambda x: (x * held["factor"]).sum())
    np.testing.assert_array_equal(slope(X), [2, 2])
    held["factor"] = 3.0
    np.testing.assert_array_equal(slope(X), [3, 3])


def test_an_object_passed_as_an_argument_is_watched():
    f, config = graph(lambda x, config: x * config.factor), Config()
    np.testing.assert_array_equal(f(X, config), X * 2)
    config.factor = 3.0
    np.testing.assert_array_equal(f(X, config), X * 3)


def test_a_trace_that_changes_what_it_reads_runs_at_every_call_as_python_does():
    class Counting(nn.Cell):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def construct(self, x):
            self.calls += 1
            return x * float(self.calls)

    net = Counting()
    for k in (1, 2, 3):
        np.testing.assert_array_equal(net(X), X * k)
    assert not programs_of(net).find(next(iter(programs_of(net)._by_key), None))


def test_equal_values_put_in_place_of_others_are_no_change():
    net = Net()
    net.sizes = (2, 3.0)
    watch = TraceGuard([net])
    net.factor, net.sizes = float("2.0"), (int("2"), float("3"))
    assert watch.changed() is None
    net.eval()
    assert watch.changed() == "Net.training"


def test_a_read_only_array_is_not_read_again(monkeypatch):
    table = floats(2.0, 2.0)
    table.flags.writeable = False
    net = Net()
    net.table = table
    watch = TraceGuard([net])
    monkeypatch.setattr(guards, "_contents_of", lambda _: pytest.fail("its bytes were read"))
    assert watch.holds()


def test_more_than_can_be_watched_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(guards, "MAX_GUARDS", 50)
    net = Net()
    net.factors = [[k] for k in range(100)]
    with pytest.raises(InvalidInput, match=r"more than 50 lists, dicts and objects; pass what it"):
        net(X)


def test_programs_go_with_their_cell_and_are_not_copied():
    class Own(Net):
        def construct(self, x):
            return x * self.factor

    net = Own()
    net.ring = {"parent": net}
    net(X)
    twin = copy.deepcopy(net)
    twin.factor = 3.0
    np.testing.assert_array_equal(twin(X), X * 3)
    gone = weakref.ref(net)
    del net, twin
    gc.collect()
    assert gone() is None


def test_a_cell_that_ran_can_be_pickled():
    net = Double()
    net(X)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(net))(X), X * 2)


def test_a_watch_follows_ring_shaped_objects():
    ring = Config()
    ring.factor = ring
    watch = TraceGuard([ring, ops.relu, np, len])
    assert watch.holds()
    ring.factor = 1.0
    assert watch.changed() == "Config.factor"

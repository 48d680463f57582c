# ruff: noqa: SIM108, RET503, PTH123, PLW0603, RUF015, PERF402 - the forms under test, as users write them
# mypy: disable-error-code="operator,assignment,var-annotated"
"""What a tensor cannot decide is refused by name, with the user's file and line and a way out."""

import re

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import graph, nn, ops
from triplane.unified_ir.ir import Role

from .sides import floats, on_side

X = floats(1.0, 2.0, 3.0)
TOTAL = 0


def one_sided(x):
    if x.sum() > 0:
        y = x
    return y


def other_sided(x):
    if x.sum() > 0:
        pass
    else:
        y = x
    return y


def two_types(x):
    if x.sum() > 0:
        y = x
    else:
        y = x.sum()
    return y


def number_and_text(x):
    if x.sum() > 0:
        y = "text"
    else:
        y = 1.0
    return x * y


def return_in_one_branch(x):
    if x.sum() > 0:
        return x


def shrinking(x):
    s = x
    i = 0.0
    while i < x.sum():
        i = i + 1.0
        s = s[:1]
    return s


def never_ending(x):
    while x.sum() > 0:
        pass
    return x


def first_in_loop(x):
    for v in x:
        last = v
    return last


def returns_two_types(x):
    for v in x:
        if v > 1.0:
            return v
        if v > 2.0:
            return x
    return x.sum()


def tried(x):
    y = x
    if x.sum() > 0:
        try:
            y = x * 2.0
        finally:
            pass
    return y


def opened(x):
    y = x
    for _ in x:
        with open("/dev/null"):
            y = y * 2.0
    return y


def item_assigned(x):
    found = {}
    if x.sum() > 0:
        found["a"] = x
    return x


class Holder:
    value = None


def attribute_assigned(x):
    if x.sum() > 0:
        Holder.value = 3
    return x


def global_assigned(x):
    global TOTAL
    if x.sum() > 0:
        TOTAL = 1
    return x


def yields(x):
    def inner():
        if x.sum() > 0:
            yield x

    return list(inner())[0]


def asserts(x):
    assert x.sum() > 0, "positive"
    return x


def filters(x):
    return [v for v in (x, -x) if v.sum() > 0][0]


def guards(x):
    match x.rank:
        case 1 if x.sum() > 0:
            return x
    return -x


def leaves_with(x):
    with open("/dev/null"):
        if x.sum() > 0:
            return x
    return -x


def vector_condition(x):
    if x > 0:
        return x
    return -x


def steps(x):
    for i in range(0, 3, x.cast("int64").sum()):
        x = x + i
    return x


def helper(x):
    if x.sum() > 0:
        return x
    return -x


def calls_a_plain_helper(x):
    return helper(x)


def grows_in_branch(x):
    seen = []
    if x.sum() > 0:
        seen.append(1)
    return x * len(seen)


def grows_in_loop(x):
    seen = []
    for v in x:
        seen.append(v)
    return seen[0]


def grows_in_while(x):
    seen, i = [], 0.0
    while x.sum() > i:
        seen.append(1)
        i = i + 1.0
    return x * len(seen)


def extends_in_place(x):
    seen = [1]
    if x.sum() > 0:
        seen += [2]
    return x * len(seen)


def updates_a_dict(x):
    d = {"a": 1.0}
    if x.sum() > 0:
        d.update(a=2.0)
    return x * d["a"]


def appends_elsewhere(items):
    items.append(1)


def grows_in_a_called_function(x):
    seen = []
    if x.sum() > 0:
        appends_elsewhere(seen)
    return x * len(seen)


class Counter:
    count = 0


COUNTER = Counter()


def sets_by_a_nested_function(x):
    def bump():
        COUNTER.count += 1

    if x.sum() > 0:
        bump()
    return x * COUNTER.count


def sets_by_name(x):
    if x.sum() > 0:
        setattr(COUNTER, "other", 1)  # noqa: B010 - the form under test
    return x


def takes_from_a_generator(x):
    items = (v for v in (1.0, 2.0, 3.0))
    if x.sum() > 0:
        x = x * next(items)
    return x * next(items)


def takes_from_zip(x):
    pairs = zip([1.0, 2.0, 3.0], "abc", strict=True)
    if x.sum() > 0:
        x = x * next(pairs)[0]
    return x * next(pairs)[0]


def grows_in_and(x):
    seen = []
    if x.sum() > 0 and appends_elsewhere(seen) is None:
        return x
    return x * 2.0


REFUSED = [
    (grows_in_branch, 2, r"`seen` is changed in a branch that a tensor decides \(\S+:{at}\)"),
    (grows_in_loop, 2, r"`seen` is changed in a loop that a tensor decides \(\S+:{at}\)"),
    (grows_in_while, 2, r"`seen` is changed in a loop .* \(\S+:{at}\)"),
    (extends_in_place, 2, r"`seen` is changed in a branch .* \(\S+:{at}\)"),
    (updates_a_dict, 2, r"`d\.a` is changed in a branch .* \(\S+:{at}\)"),
    (grows_in_a_called_function, 2, r"`seen` is changed in a branch .* \(\S+:{at}\)"),
    (sets_by_a_nested_function, 4, r"`COUNTER\b.*count.*` is changed in a branch .* \(\S+:{at}\)"),
    (sets_by_name, 1, r"`COUNTER\b.*other.*` is changed in a branch .* \(\S+:{at}\)"),
    (takes_from_a_generator, 2, r"`the iterator items` is changed in a branch .* \(\S+:{at}\)"),
    (takes_from_zip, 2, r"`the iterator pairs` is changed in a branch .* \(\S+:{at}\)"),
    (grows_in_and, 2, r"`seen` is changed in `and` or `or` that a tensor .* \(\S+:{at}\)"),
    (one_sided, 3, r"'y' has no value at \S+:{at}: .* only when the condition at \S+:{if_} holds"),
    (other_sided, 5, r"'y' has no value at \S+:{at}: .* condition at \S+:{if_} does not hold"),
    (two_types, 5, r"'y' .* at \S+:{at}: it is float32\[3\] when .* holds and float32\[\] when"),
    (number_and_text, 5, r"'y' has no value at \S+:{at}: it is 'text' when .*:{if_} holds and 1.0"),
    (return_in_one_branch, 1, r"branches at \S+:{if_} give float32\[3\] and None"),
    (shrinking, 5, r"'s' .*is float32\[3\] before the loop at .*:{loop} and float32\[1\] after"),
    (never_ending, 1, r"no trip of the loop at \S+:{if_} changes a variable"),
    (first_in_loop, 3, r"'last' has no value at \S+:{at}: .* inside the loop at \S+:{if_}"),
    (returns_two_types, 4, r"return float32\[\] and float32\[3\]|float32\[3\] and float32\[\]"),
    (tried, 3, r"a `try` statement \(line {at}\) .* a tensor decides \(\S+:{two}\)"),
    (opened, 3, r"a `with` statement \(line {at}\) is in a loop"),
    (item_assigned, 3, r"assignment to `found\['a'\]` \(line {at}\)"),
    (attribute_assigned, 2, r"assignment to `Holder.value` \(line {at}\)"),
    (global_assigned, 3, r"global or nonlocal `TOTAL` \(line {at}\)"),
    (yields, 2, r"an `if` around `yield` or `await` \(\S+:{at}\)"),
    (asserts, 1, r"a tensor decides an assert \(\S+:{at}\)"),
    (filters, 1, r"the filter of a comprehension \(\S+:{at}\)"),
    (guards, 2, r"the guard of a case \(\S+:{at}\)"),
    (leaves_with, 2, r"leaves through `with`, .* \(\S+:{at}\)"),
    (vector_condition, 1, r"a condition is one truth value, got bool\[3\]"),
    (steps, 1, r"step that is not 0, got Tensor"),
    (calls_a_plain_helper, -2, r"no truth value .*test_refusals.py:{at}\); decorate the function"),
]  # fmt: skip


@pytest.mark.parametrize(("f", "at", "text"), REFUSED, ids=[f.__name__ for f, _, _ in REFUSED])
def test_what_a_graph_cannot_hold_is_refused_with_its_line(f, at, text):
    first = (f if at >= 0 else helper).__code__.co_firstlineno
    lines = {"at": first + (at if at >= 0 else 1), "if_": first + 1, "two": first + 2,
             "loop": first + 3}  # fmt: skip
    for name, line in lines.items():
        text = text.replace("{" + name + "}", str(line))
    with pytest.raises(InvalidInput, match=text):
        graph(f)(X)


RUN_EAGERLY = [one_sided, two_types, first_in_loop, tried, opened, item_assigned, global_assigned,
               yields, asserts, filters, guards, leaves_with, calls_a_plain_helper]  # fmt: skip


@pytest.mark.parametrize("f", RUN_EAGERLY, ids=[f.__name__ for f in RUN_EAGERLY])
def test_eager_mode_runs_what_a_graph_refuses(f):
    with on_side("eager"):
        graph(f)(X)


@graph
def fibonacci(n):
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


def test_recursion_on_a_tensor_is_refused_by_name_and_runs_eagerly():
    with pytest.raises(InvalidInput, match="fibonacci calls itself where a tensor decides"):
        fibonacci(np.int64(5))
    with on_side("eager"):
        assert fibonacci(np.int64(10)) == 55


def test_recursion_through_a_cell_is_refused_by_name():
    class Loops(nn.Cell):
        def construct(self, x):
            if x.sum() > 0:
                return self(x - 1.0) * 2.0
            return x

    with pytest.raises(InvalidInput, match=r"Loops.construct calls itself"):
        Loops()(X)


def test_a_buffer_assigned_under_an_operators_function_is_refused_by_name():
    class Cell(nn.Cell):
        def __init__(self):
            super().__init__()
            self.seen = nn.Parameter(np.zeros((), np.float32), role=Role.BUFFER)

        def construct(self, x):
            def step(c, v):
                self.seen = v
                return c + v, v

            return ops.scan(step, x[0], x)[0]

    with pytest.raises(InvalidInput, match="'seen' is assigned inside a function given to an op"):
        Cell()(X)


def test_a_branch_may_change_what_it_made_itself_and_rebind_lists():
    @graph
    def f(x):
        seen = (1.0,)
        if x.sum() > 0:
            inner = []
            inner.append(x * 2.0)
            seen = (inner[0].sum(),)
        return seen[0] * x

    np.testing.assert_array_equal(f(X), X * 12)
    np.testing.assert_array_equal(f(-X), -X)


PYTHON_NUMBERS = {
    "float()": lambda x: x * float(x.sum()),
    "int()": lambda x: x * int(x.sum()),
    "round()": lambda x: x * round(x.sum()),
    "an index": lambda x: [1.0, 2.0][x.sum().cast("int64")] * x,
    "`in` asks": lambda x: x * (2.0 in x),
    "symbolic": lambda x: x if f"{x.sum():.1f}" else x * 2.0,
}


@pytest.mark.parametrize("what", PYTHON_NUMBERS)
def test_a_tensor_where_python_needs_a_number_names_the_line(what):
    f = PYTHON_NUMBERS[what]
    line = f.__code__.co_firstlineno
    with pytest.raises(InvalidInput, match=rf"{re.escape(what)}.*test_refusals.py:{line}\b"):
        graph(f)(X)


def test_whole_numbers_divide_as_in_python():
    a, b = np.array([7, -7, 6, 0]), np.array([2, 2, -3, 5])
    for side in ("eager", "onnx", "reference"):
        with on_side(side):
            for f in (lambda x, y: x / y, lambda x, _: x / 2, lambda _, y: 3 / y):
                found = graph(f)(a, b)
                assert found.dtype == np.float32
                np.testing.assert_allclose(found, f(a, b), rtol=1e-6)
            for f in (lambda x, y: x // y, lambda x, _: x // 2, lambda _, y: -3 // y):
                found = graph(f)(a, b)
                assert found.dtype == np.int64
                np.testing.assert_array_equal(found, f(a, b))
            np.testing.assert_array_equal(graph(lambda x: x // 0.75)(X), X // 0.75)


def test_a_raise_in_construct_leaves_nothing_behind():
    class Fails(nn.Cell):
        def construct(self, x):
            for v in x:
                if v > 0:
                    raise KeyError("inside")
            return x

    from triplane.unified_ir.ops.recorder import recording

    for _ in range(2):
        with pytest.raises(KeyError):
            Fails()(X)
        assert not recording()
    np.testing.assert_array_equal(graph(lambda x: x * 2.0)(X), X * 2)

# mypy: disable-error-code="attr-defined,name-defined"
"""Small functions with every kind of control flow: (function, argument tuples)."""

from typing import Any

import numpy as np

from triplane.unified_ir import graph, ops

from .sides import floats

X = floats(1.0, 2.0, 3.0)
N = np.int64(3)


@graph
def if_else(x):
    if x.sum() > 0:
        y = x * 2.0
    elif x.sum() < -10.0:
        y = -x
    else:
        y = x * 0.5
    return (y * y).sum()


@graph
def if_without_else(x):
    y = x
    if x.sum() > 0:
        y = y * x
    return y.sum()


@graph
def early_return(x):
    if x.sum() > 10.0:
        return (x * x).sum()
    y = x * 3.0
    if y.sum() > 10.0:
        return y.sum()
    return (y * x).sum()


@graph
def nested_returns_share_the_rest(x):
    y = x
    if x.sum() > 0:
        if x.sum() > 10.0:
            return x.sum()
        y = y * 2.0
    else:
        y = y - 1.0
    z = y * y
    return z.sum()


@graph
def while_tensor(x):
    y = x
    while (y * y).sum() < 100.0:
        y = y * 1.5
    return y.sum()


@graph
def while_with_numbers(x):
    i = 0
    s = 0.0
    while i < 4 and s < 20.0:
        s = s + (x * x).sum()
        i += 1
    return s * x.sum()


@graph
def while_true_break(x):
    n, k = x.sum(), 0
    while True:
        n = n * 0.5
        k = k + 1
        if n < 1.0:
            break
    return n * x[0]


@graph
def range_of_int_unrolls(x):
    for i in range(3):
        x = x * (i + 1)
    return x.sum()


@graph
def range_of_tensor(x, n):
    y = x
    for i in range(n):
        y = y * x + i.cast(x.dtype)
    return y.sum()


@graph
def range_with_start_and_step(x, n):
    s = x[0]
    for i in range(5, n, -2):
        s = s * 2.0 + i.cast(x.dtype)
    return s


@graph
def range_break_continue(x, n):
    s = x[0]
    for i in range(n):
        if i == 1:
            continue
        if s > 100.0:
            break
        s = s + x[i] * s
    return s


@graph
def over_tensor(x):
    s = 0.0
    for v in x:
        s = s + v * v * v
    return s


@graph
def over_tensor_with_return(x):
    s = x[0]
    for v in x:
        s = s * v
        if s > 1.5:
            return s * s
    return -s


@graph
def enumerated_and_zipped(x):
    s = 0.0
    for i, v in enumerate(x, 1):
        s = s + v * i.cast(x.dtype)
    for a, b in zip(x, x * x, strict=True):
        s = s + a * b
    return s


@graph
def loop_with_else(x):
    s = x.sum()
    for v in x:
        if v > 2.5:
            break
        s = s + v
    else:
        s = s * 10.0
    return s


@graph
def python_loop_left_by_tensor(x):
    for i in range(4):
        if x.sum() > 20.0:
            break
        x = x * (i + 1.0)
    return x.sum()


@graph
def nested_loops(x, n):
    t = x[0]
    for i in range(n):
        for j in range(3):
            if j > i:
                continue
            t = t + x[j] * x[j]
        if t > 100.0:
            return t * t
    return -t


@graph
def boolean_operators(x):
    small, large = x.max() < 10.0, x.max() >= 10.0
    y = x.sum() if small and not large else x.max()
    if 0.0 < x.sum() < 7.0 or large:
        y = y * 2.0
    return y


@graph
def guarded_index(x, n):
    i, s = 0, x[0]
    while i < n and x[i] < 2.5:
        s = s + x[i]
        i = i + 1
    return s


@graph
def python_conditions_stay_python(x):
    kind = "double"
    if kind == "double" and x.rank == 1:
        return (x * 2.0).sum()
    undefined_name_of_a_branch_not_taken()  # noqa: F821
    return x


@graph
def halves(x, n):
    if n <= 0:
        return x.sum()
    return halves(x * 0.5, n - 1)


@graph
def temporaries_may_differ(x):
    if x.sum() > 0:
        t = x.sum()
        y = t * 2.0
    else:
        t = x * x
        y = t.sum()
    return y


@graph
def loop_temporaries(x, n):
    s = 0.0
    t = "not a tensor yet"
    for i in range(n):
        t = x * i.cast(x.dtype)
        s = s + t.sum()
    return s


@graph
def results_in_a_tree(x):
    pair = {"a": x, "b": (x.sum(), x[0])}
    if x.sum() > 0:
        pair = {"a": x * 2.0, "b": (x.max(), x[1])}
    return pair["a"].sum() * pair["b"][0] * pair["b"][1]


@graph
def swapped(x, n):
    a, b = x.sum(), x.max()
    for _ in range(n):
        a, b = b, a + b
    return a


@graph
def inner_functions(x):
    def scaled(v):
        if v.sum() > 0:
            return v * 3.0
        return v

    pick = lambda v: v.sum() if v.max() > 2.5 else v.max()
    return pick(scaled(x)) + pick(scaled(-x))


@graph
def through_scan(x):
    carry, _ = ops.scan(lambda c, v: (c + v if c < 2.0 else c * v, c), x[0], x)
    return carry


def while_binds(x):
    z = x
    while (n := z.sum()) < 20.0:
        z = z * 2.0
        if z[0] > 7.0:
            continue
        z = z + 0.5
    n = n + 100.0
    return n + z.sum() * 10.0


def while_binds_and_breaks(x):
    n, z = 0.0, x
    while (n := z.sum()) < 20.0:
        z = z * 2.0
        if n > 10.0:
            break
    else:
        n = n + 100.0
    return n + z.sum() * 10.0


PROGRAMS: dict[str, Any] = {
    f.__name__: (f, calls)
    for f, calls in (
        (if_else, [(X,), (-X,), (-X * 10,)]),
        (if_without_else, [(X,), (-X,)]),
        (early_return, [(X,), (X * 2,), (-X,)]),
        (nested_returns_share_the_rest, [(X,), (X * 2,), (-X,)]),
        (while_tensor, [(X,), (X * 10,)]),
        (while_with_numbers, [(X,), (X * 0.1,)]),
        (while_binds, [(X,), (X * 10,)]),
        (while_binds_and_breaks, [(X,), (X * 2,), (X * 10,)]),
        (while_true_break, [(X,), (X * 0.1,)]),
        (range_of_int_unrolls, [(X,)]),
        (range_of_tensor, [(X, N), (X, np.int64(0)), (X, np.int64(-2))]),
        (range_with_start_and_step, [(X, np.int64(-2)), (X, np.int64(9))]),
        (range_break_continue, [(X, N), (X * 50, N)]),
        (over_tensor, [(X,)]),
        (over_tensor_with_return, [(X,), (X * 0.1,)]),
        (enumerated_and_zipped, [(X,)]),
        (loop_with_else, [(X,), (X * 0.1,)]),
        (python_loop_left_by_tensor, [(X,), (X * 9,)]),
        (nested_loops, [(X, N), (X * 9, N)]),
        (boolean_operators, [(X,), (X * 9,), (-X,)]),
        (guarded_index, [(X, N), (X * 0.1, N)]),
        (python_conditions_stay_python, [(X,)]),
        (halves, [(X, N), (X, np.int64(0))]),
        (temporaries_may_differ, [(X,), (-X,)]),
        (loop_temporaries, [(X, N)]),
        (results_in_a_tree, [(X,), (-X,)]),
        (swapped, [(X, N), (X, np.int64(4))]),
        (inner_functions, [(X,)]),
        (through_scan, [(X,)]),
    )
}
CASES = [(name, i) for name, (_, calls) in PROGRAMS.items() for i in range(len(calls))]
